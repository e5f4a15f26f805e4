"""Arithmetic of a learner's fragment against plain NumPy, to the bit; refused arguments."""

import re

import numpy as np
import pytest

from syncer.errors import ConfigError
from syncer.kernels import decode_bf16, encode_bf16, encode_q4
from syncer.learner import Learner
from syncer.learner.arguments import checked_key
from syncer.learner.client_group import Receipt
from syncer.learner.dialing import backoff_s, parse_address
from syncer.learner.fragment import WINDOW, Fragment
from syncer.learner.send_buffers import SendBuffers
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, KEY_VARIABLES, tensor_bytes

SHAPES = [
    [(5,)],
    [(), (3, 4), (1,)],
    [(255,), (2,), (300, 7)],
    [(WINDOW - 1,), (2,), (WINDOW + 300,)],
    [(2 * WINDOW,)],
    [(1,)] * 600,
]


def tensors(shapes, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]


def flat(arrays) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays])


def as_bf16(values: np.ndarray) -> np.ndarray:
    out = np.empty(2 * values.size, np.uint8)
    encode_bf16(values, out)
    return out


def widened(raw: np.ndarray) -> np.ndarray:
    out = np.empty(raw.size // 2, np.float32)
    assert decode_bf16(raw, out, False) == -1
    return out


@pytest.mark.parametrize("shapes", SHAPES, ids=lambda s: f"{len(s)}x{s[0]}")
@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16, DTYPE_Q4])
def test_anchor_blend_and_delta(shapes, dtype):
    local = tensors(shapes, 0)
    fragment = Fragment(local, dtype)
    assert fragment.anchor is None
    for seed, alpha in ((1, 0.5), (2, 0.3), (3, 0.0)):
        before = flat(local)
        sent = flat(tensors(shapes, seed))
        raw = sent.view(np.uint8) if dtype == DTYPE_F32 else as_bf16(sent)
        anchor = sent if dtype == DTYPE_F32 else widened(raw)
        fragment.rebase(memoryview(raw), alpha)
        np.testing.assert_array_equal(fragment.anchor, anchor)
        blended = np.float32(alpha) * before + np.float32(1 - alpha) * anchor
        np.testing.assert_array_equal(flat(local), anchor if alpha == 0 else blended)

        for array in local:
            np.multiply(array, np.float32(0.99), out=array)
        delta = flat(local) - anchor
        if dtype == DTYPE_F32:
            expected = delta.tobytes()
        elif dtype == DTYPE_BF16:
            expected = as_bf16(delta).tobytes()
        else:
            blocks = np.empty(tensor_bytes(delta.size, DTYPE_Q4), np.uint8)
            encode_q4(delta, blocks)
            expected = blocks.tobytes()
        packed = np.empty(len(expected), np.uint8)
        fragment.pack_delta(packed)
        assert packed.tobytes() == expected


@pytest.mark.parametrize("shapes", SHAPES, ids=lambda s: f"{len(s)}x{s[0]}")
@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16, DTYPE_Q4])
def test_packed_values_and_overwriting(shapes, dtype):
    local = tensors(shapes, 0)
    fragment = Fragment(local, dtype)
    expected = flat(local) if dtype == DTYPE_F32 else as_bf16(flat(local))
    packed = np.empty(expected.nbytes, np.uint8)
    fragment.pack_values(packed)
    assert packed.tobytes() == expected.tobytes()
    cut = tensors(shapes, 1)
    fragment.overwrite(memoryview(flat(cut).view(np.uint8)))
    for array, values in zip(local, cut, strict=True):
        np.testing.assert_array_equal(array, values)
    assert packed.tobytes() == expected.tobytes()  # a copy: training goes on while it is sent


def test_overwriting_replaces_values_that_are_not_finite():
    for alpha_zero in (True, False):
        local = np.array([np.nan, np.inf, 1.0], np.float32)
        fragment = Fragment([local], DTYPE_F32)
        raw = memoryview(np.array([1, 2, 3], "<f4").view(np.uint8))
        if alpha_zero:
            fragment.rebase(raw, 0.0)
        else:
            fragment.overwrite(raw)
        assert local.tolist() == [1, 2, 3]


def test_an_anchor_does_not_follow_the_local_values():
    local = np.ones(4, np.float32)
    fragment = Fragment([local], DTYPE_F32)
    fragment.rebase(memoryview(np.full(4, 3, "<f4").view(np.uint8)), 0.0)
    local += 1
    assert fragment.anchor.tolist() == [3] * 4
    packed = np.empty(16, np.uint8)
    fragment.pack_delta(packed)
    assert packed.view("<f4").tolist() == [1] * 4


def test_send_buffers_come_back_when_they_were_sent_and_only_then():
    buffers = SendBuffers(100)
    sent, waiting, dropped = Receipt(1), Receipt(1), Receipt(1)
    arrays = [buffers.take(size) for size in (100, 60, 10)]
    assert [array.size for array in arrays] == [100, 60, 10]
    for receipt, array in zip((sent, waiting, dropped), arrays, strict=True):
        buffers.lend(receipt, array)
    sent.one_sent()
    dropped.dropped = True
    again = buffers.take(70)
    assert again.base is arrays[0].base
    assert all(buffers.take(100).base is not array.base for array in arrays)
    waiting.one_sent()
    assert buffers.take(1).base is arrays[1].base


