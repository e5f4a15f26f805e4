"""SHA-256 variants against hashlib: every short length, every split, pairs, the length counter."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from syncer import kernels
from syncer.kernels import testing
from tests.differential.guarded import Guarded

DATA = np.random.default_rng(11).bytes(5000)


@pytest.fixture(params=[name for name, usable in kernels.variants()["sha256"] if usable])
def variant(request):
    with testing.forced(sha256=request.param):
        yield request.param


def expected(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_every_length_to_300_at_the_end_of_a_page(variant: str) -> None:
    for n in range(301):
        held = Guarded(n)
        held.bytes[:] = np.frombuffer(DATA, np.uint8)[:n]
        assert kernels.sha256(held.bytes) == expected(DATA[:n]), n
        assert held.intact()


def test_split_at_every_point(variant: str) -> None:
    for cut in range(301):
        stream = kernels.Sha256(DATA[:cut])
        middle = stream.copy()
        stream.update(DATA[cut:300])
        assert stream.digest() == expected(DATA[:300]), cut
        assert middle.digest() == expected(DATA[:cut]), cut


def test_many_small_updates(variant: str) -> None:
    for step in (1, 3, 63, 64, 65, 127, 200):
        stream = kernels.Sha256()
        for start in range(0, len(DATA), step):
            stream.update(DATA[start : start + step])
        assert stream.digest() == expected(DATA), step


def test_pairs_of_unequal_length(variant: str) -> None:
    lengths = [0, 1, 55, 56, 63, 64, 65, 127, 128, 129, 1000, 4999]
    for na in lengths:
        for nb in lengths:
            a, b = DATA[:na], DATA[1 : 1 + nb]
            assert kernels.sha256_pair(a, b) == (expected(a), expected(b)), (na, nb)


def test_streams_updated_in_pairs_at_every_phase(variant: str) -> None:
    """Interleaved or one by one, whatever the streams already hold back."""
    for first_a, first_b in [(0, 0), (64, 128), (1, 0), (63, 65), (7, 7)]:
        for na, nb in [(0, 0), (1, 200), (64, 64), (640, 700), (1000, 63)]:
            a, b = kernels.Sha256(DATA[:first_a]), kernels.Sha256(DATA[:first_b])
            kernels.sha256_update_pair(a, DATA[first_a:first_a + na], b,
                                       DATA[first_b:first_b + nb])
            kernels.sha256_update_pair(a, b"tail", b, b"end")
            assert a.digest() == expected(DATA[:first_a + na] + b"tail"), (first_a, na)
            assert b.digest() == expected(DATA[:first_b + nb] + b"end"), (first_b, nb)
    with pytest.raises(ValueError, match="two different streams"):
        kernels.sha256_update_pair(a, b"", a, b"")


def test_misaligned_starts(variant: str) -> None:
    for offset in range(17):
        view = memoryview(DATA)[offset : offset + 640]
        assert kernels.sha256(view) == expected(bytes(view)), offset
        assert kernels.sha256_pair(view, view[3:]) == (expected(view), expected(view[3:])), offset


def test_length_counter_past_32_bits_of_message_bits() -> None:
    """512 MiB are 2^32 bits; the counter is shared by all variants, so the fastest one will do."""
    piece, stream, reference = DATA[:4096] * 256, kernels.Sha256(), hashlib.sha256()
    for _ in range(513):
        stream.update(piece)
        reference.update(piece)
    assert stream.digest() == reference.digest()


def test_length_counter_past_32_bits_of_bytes() -> None:
    """2^32 + 3 bytes; the digest was computed once with hashlib."""
    piece, stream = bytes(range(256)) * 4096, kernels.Sha256()
    for _ in range(4096):
        stream.update(piece)
    stream.update(b"end")
    expected_hex = "03441c91bec56757cc882e0bea730242121b9626058d65c099af9ee476cbd69a"
    assert stream.hexdigest() == expected_hex
