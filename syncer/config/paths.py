"""The files that a run writes: each can be written, and no two are one. Must not write any of them.

Whatever stands in the way of a file is said before anything begins: a run that trains for days and
then cannot save is lost. Names are compared by where they lead, and files that are there by their
inode as well: a tape that is a hard link to the checkpoint would be appended to it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from syncer.config.options import flag
from syncer.values import UnixPath

if TYPE_CHECKING:
    from syncer.config.table import Config

PARTIAL = ("", ".tmp", ".old.tmp")
"""Of a file that is replaced as a whole: its name, the new one, and the old one meanwhile."""
STEP_MAX = 2**63 - 1
KEPT = re.compile(r"\.step(-[0-9]+)?(\.tmp)?|\.abandoned-[0-9]+\..*", re.DOTALL)
"""Behind the name of a checkpoint: earlier ones, of any step."""


INPUTS = ("tls_cert", "tls_key", "tls_client_ca")
"""Files that a run reads and never writes."""


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


def trouble_of_output(config: Config, option: str) -> str | None:
    """Why the file of this option could not be written later, and what to do; None if it can."""
    path: str = getattr(config, option)
    trouble = (_trouble_of_tape(path) if option == "event_tape" else _trouble_of_file(path))
    if trouble is not None:
        return f"{trouble}; name a file in a directory you may write to"
    return None if option == "event_tape" else _trouble_beside(_written_with(config, option))


def trouble_of_input(path: str) -> str | None:
    """Why this is no file to read, if it is there; whoever reads it says what else is wrong."""
    mode = _mode(path)
    if isinstance(mode, int) and not stat.S_ISREG(mode):
        return f"is {_kind(mode)}: name a regular file, which can be read again"
    return None


def trouble_of_file(path: str) -> str | None:
    """As `trouble_of_output`, of a file that is written by a command and is no setting."""
    trouble = _trouble_of_file(path)
    if trouble is not None:
        return f"{trouble}; name a file in a directory you may write to"
    return _trouble_beside(leads_to(path) + end for end in PARTIAL[1:])


def _trouble_of_tape(path: str) -> str | None:
    """Lines may also go to a pipe, a terminal or /dev/null."""
    mode = _mode(path)
    if isinstance(mode, int) and not (
            stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        return f"is {_kind(mode)}, to which no line can be appended"
    if isinstance(mode, int):
        return None if os.access(path, os.W_OK) else "cannot be written: permission denied"
    return _unknown(mode) or _trouble_of_parent(path)


def _trouble_of_file(path: str) -> str | None:
    """The file is replaced as a whole: only a file can be, and another one must fit beside it."""
    mode = _mode(path)
    if isinstance(mode, int) and not stat.S_ISREG(mode):
        return f"is {_kind(mode)}, which no file can replace"
    if isinstance(mode, int) and not os.access(path, os.W_OK):
        return "cannot be written: permission denied"
    return _unknown(mode) or _trouble_of_parent(path)


def _unknown(mode: int | str | None) -> str | None:
    return f"cannot be written: {mode}" if isinstance(mode, str) else None


def _trouble_of_parent(path: str) -> str | None:
    real = leads_to(path)
    parent = os.path.dirname(os.path.abspath(real))
    if not os.path.isdir(parent):
        led = f"it leads to {real}, and " if real != path else ""
        return f"cannot be written: {led}the directory {parent} does not exist"
    return None if os.access(parent, os.W_OK | os.X_OK) else "cannot be written: permission denied"


def _trouble_beside(names: Iterable[str]) -> str | None:
    """Of the names that are written with a file."""
    for name in names:
        mode = _mode(name)
        if isinstance(mode, str):
            directory, base = os.path.split(name)
            return (f"cannot be written together with {base}: {mode} ({len(os.fsencode(base))} "
                    f"bytes; {directory or 'the directory'} takes names of "
                    f"{_name_max(directory)}); give it a shorter name")
        if mode is not None and stat.S_ISDIR(mode):
            return (f"cannot be written: {name}, which is written with it, is a directory; remove "
                    "that, or name another file")
    return None


def _written_with(config: Config, option: str) -> Iterator[str]:
    path: str = getattr(config, option)
    real = leads_to(path)
    yield from (real + end for end in PARTIAL[1:])
    if option == "checkpoint_path":
        yield from (f"{real}.epoch{end}" for end in PARTIAL)
        if config.mark_final_checkpoint:
            yield from (f"{path}.final{end}" for end in PARTIAL)
        if config.checkpoint_keep:
            yield f"{real}.step-{STEP_MAX}"


def leads_to(path: str) -> str:
    """Where a symbolic link leads in the end; any other path as it is."""
    return os.path.realpath(path) if os.path.islink(path) else path


def _mode(path: str) -> int | str | None:
    """The kind of what is there, or why that cannot be known; None: nothing is there."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"),
             (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))
    return next((words for is_one, words in kinds if is_one(mode)), "no regular file")


def _name_max(directory: str) -> int:
    with suppress(OSError):
        return os.pathconf(directory or ".", "PC_NAME_MAX")
    return 255


def clash_of_outputs(config: Config, read_from: str | None = None) -> str | None:
    """How two files that the run writes are one, or one of them is one that it reads; or None."""
    outputs, inputs = list(_outputs(config)), {"config": read_from}
    inputs |= {name: getattr(config, name) for name in INPUTS}
    for output in outputs:
        for option, path in inputs.items():
            if path is not None and is_one_file(output.name, path):
                return (f"{flag(output.option)} {output.given} would write to {output.name}, the "
                        f"file of {flag(option)} {path}: name another file")
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
        names = [*_beside(path, real), *_kept_files(real)]
        yield from (Output("checkpoint_path", path, name) for name in names)
    if config.final_state is not None:
        real = os.path.realpath(config.final_state)
        yield from (Output("final_state", config.final_state, real + end) for end in PARTIAL)
    if config.event_tape is not None:
        yield Output("event_tape", config.event_tape, config.event_tape)
    if config.listen is not None:
        socket = UnixPath.place(config.listen)
        yield from (Output("listen", config.listen, socket + end) for end in ("", ".lock"))


def lies_beside(checkpoint: str, path: str) -> str | None:
    """The name that a run writes with this checkpoint and that is this path; None if there is none.
    Kept ones are not meant: they are checkpoints of their own."""
    real = os.path.realpath(checkpoint)
    names = [name for name in _beside(checkpoint, real) if name not in (checkpoint, real)]
    return next((name for name in names if is_one_file(name, path)), None)


def _beside(path: str, real: str) -> Iterator[str]:
    """All names of a checkpoint but its kept ones: they lie beside the file itself, and a marker
    beside the name that was given; one beside the file itself is removed."""
    yield from (real + end for end in (*PARTIAL, ".lock"))
    yield from (f"{real}.epoch{end}" for end in PARTIAL)
    yield from (base + ".final" + end for base in dict.fromkeys((path, real)) for end in PARTIAL)


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
