"""The fuzzing itself: inputs of a target from a seed, in batches, and what a finding becomes.

A batch depends on seed, target and its number alone. Must not know processes or options.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from random import Random

from tests.fuzz.corpus import kept
from tests.fuzz.mutate import mutated
from tests.fuzz.target import Target

BATCH = 250
POOL = 24
"""Inputs that a batch makes anew; the others are mutations of them and of the corpus."""
TRIES_MAX = 3000
"""Attempts to make a finding smaller."""


def inputs(name: str, target: Target, seed: int, batch: int) -> Iterator[bytes]:
    """The inputs of one batch; batch 0 begins with the corpus as it is."""
    random = Random(f"{seed} {name} {batch}")
    own = kept(name)
    if batch == 0:
        yield from own
    pool = [target.make(random) for _ in range(POOL)]
    yield from pool
    sources = pool + own
    for _ in range(BATCH - POOL):
        data = mutated(random, random.choice(sources), sources)
        yield target.mend(data) if random.random() < 0.8 else data


def finding(check: Callable[[bytes], bool], data: bytes) -> str | None:
    """What this input brings to light, without the numbers in it; None: nothing."""
    try:
        check(data)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {place.filename.rpartition('/')[2]}:{place.lineno}"
    return None


def smaller(check: Callable[[bytes], bool], data: bytes) -> bytes:
    """An input that brings the same to light, with as much left out as is found quickly."""
    wanted, tries = finding(check, data), TRIES_MAX
    size = len(data) // 2
    while size and tries > 0:
        at = 0
        while at < len(data) and tries > 0:
            shorter = data[:at] + data[at + size :]
            tries -= 1
            if finding(check, shorter) == wanted:
                data = shorter
            else:
                at += size
        size //= 2
    return data
