"""The corpus, a few inputs of every target, and that a fault which is planted is found and told."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.corpus import FOLDER, kept
from tests.fuzz.loop import finding, inputs, smaller
from tests.fuzz.mutate import mutated
from tests.fuzz.target import must
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.fuzz"]
EVERY_TARGET = pytest.mark.parametrize("name", TARGETS)


@EVERY_TARGET
def test_what_was_found_once_is_judged_rightly(name):
    assert kept(name), f"{name} has no corpus"
    for data in kept(name):
        assert finding(TARGETS[name].check, data) is None, data


def test_every_file_of_the_corpus_is_one_of_a_target():
    assert {path.stem for path in FOLDER.iterdir()} == TARGETS.keys()
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 64 * 1024


@EVERY_TARGET
def test_a_batch_is_accepted_in_part_and_the_same_each_time(name):
    target = TARGETS[name]
    first = list(inputs(name, target, 7, 0))
    assert first == list(inputs(name, target, 7, 0))
    assert first != list(inputs(name, target, 8, 0))
    judged = Counter(target.check(data) for data in first)
    assert judged[True] >= 10, "what a target makes is right before it is changed"
    assert judged[False] >= 10, "what is changed is refused"


@EVERY_TARGET
def test_what_a_target_makes_is_accepted_more_often_than_not(name):
    random, target = Random(1), TARGETS[name]
    assert sum(target.check(target.make(random)) for _ in range(40)) >= 20


def test_mutations_reach_every_kind_of_change():
    random, data = Random(1), bytes(range(100))
    found = [mutated(random, data, [b"\xff" * 30]) for _ in range(300)]
    assert any(len(one) < 100 for one in found)
    assert any(len(one) > 100 for one in found)
    assert any(b"\xff" * 8 in one for one in found)
    assert mutated(random, b"", []) is not None


def test_a_finding_becomes_small():
    def check(data: bytes) -> bool:
        must(b"\x07\x08" not in data, "it is there")
        return True
    data = bytes(100) + b"\x07\x08" + bytes(100)
    assert finding(check, data).startswith("AssertionError at target.py:")
    assert smaller(check, data) == b"\x07\x08"


PLANTED = """
import os, sys
from tests.fuzz import __main__ as fuzz
from tests.fuzz.target import Target, must
def check(data):
    {fault}
    return True
fuzz.TARGETS["yeto"] = Target(lambda random: bytes([1, random.randrange(4), 9]), check)
sys.exit(fuzz.main(["--target", "yeto", "--seconds", "600", "--inputs", "1000000"]))
"""


@pytest.mark.parametrize(("fault", "told"), [
    ('must(3 not in data, "three is there")', "three is there"),
    ("if 3 in data: os.abort()", "the process ended with status -6"),
])
def test_a_planted_fault_is_found_with_a_line_and_a_command_to_see_it_again(fault, told):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PLANTED.format(fault=fault))],
                          cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    assert told in done.stdout
    lines = done.stdout.splitlines()
    [at] = [n for n, line in enumerate(lines) if line.startswith("yeto: keep it in")]
    assert 3 in ast.literal_eval(lines[at + 1])
    assert "python -m tests.fuzz --target yeto --input" in lines[at + 2]
    assert lines[-1].endswith("1 finding")


def test_the_command_judges_one_input():
    done = subprocess.run([*COMMAND, "--target", "yeto", "--target", "epoch", "--input", "b'abc'"],
                          cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (
        0, "yeto: nothing found\nepoch: nothing found\n"), done.stderr
