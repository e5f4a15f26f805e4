"""Every fuzz target by its name, which is that of its file in the corpus, too."""

from __future__ import annotations

from tests.fuzz import chunk_target, file_targets, session_target, wire_targets
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    **wire_targets.TARGETS, "chunks": chunk_target.TARGET,
    "session": session_target.TARGET, **file_targets.TARGETS}
