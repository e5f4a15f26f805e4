"""The docs cannot go stale: generated parts are fresh, and everything they name is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import log_messages
from syncer.cli import COMMANDS
from syncer.flags import markdown_table as server_flags

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")})
SOURCES = [path for pattern in ("syncer/**/*.py", "syncer/**/*.pyx", "tests/**/*.py", "csrc/*.[ch]",
                                "benchmarks/**/*.py", "experiments/**/*.py",
                                "setup.py", "docs/*.py", ".ci/*", "Makefile")
           for path in ROOT.glob(pattern) if path.is_file()]
FOLDERS = "syncer|csrc|tests|docs|benchmarks|experiments|examples|\\.ci"
NAMED = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]*[\w*])(?:::(\w+))?")
MAKE = re.compile(r"(?:`|^|&& )make ([a-z-]+)", re.MULTILINE)
MODULE = re.compile(r"python -m ((?:syncer|tests|benchmarks|experiments)[\w.]*)")
COMMAND = re.compile(r"(?<!\| )`syncer ([a-z]+)")  # at the head of a table row: a log message
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
TOOLS_OWN = {"--args", "--benchmark-only", "--index-url", "--nproc-per-node"}
"""Flags of gdb, pytest, pip and torchrun that the pages mention."""
RULE = re.compile(r"\b(rule|wire) (\d+\.\d+)")
RULE_BOOKS = {"rule": "docs/rules.md", "wire": "docs/protocol.md"}


def page_parameter(pages=PAGES):
    return pytest.mark.parametrize("page", pages, ids=lambda path: path.name)


def test_generated_parts_are_fresh():
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, timeout=60,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}write them again: make docs"


@page_parameter()
def test_links_lead_to_files_that_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Every flag of the server, and every other one that a parser of ours spells out."""
    spelled = {flag for path in SOURCES if not path.name.startswith("test_")
               for flag in re.findall(r"[\"'](--[a-z][a-z0-9-]+)", path.read_text("utf-8"))}
    return TOOLS_OWN | spelled | set(FLAG.findall(server_flags()))


def unknown(text: str, flags: set[str]) -> list[str]:
    """What a page names that is not there: files, tests, make targets, modules, commands, flags."""
    found = []
    for path, test in NAMED.findall(text):
        there = list(ROOT.glob(path))
        if not there:
            found.append(path)
        elif test and f"def {test}(" not in there[0].read_text(encoding="utf-8"):
            found.append(f"{path}::{test}")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found += [f"make {name}" for name in MAKE.findall(text) if name not in targets]
    found += [f"syncer {name}" for name in COMMAND.findall(text) if name not in COMMANDS]
    for module in MODULE.findall(text):
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            found.append(f"python -m {module}")
    return found + sorted(set(FLAG.findall(text)) - flags)


@page_parameter()
def test_what_a_page_names_is_there(page, flags):
    assert unknown(page.read_text(encoding="utf-8"), flags) == []


@pytest.mark.parametrize("text", [
    "see csrc/nowhere.c", "`syncer/core/nowhere.pyx`", "tests/unit/test_docs.py::test_nothing",
    "`tests/nowhere/*.txt`", "run `make haste`", "make haste\n", "python -m syncer.nowhere",
    "`syncer lunch`", "with `--no-such-flag` it", "[.ci/nowhere]",
])
def test_a_page_that_names_nothing_is_found(text, flags):
    assert len(unknown(text, flags)) == 1


def test_a_page_may_name_what_is_there(flags):
    assert unknown("`make test`, tests/unit/test_docs.py::test_cited_rules_exist, csrc/*.c, "
                   "`syncer demo`, python -m tests.scenarios, --quorum", flags) == []


@pytest.mark.parametrize("word", RULE_BOOKS)
def test_cited_rules_exist(word):
    """`rule 6.3` is a number of docs/rules.md, `wire 3.2` one of docs/protocol.md."""
    book = ROOT / RULE_BOOKS[word]
    numbers = set(re.findall(r"\*\*(\d+\.\d+)\*\*", book.read_text(encoding="utf-8")))
    missing = [f"{path.relative_to(ROOT)}: {word} {number}"
               for path in [*PAGES, *SOURCES] if path != Path(__file__)
               for cited, number in RULE.findall(path.read_text(encoding="utf-8"))
               if cited == word and number not in numbers]
    assert not missing, "\n".join(missing)


def test_every_log_message_has_a_meaning_and_every_meaning_a_message():
    texts = {message.text for message in log_messages.collected() if message.level}
    assert texts == log_messages.MEANINGS.keys()


@pytest.mark.parametrize(("line", "found"), [
    ('self.log.info("a b", x=1, **fields)', [("INFO", "a b", ("x", "y"))]),
    ('self.log("WARNING", f"{who.name} of {len(all)}", {"z": 1})',
     [("WARNING", "{name} of {len}", ("z",))]),
    ('log.error("a" if x else "b")', [("ERROR", "a", ()), ("ERROR", "b", ())]),
    ('self.log.write("INFO" if x else "ERROR", "a", {})', [("INFO or ERROR", "a", ())]),
    ('return self.warn("(", fields)', [("WARNING", "(", ("y",))]),
    ('self.end(NOT_WRITTEN, f"no {file}")', [("", "no {file}", ())]),
    ('self.log.debug(line)', []),
    ('self.catalog("INFO", "a")', []),
])
def test_messages_are_found_where_they_are_written(line, found):
    source = f'def f(self):\n    fields = {{"y": 2}}\n    {line}\n'
    assert [message[:3] for message in log_messages.messages_in(source, "")] == found


def test_a_message_that_grep_cannot_find_is_refused():
    with pytest.raises(ValueError, match=r"syncer/x.py:2: the text of a log line must stand"):
        list(log_messages.messages_in('def f():\n    log.info(self.words)\n', "x.py"))
