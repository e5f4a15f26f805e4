"""docs/protocol.md: tables name everything, and every refusal text it promises is in the code."""

import re
from pathlib import Path

import pytest

from syncer import protocol
from syncer.protocol import CHUNK_HEAD, Msg
from syncer.wire import describe
from syncer.wire.encode import encode_error, encode_hello, encode_shutdown, frame_header
from tests.unit.test_wire_golden import FRAMES, H1, PUSH_FRAME

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
REFUSALS = PAGE.split("## 17 Refusals")[1].split("## 18")[0]
EXAMPLES = PAGE.split("## 18 Examples")[1]
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


def example_frames():
    """The frames in hexadecimal that stand on the page."""
    found = []
    for line in EXAMPLES.splitlines():
        begin = line.find("dec070d1")
        if begin >= 0:
            found.append(re.match(r"[0-9a-f ]+", line[begin:])[0])
        elif found and re.fullmatch(r"[0-9a-f ]+", line):
            found[-1] += line
    return [bytes.fromhex(text) for text in found]


def test_the_examples_are_what_the_code_writes():
    frames = [encode_hello(H1), PUSH_FRAME, encode_shutdown(), encode_error("boom")]
    frames += [encode(message) for message, encode, *_ in FRAMES.values()]
    frames += [frame_header(Msg.CHUNK, CHUNK_HEAD.size + end - begin)
               + CHUNK_HEAD.pack(1, len(PUSH_FRAME), begin)
               for begin, end in ((0, 50), (50, len(PUSH_FRAME)))]
    found = example_frames()
    assert len(found) > 12
    assert [frame.hex() for frame in found if frame not in frames] == []
