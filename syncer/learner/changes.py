"""Broadcasts that come as changes of those before: what they change, and which of them wait for it.

A change is a broadcast in fewer bytes: whoever has its base makes the same tensor of it (wire 20),
and everything else takes that as if it had come whole. On several sockets it can overtake its base,
so it waits. Must not decide what is news: the session does.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from syncer.kernels import apply_change, sha256
from syncer.learner.failures import TurnedAway
from syncer.wire.messages import Bcast, BcastChange
from syncer.wire.payload import space


class LateDigest:
    """SHA-256 of bytes that are kept anyway, made when it is asked for: what a change makes is
    hashed only where the same version comes again. It is equal to the digest that it is."""

    __slots__ = ("_found", "_tensor")

    def __init__(self, tensor: memoryview):
        self._tensor: memoryview | None = tensor
        self._found = b""

    def __bytes__(self) -> bytes:
        if self._tensor is not None:
            self._found, self._tensor = sha256(self._tensor), None
        return self._found

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, bytes | LateDigest)
                                 and bytes(self) == bytes(other))

    __hash__ = None  # type: ignore[assignment]


Digest: TypeAlias = bytes | LateDigest
"""SHA-256 of a tensor."""


class Base(NamedTuple):
    """The newest broadcast of a fragment."""

    version: int
    tensor: memoryview


class Rebuilt(NamedTuple):
    """A change and the tensor that it changes."""

    tensor: memoryview
    change: BcastChange

    def broadcast(self, dtype: int) -> Bcast:
        """What a BCAST_FRAGMENT would have brought. dtype: bulk dtype. Pure, and long."""
        tensor = space(self.tensor.nbytes)
        apply_change(dtype, self.tensor, self.change.delta, tensor)
        return Bcast(self.change.fragment, self.change.version, tensor.toreadonly())


class Changes:
    """Of all fragments of one learner, over all its connections. Calls are serialised."""

    def __init__(self, fragments: int):
        self._bases: list[Base | None] = [None] * fragments
        self._waiting: list[dict[int, BcastChange]] = [{} for _ in range(fragments)]
        """By the version that they change."""
        self._waiting_bytes = 0

    def begin(self) -> None:
        """A new connection: what the old one has brought in part will not be completed."""
        for waiting in self._waiting:
            waiting.clear()
        self._waiting_bytes = 0

    def keep(self, bcast: Bcast) -> None:
        """It is the newest of its fragment; what changes something older has no use any more."""
        self._bases[bcast.fragment] = Base(bcast.version, bcast.tensor)
        waiting = self._waiting[bcast.fragment]
        for base in [base for base, change in waiting.items() if change.version <= bcast.version]:
            self._waiting_bytes -= len(waiting.pop(base).delta)

    def forget(self, fragment: int) -> None:
        """It is none of this run."""
        self._bases[fragment] = None

    def forget_all(self) -> None:
        """Nothing will be a change of what is here."""
        self._bases = [None] * len(self._bases)

    def put(self, change: BcastChange, seen: int | None, bytes_max: int) -> None:
        """It waits for `take`; one that is late is dropped.

        seen: version of the fragment that this connection has brought, or None. Raises `TurnedAway`
        when it can never be taken, and when more bytes wait than `bytes_max`.
        """
        waiting, base = self._waiting[change.fragment], self._bases[change.fragment]
        if change.base in waiting or (seen is not None and seen >= change.version):
            return
        if seen is not None and seen >= change.base and (
                base is None or base.version != change.base):
            raise TurnedAway(
                f"BCAST_CHANGE makes version {change.version} of fragment {change.fragment} of "
                f"version {change.base}, and this learner "
                + (f"has no bytes of version {seen}" if seen == change.base else
                   f"is at version {seen}"))
        if self._waiting_bytes + len(change.delta) > bytes_max:
            raise TurnedAway(
                f"{self._waiting_bytes} bytes of changes wait for what they change; the next one "
                f"is BCAST_CHANGE of version {change.base} of fragment {change.fragment}")
        self._waiting_bytes += len(change.delta)
        waiting[change.base] = change

    def take(self, fragment: int) -> Rebuilt | None:
        """The change of the newest broadcast of this fragment, if it is here: once."""
        base = self._bases[fragment]
        change = None if base is None else self._waiting[fragment].pop(base.version, None)
        if base is None or change is None:
            return None
        self._waiting_bytes -= len(change.delta)
        return Rebuilt(base.tensor, change)
