"""Who wrote a checkpoint and after whom: what is counted, what is kept, and what a file may say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncer.checkpoint.facts import Cut
from syncer.checkpoint.lineage import (
    ENTRIES_MAX,
    EPOCH_MAX,
    UNKNOWN_EPOCH,
    UNTOLD,
    Lineage,
    Origin,
)
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.errors import CheckpointFormatError, CheckpointMismatch
from syncer.kernels import sha256
from syncer.steps import fragment_of, version_at
from tests.checkpoint.cuts import make_cut

ME = Lineage("blue", 3, 0xABC, ((5, 2), (6, None)), 4)
NAMES = ((("a", (5,)), ("b", (2, 1))), (("c", (13,)),), (("d", (2, 3)),))


# ------------------------------------------------------------------------------------ the rules
def test_a_resumed_run_counts_on_from_the_larger_epoch():
    assert ME.resumed(8, 0, Origin(7, 100)) == Lineage(
        "blue", 4, 7, ((5, 2), (6, None), (0xABC, 8)), 4)
    assert ME.resumed(8, 9, Origin(7, 100)).epoch == 10


def test_a_file_that_tells_no_epoch_begins_above_all_that_were_counted():
    assert UNTOLD.resumed(8, 0, Origin(7, 100)) == Lineage("", UNKNOWN_EPOCH + 100, 7)
    assert UNTOLD.resumed(8, 2, Origin(7, 100)).epoch == 3


def test_no_epoch_is_given_that_a_reader_would_refuse():
    assert UNTOLD.resumed(1, EPOCH_MAX - 1, Origin(7, 0)).epoch == EPOCH_MAX
    with pytest.raises(CheckpointMismatch, match="the file was changed"):
        UNTOLD.resumed(1, EPOCH_MAX, Origin(7, 0))


def test_the_oldest_entries_are_forgotten():
    lineage = Lineage(epoch=1, instance=1)
    for instance in range(2, 200):
        lineage = lineage.resumed(instance, 0, Origin(instance, 0))
        assert len(lineage.stored(instance)) == min(instance, ENTRIES_MAX)
    assert lineage.stored(999)[-2:] == ((198, 199), (199, 999))


def test_raised_steps_make_the_past_count_for_nothing():
    assert ME.raised(0) == ME
    assert ME.raised(6) == ME._replace(renumbered=10, entries=((5, None), (6, None)))
    assert ME.kept(5, 2, 2)
    assert not ME.raised(6).kept(5, 2, 2)


@pytest.mark.parametrize(("held", "kept"), [
    ((0xABC, 7, 7), True),   # its own
    ((0xABC, 4, 7), False),  # merged since
    ((5, 2, 2), True),       # an ancestor's, of the step that was gone on from
    ((5, 3, 3), False),      # lost with it
    ((6, 1, 1), False),      # its numbers are others now
    ((9, 2, 2), False),      # nobody of this run
    ((0, 2**64 - 1, 7), False),
])
def test_what_is_kept(held, kept):
    assert ME.kept(*held) is kept


class _Process(NamedTuple):
    """A process in a model of runs: what each fragment's versions came from."""

    lineage: Lineage
    step: int
    values: tuple[int, ...]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.integers(0, 5),
                          st.sampled_from([0, 0, 0, 6])), min_size=1, max_size=12))
def test_kept_are_the_values_that_are_the_same_and_no_others(lives):
    """Each process goes on from any file of any process, makes steps, writes files and dies."""
    fragments, made = 3, 0
    process = _Process(Lineage(epoch=1, instance=1), 0, (0, 0, 0))
    files, sent = [process], {}
    for number, (chosen, steps, saved, by) in enumerate(lives, 2):
        for version in range(steps + 1):
            if version:
                made += 1
                values = list(process.values)
                values[fragment_of(process.step + 1, fragments)] = made
                process = process._replace(step=process.step + 1, values=tuple(values))
            for fragment in range(fragments):
                at = version_at(process.step, fragment, fragments)
                sent[process.lineage.instance, fragment, at] = process.values[fragment]
            if version == min(saved, steps):
                files.append(process)
        file = files[chosen % len(files)]
        lineage = file.lineage.resumed(file.step, 0, Origin(number, 0)).raised(by)
        process = _Process(lineage, file.step + by, file.values)
        ancestors = {instance for instance, step in lineage.entries if step is not None}
        for (instance, fragment, version), value in sent.items():
            now = version_at(process.step, fragment, fragments)
            same = version == now and value == process.values[fragment]
            if lineage.kept(instance, version, now):
                assert same
            elif instance in ancestors:
                assert not same


