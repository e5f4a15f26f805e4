"""docs/protocol.md: tables name everything, and every refusal text it promises is in the code."""

import re
from pathlib import Path

import pytest

from syncer import protocol
from syncer.wire import describe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
REFUSALS = PAGE.split("## Refusals")[1]
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for room in ("wire", "server", "core")
    for path in sorted((ROOT / "syncer" / room).rglob("*.py*"))
    if path.suffix in {".py", ".pyx"}
)
TEXTS = [
    text
    for row in re.findall(r"^\| (`.*?) \|", REFUSALS, re.MULTILINE)
    for text in re.findall(r"`([^`]+)`", row)
]


@pytest.mark.parametrize("text", TEXTS)
def test_refusal_texts_are_in_the_code(text):
    # A sentence may be split over two string literals, and have placeholders in it.
    joined = re.sub(r'"\s*\n\s*f?"', "", SOURCES)
    assert text.strip() in re.sub(r"\{[^{}]*\}", "", joined).replace("  ", " ")


def test_the_page_promises_texts():
    assert len(TEXTS) > 20


def test_every_message_has_a_row():
    assert list(describe.ROWS) == list(protocol.Msg)
