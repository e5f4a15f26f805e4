"""A server that waits says for whom or what, on the real clock: that takes 5 s at least."""

from __future__ import annotations

from tests.e2e.scripted import ScriptedLearner, ServerThread, layout_of, wait_until

SMALL = layout_of((4,))


def test_a_learner_that_gives_no_initial_values_again_is_said_to_be_why(tmp_path):
    """As one of protocol 4 that has trained, and dials in to a server that was started again
    without its checkpoint: it counts as having come, and nothing would happen."""
    with ServerThread(tmp_path) as server, ScriptedLearner(server.port, 0, SMALL):
        line = wait_until(lambda: [line for line in server.log.find("the run waits")
                                   if "initial values" in line["what"]], "the line")[0]
        assert line["level"] == "warning"
        assert line["waited_s"] >= 5
        for part in ("the initial values of learner 0 are missing (0 of 1 fragments are here)",
                     "without a limit (--start-timeout-s sets one)",
                     "learner 0 is connected, but who has trained before", "--resume"):
            assert part in line["what"], line