# ----------------------------------------------------------------------------------- in a file
def told(tmp_path, lineage=ME, names=NAMES, step=8):
    """(path of a file that tells this, its facts as read)."""
    cut, path = make_cut(step), tmp_path / "c"
    write_checkpoint(path, Cut(replace(cut.facts, lineage=lineage, names=names), cut.fragments))
    with Checkpoint(path) as checkpoint:
        return path, checkpoint.facts


def header_of(path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_a_file_tells_its_writer_and_its_past(tmp_path):
    path, facts = told(tmp_path)
    assert (facts.lineage, facts.names) == (ME, NAMES)
    metadata = header_of(path)["__metadata__"]
    assert {key: metadata[key] for key in ("run", "epoch", "lineage", "renumbered", "names")} == {
        "run": "blue", "epoch": "3", "renumbered": "4",
        "lineage": '[["0000000000000005",2],["0000000000000006",null],["0000000000000abc",8]]',
        "names": '[[["a",[5]],["b",[2,1]]],[["c",[13]]],[["d",[2,3]]]]'}


def test_nothing_is_held_of_a_writer_that_sends_changes(tmp_path):
    path, facts = told(tmp_path, ME._replace(sends_changes=True))
    assert header_of(path)["__metadata__"]["lineage"] == (
        '[["0000000000000005",2],["0000000000000006",null],["0000000000000abc",null]]')
    assert facts.lineage == ME._replace(sends_changes=True)
    after = facts.lineage.resumed(8, 0, Origin(7, 100))
    assert after == Lineage("blue", 4, 7, ((5, 2), (6, None), (0xABC, None)), 4)
    assert after.kept(5, 2, 2)
    assert not after.kept(0xABC, 8, 8)


def test_what_nobody_has_said_is_not_in_the_file(tmp_path):
    path, facts = told(tmp_path, UNTOLD, None)
    assert (facts.lineage, facts.names) == (UNTOLD, None)
    assert not {"run", "epoch", "lineage", "renumbered", "names"} & set(
        header_of(path)["__metadata__"])


@pytest.mark.parametrize("strange", ['a"sha256":"b', '"header_sha256":"', "0" * 64, "ü\n\0"])
def test_names_may_be_anything(tmp_path, strange):
    names = (((strange, (5,)), ("b", (2, 1))), *NAMES[1:])
    path, facts = told(tmp_path, names=names)
    assert facts.names == names
    with Checkpoint(path) as checkpoint:
        checkpoint.load()


def test_names_that_readers_would_refuse_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("syncer.checkpoint.safetensors.HEADER_BYTES_MAX", 8192)
    names = (((10_000 * "x", (5,)), ("b", (2, 1))), *NAMES[1:])
    assert told(tmp_path, names=names)[1].names is None


def refusal_of(path, **changed) -> str:
    """What a reader says of the file with other metadata and a digest that is right."""
    header, data = header_of(path), path.read_bytes()
    data = data[8 + int.from_bytes(data[:8], "little"):]
    header["__metadata__"] |= changed | {"header_sha256": "0" * 64}
    text = json.dumps(header, separators=(",", ":")).encode()
    digest = sha256(len(text).to_bytes(8, "little") + text).hex().encode()
    text = text.replace(b'"header_sha256":"' + b"0" * 64, b'"header_sha256":"' + digest)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(CheckpointFormatError) as caught:
        Checkpoint(path)
    assert str(caught.value).startswith(f"{path}: header at offset 8: ")
    return str(caught.value).removeprefix(f"{path}: header at offset 8: ")


ONE = "0000000000000001"


@pytest.mark.parametrize(("field", "value", "words"), [
    ("run", "", "run: expected 1 to 64 of"),
    ("run", "x" * 65, "run: expected 1 to 64 of"),
    ("run", "two words", "run: expected 1 to 64 of"),
    ("run", "blau\n", "run: expected 1 to 64 of"),
    ("epoch", "0", "epoch: expected 1 to 9223372036854775807, found 0"),
    ("epoch", str(2**63), "epoch: expected 1 to 9223372036854775807"),
    ("epoch", "-1", "epoch: expected a whole number"),
    ("epoch", "01", "epoch: expected a whole number"),
    ("epoch", "9" * 5000, "epoch: expected a whole number"),
    ("renumbered", "9", "renumbered: expected at most the step, 8, found 9"),
    ("renumbered", "1.5", "renumbered: expected a whole number"),
    ("lineage", "", "lineage: not JSON"),
    ("lineage", "{}", "lineage: expected a JSON list, found dict"),
    ("lineage", "[" * 100_000, "lineage: "),
    ("lineage", "[]", "lineage: expected 1 to 64 entries"),
    ("lineage", json.dumps([[ONE, 8]] * 65), "lineage: expected 1 to 64 entries"),
    ("lineage", json.dumps([[ONE, 7]]), "the last one of step 8"),
    ("lineage", json.dumps([[ONE, 8], [ONE, 7]]), "the last one of step 8 or null"),
    ("lineage", json.dumps([[ONE, 9]]), "whole numbers from 0 to 8, found 9"),
    ("lineage", json.dumps([[ONE, -1], [ONE, 8]]), "whole numbers from 0 to 8, found -1"),
    ("lineage", json.dumps([[ONE, True], [ONE, 8]]), "whole numbers from 0 to 8, found True"),
    ("lineage", json.dumps([[ONE]]), "lineage: expected pairs"),
    ("lineage", json.dumps([["1", 8]]), "an instance of 16 hexadecimal digits"),
    ("lineage", json.dumps([["0" * 16, 8]]), "an instance of 16 hexadecimal digits"),
    ("lineage", json.dumps([["A" * 16, 8]]), "an instance of 16 hexadecimal digits"),
    ("lineage", json.dumps([[1, 8]]), "an instance of 16 hexadecimal digits"),
    ("names", "[1]", "names of fragment 0: expected a list"),
    ("names", "[[1]]", "names of fragment 0: expected pairs"),
    ("names", '[[["a",5]]]', "names of fragment 0: expected pairs"),
    ("names", '[[["",[5]]]]', "names of fragment 0: expected names in UTF-8 that differ"),
    ("names", '[[["__metadata__",[5]]]]', "names of fragment 0: expected names in UTF-8"),
    ("names", '[[["\\ud800",[5]]]]', "names of fragment 0: expected names in UTF-8"),
    ("names", '[[["a",[5]],["a",[5]]]]', "names of fragment 0: expected names in UTF-8 that d"),
    ("names", '[[["a",[0]]]]', "names of fragment 0: expected dimensions of 1 to"),
    ("names", f'[[["a",[{2**63},2]]]]', "names of fragment 0: expected dimensions of 1 to"),
    ("names", f'[[["a",[{2**64}]]]]', "names of fragment 0: expected whole numbers"),
    ("names", '[[["a",[1.5]]]]', "names of fragment 0: expected whole numbers"),
    ("names", "[]", "names: expected fragments of 7, 13, 6 elements"),
    ("names", '[[["a",[7]]],[["b",[13]]],[["c",[7]]]]', "names: expected fragments of 7, 13, 6"),
])
def test_a_file_may_not_tell_this(tmp_path, field, value, words):
    path, _ = told(tmp_path)
    said = refusal_of(path, **{field: value})
    assert words in said
    assert len(said) < 400
