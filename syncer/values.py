"""Kinds of values: how a text is read, what is admitted, and how a refusal says it.

Must not name any setting: which setting takes which kind stands in config/table.py or, where more
than one room knows it, in ranges.py.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeGuard, TypeVar

from syncer.errors import ConfigError
from syncer.tcp import UNIX, UNIX_PATH_MAX, path_trouble

U32, I63 = 2**32 - 1, 2**63 - 1
VALUE_LETTERS_MAX = 120
Median = Literal["median"]
T_co = TypeVar("T_co", covariant=True)
W = TypeVar("W", bound=str)


def refusal(what: str, value: object, words: str) -> ConfigError:
    """The one sentence about a value that is not admitted."""
    if isinstance(value, str) and not value.isprintable():
        value = repr(value)
    return ConfigError(f"{what} {shortened(value)} cannot be used: give {words}")


def shortened(value: object) -> str:
    """A value as a sentence takes it: of a number of 400 digits, its ends."""
    text = str(value)
    if len(text) <= VALUE_LETTERS_MAX:
        return text
    begin, end = text[:VALUE_LETTERS_MAX // 2], text[-VALUE_LETTERS_MAX // 4:]
    return f"{begin}…{end} ({len(text)} characters)"


class Values(Generic[T_co]):
    """What a setting may be; `T_co` is the type of an admitted value."""

    words: str
    """What is admitted, in the words of a refusal."""
    written: str
    """What a text has to look like, in the words of a refusal."""
    choices: tuple[str, ...] = ()
    """All there is to choose from, if it is a list of names."""
    toml: tuple[type, ...] = (str,)
    toml_words = "a string"

    def parse(self, text: str) -> object:
        """The value that a text stands for, admitted or not. Raises ValueError if it is none."""
        raise NotImplementedError

    def admits(self, value: object) -> TypeGuard[T_co]:
        """Whether a setting may have this value."""
        raise NotImplementedError

    def read(self, origin: str, text: str) -> object:
        """As `parse`. Raises `ConfigError`, which names `origin`: a flag, a variable, a key."""
        try:
            return self.parse(text)
        except ValueError:
            raise refusal(origin, repr(text), self.written) from None

    def hashed(self, value: Any) -> object:
        """An admitted value in the form that its text gives it: equal values have equal hashes."""
        return value

    def check(self, what: str, value: object) -> None:
        """Raises `ConfigError` for a value that is not admitted; `what` is who has it."""
        if not self.admits(value):
            raise refusal(what, value, self.words)


class Whole(Values[int]):
    """Whole numbers from `low` to `high`, both admitted."""

    written = "a whole number"
    toml = (int,)
    toml_words = written

    def __init__(self, low: int, high: int = I63):
        self.low, self.high = low, high
        self.words = "a whole number " + (
            f">= {low}" if high == I63 else f"between {low} and {high}")

    def parse(self, text: str) -> int:
        return int(text)

    def admits(self, value: object) -> TypeGuard[int]:
        return type(value) is int and self.low <= value <= self.high


class Real(Values[float]):
    """Numbers from `low` to `high`, both admitted."""

    written = "a number"
    toml = (int, float)
    toml_words = written

    def __init__(self, low: float, high: float):
        self.low, self.high = low, high
        self.words = f"a number between {low:g} and {high:g}"

    def parse(self, text: str) -> float:
        return float(text)

    def admits(self, value: object) -> TypeGuard[float]:
        return is_real(value) and self.low <= value <= self.high

    def hashed(self, value: Any) -> object:
        return float(value) if type(value) is int else value


class Single(Values[float]):
    """Numbers that are used as f32: as such they are finite, >= 0 and less than `below`."""

    written = Real.written
    toml = Real.toml
    toml_words = Real.toml_words

    def __init__(self, below: float = math.inf):
        self.below = below
        self.words = ("a finite f32 number >= 0" if below == math.inf else
                      f"a number >= 0 that is below {below:g} also as f32")

    def parse(self, text: str) -> float:
        return float(text)

    def admits(self, value: object) -> TypeGuard[float]:
        return is_real(value) and 0.0 <= as_f32(value) < self.below


class MedianOrNorm(Values[float | Median]):
    """The word median, or a finite number above 0."""

    words = "median or a norm above 0"
    written = words

    def parse(self, text: str) -> float | str:
        return text if text == "median" else float(text)

    def admits(self, value: object) -> TypeGuard[float | Median]:
        return value == "median" or (is_real(value) and value > 0.0)

    def hashed(self, value: Any) -> object:
        return float(value) if type(value) is int else value


class MedianOrTrim(Values[int | Median]):
    """The word median, or how many values a trimmed mean drops at each end: `least` or more."""

    written = "median or trimmed-mean:F, for example trimmed-mean:1"

    def __init__(self, least: int):
        self.least = least
        self.words = f"median or trimmed-mean:F with F >= {least}"

    def parse(self, text: str) -> int | str:
        return text if text == "median" else int(text.removeprefix("trimmed-mean:"))

    def admits(self, value: object) -> TypeGuard[int | Median]:
        return value == "median" or (type(value) is int and value >= self.least)


class Verbatim(Values[T_co]):
    """Values that are their own text."""

    def parse(self, text: str) -> str:
        return text

    def read(self, origin: str, text: str) -> object:
        if not text:
            raise ConfigError(f"{origin} is empty: give a value or leave it out")
        return text


class Text(Verbatim[str]):
    """Any text of Unicode without NUL, which nothing below takes."""

    words = "a text in UTF-8 without NUL"

    def admits(self, value: object) -> TypeGuard[str]:
        return isinstance(value, str) and "\0" not in value and can_be_encoded(value, "utf-8")


class Matching(Verbatim[str]):
    """Texts that are a pattern from end to end."""

    def __init__(self, pattern: str, words: str):
        self.pattern, self.words = re.compile(pattern, re.ASCII), words

    def admits(self, value: object) -> TypeGuard[str]:
        return isinstance(value, str) and self.pattern.fullmatch(value) is not None


class Secret(Text):
    """A text that nobody may read in a refusal."""

    def check(self, what: str, value: object) -> None:
        if not self.admits(value):
            raise ConfigError(f"{what} cannot be used: give {self.words}")


class HostName(Text):
    """The name or address of a host: a text that the system's resolver takes."""

    words = "a name or address of labels of 1 to 63 characters"

    def admits(self, value: object) -> TypeGuard[str]:
        return super().admits(value) and can_be_encoded(value, "idna")


