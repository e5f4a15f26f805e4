"""examples/numpy_line.py runs with the commands of docs/learner.md, and both learners agree."""

import json
import os
import re
import subprocess
import sys

from .scripted import ROOT, ServerProcess
from .waiting import DEADLINE_S


def commands() -> list[str]:
    """The command lines of the page: the server's, then one for each learner."""
    text = (ROOT / "docs/learner.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```\n(python .*?)```", text, re.DOTALL)
    return block.strip().splitlines()


def test_the_example_solves_its_problem(tmp_path):
    server_command, *learner_commands = commands()
    words = server_command.split()
    assert words[:3] == ["python", "-m", "syncer.server"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    address = f"127.0.0.1:{options.pop('--port')}"
    learners, steps = int(options.pop("--learners")), int(options.pop("--total-steps"))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCER_", "YETO_"))}
    flags = [word for option in options.items() for word in option]
    with ServerProcess(tmp_path, *flags, learners=learners, steps=steps) as server:
        processes = []
        for command in learner_commands:
            python, name, learner_id, printed = command.split()
            assert (python, name, printed) == ("python", "examples/numpy_line.py", address)
            processes.append(subprocess.Popen(
                [sys.executable, str(ROOT / name), learner_id, f"127.0.0.1:{server.port}"],
                env=clean | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * learners
        assert server.wait() == 0, server.log.text()
    assert len(set(outputs)) == 1
    weight, bias = json.loads(outputs[0].replace("] [", "], [").join("[]"))
    for found, expected in zip(weight + bias, [1.0, -2.0, 3.0, 0.5], strict=True):
        assert abs(found - expected) < 0.2, outputs[0]
