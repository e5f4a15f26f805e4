"""How long without a merge is worth a line to a learner."""

import pytest

from syncer.learner.news import NEWS_AGAIN_S, SILENCE, SILENCE_MIN_S, UNKNOWN_S, News


def run(news: News, now: float, steps: int, apart_s: float, version: int = 0):
    """Broadcasts so far apart; (now, version) of the last one."""
    for _ in range(steps):
        now, version = now + apart_s, version + 1
        assert news.heard(now, version) is None
    return now, version


@pytest.mark.parametrize("apart_s", [0.01, 2.0, 40.0])
def test_five_rounds_without_news_are_a_silence(apart_s):
    news = News(3, 0.0)
    for _ in range(3):
        news.heard(0.1, 0)
    assert news.due() == pytest.approx(0.1 + UNKNOWN_S), "nothing to compare with"
    now, version = run(news, 0.1, 20, apart_s)
    assert news.due() == pytest.approx(now + max(SILENCE * apart_s, SILENCE_MIN_S))
    silent = news.due() + 7
    assert news.say(silent) == pytest.approx(silent - now)
    assert news.due() == silent + NEWS_AGAIN_S, "twice a minute"
    assert news.heard(silent + 100, version + 1) == pytest.approx(silent + 100 - now)
    assert news.expected_s < 2 * apart_s


def test_what_a_new_connection_brings_at_once_is_no_pace():
    news = News(8, 0.0)
    run(news, 0.0, 20, 10.0)
    news.connected(1000.0)
    now = 1000.0
    for version in range(100, 108):
        now += 0.001
        news.heard(now, version)
    assert news.expected_s == pytest.approx(10.0)
    assert news.due() == pytest.approx(now + 50)


def test_steps_that_arrive_together_are_taken_for_what_they_are():
    news = News(1, 0.0)
    news.heard(0.0, 0)
    news.heard(10.0, 5)
    assert news.expected_s == pytest.approx(2.0)
    news.heard(10.5, 5)
    assert news.expected_s == pytest.approx(2.0), "sent again, no step"
