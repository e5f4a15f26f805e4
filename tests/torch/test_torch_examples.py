"""The examples run with the commands of docs/pytorch.md, and their islands agree."""

import pytest

from tests.torch.island import torch  # isort: split

import json
import os
import re
import subprocess
import sys

from tests.e2e.scripted import ROOT, ServerProcess
from tests.e2e.waiting import DEADLINE_S

assert torch


def run(tmp_path, program: str, flags: list[str], *, steps: int, arguments=()) -> list[str]:
    """What two islands have printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCER_", "YETO_"))}
    with ServerProcess(tmp_path, *flags, learners=2, steps=steps) as server:
        islands = [subprocess.Popen(
            [sys.executable, str(ROOT / program), str(learner), f"127.0.0.1:{server.port}",
             *arguments], env=clean | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
            for learner in range(2)]
        try:
            outputs = [island.communicate(timeout=4 * DEADLINE_S)[0] for island in islands]
        finally:
            for island in islands:
                island.kill()
        assert [island.returncode for island in islands] == [0, 0]
        assert server.wait() == 0, server.log.text()
    return outputs


def test_the_example_of_the_page_solves_its_problem(tmp_path):
    text = (ROOT / "docs/pytorch.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```\n(python -m syncer.*?)```", text, re.DOTALL)
    server, *islands = block.strip().splitlines()
    assert islands == [f"python examples/torch_line.py {i} 127.0.0.1:29400" for i in range(2)]
    words = server.split()[3:]
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert (options.pop("--port"), options.pop("--learners")) == ("29400", "2")
    steps = int(options.pop("--total-steps"))
    outputs = run(tmp_path, "examples/torch_line.py",
                  [word for option in options.items() for word in option], steps=steps)
    assert outputs[0] == outputs[1]
    [weight], bias = json.loads("[" + outputs[0].replace("] [", "], [") + "]")
    for found, expected in zip(weight + bias, [1.0, -2.0, 3.0, 0.5], strict=True):
        assert abs(found - expected) < 0.2, outputs[0]


def test_two_islands_of_a_gpt_have_one_model_that_has_learnt(tmp_path):
    outputs = run(tmp_path, "examples/torch_gpt.py",
                  ["--run", "bytes", "--sync-interval-steps", "5"], steps=24)
    first = [float(re.match(r"([\d.]+) bits per byte at first", each)[1]) for each in outputs]
    merged = [float(re.search(r"([\d.]+) merged", each)[1]) for each in outputs]
    assert merged[0] == merged[1]
    assert merged[0] < first[0] - 1


@pytest.mark.parametrize("program", ["examples/torch_line.py", "examples/torch_gpt.py"])
def test_an_example_without_arguments_says_how_it_is_called(program):
    done = subprocess.run(
        [sys.executable, str(ROOT / program)], env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"python {program} LEARNER_ID HOST:PORT" in done.stderr
