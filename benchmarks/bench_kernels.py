"""Kernels against what the hardware, hashlib, NumPy and other libraries do with the same bytes.

Each row prints a ratio to a reference timed in interleaved pairs of the same run (above 1: ours is
faster), the bound it is held against, and the ratio of the portable twin. README.md tells how to
read it. Rows that need an optional package say so when it is missing.
"""

from __future__ import annotations

import hashlib
import importlib
import time

import numpy as np
import pytest

from benchmarks import reference
from benchmarks.pairs import ratio
from syncer import kernels
from syncer.kernels import testing
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.merge import FragmentStore
from syncer.protocol import tensor_bytes

F32 = np.float32
MIB = 1 << 20
LARGE = 16 * MIB  # elements: 64 MiB of f32, far larger than the caches
SMALL = 1 << 18  # elements: 1 MiB of f32, inside the second-level cache or just outside
RNG = np.random.default_rng(7)
pytestmark = pytest.mark.timeout(1800)
FAMILIES = ("sha256", "codec", "blend", "reduce")


def floats(n: int) -> np.ndarray:
    return RNG.standard_normal(n, dtype=F32)


def portable():
    return testing.forced(**dict.fromkeys(FAMILIES, "portable"))


def row(benchmark, name, other, ours, nbytes, at_least, threads=1):  # noqa: PLR0917
    """Measures against `other`, prints one line, and records it; nbytes: what a call of ours moves.

    One thread is measured in CPU time, so that other programs disturb less; more in wall time."""
    benchmark.pedantic(ours, rounds=3, warmup_rounds=1)
    clock = time.process_time_ns if threads == 1 else time.perf_counter_ns
    pair = ratio(other, ours, rounds=11, sample_ms=3, clock=clock)
    line = (f"\n{name:<50} {nbytes / pair.ours_ns:7.2f} GB/s  reference "
            f"{nbytes / pair.reference_ns:7.2f} GB/s  ratio {pair.ratio:6.2f}")
    if at_least is not None:
        line += f"  at least {at_least:5.2f} {'ok' if pair.ratio >= at_least else 'BELOW'}"
    if threads == 1:
        with portable():
            slow = ratio(other, ours, rounds=5, sample_ms=3, clock=clock)
        line += f"  portable {slow.ratio:6.2f}"
    print(line, flush=True)
    benchmark.extra_info.update(ratio=pair.ratio, at_least=at_least)


@pytest.mark.parametrize("streams", [1, 2])
def test_sha256(benchmark, streams):
    a, b = RNG.bytes(8 * MIB), RNG.bytes(8 * MIB)
    if streams == 1:
        row(benchmark, "sha256, one stream", lambda: hashlib.sha256(a).digest(),
            lambda: kernels.sha256(a), 8 * MIB, 0.97)
    else:
        row(benchmark, "sha256, two streams, one thread",
            lambda: (hashlib.sha256(a).digest(), hashlib.sha256(b).digest()),
            lambda: kernels.sha256_pair(a, b), 16 * MIB, 1.6)


@pytest.mark.parametrize(("size", "kind", "bound"), [
    ("64 MiB", "memcpy", True), ("64 MiB", "past the cache", False), ("1 MiB", "memcpy", False)])
