"""`StopRequest`: a signal is asked for between two steps, ends a wait at once, can be undone."""

import os
import signal

import pytest

from syncer.demo.processes.stop import Stopped, StopRequest


@pytest.fixture
def stop():
    each = StopRequest(signal.SIGUSR1, signal.SIGUSR2)
    yield each
    each.restore()


def test_signal_is_a_request(stop):
    assert (stop.asked, stop.exit_status) == (0, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (stop.asked, stop.exit_status) == (signal.SIGUSR1, 128 + signal.SIGUSR1)


def test_second_signal_raises_and_the_first_decides_the_status(stop):
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGUSR2)
    assert stop.exit_status == 128 + signal.SIGUSR1


def test_signal_ends_a_wait(stop):
    with pytest.raises(Stopped), stop.ends_wait():
        os.kill(os.getpid(), signal.SIGUSR2)
    assert stop.asked == signal.SIGUSR2


def test_wait_does_not_begin_after_a_signal(stop):
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(Stopped), stop.ends_wait():
        pytest.fail("the wait began")


def test_wait_that_is_over_does_not_raise(stop):
    with stop.ends_wait():
        pass
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.asked == signal.SIGUSR1


def test_restore():
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) != before
    stop.restore()
    assert signal.getsignal(signal.SIGUSR1) == before
