"""`syncer checkpoint`: look into, verify, convert, compare, export and restore checkpoint files.

Must not change the file it reads. Exit status: 0, or 1 for a file that is not as it should be;
`diff` as of diff(1): 0 equal, 1 different, 2 trouble.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from syncer.checkpoint.atomic import written_anew
from syncer.checkpoint.convert import convert, export
from syncer.checkpoint.facts import FORMATS, NamedDims
from syncer.checkpoint.files import FILES, Files, Patient
from syncer.checkpoint.lock import PathLock
from syncer.checkpoint.progress import Progress, size
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.restore import owner_of, restore
from syncer.checkpoint.tolerant import Tolerant
from syncer.config.paths import is_one_file, lies_beside, trouble_of_file
from syncer.errors import CheckpointError, CheckpointMismatch, ConfigError
from syncer.kernels import SUM_BLOCK, sumsq
from syncer.layout import MERGE_MODES
from syncer.learner.partition import NamedLayout, layout_fingerprint, load_layout
from syncer.streams import complain

RETRIES = 1
"""Passing errors of one action that are tried again, as --checkpoint-retries says of a save."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `checkpoint` and what it can do."""
    parser = subparsers.add_parser(
        "checkpoint", help="look into, verify, convert, export or restore a checkpoint",
        description="Works on files of both formats; the format is seen from the file.")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        one = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        one.add_argument("--json", action="store_true", help="print one JSON object")
        return one

    one = add("inspect", "show step, versions, sizes, ledger, identity and norms")
    one.add_argument("file", metavar="FILE")
    one.add_argument("--no-norms", action="store_true", help="read the header alone")
    one = add("verify", "read everything: structure, finite values, digests")
    one.add_argument("file", metavar="FILE")
    one = add("convert", "write the same cut in the other format")
    one.add_argument("file", metavar="FILE")
    one.add_argument("output", metavar="OUTPUT")
    one.add_argument("--to", choices=FORMATS, help="default: the other format")
    one.add_argument("--layout", metavar="LAYOUT",
                     help="layout file of a learner, for what a yeto-v3 file does not say")
    one = add("diff", "compare two files bit by bit and name the first difference")
    one.add_argument("file", metavar="FILE")
    one.add_argument("other", metavar="OTHER")
    one = add("export", "write a model file: parameters under their own names (safetensors)")
    one.add_argument("file", metavar="FILE")
    one.add_argument("output", metavar="OUTPUT")
    one.add_argument("--layout", metavar="LAYOUT",
                     help="layout file of a learner (syncer.learner.save_layout); default: the "
                     "names that the checkpoint tells")
    one.add_argument("--fragments", metavar="LIST", help="for example 0,2-4; default: all")
    one = add("restore", "go back: make an earlier checkpoint, as --checkpoint-keep leaves them, "
              "the newest one again; what was done since is set aside, not removed")
    one.add_argument("file", metavar="FILE", help="for example run.ckpt.step-20; it stays")
    one.add_argument("--to", metavar="PATH",
                     help="the checkpoint to replace; default: the one that FILE is named after")


def run(args: argparse.Namespace) -> int:
    """Carries out one action; raises `SyncerError`."""
    act = {"inspect": _inspect, "verify": _verify, "convert": _convert, "diff": _diff,
           "export": _export, "restore": _restore}[args.action]
    args.files = patient_files()
    try:
        return act(args)
    except CheckpointError as error:
        if args.action != "diff":
            raise
        complain(str(error))
        return 2


def patient_files() -> Files:
    """The file system with the patience of a run: what may pass by is tried again, and said."""
    tolerant = Tolerant(FILES, lambda text, fields: complain(f"{text}: {fields['error']}"))
    return Patient(tolerant, RETRIES, told=lambda call, error: complain(
        f"tried again: {call}: {error.strerror}"))


def _show(args: argparse.Namespace, record: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(record) if args.json else "\n".join(lines))


