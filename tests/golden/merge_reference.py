# ruff: noqa
"""Reference numerics of the merge in plain NumPy; must not be made fast, and must not import syncer.

It is the oracle for the compiled kernels: slow, obvious, and exact to the bit.

Conventions
  * tensors are flat little-endian float32; every element-wise operation is one
    IEEE-754 float32 operation (round to nearest even), never fused (no FMA);
  * every reduction over elements is the float64 "blocked sum": its
    shape is fixed by the element count alone, so any thread count and any
    vector width gives the same bits;
  * reductions over learners (a handful of values) are left to right, float64;
  * learners are processed in ascending (learner_id, generation) order;
  * "gradient" = outer gradient = anchor - local = -(wire delta).

Run:  python -m tests.golden.merge_reference            -> self-checks + golden values
      python -m tests.golden.merge_reference --json F   -> also writes the golden values
"""
from __future__ import annotations

import argparse
import hashlib
import json
import struct
from dataclasses import dataclass

import numpy as np

F32 = np.float32
F64 = np.float64
MERGE_AVG, MERGE_RDA, MERGE_ISO = 0, 1, 2


# --------------------------------------------------------------- primitives
def f32(values) -> np.ndarray:
    return np.asarray(values, dtype=F32)


BLOCK, LANES = 16384, 8


def seq_sum(terms) -> np.float64:
    """Left-to-right float64 sum (np.sum would use pairwise blocks)."""
    terms = np.asarray(terms, dtype=F64)
    return F64(0.0) if terms.size == 0 else np.add.accumulate(terms)[-1]


def blocked_sum(terms) -> np.float64:
    """Float64 sum of fixed shape: blocks of 16384 elements, 8 lanes in a block
    (element j of the block goes to lane j mod 8, in order), lanes folded as
    ((0+4)+(2+6)) + ((1+5)+(3+7)), block sums added left to right."""
    terms = np.asarray(terms, dtype=F64).ravel()
    total = F64(0.0)
    for start in range(0, terms.size, BLOCK):
        block = terms[start:start + BLOCK]
        pad = np.zeros(-block.size % LANES, F64)          # +0.0 never changes a lane
        rows = np.concatenate([block, pad]).reshape(-1, LANES)
        a = np.add.accumulate(np.vstack([np.zeros((1, LANES), F64), rows]), axis=0)[-1]
        total = total + (((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])))
    return total


def sumsq(x: np.ndarray) -> np.float64:
    wide = x.astype(F64)
    return blocked_sum(wide * wide)


def norm(x: np.ndarray) -> np.float64:
    return np.sqrt(sumsq(x))


def dot(x: np.ndarray, y: np.ndarray) -> np.float64:
    return blocked_sum(x.astype(F64) * y.astype(F64))


def bits(x) -> list[str]:
    return [f"{int(v):08x}" for v in np.atleast_1d(f32(x)).view(np.uint32)]


def learner_weight(c_tokens: int, c_steps: int) -> np.float64:
    if c_steps == 0:
        return F64(0.0)
    t = F64(c_tokens)
    return t * t / F64(c_steps)


# -------------------------------------------------------------------- merges
def merge_avg(grads, weights) -> np.ndarray:
    out = np.zeros_like(grads[0])
    wsum = seq_sum(weights)
    if wsum <= 0.0:
        return out
    for g, w in zip(grads, weights):
        coef = F32(F64(w) / wsum)          # rounded to f32 once per learner
        out = out + coef * g               # f32 multiply, then f32 add
    return out


def merge_rda(grads, weights) -> np.ndarray:
    wsum = seq_sum(weights)
    if wsum <= 0.0:
        return np.zeros_like(grads[0])
    norms = [norm(g) for g in grads]
    radial = seq_sum([n * F64(w) for n, w in zip(norms, weights)]) / wsum
    out = np.zeros_like(grads[0])
    for g, w, n in zip(grads, weights, norms):
        if n == 0.0:
            continue
        with np.errstate(over="ignore"):
            coef = F32(F64(w) / wsum / n)  # two f64 divisions, then one rounding
        if not np.isfinite(coef):
            continue                       # so short that it has no direction
        out = out + coef * g
    mean_dir = norm(out)
    if mean_dir < 1e-12:
        return merge_avg(grads, weights)
    return out * F32(radial / mean_dir)


