"""One flag is one row: what it may be, its default, what it needs, how it enters the profile hash.

Must not know any flag: the rows are fields of `Config` in table.py, each written with `setting`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar, dataclass_transform, overload

from syncer.config.profile import At
from syncer.values import Values

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
D = TypeVar("D")
NO_DEFAULT = object()
Group = Literal["run", "checkpoint", "network", "rounds", "merge", "log"]
"""Where `--help` shows a setting."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address stays on this machine, decided without a name lookup."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def flag(name: str) -> str:
    """The flag of a field: `grace_ms` -> `--grace-ms`."""
    return "--" + name.replace("_", "-")


class Need(NamedTuple):
    """What a setting has no effect without: another one that is on, or has one of these values."""

    name: str
    values: tuple[str, ...] = ()
    off: bool = False
    """It is the other way round: the other setting replaces this one, so it must be off."""
    refused: bool = False
    """A file is asked for and this says where: there is no run without it."""
    words: str = ""
    """How it is named, if not as flag and value."""
    also: str = ""
    """A setting that does as well."""
    below: str = ""
    """Another number that this one has to be less than."""
    beyond: bool = False
    """It is an address to listen on: not one of this machine alone."""

    def holds(self, config: object) -> bool:
        """Whether this configuration has it."""
        if self.also and getattr(config, self.also):
            return True
        value = getattr(config, self.name)
        if self.below:
            return bool(value < getattr(config, self.below))
        if self.beyond:
            return value is None or not is_loopback(value)
        return value in self.values if self.values else bool(value) != self.off

    def __str__(self) -> str:
        if self.below:
            return f"{flag(self.name)} below {flag(self.below)}"
        if self.beyond:
            return f"{flag(self.name)} beyond this machine"
        return self.words or "no " * self.off + " ".join([flag(self.name), *self.values])


@dataclass(frozen=True)
class Option(Generic[T_co]):
    """One row: a field of `Config` as people write it."""

    group: Group
    values: Values[T_co]
    help: str
    _: KW_ONLY
    metavar: str = ""
    """Name of its value in `--help`; a switch has none, a choice shows its names instead."""
    unset: str = ""
    """What holds when nothing is given, where the default does not say it."""
    needs: tuple[Need, ...] = ()
    """It has no effect without each of these: whoever sets it then is told so, or refused."""
    idle: object = ""
    """Its value that asks for nothing, beside off: this one is never without effect."""
    usual: float | None = None
    """The most that makes sense: whoever sets more is told that it looks like a mistake."""
    hashed: At | Literal["by name"] | None = None
    """Its place in the profile hash; "by name": of a later feature, there if not the default. None
    where it changes neither what is merged nor when."""
    spellings: tuple[str, ...] = ()
    """Older flags for it."""
    variables: tuple[str, ...] = ()
    """Environment variables for it beside `SYNCER_<NAME>`, which wins."""
    secret: bool = False
    """Its value is never shown."""
    name: str = ""
    """Filled in from the field, as is `default`."""
    default: object = NO_DEFAULT
    """NO_DEFAULT where it must be given, or is computed when it is not."""

    @property
    def required(self) -> bool:
        """Whether there is no run without it."""
        return self.default is NO_DEFAULT and not self.unset

    def check(self, value: object) -> None:
        """Raises `ConfigError` for a value that the flag may not have; None only as default."""
        if value is not None or self.default is not None:
            self.values.check(flag(self.name), value)

    def lacks(self, config: object) -> Need | None:
        """What this configuration has not, so that the value it has here is without effect."""
        need = next((need for need in self.needs if not need.holds(config)), None)
        if need is None:
            return None
        value = getattr(config, self.name)
        return None if value is None or value is False or value == self.idle else need


@overload
def setting(*, row: Option[T]) -> T: ...
@overload
def setting(*, default: D, row: Option[T]) -> T | D: ...
@overload
def setting(*, default_factory: Callable[[], T], row: Option[T]) -> T: ...
def setting(*, default: Any = MISSING, default_factory: Any = MISSING, row: Any) -> Any:
    """A field with its row: required, with a default, or with one that is computed at the start."""
    about, shown = {"row": row}, not row.secret
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=about, repr=shown)
    return field(default=default, metadata=about, repr=shown)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(setting, field))
def settings(table: type[T]) -> type[T]:
    """Makes a class whose fields are rows, or say something of them, a frozen dataclass."""
    return dataclass(frozen=True, kw_only=True)(table)


def rows_of(table: type[Any]) -> tuple[Option[Any], ...]:
    """The rows of such a class, in the order they are written."""
    return tuple(
        replace(f.metadata["row"], name=f.name,
                default=NO_DEFAULT if f.default is MISSING else f.default)
        for f in fields(table) if "row" in f.metadata)