class LearnerNames(Verbatim[str]):
    """What learners are called: a text with {id}, or id=name,... for each of them."""

    words = "a text with {id}, or pairs like 0=alpha,1=beta"
    written = "learner-{id}, or pairs like 0=alpha,1=beta"

    def admits(self, value: object) -> TypeGuard[str]:
        return isinstance(value, str) and ("{id}" in value or bool(names_of_learners(value)))


def names_of_learners(text: str) -> dict[int, str]:
    """The pairs of such a text; none if it is something else."""
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(number.isascii() and number.isdigit() and name for number, _, name in pairs):
        return {}
    found = {int(number): name for number, _, name in pairs}
    return found if len(found) == len(pairs) else {}


class UnixPath(Verbatim[str]):
    """Where a Unix socket is."""

    words = f"unix:/PATH, where /PATH is absolute and has at most {UNIX_PATH_MAX} bytes"

    def admits(self, value: object) -> TypeGuard[str]:
        return (isinstance(value, str) and value.startswith(UNIX)
                and not path_trouble(self.place(value)))

    @staticmethod
    def place(value: str) -> str:
        """The path alone."""
        return value.removeprefix(UNIX)


class FilePath(Verbatim[str]):
    """The path of a file: any bytes but NUL, as the system has it."""

    words = "a path without NUL"

    def admits(self, value: object) -> TypeGuard[str]:
        return (isinstance(value, str) and "\0" not in value
                and can_be_encoded(value, "utf-8", "surrogateescape"))


