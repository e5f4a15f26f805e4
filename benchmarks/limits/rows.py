"""The rows of the table, one line each: key, text, at least, what measures it. Must not measure.

`measure(short)` returns a `Figure` and runs in a process of its own; it raises `NotHere` where this
machine cannot have it. How to add one stands in benchmarks/README.md.
"""

from __future__ import annotations

from benchmarks import (
    background_gap,
    bench_in,
    bench_merge,
    bench_rounds,
    bench_server,
    bench_tls,
)
from benchmarks.lab.scenes import Link
from benchmarks.limits import disk, idle, links, memory
from benchmarks.limits.figure import Row
from benchmarks.peers.against import against_torchft
from syncer.protocol import DTYPE_BF16, DTYPE_F32

LINKS = ("1g", Link(1e9), 64), ("100m", Link(1e8), 16)
"""Key, link and MiB of the model."""
ROUNDS_WANTED = {1: 2 * 3700, 8: 2 * 1280, 64: 2 * 200}
"""Twice the rounds of 1 KiB a second, by learners, that the server made when the row was set."""


def fewer(short: bool, turns: int = 7) -> int:
    return 1 if short else turns


ROWS = (
    *(Row(f"push-{name}", f"push {name}, 4 sockets", 0.8,
          lambda short, dtype=dtype: bench_in.taken_in(
              "push", dtype, turns=fewer(short), short=short))
      for dtype, name in ((DTYPE_F32, "f32"), (DTYPE_BF16, "bf16"))),
    Row("init-f32", "initial values f32, hashed", 0.8,
        lambda short: bench_in.taken_in("init", DTYPE_F32, turns=fewer(short), short=short)),
    Row("in-cpu", "in, CPU before decode", 1 / 1.2,
        lambda short: bench_in.before_decode(fewer(short), short)),
    *(Row(f"broadcast-{name}-{learners}", f"broadcast {name} to {learners}", at_least,
          lambda short, dtype=dtype, learners=learners: bench_server.broadcast(
              dtype, learners, turns=fewer(short, 15)))
      for dtype, name, at_least in ((DTYPE_F32, "f32", 0.9), (DTYPE_BF16, "bf16", 0.8))
      for learners in (1, 4)),
    *(Row(f"rounds-{learners}", f"1 KiB rounds, {learners} learners", 1.0,
          lambda short, learners=learners, wanted=wanted: bench_rounds.rate(
              learners, wanted, short))
      for learners, wanted in ROUNDS_WANTED.items()),
    Row("merge-avg", "merge avg", 0.8,
        lambda short: bench_merge.share_of_copy(None, 1 if short else 64, fewer(short))),
    *(Row(f"merge-rda-{alignment}", f"merge rda, {alignment}", 0.8,
          lambda short, alignment=alignment: bench_merge.share_of_copy(
              alignment, 1 if short else 64, fewer(short)))
      for alignment in ("kept", "mixed", "turned")),
    *(Row(f"checkpoint-{key}", f"checkpoint {key} + digest", 0.9,
          lambda short, direct=direct: disk.write(16 if short else 1024, fewer(short, 5), direct))
      for key, direct in (("write", False), ("direct", True))),
    Row("checkpoint-load", "checkpoint verified load", 0.9,
        lambda short: disk.load(16 if short else 1024, fewer(short, 5))),
    Row("checkpoint-gap", "2 x gap beside a checkpoint", 1.0, background_gap.figure),
    *(Row(f"sync-{key}-{dtype}", f"sync {link}, {dtype}", 0.9,
          lambda short, link=link, dtype=dtype, mib=mib: links.sync(link, dtype, mib, short))
      for key, link, mib in LINKS for dtype in ("f32", "bf16", "q4")),
    *(Row(f"sync-{key}-q4-both", f"sync {link}, q4 both ways", 0.9,
          lambda short, link=link, mib=mib: links.sync(link, "q4", mib, short, "q4"))
      for key, link, mib in LINKS),
    Row("torchft-loopback", "128 MiB, torchft, loopback", 1.5,
        lambda short: against_torchft(None, short)),
    Row("torchft-1g", "128 MiB, torchft, 1 Gb/s", 4.0,
        lambda short: against_torchft(1e9, short)),
    Row("tls-in", "TLS into the server", 0.9,
        lambda short: bench_tls.throughput("pour", fewer(short))),
    Row("tls-out", "TLS out of the server", 0.9,
        lambda short: bench_tls.throughput("swallow", fewer(short))),
    Row("idle-cpu", "2,000 idle learners, CPU", 1.0, idle.cpu),
    Row("idle-memory", "2,000 idle learners, each", 1.0, idle.memory),
    Row("memory-peak", "peak memory, 2 bf16 learners", 1.0, memory.peak),
    Row("memory-faults", "minor faults of steady rounds", 1.0, memory.faults),
)
