"""TLS 1.3 between a socket and whoever reads and writes it, for both ends; must not dial or listen.

Both sides show a certificate. Bytes are encrypted in memory (`ssl.MemoryBIO`), 256 KiB at a time:
whoever waits for the socket waits for the kernel's and for nothing else, the loop of a server,
which must never block, as well as the two threads of a learner's socket, which share one TLS state
and must not wait for each other. An end without `close_notify` is an end: frames have a length, and
a run has a last message of its own.
"""

from __future__ import annotations

import calendar
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from syncer.errors import ConfigError

AT_ONCE = 256 * 1024
"""Bytes that are encrypted, or taken from the kernel, in one go."""
RECORD = 16 * 1024
"""Most of one TLS record: smaller buffers are joined up to it, so that a frame is not two."""
HANDSHAKE_BYTES_MAX = 64 * 1024
"""Of a peer that has shown no certificate; a chain of some certificates has 4 KiB."""
HANDSHAKE_AT_ONCE = 16 * 1024
"""Of those: what comes behind a handshake is not taken for a part of it."""
ANSWERS_BYTES_MAX = 64 * 1024
"""What TLS itself has to say and waits to go out with the next bytes."""
WARN_DAYS = 30
"""Before a certificate expires it is told of."""
A_DAY_S = 86_400
HANDSHAKE, ALERT = 0x16, 0x15
"""First bytes of TLS; a frame begins with another one."""

PLAIN_DIALED = ("this syncer speaks TLS alone, and this connection is plain: give the learner a "
                "certificate (tls=, syncer pull --tls)")
PLAIN_ANSWERED = ("the other end speaks plain TCP, and this connection is TLS: start the server "
                  "with --tls-cert, --tls-key and --tls-client-ca, or leave tls out")
SENTENCES = {
    "CERTIFICATE_VERIFY_FAILED": "the certificate of the other end is not accepted",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the other end has shown no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other end wants a certificate of this one",
    "TLSV1_ALERT_UNKNOWN_CA": "the other end does not know who has signed this one's certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "the other end does not accept this one's certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other end does not accept this one's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this end's certificate has expired",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "this end's certificate is not made for this side",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other end speaks no TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "the other end speaks no TLS 1.3",
    "WRONG_VERSION_NUMBER": "the other end sends what is no TLS",
}
"""OpenSSL's reasons that an operator can do something about."""


class TlsError(ConnectionError):
    """The two ends cannot come to terms, or what came is damaged; one sentence."""

    def __init__(self, text: str):
        super().__init__(errno.EPROTO, text)
        self.text = text


TlsPaths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class TlsFiles(NamedTuple):
    """Paths of PEM files; one file may be all three."""

    certificate: str
    key: str
    authorities: str
    """Who signs what the other end shows."""

    @classmethod
    def of(cls, given: TlsPaths) -> TlsFiles:
        """One path for all, or (certificate, key, authorities). Raises `ConfigError`."""
        if isinstance(given, str | os.PathLike):
            return cls(*3 * (os.fspath(given),))
        if len(given) != 3:
            raise ConfigError("tls must be one PEM file, or three: certificate, key, and the "
                              f"certificates of who signs the server's; found {len(given)}")
        return cls(*(os.fspath(path) for path in given))


def context_of(files: TlsFiles, *, server_side: bool) -> ssl.SSLContext:
    """TLS 1.3 with these files. Raises `ConfigError`."""
    kind = ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        context.num_tickets = 0  # nobody takes a session up again
    own = True
    try:
        # The password that it would ask for on the terminal is none.
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")
        own = False
        context.load_verify_locations(files.authorities)
    except OSError as error:
        raise ConfigError(_unusable(files, own, error)) from None
    return context


def _unusable(files: TlsFiles, own: bool, error: OSError) -> str:
    shown = files.certificate if own else files.authorities
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"the key in {files.key} is not that of the certificate in {files.certificate}"
        what = "a certificate with its key" if own else "certificates"
        return (f"{shown} cannot be used for TLS: expected {what} in PEM, without a password "
                f"({(error.reason or 'no PEM').lower().replace('_', ' ')})")
    shown = next((path for path in files if not os.access(path, os.R_OK)), shown)
    return f"{shown} cannot be read for TLS: {error.strerror}"


