"""A fleet on one machine in one command: a server, and islands of examples/torch_gpt.py.

    python examples/torch_fleet.py [ISLANDS [OUTER_STEPS]]

It ends by itself; Ctrl-C ends all of it. The server listens on a socket file, so no port is taken.
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ISLAND = Path(__file__).with_name("torch_gpt.py")
GRACE_S = 10


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Whatever is put in the list is gone afterwards."""
    found: list[subprocess.Popen[bytes]] = []
    try:
        yield found
    finally:
        for each in found:
            each.terminate()
        for each in found:
            try:
                each.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()


def main() -> int:
    numbers = sys.argv[1:]
    if len(numbers) > 2 or not all(each.isdigit() and int(each) for each in numbers):
        sys.exit(__doc__)
    count, steps = [*map(int, numbers), *[2, 120][len(numbers):]]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    with tempfile.TemporaryDirectory() as folder, processes() as fleet:
        address = f"unix:{folder}/server"
        commands = [
            [sys.executable, "-m", "syncer.server", "--run", "bytes", "--listen", address,
             "--port", "0", "--learners", str(count), "--total-steps", str(steps),
             "--sync-interval-steps", "20", "--preset", "local", "--log-level", "warning"],
            *([sys.executable, str(ISLAND), str(island), address] for island in range(count))]
        for command in commands:  # in sessions of their own: Ctrl-C is for this process alone
            fleet.append(subprocess.Popen(command, start_new_session=True))
        while any(each.poll() is None for each in fleet) and not any(each.poll() for each in fleet):
            time.sleep(0.1)
        return max(abs(each.poll() or 0) for each in fleet)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
