"""The examples run with the commands of docs/pytorch.md, and their islands agree."""

import pytest

from tests.torch.island import torch  # isort: split

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

from tests.e2e.scripted import ROOT, ServerProcess
from tests.e2e.test_demo import children, running
from tests.e2e.waiting import DEADLINE_S

assert torch


def run(tmp_path, program: str, flags: list[str], *, steps: int,
        arguments=((), ())) -> list[str]:
    """What two islands, with these arguments, have printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCER_", "YETO_"))}
    with ServerProcess(tmp_path, *flags, learners=2, steps=steps) as server:
        islands = [subprocess.Popen(
            [sys.executable, str(ROOT / program), str(learner), f"127.0.0.1:{server.port}",
             *arguments[learner]], env=clean | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, text=True)
            for learner in range(2)]
        try:
            outputs = [island.communicate(timeout=4 * DEADLINE_S)[0] for island in islands]
        finally:
            for island in islands:
                island.kill()
        assert [island.returncode for island in islands] == [0, 0]
        assert server.wait() == 0, server.log.text()
    return outputs


def page_run(tmp_path, page: str, program: str, arguments=((), ())) -> list[str]:
    """The same by the commands of a page of the docs: a server's, and those of two islands."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    [block] = [each for each in re.findall(r"```\n(python -m syncer.*?)```", text, re.DOTALL)
               if program in each]
    server, *islands = block.strip().splitlines()
    assert islands == [f"python {program} {i} 127.0.0.1:29400" for i in range(2)]
    words = server.split()[3:]
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert (options.pop("--port"), options.pop("--learners")) == ("29400", "2")
    steps = int(options.pop("--total-steps"))
    return run(tmp_path, program, [word for option in options.items() for word in option],
               steps=steps, arguments=arguments)


@pytest.mark.parametrize(("page", "program", "library"), [
    ("pytorch.md", "examples/torch_line.py", "torch"),
    ("trainers.md", "examples/lightning_line.py", "lightning"),
    ("trainers.md", "examples/jax_line.py", "jax")])
def test_an_example_fits_its_line(tmp_path, page, program, library):
    pytest.importorskip(library, reason=f"needs {library}; .ci/torch has it")
    outputs = page_run(tmp_path, page, program)
    assert outputs[0] == outputs[1]
    found = [float(number) for number in re.findall(r"-?\d[\d.e-]*", outputs[0])]
    for each, expected in zip(found, [1.0, -2.0, 3.0, 0.5], strict=True):
        assert abs(each - expected) < 0.2, outputs[0]


def test_what_a_trainer_saves_is_the_merged_model(tmp_path):
    """The second island has five steps to make, and waits for the others' end."""
    pytest.importorskip("transformers", reason="needs transformers; .ci/torch has it")
    outputs = page_run(tmp_path, "trainers.md", "examples/hf_trainer.py", ((), ("5",)))
    [first, second] = [re.search(
        r"loss ([\d.]+) before, ([\d.]+) merged after (\d+) steps; saved as it is: True", each)
        for each in outputs]
    assert first[2] == second[2]
    assert float(first[2]) < float(first[1]) - 1
    assert int(second[3]) == 5


def test_two_islands_of_a_gpt_have_one_model_that_has_learnt(tmp_path):
    outputs = run(tmp_path, "examples/torch_gpt.py",
                  ["--run", "bytes", "--sync-interval-steps", "5"], steps=24)
    first = [float(re.match(r"([\d.]+) bits per byte at first", each)[1]) for each in outputs]
    merged = [float(re.search(r"([\d.]+) merged", each)[1]) for each in outputs]
    assert merged[0] == merged[1]
    assert merged[0] < first[0] - 1


