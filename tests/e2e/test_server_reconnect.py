"""Learners that come, go and come back: catch-up, pushes that outlive their sender, generations."""

from __future__ import annotations

import numpy as np

from syncer.protocol import Msg
from syncer.server.shortened import short
from syncer.wire import encode, messages
from tests.e2e.scripted import ServerThread, layout_of, wait_until

SMALL = layout_of((4,), (3,))
ZEROS = [np.zeros(4, np.float32), np.zeros(3, np.float32)]
ONES = [np.ones(4, np.float32), np.ones(3, np.float32)]


def end_run(server, *learners):
    for learner in learners:
        learner.take_cut()
    for learner in learners:
        learner.until(Msg.SHUTDOWN)
        learner.close()
    assert server.wait() == 0


def versions_seen(learner):
    return [(m.fragment, m.version) for m in learner.seen if isinstance(m, messages.Bcast)]


def test_a_learner_that_comes_back_gets_every_fragment_once_and_its_open_pull(tmp_path):
    with ServerThread(tmp_path, learners=2, quorum=2, total_steps=4, pipeline=1) as server:
        first = server.learner(0, SMALL)
        second = server.learner(1, SMALL)
        first.send_init(ZEROS)
        for step in (1, 2):
            for learner in (first, second):
                pull = learner.pull(step)
                learner.push(pull, ONES[pull.fragment])
        second.pull(3)
        second.close()
        server.log.wait("learner disconnected", learner=1)
        second = server.learner(1, SMALL, streams=2)
        assert second.pull() == messages.Pull(0, 3, 1)
        assert sorted(versions_seen(second)) == [(0, 1), (1, 2)]
        for step in (3, 4):
            for learner in (first, second):
                if (learner, step) != (second, 3):
                    learner.pull(step)
                learner.push(messages.Pull((step - 1) % 2, step, 1), ONES[(step - 1) % 2])
        end_run(server, first, second)
        assert len(server.log.find("outer step", responders=2)) == 4


def test_a_push_outlives_its_sender(tmp_path):
    """16: the bytes were here before the end of the connection was."""
    with ServerThread(tmp_path, learners=2, quorum=2, total_steps=1) as server:
        first = server.learner(0, SMALL)
        second = server.learner(1, SMALL)
        first.send_init(ZEROS)
        second.push(second.pull(), ONES[0])
        second.close()
        server.log.wait("learner disconnected", learner=1)
        first.push(first.pull(), ONES[0])
        end_run(server, first)
        assert server.log.find("outer step", responders=2)


def test_a_second_generation_supersedes_without_closing_the_first(tmp_path):
    """18: the old connection's answer counts, the next round asks the new one."""
    with ServerThread(tmp_path, learners=1, total_steps=2, pipeline=1) as server:
        old = server.learner(0, SMALL)
        old.send_init(ZEROS)
        pull = old.pull()
        new = server.learner(0, SMALL)
        while len(new.versions) < 2:
            new.next()
        old.push(pull, ONES[0])
        assert new.pull() == messages.Pull(1, 2, 1)
        new.push(messages.Pull(1, 2, 1), ONES[1])
        old.close()
        end_run(server, new)


def test_a_learner_whose_hello_was_overtaken_is_in_the_rounds_again(tmp_path):
    """21b: the newest connection is an abandoned one and goes; the older one shows life."""
    with ServerThread(tmp_path, learners=2, quorum=2, total_steps=3, pipeline=1) as server:
        first = server.learner(0, SMALL)
        lives = server.learner(1, SMALL)
        first.send_init(ZEROS)
        abandoned = server.learner(1, SMALL)
        generation = abandoned.hello.generation
        server.log.wait("learner connected", generation=short(generation))
        abandoned.close()
        server.log.wait("learner disconnected", generation=short(generation))
        lives.send(encode.encode_heartbeat(messages.Heartbeat(1, 1)))
        server.log.wait("older connection is current again", learner=1)
        for step in (1, 2, 3):
            for learner in (first, lives):
                pull = learner.pull(step)
                learner.push(pull, ONES[pull.fragment])
        end_run(server, first, lives)
        assert len(server.log.find("outer step", responders=2)) == 3
        assert sorted(versions_seen(lives)) == [(0, 0), (0, 1), (1, 0), (1, 2)]


