"""Where a configuration comes from: command line, then environment, then TOML file, then default.

One table, `OPTIONS`, is the source of `--help`, of the file's keys, of the environment names and of
the flag table in the docs. Must not start anything: it reads the file it is given, checks paths.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

from syncer.config import (
    CHECKPOINT_FORMATS,
    DELTA_CORRECTIONS,
    FOLDS,
    LEARNER_WEIGHTS,
    LOG_FORMATS,
    LOG_LEVELS,
    OUTER_OPTIMIZERS,
    Config,
    flag,
)
from syncer.errors import ConfigError
from syncer.protocol import KEY_VARIABLES

OPEN_VARIABLE = "YETO_SYNCER_ALLOW_UNAUTHENTICATED"


class Option(NamedTuple):
    """One setting: a field of `Config` as people write it."""

    name: str
    kind: str
    """"int", "float", "text", "switch", "path", "digest" (64 hexadecimal digits), or a kind of
    `PARSERS`."""
    metavar: str
    group: str
    help: str
    choices: tuple[str, ...] = ()
    unset: str = ""
    """What holds when nothing is given and the default is None."""


OPTIONS = (
    Option("learners", "int", "M", "run", "learners in the run; their ids are 0 to M-1"),
    Option("total_steps", "int", "T", "run", "outer steps to train; each merges one fragment"),
    Option("final_state", "path", "FILE", "run",
           "write the final parameters here: u32 fragments, then per fragment u64 elements and f32 "
           "values, little-endian", unset="not written"),
    Option("checkpoint_path", "path", "FILE", "checkpoint",
           "save the whole state here, to resume from", unset="no checkpoints"),
    Option("checkpoint_every", "int", "N", "checkpoint",
           "save every N steps; 1: every step is durable before a learner sees it"),
    Option("checkpoint_format", "text", "FORMAT", "checkpoint",
           "format of the file; yeto-v3 has no digests and holds nesterov only",
           CHECKPOINT_FORMATS),
    Option("background_checkpoint", "switch", "", "checkpoint",
           "write periodic checkpoints while rounds go on; needs N of 2 or more"),
    Option("resume", "switch", "", "checkpoint",
           "continue from the file of --checkpoint-path, of either format"),
    Option("no_verify", "switch", "", "checkpoint",
           "resume without comparing the digests of the tensors"),
    Option("mark_final_checkpoint", "switch", "", "checkpoint",
           "write FILE.final beside the checkpoint of a finished run"),
    Option("checkpoint_keep", "int", "N", "checkpoint",
           "keep the newest N checkpoints as FILE.step-<t> too, as hard links"),
    Option("checkpoint_retries", "int", "N", "checkpoint",
           "errors of one save that may pass by and are tried again"),
    Option("checkpoint_direct", "switch", "", "checkpoint",
           "write past the page cache, where the file system can"),
    Option("learner_budget_steps", "int", "B", "checkpoint",
           "for benchmarks: when every learner has taken B steps, write an unmarked checkpoint and "
           "end", unset="off"),
    Option("event_tape", "path", "FILE", "run",
           "append one JSON line per merge and event to this file", unset="not written"),
    Option("port", "int", "PORT", "network",
           "TCP port; 0 lets the system choose (the log says which)"),
    Option("host", "text", "ADDRESS", "network", "address to listen on",
           unset="0.0.0.0 with a key or --allow-unauthenticated, else 127.0.0.1"),
    Option("island_hmac_key", "text", "KEY", "network",
           "key that every HELLO must prove; better given as SYNCER_HMAC_KEY, which other users of "
           "the machine cannot read", unset="no authentication"),
    Option("allow_unauthenticated", "switch", "", "network",
           "listen beyond this machine without a key"),
    Option("expected_island_contract", "digest", "HEX", "network",
           "accept only learners bound to this 32-byte backend identity", unset="any"),
    Option("require_profile_binding", "switch", "", "network",
           "refuse a HELLO that does not carry this server's profile hash"),
    Option("write_timeout_s", "int", "S", "network",
           "end a connection whose queued data makes no progress for so many seconds"),
    Option("quorum", "int", "K", "rounds", "pushes that make a round mergeable"),
    Option("grace_ms", "int", "MS", "rounds",
           "longest wait for late pushes after the quorum, milliseconds"),
    Option("grace_gamma", "float", "G", "rounds",
           "share of the estimated spare time used as grace, 0 to 1"),
    Option("grace_tau", "float", "X", "rounds",
           "local steps of the slowest learner that a round may take before grace ends"),
    Option("pipeline", "int", "N", "rounds", "rounds in flight at once, each of another fragment"),
    Option("min_round_interval_ms", "int", "MS", "rounds",
           "shortest time between two launches, milliseconds"),
    Option("sync_interval_steps", "float", "H", "rounds",
           "local steps between two merges of one fragment; paces launches by the slowest "
           "learner's step time; 0 turns pacing off"),
    Option("quorum_timeout_s", "int", "S", "rounds",
           "seconds without a quorum after which a round is started anew"),
    Option("quorum_capacity", "float", "THETA", "rounds",
           "replaces the count quorum: share of the expected learners' capacity, above 0 to 1",
           unset="count quorum"),
    Option("q_min", "int", "N", "rounds", "capacity quorum: least number of pushes"),
    Option("learner_capacity", "capacities", "ID=X,...", "rounds",
           "capacity quorum: capacities of learners", unset="1 each"),
    Option("soft_deadline_s", "float", "S", "rounds",
           "capacity quorum: seconds after launch when a round closes with --q-min pushes",
           unset="never"),
    Option("late_carry", "switch", "", "rounds",
           "a push that came too late joins its fragment's next round, at a discount"),
    Option("carry_gamma", "float", "G", "rounds",
           "late carry: weight factor per version the push is behind, 0 to 1"),
    Option("max_carry_lag", "int", "V", "rounds",
           "late carry: versions a push may be behind"),
    Option("carry_answers_round", "switch", "", "rounds",
           "late carry: it counts as the learner's answer for quorum"),
    Option("start_learners", "int", "N", "rounds",
           "learners that must be there before training starts", unset="all"),
    Option("start_timeout_s", "int", "S", "rounds",
           "give up with status 6 when they are not there after so many seconds",
           unset="wait for ever"),
    Option("final_ack_timeout_s", "int", "S", "rounds",
           "seconds to wait for every learner to confirm the final parameters",
           unset="--quorum-timeout-s"),
    Option("max_base_lag", "int", "V", "rounds",
           "oldest anchor accepted, in steps behind the round's base; 0 with K = M and no grace "
           "is a fixed roster", unset="unbounded"),
    Option("learner_weight", "text", "RULE", "merge",
           "weight of a push: tokens squared over steps, or equal", LEARNER_WEIGHTS),
    Option("delta_correction", "text", "RULE", "merge",
           "correction of pushes against the momentum before the merge; without effect with sgd, "
           "which keeps no momentum", DELTA_CORRECTIONS),
    Option("heloco_c_ok", "float", "C", "merge",
           "HeLoCo: cosine with the momentum from which a delta is left alone, -1 to 1"),
    Option("heloco_k_s", "float", "K", "merge", "HeLoCo: strength of shrinking an opposing delta"),
    Option("heloco_k_d", "float", "K", "merge",
           "HeLoCo: strength of rotating towards the momentum"),
    Option("heloco_beta_max", "float", "B", "merge",
           "HeLoCo: most of the opposing part that is taken away, 0 to 1"),
    Option("heloco_kappa", "float", "K", "merge",
           "HeLoCo: how much a long momentum weakens the correction"),
    Option("heloco_eps", "float", "E", "merge",
           "HeLoCo: norm below which a vector has no direction"),
    Option("outer_optimizer", "text", "NAME", "merge", "outer optimizer", OUTER_OPTIMIZERS),
    Option("outer_lr", "float", "LR", "merge", "learning rate of the outer step"),
    Option("outer_momentum", "float", "MU", "merge",
           "momentum of the outer step, 0 <= MU < 1; sgd has none"),
    Option("dn_period", "int", "N", "merge",
           "delayed-nesterov: merges of a fragment between two momentum updates"),
    Option("dn_activation", "float", "C", "merge",
           "delayed-nesterov: share of the momentum applied at every merge, 0 to 1/N"),
    Option("fold", "text", "KIND", "merge",
           "batch keeps pushes until the round closes; exact (same bits, every learner) and "
           "streaming (bits depend on arrival) add them up and keep none", FOLDS),
    Option("clip_norm", "clip", "median|NORM", "merge",
           "scale longer deltas down to the round's median norm, or to this norm",
           unset="deltas of any length"),
    Option("robust", "robust", "median|trimmed-mean:F", "merge",
           "avg fragments: element-wise median, or mean without the F lowest and highest",
           unset="weighted mean"),
    Option("merge_stats", "switch", "", "merge",
           "add numbers that explain each merge to its record on the event tape"),
    Option("merge_threads", "int", "N", "merge",
           "threads of one merge, 1 to 32; the bits are the same for every N",
           unset="one per core"),
    Option("log_level", "text", "LEVEL", "log", "least severe level that is logged", LOG_LEVELS),
    Option("log_format", "text", "FORMAT", "log", "lines for people or JSON objects", LOG_FORMATS),
)
BY_NAME = {option.name: option for option in OPTIONS}
BY_KEY = {option.name.replace("_", "-"): option for option in OPTIONS}
DEFAULTS = {f.name: f.default for f in fields(Config)}
REQUIRED = ("learners", "total_steps")
PARSER_SETTINGS: dict[str, Any] = dict(
    allow_abbrev=False, argument_default=argparse.SUPPRESS,
    description="The parameter server of a Decoupled DiLoCo run.",
    epilog="Every setting can also be given as SYNCER_<NAME> in the environment or as a key "
           "without the dashes in the TOML file of --config; the command line wins over the "
           "environment, the environment over the file.")


def read_config(
    argv: Sequence[str], environ: Mapping[str, str], prog: str = "syncer serve"
) -> Config:
    """The configuration of a run from its command line, environment and optional `--config` file.

    Raises `ConfigError` with one sentence for whatever cannot be used; `SystemExit` after `--help`.
    """
    return resolve(vars(parser(prog).parse_args(list(argv))), environ)


def resolve(given: Mapping[str, str], environ: Mapping[str, str]) -> Config:
    """The configuration from the flags that were given (name to text) and the other sources."""
    path = given.get("config")
    values = read_file(path) if path is not None else {}
    origins = dict.fromkeys(values, f"in {path}")
    from_environment = read_environment(environ)
    values.update(from_environment)
    origins.update(dict.fromkeys(from_environment, "in the environment"))
    for name, text in given.items():
        if name not in BY_NAME:  # --config, and the name of the subcommand
            continue
        values[name] = parse(BY_NAME[name], text, flag(name))
        origins.pop(name, None)
    missing = [flag(name) for name in REQUIRED if name not in values]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{' and '.join(missing)} {verb} missing; for example: --learners 2 "
                          "--total-steps 100")
    try:
        config = Config(**values)
        check_paths(config)
    except ConfigError as error:
        named = [f"{flag(n)} is set {where}" for n, where in origins.items()
                 if f"{flag(n)} " in str(error)]
        raise ConfigError(f"{error} ({', '.join(named)})" if named else str(error)) from None
    return config


class OneSentenceParser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would print its usage and exit."""

    def error(self, message: str):
        raise ConfigError(message)

    def parse_args(self, args=None, namespace=None):
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].split("=")[0]
            near = difflib.get_close_matches(word, list(self.option_names()), n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists what there is"
            raise ConfigError(f"{word} is unknown; {hint}")
        return known

    def option_names(self) -> Iterator[str]:
        """Every option of this parser and of its subcommands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser.option_names()


def parser(prog: str) -> argparse.ArgumentParser:
    """The command line of `python -m syncer.server`."""
    return add_options(OneSentenceParser(prog=prog, **PARSER_SETTINGS))


def add_options(result: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds every setting to a parser, with units and defaults in its help; returns the parser."""
    result.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.group not in groups:
            groups[option.group] = result.add_argument_group(option.group)
        group = groups[option.group]
        names = [flag(option.name)]
        if option.name == "allow_unauthenticated":
            names.append("--allow-unauthenticated-islands")
        text = f"{option.help} ({default_text(option)})".replace("%", "%%")
        if option.kind == "switch":
            group.add_argument(*names, dest=option.name, action="store_const", const="true",
                               help=text)
        else:
            metavar = "|".join(option.choices) or option.metavar
            group.add_argument(*names, dest=option.name, metavar=metavar, help=text)
    return result


def default_text(option: Option) -> str:
    """How help and docs name the default of an option."""
    default = DEFAULTS[option.name]
    if option.name in REQUIRED:
        return "required"
    if default in (None, ()) or default is MISSING:
        return f"default: {option.unset}"
    if default is False:
        return "default: off"
    return f"default: {default:g}" if isinstance(default, float) else f"default: {default}"


# --------------------------------------------------------------------------------- the sources
def parse(option: Option, text: str, origin: str) -> Any:
    """The value that a text stands for; `origin` (a flag, a variable) goes into the error."""
    if option.kind in PARSERS:
        convert, kind = PARSERS[option.kind]
        try:
            return convert(text)
        except (ValueError, KeyError):
            raise ConfigError(f"{origin} {text!r} cannot be used: give {kind}") from None
    if not text:
        raise ConfigError(f"{origin} is empty: give a value or leave it out")
    return text


def _digest(text: str) -> bytes:
    if len(text) != 64:
        raise ValueError
    return bytes.fromhex(text)


def _switch(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


def _capacities(text: str) -> tuple[tuple[int, float], ...]:
    pairs = [item.split("=") for item in text.split(",")]
    return tuple((int(learner), float(capacity)) for learner, capacity in pairs)


def _robust(text: str) -> int | str:
    return text if text == "median" else int(text.removeprefix("trimmed-mean:"))


PARSERS = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "switch": (_switch, "1 or 0 (true or false)"),
    "digest": (_digest, "64 hexadecimal digits"),
    "capacities": (_capacities, "pairs like 0=2,1=0.5"),
    "clip": (lambda text: text if text == "median" else float(text), "median or a norm above 0"),
    "robust": (_robust, "median or trimmed-mean:F, for example trimmed-mean:1"),
}


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings from `SYNCER_<NAME>` and the two older names; an empty variable counts as unset."""
    values = {}
    for option in OPTIONS:
        variable = "SYNCER_" + option.name.upper()
        if text := environ.get(variable):
            values[option.name] = parse(option, text, f"environment variable {variable}")
    for variable in KEY_VARIABLES:
        if environ.get(variable) and "island_hmac_key" not in values:
            values["island_hmac_key"] = environ[variable]
    if environ.get(OPEN_VARIABLE) and "allow_unauthenticated" not in values:
        values["allow_unauthenticated"] = parse(
            BY_NAME["allow_unauthenticated"], environ[OPEN_VARIABLE],
            f"environment variable {OPEN_VARIABLE}")
    return values


def read_file(path: str) -> dict[str, Any]:
    """Settings from a TOML file whose keys are the flag names without the dashes in front."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not a TOML file: {error}") from None
    values = {}
    for key, value in table.items():
        option = BY_KEY.get(key)
        if option is None:
            near = difflib.get_close_matches(key, BY_KEY, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists the settings"
            raise ConfigError(f"key {key!r} in {path} is unknown; {hint}")
        types = {"int": int, "float": (int, float), "switch": bool}.get(option.kind, str)
        if not isinstance(value, types) or isinstance(value, bool) != (option.kind == "switch"):
            raise ConfigError(f"key {key!r} in {path} is {value!r}: expected "
                              f"{_type_text(option.kind)}")
        values[option.name] = (
            parse(option, value, f"key {key!r} in {path}") if isinstance(value, str) else value)
    return values


def check_paths(config: Config):
    """Refuses an output file that could not be written later; creates nothing."""
    for name in ("checkpoint_path", "final_state", "event_tape"):
        path = getattr(config, name)
        if path is None or (
            name == "checkpoint_path" and config.resume and not os.path.isfile(path)
        ):  # a run that cannot be resumed has a status of its own
            continue
        parent = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(path):
            problem = "is a directory"
        elif not os.path.isdir(parent):
            problem = f"cannot be written: the directory {parent} does not exist"
        elif not os.access(path if os.path.exists(path) else parent, os.W_OK):
            problem = "cannot be written: permission denied"
        else:
            continue
        raise ConfigError(f"{flag(name)} {path} {problem}; name a file in a directory you may "
                          "write to")


def _type_text(kind: str) -> str:
    names = {"int": "a whole number", "float": "a number", "switch": "true or false"}
    return names.get(kind, "a string")


# ------------------------------------------------------------------------------------ docs
def markdown_table() -> str:
    """The flag table of the docs, one row per option."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for option in OPTIONS:
        value = " \\| ".join(option.choices) or option.metavar
        default = default_text(option).removeprefix("default: ")
        rows.append(f"| `{f'{flag(option.name)} {value}'.strip()}` | {default} | {option.help} |")
    return "\n".join(rows) + "\n"
