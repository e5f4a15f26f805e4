"""Every scenario file says exactly what the scheduler does."""

import difflib

import pytest

from tests.scenarios.runner import FILES, rewrite


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path):
    old = path.read_text()
    new = rewrite(old)
    difference = "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(),
                                                "expected", "happened", lineterm=""))
    assert new == old, f"{path.name} (see python -m tests.scenarios):\n{difference}"


def test_every_file_has_a_number_of_its_own():
    numbers = [path.stem.split("_")[0] for path in FILES]
    assert len(numbers) > 30
    assert sorted(numbers) == sorted(set(numbers))