def test_learner_0_comes_back_in_the_middle_of_its_inits(tmp_path):
    """62: fragments of the first generation that were complete stay, the rest comes again."""
    with ServerThread(tmp_path, total_steps=1) as server:
        old = server.learner(0, SMALL)
        new = server.learner(0, SMALL)
        server.log.wait("learner connected", generation=short(new.hello.generation))
        old.send_init([np.full(4, 9, np.float32), np.full(3, 9, np.float32)])
        new.send_init(ONES)
        pull = new.pull()
        assert new.params[0].tolist() == [1] * 4
        new.push(pull, ZEROS[0])
        old.close()
        end_run(server, new)


def test_initial_values_that_were_overtaken_come_again_on_a_new_connection(tmp_path):
    """62b: the connection is ended without an ERROR, which the learner could not survive."""
    with ServerThread(tmp_path, total_steps=1) as server:
        lives = server.learner(0, SMALL)
        server.log.wait("learner connected", generation=short(lives.hello.generation))
        abandoned = server.learner(0, SMALL)
        server.log.wait("learner connected", generation=short(abandoned.hello.generation))
        lives.send_init(ZEROS)
        abandoned.close()
        server.log.wait("learner disconnected", generation=short(abandoned.hello.generation))
        lives.send(encode.encode_heartbeat(messages.Heartbeat(0, 1)))
        lives.ended()
        assert lives.seen == []
        again = server.learner(0, SMALL)
        again.send_init(ONES)
        again.push(again.pull(), ZEROS[0])
        end_run(server, again)


def test_a_lost_data_socket_ends_the_group(tmp_path):
    with ServerThread(tmp_path, total_steps=1) as server:
        learner = server.learner(0, SMALL, streams=2)
        learner.send_init(ZEROS)
        learner.pull()
        lost = learner.data.pop(1)
        del learner.readers[lost]
        lost.close()
        learner.ended()
        server.log.wait("learner disconnected", learner=0)
        back = server.learner(0, SMALL)
        back.push(back.pull(), ONES[0])
        end_run(server, back)


def test_a_slow_reader_skips_versions_that_it_has_not_begun(tmp_path):
    """A learner with a full socket gets, in the end, only the newest of what was queued."""
    size, steps = 1_000_000, 24
    layout = layout_of((size,))
    with ServerThread(tmp_path, learners=2, total_steps=steps + 1, grace_ms=0) as server:
        good = server.learner(0, layout)
        slow = server.learner(1, layout, connect=False)
        slow.control = slow.open_socket(receive_buffer_bytes=65536)
        slow.say_hello()
        good.send_init([np.zeros(size, np.float32)])
        for step in range(1, steps + 1):
            good.push(good.pull(step), np.zeros(size, np.float32))
        good.pull(steps + 1)
        group = server.server.find_group(1, slow.hello.generation)
        # One version is under way, the newest waits behind it, and nothing else is held.
        assert len(group.outbox.held_versions) <= 2
        slow.until(lambda m: isinstance(m, messages.Bcast) and m.version == steps)
        seen = [version for _, version in versions_seen(slow)]
        assert seen == sorted(set(seen))
        assert len(seen) < steps
        pull = slow.pull()
        assert pull.step == steps + 1, "a pull of a closed round was not replaced"
        slow.push(pull, np.zeros(size, np.float32))
        end_run(server, good, slow)


def test_catch_up_follows_commits_until_it_ends(tmp_path):
    """A joiner whose socket is full stays held; its tail comes when the newest version is out."""
    size = 1_500_000
    layout = layout_of((size,), (size,))
    with ServerThread(tmp_path, learners=2, total_steps=12, grace_ms=0, pipeline=2) as server:
        good = server.learner(0, layout)
        early = server.learner(1, layout)
        good.send_init([np.zeros(size, np.float32)] * 2)
        good.pull(1)
        early.close()
        server.log.wait("learner disconnected", learner=1)
        joiner = server.learner(1, layout)
        wait_until(lambda: len(server.log.find("learner connected", learner=1)) == 2, "joiner")
        for step in range(1, 9):
            pull = messages.Pull((step - 1) % 2, step, 1)
            if step > 1:
                assert good.pull(step) == pull
            good.push(pull, np.zeros(size, np.float32))
        pull = joiner.pull()
        # What the pull asks about was sent before it.
        assert joiner.versions[pull.fragment] == max(0, pull.step - 2)
        assert len(set(versions_seen(joiner))) == len(versions_seen(joiner))
        server.server.stop()
        assert server.wait() == 143
        for learner in (good, joiner):
            learner.close()
