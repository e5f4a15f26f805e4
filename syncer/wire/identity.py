"""Admission of a HELLO to a session: profile, pinned contract, equality with who came first.

Pure functions from values to a refusal text or None; must not keep the session itself.
"""

from __future__ import annotations

import hashlib

from syncer.protocol import DTYPES, RL_CONTRACT_DOMAIN
from syncer.wire.hello import Hello

UNDECLARED_GROUP = "未声明"


def rl_contract(fingerprint: bytes, identity: bytes) -> bytes:
    """Session contract of an RL island: 32 bytes from its fingerprint and its 32-byte identity."""
    return hashlib.sha256(RL_CONTRACT_DOMAIN + fingerprint + identity).digest()


def hello_refusal(
    hello: Hello,
    established: Hello | None,
    *,
    profile_hash: bytes,
    require_profile_binding: bool = False,
    expected_island_contract: bytes | None = None,
) -> str | None:
    """Text of the ERROR that answers a parsed HELLO, None if it belongs to the session.

    `established` is the HELLO that fixed the session, None while there is none.
    """
    return (
        profile_refusal(hello, profile_hash, require_profile_binding)
        or pinned_refusal(hello, expected_island_contract)
        or (None if established is None else session_refusal(established, hello))
    )


def profile_refusal(hello: Hello, profile_hash: bytes, required: bool) -> str | None:
    """A profile hash that was sent must be this syncer's own; a missing one only if required."""
    if hello.profile_hash is None:
        if not required:
            return None
        return (
            "HELLO is missing the required syncer semantic profile: expected "
            f"{profile_hash.hex()}, got none"
        )
    if hello.profile_hash == profile_hash:
        return None
    return (
        f"HELLO syncer semantic profile differs: expected {profile_hash.hex()}, "
        f"got {hello.profile_hash.hex()}"
    )


def pinned_refusal(hello: Hello, identity: bytes | None) -> str | None:
    """With a pinned island identity, the contract must be the RL contract made from it."""
    if identity is None:
        return None
    expected = rl_contract(hello.fingerprint, identity)
    if hello.contract == expected:
        return None
    return (
        f"session mismatch: expected session_contract_hash={expected.hex()} (pinned island "
        f"contract), got session_contract_hash={hello.contract.hex()}"
    )


def session_refusal(established: Hello, other: Hello) -> str | None:
    """Everything but learner, generation and num_streams must equal the session's first HELLO."""
    if (established.compat_group or "") != (other.compat_group or ""):
        ours, theirs = (h.compat_group or UNDECLARED_GROUP for h in (established, other))
        return f"session mismatch: 兼容组不同：{ours} 对 {theirs}，容差未标定"
    if _identity(established) == _identity(other):
        return None
    return f"session mismatch: expected {_described(established)}; got {_described(other)}"


def _identity(hello: Hello) -> tuple:
    return hello.dtype, hello.layout, hello.fingerprint, hello.contract, hello.profile_hash


def _described(hello: Hello) -> str:
    profile = "none" if hello.profile_hash is None else hello.profile_hash.hex()
    return (
        f"session_contract_hash={hello.contract.hex()} fingerprint={hello.fingerprint.hex()} "
        f"dtype={DTYPES[hello.dtype]} fragments={len(hello.layout.fragments)} "
        f"elements={hello.layout.numel} profile={profile}"
    )
