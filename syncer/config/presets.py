"""What a preset sets: quorum, grace, pace and checkpoints for a kind of fleet, from its size M.

A preset is a beginning, not a mode: every setting that somebody gives wins over it, and only what
comes of it counts, for the run as for the profile hash. Must not know where values come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from syncer.config.options import Option, flag

Value = int | float | bool
Of = Callable[[int], Value]


class Part(NamedTuple):
    """One setting: its value in words of M, and the value of an M."""

    words: str
    of: Of


class Preset(NamedTuple):
    """`about`: the fleet it is for."""

    about: str
    parts: Mapping[str, Part]


def fixed(value: Value) -> Part:
    """The same for every M."""
    return Part("on" if value is True else f"{value:g}", lambda m: value)


def but_one(m: int) -> int:
    return max(1, m - 1)


def two_thirds(m: int) -> int:
    return max(1, -(-2 * m // 3))


def half(m: int) -> int:
    return max(1, -(-m // 2))


PRESETS: dict[str, Preset] = {
    "local": Preset("equal machines on one network", {
        "quorum": Part("M - 1, at least 1", but_one), "grace_ms": fixed(1000),
        "grace_tau": fixed(24.0), "pipeline": fixed(2), "sync_interval_steps": fixed(24.0),
        "checkpoint_every": fixed(8), "background_checkpoint": fixed(True)}),
    "regions": Preset("a few sites, uneven links", {
        "quorum": Part("2/3 of M, rounded up", two_thirds), "grace_ms": fixed(5000),
        "grace_tau": fixed(6.0), "pipeline": fixed(4), "sync_interval_steps": fixed(48.0),
        "checkpoint_every": fixed(8), "background_checkpoint": fixed(True)}),
    "spot": Preset("machines that come and go", {
        "quorum": Part("half of M, rounded up", half), "grace_ms": fixed(2000),
        "grace_tau": fixed(4.0), "pipeline": fixed(2), "sync_interval_steps": fixed(24.0),
        "checkpoint_every": fixed(4), "background_checkpoint": fixed(True),
        "checkpoint_keep": fixed(2)}),
    "reproducible": Preset("the same bits in every run: every merge has everybody", {
        "quorum": Part("M", lambda m: m), "grace_ms": fixed(0), "max_base_lag": fixed(0),
        "pipeline": fixed(1), "sync_interval_steps": fixed(24.0), "checkpoint_every": fixed(1)}),
}


def filled(given: Mapping[str, object], rows: Iterable[Option[Any]]) -> dict[str, Any]:
    """What the preset of these settings adds to them; nothing without one.

    Left out is what was given, what has no place (a checkpoint without a path), and what could not
    be together with something that was given.
    """
    preset, learners = PRESETS.get(str(given.get("preset"))), given.get("learners")
    if preset is None or not isinstance(learners, int):
        return {}
    refused = {row.name: [need.name for need in row.needs if need.refused] for row in rows}
    added: dict[str, Any] = {
        name: part.of(learners) for name, part in preset.parts.items()
        if name not in given and all(place in given for place in refused[name])}
    if added.get("background_checkpoint") and given.get("checkpoint_every") == 1:
        del added["background_checkpoint"]
    if added.get("checkpoint_every") == 1 and given.get("background_checkpoint"):
        del added["checkpoint_every"]
    return added


def markdown_table() -> str:
    """What each preset sets, for the docs: a row for each setting."""
    names = list(dict.fromkeys(name for preset in PRESETS.values() for name in preset.parts))
    lines = ["| | " + " | ".join(f"`{name}`" for name in PRESETS) + " |",
             "|---" * (len(PRESETS) + 1) + "|",
             "| for | " + " | ".join(preset.about for preset in PRESETS.values()) + " |"]
    for name in names:
        shown = [preset.parts[name].words if name in preset.parts else "-"
                 for preset in PRESETS.values()]
        lines.append(f"| `{flag(name)}` | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"