def iso_newton_schulz(matrix: np.ndarray, max_iters=40, rel_tol=1e-9) -> np.ndarray:
    """sigma_bar * U V^T by the cubic Newton-Schulz polar iteration, in float64.

    Matrix products go to BLAS, so this one is compared with a tolerance, not by bits."""
    rows, cols = matrix.shape
    a = matrix.astype(F64)
    if rows > cols:
        a = a.T
    fro = np.linalg.norm(a)
    if fro == 0.0:
        return matrix.copy()
    x = a / fro
    for _ in range(max_iters):
        nxt = 1.5 * x - 0.5 * ((x @ x.T) @ x)
        moved, size = np.linalg.norm(nxt - x), np.linalg.norm(nxt)
        x = nxt
        if moved <= rel_tol * size:
            break
    sigma_bar = float((x * a).sum()) / a.shape[0]
    q = x if rows <= cols else x.T
    return (sigma_bar * q).astype(F32)


# -------------------------------------------------------------------- HeLoCo
@dataclass(frozen=True)
class Heloco:
    c_ok: float = 0.2
    k_s: float = 0.5
    k_d: float = 1.0
    beta_max: float = 0.5
    kappa: float = 3.0
    eps: float = 1e-8


def heloco_correct(delta: np.ndarray, momentum: np.ndarray, h: Heloco = Heloco()):
    """Returns (corrected delta, branch name, cosine) for ONE tensor."""
    du, dm = norm(delta), norm(momentum)
    if du < h.eps or dm < h.eps:
        return delta.copy(), "skip", None
    c = dot(delta, momentum) / (du * dm)
    if c >= h.c_ok:
        return delta.copy(), "pass", float(c)
    conf = du / (du + h.kappa * dm + h.eps)
    if c < 0.0:
        beta = min(h.k_s * (-c) * conf, h.beta_max)
        coef = F32(-beta * c * du / dm)
        return delta + coef * momentum, "shrink", float(c)
    lam = min(h.k_d * (1.0 - c) * conf, 1.0)
    wu, wv = (1.0 - lam) / du, lam / dm
    t = wu * delta.astype(F64) + wv * momentum.astype(F64)
    scale = F32(du / max(np.sqrt(blocked_sum(t * t)), h.eps))   # norm of the UNROUNDED t
    return t.astype(F32) * scale, "rotate", float(c)


# ---------------------------------------------------------- fragment pipeline
def merge_fragment(grads, weights, tensor_numels, mode, momentum=None, heloco=None, shapes=None):
    """HeLoCo (optional) -> per tensor merge.  Returns the merged gradient."""
    grads = [f32(g) for g in grads]
    if heloco is not None:
        fixed = []
        for g in grads:
            parts, off = [], 0
            for n in tensor_numels:
                parts.append(heloco_correct(g[off:off + n], momentum[off:off + n], heloco)[0])
                off += n
            fixed.append(np.concatenate(parts))
        grads = fixed
    parts, off = [], 0
    for index, n in enumerate(tensor_numels):
        cut = [g[off:off + n] for g in grads]
        if mode == MERGE_AVG:
            parts.append(merge_avg(cut, weights))
        elif mode == MERGE_RDA:
            parts.append(merge_rda(cut, weights))
        else:
            avg = merge_avg(cut, weights).reshape(shapes[index])
            parts.append(iso_newton_schulz(avg).ravel())
        off += n
    return np.concatenate(parts)


# ------------------------------------------------------------ outer optimizers
def nesterov(params, buf, g, lr, mu):
    lr, mu = F32(lr), F32(mu)
    with np.errstate(over="ignore", invalid="ignore"):   # overflow is tested, not warned
        new_buf = mu * buf + g
        new_params = params - lr * (g + mu * new_buf)
    if not (np.isfinite(new_buf).all() and np.isfinite(new_params).all()):
        raise FloatingPointError("outer optimizer produced non-finite state")
    return new_params, new_buf


def delayed_nesterov(params, buf, acc, count, g, lr, mu, period, c=0.0):
    """Delayed Nesterov (arXiv 2401.09135) in a fixed float32 operation order:
    scalars are combined in f64 and rounded to f32 once; division by the period is
    an f32 division.  Returns params, buf, acc, count."""
    lr32, mu32, n32 = F32(lr), F32(mu), F32(period)
    acc = acc + g
    if (count + 1) % period == 0:
        buf = mu32 * buf + acc / n32
        coef = F32((1.0 - c * period + c) * float(mu32))
        params = params - lr32 * (coef * buf + g / n32)
        acc = np.zeros_like(acc)
    else:
        coef = F32(c * float(mu32))
        params = params - lr32 * (coef * buf + g / n32)
    return params, buf, acc, count + 1


