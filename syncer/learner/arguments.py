"""What a `Learner` is given: checked before anything is dialed, and each mistake one sentence.

Must not keep anything, or know a session.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from syncer.errors import ConfigError
from syncer.learner.partition import canonical_name
from syncer.protocol import KEY_VARIABLES

WHOLE_KINDS = int, np.integer
NUMBER_KINDS = *WHOLE_KINDS, float, np.floating
BOUNDS: dict[str, tuple[Any, float, float, str]] = {
    "learner_id": (WHOLE_KINDS, 0, 2**32 - 1, "a whole number from 0 to 4294967295"),
    "alpha": (NUMBER_KINDS, 0, 1 - 2**-53, "at least 0 and below 1"),
    "num_streams": (WHOLE_KINDS, 0, 256, "a whole number from 0 to 256"),
    "min_steps_per_sync": (WHOLE_KINDS, 1, math.inf, "a whole number of at least 1"),
    "max_reconnects": (WHOLE_KINDS, 0, math.inf, "a whole number of at least 0, or None"),
    "connect_timeout_s": (NUMBER_KINDS, 0, math.inf, "a number of at least 0"),
}


def checked_numbers(**numbers: Any) -> None:
    """Raises `ConfigError` for a number that its argument cannot have."""
    for name, value in numbers.items():
        kinds, low, high, words = BOUNDS[name]
        if value is None and name == "max_reconnects":
            continue
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not (fits and low <= value <= high):
            raise ConfigError(f"{name} must be {words}, found {value!r}")


def checked_parameters(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By the names that every learner of the model agrees on."""
    if not isinstance(parameters, Mapping):
        raise ConfigError("the parameters must be a mapping of names to arrays, found "
                          f"{type(parameters).__name__}")
    arrays: dict[str, np.ndarray] = {}
    for name, array in parameters.items():
        if not isinstance(name, str):
            raise ConfigError(f"a parameter is called {name!r}, expected a text")
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            found = getattr(array, "dtype", type(array).__name__)
            raise ConfigError(f"parameter {name!r} is {found}, expected a NumPy array of float32")
        if not array.flags.carray:
            raise ConfigError(f"parameter {name!r} must be C-contiguous, aligned and writable, so "
                              "that it can be changed in place; pass a copy and train on that")
        if canonical_name(name) in arrays:
            raise ConfigError(f"two parameters are called {canonical_name(name)!r} without the "
                              "prefixes of their wrappers")
        arrays[canonical_name(name)] = array
    places = sorted((array.ctypes.data, array.nbytes, name) for name, array in arrays.items()
                    if array.size)
    for (start, size, name), (behind, _, other) in itertools.pairwise(places):
        if start + size > behind:
            raise ConfigError(f"parameters {name!r} and {other!r} share memory; pass tied "
                              "parameters once")
    return arrays


def checked_key(key: str | bytes | None) -> bytes | None:
    """The island key as bytes; the environment if None, and no key if empty."""
    if key is None:
        key = next((value for name in KEY_VARIABLES if (value := os.environ.get(name))), "")
    try:
        return (key.encode() if isinstance(key, str) else bytes(key)) or None
    except (TypeError, ValueError):
        raise ConfigError(f"the key, given or in {' or '.join(KEY_VARIABLES)}, is no UTF-8: give a "
                          "text, or bytes") from None
