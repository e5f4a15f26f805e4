"""The files that a run writes, and that no two of them are one; must not write any of them.

Names are compared by where they lead, and files that are there by their inode as well: a tape that
is a hard link to the checkpoint would be appended to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from syncer.config.options import flag

if TYPE_CHECKING:
    from syncer.config.table import Config

PARTIAL = ("", ".tmp", ".old.tmp")
"""Of a file that is replaced as a whole: its name, the new one, and the old one meanwhile."""
KEPT = re.compile(r"\.step(-[0-9]+)?(\.tmp)?")
"""Behind the name of a checkpoint: earlier ones, of any step."""


class Output(NamedTuple):
    """A file that a run is going to write: the option, its value, and the name itself."""

    option: str
    given: str
    name: str


def is_one_file(first: str, second: str) -> bool:
    """Whether two names are one file, through symbolic or hard links; neither need be there."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    with suppress(OSError):
        return os.path.samefile(first, second)
    return False


def clash_of_outputs(config: Config) -> str | None:
    """How two files that the run writes are one, or None."""
    outputs = list(_outputs(config))
    for at, one in enumerate(outputs):
        for other in outputs[at + 1 :]:
            if one.option != other.option and is_one_file(one.name, other.name):
                return _sentence(one, other)
    if config.checkpoint_path is not None:
        base = os.path.realpath(config.checkpoint_path)
        for output in outputs:
            real = os.path.realpath(output.name)
            if (output.option != "checkpoint_path" and real.startswith(base)
                    and KEPT.fullmatch(real, len(base))):
                return _sentence(Output("checkpoint_path", config.checkpoint_path, real), output)
    return None


def _outputs(config: Config) -> Iterator[Output]:
    path = config.checkpoint_path
    if path is not None:
        real = os.path.realpath(path)
        names = [real + end for end in (*PARTIAL, ".lock")]
        # a marker lies beside the name that was given; one beside the file itself is removed
        names += [base + ".final" + end for base in dict.fromkeys((path, real)) for end in PARTIAL]
        names += _kept_files(real)
        yield from (Output("checkpoint_path", path, name) for name in names)
    if config.final_state is not None:
        real = os.path.realpath(config.final_state)
        yield from (Output("final_state", config.final_state, real + end) for end in PARTIAL)
    if config.event_tape is not None:
        yield Output("event_tape", config.event_tape, config.event_tape)


def _kept_files(real: str) -> list[str]:
    """Earlier checkpoints that are there."""
    directory, base = os.path.split(real)
    with suppress(OSError):
        return [os.path.join(directory, name) for name in os.listdir(directory)
                if name.startswith(base) and KEPT.fullmatch(name, len(base))]
    return []


def _sentence(one: Output, other: Output) -> str:
    return (f"{flag(one.option)} {one.given} and {flag(other.option)} {other.given} would both "
            f"write {one.name}: name files that "
            "are neither the same nor made from each other's names")