class OutputFile(FilePath):
    """Of one that is going to be written."""


class InputFile(FilePath):
    """Of one that is only read."""


class Choice(Verbatim[T_co]):
    """One of a few names."""

    def __init__(self, names: Sequence[T_co]):
        self.choices = tuple(str(name) for name in names)
        self.words = " or ".join(self.choices)

    def admits(self, value: object) -> TypeGuard[T_co]:
        return value in self.choices


class Switch(Values[bool]):
    """On or off."""

    words = "true or false"
    written = "1 or 0 (true or false)"
    toml = (bool,)
    toml_words = words

    def parse(self, text: str) -> bool:
        values = {"1": True, "true": True, "0": False, "false": False}
        if text.lower() not in values:
            raise ValueError(text)
        return values[text.lower()]

    def admits(self, value: object) -> TypeGuard[bool]:
        return type(value) is bool


class SwitchOr(Values[bool | W]):
    """On, off, or one word; on the command line the flag alone is on."""

    toml = (bool, str)

    def __init__(self, word: W):
        self.word, self.switch = word, Switch()
        self.words = self.toml_words = f"{Switch.words} or {word}"
        self.written = self.words

    def parse(self, text: str) -> bool | str:
        return text if text == self.word else self.switch.parse(text)

    def admits(self, value: object) -> TypeGuard[bool | W]:
        return type(value) is bool or (isinstance(value, str) and value == self.word)


class Digest(Values[bytes]):
    """32 bytes."""

    words = "32 bytes as 64 hexadecimal digits"
    written = "64 hexadecimal digits"

    def parse(self, text: str) -> bytes:
        if len(text) != 64 or not text.isalnum():  # fromhex skips blanks
            raise ValueError(text)
        return bytes.fromhex(text)

    def admits(self, value: object) -> TypeGuard[bytes]:
        return type(value) is bytes and len(value) == 32

    def check(self, what: str, value: object) -> None:
        if isinstance(value, bytes) and len(value) != 32:
            raise ConfigError(f"{what} has {len(value)} bytes: give {self.words}")
        super().check(what, value)


class PerLearner(Values[tuple[tuple[int, float], ...]]):
    """A number for each of some learners, by id."""

    written = "pairs like 0=2,1=0.5"
    words = written

    def __init__(self, each: Real):
        self.each = each

    def parse(self, text: str) -> tuple[tuple[int, float], ...]:
        pairs = [item.split("=") for item in text.split(",")]
        return tuple((int(learner), float(number)) for learner, number in pairs)

    def admits(self, value: object) -> TypeGuard[tuple[tuple[int, float], ...]]:
        return (isinstance(value, tuple)
                and all(isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is int
                        and self.each.admits(pair[1]) for pair in value))

    def hashed(self, value: Any) -> object:
        return tuple((learner, self.each.hashed(number)) for learner, number in value)

    def check(self, what: str, value: object) -> None:
        for pair in value if isinstance(value, tuple) else ():
            if isinstance(pair, tuple) and len(pair) == 2 and not self.each.admits(pair[1]):
                raise refusal(what, f"{pair[0]}={pair[1]}", self.each.words)
        super().check(what, value)


def is_real(value: object) -> TypeGuard[float]:
    """Whether it is a number that is finite as f64; a truth value is none."""
    try:
        return (isinstance(value, int | float) and not isinstance(value, bool)
                and math.isfinite(value))
    except OverflowError:  # a whole number of more than 308 digits
        return False


def can_be_encoded(text: str, encoding: str, errors: str = "strict") -> bool:
    """Whether it can; bytes from the command line or the environment may be of no encoding."""
    try:
        text.encode(encoding, errors)
    except UnicodeError:
        return False
    return True


def as_f32(value: float) -> float:
    """The value as merges will use it: rounded to f32, infinite when it does not fit."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.inf
    return rounded
