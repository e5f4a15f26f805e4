"""Certificates for tests, made on the spot; who needs them is skipped without `cryptography`."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest

cryptography = pytest.importorskip(
    "cryptography", reason="certificates are made with cryptography: pip install '.[tls]'")

from cryptography import x509  # noqa: E402
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from cryptography.x509.oid import NameOID  # noqa: E402

DAY = datetime.timedelta(days=1)


class Authority:
    """A CA of its own in a directory; its certificates are files of key, certificate and CA."""

    def __init__(self, directory: Path, name: str = "tests"):
        self.directory = directory
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self.name, self.key, [
            (x509.BasicConstraints(ca=True, path_length=None), True)], 3650)
        self.file = directory / f"{name}-ca.pem"
        self.file.write_bytes(self._pem(self.certificate))

    def _sign(self, subject, key, extensions, days):
        now = datetime.datetime.now(datetime.UTC)
        builder = (x509.CertificateBuilder().subject_name(subject).issuer_name(self.name)
                   .public_key(key.public_key()).serial_number(x509.random_serial_number())
                   .not_valid_before(now - 400 * DAY).not_valid_after(now + days * DAY))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self.key, hashes.SHA256())

    @staticmethod
    def _pem(certificate) -> bytes:
        return certificate.public_bytes(serialization.Encoding.PEM)

    def make(self, name: str, *, days: float = 365, file: str = "") -> Path:
        """A certificate for either side, of a host on loopback."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([
            x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(host))
                                         for host in ("127.0.0.1", "::1"))])
        path = self.directory / (file or f"{name}.pem")
        path.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                              serialization.NoEncryption())
            + self._pem(self._sign(subject, key, [(names, False)], days))
            + self._pem(self.certificate))
        return path

    def flags(self, path: Path) -> dict[str, str]:
        """Settings of a server with this certificate."""
        return {"tls_cert": str(path), "tls_key": str(path), "tls_client_ca": str(self.file)}
