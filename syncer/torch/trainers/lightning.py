"""`LightningIsland`: an island in a Lightning `Trainer`, as one of its callbacks.

Must not change what the trainer does but for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncer.errors import ConfigError
from syncer.torch.island import Diloco
from syncer.torch.trackers import MergeFigures
from syncer.torch.trainers.participation import Participation, Tracker

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.data import extract_batch_size
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lightning":
        raise
    raise ModuleNotFoundError(
        "syncer.torch.trainers.lightning needs Lightning; install it with: "
        "pip install lightning", name="lightning") from None


class LightningIsland(Callback):  # type: ignore[misc]  # of a library without types here
    """Joins when training begins, trains until the run is over, and ends with its final model.

        trainer = L.Trainer(max_epochs=-1, callbacks=[LightningIsland("host:29400", learner_id=0)])

    What of the module is trained then is in the run, by the steps of its last optimizer, automatic
    or manual. The trainer stops when the run is over, with the final model before the callbacks
    that save checkpoints are asked; one that is through early waits for the others. An exception
    in `fit`, Ctrl-C too, leaves the run. Checkpoints of the trainer have the state of the island.

    tokens_per_step: of each optimizer step. tokens: counts those of a batch; without either,
    samples are counted, as Lightning does. The trainer's loggers get what `syncer.torch.trackers`
    knows of each merge; trackers: others. Everything else: as in `Diloco`.
    """

    def __init__(self, address: str, *, learner_id: int = 0, tokens_per_step: int | None = None,
                 tokens: Callable[[Any], int] | None = None, trackers: Sequence[Tracker] = (),
                 **options: Any):
        if tokens is not None and tokens_per_step is not None:
            raise ConfigError("give tokens or tokens_per_step, not both")
        self._participation = Participation(address, trackers, options | {
            "learner_id": learner_id, "tokens_per_step": tokens_per_step})
        self._tokens_of = extract_batch_size if tokens is None else tokens
        self._state: Mapping[str, Any] | None = None

    @property
    def island(self) -> Diloco | None:
        """From the begin of training on."""
        return self._participation.island

    # --- what the trainer calls ------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.min_epochs or trainer.min_steps:
            raise ConfigError("min_epochs and min_steps would train on when the run is over; leave "
                              "them out")
        state, self._state = self._state, None
        island = self._participation.join(pl_module, trainer.optimizers, state)
        figures = MergeFigures(island)

        @island.on_merge
        def _log(status: Any) -> None:
            found = figures(status)
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any,
                             batch_idx: int) -> None:
        island = self._participation.inside
        if island is not None and self._participation.counts_tokens:
            island.tokens(self._tokens_of(batch))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any,
                           batch_idx: int) -> None:
        """Before the callbacks that save."""
        island = self._participation.inside
        if island is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            island.report(loss=loss)
        if island.finished:
            trainer.should_stop = True
        if trainer.should_stop or trainer.global_step == trainer.max_steps:
            self._participation.finish()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """As `on_train_batch_end`."""
        if trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs:
            self._participation.finish()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._participation.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._participation.leave()

    def state_dict(self) -> dict[str, Any]:
        """Nothing at the end of the run: there is nothing to go on with."""
        island = self._participation.inside
        return {} if island is None else island.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict or None
