"""The mistakes of the catalogue can be made: what each one replaces stands in its file once."""

from pathlib import Path

import pytest

import syncer.core
from tests.mutation.catalogue import MUTATIONS

CORE = Path(syncer.core.__file__).parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mistake)
def test_a_mistake_can_be_made(mutation):
    text = (CORE / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.old != mutation.new
