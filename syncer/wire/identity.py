"""Who belongs to a session: the one comparison of a HELLO with what is known, and its refusals.

Pure functions from values to a refusal text or None; must not keep the session itself. In the order
of rule 14.3 to rule 14.5: what this server asks of everybody, then what a session has in common.
"""

from __future__ import annotations

from typing import NamedTuple

from syncer.layout import Layout
from syncer.protocol import DTYPES
from syncer.wire.contracts import rl_contract
from syncer.wire.encode import encode_layout
from syncer.wire.hello import Claim, Hello
from syncer.wire.layout import LayoutBytes, scan_layout

UNDECLARED_GROUP = "未声明"


class Identity(NamedTuple):
    """What all learners of a session have in common, as its first HELLO or a checkpoint states it.

    A checkpoint states no dtype, profile or compat group of a session, and these are not compared
    with it.
    """

    fingerprint: bytes
    contract: bytes
    shape: LayoutBytes | Layout | tuple[int, ...]
    """The layout, best as bytes; of a file that does not have it, the elements of each fragment."""
    dtype: int | None = None
    profile_hash: bytes | None = None
    compat_group: str = ""
    """An empty one and none at all are the same."""
    step: int | None = None
    """Of the checkpoint that states it, None for a HELLO."""

    @classmethod
    def of_hello(cls, hello: Hello | Claim) -> Identity:
        return cls(hello.fingerprint, hello.contract, hello.layout, hello.dtype,
                   hello.profile_hash, hello.compat_group or "").in_bytes()

    def in_bytes(self) -> Identity:
        """The same, so that to compare it with a HELLO takes no objects of the layout."""
        if not isinstance(self.shape, Layout):
            return self
        data, fragments = encode_layout(self.shape), len(self.shape.fragments)
        return self._replace(shape=scan_layout(data, 0, fragments))

    def limited_to(self, other: Identity) -> Identity:
        """This identity without what the other one does not state."""
        if other.step is None:
            return self
        shape = self.shape
        if isinstance(other.shape, tuple) and _sums(shape) == _sums(other.shape):
            assert isinstance(shape, LayoutBytes)  # it is a HELLO's
            shape = shape.numels()
        return Identity(self.fingerprint, self.contract, shape, step=other.step)


class Pins(NamedTuple):
    """What a syncer asks of every HELLO, whatever the session."""

    profile_hash: bytes
    """Its own semantic profile."""
    profile_required: bool = False
    """Whether a HELLO must carry it."""
    island: bytes | None = None
    """The identity that every contract must be made from, see `rl_contract`."""


def identity_refusal(
    identity: Identity | None, hello: Hello | Claim, pins: Pins
) -> str | None:
    """Text of the ERROR that answers a HELLO, None if it belongs to the session.

    identity: of the session, None while there is none. Compared in the order of wire 4.10 to 4.13.
    """
    return pins_refusal(hello, pins) or (None if identity is None else mismatch(identity, hello))


def pins_refusal(hello: Hello | Claim, pins: Pins) -> str | None:
    """Text of the ERROR for a HELLO that no session of this syncer would have."""
    return _profile_refusal(hello, pins) or _island_refusal(hello, pins.island)


# rule 14.5
def mismatch(identity: Identity, hello: Hello | Claim) -> str | None:
    """Text of the ERROR for a HELLO of another identity, None if it has this one.

    Learner, generation and num_streams are the connection's own; everything else is compared
    (wire 4.12, and 4.13 for a checkpoint).
    """
    identity = identity.in_bytes()
    found = Identity.of_hello(hello).limited_to(identity)
    if identity.compat_group != found.compat_group:
        ours, theirs = (i.compat_group or UNDECLARED_GROUP for i in (identity, found))
        return f"session mismatch: 兼容组不同：{ours} 对 {theirs}，容差未标定"
    if identity == found:
        return None
    source = "" if identity.step is None else f" (the checkpoint at step {identity.step})"
    return f"session mismatch: expected {_described(identity)}{source}; got {_described(found)}"


# rule 14.3
def _profile_refusal(hello: Hello | Claim, pins: Pins) -> str | None:
    """A profile hash that was sent must be this syncer's own; a missing one only if required."""
    if hello.profile_hash is None:
        if not pins.profile_required:
            return None
        return (
            "HELLO is missing the required syncer semantic profile: expected "
            f"{pins.profile_hash.hex()}, got none"
        )
    if hello.profile_hash == pins.profile_hash:
        return None
    return (
        f"HELLO syncer semantic profile differs: expected {pins.profile_hash.hex()}, "
        f"got {hello.profile_hash.hex()}"
    )


# rule 14.4
def _island_refusal(hello: Hello | Claim, island: bytes | None) -> str | None:
    """With a pinned island identity, the contract must be the RL contract made from it."""
    if island is None:
        return None
    expected = rl_contract(hello.fingerprint, island)
    if hello.contract == expected:
        return None
    return (
        f"session mismatch: expected session_contract_hash={expected.hex()} (pinned island "
        f"contract), got session_contract_hash={hello.contract.hex()}"
    )


def _sums(shape: LayoutBytes | Layout | tuple[int, ...]) -> tuple[int, int]:
    """Fragments and elements."""
    if isinstance(shape, LayoutBytes):
        return shape.fragments, shape.numel
    numels = [f.numel for f in shape.fragments] if isinstance(shape, Layout) else shape
    return len(numels), sum(numels)


def _described(identity: Identity) -> str:
    """What an identity states, for the ERROR."""
    fragments, elements = _sums(identity.shape)
    facts = [f"session_contract_hash={identity.contract.hex()}",
             f"fingerprint={identity.fingerprint.hex()}"]
    if identity.dtype is not None:
        facts.append(f"dtype={DTYPES[identity.dtype]}")
    facts += [f"fragments={fragments}", f"elements={elements}"]
    if identity.step is None:
        profile = identity.profile_hash
        facts.append(f"profile={'none' if profile is None else profile.hex()}")
    return " ".join(facts)
