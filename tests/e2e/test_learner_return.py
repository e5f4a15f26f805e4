"""Who comes back is sent what it has not got: real learners, a real server, a link that goes away.

`python -m pytest benchmarks/bench_return.py -s` prints the figures of docs/learner.md.
"""

import pytest

from .returning import MODEL_BYTES, measured


@pytest.mark.slow
def test_who_comes_back_is_sent_what_it_has_not_got_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("syncer.learner.client.backoff_s", lambda attempt: 0.05)
    found = measured(tmp_path, 0.2)
    assert found.whole > MODEL_BYTES
    assert found.drop < found.whole / 100
    assert found.restart < found.whole / 100
