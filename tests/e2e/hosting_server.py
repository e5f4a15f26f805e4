"""A program that has a server on one of its threads and ends when that has ended; prints the port,
then the status."""

from __future__ import annotations

import threading

from syncer.config import Config
from syncer.server.service import Server


def main() -> None:
    server = Server(Config(learners=1, total_steps=2, port=0))
    print(server.address[1], flush=True)
    thread = threading.Thread(target=server.run)
    thread.start()
    input()
    server.stop()
    thread.join()
    print(server.status)


if __name__ == "__main__":
    main()
