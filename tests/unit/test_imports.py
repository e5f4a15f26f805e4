"""Imports of the package point one way, and core/ touches nothing but Python itself.

Reads the text of every module (.py, .pyx, .pxd, import and cimport), so that a forbidden import
is found wherever it stands, also inside a function.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "syncer"

# What each room may import of the package, besides itself. A room is a directory or a module of it.
ARROWS = {
    "errors": set(),
    "unbuilt": {"errors"},
    "protocol": set(),
    "gather": set(),
    "machine": set(),
    "pages": set(),
    "tcp": set(),
    "tls": {"errors"},
    "keys": {"errors"},
    "exits": set(),
    "streams": set(),
    "values": {"errors", "tcp"},
    "ranges": {"protocol", "values"},
    "config": {"errors", "machine", "protocol", "ranges", "values"},
    "flags": {"errors", "config", "machine", "values"},
    "layout": {"errors"},
    "steps": set(),
    "core": {"errors", "exits", "config", "layout", "protocol", "steps"},
    "wire": {"errors", "layout", "pages", "protocol"},
    "kernels": {"errors"},
    "merge": {"errors", "kernels", "layout", "pages", "ranges", "values", "steps"},
    "checkpoint": {"errors", "kernels", "layout", "machine", "protocol", "gather", "ranges",
                   "steps", "streams"},
    "learner": {"errors", "wire", "kernels", "layout", "protocol", "gather", "streams", "tcp",
                "tls"},
    "torch": {"errors", "kernels", "learner", "protocol"},
    "reader": {"errors", "exits", "wire", "kernels", "layout", "protocol", "steps", "learner",
               "checkpoint", "streams", "ranges", "tls"},
    "server": {"errors", "exits", "flags", "config", "core", "layout", "wire", "kernels", "merge",
               "checkpoint", "machine", "protocol", "gather", "pages", "tcp", "tls", "streams",
               "steps", "values"},
}
EVERYTHING = {"demo", "cli", "__init__", "__main__"}
# Which shelves of the demo a shelf of it may import, besides itself.
DEMO_SHELVES = {"model": set(), "show": {"model"}, "processes": {"model", "show"}}
PURE = ("time", "datetime", "socket", "select", "selectors", "random", "threading", "os", "logging",
        "numpy", "asyncio", "subprocess", "multiprocessing", "signal", "io", "pathlib", "tempfile")

FROM = re.compile(r"^[ \t]*from\s+([.\w]+)\s+c?import\s+(\([^)]*\)|[^\n]*)", re.MULTILINE)
PLAIN = re.compile(r"^[ \t]*c?import\s+([\w., \t]+)", re.MULTILINE)


def strip_strings(text: str) -> str:
    """Code without docstrings and comments, where a line may begin with the word import."""
    text = re.sub(r'("""|\'\'\')(?:.|\n)*?\1', '""', text)
    return re.sub(r"#[^\n]*", "", text)


def imported(text: str) -> set[str]:
    """Dotted names a module imports; `from a import b` gives a.b."""
    found = set()
    code = strip_strings(text).replace("\\\n", " ")
    for module, names in FROM.findall(code):
        if module == "__future__":
            continue
        for name in names.strip("()").split(","):
            words = name.split()
            if words:
                found.add(module + ("" if module.endswith(".") else ".") + words[0])
    for names in PLAIN.findall(code):
        found.update(name.split()[0] for name in names.split(",") if name.strip())
    return found


def room_of(dotted: str) -> str:
    """The room of a name inside the package: a directory or a module of it."""
    parts = dotted.split(".")[1:]
    if parts[1:] == ["command"]:
        return "cli"  # a room's part of the command line
    return parts[0] if parts else "__init__"


def absolute(target: str, module: str) -> str:
    """A relative name seen from a module; a package is written with its `.__init__` here."""
    if not target.startswith("."):
        return target
    rest = target.lstrip(".")
    package = module.split(".")[: -(len(target) - len(rest))]
    return ".".join([*package, rest])


