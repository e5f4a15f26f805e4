"""TLS in a simulated fleet: the client's end of a wire, and the certificates of everybody.

Keys are fixed and of Ed25519, whose signatures have one length: what is said takes as many bytes in
every play of a seed, and its content decides nothing. Must not know what frames say.
"""

from __future__ import annotations

import atexit
import datetime
import shutil
import ssl
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from syncer.config import Config
from syncer.tls import TlsFiles, context_of

HOST = "syncer.example"
LEARNERS_MAX = 5
BEGINS, ENDS = datetime.datetime(2026, 1, 1), datetime.datetime(2126, 1, 1)
CAPACITY = 16 << 10
"""A new socket has room for what a handshake says."""


class Sealed:
    """One client's end: what it says becomes records, and what comes becomes bytes again."""

    def __init__(self, context: ssl.SSLContext):
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=HOST)
        self._ready = False
        self._waits = bytearray()
        """To be said when both ends know each other."""

    def begin(self) -> bytes:
        """The first words."""
        self._shake()
        return self._out.read()

    def seal(self, data: bytes) -> bytes:
        """What to send for these bytes; nothing while the handshake is under way."""
        if not self._ready:
            self._waits += data
            return b""
        self._tls.write(data)
        return self._out.read()

    def open(self, data: bytes) -> tuple[bytes, bytes]:
        """(what has been said, what to send). Raises `ssl.SSLError`."""
        self._in.write(data)
        if not self._ready and not self._shake():
            return b"", self._out.read()
        said = bytearray()
        try:
            while True:
                said += self._tls.read(1 << 16)
        except ssl.SSLWantReadError:
            return bytes(said), self._out.read()

    def _shake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self._ready = True
        if self._waits:
            self._tls.write(self._waits)
            self._waits.clear()
        return True


class Authority:
    """Who signs, with a key of a number; its certificates are files in a directory."""

    def __init__(self, directory: Path, name: str, number: int):
        self.directory, self.number = directory, number
        self.key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        authority = x509.BasicConstraints(ca=True, path_length=None)
        self.certificate = self._sign(self.name, self.key, authority)

    def _sign(self, subject: x509.Name, key: Ed25519PrivateKey, extension: Any) -> bytes:
        return (x509.CertificateBuilder().subject_name(subject).issuer_name(self.name)
                .public_key(key.public_key()).serial_number(self.number)
                .not_valid_before(BEGINS).not_valid_after(ENDS)
                .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
                .sign(self.key, None).public_bytes(serialization.Encoding.PEM))

    def make(self, names: list[str], number: int) -> str:
        """The path of a file with key, certificate and authority."""
        key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        called = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        path = self.directory / f"{number}.pem"
        path.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                              serialization.NoEncryption())
            + self._sign(subject, key, called) + self.certificate)
        return str(path)


class Certificates:
    """Files of a server, of all its learners, of somebody who is none, and of somebody unknown."""

    def __init__(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="syncer-sim-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        ours, theirs = Authority(directory, "the fleet", 1), Authority(directory, "others", 2)
        self.server = ours.make([HOST], 3)
        self.learners = client(ours.make([f"learner-{i}" for i in range(LEARNERS_MAX)], 4))
        self.nobody = client(ours.make(["nobody"], 5))
        unknown = theirs.make(["learner-0"], 6)
        self.unknown = client(unknown, authorities=self.server)


def client(path: str, authorities: str = "") -> ssl.SSLContext:
    context = context_of(TlsFiles(path, path, authorities or path), server_side=False)
    context.set_ecdh_curve("prime256v1")          # the same greeting from every OpenSSL
    return context


@cache
def certificates() -> Certificates:
    """Of this process: made once."""
    return Certificates()


def asked_by(config: Config, seed: int) -> Config:
    """The flags of a run with TLS; some say who may be which learner."""
    path = certificates().server
    return replace(config, tls_cert=path, tls_key=path, tls_client_ca=path,
                   tls_learner_names="learner-{id}" if seed % 3 else None)
