"""A server that finds no memory for a moment: nothing of a run is lost for it (rule 7.9)."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from syncer.checkpoint.reader import Checkpoint
from syncer.kernels import decode_f32
from syncer.merge import FragmentStore, engine
from syncer.merge.buffers import BufferPool
from syncer.protocol import DTYPE_BF16, DTYPE_F32
from syncer.server import decoded, ingest
from syncer.server.arrival import Arrival
from syncer.server.system import WORKER
from tests.e2e.scripted import ServerThread, layout_of

SMALL, LARGE = layout_of((4,)), layout_of((200_000,))
ONE_LARGE = np.ones(200_000, np.float32)
SHORT = "no memory: what needs it waits, and the run with it"


class Failing:
    """Calls `call`, but not the first `times`."""

    def __init__(self, call, times: int):
        self.call, self.times = call, times

    def __call__(self, *given, **named):
        if self.times:
            self.times -= 1
            raise MemoryError("no memory for a fragment buffer of 16 bytes")
        return self.call(*given, **named)


class Empty:
    """A pool of buffers that has none."""

    def take(self, numel: int):
        raise MemoryError("no memory for a fragment buffer")


def lacks(monkeypatch, owner, name: str, times: int) -> Failing:
    failing = Failing(getattr(owner, name), times)

    def method(*given, **named):
        return failing(*given, **named)

    monkeypatch.setattr(owner, name, method)
    return failing


def train(server: ServerThread, learners: int) -> list[bytes]:
    """Four steps, everybody in each; what each step made of the model."""
    fleet = [server.learner(learner, SMALL) for learner in range(learners)]
    fleet[0].send_init([np.zeros(4, np.float32)])
    made = []
    for step in range(1, 5):
        pulls = [learner.pull(step) for learner in fleet]
        made.append(fleet[0].params[0].tobytes())
        for learner, pull in reversed(list(zip(fleet, pulls, strict=True))):  # one is parked
            assert pull.attempt == 1, "nobody is asked a second time"
            learner.push(pull, np.full(4, step + learner.learner, np.float32))
    for learner in fleet:
        learner.take_cut()
    assert server.wait() == 0
    return [*made, fleet[0].final[0].tobytes()]


PLACES = [("batch", FragmentStore, "prepare"), ("exact", FragmentStore, "fold"),
          ("exact", engine, "add"), ("exact", FragmentStore, "prepare_fold"),
          ("streaming", engine, "add")]


@pytest.mark.parametrize(("fold", "owner", "name"), PLACES)
def test_a_merge_without_memory_is_computed_again(tmp_path, monkeypatch, fold, owner, name):
    """With the bits of a run that has it all the time."""
    options = {"learners": 2, "quorum": 2, "total_steps": 4, "fold": fold,
               "learner_weight": "equal", "delta_correction": "none"}
    (tmp_path / "calm").mkdir()
    with ServerThread(tmp_path / "calm", **options) as server:
        calm = train(server, 2)
    failing = lacks(monkeypatch, owner, name, 2)
    with ServerThread(tmp_path, **options) as server:
        assert train(server, 2) == calm
        assert len(server.log.find(SHORT)) == 1
        assert server.log.find("memory is there again")
    assert not failing.times


@pytest.mark.parametrize("fold", ["batch", "exact"])
def test_memory_that_never_comes_ends_the_run_with_its_last_cut(tmp_path, monkeypatch, fold):
    path = tmp_path / "c"
    with ServerThread(tmp_path, learners=1, quorum=1, total_steps=9, quorum_timeout_s=4, fold=fold,
                      learner_weight="equal", delta_correction="none", checkpoint_path=str(path),
                      checkpoint_every=8) as server:
        learner = server.learner(0, SMALL)
        learner.send_init([np.zeros(4, np.float32)])
        learner.push(learner.pull(1), np.ones(4, np.float32))
        pull = learner.pull(2)
        monkeypatch.setattr(*((FragmentStore, "prepare") if fold == "batch" else (engine, "add")),
                            Failing(None, 1000))
        learner.push(pull, np.ones(4, np.float32))
        learner.ended()
        assert server.wait() == 1
        server.log.wait("merge of step 2 failed: for 4 s there was no memory for it", level="error")
        assert not server.log.find("internal error")
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 1


@pytest.mark.parametrize("dtype", [DTYPE_F32, DTYPE_BF16])
def test_a_push_whose_values_find_no_memory_is_decoded_again(tmp_path, monkeypatch, dtype):
    """By a worker, which waits for memory, also what is decoded on the spot otherwise."""
    failing = Failing(lambda: None, 1)

    class OnWorkersAlone(Arrival):
        def check(self):
            if not threading.current_thread().name.startswith(WORKER):
                raise MemoryError
            failing()

        def finish(self):
            self.check()
            super().finish()

        def decode_to(self, end):
            self.check()
            super().decode_to(end)

    with ServerThread(tmp_path, total_steps=2) as server:
        learner = server.learner(0, LARGE, dtype=dtype)
        learner.send_init([ONE_LARGE])
        pull = learner.pull(1)
        monkeypatch.setattr(ingest, "Arrival", OnWorkersAlone)
        learner.push(pull, ONE_LARGE)
        learner.push(learner.pull(2), ONE_LARGE)
        learner.finish()
        assert server.wait() == 0
        assert server.log.find(SHORT)
    assert not failing.times


def test_whose_message_finds_no_memory_is_told_to_try_again_later(tmp_path, monkeypatch):
    """It is this moment that is to blame, and not the learner, which dials again."""
    with ServerThread(tmp_path, total_steps=2) as server:
        learner = server.learner(0, LARGE, dtype=DTYPE_BF16)
        learner.send_init([ONE_LARGE])
        pull = learner.pull(1)

        monkeypatch.setattr(server.server.session.ingest, "pool", Empty())
        learner.push(pull, ONE_LARGE)
        assert "try again later" in learner.error()
        monkeypatch.undo()
        again = server.learner(0, LARGE, dtype=DTYPE_BF16)
        for step in (1, 2):
            again.push(again.pull(step), ONE_LARGE)
        again.finish()
        assert server.wait() == 0


def test_a_late_push_is_taken_up_when_there_is_memory(monkeypatch):
    """Nothing is taken for it before its merge, which can wait."""
    pool = BufferPool()
    values = np.array([1.5, -2.0, 3.25], np.float32)
    payload = decoded.Decoded(pool, 3, memoryview(values.tobytes()), decode_f32)
    payload.park()
    assert pool.live == 0
    failing = lacks(monkeypatch, np, "frombuffer", 1)
    with pytest.raises(MemoryError):
        payload.values()
    assert not failing.times
    assert payload.values().tobytes() == (-values).tobytes()