def violations(name: str, text: str) -> list[str]:
    """What a module, given its dotted name and its text, imports against the rules."""
    room = room_of(name)
    found = []
    for target in sorted(absolute(target, name) for target in imported(text)):
        top = target.split(".")[0]
        if top == "syncer":
            there = room_of(target)
            allowed = (room in EVERYTHING or there == room or target == "syncer.__version__"
                       or there in ARROWS.get(room, set()))
            if not allowed:
                found.append(f"{name} imports {target}: {room} must not know {there}")
        elif room.startswith("core") and top in PURE:
            found.append(f"{name} imports {target}: core is pure")
    return found


def modules():
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".pyx", ".pxd", ".pyi"):
            yield path, ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def test_arrows_never_run_back():
    found = [line for path, name in modules() for line in violations(name, path.read_text())]
    assert not found, "\n".join(found)


def test_the_shelves_of_the_demo_point_one_way():
    found = []
    for path, name in modules():
        shelf = name.split(".")[2:3]
        if not name.startswith("syncer.demo.") or shelf[0] not in DEMO_SHELVES:
            continue
        for target in sorted(imported(path.read_text())):
            there = target.split(".")[2:3] if target.startswith("syncer.demo.") else shelf
            if there[0] in DEMO_SHELVES and there[0] not in DEMO_SHELVES[shelf[0]] | {shelf[0]}:
                found.append(f"{name} imports {target}")
    assert not found, "\n".join(found)
    shelves = {path.parent.name for path in (PACKAGE / "demo").glob("*/__init__.py")}
    assert shelves == DEMO_SHELVES.keys()


def test_every_room_has_a_rule():
    rooms = {room_of(name) for _, name in modules()}
    assert rooms <= ARROWS.keys() | EVERYTHING, "give the new room its arrows"
    assert "core" in rooms
    assert sum(1 for _ in modules()) > 20


def test_the_arrows_have_no_cycle():
    def reach(room, seen=()):
        assert room not in seen, f"{' -> '.join([*seen, room])} is a circle"
        for there in ARROWS[room]:
            reach(there, (*seen, room))

    for room in ARROWS:
        reach(room)


def test_the_product_calls_no_kernel_that_is_there_for_checks():
    found = [name for path, name in modules() for target in imported(path.read_text())
             if f"{absolute(target, name)}.".startswith("syncer.kernels.testing.")]
    assert not found, f"{found}: syncer.kernels.testing is for tests and benchmarks"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("syncer.core.rounds.round", "import time"),
        ("syncer.core.rounds.round", "def f():\n    from os import path\n"),
        ("syncer.core.rounds.round", "cimport numpy as np"),
        ("syncer.core.rounds.round", "import math, socket"),
        ("syncer.layout", "from syncer.config import Config"),
        ("syncer.wire.frames", "from syncer.core.run.scheduler cimport Scheduler"),
        ("syncer.wire.frames", "from syncer.core import (\n    actions,\n    events)"),
        ("syncer.merge.store", "from syncer.server import loop"),
        ("syncer.learner.learner", "import syncer.config"),
        ("syncer.errors", "from syncer import layout"),
        ("syncer.wire.frames", "from ..server import loop"),
        ("syncer.wire.frames", "from .. import server"),
        ("syncer.wire.__init__", "from ..config import Config"),
        ("syncer.core.rounds.round", "from ...wire.limits import Limits"),
        ("syncer.server.loop", "from syncer.demo import model"),
    ],
)
def test_the_test_finds_what_it_must(name, text):
    assert violations(name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("syncer.core.rounds.round", '"""\nimport time\n"""\nimport math\n# import os'),
        ("syncer.wire.frames", "from syncer.layout import Layout"),
        ("syncer.wire.frames", "from syncer import layout"),
        ("syncer.wire.encode", "from . import messages as m\nfrom .. import errors"),
        ("syncer.wire.__init__", "from .frames import FrameReader\nfrom .. import layout"),
        ("syncer.cli", "from syncer.demo import main\nfrom syncer.server import driver"),
    ],
)
def test_the_test_allows_what_is_fine(name, text):
    assert not violations(name, text)
