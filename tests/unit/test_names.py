"""One name, one home: of classes, modules and constants; and no file or class without a measure.

Reads the text of every module (.py, .pyx, .pxd) and C file. What may be an exception stands here
with its reason, and an exception that nothing needs any more is an error too.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from syncer.kernels import SUM_BLOCK

ROOT = Path(__file__).parents[2]
LINES_MAX = 500
MEMBERS_MAX = 15
LARGE = "Large: "
"""In the docstring of a class above `MEMBERS_MAX` methods or attributes, or of the base that makes
it so: before the reason."""

MESSAGE_AND_EVENT = "the message as it is on the wire, and the event that the rounds are told of it"
CLASSES = dict.fromkeys(
    ("BudgetDone", "FinalAck", "Heartbeat", "Hello", "Init", "Push"), MESSAGE_AND_EVENT) | {
    "Pull": "the message as it is on the wire, and the action of the rounds that sends one",
    "Exit": "the action that ends a run, and the numbers it may end with",
    "Fold": "the action that adds a push to a fold, and the fold",
    "Log": "the action that writes a line, and what writes it",
}
MODULES = {
    "__init__": "Python's name",
    "__main__": "Python's name",
    "command": "a room's part of the command line, found under the same name in each",
    "learner": "the class of the package, and the documented command `syncer.demo.learner`",
    "layout": "the values, and the parser of their form in a HELLO",
}
CONSTANTS: dict[str, str] = {}
FILES: dict[str, str] = {}

RECORDS = {"NamedTuple", "TypedDict", "Enum", "IntEnum", "IntFlag", "Protocol"}
"""Bases of classes whose fields are what they are for: `MEMBERS_MAX` bounds state, not fields."""


class Source(NamedTuple):
    """A file of the package: its path below the root, and its text."""

    path: str
    text: str

    @property
    def module(self) -> str:
        return Path(self.path).stem


class Klass(NamedTuple):
    """A class as it is written, without what it inherits."""

    name: str
    path: str
    bases: tuple[str, ...]
    doc: str
    methods: frozenset[str]
    attributes: frozenset[str]


def sources(*suffixes: str, below: str = "syncer") -> list[Source]:
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
            for path in sorted((ROOT / below).rglob("*")) if path.suffix in suffixes
            and not (path.suffix == ".c" and path.with_suffix(".pyx").exists())]


# ------------------------------------------------------------------------------------- reading
def written_in_python(source: Source) -> list[Klass]:
    return [python_class(source, node) for node in ast.walk(ast.parse(source.text))
            if isinstance(node, ast.ClassDef)]


def python_class(source: Source, node: ast.ClassDef) -> Klass:
    functions = [each for each in node.body
                 if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    attributes = {
        target.attr for function in functions for target in ast.walk(function)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name) and target.value.id == "self"}
    bases = [each.attr if isinstance(each, ast.Attribute) else each.id for each in node.bases
             if isinstance(each, (ast.Attribute, ast.Name))]
    return Klass(node.name, source.path, tuple(bases), ast.get_docstring(node) or "",
                 frozenset(each.name for each in functions), frozenset(attributes))


COMPILED_CLASS = re.compile(
    r"^(?:cdef )?class (\w+)(?:\(([\w., ]*)\))?:[^\n]*\n((?: +\S.*\n|\s*\n|#.*\n)*)", re.MULTILINE)
FUNCTION = re.compile(r"^    (?:cdef|cpdef|def|async def)\b[^\n=(]*?(\w+)\(", re.MULTILINE)
FIELDS = re.compile(r"^    cdef (?:public |readonly )?([^(\n#]+?)[ ]*(?:#.*)?$", re.MULTILINE)


def written_in_cython(source: Source, declared: str) -> list[Klass]:
    """Classes of a .pyx; their C attributes are in `declared`, the .pxd beside it."""
    fields = {name: fields_of(body) for name, _, body in COMPILED_CLASS.findall(declared)}
    found = []
    for name, bases, body in COMPILED_CLASS.findall(source.text):
        doc = re.match(r'\s*"""(.*?)"""', body, re.DOTALL)
        assigned = re.findall(r"^ +self\.(\w+)(?:, self\.\w+)* [-+|&]?= ", body, re.MULTILINE)
        own = fields.get(name, frozenset()) | fields_of(body)
        found.append(Klass(
            name, source.path, tuple(bases.replace(" ", "").split(",")) if bases else (),
            doc[1] if doc else "", frozenset(FUNCTION.findall(body)), own or frozenset(assigned)))
    return found


def fields_of(body: str) -> frozenset[str]:
    names = [part.split()[-1] for line in FIELDS.findall(body) if not line.endswith(":")
             for part in line.split(",")]
    return frozenset(re.sub(r"\W.*", "", name.lstrip("*")) for name in names)


def classes() -> list[Klass]:
    found = [each for source in sources(".py") for each in written_in_python(source)]
    for source in sources(".pyx"):
        beside = ROOT / source.path.replace(".pyx", ".pxd")
        found += written_in_cython(source, beside.read_text() if beside.exists() else "")
    return found


def constants(source: Source) -> list[str]:
    """Public UPPER_CASE names that a module gives a value at its top level."""
    found = []
    for names in re.findall(r"^((?:[A-Z][A-Z0-9_]*(?:: [^=\n]+)?(?:, )?)+) = (?!TypeVar)",
                            source.text, re.MULTILINE):
        found += [name.split(":")[0].strip() for name in names.split(", ")]
    return found


# ------------------------------------------------------------------------------------- judging
def homes(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names with more than one home."""
    found = defaultdict(set)
    for name, home in pairs:
        found[name].add(home)
    return {name: sorted(places) for name, places in found.items() if len(places) > 1}


