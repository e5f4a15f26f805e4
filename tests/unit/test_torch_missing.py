"""Without PyTorch the package is whole, and `syncer.torch` says in one sentence what is missing."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORT = """
import sys
sys.modules["torch"] = None
try:
    import syncer.torch
except ModuleNotFoundError as error:
    print(error.name, error)
"""


def test_the_import_is_one_sentence():
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, check=True, timeout=60,
                          capture_output=True, text=True)
    assert done.stdout == (
        "torch syncer.torch needs PyTorch, which is not installed for this Python; install it "
        "with: pip install 'diloco-syncer[torch]'\n")


def test_a_learner_needs_no_torch():
    code = "import sys, syncer.learner, syncer.server.service; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60,
                          capture_output=True, text=True)
    assert done.stdout == "False\n"
