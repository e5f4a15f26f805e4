"""The table of tape keys and the records of all scenarios are equal; other programs read them."""

from __future__ import annotations

import pytest

from syncer.core import actions as act
from syncer.core.run.tape_keys import ADDED, EVENTS, MERGE, PARTS, misfit
from tests.scenarios.runner import FILES, Scenario

ENTRY = {"id": 0, "generation": 1}


class Recorded(Scenario):
    """A scenario that keeps its records."""

    def __init__(self, text: str):
        self.records: list[dict] = []
        super().__init__(text)

    def describe(self, action) -> list[str]:
        if isinstance(action, act.Record):
            self.records.append(action.fields)
        return super().describe(action)


@pytest.fixture(scope="module")
def records() -> list[dict]:
    """Every record that the scenarios produce."""
    found = []
    for path in FILES:
        scenario = Recorded(path.read_text())
        scenario.play()
        found += scenario.records
    return found


def test_every_record_fits_its_table(records):
    assert [problem for record in records if (problem := misfit(record)) is not None] == []


def test_every_row_of_the_tables_is_recorded(records):
    """A row that nothing writes would be a promise that nobody keeps."""
    merges = [record for record in records if "event" not in record]
    assert {key for record in merges for key in record} == MERGE.keys() - ADDED
    assert {record["event"] for record in records if "event" in record} == EVENTS.keys()
    for part in PARTS.keys() - ADDED:
        keys = PARTS[part]
        entries = [entry for record in merges for entry in record.get(part, ())]
        assert {key for entry in entries for key in entry} == keys.keys(), part


@pytest.mark.parametrize(("record", "told"), [
    ({"event": "shutdown", "signal": 15, "step": 3}, "shutdown: "),
    ({"event": "shutdown", "step": 3}, "shutdown: "),
    ({"event": "shutdown", "step": 3, "signal": 15, "why": ""}, "shutdown: "),
    ({"event": "lunch"} | ENTRY, "lunch: "),
    ({"step": 3}, "merge: "),
    ({key: [] for key in MERGE} | {"expected_members": [{"generation": 1, "id": 0}]},
     "merge, expected_members: "),
])
def test_a_record_that_does_not_fit_is_told(record, told):
    assert misfit(record).startswith(told)
