"""What session contracts are made from; must not compare one with another (identity.py does)."""

from __future__ import annotations

import hashlib
import re

from syncer.protocol import RL_CONTRACT_DOMAIN, RUN_CONTRACT_DOMAIN, RUN_NAME


def is_run_name(name: str) -> bool:
    """Whether a run can be called so."""
    return re.fullmatch(RUN_NAME, name) is not None


def rl_contract(fingerprint: bytes, island: bytes) -> bytes:
    """Session contract of an RL island: 32 bytes from its fingerprint and its 32-byte identity."""
    return hashlib.sha256(RL_CONTRACT_DOMAIN + fingerprint + island).digest()


def run_contract(base: bytes, name: str) -> bytes:
    """Session contract of the run `name` over the 32-byte contract that it has without a name."""
    return hashlib.sha256(RUN_CONTRACT_DOMAIN + base + name.encode("ascii")).digest()
