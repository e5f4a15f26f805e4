"""A copy of the tree in which one mistake at a time is made, built and looked for.

Only the module with the mistake is built, in this process and not optimized, which takes a second;
afterwards source and module are put back. The scenarios are played and the tests are run that
tests/rules.py names for the rule, nothing else: a rule's mistake is for the rule's tests to notice,
and what fails without the mistake as well has noticed nothing. Must not choose mistakes.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from Cython.Compiler import Errors
from Cython.Compiler.Main import CompilationOptions, default_options
from Cython.Compiler.Main import compile as compile_module

from tests import rules
from tests.mutation.mistake import Mutation

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "*cache*", ".hypothesis", "*.egg-info", "build",
                                  "dist", "wheelhouse")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
PLAY = ["-m", "tests.mutation.play"]
TEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
PATIENCE_S = 900


class Noticed(NamedTuple):
    """A scenario or test that fails."""

    by: str
    again: list[str]
    """Plays or runs it alone."""


def waits_for_sockets(place: str) -> bool:
    """Tests over real sockets come last: they take seconds."""
    return place.startswith("tests/e2e")


class Workbench:
    """`judge` says which scenario or test notices a mutation; None if nothing does for sure."""

    def __init__(self, root: Path, tree: Path):
        self.tree = tree
        shutil.copytree(root, tree, ignore=LEFT_OUT)
        text = (root / "setup.py").read_text(encoding="utf-8")
        found = re.search(r"^DIRECTIVES = (\{.*?^\})", text, re.MULTILINE | re.DOTALL)
        assert found is not None, "setup.py has Cython's directives"
        self.directives = ast.literal_eval(found[1])
        self.played = rules.scenarios()
        Errors.LEVEL = 2  # a mistake may leave code that is never reached: no warning
        assert (failing := self.run(PLAY)) is None, f"{failing.by} differs without any mistake"

    def judge(self, mutation: Mutation) -> str | None:
        source = self.tree / mutation.file
        kept = {path: path.read_bytes() for path in (source, source.with_suffix(SUFFIX))
                if path.exists()}
        text = kept[source].decode()
        assert text.count(mutation.old) == 1, f"{mutation.file}: {mutation.old!r} must stand once"
        source.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        try:
            if source.suffix == ".pyx":
                self.build(source)
            noticed = self.look(mutation)
        finally:
            for path, content in kept.items():
                path.unlink()  # a module that is loaded keeps its file
                path.write_bytes(content)
        if noticed is None or self.run(noticed.again) is not None:
            return None  # what fails without the mistake as well says nothing of it
        return noticed.by

    def build(self, source: Path) -> None:
        made, module = source.with_suffix(".c"), source.with_suffix(SUFFIX)
        os.chdir(self.tree)
        result = compile_module(str(source.relative_to(self.tree)), CompilationOptions(
            default_options, output_file=str(made), compiler_directives=dict(self.directives)))
        assert result.num_errors == 0, "it does not build"
        module.unlink()
        subprocess.run(
            [*shlex.split(sysconfig.get_config_var("CC")), "-std=c11", "-O0", "-g0", "-w", "-fPIC",
             "-shared", f"-I{sysconfig.get_paths()['include']}", f"-I{self.tree / 'csrc'}",
             str(made), "-o", str(module)], check=True)

    def look(self, mutation: Mutation) -> Noticed | None:
        broken = mutation.rules.split()
        scenarios = [*PLAY, *[name for rule in broken for name in self.played.get(rule, [])]]
        places = sorted([f"tests/{place}" for rule in broken
                         for place in rules.ELSEWHERE.get(rule, [])], key=waits_for_sockets)
        tests = [*TEST, *places]
        in_core = mutation.file.startswith("syncer/core/")
        for command in [scenarios, tests] if in_core else [tests, scenarios]:
            if (command is scenarios or places) and (noticed := self.run(command)) is not None:
                return noticed
        return None

    def run(self, command: list[str]) -> Noticed | None:
        """What fails first, or the whole command when it does not end."""
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=self.tree, capture_output=True, text=True,
                check=False, timeout=PATIENCE_S,
                env={**os.environ, "PYTHONPATH": str(self.tree), "PYTHONDONTWRITEBYTECODE": "1"})
        except subprocess.TimeoutExpired:
            return Noticed(f"no end within {PATIENCE_S} s", command)
        if done.returncode == 0:
            return None
        found = re.search(r"^(?:FAILED|ERROR) tests/([^\s[]+)", done.stdout, re.MULTILINE)
        if found is None:
            return Noticed(done.stdout.strip() or f"exit status {done.returncode}", command)
        return Noticed(found[1], [*TEST, f"tests/{found[1]}"])
