"""The soak, as short as it still says something; `make soak` is the long one."""

import pytest

from .soak import soak


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_soak(tmp_path):
    assert soak(tmp_path, 25.0, seed=1) == []
