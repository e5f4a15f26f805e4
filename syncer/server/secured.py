"""TLS at the server's door: the certificate, who may be which learner by his, and when they expire.

Must not decide anything of a run. The files are read at the start and again on SIGHUP; connections
that are there go on with what they began with. A learner's id is worth as much as the certificate
behind it (rule 17.8).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from syncer.config import Config
from syncer.errors import ConfigError
from syncer.server.conn import Channel
from syncer.server.log import Log
from syncer.server.loop import Loop
from syncer.tls import (
    A_DAY_S,
    AT_ONCE,
    WARN_DAYS,
    Stream,
    TlsFiles,
    TlsSocket,
    context_of,
    expiry_of,
)
from syncer.values import names_of_learners

LOOK_AGAIN_NS = A_DAY_S * 10**9


class Secured:
    """What `--tls-cert` and its like ask for. Raises `ConfigError` for files that cannot be used.

    wall: seconds since 1970, by which certificates expire.
    """

    def __init__(self, files: TlsFiles, config: Config, loop: Loop, log: Log,
                 wall: Callable[[], float] = time.time):
        self.files, self.loop, self.log, self.wall = files, loop, log, wall
        self.context = context_of(files, server_side=True)
        self.room = memoryview(bytearray(AT_ONCE))
        self.name_pattern = config.tls_learner_names or ""
        self.names = names_of_learners(self.name_pattern)
        self.look()

    def look(self) -> None:
        """Once a day: whether a certificate of this side is about to expire."""
        for path in dict.fromkeys((self.files.certificate, self.files.authorities)):
            self.tell_expiry(expiry_of(path), path)
        self.timer = self.loop.call_at(self.loop.now_ns() + LOOK_AGAIN_NS, self.look)

    def tell_expiry(self, expires: float, whose: str) -> None:
        """A WARN from `WARN_DAYS` before on."""
        days = int((expires - self.wall()) // A_DAY_S)
        if days < WARN_DAYS:
            self.log.warning("a certificate expires soon", certificate=whose, days=days,
                             next="put a new one in its place, and send SIGHUP to the server if it "
                                  "is the server's: without one no connection is made")

    def reload(self) -> None:
        """The files are read again; what cannot be used changes nothing."""
        if not self.timer.active:
            return  # the server says goodbye
        try:
            self.context = context_of(self.files, server_side=True)
        except ConfigError as error:
            self.log.error("the certificates could not be read again: the old ones stay",
                           error=str(error))
            return
        self.log.info("the certificates were read again", certificate=self.files.certificate)
        self.timer.cancel()
        self.look()

    def wrap(self, sock: socket.socket) -> Stream:
        """TLS on a new connection; a Unix socket has its file's mode in its place."""
        if sock.family == socket.AF_UNIX:
            return sock
        return TlsSocket(sock, self.context, room=self.room)

    def name_of(self, learner: int) -> str | None:
        """What the certificate of this learner must be called; None: none will do."""
        if "{id}" in self.name_pattern:
            return self.name_pattern.replace("{id}", str(learner))
        return self.names.get(learner)

    # rule 17.8
    def refusal(self, channel: Channel, learner: int) -> str | None:
        """Why this connection cannot be that of the learner, or None."""
        if not isinstance(channel.sock, TlsSocket):
            return None
        shown = channel.sock.certificate()
        self.tell_expiry(shown.expires, f"of learner {learner}")
        if not self.name_pattern or (name := self.name_of(learner)) in shown.names:
            return None
        called = " and ".join(sorted(shown.names)) or "nothing"
        wanted = "has no certificate here" if name is None else f"has one that is called {name}"
        return (f"learner {learner} {wanted} (--tls-learner-names), and the certificate of this "
                f"connection is called {called}: use the certificate that belongs to the id")

    def close(self) -> None:
        self.timer.cancel()


def same_certificate(one: Channel, other: Channel) -> bool:
    """Whether two connections have shown the same, or none."""
    shown = [channel.sock.certificate().der if isinstance(channel.sock, TlsSocket) else b""
             for channel in (one, other)]
    return shown[0] == shown[1]


def failure_of(channel: Channel) -> str:
    """Why there is no TLS on a connection, '' if there is, or needs none."""
    return channel.sock.failure if isinstance(channel.sock, TlsSocket) else ""


def is_plain(channel: Channel) -> bool:
    """Whether its peer speaks no TLS where it should: it is answered so that it understands."""
    return isinstance(channel.sock, TlsSocket) and channel.sock.is_plain


def secured(config: Config, loop: Loop, log: Log) -> Secured | None:
    """What the flags ask for."""
    if not (config.tls_cert and config.tls_key and config.tls_client_ca):
        return None
    return Secured(TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca), config, loop,
                   log)
