"""A run of scripted learners whose deltas follow from the step, so that its files do, too."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from syncer.checkpoint.reader import Checkpoint
from syncer.wire import messages
from tests.e2e.scripted import (
    MIXED,
    ScriptedLearner,
)

STEPS = 9
INIT = [np.linspace(-1, 1, f.numel, dtype=np.float32) for f in MIXED.fragments]


def delta(learner: int, step: int) -> np.ndarray:
    """The same delta for the same step, whoever asks and when."""
    numel = MIXED.fragments[(step - 1) % len(MIXED.fragments)].numel
    return np.random.default_rng([learner, step]).standard_normal(numel).astype(np.float32)


def answer(learner: ScriptedLearner, pull: messages.Pull) -> None:
    learner.push(pull, delta(learner.learner, pull.step), local_step=pull.step,
                 c_steps=1 + learner.learner, c_tokens=100 + pull.step)


def train(learner: ScriptedLearner, steps: int) -> None:
    """Answer the pulls of the next steps."""
    for _ in range(steps):
        answer(learner, learner.pull())


def start(learner: ScriptedLearner) -> ScriptedLearner:
    learner.send_init(INIT)
    return learner


def cut_in(data: bytes) -> tuple[dict[str, Any], bytes]:
    """What a checkpoint holds, whichever process wrote it: its header without what tells that, its
    steps without what was added to them, and the bytes of its tensors."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header["__metadata__"]
    for key in ("epoch", "lineage", "header_sha256"):
        del metadata[key]
    added = int(metadata.pop("renumbered", "0"))
    metadata["global_step"] = int(metadata["global_step"]) - added
    metadata["versions"] = [max(0, version - added) for version in json.loads(metadata["versions"])]
    return header, data[end:]


def facts_of(path):
    with Checkpoint(path) as checkpoint:
        checkpoint.load()
        return checkpoint.facts


def flags(path, every: int, *more: str) -> tuple[str, ...]:
    return ("--checkpoint-path", str(path), "--checkpoint-every", str(every), "--pipeline", "1",
            *more)
