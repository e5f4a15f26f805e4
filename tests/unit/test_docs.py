"""The docs cannot go stale: generated parts are fresh, links and named paths exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import log_messages

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")})


def test_generated_parts_are_fresh():
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, timeout=60,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}write them again: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_log_message_has_a_meaning():
    texts = {message.text for message in log_messages.collected() if message.level}
    assert texts <= log_messages.MEANINGS.keys()


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
