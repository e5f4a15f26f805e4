"""Exit statuses: their numbers are what scripts of operators compare with."""

import signal

import pytest

from syncer.cli import answered
from syncer.errors import CheckpointError, ConfigError
from syncer.exits import NO_FAILURES, Exit, after_signal, markdown_table


def test_the_published_numbers():
    assert {status.name: int(status) for status in Exit} == {
        "DONE": 0, "FAILED": 1, "UNUSABLE": 2, "NOT_BINDABLE": 3, "NOT_RESUMABLE": 4,
        "NOT_WRITTEN": 5, "NEVER_STARTED": 6, "HUNG_UP": 129, "INTERRUPTED": 130, "TERMINATED": 143}


@pytest.mark.parametrize(("number", "status"), [
    (signal.SIGHUP, Exit.HUNG_UP), (signal.SIGINT, Exit.INTERRUPTED),
    (signal.SIGTERM, Exit.TERMINATED)])
def test_a_signal_gives_the_status_that_a_shell_gives_it(number, status):
    assert after_signal(number) == status
    assert status in NO_FAILURES


@pytest.mark.parametrize("status", Exit, ids=lambda status: status.name)
def test_every_status_has_its_row(status):
    assert f"\n| {int(status)} | {status.meaning} |\n" in markdown_table()
    assert status.meaning
    assert "|" not in status.meaning


@pytest.mark.parametrize(("error", "status", "said"), [
    (ConfigError("--quorum 0 is no use"), Exit.UNUSABLE, "syncer: --quorum 0 is no use\n"),
    (CheckpointError("run.ckpt is broken"), Exit.FAILED, "syncer: run.ckpt is broken\n"),
    (KeyboardInterrupt(), Exit.INTERRUPTED, ""),
])
def test_an_error_of_a_command_is_one_sentence_and_a_status(error, status, said, capsys):
    def fails():
        raise error

    assert answered(fails) == status
    assert capsys.readouterr() == ("", said)


def test_the_status_of_a_command_passes_through():
    assert answered(lambda: Exit.NOT_BINDABLE) == 3
