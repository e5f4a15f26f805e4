"""A server that says nothing any more, on a connection that looks alive."""

import pytest

from syncer.learner import news as news_module

from .scripted_server import ScriptedServer
from .test_learner_rounds import flat, learner_of, model
from .waiting import step_until, until


@pytest.fixture
def server():
    with ScriptedServer() as each:
        yield each


def test_a_learner_without_news_says_so_and_what_it_waits_for(server, monkeypatch, stderr):
    monkeypatch.setattr(news_module, "SILENCE_MIN_S", 0.3)

    def said(text: str) -> bool:
        return text in stderr.getvalue()

    with learner_of(server, model(), learner_id=1, fragments=1, pattern="strided") as learner:
        peer = server.accept()
        fragments = len(learner.layout.fragments)

        def merge(version: int) -> None:
            peer.bcast(version % fragments, version, flat(learner, model(1), version % fragments))
            step_until(learner, lambda s: (version % fragments, version) in s.applied)

        for version in range(8):
            merge(version)
        fragment, step = 8 % fragments, 8
        learner.step(1)
        peer.pull(fragment, step)
        step_until(learner, lambda s: s.answered)
        line = f"waiting for the merge of step {step}, for which it has sent"
        until(lambda: said(line), "the line")
        assert stderr.getvalue().count(line) == 1
        merge(8)
        until(lambda: said("again, after"), "the end of the silence is said")
        assert learner.step(1).connected


def test_a_pull_that_waits_for_the_loop_is_named(server, monkeypatch, stderr):
    monkeypatch.setattr(news_module, "SILENCE_MIN_S", 0.3)
    with learner_of(server, model(), learner_id=1) as learner:
        peer = server.accept()
        fragments = len(learner.layout.fragments)
        for version in range(8):
            peer.bcast(version % fragments, version, flat(learner, model(1), version % fragments))
        step_until(learner, lambda s: max(s.versions) == 7)
        peer.pull(2, 8)

        def said() -> bool:
            return "waiting for this learner, which has not answered the pull of step 8" in (
                stderr.getvalue())

        until(said, "the line")


def test_a_run_that_does_not_begin_is_said_to_be_waited_for(server, monkeypatch, stderr):
    monkeypatch.setattr(news_module, "UNKNOWN_S", 0.3)

    def said() -> bool:
        return "waiting for the run to begin" in stderr.getvalue()

    with learner_of(server, model(), learner_id=1) as learner:
        server.accept()
        until(said, "the line")
        assert learner.step(1).connected
