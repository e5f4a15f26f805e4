"""Which run a checkpoint is of: what --run and a pinned island ask for, and what the file says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncer.checkpoint.facts import Cut
from syncer.checkpoint.lineage import Lineage
from syncer.checkpoint.reader import Checkpoint
from syncer.checkpoint.writer import write_checkpoint
from syncer.config import Config
from syncer.errors import CheckpointMismatch
from syncer.protocol import RUN_NAME_RULE
from syncer.ranges import RUN
from syncer.server.resuming import check_contract
from syncer.wire.contracts import is_run_name, rl_contract, run_contract
from tests.checkpoint.cuts import FINGERPRINT, make_cut

ISLAND, OTHER = b"\x44" * 32, b"\x55" * 32
RL = rl_contract(FINGERPRINT, ISLAND)


def facts_of(contract: bytes, run: str = ""):
    return replace(make_cut().facts, contract=contract, lineage=Lineage(run, 1, 7))


def check_run(facts, run, island):
    check_contract(facts, "c", Config(learners=1, total_steps=9, run=run,
                                      expected_island_contract=island))


@pytest.mark.parametrize(("contract", "stored", "run", "island"), [
    (FINGERPRINT, "", None, None),
    (OTHER, "", None, None),                              # of whatever makes contracts
    (RL, "", None, ISLAND),
    (run_contract(FINGERPRINT, "blue"), "", "blue", None),
    (run_contract(FINGERPRINT, "blue"), "blue", "blue", None),
    (run_contract(FINGERPRINT, "blue"), "blue", None, None),
    (run_contract(RL, "blue"), "", "blue", ISLAND),
    (run_contract(RL, "blue"), "blue", None, ISLAND),
    (run_contract(RL, "blue"), "blue", "blue", None),     # learners know the base
])
def test_a_file_of_the_run_that_is_asked_for(contract, stored, run, island):
    check_run(facts_of(contract, stored), run, island)


@pytest.mark.parametrize(("contract", "stored", "run", "island", "words"), [
    (run_contract(FINGERPRINT, "blue"), "blue", "red", None,
     "c: run: expected red, which --run asks for, found blue; leave --run out"),
    (FINGERPRINT, "", "blue", None, "which --run asks for, found 1111"),
    (run_contract(FINGERPRINT, "red"), "", "blue", None, "which --run asks for"),
    (FINGERPRINT, "", None, ISLAND, "which --expected-island-contract asks for"),
    (run_contract(RL, "blue"), "", None, ISLAND, "which --expected-island-contract asks for"),
    (run_contract(FINGERPRINT, "blue"), "blue", None, ISLAND, "--expected-island-contract asks"),
    (RL, "", "blue", ISLAND, "which --run and --expected-island-contract ask for"),
])
def test_a_file_of_another_one(contract, stored, run, island, words):
    with pytest.raises(CheckpointMismatch) as caught:
        check_run(facts_of(contract, stored), run, island)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["x", "A-Za-z0-9._-", 64 * "9", "", 65 * "x", "a b", "\u00e4",
                                  "a\n", "\u0663", "a/b"])
def test_names_are_the_same_on_the_wire_and_on_the_command_line(name):
    assert RUN.admits(name) == is_run_name(name)
    assert RUN.words == RUN_NAME_RULE


def test_the_name_is_kept_in_the_file(tmp_path):
    facts = facts_of(run_contract(FINGERPRINT, "blue"), "blue")
    write_checkpoint(tmp_path / "c", Cut(facts, make_cut().fragments))
    with Checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint.facts.lineage.run == "blue"
