"""Where a configuration comes from: command line, then environment, then TOML file, then default.

The rows of config/table.py are the source of `--help`, of the file's keys, of the environment names
and of two tables in the docs. Must not start anything: it reads the file it is given, checks paths.
"""

from __future__ import annotations

import argparse
import difflib
import os
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from syncer.config import OPTIONS, Config
from syncer.config.options import Option, flag
from syncer.config.paths import INPUTS, clash_of_outputs, trouble_of_input, trouble_of_output
from syncer.config.presets import filled
from syncer.config.profile import NEVER_SET, At
from syncer.errors import ConfigError
from syncer.machine import memory_bytes
from syncer.values import OutputFile, Switch, SwitchOr, shortened

BY_NAME = {option.name: option for option in OPTIONS}
BY_KEY = {option.name.replace("_", "-"): option for option in OPTIONS}
CONFIG_BYTES_MAX = 1 << 20
CONFIG_S = 10.0
"""How long the writer of a pipe may take."""
ROSTER_BYTES = 16
"""Of one learner, in core/rounds/membership.pyx, whether it ever comes or not."""
ROSTER_SHARE = 16
"""The roster may take one of so many parts of the memory: the others are for parameters."""
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
    values: dict[str, Any] = read_file(path) if path is not None else {}
    origins = dict.fromkeys(values, f"in {path}")
    from_environment = read_environment(environ)
    values.update(from_environment)
    origins.update(dict.fromkeys(from_environment, "in the environment"))
    for name, text in given.items():
        if name not in BY_NAME:  # --config, and the name of the subcommand
            continue
        values[name] = BY_NAME[name].values.read(flag(name), text)
        origins.pop(name, None)
    missing = [flag(option.name) for option in OPTIONS
               if option.required and option.name not in values]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{' and '.join(missing)} {verb} missing; for example: --learners 2 "
                          "--total-steps 100")
    try:
        config = Config(**values, **filled(values, OPTIONS), given=frozenset(values))
        check_paths(config, path)
        check_memory(config)
    except ConfigError as error:
        named = [f"{flag(n)} is set {where}" for n, where in origins.items()
                 if f"{flag(n)} " in str(error)]
        raise ConfigError(f"{error} ({', '.join(named)})" if named else str(error)) from None
    return config


class OneSentenceParser(argparse.ArgumentParser):
    """Raises `ConfigError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_args(  # type: ignore[override]  # argparse's own has four overloads for namespaces
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
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
        names = [flag(option.name), *option.spellings]
        text = f"{option.help} ({default_text(option)})".replace("%", "%%")
        if isinstance(option.values, Switch):
            group.add_argument(*names, dest=option.name, action="store_const", const="true",
                               help=text)
        elif isinstance(option.values, SwitchOr):
            group.add_argument(*names, dest=option.name, nargs="?", const="true",
                               metavar=option.values.word, help=text)
        else:
            metavar = "|".join(option.values.choices) or option.metavar
            group.add_argument(*names, dest=option.name, metavar=metavar, help=text)
    return result


def default_text(option: Option[Any]) -> str:
    """How help and docs name the default of an option."""
    if option.required:
        return "required"
    if option.unset:
        return f"default: {option.unset}"
    default = option.default
    if default is False:
        return "default: off"
    return f"default: {default:g}" if isinstance(default, float) else f"default: {default}"


# --------------------------------------------------------------------------------- the sources
def read_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """Settings from `SYNCER_<NAME>` and older names; an empty variable counts as unset."""
    values: dict[str, object] = {}
    for option in OPTIONS:
        for variable in (f"SYNCER_{option.name.upper()}", *option.variables):
            if text := environ.get(variable):
                values[option.name] = option.values.read(f"environment variable {variable}", text)
                break
    return values


def read_file(path: str) -> dict[str, object]:
    """Settings from a TOML file whose keys are the flag names without the dashes in front."""
    try:
        table = tomllib.loads(_content(path).decode())
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of the syntax, the encoding, or a number of 4,301 digits
        raise ConfigError(f"--config {path} is not a TOML file: {error}") from None
    values: dict[str, object] = {}
    for key, value in table.items():
        option = BY_KEY.get(key)
        if option is None:
            near = difflib.get_close_matches(key, BY_KEY, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists the settings"
            raise ConfigError(f"key {shortened(repr(key))} in {path} is unknown; {hint}")
        kind, origin = option.values, f"key {key!r} in {path}"
        if not isinstance(value, kind.toml) or (isinstance(value, bool) and bool not in kind.toml):
            shown = "has another type" if option.secret else f"is {shortened(repr(value))}"
            raise ConfigError(f"{origin} {shown}: expected {kind.toml_words}")
        values[option.name] = kind.read(origin, value) if isinstance(value, str) else value
    return values


def _content(path: str) -> bytes:
    """All of a file, or of what a pipe brings until its writer closes it. Raises OSError, and
    `ConfigError` where none comes: a server that waits for its settings looks like one at work."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        waits = not stat.S_ISREG(os.fstat(descriptor).st_mode)
        limit_s, data = time.monotonic() + CONFIG_S, bytearray()
        while len(data) <= CONFIG_BYTES_MAX:
            with suppress(BlockingIOError):
                found = os.read(descriptor, CONFIG_BYTES_MAX)
                data += found
                if not found and (data or not waits):
                    return bytes(data)
                if found:
                    continue
            if time.monotonic() >= limit_s:
                raise ConfigError(f"--config {path} is no regular file, and "
                                  f"{'its end' if data else 'nothing'} came from it within "
                                  f"{CONFIG_S:g} s: name a file")
            time.sleep(0.05)
        raise ConfigError(f"--config {path} is larger than {CONFIG_BYTES_MAX} bytes: name a file "
                          "of settings")
    finally:
        os.close(descriptor)


