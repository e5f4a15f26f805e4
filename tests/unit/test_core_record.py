"""The tape record of a merge, key by key and in order: other programs read it by name."""

import json

from syncer.core import actions as act
from syncer.core import events as ev
from tests.toy_driver import MS, ToyDriver, toy_config

KEYS = [
    "protocol_version", "delta_semantics", "sync/layout_hash", "sync/base_version",
    "sync/responders", "sync/quorum", "sync/rejected_stale_updates", "sync/merge_seconds",
    "sync/global_delta_norm", "step", "fragment", "launch_base_version", "attempt", "gnorm", "ms",
    "quorum", "expected", "expected_members", "responded", "responded_members", "missed_grace",
    "missed_members", "quorum_ms", "grace_ms", "sync_ms", "responders",
]


def records(driver: ToyDriver, now_ms: float, event) -> list[dict]:
    actions = driver.feed(round(now_ms * MS), event)
    return [a.fields for a in actions if isinstance(a, act.Record) and "step" in a.fields
            and "event" not in a.fields]


def started(**given) -> ToyDriver:
    driver = ToyDriver(toy_config(**given))
    for learner in range(driver.config.learners):
        hello = driver.hello(learner, 1)._replace(fingerprint=bytes(range(32)))
        driver.feed(0, hello)
    driver.feed(0, driver.init(0, 1, 0, 0.0))
    return driver


def test_merge_record():
    driver = started(learners=3, quorum=2, total_steps=3, grace_ms=50)
    driver.feed(2 * MS, driver.push(1, 1, 1, -1.0, c_steps=4, c_tokens=100))
    driver.feed(5 * MS, driver.push(0, 1, 1, -1.0, c_steps=1, c_tokens=50))
    driver.feed(55 * MS, ev.Tick())
    driver.feed(60 * MS, ev.MergeDone(1, 3 * MS, 1.5))
    (record,) = records(driver, 61, ev.Synced(1, 2 * MS))
    assert list(record) == KEYS
    json.dumps(record)
    assert record == {
        "protocol_version": 4,
        "delta_semantics": "local_minus_raw_anchor",
        "sync/layout_hash": bytes(range(32)).hex(),
        "sync/base_version": 0,
        "sync/responders": 2,
        "sync/quorum": 2,
        "sync/rejected_stale_updates": 0,
        "sync/merge_seconds": 0.003,
        "sync/global_delta_norm": 1.5,
        "step": 1,
        "fragment": 0,
        "launch_base_version": 0,
        "attempt": 1,
        "gnorm": 1.5,
        "ms": 60.0,
        "quorum": 2,
        "expected": [0, 1, 2],
        "expected_members": [{"id": i, "generation": 1} for i in range(3)],
        "responded": [0, 1],
        "responded_members": [{"id": i, "generation": 1} for i in range(2)],
        "missed_grace": [2],
        "missed_members": [{"id": 2, "generation": 1}],
        "quorum_ms": 5.0,
        "grace_ms": 50.0,
        "sync_ms": 5.0,
        "responders": [
            {"id": 0, "generation": 1, "base_version": 0, "staleness": 0, "c_steps": 1,
             "c_tokens": 50, "weight": 2500.0, "contribution": 0.5},
            {"id": 1, "generation": 1, "base_version": 0, "staleness": 0, "c_steps": 4,
             "c_tokens": 100, "weight": 2500.0, "contribution": 0.5},
        ],
    }


def test_zero_weights_have_no_share():
    driver = started(learners=1, total_steps=3)
    driver.feed(1 * MS, driver.push(0, 1, 1, -1.0, c_tokens=0))
    driver.feed(2 * MS, ev.MergeDone(1, 0, 0.0))
    (record,) = records(driver, 2, ev.Synced(1, 0))
    assert record["responders"][0]["weight"] == 0.0
    assert record["responders"][0]["contribution"] == 0.0


def test_counters_at_the_end_of_their_range():
    driver = started(learners=1, total_steps=3)
    largest = 2**64 - 1
    driver.feed(1 * MS, driver.push(0, 1, 1, -1.0, local_step=largest, c_steps=2**32 - 1,
                                    c_tokens=largest))
    driver.feed(2 * MS, ev.MergeDone(1, 0, 0.0))
    (record,) = records(driver, 2, ev.Synced(1, 0))
    assert record["responders"][0]["weight"] == float(largest) * float(largest) / (2**32 - 1)
    assert driver.scheduler.ledger == {0: [1, 2**32 - 1, largest]}
    driver.feed(3 * MS, driver.push(0, 1, 2, -1.0, c_steps=1, c_tokens=largest))
    driver.feed(4 * MS, ev.MergeDone(2, 0, 0.0))
    assert driver.scheduler.ledger == {0: [2, 2**32, largest]}, "a full counter stays full"


def test_what_a_merge_left_out_has_no_share_in_the_ledger():
    driver = started(learners=3, quorum=3, total_steps=3)
    for learner in range(3):
        driver.feed(1 * MS, driver.push(learner, 1, 1, -1.0, c_steps=2, c_tokens=50))
    driver.feed(2 * MS, ev.MergeDone(1, 0, 0.0, dropped=(ev.Dropped(1, 7),)))
    assert driver.scheduler.ledger == {0: [1, 2, 50], 2: [1, 2, 50]}


def test_optional_keys_come_last_and_only_when_used():
    driver = started(learners=2, total_steps=6, max_base_lag=1, late_carry=True, grace_ms=0)
    driver.feed(1 * MS, driver.push(0, 1, 1, -1.0))
    driver.feed(2 * MS, ev.MergeDone(1, 0, 0.0))
    (first,) = records(driver, 2, ev.Synced(1, 0))
    assert list(first) == KEYS
    driver.feed(3 * MS, driver.push(1, 1, 1, -1.0, base=0, c_steps=2, c_tokens=4))
    driver.feed(4 * MS, driver.push(0, 1, 2, -1.0))
    driver.feed(5 * MS, ev.MergeDone(2, 0, 0.0))
    (second,) = records(driver, 5, ev.Synced(2, 0))
    assert list(second) == [*KEYS, "carried"]
    assert second["carried"] == [{
        "id": 1, "base_version": 0, "lag": 1, "discount": 0.5, "weight": 4.0, "generation": 1,
        "c_steps": 2, "c_tokens": 4, "contribution": 0.8}]
    assert second["sync/responders"] == 1
    driver.feed(6 * MS, driver.push(1, 1, 3, -1.0, base=0))
    driver.feed(7 * MS, driver.push(0, 1, 3, -1.0))
    driver.feed(8 * MS, ev.MergeDone(3, 0, 0.0))
    (third,) = records(driver, 8, ev.Synced(3, 0))
    assert list(third) == [*KEYS, "released"]
    assert third["released"] == [1]
    assert third["sync/rejected_stale_updates"] == 1
