"""The golden values of the merge are what their generator gives; must not test the package."""

from __future__ import annotations

import json
from pathlib import Path

from tests.golden import merge_reference

GOLDEN = Path(__file__).with_name("merge_golden.json")


def test_generator_reproduces_the_file_exactly():
    values = merge_reference.golden()
    merge_reference.self_check(values)
    assert json.dumps(values, indent=1) == GOLDEN.read_text().rstrip("\n")


def test_the_sequential_sum_is_not_the_blocked_sum():
    # The fixed shape matters: a kernel that adds left to right would give other bits.
    terms = merge_reference.noise(1, 40003).astype("f8") ** 2
    assert merge_reference.seq_sum(terms) != merge_reference.blocked_sum(terms)
