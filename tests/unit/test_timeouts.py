"""The table of time-outs in docs/caveats.md: every time of the code, and nothing else."""

import inspect

import pytest

from docs import timeouts
from syncer import tcp
from syncer.learner import Learner

SET_BY = {row.value for row in timeouts.ROWS}


def test_every_constant_with_a_unit_is_in_the_table_or_said_to_be_no_time_out():
    missing = set(timeouts.constants()) - SET_BY - set(timeouts.OTHER)
    assert not missing, (
        f"{sorted(missing)}: give each a row in ROWS of docs/timeouts.py (what is waited for, what "
        "follows), or a line in OTHER if nobody waits for it")


def test_every_flag_that_is_a_time_is_in_the_table():
    assert set(timeouts.flags()) <= SET_BY


def test_every_socket_option_that_is_a_time_is_in_the_table():
    assert {name for name, _ in tcp.KEEPALIVE} - SET_BY == {"TCP_KEEPCNT"}
    assert f"TCP_KEEPCNT ({dict(tcp.KEEPALIVE)['TCP_KEEPCNT']})" in timeouts.table()


def test_nothing_is_named_that_is_not_there():
    files = {value for value in SET_BY if value.startswith("syncer/")} | set(timeouts.OTHER)
    assert files <= set(timeouts.constants())


@pytest.mark.parametrize("row", timeouts.ROWS, ids=lambda row: row.value)
def test_every_row_has_a_number_of_its_own(row):
    assert timeouts.value_of(row) not in ("", "0") or row.value == "--min-round-interval-ms"


@pytest.mark.parametrize(("text", "seconds"), [
    ("A_S = 30.0", 30.0), ("A_NS = 2 * 10**9", 2.0), ("cdef long long A_NS = 100_000_000", 0.1),
    ("A_MS = 250  # why", 0.25)])
def test_numbers_are_read_as_the_code_has_them(text, seconds, tmp_path, monkeypatch):
    (tmp_path / "syncer" / "server").mkdir(parents=True)
    (tmp_path / "syncer" / "server" / "a.py").write_text(text + "\n")
    monkeypatch.setattr(timeouts, "ROOT", tmp_path)
    assert list(timeouts.constants().values()) == [pytest.approx(seconds)]


def test_arguments_of_the_learner_that_are_times_are_in_the_table():
    found = {f"Learner({name}=)" for name in inspect.signature(Learner).parameters
             if name.endswith("_s")}
    for method in ("finish", "adopt", "step", "close"):
        found |= {f"Learner.{method}({name}=)"
                  for name in inspect.signature(getattr(Learner, method)).parameters
                  if name.endswith("_s")}
    assert found <= SET_BY
