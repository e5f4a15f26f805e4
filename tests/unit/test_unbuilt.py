"""A source tree that was not built says what to run, and an installed package says nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.relative_to(ROOT) for path in (ROOT / "syncer").rglob("*.pyx"))
pytestmark = [
    pytest.mark.slow,  # a process per module
    pytest.mark.skipif(not SOURCES, reason="an installed package has no sources"),
]


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of this tree, without what was built from them."""
    tree = tmp_path_factory.mktemp("unbuilt")
    shutil.copytree(ROOT / "syncer", tree / "syncer",
                    ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__"))
    return tree


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without `site`, whose editable installs would find this tree's modules; with NumPy."""
    path = os.pathsep.join([str(tree), str(Path(np.__file__).parents[1])])
    return subprocess.run([sys.executable, "-S", *arguments], cwd=tree, capture_output=True,
                          text=True, timeout=60, check=False,
                          env={**os.environ, "PYTHONPATH": path})


def sentence(module: str, tree: Path) -> str:
    major, minor = sys.version_info[:2]
    return (f"{module} is not built for Python {major}.{minor}: run `make build` in {tree}, "
            f"or: pip install -e {tree}")


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_importing_a_module_that_is_not_built_says_what_to_run(unbuilt: Path, source: Path) -> None:
    """As an import error whose message names the first module that is missing."""
    module = ".".join(source.with_suffix("").parts)
    program = (f"try:\n    import {module}\nexcept ImportError as error:\n"
               "    print(error.name)\n    print(error)\n")
    found = run(unbuilt, "-c", program)
    assert found.returncode == 0, found.stderr
    missing, said = found.stdout.splitlines()
    assert (unbuilt / missing.replace(".", "/")).with_suffix(".pyx").exists()
    assert said == sentence(missing, unbuilt)


@pytest.mark.parametrize("words", [
    ["syncer.server", "--learners", "1", "--total-steps", "1"],
    ["syncer", "serve", "--learners", "1", "--total-steps", "1"],
    ["syncer", "kernels"],
], ids=" ".join)
def test_a_command_of_a_tree_that_is_not_built_is_one_sentence(
        unbuilt: Path, words: list[str]) -> None:
    found = run(unbuilt, "-m", *words)
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.startswith("syncer: syncer.")
    assert "is not built for Python" in found.stderr
    assert found.stderr.count("\n") == 1


def test_other_imports_fail_as_ever(unbuilt: Path) -> None:
    found = run(unbuilt, "-c", "import syncer.core.nowhere")
    assert found.stderr.endswith("ModuleNotFoundError: No module named 'syncer.core.nowhere'\n")


def test_an_installed_package_has_no_finder(unbuilt: Path, tmp_path: Path) -> None:
    """Without .pyx files nothing is added to Python's import."""
    shutil.copytree(unbuilt / "syncer", tmp_path / "syncer",
                    ignore=shutil.ignore_patterns("*.pyx"))
    found = run(tmp_path, "-c", "import sys, syncer\n"
                "print(syncer.unbuilt.UnbuiltModules in sys.meta_path)")
    assert found.stdout == "False\n"