def check_paths(config: Config, read_from: str | None = None) -> None:
    """Refuses an output file that could not be written later, or is the one that the settings were
    read from; creates nothing."""
    for name in (option.name for option in OPTIONS if isinstance(option.values, OutputFile)):
        path: str | None = getattr(config, name)
        if path is None or (
            name == "checkpoint_path" and _is_judged_later(config, path)
        ):  # a run that cannot be resumed has a status of its own
            continue
        problem = trouble_of_output(config, name)
        if problem is not None:
            raise ConfigError(f"{flag(name)} {path} {problem}")
    for name in INPUTS:
        path = getattr(config, name)
        problem = None if path is None else trouble_of_input(path)
        if problem is not None:
            raise ConfigError(f"{flag(name)} {path} {problem}")
    clash = clash_of_outputs(config, read_from)
    if clash is not None:
        raise ConfigError(clash)


def _is_judged_later(config: Config, path: str) -> bool:
    directory = os.path.dirname(os.path.realpath(path))
    return (config.resume is True and not os.path.isfile(path)) or (
        config.resume == "auto" and not os.path.isdir(directory))


def check_memory(config: Config) -> None:
    """Refuses a roster that would leave no memory for parameters, before any of it is taken."""
    most = memory_bytes() // ROSTER_SHARE // ROSTER_BYTES
    if config.learners > most:
        raise ConfigError(f"--learners {config.learners} would take "
                          f"{config.learners * ROSTER_BYTES / 2**30:.1f} GiB for the roster alone: "
                          f"give at most {most} on this machine")


# ------------------------------------------------------------------------------------ docs
def markdown_table() -> str:
    """The flag table of the docs, one row per option."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for option in OPTIONS:
        value = " | ".join(option.values.choices) or option.metavar
        shown = f"{flag(option.name)} {value}".strip().replace("|", "\\|")
        default = default_text(option).removeprefix("default: ")
        rows.append(f"| `{shown}` | {default} | {option.help} |")
    return "\n".join(rows) + "\n"


def needs_table() -> str:
    """What each setting has no effect without, for the docs."""
    rows = ["| setting | has no effect without | then |", "|---|---|---|"]
    for option in OPTIONS:
        for need in option.needs:
            shown = f"{flag(option.name)} {option.default if option.idle else ''}".strip()
            rows.append(f"| `{shown}` | {need} | {'refused' if need.refused else 'WARN'} |")
    return "\n".join(rows) + "\n"


def profile_table() -> str:
    """What the profile hash holds, for the docs: fields in order, then the later features."""
    rows = {NEVER_SET[0].position: ("policy sweep of other servers", "One byte: 0.")}
    for option in OPTIONS:
        if isinstance(option.hashed, At):
            about = option.hashed.encode.__doc__ or ""
            rows[option.hashed.position] = f"`{flag(option.name)}`", about
    lines = ["| | of | bytes |", "|---|---|---|"]
    lines += [f"| {n} | {of} | {about.rstrip('.').lower()} |"
              for n, (of, about) in sorted(rows.items())]
    later = ", ".join(f"`{o.name}`" for o in sorted(OPTIONS, key=lambda o: o.name)
                      if o.hashed == "by name")
    return "\n".join([*lines, "", f"Later features: {later}."]) + "\n"