@pytest.mark.parametrize("codec", ["bf16 decode", "bf16 encode", "f32 decode"])
def test_codec_against_copies(benchmark, codec, size, kind, bound):
    n = LARGE if size == "64 MiB" else SMALL
    x, out, half = floats(n), np.empty(n, F32), np.empty(n, np.uint16)
    kernels.encode_bf16(x, half)
    kernels.decode_bf16(half, out, False)
    moved = n * (8 if codec == "f32 decode" else 6)
    call = {
        "bf16 decode": lambda: kernels.decode_bf16(half, out, True),
        "bf16 encode": lambda: kernels.encode_bf16(x, half),
        "f32 decode": lambda: kernels.decode_f32(x, out, True),
    }[codec]
    at_least = 0.9 if codec == "f32 decode" else 0.8
    name = f"{codec}, {size} of f32, {'a copy ' * (kind != 'memcpy')}{kind}"
    row(benchmark, name, reference.copy(moved // 2, kind), call, moved, at_least if bound else None)


@pytest.mark.parametrize("dtype", [1, 2], ids=["f32", "bf16"])
def test_byte_range_encode(benchmark, dtype):
    """4 MiB chunks of a 64 MiB fragment, one after another into one buffer, as a sender does.

    The reference copies the bytes that each chunk is made from, likewise into one buffer."""
    x, chunk = floats(LARGE), 4 * MIB
    total = tensor_bytes(LARGE, dtype)
    out, read = np.empty(chunk, np.uint8), chunk * x.nbytes // total
    target, copy = np.empty(read, np.uint8), reference.library().reference_copy

    def chunks():
        for begin in range(0, total, chunk):
            testing.encode_range(dtype, x, begin, begin + chunk, out)

    def copies():
        for begin in range(0, x.nbytes, read):
            copy(target.ctypes.data, x.ctypes.data + begin, read)

    name = f"byte-range encode, {'f32' if dtype == 1 else 'bf16'}, 4 MiB chunks"
    row(benchmark, name, copies, chunks, x.nbytes + total, 0.9)


def numpy_q4_encode(x):
    rows = x.reshape(-1, 256)
    scale = np.abs(rows).max(axis=1)
    ratio_ = np.abs(rows) / np.where(scale > 0, scale, F32(1))[:, None]
    with np.errstate(divide="ignore"):
        level = np.clip(np.rint(np.log2(ratio_)) + 7, 0, 7)
    level = np.where(ratio_ > 0, level, 0).astype(np.uint8)
    nibble = level | np.where((rows < 0) & (level > 0), 8, 0).astype(np.uint8)
    return scale, nibble[:, 0::2] | nibble[:, 1::2] << 4


def numpy_q4_decode(scale, packed):
    nibble = np.empty((packed.shape[0], 256), np.uint8)
    nibble[:, 0::2], nibble[:, 1::2] = packed & 15, packed >> 4
    table = np.array([0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], F32)
    value = table[nibble & 7] * scale[:, None]
    return -np.where(nibble >= 8, -value, value)


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_q4_against_numpy(benchmark, way):
    x = floats(4 * MIB)
    wire, out = np.empty(tensor_bytes(x.size, 3), np.uint8), np.empty(x.size, F32)
    scale, packed = numpy_q4_encode(x)
    kernels.encode_q4(x, wire)
    pair = {"encode": (lambda: numpy_q4_encode(x), lambda: kernels.encode_q4(x, wire)),
            "decode": (lambda: numpy_q4_decode(scale, packed),
                       lambda: kernels.decode_q4(wire, out, True))}[way]
    row(benchmark, f"q4 {way}, 16 MiB of f32, against NumPy", *pair, x.nbytes, 20)


@pytest.mark.parametrize("size", ["64 MiB", "1 MiB"])
@pytest.mark.parametrize("way", ["encode", "decode"])
def test_q4_against_pypiquant(benchmark, way, size):
    """uint4 of pypiquant, one thread; its encode includes finding the scale, as ours does."""
    piquant = optional("piquant", "pypiquant")
    n = LARGE if size == "64 MiB" else SMALL
    x, out = floats(n), np.zeros(n, F32)
    wire, theirs = np.zeros(tensor_bytes(n, 3), np.uint8), np.zeros(n // 2 + 64, np.uint8)
    context, types = piquant.Context(1), piquant.DataType
    address = x.ctypes.data, theirs.ctypes.data, out.ctypes.data

    def quantize():
        found = context.compute_quant_params_ptr_float32(address[0], types.UINT4, n)
        context.quantize_ptr(address[0], types.F32, address[1], types.UINT4, n, *found,
                             piquant.RoundMode.NEAREST)

    def dequantize():
        context.dequantize_ptr(address[1], types.UINT4, address[2], types.F32, n, 0.1, 8,
                               piquant.ReduceOp.SET)

    quantize()
    kernels.encode_q4(x, wire)
    pair = {"encode": (quantize, lambda: kernels.encode_q4(x, wire)),
            "decode": (dequantize, lambda: kernels.decode_q4(wire, out, True))}[way]
    row(benchmark, f"q4 {way}, {size} of f32, against pypiquant", *pair, x.nbytes, 1.2)


@pytest.mark.parametrize(("size", "bound"), [("64 MiB", 0.9), ("1 MiB", None)])
def test_norm(benchmark, size, bound):
    plain_sum = reference.library().reference_sum
    x = floats(LARGE if size == "64 MiB" else SMALL)
    row(benchmark, f"blocked norm, {size}, against a plain sum loop",
        lambda: plain_sum(x.ctypes.data, x.size), lambda: testing.norm(x), x.nbytes,
        bound)


BLENDS = [name for name, usable in kernels.variants()["blend"] if usable]


@pytest.mark.parametrize("variant", BLENDS)
@pytest.mark.parametrize("name", ["nesterov", "accumulate", "rotate"])
def test_subnormal_values_against_ordinary_ones(benchmark, name, variant):
    """What a parameter that gets no gradient any more costs: its momentum is 4 units of 2^-149.

    accumulate, rotate: gradients that are subnormal. 1 MiB arrays; 1 means that nobody notices."""
    plain, out, state = floats(SMALL), np.empty(SMALL, F32), np.empty(SMALL, F32)
    dead, zero = np.full(SMALL, 6e-45, F32), np.zeros(SMALL, F32)
    faint = (floats(SMALL) * F32(1e-30) * F32(1e-10)).astype(F32)
    calls = {
        "nesterov": [lambda b=b: testing.nesterov(plain, b, zero, 0.7, 0.9, out, state)
                     for b in (plain, dead)],
        "accumulate": [lambda g=g: testing.accumulate(out, g, 0.25) for g in (plain, faint)],
        "rotate": [lambda g=g: testing.rotate(out, g, g, 0.8, 0.2, 1.1) for g in (plain, faint)],
    }[name]
    out[:] = plain
    with testing.forced(blend=variant):
        benchmark.pedantic(calls[1], rounds=3, warmup_rounds=1)
        pair = ratio(*calls, rounds=11, sample_ms=3, clock=time.process_time_ns)
    print(f"\n{name} of subnormal values, {variant:<10} {pair.ours_ns / SMALL:5.2f} ns, ordinary "
          f"{pair.reference_ns / SMALL:5.2f} ns, ratio {pair.ratio:5.2f}", flush=True)
    benchmark.extra_info.update(ratio=pair.ratio)


@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-40])
def test_q4_encode_of_faint_blocks(benchmark, scale):
    """Blocks of zeros, which a parameter without a gradient sends, and of subnormal values."""
    x, wire = floats(SMALL), np.empty(tensor_bytes(SMALL, 3), np.uint8)
    y = (x * F32(scale)).astype(F32)
    calls = [lambda v=v: kernels.encode_q4(v, wire) for v in (x, y)]
    benchmark.pedantic(calls[1], rounds=3, warmup_rounds=1)
    pair = ratio(*calls, rounds=11, sample_ms=3, clock=time.process_time_ns)
    print(f"\nq4 encode, values of {scale:g}: {pair.ours_ns / SMALL:5.2f} ns, ordinary "
          f"{pair.reference_ns / SMALL:5.2f} ns, ratio {pair.ratio:5.2f}", flush=True)
    benchmark.extra_info.update(ratio=pair.ratio)


def average_case(threads: int):
    params, momentum, *gradients = (floats(LARGE) for _ in range(6))
    layout = Layout((FragmentLayout(AVG, (LARGE,)),))
    store = FragmentStore(layout, lr=0.7, momentum=0.9, threads=threads)
    store.adopt(0, params.copy(), state={"momentum": momentum.copy()})
    contributions = [(i, 1, 1.0 + i, g) for i, g in enumerate(gradients)]
    return (lambda: store.discard(store.prepare(0, 1, contributions))), params, momentum, gradients


@pytest.mark.parametrize("way", ["as an expression", "with out=", "with out=, by blocks"])
def test_average_and_nesterov_against_numpy(benchmark, way):
    """The expression makes a new array for each of its operators; with `out=` none is made, and by
    blocks of 32 Ki elements what is in between stays in the cache: the best that NumPy can do."""
    ours, params, momentum, gradients = average_case(1)
    weights = [F32((1.0 + i) / 10) for i in range(4)]

    def expression():
        g = sum(w * x for w, x in zip(weights, gradients, strict=True))
        b = F32(0.9) * momentum + g
        return params - F32(0.7) * (g + F32(0.9) * b)

    block = LARGE if way == "with out=" else 1 << 15
    g, scratch = np.empty(block, F32), np.empty(block, F32)
    p_out, b_out = np.empty(LARGE, F32), np.empty(LARGE, F32)

    def in_place():
        for at in range(0, LARGE, block):
            cut = slice(at, at + block)
            np.multiply(gradients[0][cut], weights[0], out=g)
            for w, x in zip(weights[1:], gradients[1:], strict=True):
                np.add(g, np.multiply(x[cut], w, out=scratch), out=g)
            b = np.multiply(momentum[cut], F32(0.9), out=b_out[cut])
            np.add(b, g, out=b)
            np.add(np.multiply(b, F32(0.9), out=scratch), g, out=scratch)
            np.subtract(params[cut], np.multiply(scratch, F32(0.7), out=scratch), out=p_out[cut])

    row(benchmark, f"avg of 4 + Nesterov, 64 MiB, NumPy {way}",
        expression if way == "as an expression" else in_place, ours, 8 * 4 * LARGE,
        4 if way == "as an expression" else None)


def test_average_and_nesterov_against_copies(benchmark):
    """As many bytes, copied past the cache: the bound of memory."""
    ours, *_ = average_case(1)
    row(benchmark, "avg of 4 + Nesterov, 64 MiB, a copy past the cache",
        reference.copy(4 * 4 * LARGE, "past the cache"), ours, 8 * 4 * LARGE, None)


@pytest.mark.parametrize("threads", [1, 2])
def test_average_and_nesterov_against_torch(benchmark, threads):
    """`add_` with alpha, then the fused Nesterov step of SGD, with as many threads."""
    torch = optional("torch", "torch")
    torch.set_num_threads(threads)
    ours, params, _, gradients = average_case(threads)
    parameter = torch.nn.Parameter(torch.from_numpy(params))
    theirs = [torch.from_numpy(g) for g in gradients]
    merged = torch.zeros(LARGE)
    parameter.grad = merged
    step = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True, fused=True)

    def other():
        merged.zero_()
        for i, g in enumerate(theirs):
            merged.add_(g, alpha=(1.0 + i) / 10)
        step.step()

    row(benchmark, f"avg of 4 + Nesterov, 64 MiB, {threads} threads, torch", other, ours,
        8 * 4 * LARGE, 2, threads=threads)