# -------------------------------------------------------------------- encodings
def bf16_encode(x: np.ndarray) -> np.ndarray:
    u = f32(x).view(np.uint32).astype(np.uint64)
    nan = np.isnan(f32(x))
    rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((u >> 16) | 0x0040).astype(np.uint16)
    return np.where(nan, quiet, rounded).astype(np.uint16)


def bf16_decode(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x, np.uint16).astype(np.uint32) << 16).view(F32)


# --------------------------------------------------------------- checkpoint V3
def checkpoint_v3(backend, fingerprint, step, fragments, ledger, contract=None, sweep=None) -> bytes:
    out = struct.pack("<IB", 0xD1705A80, backend) + fingerprint
    out += struct.pack("<QI", step, len(fragments))
    for version, params, momentum in fragments:
        out += struct.pack("<QQ", version, len(params))
        out += f32(params).astype("<f4").tobytes() + f32(momentum).astype("<f4").tobytes()
    out += struct.pack("<I", len(ledger))
    for lid in sorted(ledger):
        out += struct.pack("<IQQQ", lid, *ledger[lid])
    out += fingerprint
    if sweep is not None:
        out += struct.pack("<II", 0x50535750, sweep) + contract
    elif contract is not None:
        out += struct.pack("<I", 0x52544353) + contract
    return out


def contiguous_version(step: int, fid: int, fragments: int) -> int:
    first = fid + 1
    return 0 if step < first else first + (step - first) // fragments * fragments


def layout_fingerprint(fragments) -> bytes:
    """fragments: list of (merge_mode, [(name, numel, shape), ...])."""
    h = hashlib.sha256(b"yeto-layout-v1\0" + struct.pack("<I", len(fragments)))
    for mode, tensors in fragments:
        h.update(struct.pack("<BI", mode, len(tensors)))
        for name, numel, shape in tensors:
            raw = name.encode()
            h.update(struct.pack("<I", len(raw)) + raw + struct.pack("<QI", numel, len(shape)))
            h.update(struct.pack(f"<{len(shape)}Q", *shape))
    return h.digest()


# ------------------------------------------------------------------ golden data
NUMELS = [4, 2]
PARAMS = f32([1.0, -1.0, 0.5, 0.25, 2.0, -3.0])
G0 = f32([0.125, -0.3, 0.7, -0.05, 1.5, -2.25])
G1 = f32([-0.2, 0.1, 0.65, 0.4, 0.3, 0.9])
MOM = f32([0.5, 0.2, -0.1, 0.8, -0.6, 0.35])
COUNTS = [(4096, 8), (3000, 7)]           # (c_tokens, c_steps) of learners 0 and 1
LR, MU = 0.7, 0.9


def noise(seed: int, n: int) -> np.ndarray:
    """n float32 values in [-1, 1): the top 24 bits of splitmix64(seed * 2**32 + i)."""
    z = np.uint64(seed) * np.uint64(1 << 32) + np.arange(n, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(40)).astype(F64) / 2.0**23 - 1.0).astype(F32)


def large_golden():
    """40,003 + 16,384 + 7 elements: full blocks, a ragged tail, and a tiny tensor."""
    numels = [40003, 16384, 7]
    n = sum(numels)
    mom, params = noise(9, n), noise(10, n)
    # learner 0 agrees with the momentum, learner 1 opposes it, learner 2 is nearly orthogonal
    grads = [noise(1, n) + F32(0.5) * mom, noise(2, n) - F32(0.5) * mom, noise(3, n)]
    w = [learner_weight(t, s) for t, s in ((4096, 8), (3000, 7), (10000, 24))]
    sha = lambda x: hashlib.sha256(f32(x).tobytes()).hexdigest()
    out = {"tensor_numels": numels, "weights_f64": [float(x).hex() for x in w],
           "g0_norm": float(norm(grads[0])).hex(), "g1_dot_momentum": float(dot(grads[1], mom)).hex()}
    for name, mode in (("avg", MERGE_AVG), ("rda", MERGE_RDA)):
        out[name] = sha(merge_fragment(grads, w, numels, mode))
        merged = merge_fragment(grads, w, numels, mode, mom, Heloco())
        out[f"heloco_{name}"] = sha(merged)
        p, m = nesterov(params, mom, merged, LR, MU)
        out[f"nesterov_after_heloco_{name}"] = {"params": sha(p), "momentum": sha(m)}
    return out


