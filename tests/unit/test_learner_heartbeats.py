"""When a learner repeats its last step count, as the server's clock of steps hears it (2.6)."""

import pytest

from syncer.core.rounds.membership import Member
from syncer.learner.heartbeats import HEARTBEAT_S, Heartbeats

SECOND = 1_000_000_000


class Heard:
    """A learner's loop and the estimate of its server: counts go out as `Learner` sends them."""

    def __init__(self):
        self.now, self.step, self.count = 0.0, 0, 0
        self.beats, self.member = Heartbeats(0.0), Member(0, 1)
        self.repeated = 0

    def pass_time(self, seconds: float) -> None:
        """The loop is busy so long; meanwhile the pulse may repeat the count."""
        end = self.now + seconds
        while self.beats.due <= end:
            self.member.observe(int(self.beats.due * SECOND), self.count)
            self.beats.due += self.beats.every
            self.repeated += 1
        self.now = end

    def step_of(self, seconds: float) -> None:
        self.pass_time(seconds)
        self.step += 1
        self.beats.stepped(self.now)
        if self.beats.is_due(self.now):
            self.count = self.step
            self.member.observe(int(self.now * SECOND), self.step)


@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.7, 1.3, 40.0, 600.0])
def test_a_long_step_is_no_pause(step_s):
    heard = Heard()
    heard.step_of(step_s)
    repeated = heard.repeated
    for _ in range(max(20, int(5 / step_s))):
        heard.step_of(step_s)
    assert heard.repeated == repeated, "silent inside of steps"
    assert heard.member.step_time_s == pytest.approx(step_s, rel=0.01)


@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.7, 1.3, 40.0])
@pytest.mark.parametrize("pause", [30, 300])
def test_a_pause_is_no_long_step(step_s, pause):
    """For half a minute, or as long as 30 or 300 steps take: the estimate stays what it was."""
    heard = Heard()
    pause_s = max(30.0, pause * step_s)
    for _ in range(max(20, int(5 / step_s))):
        heard.step_of(step_s)
    heard.pass_time(pause_s)
    assert heard.repeated > pause_s / max(HEARTBEAT_S, step_s) / 2
    for _ in range(max(3, int(3 / step_s))):
        heard.step_of(step_s)
        assert step_s / 8 < heard.member.step_time_s < 5 * step_s
    for _ in range(max(5, int(8 / step_s))):
        heard.step_of(step_s)
    assert heard.member.step_time_s == pytest.approx(step_s, rel=0.2)
