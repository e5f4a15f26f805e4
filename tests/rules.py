"""The rule book as data: its numbers, and where each rule has its home and is tested.

Reads docs/rules.md, the code, the scenario files and the mutations; must not know what a rule says.
"""

from __future__ import annotations

from syncer.core.run import phases


def phase_table() -> str:
    """The phases of a run and what each does with each event, with a legend."""
    names = phases.phases()
    lines = ["| event | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {event} | " + " | ".join(words) + " |" for event, words in phases.rows().items()]
    lines += ["", "| word | what happens |", "|---|---|"]
    lines += [f"| {word} | {meaning} |" for word, meaning in phases.MEANING.items()]
    return "\n".join(lines) + "\n"
