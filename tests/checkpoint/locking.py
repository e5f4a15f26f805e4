"""A file system whose locks fail, for the tests of locks. Must not lock anything itself."""

import fcntl
import os

from syncer.checkpoint import lock


def flock_fails(monkeypatch, number, times=99):
    """`flock` fails so many times with this error."""
    left = [times]
    real = fcntl.flock

    def flock(descriptor, operation):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(lock, "RETRY_PAUSE_S", 0.0)
