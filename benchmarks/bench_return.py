"""What a learner that comes back costs: bytes of its return, against those of a whole catch-up.

Four introduced learners of a 64 MiB model, on this machine. One is away for 10 s, then it comes
back as one that holds what it was sent; then again, as one that has forgotten. Then the server is
stopped and goes on from its file, and all four come back.

    python -m pytest benchmarks/bench_return.py -s
"""

from __future__ import annotations

import time

import numpy as np

from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32
from syncer.wire.extended import Welcome
from syncer.wire.extension import Extension, Held
from syncer.wire.messages import Pull
from tests.e2e.scripted import ScriptedLearner, ServerThread

LEARNERS, FRAGMENTS, NUMEL = 4, 16, 1 << 20
LAYOUT = Layout((FragmentLayout(AVG, (NUMEL,)),) * FRAGMENTS)
AWAY_S, STEPS = 10.0, 3
SETTINGS = dict(learners=LEARNERS, quorum=LEARNERS, pipeline=1, total_steps=1000, grace_ms=0)


def dial(server: ServerThread, learner: int, known: ScriptedLearner | None) -> ScriptedLearner:
    """One connection; of a learner that knows what was sent on another one, if it does."""
    held = None
    if known is not None:
        instance = next(m.instance for m in known.seen if isinstance(m, Welcome))
        held = tuple(Held(instance, known.versions[p]) for p in range(FRAGMENTS))
    return server.learner(learner, LAYOUT, dtype=DTYPE_F32, extension=Extension(held=held))


def train(learners: list[ScriptedLearner], last: int) -> None:
    """So many steps, each of a fragment of its own."""
    delta = np.full(NUMEL, 1e-3, np.float32)
    for step in range(1, last + 1):
        for learner in learners:
            learner.push(learner.pull(step), delta, base=0)
    for learner in learners:
        while learner.versions[last - 1] != last:
            learner.next()


def returns(server: ServerThread, learner: ScriptedLearner, known: bool) -> int:
    """Bytes that the server sends until a learner that was away is asked again."""
    learner.close()
    server.log.wait("learner disconnected", learner=learner.learner)
    time.sleep(AWAY_S)
    before = server.server.loop.bytes_sent
    back = dial(server, learner.learner, learner if known else None)
    back.until(Pull)
    return server.server.loop.bytes_sent - before


def test_a_drop_and_a_restart(tmp_path):
    settings = SETTINGS | dict(checkpoint_path=str(tmp_path / "c"), checkpoint_every=1)
    with ServerThread(tmp_path, **settings) as server:
        learners = [dial(server, i, None) for i in range(LEARNERS)]
        learners[0].send_init([np.zeros(NUMEL, np.float32)] * FRAGMENTS)
        train(learners, STEPS)
        drop = returns(server, learners[2], True)
        whole = returns(server, learners[3], False)
        server.server.stop()
        server.wait()
    with ServerThread(tmp_path, **settings, resume=True, start_learners=LEARNERS) as server:
        back = [dial(server, i, known) for i, known in enumerate(learners)]
        for learner in back:
            learner.until(Pull)
        restart = server.server.loop.bytes_sent / LEARNERS
        server.server.stop()
        server.wait()
    size = 4 * NUMEL * FRAGMENTS
    print(f"\n{size / 2**20:.0f} MiB, {LEARNERS} learners: a catch-up is {whole:,} bytes; a "
          f"return after {AWAY_S:g} s {drop:,} ({100 * drop / whole:.4f} %), after a restart of "
          f"the server {restart:,.0f} each ({100 * restart / whole:.4f} %)")
    assert whole > size
    assert drop < whole / 100
    assert restart < whole / 100
