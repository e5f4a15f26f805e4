"""Every scenario file says exactly what the scheduler does."""

import difflib
from itertools import chain

import pytest

from tests.scenarios.numbers import ELSEWHERE, LAST, TESTS, places
from tests.scenarios.runner import FILES, rewrite


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path):
    old = path.read_text()
    new = rewrite(old)
    difference = "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(),
                                                "expected", "happened", lineterm=""))
    assert new == old, f"{path.name} (see python -m tests.scenarios):\n{difference}"


def test_files_are_there():
    assert len(FILES) > 30


def test_every_numbered_scenario_is_tested():
    assert [number for number in range(1, LAST + 1) if not places(number)] == []
    for place in chain.from_iterable(ELSEWHERE.values()):
        file, name = place.split("::")
        assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), place
