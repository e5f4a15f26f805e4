"""`SyncerCallback`: an island in the `Trainer` of Hugging Face, and in every trainer made of it.

Must not change what the trainer does but for its end.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from syncer.errors import ConfigError
from syncer.torch.island import Diloco
from syncer.torch.trainers.participation import Participation, Tracker

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "syncer.torch.trainers.huggingface needs transformers; install it with: "
        "pip install 'transformers[torch]'", name="transformers") from None

ISLAND_FILE = "syncer_island.pt"
"""In a checkpoint of the trainer: what `Diloco.state_dict` gives."""


class SyncerCallback(TrainerCallback):  # type: ignore[misc]  # of a library without types here
    """Joins when training begins, trains until the run is over, and ends with its final model.

        trainer = Trainer(model, args, train_dataset=data,
                          callbacks=[SyncerCallback("host:29400", learner_id=0)])

    What of the model is trained then is in the run. The trainer stops when the run is over, and has
    the final model before it evaluates and saves for the last time; one that is through early waits
    for the others. A checkpoint of the trainer gets the state of the island, and resuming from
    one goes on from there: `resume_from` names the folder where it is not the trainer's own.

    tokens_per_step: of each optimizer step; None: the trainer counts input tokens, and says so in
    its logs. trackers: see `syncer.torch.trackers`. Everything else: as in `Diloco`.

    As a context manager around `train()` it leaves the run when that raises; without, the end of
    the process does.
    """

    def __init__(self, address: str, *, learner_id: int = 0, tokens_per_step: int | None = None,
                 resume_from: str | os.PathLike[str] | None = None,
                 trackers: Sequence[Tracker] = (), **options: Any):
        self._participation = Participation(address, trackers, options | {
            "learner_id": learner_id, "tokens_per_step": tokens_per_step})
        self._resume_from = resume_from
        self._counted = 0
        """Input tokens of the trainer that the island knows of."""

    @property
    def island(self) -> Diloco | None:
        """From the begin of training on."""
        return self._participation.island

    def __enter__(self) -> SyncerCallback:
        return self

    def __exit__(self, *_: object) -> None:
        self._participation.leave()

    # --- what the trainer calls ------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None,
                       optimizer: Any = None, **_: Any) -> None:
        if args.load_best_model_at_end:
            raise ConfigError("load_best_model_at_end would put a model of this island alone in "
                              "the place of the run's final model; leave it out")
        if self._participation.counts_tokens and args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "all"
        self._counted = state.num_input_tokens_seen
        self._participation.join(model, optimizer, self._saved(args, state))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step that a grad scaler skips leaves its tokens to the next one. The trainer has
        counted those of all its processes, and each says a share."""
        island = self._participation.inside
        if island is not None and self._participation.counts_tokens:
            share, rest = divmod(state.num_input_tokens_seen - self._counted, args.world_size)
            self._counted = state.num_input_tokens_seen
            island.tokens(share + (rest if args.process_index == 0 else 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before what the trainer evaluates and saves at this step."""
        island = self._participation.inside
        if island is None or not (island.finished or control.should_training_stop):
            return
        self._participation.finish()
        if not control.should_training_stop:
            control.should_training_stop = True
            control.should_evaluate |= args.eval_strategy == "steps"
            control.should_save |= args.save_strategy == "steps"

    def on_log(self, args: Any, state: Any, control: Any, *,
               logs: Mapping[str, float] | None = None, **_: Any) -> None:
        island = self._participation.inside
        if island is not None and logs is not None and "loss" in logs:
            island.report(loss=logs["loss"], lr=logs.get("learning_rate"))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing at the end of the run: there is nothing to go on with."""
        if (island := self._participation.inside) is not None:
            torch.save(island.state_dict(), _folder(args, state) / _file(args))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._participation.finish()

    def _saved(self, args: Any, state: Any) -> Mapping[str, Any] | None:
        """The island's part of the checkpoint that the trainer has resumed from."""
        if not state.global_step:
            return None
        folder = _folder(args, state) if self._resume_from is None else Path(self._resume_from)
        file = folder / _file(args)
        if not file.exists():
            warnings.warn(
                f"the trainer goes on from step {state.global_step}, and {folder} has no "
                f"{file.name}: the island begins with the values of the run "
                "(SyncerCallback(resume_from=...) names the folder)", stacklevel=2)
            return None
        found: Mapping[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return found


def _file(args: Any) -> str:
    """Of this process."""
    return ISLAND_FILE if args.process_index == 0 else f"{args.process_index}_{ISLAND_FILE}"


def _folder(args: Any, state: Any) -> Path:
    """Where the trainer keeps a checkpoint of this step."""
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
