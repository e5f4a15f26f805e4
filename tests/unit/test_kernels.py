"""Kernels: argument checks, digests and small known values of the selected variants."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from syncer import kernels
from syncer.kernels import testing
from syncer.protocol import tensor_bytes

F32 = np.float32


def f32(*values: float) -> np.ndarray:
    return np.array(values, F32)


def bits(x: np.ndarray) -> list[str]:
    return [f"{v:08x}" for v in x.view(np.uint32)]


def test_sha256_nist_vectors() -> None:
    cases = {
        b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq": (
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        ),
        b"a" * 1_000_000: "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
    }
    for message, expected in cases.items():
        assert kernels.sha256(message).hex() == expected
        assert kernels.Sha256(message).hexdigest() == expected


def test_sha256_takes_any_contiguous_buffer_and_refuses_a_strided_one() -> None:
    data = np.arange(1000, dtype=np.float64)
    assert kernels.sha256(data) == hashlib.sha256(data.tobytes()).digest()
    assert kernels.sha256(bytearray(b"abc")) == kernels.sha256(memoryview(b"abc"))
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        kernels.sha256(data[::2])
    with pytest.raises(TypeError):
        kernels.sha256("text")


def test_sha256_copy_branches_the_stream() -> None:
    whole = kernels.Sha256(b"common ")
    branch = whole.copy()
    whole.update(b"left")
    branch.update(b"right")
    assert whole.digest() == hashlib.sha256(b"common left").digest()
    assert branch.digest() == hashlib.sha256(b"common right").digest()


@pytest.mark.parametrize("dtype", [1, 2, 3])
def test_parts_of_what_is_large_are_decoded_to_the_same_bits(dtype: int) -> None:
    """They are written past the cache, each from where it begins."""
    rng = np.random.default_rng(dtype)
    wire = rng.integers(0, 0x3F, tensor_bytes(5 * 256, dtype), np.uint8)
    at_once, parts = np.empty(5 * 256, F32), np.empty(5 * 256, F32)
    assert testing.decode(dtype, wire, at_once, True) == -1
    unit = len(wire) // 5
    for i in range(5):
        bad = testing.decode(dtype, wire[i * unit : (i + 1) * unit],
                             parts[i * 256 : (i + 1) * 256], True, 1, 1 << 40)
        assert bad == -1
    assert bits(parts) == bits(at_once)


def test_decode_flips_the_sign_of_zero_and_reports_the_first_bad_index() -> None:
    wire = f32(0.0, -0.0, 1.5, np.inf, np.nan)
    out = np.empty(5, F32)
    assert kernels.decode_f32(wire.tobytes(), out, True) == 3
    assert bits(out) == ["80000000", "00000000", "bfc00000", "ff800000", "ffc00000"]
    assert kernels.decode_f32(wire[:3].tobytes(), out[:3], False) == -1
    assert bits(out[:3]) == ["00000000", "80000000", "3fc00000"]


def test_bf16_golden_values() -> None:
    src = f32(1.0, -2.5, 0.15625, 1.00390625, 1.01171875, 3.3895314e38, 1e-40, -0.0)
    out = bytearray(16)
    kernels.encode_bf16(src, out)
    decoded = np.empty(8, F32)
    assert kernels.decode_bf16(out, decoded, False) == -1
    assert out.hex(" ", 2) == "803f 20c0 203e 803f 823f 7f7f 0100 0080"


def test_q4_golden_blocks() -> None:
    out = bytearray(132)
    kernels.encode_q4(f32(1, -0.5, 0.25, 0), out)
    assert out.hex() == "0000803fe705" + "00" * 126
    kernels.encode_q4(f32(3, -3, 2, -1.5, 1, 0.75, -0.6, 0.4, 0.05, -0.03, 0), out)
    assert out.hex().startswith("00004040f7e6554d0100")
    decoded = np.empty(11, F32)
    assert kernels.decode_q4(out, decoded, False) == -1
    assert decoded.tolist() == [3, -3, 1.5, -1.5, 0.75, 0.75, -0.75, 0.375, 0.046875, 0, 0]
    low = [0x3C3504F2, 0x3CB504F6, 0x3D3504F2, 0x3DB504F5]
    thresholds = [*low, 0x3E3504F3, 0x3EB504F4, 0x3F3504F3]
    probes = [0x3F800000] + [t + d for t in thresholds for d in (-1, 0)]
    kernels.encode_q4(np.array(probes, np.uint32).view(F32), out)
    assert out.hex().startswith("0000803f0711223344556607" + "00")


def test_q4_bad_scale_names_the_first_index_of_its_block() -> None:
    good = bytearray(132)
    kernels.encode_q4(np.full(256, 0.5, F32), good)
    out = np.empty(700, F32)
    for scale, bad in ((np.inf, True), (np.nan, True), (-1.0, True), (-1e-45, True), (-0.0, False)):
        wire = bytearray(good * 3)
        wire[132:136] = f32(scale).tobytes()
        assert kernels.decode_q4(wire, out, True) == (256 if bad else -1), scale


@pytest.mark.parametrize("dtype", [1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 256, 257])
def test_an_encoding_takes_the_bytes_that_the_wire_counts(dtype: int, n: int) -> None:
    size, out = tensor_bytes(n, dtype), np.empty(n, F32)
    assert testing.decode(dtype, bytes(size), out, False) == -1
    with pytest.raises(ValueError, match=f"src: {n} elements take {size} bytes, found {size + 1}"):
        testing.decode(dtype, bytes(size + 1), out, False)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype: expected 1"):
        testing.decode(4, b"", np.empty(0, F32), False)


THREE = f32(1, 2, 3)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: kernels.decode_f32(bytes(11), THREE.copy(), False), ValueError,
         "3 elements take 12 bytes, found 11"),
        (lambda: kernels.decode_f32(bytes(24), np.empty(3), False), TypeError,
         "out: expected float32 elements, found format 'd'"),
        (lambda: testing.accumulate(THREE.copy(), f32(1), 2.0), ValueError,
         "g: expected 3 elements"),
        (lambda: testing.scale(memoryview(THREE).toreadonly(), 2.0), (BufferError, ValueError),
         "(?i)writ|read-only"),
        *((lambda threads=threads: kernels.sumsq(THREE, threads), ValueError,
           "threads: expected 1 to 256") for threads in (0, -1, 257, 2.0, None)),
    ],
    ids=["length", "dtype", "second length", "read-only", "no thread", "minus one thread",
         "257 threads", "a float of threads", "None"],
)
def test_arguments_are_refused_with_name_expected_and_found(call, error, sentence) -> None:
    with pytest.raises(error, match=sentence):
        call()


def test_an_unaligned_array_is_refused() -> None:
    raw = np.zeros(17, np.uint8)
    unaligned = raw[1:17].view(F32) if raw.ctypes.data % 4 == 0 else raw[:16].view(F32)
    with pytest.raises((TypeError, ValueError), match="multiple of 4"):
        testing.norm(unaligned)


def test_a_pair_of_streams_needs_two() -> None:
    stream = kernels.Sha256()
    for pair in ((None, stream), (stream, None), (b"", stream)):
        with pytest.raises(TypeError, match=r"incorrect type|must not be None"):
            kernels.sha256_update_pair(pair[0], b"a", pair[1], b"b")


def test_element_wise_definitions() -> None:
    out = f32(1, -0.0)
    testing.accumulate(out, f32(2, 0), 0.1)
    assert out.tolist() == [F32(1) + F32(0.1) * F32(2), 0.0]
    testing.accumulate_first(out, f32(2, -0.0), 1.0)
    assert bits(out) == ["40000000", "00000000"]
    theta = f32(1, 2)
    kernels.axpby_blend(theta, f32(3, 4), 0.3)
    assert theta.tolist() == (F32(0.3) * f32(1, 2) + F32(0.7) * f32(3, 4)).tolist()


def test_nesterov_reports_overflow_and_delayed_nesterov_refuses_its_constants() -> None:
    p, m, g = np.zeros(20, F32), np.zeros(20, F32), np.zeros(20, F32)
    g[13] = np.finfo(F32).max
    assert testing.nesterov(p, m, g, 1e30, 0.0, p.copy(), m.copy()) == 13
    assert testing.nesterov(p, m, g, 0.5, 0.0, p.copy(), m.copy()) == -1
    for period, c in ((0, 0.0), (2, 0.6), (2, -0.1), (2, float("nan"))):
        with pytest.raises(ValueError, match="period, c"):
            testing.delayed_nesterov(p, m, m, g, 0.7, 0.9, period, c, True, p, m, m.copy())


def test_the_built_in_check_finds_every_variant_right_and_keeps_the_selection() -> None:
    with testing.forced(codec="portable"):
        before = kernels.active()
        assert kernels.check() == []
        assert kernels.active() == before