def golden():
    w = [learner_weight(*c) for c in COUNTS]
    eq = [F64(1.0), F64(1.0)]
    out = {"inputs": {
        "tensor_numels": NUMELS, "params": bits(PARAMS), "g0": bits(G0), "g1": bits(G1),
        "momentum": bits(MOM), "counts": COUNTS, "lr": bits(LR)[0], "mu": bits(MU)[0],
        "weights_f64": [float(x).hex() for x in w],
        "avg_coef_f32": [bits(F32(x / seq_sum(w)))[0] for x in w]}}

    def put(name, vec, **extra):
        out[name] = {"bits": bits(vec), "values": [float(v) for v in np.atleast_1d(vec)], **extra}

    avg = merge_fragment([G0, G1], w, NUMELS, MERGE_AVG)
    put("avg", avg, gnorm=float(norm(avg)).hex())
    put("avg_equal_weights", merge_fragment([G0, G1], eq, NUMELS, MERGE_AVG))
    rda = merge_fragment([G0, G1], w, NUMELS, MERGE_RDA)
    put("rda", rda, gnorm=float(norm(rda)).hex())
    put("rda_one_zero_learner", merge_fragment([G0, np.zeros(6, F32)], w, NUMELS, MERGE_RDA))
    put("rda_cancelling_fallback", merge_fragment([G0, -G0], eq, NUMELS, MERGE_RDA))
    put("zero_weights", merge_fragment([G0, G1], [F64(0), F64(0)], NUMELS, MERGE_RDA))

    branches, off = {}, 0
    for ti, n in enumerate(NUMELS):
        for li, g in enumerate((G0, G1)):
            v, b, c = heloco_correct(g[off:off + n], MOM[off:off + n])
            put(f"heloco_learner{li}_tensor{ti}", v, branch=b, cosine=c)
        off += n
    rot, b, c = heloco_correct(f32([0.1, 1.0]), f32([1.0, 0.0]))
    put("heloco_rotate_example", rot, branch=b, cosine=c, delta=bits([0.1, 1.0]), momentum=bits([1.0, 0.0]))
    shr, b, c = heloco_correct(f32([-2.0, 0.5]), f32([1.0, 0.0]))
    put("heloco_shrink_example", shr, branch=b, cosine=c, delta=bits([-2.0, 0.5]), momentum=bits([1.0, 0.0]))
    put("heloco_avg", merge_fragment([G0, G1], w, NUMELS, MERGE_AVG, MOM, Heloco()))
    put("heloco_rda", merge_fragment([G0, G1], w, NUMELS, MERGE_RDA, MOM, Heloco()))

    p, m = PARAMS.copy(), np.zeros(6, F32)
    for t, weights in enumerate((w, eq, w), start=1):       # 3 commits
        g = merge_fragment([G0 * F32(t), G1], weights, NUMELS, MERGE_RDA)
        p, m = nesterov(p, m, g, LR, MU)
        put(f"nesterov_step{t}_params", p)
        put(f"nesterov_step{t}_momentum", m)

    for c in (0.0, 0.25):
        p, m, a, k = PARAMS.copy(), np.zeros(6, F32), np.zeros(6, F32), 0
        for t in range(1, 6):                                # period 2: 5 commits
            g = avg if t % 2 else rda
            p, m, a, k = delayed_nesterov(p, m, a, k, g, LR, MU, 2, c)
            put(f"delayed_nesterov_c{c}_step{t}_params", p)
        put(f"delayed_nesterov_c{c}_final_momentum", m)
        put(f"delayed_nesterov_c{c}_final_accumulator", a)

    mat = f32([2.0, -1.0, 0.5, 3.0, 0.25, 4.0, -2.0, 1.0, -1.5, 0.75, 3.5, -0.5]).reshape(3, 4)
    put("iso_newton_schulz_3x4", iso_newton_schulz(mat).ravel())
    put("iso_newton_schulz_4x3", iso_newton_schulz(np.ascontiguousarray(mat.T)).ravel())

    out["large"] = large_golden()

    src = f32([1.0, -2.5, 0.15625, 1.00390625, 1.01171875, 3.3895314e38, 1e-40, -0.0])
    out["bf16"] = {"f32": bits(src), "bf16": [f"{int(v):04x}" for v in bf16_encode(src)]}

    layout = [(MERGE_AVG, [("emb", 4, (4,))]), (MERGE_RDA, [("a", 2, (2,)), ("b", 2, (2,))])]
    fp = layout_fingerprint(layout)
    step = 7
    frags = [(contiguous_version(step, f, 2), np.full(4, v, F32), np.full(4, u, F32))
             for f, (v, u) in enumerate([(1.5, 0.25), (-2.0, -0.5)])]
    blob = checkpoint_v3(0, fp, step, frags, {3: (1, 12, 4096), 0: (2, 24, 8192)}, bytes([7] * 32))
    out["checkpoint_v3"] = {"layout_fingerprint": fp.hex(), "bytes": len(blob),
                            "sha256": hashlib.sha256(blob).hexdigest(),
                            "versions": [f[0] for f in frags], "hex": blob.hex()}
    return out


