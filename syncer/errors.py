"""Typed errors of every room; each message says what, where, expected and found.

This module must not import anything of the package: all rooms depend on it.
"""

from __future__ import annotations


class SyncerError(Exception):
    """Base of every error the package raises on purpose."""


class ConfigError(SyncerError):
    """A flag, environment variable or configuration file holds a value that cannot be used."""


class ProtocolError(SyncerError):
    """The wire protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This side asked for a message that the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that the protocol does not allow; only its connection ends."""


class NoMemory(RemoteProtocolError):
    """There is no memory for a message of the peer at the moment: an outage of its connection."""


class NumericsError(SyncerError):
    """A value is not finite, or a merge cannot be computed."""


class KernelError(SyncerError):
    """A kernel variant is unknown, unsupported by this CPU, or gives wrong results."""


class InvariantViolation(SyncerError):
    """The scheduler reached a state that its rules forbid: a defect of this program."""


class CheckpointError(SyncerError):
    """A checkpoint cannot be written, read or used."""


class CheckpointFormatError(CheckpointError):
    """The bytes are not a complete checkpoint; the message names the field and its offset."""


class CheckpointMismatch(CheckpointError):
    """A valid checkpoint that does not belong to this run; says what was expected and found."""
