"""The parts of `syncer demo` that need no server: plan, what is watched, table, fleet, files."""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import syncer
from syncer.checkpoint.final_state import write_final_state
from syncer.demo import command, settings
from syncer.demo.learner import whole_number
from syncer.demo.model import merged
from syncer.demo.model.byte_model import SHAPES, ByteModel
from syncer.demo.model.trainer import digest
from syncer.demo.processes import fleet
from syncer.demo.processes.fleet import Exited, Fleet, Line
from syncer.demo.run_plan import RunPlan
from syncer.demo.show import closing_table, text
from syncer.demo.show.outcome import Loss, collect
from syncer.demo.show.screen import PlainScreen, headline, progress_line
from syncer.demo.show.watch import RunWatch, TapeReader
from syncer.errors import ConfigError, SyncerError
from syncer.flags import resolve
from syncer.layout import AVG, RDA
from syncer.learner.partition import build_layout


# ---------------------------------------------------------------------------------------- plan
def test_model_divides_into_fragments_of_both_kinds():
    layout = build_layout(SHAPES, settings.FRAGMENTS)
    assert len(layout.fragments) >= 4
    assert {fragment.merge_mode for fragment in layout.fragments} == {AVG, RDA}
    sizes = [fragment.numel for fragment in layout.fragments]
    assert max(sizes) < 2 * min(sizes)


def test_time_budget_spreads_merges_and_ends_inside_it():
    for seconds in (0.5, 3, 60, 600):
        plan = RunPlan(seconds=seconds)
        spread_s = plan.total_steps * plan.merge_interval_ms / 1000
        assert 0.8 * seconds <= spread_s <= settings.PACED_SHARE * seconds
        assert plan.total_steps >= settings.MERGES_MIN


def test_server_takes_the_arguments():
    for plan in (RunPlan(seconds=60.0), RunPlan(steps=50),
                 RunPlan(learners=1, steps=5, seconds=2.0)):
        words = plan.server_arguments("/tmp/final", "/tmp/tape")
        given = {word[2:].replace("-", "_"): value
                 for word, value in zip(words[::2], words[1::2], strict=True)}
        config = resolve(given, {})
        assert config.total_steps == plan.total_steps
        assert config.quorum == max(1, plan.learners - 1)
        assert config.preset == "local"
        assert (config.sync_interval_steps > 0) == (plan.steps is not None)
        assert (config.min_round_interval_ms > 0) == (plan.steps is None)


def test_killed_learner_is_started_again_before_the_end():
    for steps in (4, 5, 20, 333):
        for learners in (1, 2, 3):
            plan = RunPlan(learners=learners, steps=steps, kill_one=True)
            assert 1 <= plan.kill_at <= plan.return_at < steps


def test_learning_rate_rises_stays_and_falls():
    rates = [settings.learning_rate(step) for step in range(1, 4000)]
    top = settings.LEARNING_RATE
    assert rates[0] == pytest.approx(top / settings.WARMUP_STEPS)
    assert rates[settings.WARMUP_STEPS - 1 : settings.CONSTANT_STEPS] == [top] * 451
    assert rates[4 * settings.CONSTANT_STEPS - 1] == pytest.approx(top / 2)


# --------------------------------------------------------------------------------------- flags
def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *words])


def test_help_states_units_and_defaults(capsys):
    with pytest.raises(SystemExit):
        flags("--help")
    text = " ".join(capsys.readouterr().out.split())
    for piece in ("1 to 64 (default: 3)", "seconds of training", "default: 60", "default: bf16",
                  "default: 0", "SIGKILL"):
        assert piece in text


def test_paths_are_refused_before_anything_starts(tmp_path):
    read_only = tmp_path / "file.json"
    for name, path in (("json", tmp_path), ("json", tmp_path / "none" / "x.json"),
                       ("plot", tmp_path / "loss.gif"), ("plot", tmp_path)):
        with pytest.raises(ConfigError, match=f"--{name} "):
            command.check(RunPlan(seconds=1.0, **{name: str(path)}))
    command.check(RunPlan(seconds=1.0, json=str(read_only), plot=str(tmp_path / "loss.png")))
    assert not read_only.exists()


def test_missing_matplotlib_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--plot needs matplotlib; install it with"):
        command.check(RunPlan(seconds=1.0, plot=str(tmp_path / "loss.png")))