# ------------------------------------------------------------------------------------ inspect
def _inspect(args: argparse.Namespace) -> int:
    with Checkpoint(args.file, args.files) as checkpoint:
        record = describe(checkpoint)
        if not args.no_norms:
            with Progress("reading", wanted=not args.json) as bar:
                norms = norms_of(checkpoint, bar)
            for fragment, found in zip(record["fragments"], norms, strict=True):
                fragment["norms"] = found
    _show(args, record, _inspect_lines(record))
    return 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything but the tensors, as JSON takes it."""
    facts = checkpoint.facts
    fragments: list[dict[str, Any]] = [
        {"version": version, "elements": numel}
        for version, numel in zip(facts.versions, facts.numels, strict=True)]
    if facts.layout is not None:
        for entry, fragment in zip(fragments, facts.layout.fragments, strict=True):
            entry |= {"merge": MERGE_MODES[fragment.merge_mode],
                      "tensors": len(fragment.numels)}
    return {
        "path": checkpoint.path, "format": checkpoint.format, "bytes": checkpoint.size,
        "global_step": facts.step, "elements": sum(facts.numels), "state": list(facts.state),
        "optimizer": facts.optimizer, "layout_fingerprint": facts.fingerprint.hex(),
        "session_contract": facts.contract.hex(),
        "profile_hash": facts.profile_hash.hex() if facts.profile_hash else None,
        "run": facts.lineage.run or None, "epoch": facts.lineage.epoch or None,
        "instance": f"{facts.lineage.instance:016x}" if facts.lineage.instance else None,
        "processes_before": len(facts.lineage.entries), "renumbered": facts.lineage.renumbered,
        "named": facts.names is not None,
        "digests": bool(checkpoint.digests), "fragments": fragments,
        "ledger": [{"learner": learner, "merges": merges, "steps": steps, "tokens": tokens}
                   for learner, (merges, steps, tokens) in facts.ledger.items()],
    }


def norms_of(checkpoint: Checkpoint, progress: Progress) -> list[dict[str, float]]:
    """Euclidean norm of every array of every fragment, in f64 by blocks from the left."""
    sums: list[dict[str, float]] = [
        dict.fromkeys(("params", *checkpoint.facts.state), 0.0) for _ in checkpoint.facts.numels]
    for tensor, _, values in checkpoint.scan(progress=progress):
        for begin in range(0, len(values), SUM_BLOCK):
            sums[tensor.fragment][tensor.array] += sumsq(values[begin : begin + SUM_BLOCK])
    return [{name: float(np.sqrt(total)) for name, total in found.items()} for found in sums]


def _inspect_lines(record: dict[str, Any]) -> list[str]:
    optimizer = record["optimizer"] or {"name": "nesterov"}
    constants = ", ".join(f"{k} {v}" for k, v in optimizer.items() if k != "name")
    lines = [
        f"{record['path']}: {record['format']}, {size(record['bytes'])}, "
        + ("a digest per tensor" if record["digests"] else "no digests"),
        f"step {record['global_step']}, {record['elements']} parameters in "
        f"{len(record['fragments'])} fragments",
        f"optimizer {optimizer['name']}" + (f" ({constants})" if constants else ""),
        f"layout   {record['layout_fingerprint']}", f"contract {record['session_contract']}",
    ]
    if record["profile_hash"]:
        lines.append(f"profile  {record['profile_hash']}")
    if record["epoch"]:
        lines.append(f"run      {record['run'] or 'without a name'}, epoch {record['epoch']}, "
                     f"written by {record['instance'] or '?'}"
                     + (f", {record['renumbered']} steps added" if record["renumbered"] else ""))
    arrays = ["params", *record["state"]]
    lines += ["", "fragment  version  merge      elements"
              + "".join(f"  {'|' + name + '|':>14}" for name in arrays)]
    for index, fragment in enumerate(record["fragments"]):
        norms = fragment.get("norms", {})
        lines.append(f"{index:>8}  {fragment['version']:>7}  {fragment.get('merge', '?'):<5}  "
                     f"{fragment['elements']:>12}"
                     + "".join(f"  {norms[n]:>14.6g}" if n in norms else f"  {'-':>14}"
                               for n in arrays))
    lines += ["", " learner   merges         steps          tokens"]
    lines += [f"{e['learner']:>8}  {e['merges']:>7}  {e['steps']:>12}  {e['tokens']:>14}"
              for e in record["ledger"]] or ["    none"]
    return lines


# ------------------------------------------------------------------------- verify and convert
def _verify(args: argparse.Namespace) -> int:
    with (Checkpoint(args.file, args.files) as checkpoint,
          Progress("verifying", wanted=not args.json) as bar):
        checkpoint.prove(progress=bar)
        tensors = sum(1 for _ in checkpoint.facts.tensors)
        record = {"path": args.file, "format": checkpoint.format, "ok": True,
                  "global_step": checkpoint.facts.step, "tensors": tensors,
                  "digests": len(checkpoint.digests)}
    checked = (f"{tensors} digests match" if record["digests"]
               else "the format has no digests: structure and finite values only")
    _show(args, record, [f"{args.file}: good, step {record['global_step']}, {checked}"])
    return 0


def _convert(args: argparse.Namespace) -> int:
    _refuse_own(args)
    named = load_layout(args.layout) if args.layout else None
    with Checkpoint(args.file, args.files) as checkpoint, PathLock(args.output, "OUTPUT"):
        if named is not None:
            _check_fingerprint(checkpoint, named, args.layout)
        form = args.to or next(f for f in FORMATS if f != checkpoint.format)
        with Progress("converting", wanted=not args.json) as bar:
            written = written_anew(
                lambda files: convert(checkpoint, args.output, form, progress=bar, files=files,
                                      layout=None if named is None else named.wire), args.files)
    _show(args, {"path": args.output, "format": form, "bytes": written},
          [f"{args.output}: {form}, {size(written)}, step {checkpoint.facts.step}"])
    return 0


def _restore(args: argparse.Namespace) -> int:
    path = args.to or owner_of(args.file)
    if path is None:
        raise ConfigError(f"FILE {args.file} is not named after a checkpoint, as run.ckpt.step-20 "
                          "is: say with --to which one it is to replace")
    if is_one_file(args.file, path):
        raise ConfigError(f"FILE {args.file} is {path} itself: there is nothing to restore")
    with (Checkpoint(args.file, args.files) as checkpoint,
          PathLock(path, "--to" if args.to else "PATH")):
        with Progress("verifying", wanted=not args.json) as bar:
            checkpoint.prove(progress=bar)
        with Progress("restoring", wanted=not args.json) as bar:
            done = restore(checkpoint, path, args.files, progress=bar)
        step = checkpoint.facts.step
    record = {"path": path, "from": args.file, "global_step": step, "bytes": done.bytes,
              "marker_removed": done.unmarked, "set_aside": [one._asdict() for one in done.aside]}
    lines = [f"{path}: step {step} restored from {args.file}, {size(done.bytes)}; a server with "
             "--resume goes on from it"]
    lines += [f"set aside: step {'?' if one.step is None else one.step} as {one.path}"
              for one in done.aside]
    if done.unmarked:
        lines.append("removed: the marker of a finished run")
    _show(args, record, lines)
    return 0


def _refuse_own(args: argparse.Namespace) -> None:
    """The output can be written, and is not what is read, under whatever name."""
    if (trouble := trouble_of_file(args.output)) is not None:
        raise ConfigError(f"OUTPUT {args.output} {trouble}")
    for what, name in ("FILE", args.file), ("--layout", args.layout):
        if name is not None and is_one_file(name, args.output):
            raise ConfigError(f"OUTPUT {args.output} is {what} {name} itself, which would be lost: "
                              "name another file")
    if (beside := lies_beside(args.file, args.output)) is not None:
        raise ConfigError(f"OUTPUT {args.output} is {beside}, which a server writes with FILE "
                          f"{args.file}: name another file")


def _check_fingerprint(checkpoint: Checkpoint, named: NamedLayout, path: str) -> None:
    found = layout_fingerprint(named)
    if found != checkpoint.facts.fingerprint:
        raise CheckpointMismatch(
            f"{path}: layout fingerprint: expected {checkpoint.facts.fingerprint.hex()} as "
            f"{checkpoint.path} has, found {found.hex()}; they are not of one model")


# ------------------------------------------------------------------------------------ diff
def _diff(args: argparse.Namespace) -> int:
    with (Checkpoint(args.file, args.files) as first,
          Checkpoint(args.other, args.files) as second,
          Progress("comparing", wanted=not args.json) as bar):
        found = difference(first, second, bar)
    record = {"equal": found is None, "first_difference": found}
    _show(args, record, [f"first difference: {found}" if found else
                         "equal: every field both have, and every bit of every tensor"])
    return 0 if found is None else 1


def difference(first: Checkpoint, second: Checkpoint, progress: Progress) -> str | None:
    """The first thing that differs: a field that both files have, then elements by their bits."""
    ours, theirs = first.facts, second.facts
    for name in ("step", "versions", "numels", "state", "ledger", "fingerprint", "contract",
                 "layout", "optimizer", "profile_hash", "names"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b and None not in (a, b):
            a, b = ((x.hex() if isinstance(x, bytes) else x) for x in (a, b))
            return f"{name}: {a} and {b}"
    # digests alone prove nothing about a file whose bytes were changed, so both are read
    for (tensor, begin, a), (_, _, b) in zip_longest(first.scan(progress=progress), second.scan()):
        bits = np.flatnonzero(a.view(np.uint32) != b.view(np.uint32))
        if len(bits):
            at = int(bits[0])
            return (f"{tensor.name} element {begin + at}: {a[at]!s} and {b[at]!s} "
                    f"({a.view(np.uint32)[at]:#010x} and {b.view(np.uint32)[at]:#010x})")
    return None


# ------------------------------------------------------------------------------------ export
def _export(args: argparse.Namespace) -> int:
    _refuse_own(args)
    with Checkpoint(args.file, args.files) as checkpoint, PathLock(args.output, "OUTPUT"):
        names = _names(checkpoint, args.layout)
        chosen = list(_numbers(args.fragments, len(checkpoint.facts.numels)))
        with Progress("exporting", wanted=not args.json) as bar:
            written = written_anew(
                lambda files: export(checkpoint, args.output, progress=bar, files=files,
                                     fragments=[(p, names[p]) for p in chosen]),
                args.files)
    count = sum(len(names[p]) for p in chosen)
    _show(args, {"path": args.output, "bytes": written, "tensors": count, "fragments": chosen,
                 "global_step": checkpoint.facts.step},
          [f"{args.output}: {count} parameters of step {checkpoint.facts.step}, {size(written)}"])
    return 0


def _names(checkpoint: Checkpoint, path: str | None) -> Sequence[NamedDims]:
    """What the parameters are called: as a layout file says, or as the checkpoint does."""
    if path is None:
        if checkpoint.facts.names is None:
            raise ConfigError(f"{checkpoint.path} does not tell what its parameters are called: "
                              "give the layout file of a learner with --layout")
        return checkpoint.facts.names
    named = load_layout(path)
    _check_fingerprint(checkpoint, named, path)
    return [tuple((tensor.name, tuple(tensor.shape)) for tensor in fragment.tensors)
            for fragment in named.fragments]


def _numbers(text: str | None, count: int) -> Iterator[int]:
    """The fragments of a list like 0,2-4."""
    if text is None:
        yield from range(count)
        return
    found: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--fragments {text} cannot be used: give numbers and ranges, for "
                              "example 0,2-4")
        found.update(range(int(first), min(int(last or first), count) + 1))
    wrong = sorted(p for p in found if p >= count)
    if wrong or not found:
        raise ConfigError(f"--fragments {text} cannot be used: the checkpoint has fragments 0 to "
                          f"{count - 1}")
    yield from sorted(found)
