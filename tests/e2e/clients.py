"""A client beside its scripted server, with recorded waits and progress lines."""

import contextlib
import threading

import numpy as np

from syncer.layout import RDA, FragmentLayout, Layout
from syncer.learner.client import Client
from syncer.learner.session import Session
from syncer.protocol import DTYPE_F32

from .scripted_server import ScriptedServer

NUMEL = 40_000
LAYOUT = Layout((FragmentLayout(RDA, (NUMEL,)), FragmentLayout(RDA, (3,))))


def make_session(**options) -> Session:
    defaults = {"learner": 0, "dtype": DTYPE_F32, "num_streams": 2}
    return Session(LAYOUT, bytes(32), **defaults | options)


def values(fragment: int, fill: float) -> np.ndarray:
    return np.full(LAYOUT.fragments[fragment].numel, fill, "<f4")


class Waits:
    """Stands in for waiting between attempts: records the seconds, and may act on a wait."""

    def __init__(self):
        self.seconds: list[float] = []
        self.act = lambda: None
        self.now = 0.0

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.now += seconds
        self.act()


class Fixture:
    """A client and its server, with recorded waits and progress lines."""

    def __init__(self, server: ScriptedServer):
        self.server, self.waits, self.lines = server, Waits(), []
        self.clients: list[Client] = []

    def client(self, session: Session | None = None, **options) -> Client:
        client = Client(session or make_session(), self.server.address, pause=self.waits,
                        clock=lambda: self.waits.now, say=self.lines.append,
                        **{"jitter": lambda most_s: most_s / 2} | options)
        self.clients.append(client)
        return client

    def connected(self, session: Session | None = None, **options):
        """(started client, the server's end of it)"""
        client = self.client(session, **options)
        client.start()
        return client, self.server.accept()


CLIENT_THREADS = ("syncer-supervisor", "syncer-close", "syncer-read-", "syncer-write-")


def client_threads() -> list[str]:
    """Those of clients of this process; servers and their logs have threads, too."""
    return [t.name for t in threading.enumerate() if t.name.startswith(CLIENT_THREADS)]


def ends(sockets) -> bool:
    """Reads the sockets to their end; fails at the deadline."""
    for each in sockets:
        with contextlib.suppress(ConnectionError):
            while each.recv(65_536):
                pass
    return True
