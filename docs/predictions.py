"""What measured costs of a byte predict for a large host. Must not state a cost: it reads them.

A rate is the least of what the port, the event loop, the workers, the memory or the disk allow:
nothing else is in it. What is assumed stands in `ASSUMED`, and is printed with the table.
"""

from __future__ import annotations

from benchmarks.merge_round import bytes_moved
from docs.measured import read

PARAMETERS = 120e9
LEARNERS = 4
CORES, SLOWER = 64, 2.0
PORT, MEMORY, DISK = 50 / 8, 0.7 * 8 * 2.933 * 8, 3.0
"""GB/s."""
LAYOUT_S = 0.44
"""CPU seconds of the layout of 41,643 tensors: `pytest benchmarks/bench_layout.py --benchmark-only
-s`, same machine class and date."""
BF16, F32, STATE = 2.0, 4.0, 8.0
"""Bytes of a parameter."""
KNOWN = {"INIT": "1.5 GB/s", "downlink": "0.42 GB/s", "layout": "107 s", "stall": "13.7 min"}
"""Figures known in this field."""
ASSUMED = f"""Assumed, not measured: {LEARNERS} learners; a core there takes {SLOWER:g} times as
long for a byte as one here (2.6 GHz, SHA-256 in instructions); {MEMORY:.0f} GB/s of memory
bandwidth (70 % of eight channels of DDR4-2933); a disk of {DISK:g} GB/s; memory for the state of
{STATE:g} bytes a parameter; one event loop; nothing lost to NUMA."""


def rate(loop_cpu: float, worker_cpu: float, workers: int) -> tuple[float, str]:
    """GB/s through the port, and what bounds it."""
    bounds = {"the port": PORT, "the event loop": 1 / (SLOWER * loop_cpu),
              f"{workers} workers": workers / (SLOWER * worker_cpu) if worker_cpu else PORT}
    least = min(bounds, key=lambda name: bounds[name])
    return bounds[least], least


def duration(seconds: float) -> str:
    return (f"{seconds / 60:.1f} min" if seconds >= 100 else
            f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s")


def table() -> str:
    rows = read("limits.json")["rows"]
    gigabytes = PARAMETERS / 1e9
    loop_in = rows["in-cpu"]["ours_cpu"]
    init, init_by = rate(loop_in, rows["init-f32"]["ours_cpu"] - loop_in, 2)
    push, push_by = rate(loop_in, max(0.0, rows["push-bf16"]["ours_cpu"] - loop_in), CORES - 1)
    down, down_by = rate(rows["broadcast-bf16-4"]["ours_cpu"], 0.0, CORES - 1)
    both = 1 / (SLOWER * (loop_in + rows["broadcast-bf16-4"]["ours_cpu"]))
    kept = rows["merge-rda-kept"]
    moved = bytes_moved([1], "kept", LEARNERS)
    merge = min(MEMORY, CORES * kept["ours"] / SLOWER)
    write = min(DISK, 1 / (SLOWER * rows["checkpoint-write"]["ours_cpu"]))
    load = min(DISK, CORES / (SLOWER * rows["checkpoint-load"]["ours_cpu"]))
    moves = LEARNERS * BF16 * gigabytes
    wire = max(moves / push, moves / down, moves / both)
    merging = moved * gigabytes / merge
    lines = [
        "| | by | rate | takes | known |", "|---|---|---|---|---|",
        f"| layout of 41,643 tensors, each learner | one core | | {duration(SLOWER * LAYOUT_S)} | "
        f"{KNOWN['layout']} |",
        f"| start: initial values, f32, {F32 * gigabytes:.0f} GB | {init_by} | {init:.2g} GB/s | "
        f"{duration(F32 * gigabytes / init)} | {KNOWN['INIT']} |",
        f"| start: broadcast to {LEARNERS}, bf16, {moves:.0f} GB | {down_by} | {down:.2g} GB/s | "
        f"{duration(moves / down)} | {KNOWN['downlink']} |",
        f"| round of all fragments: bf16 up, {moves:.0f} GB | {push_by} | {push:.2g} GB/s | "
        f"{duration(moves / push)} | |",
        f"| round of all fragments: both ways at once | one event loop | {both:.2g} GB/s each | "
        f"{duration(moves / both)} | |",
        f"| round of all fragments: rda of {LEARNERS} | memory | {merge:.0f} GB/s | "
        f"{duration(merging)} | |",
        f"| round of all fragments, in all | the slowest of the above | | "
        f"{duration(max(wire, merging))} | |",
        f"| checkpoint, {STATE * gigabytes:.0f} GB, in the background | "
        f"{'the disk' if write == DISK else 'one writer'} | {write:.2g} GB/s | "
        f"{duration(STATE * gigabytes / write)} | rounds stall for {KNOWN['stall']} |",
        f"| resume: verified load | {'the disk' if load == DISK else 'hashing'} | "
        f"{load:.2g} GB/s | {duration(STATE * gigabytes / load)} | |",
        f"| resume: the model to {LEARNERS} learners, bf16 | {down_by} | {down:.2g} GB/s | "
        f"{duration(moves / down)} | {KNOWN['downlink']} |",
    ]
    return ASSUMED + "\n\n" + "\n".join(lines) + "\n"
