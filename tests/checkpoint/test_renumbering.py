"""Numbers nobody has seen: when a file may be behind, what is added, and what stands beside."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncer.checkpoint.epoch_file import EpochFile, epoch_path, parsed, read_epoch, write_epoch
from syncer.checkpoint.facts import Cut, Facts
from syncer.checkpoint.fields import Malformed
from syncer.checkpoint.files import FILES, Files
from syncer.checkpoint.lineage import UNTOLD, Lineage, Origin
from syncer.checkpoint.lock import PathLock
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.renumbering import may_be_behind, raise_of
from syncer.checkpoint.writer import write_checkpoint
from syncer.config import Config
from syncer.core.actions import Save, SaveKind
from syncer.errors import CheckpointError, CheckpointFormatError, CheckpointMismatch
from syncer.server.log import Log
from syncer.server.persistence import Persistence
from syncer.steps import version_at
from tests.checkpoint.cuts import CONTRACT, FINGERPRINT, LAYOUT, make_cut, version_of
from tests.checkpoint.test_lineage import ME

T = 100
CHANGES = ME._replace(sends_changes=True)
BESIDE = EpochFile(CONTRACT, 3, 0xABC, 0, 8)


def facts_at(step: int, fragments: int = 3, lineage: Lineage = ME) -> Facts:
    versions = tuple(version_at(step, p, fragments) for p in range(fragments))
    return Facts(step=step, versions=versions, numels=(1,) * fragments, state=(),
                 ledger={}, fingerprint=FINGERPRINT, contract=CONTRACT, lineage=lineage)


# ------------------------------------------------------------------------------------- the rule
@pytest.mark.parametrize(("behind", "facts", "beside", "every"), [
    (True, facts_at(40), BESIDE, 8),
    (False, facts_at(40), BESIDE._replace(every=1), 1),
    (False, facts_at(40), BESIDE._replace(clean=40), 8),
    (True, facts_at(40), BESIDE._replace(clean=48), 8),   # gone back
    (True, facts_at(40), None, 8),                        # it was lost, and the file knows epochs
    (False, facts_at(40), None, 1),
    (False, facts_at(40, lineage=UNTOLD), None, 8),       # of a program that knows none
    (True, facts_at(40, lineage=UNTOLD), BESIDE, 8),      # yeto-v3
    (True, facts_at(103), BESIDE, 8),                     # 4 of these were added
    (False, facts_at(104), BESIDE, 8),                    # the end
    (True, facts_at(40, lineage=CHANGES), None, 1),       # no version was broadcast as it is there
    (True, facts_at(40, lineage=CHANGES), BESIDE._replace(every=1, clean=40), 1),
    (False, facts_at(104, lineage=CHANGES), None, 1),
])
def test_when_a_file_may_be_behind(behind, facts, beside, every):
    assert may_be_behind(facts, beside, every, T) is behind


@pytest.mark.parametrize(("found", "beside", "every", "wanted"), [
    ((8004, 8008), BESIDE, 3, None),                      # a multiple of 3 that is 8,003 or more
    ((3003, 3007), None, 3, None),
    ((0, 4), BESIDE._replace(clean=40), 3, None),
    ((0, 4), BESIDE, 3, 0),
    ((3, 7), BESIDE._replace(clean=40), 3, 1),
    ((3, 7), BESIDE._replace(every=1), 1, 3),
    ((6, 10), BESIDE._replace(renumbered=10), 3, 0),      # it died before its first save
    ((8010, 8014), BESIDE._replace(renumbered=10), 3, None),
    ((0, 4), BESIDE._replace(renumbered=1), 3, 0),        # an old one was brought back
])
def test_what_is_added(found, beside, every, wanted):
    assert raise_of(facts_at(40), beside, every=every, total_steps=T, wanted=wanted) == found


def test_at_the_end_nothing_is_added_but_what_is_owed():
    for wanted in (None, 5):
        assert raise_of(facts_at(104), BESIDE, every=3, total_steps=T, wanted=wanted) == (0, 4)
    assert raise_of(facts_at(104), BESIDE._replace(renumbered=7), every=3, total_steps=T) == (3, 7)


def test_sums_that_cannot_be_are_refused():
    with pytest.raises(CheckpointMismatch, match="a multiple of the 3 fragments"):
        raise_of(facts_at(40), BESIDE._replace(renumbered=6), every=8, total_steps=T)
    with pytest.raises(CheckpointMismatch, match="resume with --renumber and a smaller number"):
        raise_of(facts_at(40), BESIDE._replace(every=2**62), every=8, total_steps=T)


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(
    st.integers(1, 4),           # N
    st.integers(0, 12),          # steps it makes
    st.booleans(),               # whether its first save, of the raised cut, comes to pass
    st.booleans(),               # whether it ends in order
    st.integers(0, 3),           # how many files somebody goes back before the next
), max_size=12))
def test_no_number_is_ever_given_twice(fragments, lives):
    """Whatever processes do, what one broadcasts under a number has the same bytes ever after, and
    who follows all of them is never given an older number."""
    total, made, epochs = 1000, 0, set()
    current = [0] * fragments
    seen: dict[tuple[int, int], int] = {}
    newest = [0] * fragments
    step, lineage, beside = 0, Lineage(epoch=1, instance=1), None
    files = [(facts_at(0, fragments, lineage), list(current))]
    for number, (every, steps, first_save, in_order, back) in enumerate(lives, 2):
        assert lineage.epoch not in epochs
        epochs.add(lineage.epoch)
        beside = EpochFile(CONTRACT, lineage.epoch, number, lineage.renumbered, every)
        if first_save or every == 1:
            files.append((facts_at(step, fragments, lineage), list(current)))
        for fragment in range(fragments):
            at = version_at(step, fragment, fragments)
            assert seen.setdefault((fragment, at), current[fragment]) == current[fragment]
            assert at >= newest[fragment]
            newest[fragment] = at
        for _ in range(min(steps, total + lineage.renumbered - step - 1)):
            step, made = step + 1, made + 1
            fragment = (step - 1) % fragments
            current[fragment] = made
            if every == 1:
                files.append((facts_at(step, fragments, lineage), list(current)))
            assert seen.setdefault((fragment, step), made) == made
            assert step > newest[fragment]
            newest[fragment] = step
            if every > 1 and step % every == 0:
                files.append((facts_at(step, fragments, lineage), list(current)))
        if in_order:
            files.append((facts_at(step, fragments, lineage), list(current)))
            beside = beside._replace(clean=step)
        whole = every == 1 or in_order            # who goes back then says --renumber
        facts, values = files[-1] if whole else files[max(0, len(files) - 1 - back)]
        current = list(values)
        found = raise_of(facts, beside, every=every, total_steps=total)
        lineage = facts.lineage.resumed(facts.step, beside.epoch, Origin(number, 0))
        lineage = lineage.raised(found.by)
        assert lineage.renumbered == found.renumbered
        step = facts.step + found.by


# ---------------------------------------------------------------------------------- the file
def test_what_stands_beside_a_checkpoint(tmp_path):
    path = str(tmp_path / "c")
    assert read_epoch(path) is None
    for beside in (BESIDE, BESIDE._replace(clean=0)):
        write_epoch(path, beside)
        assert read_epoch(path) == beside
    assert (tmp_path / "c.epoch").read_text() == (
        f"SYNCER_EPOCH_V1\ncontract={CONTRACT.hex()}\nepoch=3\ninstance=0000000000000abc\n"
        "renumbered=0\nevery=8\nclean=0\n")


GOOD = BESIDE._replace(clean=40).text()


@pytest.mark.parametrize(("text", "words"), [
    ("", "expected SYNCER_EPOCH_V1 and 5 or 6 lines"),
    ("SYNCER_EPOCH_V2\n" + GOOD.partition("\n")[2], "expected SYNCER_EPOCH_V1"),
    (GOOD[:-1], "expected SYNCER_EPOCH_V1 and 5 or 6 lines"),
    (GOOD + "more=1\n", "expected SYNCER_EPOCH_V1 and 5 or 6 lines"),
    (GOOD + "x" * 100_000, "expected SYNCER_EPOCH_V1 and 5 or 6 lines"),
    (GOOD.replace("every=8\n", "").replace("clean=40\n", ""), "5 or 6 lines"),
    (GOOD.replace("epoch=3", "instance=3"), "line 3: expected epoch=, found 'instance=3'"),
    (GOOD.replace("epoch=3", "epoch=0"), "line 3, epoch: expected 1 to"),
    (GOOD.replace("epoch=3", f"epoch={2**63}"), "line 3, epoch: expected 1 to"),
    (GOOD.replace("epoch=3", "epoch=3 "), "line 3, epoch: expected a whole number"),
    (GOOD.replace("epoch=3", "epoch=\u0663"), "line 3, epoch: expected a whole number"),
    (GOOD.replace("every=8", "every=0"), "line 6, every: expected 1 to"),
    (GOOD.replace("renumbered=0", "renumbered=-1"), "line 5, renumbered: expected a whole"),
    (GOOD.replace("clean=40", "clean="), "line 7, clean: expected a whole number"),
    (GOOD.replace("0abc", "0aBc"), "line 4, instance: expected an instance of 16"),
    (GOOD.replace("0abc", "abc"), "line 4, instance: expected an instance of 16"),
    (GOOD.replace("contract=2", "contract=g"), "line 2, contract: expected 64 hexadecimal"),
])
def test_what_may_not_stand_there(tmp_path, text, words):
    path = str(tmp_path / "c")
    (tmp_path / "c.epoch").write_text(text)
    with pytest.raises(CheckpointFormatError) as caught:
        read_epoch(path)
    said = str(caught.value)
    assert said.startswith(f"{path}.epoch: ")
    assert words in said
    assert said.endswith("or remove it and start all learners anew")
    assert len(said) < 500


def test_one_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "c.epoch").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_epoch(str(tmp_path / "c"))


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data):
    with suppress(Malformed):
        assert parsed(data).text().encode() == data


# ------------------------------------------------------------------------------ in a server
class Said(list):
    """Lines of a log."""

    terminal = False

    def __call__(self, line: bytes) -> None:
        self.append(line)


def persistence(path, *, resume=True, every=8, files=FILES, **more):
    """(a Persistence, the lines of its log)."""
    config = Config(**{"total_steps": T, **more}, learners=1, checkpoint_path=str(path),
                    checkpoint_every=every, resume=resume)
    said = Said()
    return Persistence(config, Log("debug", "json", said), files,
                       origin=lambda: Origin(0x77, 1000)), said


def left_by(path, step: int, beside: EpochFile | None, lineage: Lineage = ME, form="safetensors"):
    """What a process leaves that is gone."""
    cut = make_cut(step)
    write_checkpoint(path, Cut(replace(cut.facts, lineage=lineage), cut.fragments), form)
    if beside is not None:
        write_epoch(str(path), beside)
    return cut


def test_a_process_is_known_before_it_answers(tmp_path):
    path = tmp_path / "c"
    left_by(path, 40, BESIDE)
    store, said = persistence(path, every=5)
    assert read_epoch(str(path)) == BESIDE, "not before its port is bound"
    store.begin()
    assert read_epoch(str(path)) == EpochFile(CONTRACT, 4, 0x77, 4 + 8004, 5)
    assert store.lineage == Lineage("blue", 4, 0x77, ((5, None), (6, None), (0xABC, None)), 8008)
    assert (store.resumed.step, store.resumed.renumbered) == (8044, 8008)
    assert store.resumed.unsaved
    assert store.total_steps == T + 8008
    assert [found.version for found in store.loaded] == [8044, 8042, 8043]
    assert any(b"steps were raised" in line for line in said)
    store.close()
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 40, "it has saved nothing yet"
    store, _ = persistence(path, every=5)
    assert store.resumed.step == 40 + 8004 + 5004, "what the one before has given out is not again"
    store.close()


def test_what_was_never_merged_has_a_number_of_the_new_cut(tmp_path):
    """One of 0 would be older than what learners got of a step that is lost."""
    left_by(tmp_path / "c", 1, BESIDE, ME._replace(entries=(), renumbered=0))
    store, _ = persistence(tmp_path / "c")
    assert (store.resumed.step, store.total_steps) == (1 + 8004, T + 8004)
    assert [found.version for found in store.loaded] == [8005, 8003, 8004]
    store.close()


def test_a_process_that_cannot_be_known_does_not_begin(tmp_path):
    path = tmp_path / "c"
    left_by(path, 40, BESIDE)
    store, _ = persistence(path)
    os.mkdir(f"{path}.epoch.tmp")
    with pytest.raises(CheckpointError, match="epoch"):
        store.begin()
    store.close()


@pytest.mark.parametrize(("beside", "lineage"), [
    (BESIDE._replace(clean=40), ME), (BESIDE._replace(every=1), ME), (None, UNTOLD)])
def test_a_file_that_is_whole_goes_on_with_its_numbers(tmp_path, beside, lineage):
    path = tmp_path / "c"
    left_by(path, 40, beside, lineage)
    store, said = persistence(path)
    store.begin()
    assert (store.resumed.step, store.resumed.unsaved) == (40, False)
    if lineage is ME:
        assert store.lineage.kept(0xABC, 40, 40)
        assert store.lineage.epoch == 4
    else:
        assert store.lineage.epoch == 2**32 + 1000
    assert not any(b"steps were raised" in line for line in said)
    store.close()


def test_an_epoch_of_another_contract_is_replaced(tmp_path):
    path = tmp_path / "c"
    left_by(path, 40, BESIDE._replace(contract=bytes(32), epoch=99, clean=40), UNTOLD)
    store, _ = persistence(path)
    store.begin()
    assert store.resumed.step == 40
    assert read_epoch(str(path)) == EpochFile(CONTRACT, 2**32 + 1000, 0x77, 0, 8)
    store.close()


def test_an_end_in_order_is_noted_and_no_other_one(tmp_path):
    path = tmp_path / "c"
    for last, clean in ((40, 40), (41, None), (None, None)):
        left_by(path, 40, BESIDE._replace(clean=40))
        store, _ = persistence(path)
        store.begin()
        store.close(last)
        assert read_epoch(str(path)).clean == clean


def test_a_run_that_begins_is_known_with_its_first_file(tmp_path):
    path = tmp_path / "c"
    write_epoch(str(path), BESIDE)
    store, _ = persistence(path, resume=False)
    store.begin()
    assert read_epoch(str(path)) == BESIDE, "nothing is there yet that it could be of"
    cut = make_cut(0)
    hello = type("Session", (), {"fingerprint": FINGERPRINT, "contract": CONTRACT,
                                 "layout": LAYOUT})
    outcomes = []
    store.save(Save(SaveKind.PERIODIC, 0, {}, False),
               [version_of(0, f.params, f.state) for f in cut.fragments], hello, outcomes.append)
    store.close(0)
    assert outcomes[0].error is None
    assert read_epoch(str(path)) == EpochFile(CONTRACT, 1, 0x77, 0, 8, 0)
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.lineage == Lineage("", 1, 0x77)


def test_a_format_without_a_place_for_the_sum_is_written_first(tmp_path):
    path = tmp_path / "c"
    left_by(path, 40, BESIDE, form="yeto-v3")
    store, _ = persistence(path, checkpoint_format="yeto-v3", renumber=9)
    store.begin()
    with Checkpoint(path) as checkpoint:
        assert checkpoint.facts.step == 49
        assert checkpoint.facts.versions == (49, 47, 48)
        checkpoint.load()
    assert (store.resumed.step, store.resumed.unsaved, store.total_steps) == (49, False, T)
    store.close()


class Failing(Files):
    """Gives so many files their names, and none after that."""

    def __init__(self, left: int):
        self.left = left

    def rename(self, path, name):
        if not self.left:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        self.left -= 1
        super().rename(path, name)


def test_a_start_that_comes_no_further_adds_no_steps(tmp_path):
    """A supervisor that starts it again and again would end the run without a merge."""
    path = tmp_path / "c"
    left_by(path, 40, BESIDE, form="yeto-v3")

    def start(files=FILES):
        store, _ = persistence(path, files=files, checkpoint_format="yeto-v3", total_steps=10**6)
        try:
            store.begin()
            return store.resumed.step
        finally:
            store.close()

    for names, step in ((0, 40), (1, 40), (2, 8044), (0, 8044)):
        with pytest.raises(CheckpointError):
            start(Failing(names))
        with Checkpoint(path) as checkpoint:
            assert checkpoint.facts.step == step
    assert start() == 8044
    assert start() == 8044 + 8004, "the one before may have answered learners"


@pytest.mark.parametrize(("room", "added"), [(21, 21), (20, 0)])
def test_where_the_usual_sum_has_no_room_one_for_a_save_that_failed_has(tmp_path, room, added):
    """Learners of protocol 4 would stand still otherwise, whatever the length of the run: 2 N + P =
    19, in whole rounds of three fragments 21."""
    path = tmp_path / "c"
    left_by(path, 40, BESIDE, form="yeto-v3")
    store, said = persistence(path, checkpoint_format="yeto-v3", total_steps=41 + room)
    store.begin()
    assert store.resumed.step == 40 + added
    (told,) = [line for line in said if b"has no place for the steps" in line]
    assert b'"steps": 8004' in told
    assert b'"added": %d' % added in told
    store.close()


class Stale(Files):
    """The first sync of this file's new content fails."""

    def __init__(self, path):
        self.path, self.descriptor = str(path), -1

    def create(self, path, *, direct=False):
        descriptor = super().create(path, direct=direct)
        if path == f"{self.path}.tmp":
            self.descriptor = descriptor
        return descriptor

    def sync(self, descriptor):
        if descriptor == self.descriptor:
            self.path, self.descriptor = "", -1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(descriptor)


def test_what_follows_the_last_checkpoint_has_the_patience_of_every_write(tmp_path):
    """A run that is over and is started again: its final state, under its own name."""
    left_by(tmp_path / "c", 104, BESIDE)
    final = tmp_path / "final"
    store, said = persistence(tmp_path / "c", resume="auto", files=Stale(final),
                              final_state=str(final), checkpoint_retries=1)
    store.begin()
    store.close()
    assert final.stat().st_size
    (told,) = [json.loads(line) for line in said if b"tried again" in line]
    assert told["path"] == str(final)


def test_the_epoch_lies_beside_the_file_that_a_link_leads_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "real" / "c")
    left_by(tmp_path / "real" / "c", 40, BESIDE._replace(clean=40))
    store, _ = persistence(tmp_path / "c")
    store.begin()
    assert store.resumed.step == 40
    assert read_epoch(str(tmp_path / "real" / "c")).epoch == 4
    assert not os.path.lexists(epoch_path(str(tmp_path / "c")))
    store.close()
    with PathLock(str(tmp_path / "real" / "c")):
        pass
