"""What the tape of a simulated run says, judged at its end; must not change anything."""

from __future__ import annotations

import json
import re
from typing import Any

from syncer.core.run import tape_keys
from syncer.learner import situation
from syncer.learner.session import Phase

LONG_NUMBER = re.compile(rb"\d{11,}")


def lines_of(fleet: Any, text: str) -> list[dict[str, Any]]:
    """Of the JSON log those of this message."""
    found = [json.loads(line) for line in fleet.lines.lines]
    return [line for line in found if line["message"] == text]


def records(fleet: Any) -> list[dict[str, Any]]:
    """The tape of this history: whole lines, those that a roll back took away left out."""
    data, found, at = bytes(fleet.tape.data), [], 0
    for end, step in [*fleet.begun, (len(data), fleet.last_step)]:
        found += [json.loads(line) for line in data[at:end].splitlines()]
        found = [record for record in found if record.get("step", 0) <= step]
        at = end
    return found


def check_generations(fleet: Any) -> None:
    """Nobody can read a whole generation in the log or on the tape."""
    numbers = LONG_NUMBER.findall(b"".join(fleet.lines.lines) + bytes(fleet.tape.data))
    shown = fleet.generations.keys() & {int(number) for number in numbers}
    assert not shown, f"a generation is told whole: {shown}"


def check_tape(fleet: Any) -> None:
    """Each merge is told once and in order; a server that was lost may owe its last ones."""
    if fleet.config.event_tape is None:
        return
    merges = [record for record in records(fleet) if "responders" in record]
    told = {record["step"]: record for record in merges}
    misfits = [why for record in records(fleet) if (why := tape_keys.misfit(record))]
    assert not misfits, misfits
    assert [record["step"] for record in merges] == sorted(told), "a step is told twice"
    owing = fleet.lost_records or fleet.lost_processes
    for merge in fleet.history.merges:
        if merge.step in told:
            pushed = [c.learner for c, _ in merge.parts if not c.carried]
            responders = told[merge.step]["responders"]
            assert [entry["id"] for entry in responders] == sorted(pushed)
        else:
            assert owing, f"step {merge.step} is not on the tape"


def check_words(session: Any) -> None:
    """What a learner would tell its user, where it stands and what it waits for, is so."""
    awaited, standing = situation.awaited(session), situation.standing(session)
    training = session.phase is Phase.TRAINING
    assert awaited
    assert standing is None or (training and session.connection is not None)
    if standing is not None and session.welcome is None:
        assert f"is at step {max(step for step, *_ in filter(None, session.accepted))};" in standing
    if training and any(session.accepted):
        owes = "this learner, which has not answered" in awaited
        assert owes == bool(session.pulls), (awaited, session.pulls)
    elif training:
        assert "the run to begin" in awaited, awaited
    else:
        assert "final cut" in awaited, awaited