def faults(found: dict[str, list[str]], allowed: dict[str, str]) -> list[str]:
    return [f"{name}: {', '.join(places)}" for name, places in sorted(found.items())
            if name not in allowed] + [
        f"{name} needs no exception any more: take it out of the list" for name in allowed
        if name not in found]


def large(every: list[Klass]) -> list[str]:
    """Classes above `MEMBERS_MAX` methods or attributes, inherited ones counted, without a why."""
    by_name = {each.name: each for each in every}
    found = []
    for each in every:
        line = lineage(each, by_name)
        record = any(base in RECORDS for one in line for base in one.bases)
        methods = {name for one in line for name in one.methods if not name.startswith("__")}
        attributes = set() if record else {name for one in line for name in one.attributes}
        told = any(LARGE in one.doc for one in line)
        if max(len(methods), len(attributes)) > MEMBERS_MAX and not told:
            found.append(f"{each.path} {each.name}: {len(methods)} methods, {len(attributes)} "
                         f"attributes; its docstring must say why, after {LARGE!r}")
    return found


def lineage(each: Klass, by_name: dict[str, Klass]) -> list[Klass]:
    found = [each]
    for base in each.bases:
        if base in by_name and by_name[base].path.endswith((".py", ".pyx")) and base != each.name:
            found += lineage(by_name[base], by_name)
    return found


def none(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


# --------------------------------------------------------------------------------------- tests
def test_a_class_has_one_name():
    pairs = [(each.name, each.path) for each in classes()]
    assert len(pairs) > 100
    none(faults(homes(pairs), CLASSES))


def test_a_module_has_one_name():
    pairs = [(source.module, source.path) for source in sources(".py", ".pyx")]
    none(faults(homes(pairs), MODULES))


def test_a_constant_has_one_home():
    pairs = [(name, source.path) for source in sources(".py", ".pyx") for name in constants(source)]
    assert len(pairs) > 100
    none(faults(homes(pairs), CONSTANTS))


def test_no_file_is_too_long():
    text = [source for folder in ("syncer", "csrc", "tests", "benchmarks", "docs")
            for source in sources(".py", ".pyx", ".pxd", ".pxi", ".pyi", ".c", ".h", below=folder)]
    long = {source.path: [f"{lines} lines"] for source in text
            if (lines := source.text.count("\n")) > LINES_MAX}
    assert len(text) > 200
    none(faults(long, FILES))


def test_a_large_class_says_why():
    none(large(classes()))


# ---------------------------------------------------------------- the test finds what it must
def test_two_homes_are_found_and_an_exception_without_need():
    pairs = [("Plan", "a.py"), ("Plan", "b.pyx"), ("Plan", "a.py"), ("Layout", "c.py")]
    assert homes(pairs) == {"Plan": ["a.py", "b.pyx"]}
    assert faults(homes(pairs), {}) == ["Plan: a.py, b.pyx"]
    assert faults(homes(pairs), {"Plan": "why"}) == []
    assert faults({}, {"Plan": "why"}) == [
        "Plan needs no exception any more: take it out of the list"]


def test_constants_are_read_as_they_are_written():
    text = ('ONE = 1\nTWO: int = 2\nRED, GREEN = "r", "g"\n_OWN = 3\nlower = 4\n    INSIDE = 5\n'
            'cdef int IN_C = 6\nX = Y == 7\nT = TypeVar("T")\n')
    assert constants(Source("a.pyx", text)) == ["ONE", "TWO", "RED", "GREEN", "X"]


MANY = [f"a{number}" for number in range(MEMBERS_MAX + 1)]
METHODS = "".join(f"    def {name}(self):\n        pass\n\n" for name in MANY)


def state(names: list[str]) -> str:
    return "    def __init__(self):\n" + "".join(f"        self.{name} = 1\n" for name in names)


STATE = state(MANY)
DECLARED = "cdef class Much:\n    cdef readonly int " + ", ".join(MANY) + "  # counted\n"


@pytest.mark.parametrize("found", [
    written_in_python(Source("a.py", f'class Much:\n    """All."""\n\n{METHODS}')),
    written_in_python(Source("a.py", f"class Much:\n{STATE}")),
    written_in_python(Source("a.py", f"class Half:\n{state(MANY[:8])}\n\n"
                                     f"class Much(Half):\n{state(MANY[8:])}\n")),
    written_in_cython(Source("a.pyx", f"cdef class Much:\n\n{METHODS}"), ""),
    written_in_cython(Source("a.pyx", "cdef class Much:\n    pass\n"), DECLARED),
    written_in_cython(Source("a.pyx", f"class Much:\n{STATE}"), ""),
    written_in_cython(Source("a.pyx", "cdef class Much:\n" + "".join(
        f"    cdef int {name}(self, int n) except -1:\n        return n\n" for name in MANY)), ""),
])
def test_a_large_class_is_found(found):
    (line,) = large(found)
    assert " Much: " in line
    assert large([each._replace(doc=f"Much.\n\n{LARGE}a reason.") for each in found]) == []


def test_fields_of_a_record_are_not_counted():
    fields = "".join(f"    {name}: int\n" for name in MANY)
    assert large(written_in_python(Source("a.py", f"class Much(NamedTuple):\n{fields}"))) == []


def test_the_block_of_the_blocked_sum_is_written_once():
    """Whoever needs its size names it (SK_BLOCK, SUM_BLOCK): a number would not follow it."""
    size = str(SUM_BLOCK)
    none([str(path.relative_to(ROOT)) for room in ("merge", "kernels")
          for path in (ROOT / "syncer" / room).glob("*.p*")
          if size in path.read_text(encoding="utf-8")])
