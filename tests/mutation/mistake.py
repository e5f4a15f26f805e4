"""A mistake: a piece of source, and what stands in its place. Must not know any."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """In `file` (from the root of the tree), `old`, which stands there once, becomes `new`."""

    rules: str
    """Numbers of the rules it breaks, such as "3.5 6.1"."""
    file: str
    mistake: str
    old: str
    new: str


def broken(file: str, *mistakes: tuple[str, str, str, str]) -> list[Mutation]:
    """Mistakes in one file: (rules, mistake, old, new)."""
    return [Mutation(rules, f"syncer/{file}", mistake, old, new)
            for rules, mistake, old, new in mistakes]