def self_check(g):
    # learner weights and simple cases
    assert learner_weight(100, 10) == 1000.0 and learner_weight(5, 0) == 0.0
    assert list(merge_avg([f32([1, 0]), f32([0, -2])], [1.0, 1.0])) == [0.5, -1.0]
    r = merge_rda([f32([2, 0]), f32([0, 2])], [1.0, 1.0])
    assert abs(norm(r) - 2.0) < 1e-5
    # RDA keeps the weighted mean of the input norms
    w = [learner_weight(*c) for c in COUNTS]
    off = 0
    for n in NUMELS:
        a, b = G0[off:off + n], G1[off:off + n]
        want = (norm(a) * w[0] + norm(b) * w[1]) / (w[0] + w[1])
        assert abs(norm(merge_rda([a, b], w)) - want) < 1e-6
        off += n
    # iso: flat spectrum with the mean singular value of the input
    mat = f32([2.0, -1.0, 0.5, 3.0, 0.25, 4.0, -2.0, 1.0, -1.5, 0.75, 3.5, -0.5]).reshape(3, 4)
    sig = np.linalg.svd(mat.astype(F64), compute_uv=False)
    got = np.linalg.svd(iso_newton_schulz(mat).astype(F64), compute_uv=False)
    assert np.allclose(got, sig.mean(), rtol=1e-6), (got, sig.mean())
    # rotate keeps the magnitude, shrink adds a positive momentum component
    rot, b, _ = heloco_correct(f32([0.1, 1.0]), f32([1.0, 0.0]))
    assert b == "rotate" and abs(norm(rot) - norm(f32([0.1, 1.0]))) < 1e-6
    shr, b, _ = heloco_correct(f32([-2.0, 0.5]), f32([1.0, 0.0]))
    assert b == "shrink" and shr[0] > F32(-2.0)
    # chunking element-wise passes never changes bits (any chunk size, any thread count)
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal(1003).astype(F32) for _ in range(3)]
    ws = [F64(3.0), F64(1.0), F64(2.5)]
    whole = merge_avg(xs, ws)
    for chunk in (1, 7, 64, 500):
        parts = [merge_avg([x[i:i + chunk] for x in xs], ws) for i in range(0, 1003, chunk)]
        assert (np.concatenate(parts).view(np.uint32) == whole.view(np.uint32)).all()
    # delayed Nesterov with period 1 and c = 0 is theta -= lr*(mu*m + g): plain Nesterov form
    p1, m1, _, _ = delayed_nesterov(PARAMS, MOM, np.zeros(6, F32), 0, G0, LR, MU, 1)
    p2, m2 = nesterov(PARAMS, MOM, G0, LR, MU)
    assert (m1.view(np.uint32) == m2.view(np.uint32)).all() and np.allclose(p1, p2, atol=1e-6)
    try:
        nesterov(f32([1.0]), f32([0.0]), f32([np.finfo(F32).max]), np.finfo(F32).max, 0.0)
        raise AssertionError("overflow must be rejected")
    except FloatingPointError:
        pass
    n = sum(len(p) for p in (range(4), range(4)))
    assert g["checkpoint_v3"]["bytes"] == 53 + 2 * 16 + 8 * n + 28 * 2 + 32 + 36
    assert [contiguous_version(7, f, 2) for f in range(2)] == [7, 6]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--json")
    args = ap.parse_args()
    g = golden()
    self_check(g)
    for name, item in g.items():
        print(name, json.dumps(item))
    if args.json:
        with open(args.json, "w") as fh:
            json.dump(g, fh, indent=1)


if __name__ == "__main__":
    main()
