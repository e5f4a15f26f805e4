"""Bytes made from bytes: what a fuzz target is given next. Must not know a format.

`mutated` changes an input in a few places, as a disk, a bug or an attacker would: bits, lengths
that are off by one or enormous, pieces that are gone, doubled, moved or from another input. All
chance is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

EDGES = (0, 1, 2, 3, 4, 7, 8, 12, 13, 16, 24, 32, 37, 63, 64, 65, 127, 128, 255, 256, 4096, 16383,
         16384, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63,
         2**64 - 1)
"""Numbers at which something begins or ends."""


def mutated(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """`data` with one to four changes; pieces of `others` may come into it."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        random.choice(CHANGES)(random, found, others)
    return bytes(found)


def _span(random: Random, data: Sequence[int] | bytes, most: int = 64) -> tuple[int, int]:
    """A piece of it, short more often than long."""
    begin = random.randrange(len(data) + 1)
    return begin, min(len(data), begin + random.randrange(1, random.choice((2, 4, 9, most)) + 1))


def _flip(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _byte(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] = random.randrange(256)


def _number(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A little-endian number that is something else now: an edge, or near what it was."""
    size = random.choice((1, 2, 4, 8))
    if len(data) < size:
        return
    at = random.randrange(len(data) - size + 1)
    if random.random() < 0.5:
        number = int.from_bytes(data[at : at + size], "little") + random.choice((-2, -1, 1, 2, 13))
    else:
        number = random.choice(EDGES) + random.choice((-1, 0, 0, 1))
    data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")


def _digit(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Text formats: another character of the same kind, or a mark that ends or nests something."""
    if data:
        data[random.randrange(len(data))] = random.choice(b'0123456789abcdef-+.eE"\\{}[],:= \n\0')


def _cut(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    begin, end = _span(random, data)
    del data[begin:end]


def _end(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[random.randrange(len(data) + 1):]


def _double(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    begin, end = _span(random, data)
    data[begin:begin] = data[begin:end]


def _move(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    begin, end = _span(random, data)
    piece = data[begin:end]
    del data[begin:end]
    at = random.randrange(len(data) + 1)
    data[at:at] = piece


def _insert(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = random.randbytes(random.choice((1, 1, 2, 4, 8, 20)))


def _splice(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    if others:
        other = random.choice(others)
        begin, end = _span(random, other, 400)
        at, until = _span(random, data, 400)
        data[at : until if random.random() < 0.5 else at] = other[begin:end]


CHANGES = (_flip, _byte, _number, _number, _digit, _cut, _end, _double, _move, _insert, _splice)