def test_adapters_learn_and_the_base_stays_where_it_is(tmp_path):
    pytest.importorskip("peft", reason="needs peft; .ci/torch has it")
    outputs = run(tmp_path, "examples/torch_lora.py",
                  ["--run", "lora", "--sync-interval-steps", "10"], steps=10)
    assert outputs[0] == outputs[1]
    [trained, every, before, merged] = re.search(
        r"([\d,]+) of ([\d,]+) parameters in the run; ([\d.]+) .* ([\d.]+) merged",
        outputs[0]).groups()
    assert int(trained.replace(",", "")) < int(every.replace(",", "")) / 3
    assert float(merged) < float(before) - 0.5


@contextlib.contextmanager
def fleet(*arguments: str) -> Iterator[subprocess.Popen]:
    """Its command in the foreground of a shell, also where these tests are in the background of
    one, with SIGINT ignored; gone afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples/torch_fleet.py"), *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        try:
            yield process
        finally:
            process.terminate()


def test_a_fleet_in_one_command_ends_by_itself():
    with fleet("2", "8") as process:
        out = process.communicate(timeout=4 * DEADLINE_S)[0]
        assert process.returncode == 0, out
    [first, second] = re.findall(r"([\d.]+) merged", out)
    assert first == second


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_fleet_is_gone_after_ctrl_c(number):
    with fleet("2", "100000") as process:
        for _ in range(2):  # both islands have begun
            assert "bits per byte at first" in process.stdout.readline()
        members = children(process.pid)
        assert len(members) == 3
        process.send_signal(number)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130
        assert not any(map(running, members))


@pytest.mark.parametrize("program", ["examples/torch_line.py", "examples/torch_gpt.py"])
def test_an_example_without_arguments_says_how_it_is_called(program):
    done = subprocess.run(
        [sys.executable, str(ROOT / program)], env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"python {program} LEARNER_ID HOST:PORT" in done.stderr


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(ROOT / "examples/torch_fsdp2.py"), *arguments]


def clean() -> dict[str, str]:
    found = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCER_", "YETO_"))}
    return found | {"PYTHONPATH": str(ROOT)}


def test_an_island_of_two_ranks_and_one_of_one_process_have_one_model(tmp_path):
    """By the commands of the page, with fewer steps."""
    text = (ROOT / "docs/pytorch.md").read_text(encoding="utf-8")
    assert ("torchrun --nproc-per-node 2 examples/torch_fsdp2.py 0 127.0.0.1:29400\n"
            "python examples/torch_gpt.py 1 127.0.0.1:29400\n") in text
    with ServerProcess(tmp_path, "--run", "bytes", "--sync-interval-steps", "5", "--quorum", "2",
                       learners=2, steps=16) as server:
        address = f"127.0.0.1:{server.port}"
        commands = torchrun("0", address), [
            sys.executable, str(ROOT / "examples/torch_gpt.py"), "1", address]
        islands = [subprocess.Popen(command, env=clean(), stdout=subprocess.PIPE, text=True)
                   for command in commands]
        try:
            outputs = [island.communicate(timeout=6 * DEADLINE_S)[0] for island in islands]
        finally:
            for island in islands:
                island.kill()
        assert server.wait() == 0, server.log.text()
    merged = [float(re.search(r"([\d.]+) merged", each)[1]) for each in outputs]
    assert abs(merged[0] - merged[1]) < 1e-3, "FSDP sums in another order"
    assert merged[0] < float(re.match(r"([\d.]+) bits per byte at first", outputs[0])[1]) - 1


def test_an_island_of_two_ranks_goes_on_from_its_checkpoint(tmp_path):
    with ServerProcess(tmp_path, "--run", "bytes", "--sync-interval-steps", "3",
                       steps=12) as server:
        address, folder = f"127.0.0.1:{server.port}", str(tmp_path / "island")
        first = subprocess.run(torchrun("0", address, folder, "8"), env=clean(), check=True,
                               capture_output=True, text=True, timeout=6 * DEADLINE_S).stdout
        second = subprocess.run(torchrun("0", address, folder), env=clean(), check=True,
                                capture_output=True, text=True, timeout=6 * DEADLINE_S).stdout
        assert server.wait() == 0, server.log.text()
    assert "saved after 8 steps" in first
    assert "behind 8 steps" in second
    assert "merged, after" in second