def test_missing_torch_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--torch needs PyTorch; install it with"):
        command.check(RunPlan(seconds=1.0, torch=True))


@pytest.mark.parametrize("text", ["", "-1", "1.0", "1e3", "٣", "0", "99999999999999"])
def test_whole_number_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError):
        whole_number(1)(text)


# --------------------------------------------------------------------------------------- watch
def server_log(message: str, **fields) -> str:
    return json.dumps({"time": "t", "level": "info", "message": message, **fields})


def progress(step: int, tokens: int, **fields) -> str:
    return json.dumps({"event": "progress", "learner": 0, "seconds": tokens / 1000, "step": step,
                       "tokens": tokens,
                       "loss": 3.0, "held_out": None, "outer_step": 1, "connected": True,
                       "bytes_sent": 10 * tokens, "bytes_received": 20 * tokens, **fields})


def end_record(learner: int, **fields) -> str:
    return json.dumps({"event": "end", "learner": learner, "how": "final cut", "step": 30,
                       "tokens": 3840, "seconds": 2.0, "own": 3.1, "merged": 3.0,
                       "versions": [4, 1, 2, 3], "sha256": "ab" * 32, "bytes_sent": 1000,
                       "bytes_received": 2000, "peak_rss_bytes": 60_000_000, **fields})


def merge(step: int, responded: list[int]) -> dict:
    return {"step": step, "fragment": 0, "responded": responded, "expected": [0, 1], "gnorm": 1.0}


def started(learners: int = 2, total_steps: int = 8) -> RunWatch:
    watch = RunWatch(learners, total_steps)
    for view in watch.learners:
        view.started()
    watch.server_line(server_log("syncer listening", port=4711))
    for learner in range(learners):
        assert not watch.training
        watch.server_line(server_log("learner connected", learner=learner))
    watch.server_line(server_log("global parameters initialized"))
    return watch


def test_training_begins_with_all_learners_and_parameters():
    watch = started()
    assert watch.port == 4711
    assert watch.training
    assert [h["what"] for h in watch.happenings] == ["join", "join"]


def test_lines_that_are_no_records_do_no_harm():
    watch = started()
    watch.server_line("Traceback: something")
    watch.learner_line(0, "not json")
    watch.learner_line(0, "[1]")
    assert watch.complaints == ["Traceback: something"]
    assert watch.curve == []


def test_lost_learner_keeps_what_it_did():
    watch = started()
    view = watch.learners[0]
    watch.learner_line(0, progress(10, 1280))
    view.lost()
    assert view.state == "killed"
    view.started()
    assert view.state == "returning"
    watch.learner_line(0, progress(12, 256))
    assert (view.state, view.step, view.tokens_total) == ("training", 12, 1536)
    assert view.wire_total == (15360, 30720)
    assert [point["process"] for point in watch.curve] == [1, 2]


def test_speed_is_by_the_learners_clock_also_when_records_are_read_together():
    watch = started()
    for tokens in (1000, 2000, 3000):
        watch.learner_line(0, progress(10, tokens))
    assert watch.learners[0].tokens_per_s == 1000.0


def test_merges_without_a_learner():
    watch = started()
    for step, responded in enumerate(([0, 1], [0, 1], [0], [0], [0, 1], [1]), start=1):
        watch.tape_record(merge(step, responded))
    watch.tape_record({"event": "init"})
    assert watch.outer_step == 6
    assert watch.merges_without(1) == [3, 4]
    assert watch.first_merge_with(1, after=2) == 5
    assert watch.first_merge_with(0, after=5) is None


def test_tape_reader_takes_whole_lines_only(tmp_path):
    path = tmp_path / "tape"
    reader = TapeReader(path)
    assert reader.read() == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert reader.read() == [{"step": 1}]
    assert reader.read() == []
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert reader.read() == [{"step": 2}, {"step": 3}]


# --------------------------------------------------------------------------- outcome and table
def ended(tmp_path, plan: RunPlan, watch: RunWatch, loss: Loss | None = None,
          how: str = "final cut"):
    return collect(plan, watch, tmp_path / "absent", how, loss)


def words(outcome) -> str:
    """The closing text without its line ends."""
    return " ".join(closing_table.render(outcome).split())