@pytest.mark.parametrize("name", ["accumulate", "scale", "nesterov"])
def test_two_threads_against_one(benchmark, name):
    """1 MiB arrays, so every part (64 KiB at least) stays in its core's cache."""
    a, b, c, d, e = (floats(SMALL) * F32(1e-3) for _ in range(5))
    call = {
        "accumulate": lambda threads: testing.accumulate(a, b, 1e-3, threads),
        "scale": lambda threads: testing.scale(a, 1.0, threads),
        "nesterov": lambda threads: testing.nesterov(a, b, c, 0.7, 0.9, d, e, threads),
    }[name]
    arrays = {"accumulate": 3, "scale": 2, "nesterov": 5}[name]
    row(benchmark, f"{name}, 1 MiB arrays, 2 threads against 1", lambda: call(1), lambda: call(2),
        arrays * 4 * SMALL, 1.7, threads=2)


def optional(module: str, package: str):
    """The module of an optional package, or a skip that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        pytest.skip(f"{module} is not installed (optional: pip install {package})")


def test_bf16_encode_of_all_inputs(benchmark):
    """Exactness for each of the 2^32 f32 bit patterns; no ratio, but too slow for the tests."""
    step = 1 << 22
    low, u = np.arange(step, dtype=np.uint32), np.empty(step, np.uint32)
    out = np.empty(step, np.uint16)

    def every():
        wrong = 0
        for start in range(0, 1 << 32, step):
            np.bitwise_or(low, np.uint32(start), out=u)
            kernels.encode_bf16(u.view(F32), out)
            expected = ((u + np.uint32(0x7FFF) + (u >> 16 & 1)) >> 16).astype(np.uint16)
            if start & 0x7F800000 == 0x7F800000:
                nan = (u & 0x7FFFFFFF) > 0x7F800000
                expected = np.where(nan, (u >> 16 | 0x40).astype(np.uint16), expected)
            wrong += int((out != expected).sum())
        return wrong

    assert benchmark.pedantic(every, rounds=1) == 0
    print(f"\n{'bf16 encode, all 2^32 inputs':<44} exact ({kernels.active()['codec']})")
