"""The limits of benchmarks/: that rows work in small, and what table, file and status say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks.limits import __main__ as limits
from benchmarks.limits.figure import Figure, Row, in_turns
from benchmarks.limits.rows import ROWS

from .scripted import ROOT
from .test_lab import belonging
from .waiting import until


@pytest.mark.slow
def test_rows_come_as_a_table_and_as_json(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.limits", "--short", "--only", "rounds-1", "--only",
         "checkpoint-load", "--json", str(tmp_path / "limits.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    found = json.loads((tmp_path / "limits.json").read_text())
    assert sorted(found) == ["checkpoint-load", "rounds-1"]
    for row in found.values():
        assert sorted(row) == ["at_least", "ratio"]
        assert row["ratio"] > 0


@pytest.mark.slow
def test_interrupted_it_leaves_nothing_behind():
    mark = f"LIMITS_TEST={os.getpid()}"
    name, _, value = mark.partition("=")
    running = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.limits", "--only", "rounds-1"], cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {name: value})
    try:
        until(lambda: len(belonging(mark)) >= 3, "the table, a row and its server")
        running.send_signal(signal.SIGTERM)
        running.wait(60)
        until(lambda: not belonging(mark), "all have ended")
    finally:
        running.kill()
        running.wait()


def said(monkeypatch, capsys, figure, *arguments):
    """Status, output and errors of a table of one row."""
    def measured(row, short):
        if isinstance(figure, Exception):
            raise figure
        return figure

    monkeypatch.setattr(limits, "ROWS", (Row("a-row", "a path", 0.8, lambda short: figure),))
    monkeypatch.setattr(limits, "measured", measured)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return limits.main(list(arguments)), *capsys.readouterr()


def test_a_row_below_its_bound_is_marked_and_a_failure_only_if_asked(monkeypatch, capsys):
    figure = Figure(0.5, 1.0, 2.0, "GB/s", 1.0, 0.5)
    status, out, _ = said(monkeypatch, capsys, figure)
    assert status == 0
    assert "  0.50  0.80 !" in out
    assert "below their bound: a-row" in out
    assert said(monkeypatch, capsys, figure, "--strict")[0] == 1
    assert said(monkeypatch, capsys, figure._replace(ratio=0.8), "--strict")[0] == 0


def test_what_is_not_here_is_said_and_no_failure(monkeypatch, capsys, tmp_path):
    status, out, _ = said(monkeypatch, capsys, "needs two machines", "--strict", "--json",
                          str(tmp_path / "file"))
    assert status == 0
    assert "not here: needs two machines" in out
    assert json.loads((tmp_path / "file").read_text()) == {}


def test_what_cannot_be_measured_is_a_failure(monkeypatch, capsys):
    status, out, err = said(monkeypatch, capsys, RuntimeError("a-row: 1: it broke"))
    assert status == 1
    assert "cannot be measured" in out
    assert err == "benchmarks.limits: a-row: 1: it broke\n"


def test_every_line_has_80_columns_at_most():
    for row in ROWS:
        assert len(row.path) <= 29, row.path
        figure = Figure(0.123, 98765.4, 98765.4, "% core", 12.345, 9.8765)
        assert len(limits.line(row, figure)) <= 80
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_a_figure_is_the_median_of_the_turns_ratios():
    times = iter([0, 9, 0, 9, *(0, 2, 0, 4), *(0, 3, 0, 1), *(0, 2, 0, 1)])
    figure = in_turns(lambda: None, lambda: None, 12.0, 3, clock=lambda: next(times), cpu=lambda: 0)
    # In every other turn ours comes first. Bound and ours: 2 and 4, 1 and 3, 2 and 1.
    assert figure == Figure(0.5, 4.0, 6.0, "GB/s", 0.0, 0.0)
