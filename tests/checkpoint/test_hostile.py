"""Headers made to hurt: refused with a sentence, before memory is taken for what they claim."""

from __future__ import annotations

import json
import struct
import tracemalloc

import pytest

from syncer.checkpoint import safetensors, yeto
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.errors import CheckpointError, CheckpointFormatError
from syncer.kernels import sha256
from tests.checkpoint.cuts import make_cut

HUGE = (2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
MEMORY_BYTES_MAX = 8 * 2**20


def refused(path, data: bytes) -> str:
    """The sentence that refuses these bytes; opening them may not take memory."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(path).load()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES_MAX + 40 * len(data), f"{peak} bytes for {len(data)}"
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "hostile"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """(header as JSON, data) of a good file."""
    place = tmp_path_factory.mktemp("good") / "c"
    write_checkpoint(place, make_cut())
    whole = place.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def packed(header, data: bytes) -> bytes:
    """A file with this header, its own digest set right, so that only the content is judged."""
    text = header if isinstance(header, bytes) else json.dumps(
        header, separators=(",", ":")).encode()
    begin = text.find(safetensors.SELF_KEY) + len(safetensors.SELF_KEY)
    if begin >= len(safetensors.SELF_KEY) and text[begin : begin + 64].isalnum():
        text = text[:begin] + b"0" * 64 + text[begin + 64 :]
        digest = sha256(len(text).to_bytes(8, "little") + text).hex().encode()
        text = text[:begin] + digest + text[begin + 64 :]
    return len(text).to_bytes(8, "little") + text + data


def changed(good, change) -> bytes:
    header, data = json.loads(json.dumps(good[0])), good[1]
    change(header)
    return packed(header, data)


def test_the_helper_makes_good_files(path, good):
    path.write_bytes(changed(good, lambda header: None))
    Checkpoint(path).load()


@pytest.mark.parametrize("length", [0, 1, *HUGE])
def test_header_lengths(path, length):
    assert "header length at offset 0" in refused(path, struct.pack("<Q", length) + bytes(5000))


@pytest.mark.parametrize("depth", [10, 200, 10_000, 200_000])
def test_deep_json(path, depth):
    for opening, closing in [(b"[", b"]"), (b'{"a":', b"}")]:
        text = opening * depth + b"1" + closing * depth
        refused(path, len(text).to_bytes(8, "little") + text)
        refused(path, len(opening * depth).to_bytes(8, "little") + opening * depth)


@pytest.mark.parametrize("field", ["versions", "ledger", "optimizer", "layout", "sha256"])
def test_deep_json_inside_of_a_string(path, good, field):
    for text in ("[" * 50_000, '{"a":' * 50_000, "[" * 400 + "]" * 400):
        def deepen(header, text=text):
            header["__metadata__"][field] = text
        assert field in refused(path, changed(good, deepen))


def test_deep_json_in_a_tensor_entry(path, good):
    for key in ("dtype", "shape", "data_offsets"):
        deep = []
        for _ in range(600):
            deep = [deep]

        def deepen(header, key=key, deep=deep):
            entry = header["fragments.1.params"]
            entry[key] = [deep] if key == "shape" else [0, deep] if key == "data_offsets" else deep
        text = json.dumps(good[0])
        assert text
        assert "fragments.1.params" in refused(path, changed(good, deepen))


def test_too_many_values(path, monkeypatch):
    monkeypatch.setattr(safetensors, "VALUES_MAX", 1000)
    text = b"[" + b"[]," * 2000 + b"1]"
    assert "JSON values" in refused(path, len(text).to_bytes(8, "little") + text)


def test_twice_the_same_key(path, good):
    text = json.dumps(good[0], separators=(",", ":")).encode()
    entry = json.dumps(good[0]["fragments.0.params"], separators=(",", ":")).encode()
    twice = text[:-1] + b',"fragments.0.params":' + entry + b"}"
    assert "'fragments.0.params' stands there twice" in refused(path, packed(twice, good[1]))

    def ledger(header):
        header["__metadata__"]["ledger"] = '{"0":[1,1,1],"0":[2,2,2]}'
    assert "ledger: key '0'" in refused(path, changed(good, ledger))


def set_offsets(name, begin, end):
    def change(header):
        header[name]["data_offsets"] = [begin, end]
    return change


@pytest.mark.parametrize(("change", "text"), [
    (lambda h: h.pop("fragments.1.momentum"), "fragments"),
    (lambda h: h.pop("fragments.2.params"), "fragments"),
    (lambda h: h.update({"extra": h["fragments.0.params"]}), "tensors"),
    (lambda h: h.update({"fragments.3.params": h["fragments.0.params"]}), "versions"),
    (lambda h: h["fragments.0.params"].update(dtype="F16"), "dtype F32, found 'F16'"),
    (lambda h: h["fragments.0.params"].update(dtype=["F32"]), "dtype"),
    (lambda h: h["fragments.0.params"].update(shape=[7, 1]), "one dimension"),
    (lambda h: h["fragments.0.params"].update(shape=[2**62]), "fragments.0"),
    (lambda h: h["fragments.0.params"].update(shape=[-7]), "whole numbers"),
    (lambda h: h["fragments.0.params"].update(shape=[7.0]), "whole numbers"),
    (lambda h: h["fragments.0.params"].update(shape=[True]), "whole numbers"),
    (lambda h: h["fragments.0.params"].update(shape=[0], data_offsets=[0, 0]), "at least one"),
    (lambda h: h["fragments.0.params"].update(more=1), "dtype, shape and data_offsets"),
    (lambda h: h.update({"fragments.3.momentum": h.pop("fragments.1.momentum")}),
     "fragments.1.momentum is missing"),
    (lambda h: h["fragments.0.momentum"].update(shape=[6]), "7 elements as the parameters have"),
    (lambda h: h["fragments.0.params"].update(data_offsets=[0]), "two data_offsets"),
    (set_offsets("fragments.0.momentum", 0, 28), "overlaps"),
    (set_offsets("fragments.0.momentum", 2**63, 2**63 + 28), "gap"),
    (set_offsets("fragments.0.momentum", 56, 28), "apart"),
    (set_offsets("fragments.0.momentum", -28, 0), "whole numbers"),
    (lambda h: h["__metadata__"].update(format="other"), "format: expected 'syncer-checkpoint'"),
    (lambda h: h["__metadata__"].update(format_version="2"), "format_version: expected '1'"),
    (lambda h: h["__metadata__"].pop("ledger"), "missing: ledger"),
    (lambda h: h["__metadata__"].update(news="x"), "unknown: news"),
    (lambda h: h["__metadata__"].update({"ne\nws": "x"}), "unknown: ne\\nws"),
    (lambda h: h["__metadata__"].update(global_step=7), "strings"),
    (lambda h: h["__metadata__"].update(global_step="7.0"), "global_step"),
    (lambda h: h["__metadata__"].update(global_step="07"), "global_step"),
    (lambda h: h["__metadata__"].update(global_step="٧"), "global_step"),
    (lambda h: h["__metadata__"].update(global_step="9" * 5000), "global_step"),
    (lambda h: h["__metadata__"].update(global_step=str(2**64)), "global_step"),
    (lambda h: h["__metadata__"].update(global_step="8"), "version"),
    (lambda h: h["__metadata__"].update(versions="[7,5]"), "versions"),
    (lambda h: h["__metadata__"].update(versions="{}"), "versions"),
    (lambda h: h["__metadata__"].update(versions="[7,5,NaN]"), "versions"),
    (lambda h: h["__metadata__"].update(versions="[7,5," + "9" * 5000 + "]"), "versions"),
    (lambda h: h["__metadata__"].update(ledger='{"0":[1,2]}'), "ledger"),
    (lambda h: h["__metadata__"].update(ledger='{"-1":[1,2,3]}'), "ledger"),
    (lambda h: h["__metadata__"].update(ledger='{"4294967296":[1,2,3]}'), "ledger"),
    (lambda h: h["__metadata__"].update(optimizer='"nesterov"'), "optimizer"),
    (lambda h: h["__metadata__"].update(optimizer="{}"), "optimizer"),
    (lambda h: h["__metadata__"].update(layout="[]"), "layout"),
    (lambda h: h["__metadata__"].update(layout='[{"merge":"sum","numels":[1]}]'), "layout"),
    (lambda h: h["__metadata__"].update(layout='[{"merge":"avg","numels":[0]}]'), "layout"),
    (lambda h: h["__metadata__"].update(
        layout='[{"merge":"iso","numels":[7],"shapes":[[2,3]]}]'), "layout"),
    (lambda h: h["__metadata__"].update(
        layout='[{"merge":"iso","numels":[6],"shapes":[[6]]}]'), "shapes of rows and columns"),
    (lambda h: h["__metadata__"].update(layout_fingerprint="12"), "layout_fingerprint"),
    (lambda h: h["__metadata__"].update(session_contract="Z" * 64), "session_contract"),
    (lambda h: h["__metadata__"].update(session_contract="00 " * 21 + "0"), "session_contract"),
    (lambda h: h["__metadata__"].update(profile_hash="0" * 62 + " \n"), "profile_hash"),
    (lambda h: h["__metadata__"].update(profile_hash="A" * 64), "profile_hash"),
    (lambda h: h["__metadata__"].update(sha256="{}"), "sha256"),
    (lambda h: h["__metadata__"].update(header_sha256="0"), "header_sha256"),
    (lambda h: h.pop("__metadata__"), "__metadata__"),
    (lambda h: h.update(__metadata__=[]), "__metadata__"),
])
def test_what_a_header_may_not_say(path, good, change, text):
    assert text in refused(path, changed(good, change))


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"null", b"1", b'{"a":NaN}', b"\xff\xfe",
                                  b'{"a":1}x', b'{"__metadata__":{}}', b'"' * 3])
def test_what_is_no_header(path, text):
    refused(path, len(text).to_bytes(8, "little") + text)


def yeto_file(fragments=2, numel=4, ledger=0, **fields) -> bytearray:
    values = {"magic": yeto.YETO_MAGIC, "backend": 0, "step": 2, "count": fragments, **fields}
    data = bytearray(yeto.HEAD.pack(values["magic"], values["backend"], bytes(32), values["step"],
                                    values["count"]))
    for p in range(fragments):
        data += yeto.FRAGMENT.pack(p + 1, numel) + bytes(8 * 4)
    return data + struct.pack("<I", ledger) + bytes(32)


@pytest.mark.parametrize("count", [0, 3, 5, *HUGE[:2]])
def test_yeto_fragment_counts(path, count):
    refused(path, bytes(yeto_file(count=count)))


@pytest.mark.parametrize("numel", [0, 3, 5, *HUGE])
def test_yeto_fragment_sizes(path, numel):
    assert "offset" in refused(path, bytes(yeto_file(numel=numel)))


@pytest.mark.parametrize("ledger", [1, 10, *HUGE[:2]])
def test_yeto_ledger_counts(path, ledger):
    assert "ledger count" in refused(path, bytes(yeto_file(ledger=ledger)))


def test_yeto_backend_and_ledger_order(path):
    assert "iso backend at offset 4" in refused(path, bytes(yeto_file(backend=1)))
    data = yeto_file(ledger=2)
    body = data[:-32]
    for ids in [(1, 1), (2, 1)]:
        entries = b"".join(struct.pack("<IQQQ", i, 1, 1, 1) for i in ids)
        assert "ascending" in refused(path, bytes(body + entries + bytes(32)))


def test_yeto_identity(path):
    good = bytes(yeto_file())
    path.write_bytes(good)
    Checkpoint(path).load()
    assert "second fingerprint" in refused(path, good[:-1] + b"\x01")
    assert "contract magic" in refused(path, good + bytes(36))
    assert "session contract" in refused(path, good + bytes(35))
    assert "session contract" in refused(path, good + bytes(37))


def test_errors_of_the_format_are_their_own_type(path):
    path.write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointFormatError):
        Checkpoint(path)
