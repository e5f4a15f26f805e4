"""`syncer demo --torch`: the demo with a GPT in PyTorch."""

import pytest

from tests.torch.island import torch  # isort: split

import json
import subprocess
import sys

import numpy as np

from syncer.demo.model.byte_gpt import TorchStudent
from syncer.demo.model.byte_model import even_windows
from tests.e2e.scripted import ROOT


def test_the_demo_trains_it_and_everybody_has_the_merged_model(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "syncer", "demo", "--torch", "--learners", "2", "--steps", "8",
         "--json", str(tmp_path / "run.json")],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["problems"] == []
    assert found["merged_from"] == "final state"
    assert all(row["holds_final_cut"] for row in found["learners"])
    assert found["learners"][0]["tokens"] == 512 * found["learners"][0]["steps"]
    assert abs(found["before"] - 8) < 0.5
    assert found["merged"] < found["before"] - 2


def test_a_student_is_one_memory_under_two_views():
    student, other = TorchStudent(3), TorchStudent(3)
    assert np.array_equal(student.flat, other.flat)
    windows = even_windows(np.frombuffer(b"def spam(eggs): pass\n" * 40, np.uint8), 8,
                           student.context)
    before = student.bits_per_byte(windows)
    assert student.train(windows, 1e-3) == pytest.approx(before, rel=1e-4)
    assert not np.array_equal(student.flat, other.flat)
    assert student.bits_per_byte(windows) < before
    for name, parameter in student.module.named_parameters():
        assert torch.equal(parameter.detach(), torch.from_numpy(student.parameters[name]))
    assert sum(map(np.size, student.parameters.values())) == student.flat.size
    assert student.held.shapes == {name: view.shape for name, view in student.parameters.items()}
