"""Who belongs to a session: the one comparison of a HELLO with what is known, and its refusals.

Pure functions from values to a refusal text or None; must not keep the session itself. In the order
of rule 14.3 to rule 14.5: what this server asks of everybody, then what a session has in common.

The name of a run is in its contract, so that nobody compares names: two runs differ in their
contracts, whoever knows that they have names. A refusal says them, as far as they are known, and
somebody who has lost his way ends no run but his own (rule 17.7).
"""

from __future__ import annotations

from typing import NamedTuple

from syncer.layout import Layout
from syncer.protocol import DTYPES
from syncer.wire.contracts import rl_contract, run_contract
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
    run: str | None = None
    """The name in its contract, "" if there is none; None: not known. It is not compared."""

    @classmethod
    def of_hello(cls, hello: Hello | Claim) -> Identity:
        return cls(hello.fingerprint, hello.contract, hello.layout, hello.dtype,
                   hello.profile_hash, hello.compat_group or "", run=run_of(hello)).in_bytes()

    def of_run(self, name: str) -> Identity:
        """The same, of the run that is known to have this name; of "" nothing is known."""
        if name:
            return self._replace(run=name)
        return self._replace(run="") if self.contract == self.fingerprint else self

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
        return Identity(self.fingerprint, self.contract, shape, step=other.step, run=self.run)


class Pins(NamedTuple):
    """What a syncer asks of every HELLO, whatever the session."""

    profile_hash: bytes
    """Its own semantic profile."""
    profile_required: bool = False
    """Whether a HELLO must carry it."""
    island: bytes | None = None
    """The identity that every contract must be made from, see `rl_contract`."""
    run: str | None = None
    """The name that every contract must be made with, see `run_contract`."""
    known_run: str | None = None
    """The name that the run has by its checkpoint or its first learner: who says none, as learners
    of protocol 4 do, is taken to mean it."""


def identity_refusal(
    identity: Identity | None, hello: Hello | Claim, pins: Pins
) -> str | None:
    """Text of the ERROR that answers a HELLO, None if it belongs to the session.

    identity: of the session, None while there is none. Compared in the order of wire 4.10 to 4.13.
    """
    return pins_refusal(hello, pins) or (None if identity is None else mismatch(identity, hello))


def pins_refusal(hello: Hello | Claim, pins: Pins) -> str | None:
    """Text of the ERROR for a HELLO that no session of this syncer would have."""
    return _profile_refusal(hello, pins) or _contract_refusal(hello, pins)


def run_of(hello: Hello | Claim) -> str | None:
    """The name of the run that a HELLO is meant for, "" for one without a name, None if it does
    not say."""
    if hello.extension is not None and hello.extension.run is not None:
        return hello.extension.run.name
    return "" if hello.contract == hello.fingerprint else None


# rule 17.7
def is_of_another_run(identity: Identity, hello: Hello | Claim) -> bool:
    """Whether one of both has a name, and the other one another name or none."""
    found = run_of(hello)
    if found is None and identity.run and (
            run_contract(hello.fingerprint, identity.run) == hello.contract):
        found = identity.run
    return bool(identity.run or found) and identity.run != found


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
    if identity._replace(run=None) == found._replace(run=None):
        return None
    source = "" if identity.step is None else f" (the checkpoint at step {identity.step})"
    named = bool(identity.run or found.run)
    return (f"session mismatch: expected {_described(identity, named)}{source}; got "
            f"{_described(found, named)}")


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
def _contract_refusal(hello: Hello | Claim, pins: Pins) -> str | None:
    """The contract must be made from the pinned island and with the pinned name."""
    if pins.island is None and pins.run is None:
        return None
    claim = None if hello.extension is None else hello.extension.run
    if pins.island is not None:
        base = rl_contract(hello.fingerprint, pins.island)
    else:
        base = hello.fingerprint if claim is None else claim.base
    name = pins.run or (pins.known_run or None if claim is None else claim.name)
    expected = base if name is None else run_contract(base, name)
    if hello.contract == expected:
        return None
    pinned = "" if pins.island is None else " (pinned island contract)"
    return (f"session mismatch: expected {_contract(expected, name)}{pinned}, got "
            f"{_contract(hello.contract, None if name is None else run_of(hello))}")


def _contract(contract: bytes, run: str | None) -> str:
    """A contract, and its run if that is known."""
    return f"session_contract_hash={contract.hex()}" + (
        "" if run is None else f" (run {run})" if run else " (no run)")


def _sums(shape: LayoutBytes | Layout | tuple[int, ...]) -> tuple[int, int]:
    """Fragments and elements."""
    if isinstance(shape, LayoutBytes):
        return shape.fragments, shape.numel
    numels = [f.numel for f in shape.fragments] if isinstance(shape, Layout) else shape
    return len(numels), sum(numels)


def _described(identity: Identity, named: bool) -> str:
    """What an identity states, for the ERROR; named: its run as well, as far as that is known."""
    fragments, elements = _sums(identity.shape)
    facts = [_contract(identity.contract, identity.run if named else None),
             f"fingerprint={identity.fingerprint.hex()}"]
    if identity.dtype is not None:
        facts.append(f"dtype={DTYPES[identity.dtype]}")
    facts += [f"fragments={fragments}", f"elements={elements}"]
    if identity.step is None:
        profile = identity.profile_hash
        facts.append(f"profile={'none' if profile is None else profile.hex()}")
    return " ".join(facts)
