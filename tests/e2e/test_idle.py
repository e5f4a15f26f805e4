"""Learners that only say that they are there: what each of them costs the server's memory.

The same with 2,000, and their share of a core, is a row of `make bench-limits`.
"""

from __future__ import annotations

from benchmarks.limits import idle

LEARNERS = 200


def test_a_learner_that_only_says_that_it_is_there_costs_less_than_64_kib():
    with idle.joined(LEARNERS) as (server, empty):
        assert (idle.resident_kib(server) - empty) / LEARNERS < idle.KIB_EACH
