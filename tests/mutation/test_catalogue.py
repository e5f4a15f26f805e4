"""The mistakes of the catalogue can be made: what each one replaces stands in its file once."""

from pathlib import Path

import pytest

from tests.mutation.catalogue import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mistake)
def test_a_mistake_can_be_made(mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.old != mutation.new