class Certificate(NamedTuple):
    """What a certificate says."""

    der: bytes
    names: frozenset[str]
    """Its common name, and what it may also be called."""
    expires: float
    """Seconds since 1970."""


def expiry_of(path: str) -> float:
    """When the first certificate of a PEM file expires. Raises `ConfigError`."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read()
        first = text[text.index(ssl.PEM_HEADER):]
        first = first[:first.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
        return _not_after(ssl.PEM_cert_to_DER_cert(first))
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} has no certificate that can be read: {error}") from None


def _not_after(der: bytes) -> float:
    """Of a certificate in DER (RFC 5280, 4.1). Raises ValueError or IndexError."""
    def value(at: int) -> tuple[int, int, int]:
        """(tag, begin, end) of the value at a place."""
        size, begin = der[at + 1], at + 2
        if size & 0x80:
            begin += size & 0x7F
            size = int.from_bytes(der[at + 2 : begin], "big")
        return der[at], begin, begin + size

    at = value(value(0)[1])[1]                    # into Certificate, into TBSCertificate
    if der[at] == 0xA0:                           # its version, which may be left out
        at = value(at)[2]
    for _ in range(3):                            # serial number, algorithm, issuer
        at = value(at)[2]
    at = value(value(at)[1])[2]                   # validity: behind notBefore
    tag, begin, end = value(at)
    text = der[begin:end].decode("ascii")
    if tag == 0x17:                               # UTCTime has two digits of a year
        text = ("19" if text[:2] >= "50" else "20") + text
    return calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ"))


class TlsSocket:
    """A connected socket with TLS on it, blocking or not as that socket is.

    One thread may read while another one writes. name: of the server, whose certificate must have
    it; None at the server's end. room: where bytes of the kernel are put, if all sockets of a
    thread share it. Every method raises OSError, and `TlsError` with a sentence.

    A write is said to be done when all that it became is with the kernel; until then `owed` bytes
    of what is given again are not looked at. `more`: a read has left bytes of which the kernel
    does not know.

    Large: it stands for a socket, whose calls it has.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, name: str | None = None,
                 room: memoryview | None = None):
        self.sock = sock
        self.is_server = name is None
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=self.is_server,
                                     server_hostname=name)
        self._room = memoryview(bytearray(AT_ONCE)) if room is None else room
        self._lock = threading.Lock()
        self._unsent = memoryview(b"")
        self._came = 0
        self.owed = 0
        self.more = False
        self.ready = False
        """Whether both ends know each other."""
        self.is_plain = False
        """The peer speaks no TLS: from now on nobody does."""
        self.failure = ""
        """Why there is no TLS with this peer."""

    # ------------------------------------------------------------------------------- handshake
    def handshake(self, timeout_s: float) -> None:
        """For a socket that blocks: come to terms within so many seconds."""
        until = time.monotonic() + timeout_s
        while not self._shake():
            self.sock.settimeout(max(until - time.monotonic(), 0.001))
            if not self._receive():
                raise ConnectionResetError(errno.ECONNRESET, "closed by the other end before TLS "
                                           "was agreed on")

    def _shake(self) -> bool:
        """Whether both are through; what is to be said was said."""
        try:
            self._tls.do_handshake()
            self.ready = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise self._failed(error) from None
        self._say()
        return self.ready

    def _say(self) -> None:
        """Of the handshake: some hundred bytes, for which a new socket has room."""
        self._unsent = memoryview(bytes(self._unsent) + self._out.read())
        try:
            self._flush()
        except BlockingIOError:
            raise TlsError("the other end does not read what TLS says to it") from None

    def _failed(self, error: ssl.SSLError) -> TlsError:
        """What to raise; the peer hears of it, if it listens."""
        with suppress(OSError):
            self._say()
        reason = error.reason or ""
        text = SENTENCES.get(reason, f"TLS has failed: {reason.lower().replace('_', ' ') or error}")
        if isinstance(error, ssl.SSLCertVerificationError):
            text += f": {error.verify_message}"
        self.failure = text
        return TlsError(text)

    def certificate(self) -> Certificate:
        """What the other end has shown; once it is `ready`."""
        found: dict[str, Any] = self._tls.getpeercert() or {}
        names = {value for part in found.get("subject", ()) for key, value in part
                 if key == "commonName"}
        names |= {value for _, value in found.get("subjectAltName", ())}
        return Certificate(self._tls.getpeercert(binary_form=True) or b"", frozenset(names),
                           ssl.cert_time_to_seconds(found["notAfter"]))

    # --------------------------------------------------------------------------------- reading
    def _receive(self) -> bool:
        """Bytes from the kernel; False at their end."""
        if not self.ready and self._came >= HANDSHAKE_BYTES_MAX:
            self.failure = f"{self._came} bytes came, and TLS is not agreed on"
            raise TlsError(self.failure)
        count = self.sock.recv_into(self._room if self.ready else self._room[:HANDSHAKE_AT_ONCE])
        if count and not self._came:
            self._look(self._room[0])
        self._came += count
        with self._lock:
            if count:
                self._in.write(self._room[:count])
            else:
                self._in.write_eof()
        return count > 0

    def _look(self, first: int) -> None:
        if first in (HANDSHAKE, ALERT):
            return
        self.is_plain = self.is_server
        self.failure = PLAIN_DIALED if self.is_server else PLAIN_ANSWERED
        raise TlsError(self.failure)

    def recv_into(self, buffer: memoryview) -> int:
        """As of a socket: 0 at the end; else as much as is there, one byte at least."""
        if self.is_plain:
            return self.sock.recv_into(buffer)
        while not self.ready and not self._shake():
            if not self._receive():
                return 0
        filled, wanted = 0, len(buffer)
        self.more = False
        while filled < wanted:
            try:
                with self._lock:
                    count = self._tls.read(wanted - filled, buffer[filled:])
            except ssl.SSLWantReadError:
                if filled:
                    return filled
                if self._out.pending > ANSWERS_BYTES_MAX:
                    raise TlsError("the other end changes its keys all the time") from None
                self._receive()
                continue
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return filled
            except ssl.SSLError as error:
                raise self._failed(error) from None
            if not count:
                return filled
            filled += int(count)
        self.more = True
        return filled

    # --------------------------------------------------------------------------------- writing
    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """As of a socket: how many bytes of these are with the kernel."""
        if self.is_plain:
            return self.sock.sendmsg(buffers)
        if not self.ready:
            raise TlsError("nothing can be said before TLS is agreed on")
        self._flush()
        if not self.owed:
            with self._lock:
                for piece in pieces(buffers, AT_ONCE):
                    self.owed += self._tls.write(piece)
                self._unsent = memoryview(self._out.read())
            self._flush()
        count, self.owed = self.owed, 0
        return count

    def _flush(self) -> None:
        while self._unsent:
            self._unsent = self._unsent[self.sock.send(self._unsent):]

    def sendall(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.sendmsg([rest]):]

    # ------------------------------------------------------------------------ of the socket below
    def fileno(self) -> int:
        return self.sock.fileno()

    def settimeout(self, seconds: float | None) -> None:
        self.sock.settimeout(seconds)

    def getsockname(self) -> Any:
        return self.sock.getsockname()

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        return self.sock.getsockopt(level, name, size)

    def shutdown(self, how: int) -> None:
        self.sock.shutdown(how)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> TlsSocket:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


Stream: TypeAlias = socket.socket | TlsSocket
"""A connected socket, with TLS or without."""


def pieces(buffers: Sequence[bytes | memoryview], most: int) -> Iterator[bytes | memoryview]:
    """The first `most` bytes of a gather list, in pieces that make full records where they can."""
    small: list[bytes | memoryview] = []
    held = 0
    for each in buffers:
        buffer = memoryview(each)
        while buffer and most:
            part = buffer[: min(most, RECORD - held if held else most)]
            buffer = buffer[len(part):]
            most -= len(part)
            small.append(part)
            held += len(part)
            if held >= RECORD or not most:
                yield small[0] if len(small) == 1 else b"".join(small)
                small, held = [], 0
        if not most:
            return
    if small:
        yield small[0] if len(small) == 1 else b"".join(small)
