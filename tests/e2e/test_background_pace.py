"""A write in the background at a rate at which it would never end: nobody waits for that."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import Msg
from tests.checkpoint.cuts import names_in
from tests.e2e.checkpointed import facts_of
from tests.e2e.scripted import ScriptedLearner, ServerProcess

LAYOUT = Layout((FragmentLayout(AVG, (500_000,)),) * 2)
"""State of 8 MB: several pieces."""
TEXT = "a checkpoint in the background gives way no longer, as another waits"


def server_of(tmp_path, *more: str, steps: int) -> ServerProcess:
    return ServerProcess(tmp_path, "--checkpoint-path", str(tmp_path / "c"), "--checkpoint-every",
                         "2", "--background-checkpoint", "--checkpoint-rate", "1", "--pipeline",
                         "1", *more, steps=steps)


def takes_direct_writes(place) -> bool:
    try:
        os.close(os.open(place / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        (place / "probe").unlink()
    return True


def train(learner: ScriptedLearner, first: int, last: int) -> None:
    for step in range(first, last + 1):
        pull = learner.pull(step)
        learner.push(pull, np.full(500_000, 0.25, np.float32), local_step=step)
        learner.seen.clear()


@pytest.mark.parametrize("direct", [False, True])
def test_the_next_save_hastens_it(tmp_path, direct):
    """Steps 3 and 4 are out while step 2 is being written at a byte a second; the save of step 4
    waits for it, and then it is written at once. So does the end."""
    if direct and not takes_direct_writes(tmp_path):
        pytest.skip("this file system takes no direct writes")
    more = ("--checkpoint-direct",) if direct else ()
    with (
        server_of(tmp_path, *more, steps=5) as server,
        ScriptedLearner(server.port, 0, LAYOUT) as learner,
    ):
        learner.send_init([np.zeros(500_000, np.float32)] * 2)
        train(learner, 1, 3)
        learner.pull(4)
        assert not server.log.find("checkpoint written", step=2)
        assert not server.log.find(TEXT)
        learner.push(learner.seen[-1], np.full(500_000, 0.25, np.float32), local_step=4)
        server.log.wait("checkpoint written", step=2)
        assert server.log.find(TEXT, step=2)
        train(learner, 5, 5)
        learner.take_cut()
        learner.until(Msg.SHUTDOWN)
        learner.close()
        assert server.wait() == 0
        assert server.log.find(TEXT, step=4)
        assert [line["step"] for line in server.log.find("checkpoint written")] == [0, 2, 4, 5]
    assert facts_of(tmp_path / "c").step == 5


@contextmanager
def at_step_3(tmp_path) -> Iterator[ServerProcess]:
    """Step 2 is being written, and nobody waits for that."""
    with (
        server_of(tmp_path, steps=99) as server,
        ScriptedLearner(server.port, 0, LAYOUT) as learner,
    ):
        learner.send_init([np.zeros(500_000, np.float32)] * 2)
        train(learner, 1, 3)
        learner.pull(4)
        yield server


def test_a_signal_hastens_it(tmp_path):
    with at_step_3(tmp_path) as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
    assert names_in(tmp_path) == {"c", "c.epoch", server.log_path.name}
    assert facts_of(tmp_path / "c").step == 3


def test_a_kill_leaves_the_file_before(tmp_path):
    with at_step_3(tmp_path) as server:
        server.signal(signal.SIGKILL)
        server.wait()
    assert facts_of(tmp_path / "c").step == 0
