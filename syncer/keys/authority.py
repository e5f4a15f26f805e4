"""An authority in a directory, and the certificates that it signs; must not print anything.

`ca.pem` is what both sides trust, `ca-key.pem` what signs: whoever has that is the fleet. Any other
file is key, certificate and authority of one party in one, which is all that it needs. Keys are on
the curve P-256. A server's certificate makes no learner, and a learner's no server.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from syncer.errors import ConfigError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise ConfigError("syncer keys needs the package cryptography: "
                      "pip install 'diloco-syncer[tls]'") from None

CA, CA_KEY, SERVER = "ca.pem", "ca-key.pem", "server.pem"
CA_DAYS = 3650
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
EARLIER = datetime.timedelta(hours=1)
"""Certificates hold from so long ago, for clocks that are behind."""
PEM = serialization.Encoding.PEM


class Shown(NamedTuple):
    """What a file has, for people."""

    names: tuple[str, ...]
    role: str
    signed_by: str
    until: datetime.datetime
    has_key: bool


class Authority:
    """In `directory`. Raises `ConfigError` with one sentence."""

    def __init__(self, directory: str):
        self.directory = Path(directory)
        try:
            key = serialization.load_pem_private_key(
                (self.directory / CA_KEY).read_bytes(), None)
            self.certificate = x509.load_pem_x509_certificate((self.directory / CA).read_bytes())
        except (OSError, ValueError, TypeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no PEM without a password"
            raise ConfigError(f"{directory} has no authority that can be used ({CA}, {CA_KEY}: "
                              f"{why}); make one with: syncer keys init {directory}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{self.directory / CA_KEY} was not made by syncer keys init")
        self.key = key

    @classmethod
    def make(cls, directory: str) -> Authority:
        """A new one, in a directory that has none."""
        place = Path(directory)
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be made: {error.strerror}") from None
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"syncer fleet {place.resolve().name}"[:64])
        certificate = _signed(
            name, name, key, key, CA_DAYS,
            x509.BasicConstraints(ca=True, path_length=0),
            x509.KeyUsage(digital_signature=False, content_commitment=False,
                          key_encipherment=False, data_encipherment=False, key_agreement=False,
                          key_cert_sign=True, crl_sign=True, encipher_only=False,
                          decipher_only=False))
        write_new(place / CA_KEY, _key_text(key), 0o600)
        write_new(place / CA, certificate.public_bytes(PEM), 0o644)
        return cls(directory)

    def server(self, hosts: Sequence[str], days: int) -> Path:
        """`server.pem`, for these names and addresses, and for this machine by itself."""
        return self._party(SERVER, hosts[0], (*hosts, *OWN_HOSTS), days,
                           ExtendedKeyUsageOID.SERVER_AUTH)

    def learner(self, name: str, days: int) -> Path:
        """`NAME.pem`, for a learner or a reader."""
        if not NAME.fullmatch(name) or f"{name}.pem" in (CA, CA_KEY, SERVER):
            raise ConfigError(f"{name!r} is no name for a certificate: give 1 to 64 of A-Z a-z 0-9 "
                              ". _ -, for example learner-0")
        return self._party(f"{name}.pem", name, (name,), days, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _party(self, file: str, name: str, others: Sequence[str], days: int,
               use: x509.ObjectIdentifier) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(
            _name(name[:64]), self.certificate.subject, key, self.key, days,
            x509.SubjectAlternativeName([_general(other) for other in dict.fromkeys(others)]),
            x509.ExtendedKeyUsage([use]), x509.BasicConstraints(ca=False, path_length=None))
        path = self.directory / file
        write_new(path, _key_text(key) + certificate.public_bytes(PEM)
                  + self.certificate.public_bytes(PEM), 0o600)
        return path


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(text: str) -> x509.GeneralName:
    """The name of a host, or its address."""
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text.encode("idna").decode("ascii"))
    except (UnicodeError, ValueError):
        raise ConfigError(f"{text!r} is neither a name nor an address of a host") from None


def _signed(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey,
            signer: ec.EllipticCurvePrivateKey, days: int,
            *extensions: x509.ExtensionType) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
               .public_key(key.public_key()).serial_number(x509.random_serial_number())
               .not_valid_before(now - EARLIER)
               .not_valid_after(now + datetime.timedelta(days=days))
               .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
               .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(
                   signer.public_key()), False))
    for extension in extensions:
        builder = builder.add_extension(
            extension, critical=isinstance(extension, x509.BasicConstraints | x509.KeyUsage))
    return builder.sign(signer, hashes.SHA256())


def _key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def write_new(path: Path, data: bytes, mode: int) -> None:
    """A file that was not there. Raises `ConfigError`: a key that is in use is not replaced."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise ConfigError(f"{path} is there already and stays: remove it first if it is to be made "
                          "anew, or name another directory") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    with open(descriptor, "wb") as file:
        file.write(data)


def show(path: str) -> Shown:
    """What the first certificate of a file says. Raises `ConfigError`."""
    try:
        data = Path(path).read_bytes()
        certificate = x509.load_pem_x509_certificates(data)[0]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} has no certificate in PEM") from None
    names = [str(attribute.value) for attribute in
             certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    role = "either side"
    for extension in certificate.extensions:
        value = extension.value
        if isinstance(value, x509.SubjectAlternativeName):
            names += [str(name.value) for name in value]
        elif isinstance(value, x509.BasicConstraints) and value.ca:
            role = "an authority"
        elif isinstance(value, x509.ExtendedKeyUsage):
            uses = {ExtendedKeyUsageOID.SERVER_AUTH: "a server",
                    ExtendedKeyUsageOID.CLIENT_AUTH: "a learner or reader"}
            role = " and ".join(uses[use] for use in value if use in uses) or "other uses"
    return Shown(tuple(dict.fromkeys(names)), role,
                 ", ".join(str(attribute.value) for attribute in certificate.issuer),
                 certificate.not_valid_after_utc, b"PRIVATE KEY-----" in data)
