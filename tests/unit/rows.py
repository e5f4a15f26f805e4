"""What the tests of flags need to walk every row: values at the ends, another value, companions."""

import math

from syncer.config import OPTIONS
from syncer.values import (
    Choice,
    Digest,
    HostName,
    InputFile,
    LearnerNames,
    Matching,
    MedianOrNorm,
    MedianOrTrim,
    OutputFile,
    PerLearner,
    Real,
    Secret,
    Single,
    Switch,
    SwitchOr,
    UnixPath,
    Whole,
)

LARGEST_F32 = math.nextafter(2.0**128 - 2.0**103, 0)
"""The largest number that is rounded to a finite f32, and the one that is rounded below 1."""
LARGEST_BELOW_1 = math.nextafter(1.0 - 2.0**-25, 0)


def below(number):
    return number - 1 if isinstance(number, int) else math.nextafter(number, -math.inf)


def above(number):
    return number + 1 if isinstance(number, int) else math.nextafter(number, math.inf)


def ends_of_reals(values):
    low, high = float(values.low), float(values.high)
    return [low, high], [below(low), above(high), math.nan, str(low), True]


def ends_of_singles(values):
    high = LARGEST_BELOW_1 if values.below == 1.0 else LARGEST_F32
    return [0, -(2.0**-150), high], [below(-(2.0**-150)), above(high), math.nan, False]


def ends_per_learner(values):
    admitted, refused = ends_of_reals(values.each)
    return ([(), *(((0, number),) for number in admitted)],
            [*(((0, number),) for number in refused), ((0.0, 1.0),), ((0,),), [(0, 1.0)], 3])


ENDS = {
    Whole: lambda kind: ([kind.low, kind.high],
                         [below(kind.low), above(kind.high), float(kind.low), True]),
    Real: ends_of_reals,
    Single: ends_of_singles,
    PerLearner: ends_per_learner,
    MedianOrNorm: lambda _: (["median", 5e-324, 1.7e308], ["mean", 0.0, math.inf, True]),
    MedianOrTrim: lambda kind: (["median", kind.least, 10**9],
                                ["mean", below(kind.least), 1.0, True]),
    Choice: lambda kind: (kind.choices, ["", "zz", kind.choices[0].upper(), 0]),
    Switch: lambda _: ([True, False], [1, "true"]),
    SwitchOr: lambda kind: ([True, False, kind.word], [1, "true", kind.word.upper()]),
    Digest: lambda _: ([bytes(32)], [bytes(31), bytes(33), "00" * 32]),
    Secret: lambda _: (["x", "\u00e9\n"], [3, b"x", "a\0b", "\udcff"]),
    HostName: lambda _: (["x", "::1", "a" * 63, "a.b.", "b\u00fccher.example"],
                         [3, b"x", "a\0b", "\udcff", "a..b", ".", "a" * 64]),
    Matching: lambda _: (["x", 64 * "Z", "._-0"], ["", 65 * "x", "a b", "\u00e4", "x\n", 3, b"x"]),
    LearnerNames: lambda _: (["{id}", "l-{id}.x", "0=a,1=b", "7=x=y"],
                             ["", "x", "0=", "=a", "0=a,0=b", "0=a,", 3, b"{id}"]),
    UnixPath: lambda _: (["unix:/x", "unix:/" + 106 * "y"],
                         ["/x", "unix:x", "unix:", "unix:/" + 107 * "y", "unix:/a\0", 3, b"x"]),
    OutputFile: lambda _: (["x", "\udcff"], [3, b"x", "a\0b", "\ud800"]),
    InputFile: lambda _: (["x", "\udcff"], [3, b"x", "a\0b", "\ud800"]),
}
OTHERS = {
    Whole: ("3", 3), Real: ("0.25", 0.25), Single: ("0.5", 0.5), MedianOrNorm: ("2.5", 2.5),
    MedianOrTrim: ("trimmed-mean:1", 1), Switch: ("true", True),
    SwitchOr: ("true", True), OutputFile: ("f", "f"), InputFile: ("f", "f"),
    UnixPath: ("unix:/s", "unix:/s"), LearnerNames: ("l{id}", "l{id}"),
    Digest: ("ab" * 32, b"\xab" * 32), PerLearner: ("0=2,3=0.5", ((0, 2.0), (3, 0.5))),
    HostName: ("127.0.0.2", "127.0.0.2"), Secret: ("k2", "k2"), Matching: ("blue", "blue"),
}


def ends(values):
    """Values of this kind that are admitted, and values just beyond that are refused."""
    return ENDS[type(values)](values)


def another(option):
    """A value that is not the default, as text and as the configuration has it."""
    choices = option.values.choices
    return (choices[-1], choices[-1]) if choices else OTHERS[type(option.values)]


BY_NAME = {option.name: option for option in OPTIONS}
ON = {"late_carry": True, "quorum_capacity": 0.5, "checkpoint_path": "c", "resume": True,
      "grace_ms": 1000, "event_tape": "t", "island_hmac_key": "k",
      "quorum": 3, "robust": "median", "background_checkpoint": True, "tls_cert": "f",
      "host": None}
TLS_FILES = ("tls_cert", "tls_key", "tls_client_ca")
"""All of them, or none."""
OFF = {"delta_correction": "none", "outer_optimizer": "sgd", "grace_ms": 0, "host": "127.0.0.1"}
"""What takes the effect of settings that need these, where leaving them out does not."""


def companions(option):
    """Settings that this one needs besides four learners, by name."""
    found = {"quorum": 3} if option.name == "robust" else {}
    if option.name.startswith("tls_"):
        found |= {name: "f" for name in TLS_FILES if name != option.name}
    for need in option.needs:
        if not need.off:
            found[need.name] = need.values[0] if need.values else ON[need.name]
    return {name: value for name, value in found.items() if value != BY_NAME[name].default}


def texts(settings):
    """Settings as a command line."""
    return [word for name, value in settings.items()
            for word in [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])]
