"""Selection of kernel variants: the override, forcing, the report and the command."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

from syncer import kernels
from syncer.errors import KernelError
from syncer.kernels import command, testing
from syncer.kernels.selection import parse_override

FAMILIES = ["sha256", "codec", "blend", "reduce"]


def imported(override: str) -> subprocess.CompletedProcess:
    code = "import json; from syncer import kernels; print(json.dumps(kernels.active()))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, "SYNCER_KERNELS": override})


def test_override_selects_at_import() -> None:
    found = imported("portable")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == dict.fromkeys(FAMILIES, "portable")
    best = json.loads(imported("").stdout)
    found = imported(" sha256=portable , codec=portable ")
    expected = {**best, "sha256": "portable", "codec": "portable"}
    assert json.loads(found.stdout) == {family: expected[family] for family in FAMILIES}


def test_the_best_variant_that_the_cpu_can_run_and_has_a_reason_for() -> None:
    """avx2-faint runs wherever avx2 does, and is for CPUs that leave subnormals to microcode."""
    best = json.loads(imported("").stdout)
    usable = {family: [name for name, can in names if can]
              for family, names in kernels.variants().items()}
    if "assisted subnormals" not in kernels.describe()["cpu"] and "avx2" in usable["blend"]:
        assert usable["blend"].pop(0) == "avx2-faint"
    assert best == {family: names[0] for family, names in usable.items()}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("avx1024", "SYNCER_KERNELS=avx1024: kernel family 'sha256' has no variant 'avx1024'"),
        ("codec=no", "SYNCER_KERNELS=codec=no: kernel family 'codec' has no variant 'no'"),
        ("fft=portable", "no kernel family 'fft'; there are sha256, codec, blend, reduce"),
        ("codec=", "SYNCER_KERNELS: cannot read 'codec='"),
    ],
)
def test_override_that_cannot_be_followed_fails_the_import(override: str, sentence: str) -> None:
    found = imported(override)
    assert found.returncode != 0
    assert sentence in found.stderr.splitlines()[-1]


def test_parse_override() -> None:
    assert parse_override("") == {}
    assert parse_override("portable,sha256=shani") == {
        **dict.fromkeys(FAMILIES, "portable"), "sha256": "shani"}
    with pytest.raises(KernelError, match="cannot read '=avx2'"):
        parse_override("=avx2")


def test_forced_restores_the_selection_even_after_an_error() -> None:
    before = kernels.active()
    with pytest.raises(KernelError), testing.forced(codec="portable", blend="nothing"):
        pytest.fail("must not run with an unknown variant")
    assert kernels.active() == before
    with testing.forced(**dict.fromkeys(FAMILIES, "portable")):
        assert set(kernels.active().values()) == {"portable"}
    assert kernels.active() == before


def test_describe_and_command(capsys: pytest.CaptureFixture) -> None:
    facts = kernels.describe()
    for family in FAMILIES:
        assert facts[family]["active"] in facts[family]["available"]
        assert facts[family]["available"][-1] == "portable"
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="command"))
    assert command.run(parser.parse_args(["kernels"])) == 0
    assert f"[{facts['codec']['active']}]" in capsys.readouterr().out
    assert command.run(parser.parse_args(["kernels", "--check"])) == 0
    assert capsys.readouterr().out.endswith("all kernel checks passed\n")
    assert command.run(parser.parse_args(["kernels", "--check", "--json"])) == 0
    assert json.loads(capsys.readouterr().out) == {**kernels.describe(), "wrong": []}


def test_command_fails_when_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "check", lambda: [("codec", "avx2", "q4 decode", 257)])
    assert command.run(argparse.Namespace(check=True, json=False)) == 1
    assert "WRONG     codec avx2: q4 decode, length 257\n1 checks failed" in capsys.readouterr().out


LOADER_SAYS = """
import sys
from importlib.machinery import ExtensionFileLoader
make = ExtensionFileLoader.create_module
def refuse(self, spec):
    if spec.name == "syncer.kernels._native":
        raise ImportError("libgomp.so.1: cannot open shared object file: No such file or directory")
    return make(self, spec)
ExtensionFileLoader.create_module = refuse
from syncer.cli import main
sys.exit(main(["kernels"]))
"""


def test_a_missing_library_of_the_system_is_one_sentence() -> None:
    """What the loader says when a build is used where OpenMP's runtime is not; .ci/wheels takes
    that library away and sees the same."""
    found = subprocess.run([sys.executable, "-c", LOADER_SAYS], capture_output=True, text=True,
                           check=False)
    assert found.returncode == 1
    assert found.stderr.startswith(
        "syncer: the compiled kernels cannot be loaded: libgomp.so.1: cannot open shared object "
        "file: No such file or directory; install the OpenMP runtime, for example with: apt-get "
        "install libgomp1")
    assert found.stderr.count("\n") == 1
