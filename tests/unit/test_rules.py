"""Every rule of docs/rules.md has one home, tests, and a mistake that they must notice."""

import re

import pytest

from tests import rules
from tests.mutation.catalogue import MUTATIONS
from tests.scenarios.runner import FILES

NUMBERS = rules.numbers()
HOMES, SCENARIOS, BROKEN = rules.homes(), rules.scenarios(), rules.mutations()


def test_numbers_count_up():
    """Within a section from 1 without gaps, so that a rule that is taken out is missed."""
    sections = {}
    for number in NUMBERS:
        section, place = map(int, number.split("."))
        assert place == sections.get(section, 0) + 1, number
        sections[section] = place
    assert list(sections) == list(range(1, len(sections) + 1))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_rule_has_one_home_tests_and_mutations(number):
    assert len(HOMES.get(number, [])) == 1, f"rule {number} has the homes {HOMES.get(number)}"
    assert SCENARIOS.get(number) or rules.ELSEWHERE.get(number), f"rule {number} has no test"
    assert BROKEN.get(number), f"rule {number} has no mutation"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_names_its_rules(path):
    assert rules.rules_of(path)
    assert set(rules.rules_of(path)) <= set(NUMBERS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mistake)
def test_a_mutation_names_its_rules(mutation):
    assert mutation.rules.split()
    assert set(mutation.rules.split()) <= set(NUMBERS)


def test_homes_and_tests_are_of_rules_that_exist():
    assert set(HOMES) <= set(NUMBERS)
    assert set(rules.ELSEWHERE) <= set(NUMBERS)


@pytest.mark.parametrize("place", [p for places in rules.ELSEWHERE.values() for p in places])
def test_a_test_that_is_named_is_there(place):
    file, name = place.split("::")
    text = (rules.ROOT / "tests" / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {name}\(", text, re.MULTILINE), place


def test_a_home_is_marked_in_its_own_module_head():
    """Where a rule has its home, its reason stands: the module's head speaks of it."""
    silent = []
    for number, (place, *_) in HOMES.items():
        text = (rules.ROOT / "syncer" / place.split("::")[0]).read_text(encoding="utf-8")
        head = text.split('"""')[1]
        spans = re.findall(r"rule (\d+)\.(\d+) to rule (?:\d+)\.(\d+)", head)
        section, at = number.split(".")
        within = any(section == s and int(a) <= int(at) <= int(b) for s, a, b in spans)
        if not (within or re.search(rf"rule {re.escape(number)}(?!\d)", head)):
            silent.append(f"{place}: {number}")
    assert not silent, silent