def test_newest_learner_stands_in_for_a_missing_final_state(tmp_path):
    watch = started()
    watch.learner_line(0, end_record(0))
    watch.learner_line(1, end_record(1, versions=[4, 5, 2, 3], merged=2.5, sha256="cd" * 32))
    outcome = ended(tmp_path, RunPlan(learners=2, steps=8), watch, how="time budget")
    assert (outcome.merged, outcome.merged_from) == (2.5, "learner 1")
    assert outcome.problems == []
    assert "newest one that learner 1 had received" in words(outcome)


def test_final_state_is_measured_and_compared(tmp_path):
    model = write_state(tmp_path / "state", seed=4)
    watch = started()
    watch.learner_line(0, end_record(0, sha256=digest(model.flat)))
    watch.learner_line(1, end_record(1))
    outcome = collect(RunPlan(learners=2, steps=8), watch, tmp_path / "state", "final cut", None)
    assert outcome.merged == pytest.approx(8.0, abs=0.3)
    assert [row.holds_final_cut for row in outcome.learners] == [True, False]
    assert outcome.problems == ["learner 1 ended with other parameters than the server's"]
    assert outcome.failed
    assert "1 of 2 learners ended with exactly" in closing_table.render(outcome)


def test_learner_without_a_last_word_is_a_problem_unless_it_was_killed(tmp_path):
    watch = started()
    watch.learner_line(0, end_record(0))
    plan = RunPlan(learners=2, steps=8)
    assert ended(tmp_path, plan, watch).problems == ["learner 1 did not report the final cut"]
    loss = Loss(1, 4, 2.0, 5, 2.5)
    outcome = ended(tmp_path, plan, watch, loss)
    assert outcome.problems == []
    assert "too late to take part in another merge" in words(outcome)


def test_table_fits_eighty_columns_with_large_figures(tmp_path):
    watch = started(learners=64, total_steps=10**9)
    for learner in range(64):
        watch.learner_line(learner, end_record(
            learner, step=98_765_432, tokens=10**13, own=12.3456, bytes_sent=987_654_321_000,
            bytes_received=123_456_789_000))
    watch.tape_record(merge(10**9, [0]))
    watch.server_line(server_log("server totals", bytes_received=10**15, bytes_sent=10**15,
                                 cpu_seconds=123456.7, peak_rss_bytes=10**12, commits=10**9))
    outcome = ended(tmp_path, RunPlan(learners=64, steps=10**9), watch, Loss(63, 5 * 10**8, 1e6))
    outcome.baseline = {"steps": 98_765_432, "before": 8.0, "held_out": 2.0, "seconds": 1.0}
    for each in outcome.learners:
        each.tokens_per_s = 12_345_678
    text = closing_table.render(outcome)
    assert max(map(len, text.splitlines())) <= 80
    assert "123 GB" in text
    assert "NOT below" in text


def test_table_of_a_run_that_never_began(tmp_path):
    watch = RunWatch(3, 100)
    text = closing_table.render(ended(tmp_path, RunPlan(seconds=60.0), watch, how="interrupted"))
    assert "nothing was merged yet" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("count", "written"), [
    (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_949, "99.9 kB"), (99_950, "100 kB"),
    (999_499, "999 kB"), (999_500, "1.0 MB"), (5e9, "5.0 GB"), (1e13, "10000 GB"),
])  # fmt: skip
def test_sizes(count, written):
    assert text.size(count) == written


def test_progress_fits_eighty_columns(capsys):
    watch = started(learners=2, total_steps=1_000_000)
    watch.server_line(server_log("learner connected", learner=1))
    watch.learner_line(0, progress(10, 10**6, held_out=3.2))
    time.sleep(0.001)
    watch.learner_line(0, progress(10, 10**9, held_out=3.2))
    watch.tape_record(merge(500_000, [0]))
    line = progress_line(watch)
    assert len(line) <= 80
    assert "1 of 2 training  loss 3.000" in line
    assert "[###############..............." in headline(watch)
    screen = PlainScreen()
    screen.show(watch)
    screen.show(watch)
    out = capsys.readouterr().out.splitlines()
    assert sum("joined" in each for each in out) == 3
    assert sum("loss" in each for each in out) == 1


