"""Both formats: the golden file to the byte, what other tools read, and every damage refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from syncer.checkpoint import safetensors, yeto
from syncer.checkpoint.convert import convert, export
from syncer.checkpoint.facts import Cut, Facts, check_contiguous
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.errors import CheckpointError, CheckpointFormatError, CheckpointMismatch
from syncer.kernels import sha256
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.steps import version_at
from tests.checkpoint.cuts import LAYOUT, make_cut, names_in, version_of
from tests.golden.merge_reference import checkpoint_v3, contiguous_version

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "merge_golden.json").read_text())
GOLDEN_V3 = bytes.fromhex(GOLDEN["checkpoint_v3"]["hex"])


def load(path, **options):
    with Checkpoint(path) as checkpoint:
        return checkpoint.facts, checkpoint.load(**options)


def assert_same(loaded, cut):
    assert len(loaded) == len(cut.fragments)
    for found, expected in zip(loaded, cut.fragments, strict=True):
        assert found.version == expected.version
        assert found.params.tobytes() == expected.params.tobytes()
        assert list(found.state) == list(expected.state)
        for name, array in expected.state.items():
            assert found.state[name].tobytes() == array.tobytes()


def written(tmp_path, cut, form="safetensors") -> bytes:
    path = tmp_path / f"written-{form}"
    assert write_checkpoint(path, cut, form) == path.stat().st_size
    return path.read_bytes()


# ------------------------------------------------------------------------------------- yeto-v3
def test_the_golden_file_loads_and_ours_equals_it(tmp_path):
    path = tmp_path / "golden"
    path.write_bytes(GOLDEN_V3)
    facts, loaded = load(path)
    assert facts.step == 7
    assert facts.versions == tuple(GOLDEN["checkpoint_v3"]["versions"])
    assert facts.fingerprint.hex() == GOLDEN["checkpoint_v3"]["layout_fingerprint"]
    assert facts.contract == bytes([7] * 32)
    assert facts.ledger == {0: (2, 24, 8192), 3: (1, 12, 4096)}
    fragments = [version_of(f.version, f.params, f.state) for f in loaded]
    ours = Cut.of(facts.step, fragments, facts.ledger, fingerprint=facts.fingerprint,
                  contract=facts.contract, layout=None, optimizer={"name": "nesterov"},
                  profile_hash=bytes(32))
    assert written(tmp_path, ours, "yeto-v3") == GOLDEN_V3


def test_yeto_bytes_are_those_of_the_reference_writer(tmp_path):
    cut = make_cut(20)
    reference = checkpoint_v3(
        0, cut.facts.fingerprint, 20,
        [(f.version, f.params, f.state["momentum"]) for f in cut.fragments],
        cut.facts.ledger, cut.facts.contract)
    assert written(tmp_path, cut, "yeto-v3") == reference


def test_without_a_contract_it_is_the_fingerprint(tmp_path):
    path = tmp_path / "c"
    path.write_bytes(GOLDEN_V3[:-36])
    facts, _ = load(path)
    assert facts.contract == facts.fingerprint


def test_yeto_holds_nesterov_only(tmp_path):
    for optimizer in ("sgd", "delayed-nesterov"):
        with pytest.raises(CheckpointError, match="nesterov only"):
            write_checkpoint(tmp_path / "c", make_cut(optimizer=optimizer), "yeto-v3")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------- safetensors
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "delayed-nesterov"])
def test_a_safetensors_file_comes_back_whole(tmp_path, optimizer):
    cut = make_cut(23, optimizer=optimizer)
    written(tmp_path, cut)
    facts, loaded = load(tmp_path / "written-safetensors")
    assert facts == cut.facts
    assert_same(loaded, cut)


def test_the_safetensors_package_reads_it(tmp_path):
    cut = make_cut(5, optimizer="delayed-nesterov")
    written(tmp_path, cut)
    with safe_open(tmp_path / "written-safetensors", "np") as file:
        names = {t.name for t in cut.facts.tensors}
        assert set(file.keys()) == names
        assert names == {f"fragments.{p}.{a}" for p in range(3)
                         for a in ("params", "momentum", "accumulator")}
        for p, version in enumerate(cut.fragments):
            assert file.get_tensor(f"fragments.{p}.params").tobytes() == version.params.tobytes()
            for name, array in version.state.items():
                assert file.get_tensor(f"fragments.{p}.{name}").tobytes() == array.tobytes()
        metadata = file.metadata()
    assert metadata["format"] == "syncer-checkpoint"
    assert metadata["global_step"] == "5"
    assert json.loads(metadata["versions"]) == [4, 5, 3]
    assert json.loads(metadata["ledger"]) == {"0": [2, 24, 8192], "3": [1, 12, 4096]}
    assert json.loads(metadata["optimizer"])["dn_period"] == 4
    assert json.loads(metadata["layout"])[2] == {"merge": "iso", "numels": [6],
                                                 "shapes": [[2, 3]]}
    digests = json.loads(metadata["sha256"])
    assert digests["fragments.1.momentum"] == sha256(cut.fragments[1].state["momentum"]).hex()


def test_tensors_begin_at_a_page_and_nothing_depends_on_chance(tmp_path):
    cut = make_cut()
    first, again = written(tmp_path, cut), written(tmp_path, make_cut())
    assert first == again
    assert (8 + int.from_bytes(first[:8], "little")) % 4096 == 0


def test_many_small_and_a_few_large_tensors(tmp_path):
    """Several chunks per tensor, hundreds of parts per write call, odd sizes."""
    sizes = [2_500_001, 1, 1_048_576, *[3] * 700, 2_097_153]
    layout = Layout(tuple(FragmentLayout(0, (n,)) for n in sizes))
    cut = make_cut(1000, layout=layout, optimizer="delayed-nesterov")
    written(tmp_path, cut)
    facts, loaded = load(tmp_path / "written-safetensors")
    assert facts == cut.facts
    assert_same(loaded, cut)
    for threads in (1, 3):
        assert_same(load(tmp_path / "written-safetensors", threads=threads)[1], cut)


def test_an_empty_ledger_and_step_zero(tmp_path):
    cut = make_cut(0, ledger={})
    for form in ("safetensors", "yeto-v3"):
        written(tmp_path, cut, form)
        facts, loaded = load(tmp_path / f"written-{form}")
        assert (facts.step, facts.versions, facts.ledger) == (0, (0, 0, 0), {})
        assert_same(loaded, cut)


# -------------------------------------------------------------------------------------- damage
@pytest.mark.parametrize("form", ["safetensors", "yeto-v3"])
def test_a_file_cut_at_any_byte_is_refused(tmp_path, form):
    whole = written(tmp_path, make_cut(), form)
    path = tmp_path / "cut"
    path.write_bytes(whole)
    # the contract at the end of a yeto-v3 file may be left out as a whole
    whole_too = len(whole) - 36 if form == "yeto-v3" else None
    for size in reversed(range(len(whole))):
        os.truncate(path, size)
        if size == whole_too:
            continue
        with pytest.raises(CheckpointFormatError, match="offset"):
            Checkpoint(path)


def flips(path, whole, bits):
    """The file with one bit changed, one after the other; whole again at the end."""
    path.write_bytes(whole)
    with open(path, "r+b", buffering=0) as file:
        for bit in bits:
            at, mask = divmod(bit, 8)
            os.pwrite(file.fileno(), bytes([whole[at] ^ (1 << mask)]), at)
            yield bit
            os.pwrite(file.fileno(), bytes([whole[at]]), at)


@pytest.mark.parametrize("form", ["safetensors", "yeto-v3"])
def test_bytes_behind_the_end_are_refused(tmp_path, form):
    whole = written(tmp_path, make_cut(), form)
    for extra in (b"\0", bytes(36), b"\0" * 5000):
        (tmp_path / "longer").write_bytes(whole + extra)
        with pytest.raises(CheckpointFormatError, match="offset"):
            Checkpoint(tmp_path / "longer")


def test_ten_thousand_flipped_bits_are_all_refused(tmp_path):
    """No bit of a safetensors checkpoint is without a check; the error says what and where."""
    cut = make_cut(9)
    whole = bytearray(written(tmp_path, cut))
    data = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(5)
    header = rng.choice(8 * data, 7000, replace=False)
    rest = rng.integers(8 * data, 8 * len(whole), 3000)
    path = tmp_path / "flipped"
    for _ in flips(path, whole, map(int, (*header, *rest))):
        with pytest.raises(CheckpointError, match="offset"):
            load(path)
    assert_same(load(path)[1], cut)


def test_flipped_bits_of_a_yeto_file_are_refused_outside_of_its_numbers(tmp_path):
    """The format has no digests: a flip in a value or a counter changes that number alone."""
    cut = make_cut(9)
    whole = bytearray(written(tmp_path, cut, "yeto-v3"))
    path = tmp_path / "flipped"
    refused = 0
    for bit in flips(path, whole, range(8 * len(whole))):
        try:
            facts, loaded = load(path)
        except CheckpointError:
            refused += 1
            continue
        differing = sum(
            found.tobytes() != expected.tobytes()
            for f, e in zip(loaded, cut.fragments, strict=True)
            for found, expected in [(f.params, e.params), (f.state["momentum"],
                                                           e.state["momentum"])])
        differing += facts.ledger != cut.facts.ledger
        differing += facts.contract != cut.facts.contract
        assert differing == 1, f"bit {bit}"
    assert refused > 8 * 130


def test_without_verifying_only_the_digests_are_skipped(tmp_path):
    whole = bytearray(written(tmp_path, make_cut()))
    whole[-1] ^= 1
    path = tmp_path / "changed"
    path.write_bytes(whole)
    with pytest.raises(CheckpointFormatError, match=r"fragments\.2\.momentum at offset \d+.*SHA"):
        load(path)
    load(path, verify=False)
    whole[30] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointFormatError, match="header"):
        load(path, verify=False)


@pytest.mark.parametrize("form", ["safetensors", "yeto-v3"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path, form, bad):
    cut = make_cut()
    cut.fragments[1].state["momentum"][4] = bad
    written(tmp_path, cut, form)
    with pytest.raises(CheckpointFormatError, match=r"fragments\.1\.momentum at offset .*finite"):
        load(tmp_path / f"written-{form}")


def test_versions_of_two_cuts_are_refused(tmp_path):
    """Four fragments, last step 5: 5, 2, 3, 4 is the cut; 5, 2, 3, 8 is none."""
    blob = [(v, np.ones(2), np.zeros(2)) for v in (5, 2, 3, 8)]
    path = tmp_path / "c"
    path.write_bytes(checkpoint_v3(0, bytes(32), 5, blob, {}))
    with pytest.raises(CheckpointMismatch, match="fragment 3 has version 8, expected 4"):
        Checkpoint(path)
    blob[3] = (4, *blob[3][1:])
    path.write_bytes(checkpoint_v3(0, bytes(32), 5, blob, {}))
    assert load(path)[0].versions == (5, 2, 3, 4)


def test_the_version_ats_are_those_of_the_reference():
    for count in range(1, 6):
        for step in range(40):
            for p in range(count):
                assert version_at(step, p, count) == contiguous_version(step, p, count)


def test_a_cut_must_be_contiguous_to_be_written():
    version = version_of(3, np.zeros(1, np.float32), {})
    with pytest.raises(CheckpointMismatch):
        Cut.of(4, [version], {}, fingerprint=bytes(32), contract=bytes(32), layout=None,
               optimizer={"name": "sgd"}, profile_hash=bytes(32))


@pytest.mark.parametrize("kind", ["missing", "directory", "empty", "text", "pipe"])
def test_what_is_no_checkpoint(tmp_path, kind):
    path = tmp_path / "c"
    match kind:
        case "directory":
            path.mkdir()
        case "empty":
            path.touch()
        case "text":
            path.write_text("a long text that is no checkpoint at all")
        case "pipe":
            os.mkfifo(path)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_header_too_large_for_readers_is_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr(safetensors, "HEADER_BYTES_MAX", 4096)
    layout = Layout(tuple(FragmentLayout(0, (1,)) for _ in range(100)))
    with pytest.raises(CheckpointError, match="fewer fragments"):
        write_checkpoint(tmp_path / "c", make_cut(layout=layout))


def test_sizes_are_known_before_writing(tmp_path):
    cut = make_cut(40)
    assert len(written(tmp_path, cut, "yeto-v3")) == yeto.draft(cut.facts).size
    assert cut.facts.state_bytes == 8 * LAYOUT.numel
    check_contiguous(cut.facts)
    assert isinstance(cut.facts, Facts)


def test_what_a_layout_names_is_what_the_file_holds(tmp_path):
    """Of a file without a layout of its own it is only the sizes that can be compared."""
    path, other = tmp_path / "c", Layout((*LAYOUT.fragments[:2], FragmentLayout(AVG, (7,))))
    write_checkpoint(path, make_cut(), "yeto-v3")
    with Checkpoint(path) as checkpoint:
        with pytest.raises(CheckpointMismatch, match="the layout has fragments of"):
            convert(checkpoint, tmp_path / "other", "safetensors", layout=other)
        with pytest.raises(CheckpointMismatch, match="fragment 1 has 13 elements, the layout names "
                                                     "12"):
            export(checkpoint, tmp_path / "other", [(0, (("a", (7,)),)), (1, (("b", (3, 4)),))])
    assert names_in(tmp_path) == {"c"}
