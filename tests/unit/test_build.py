"""The build fails with one sentence when a tool is missing, and redoes exactly what changed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sysconfig.get_config_var("CC") is None
        or not (ROOT / "setup.py").exists()
        or shutil.which(sysconfig.get_config_var("CC").split()[0]) is None,
        reason="a build needs the sources and the compiler of this Python",
    ),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The real setup.py over kernels of one line each, so that a build takes a moment."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / "csrc").mkdir()
    for path in (ROOT / "csrc").glob("*.c"):
        (tmp_path / "csrc" / path.name).write_text(f"int {path.stem}_is_here = 1;\n")
    (tmp_path / "csrc" / "syncer_kernels.h").write_text("extern int sha256_is_here;\n")
    kernels = tmp_path / "syncer" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "_native.pxd").write_text(
        'cdef extern from "syncer_kernels.h":\n    int sha256_is_here\n')
    (kernels / "_native.pyx").write_text("def here():\n    return sha256_is_here\n")
    (kernels / "__init__.py").touch()
    shutil.copy2(ROOT / "syncer" / "__init__.py", tmp_path / "syncer" / "__init__.py")
    return tmp_path


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree,
                          capture_output=True, text=True, check=False,
                          env={**os.environ, "CFLAGS": "-O0", **environment})


def last_line(result: subprocess.CompletedProcess) -> str:
    return result.stderr.strip().splitlines()[-1]


def test_without_a_compiler(tree: Path) -> None:
    found = build(tree, CC="no-such-compiler")
    assert found.returncode == 1
    assert last_line(found).startswith(
        "syncer: no C compiler ('no-such-compiler' cannot be run); install one")


def test_without_python_headers(tree: Path, tmp_path: Path) -> None:
    """A compiler that cannot find Python.h, as on a host without the development package."""
    compiler = tmp_path / "cc-without-headers"
    real = shutil.which(sysconfig.get_config_var("CC").split()[0])
    compiler.write_text(
        "#!/bin/sh\nfor a in \"$@\"; do case $a in -I*python*) ;; *) set -- \"$@\" \"$a\";; esac; "
        f"shift; done\nexec {real} \"$@\"\n")
    compiler.chmod(0o755)
    found = build(tree, CC=str(compiler))
    assert found.returncode == 1
    assert last_line(found).startswith(
        "syncer: the headers of this Python (Python.h) are missing; install them")


def test_a_kernel_that_does_not_compile_names_its_file(tree: Path) -> None:
    (tree / "csrc" / "sha256.c").write_text("int broken(void) { return missing; }\n")
    found = build(tree)
    assert found.returncode == 1
    assert last_line(found).startswith("syncer: csrc/sha256.c does not compile")


def objects(tree: Path) -> dict[str, int]:
    """Time of change of every object and module of the build."""
    return {path.name: path.stat().st_mtime_ns
            for pattern in ("build/temp*/**/*.o", "syncer/**/*.so") for path in tree.glob(pattern)}


def changed(tree: Path, before: dict[str, int]) -> set[str]:
    return {name.split(".")[0] for name, time in objects(tree).items() if before.get(name) != time}


@pytest.mark.timeout(600)
def test_incremental_builds_redo_what_changed(tree: Path) -> None:
    found = build(tree)
    assert found.returncode == 0, found.stderr
    before = objects(tree)
    assert build(tree).returncode == 0
    assert changed(tree, before) == set()

    (tree / "csrc" / "sha256.c").touch()
    assert build(tree).returncode == 0
    assert changed(tree, before) == {"sha256", "_native"}

    before = objects(tree)
    (tree / "csrc" / "syncer_kernels.h").touch()
    assert build(tree).returncode == 0
    assert changed(tree, before) == {name.split(".")[0] for name in before}

    before = objects(tree)
    (tree / "syncer" / "kernels" / "_native.pxd").touch()
    assert build(tree).returncode == 0
    assert changed(tree, before) == {"_native"}

    before = objects(tree)
    assert build(tree, SYNCER_NO_OPENMP="1").returncode == 0
    assert changed(tree, before) == {name.split(".")[0] for name in before}


MODE_AFTER_IMPORT = """
from tests import flushing
import syncer.kernels._native
print("mode", flushing.mode(), syncer.kernels._native.here())
"""


@pytest.mark.parametrize(("variable", "flags"), [
    ("CFLAGS", "-O3 -ffast-math"), ("CFLAGS", "-Ofast"),
    ("LDFLAGS", "-O2 -funsafe-math-optimizations")])
def test_no_flag_of_the_environment_turns_subnormals_off(
    tree: Path, variable: str, flags: str
) -> None:
    """Linked with fast-math, a module sets flush-to-zero in the process that imports it."""
    found = build(tree, **{variable: flags})
    assert found.returncode == 0, found.stderr
    (tree / "tests").mkdir()
    shutil.copy2(ROOT / "tests" / "flushing.py", tree / "tests" / "flushing.py")
    (tree / "syncer" / "__init__.py").write_text("")
    shown = subprocess.run([sys.executable, "-c", MODE_AFTER_IMPORT], cwd=tree, text=True,
                           capture_output=True, check=False,
                           env={**os.environ, "PYTHONPATH": str(tree)})
    assert shown.stdout == "mode 0 1\n", shown.stderr


@pytest.mark.parametrize(("flags", "why"), [
    ("-fsingle-precision-constant", "no -fsingle-precision-constant"),
    pytest.param("-mfpmath=387", "no extended precision", marks=pytest.mark.skipif(
        platform.machine() != "x86_64", reason="a flag of x86-64")),
])
def test_what_cannot_be_taken_back_is_an_error(tree: Path, flags: str, why: str) -> None:
    for name in ("syncer_kernels_impl.h", "syncer_kernels.h"):
        shutil.copy2(ROOT / "csrc" / name, tree / "csrc" / name)
    (tree / "csrc" / "check.c").write_text('#include "syncer_kernels_impl.h"\n')
    found = build(tree, CFLAGS=flags)
    assert found.returncode == 1
    assert why in found.stderr
    assert last_line(found).startswith("syncer: csrc/check.c does not compile")


@pytest.mark.timeout(600)
def test_an_unknown_platform_gets_the_portable_kernels(tmp_path: Path) -> None:
    """Whatever the compiler is for: the harness links and its checks pass."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "syncer").mkdir()
    shutil.copy2(ROOT / "syncer" / "__init__.py", tmp_path / "syncer" / "__init__.py")
    found = subprocess.run([sys.executable, "setup.py", "-q", "harness"], cwd=tmp_path, text=True,
                           capture_output=True, check=False,
                           env={**os.environ, "_PYTHON_HOST_PLATFORM": "linux-x86_64_v3"})
    assert found.returncode == 0, found.stderr
    assert "syncer: no kernels for linux-x86_64_v3 but the portable ones" in found.stdout
    shown = subprocess.run([tmp_path / "build" / "harness-other"], text=True, capture_output=True,
                           check=False)
    assert "\nblend    portable\n" in shown.stdout
    assert shown.stdout.endswith("all kernel checks passed\n")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with what git knows")
def test_a_source_distribution_holds_the_repository(tmp_path: Path) -> None:
    """Tests and docs of an unpacked one find all they name; nothing that was built is in it."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True,
                            capture_output=True, check=True).stdout.splitlines()
    tracked = {name for name in listed if (ROOT / name).exists()} - {".gitignore"}
    tree = tmp_path / "tree"
    for name in tracked:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / "syncer" / "kernels" / "_native.test.so").touch()
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)],
                   cwd=tree, capture_output=True, check=True)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {member.name.partition("/")[2] for member in packed if member.isfile()}
    made = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert names - made == tracked