# --------------------------------------------------------------------------------- final state
def write_state(path, seed: int) -> ByteModel:
    """A final-state file as the server writes it, of a fresh model."""
    model = ByteModel(seed)
    write_final_state(path, [
        np.concatenate([model.parameters[t.name].reshape(-1) for t in fragment.tensors])
        for fragment in build_layout(SHAPES, settings.FRAGMENTS).fragments])
    return model


def test_final_state_round_trip(tmp_path):
    model = write_state(tmp_path / "state", seed=9)
    read = merged.read_final_state(tmp_path / "state")
    assert np.array_equal(read.flat.view(np.uint32), model.flat.view(np.uint32))


def test_damaged_final_state_is_refused(tmp_path):
    write_state(tmp_path / "state", seed=9)
    whole = (tmp_path / "state").read_bytes()
    swapped = whole[:4] + struct.pack("<Q", 1) + whole[12:]
    for damaged in (b"", whole[:-1], whole + b"\0", b"\5" + whole[1:], swapped):
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(SyncerError, match="final state"):
            merged.read_final_state(tmp_path / "bad")


# --------------------------------------------------------------------------------------- fleet
@pytest.fixture
def script(tmp_path, monkeypatch):
    """Puts a module where the children find it; returns a function that writes it."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(p for p in sys.path if p)}")

    def write(text: str) -> str:
        (tmp_path / "demo_child.py").write_text(text)
        return "demo_child"

    return write


def poll_until_exit(crew: Fleet) -> list:
    happened, deadline = [], time.monotonic() + 60
    while not any(isinstance(each, Exited) for each in happened):
        assert time.monotonic() < deadline
        happened += crew.poll(0.1)
    return happened


def test_children_are_heard_to_the_end(script):
    module = script("import os, sys\nprint('one')\nprint('two', file=sys.stderr)\n"
                    "print(os.environ['OPENBLAS_NUM_THREADS'], *sys.argv[1:], end='')\n"
                    "sys.exit(7)\n")
    with Fleet() as crew:
        child = crew.start("learner", module, ["a", "b"], 5)
        happened = poll_until_exit(crew)
    lines = {(each.stream, each.text) for each in happened if isinstance(each, Line)}
    assert lines == {("stdout", "one"), ("stdout", "1 a b"), ("stderr", "two")}
    assert happened[-1] == Exited(child, 7)
    assert (list(child.complaints), child.learner, child.alive) == (["two"], 5, False)


def test_stubborn_child_is_killed(script, monkeypatch):
    monkeypatch.setattr(fleet, "END_TIMEOUT_S", 0.2)
    module = script("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                    "print('deaf', flush=True)\ntime.sleep(600)\n")
    with Fleet() as crew:
        child = crew.start("learner", module, [])
        deadline = time.monotonic() + 60
        while not crew.poll(0.1):
            assert time.monotonic() < deadline
    assert child.status == -signal.SIGKILL


def test_error_in_the_middle_ends_the_children(script):
    module = script("import time\ntime.sleep(600)\n")
    crew = Fleet()

    def fail():
        with crew:
            crew.start("learner", module, [])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert crew.children[0].process.poll() is not None


def test_a_child_never_imports_what_lies_in_the_current_folder(tmp_path, monkeypatch):
    """A clone in which the package was installed has a syncer/ that is not compiled."""
    (tmp_path / "syncer").mkdir()
    (tmp_path / "syncer/__init__.py").write_text("raise SystemExit(77)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/somewhere/bin", *sys.path])  # as of an installed script
    monkeypatch.setenv("PYTHONPATH", str(Path(syncer.__file__).parent.parent))  # also if it is not
    with Fleet() as children:
        child = children.start("learner", "syncer.demo.learner", ["--help"])
        while child.alive:
            children.poll(1.0)
    assert child.status == 0


def test_a_child_of_a_program_that_runs_in_its_tree_has_that_tree(tmp_path):
    """`python -m syncer` in a built checkout that nobody has installed."""
    root = str(Path(syncer.__file__).parent.parent)
    program = ("from syncer.demo.processes.fleet import same_package\n"
               "print(same_package()['PYTHONPATH'])")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    found = subprocess.run([sys.executable, "-c", program], cwd=root, env=clean, text=True,
                           capture_output=True, check=True)
    assert found.stdout.strip() == os.path.realpath(root)