def test_no_more_than_two_send_buffers_are_kept():
    buffers = SendBuffers(8)
    arrays = [buffers.take(8) for _ in range(9)]
    for array in arrays:
        buffers.lend(Receipt(0), array)
    kept = [buffers.take(8) for _ in range(4)]
    assert sum(any(a.base is b.base for b in arrays) for a in kept) == 2


GOOD = {"w": np.zeros(3, np.float32)}


@pytest.mark.parametrize(("parameters", "options", "text"), [
    ({}, {}, "at least one parameter"),
    ({"w": np.zeros(3)}, {}, "'w' is float64"),
    ({"w": [1.0]}, {}, "'w' is list"),
    ({"w": np.zeros((4, 4), np.float32)[:, ::2]}, {}, "'w' must be C-contiguous"),
    ({"w": np.broadcast_to(np.float32(1), (3,))}, {}, "'w' must be C-contiguous"),
    ({"w": np.zeros(0, np.float32)}, {}, "only empty ones, for example 'w'"),
    ({"w": np.frombuffer(bytearray(13), np.uint8)[1:].view(np.float32)}, {}, "'w' must be .*alig"),
    ({"w": GOOD["w"], "tied": GOOD["w"]}, {}, "'tied' and 'w' share memory"),
    ({"w": GOOD["w"], "part": GOOD["w"][1:2]}, {}, "'w' and 'part' share memory"),
    ({"w": GOOD["w"], "_fsdp_wrapped_module.w": GOOD["w"]}, {}, "two parameters are called 'w'"),
    (GOOD, {"dtype": "f16"}, "found 'f16'"),
    (GOOD, {"alpha": 1.0}, "alpha must"),
    (GOOD, {"alpha": -0.1}, "alpha must"),
    (GOOD, {"alpha": float("nan")}, "alpha must"),
    (GOOD, {"fragments": 0}, "fragments must"),
    (GOOD, {"pattern": "x"}, "pattern must"),
    (GOOD, {"max_reconnects": -1}, "max_reconnects must"),
    (GOOD, {"address": "nowhere"}, "not host:port"),
])
def test_refused_arguments_are_named_before_anything_is_dialed(parameters, options, text):
    with pytest.raises(ConfigError, match=text):
        Learner(parameters, **{"address": "127.0.0.1:1", "learner_id": 0} | options)


@pytest.mark.parametrize(("address", "expected"), [
    ("127.0.0.1:29400", ("127.0.0.1", 29400)),
    ("some.host:1", ("some.host", 1)),
    ("[::1]:65535", ("::1", 65535)),
])
def test_addresses(address, expected):
    assert parse_address(address) == expected


@pytest.mark.parametrize("address", ["", ":1", "host", "host:", "host:0", "host:65536", "h:-1",
                                     "h:1x", "h:²", "a..b:1", "x" * 64 + ":1"])
def test_bad_addresses(address):
    with pytest.raises(ConfigError, match=r"not host:port|cannot be looked up"):
        parse_address(address)


def test_backoff():
    assert [backoff_s(attempt) for attempt in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff_s(10**9) == 30


def test_a_key_that_is_no_utf_8_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="is no UTF-8") as caught:
        checked_key("hunter2\udcff")
    assert "hunter2" not in str(caught.value)


def test_the_key_comes_from_the_argument_then_the_environment(monkeypatch):
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert checked_key(None) is None
    monkeypatch.setenv("YETO_ISLAND_HMAC_KEY", "second")
    assert checked_key(None) == b"second"
    monkeypatch.setenv("SYNCER_HMAC_KEY", "")
    assert checked_key(None) == b"second"
    monkeypatch.setenv("SYNCER_HMAC_KEY", "erste ü")
    assert checked_key(None) == "erste ü".encode()
    assert checked_key("argument") == b"argument"
    assert checked_key(b"\xff") == b"\xff"
    assert checked_key("") is None




@pytest.mark.parametrize(("change", "words"), [
    (dict(parameters=[GOOD["w"]]), "must be a mapping of names to arrays, found list"),
    (dict(parameters={3: GOOD["w"]}), "a parameter is called 3, expected a text"),
    (dict(parameters={"__metadata__": GOOD["w"]}), "'__metadata__' means something else"),
    (dict(learner_id=-1), "learner_id must be a whole number from 0 to 4294967295, found -1"),
    (dict(learner_id=2**32), "learner_id must be"), (dict(learner_id="0"), "learner_id must be"),
    (dict(learner_id=None), "learner_id must be"), (dict(learner_id=True), "learner_id must be"),
    (dict(alpha=1.0), "alpha must be at least 0 and below 1"), (dict(alpha="x"), "alpha must be"),
    (dict(alpha=float("nan")), "alpha must be"),
    (dict(num_streams=257), "num_streams must be"), (dict(num_streams=1.5), "num_streams must be"),
    (dict(min_steps_per_sync=0), "min_steps_per_sync must be"),
    (dict(max_reconnects=-1), "max_reconnects must be"),
    (dict(connect_timeout_s=-1), "connect_timeout_s must be"),
    (dict(connect_timeout_s="9"), "connect_timeout_s must be"),
    (dict(key="\udcff"), "is no UTF-8"), (dict(key=3.5), "is no UTF-8"),
])
def test_an_argument_that_cannot_be_is_one_sentence_before_anything_is_dialed(change, words):
    arguments = {"parameters": {"a": np.zeros(3, np.float32)}, "address": "127.0.0.1:1",
                 "learner_id": 0, "connect_timeout_s": 0.0} | change
    with pytest.raises(ConfigError, match=re.escape(words)):
        Learner(**arguments)
