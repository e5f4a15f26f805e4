"""`LightningIsland` in a real trainer at a real server."""

import pytest

from tests.torch.island import torch  # isort: split

import csv
import importlib
import sys
import threading
import time

import numpy as np

lightning = pytest.importorskip("lightning", reason="needs lightning; .ci/torch has it")

from syncer.errors import ConfigError, LocalProtocolError  # noqa: E402
from syncer.learner import Learner  # noqa: E402
from syncer.torch.trainers.lightning import LightningIsland  # noqa: E402
from tests.e2e.scripted import ServerProcess  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries say to each other


class Line(lightning.LightningModule):
    """Automatic, or by hand with two optimizers in turn."""

    def __init__(self, manual: bool = False):
        super().__init__()
        self.parts = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        self.automatic_optimization = not manual

    def training_step(self, batch):
        loss = self.parts(batch).square().mean()
        if self.automatic_optimization:
            return loss
        optimizers = self.optimizers()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self):
        if self.automatic_optimization:
            return torch.optim.SGD(self.parameters(), lr=0.01)
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in self.parts]


class Ones(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(4)


DATA = torch.utils.data.DataLoader(Ones(), batch_size=8)


def trainer_of(folder, callbacks, **options):
    return lightning.Trainer(**{
        "default_root_dir": folder, "max_epochs": -1, "accelerator": "cpu", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "callbacks": callbacks} | options)


def island_at(server, **options) -> LightningIsland:
    return LightningIsland(f"127.0.0.1:{server.port}", **{"fragments": 2} | options)


def counted(callback) -> tuple[int, int]:
    session = callback.island._joined()._session
    return session.steps, session.tokens


@pytest.mark.parametrize(("options", "manual", "samples"), [
    ({}, False, 8), ({"accumulate_grad_batches": 3}, False, 24), ({}, True, 8)])
def test_a_run_ends_the_training_with_its_final_model(tmp_path, options, manual, samples):
    """Which is in the last checkpoint, too; steps are those of the (last) optimizer."""
    saver = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path / "logs")
    with ServerProcess(tmp_path, "--sync-interval-steps", "2", "--event-tape",
                       str(tmp_path / "tape"), steps=12) as server:
        callback = island_at(server)
        trainer = trainer_of(tmp_path, [saver, callback], enable_checkpointing=True,
                             logger=logger, **options)
        model = Line(manual)
        trainer.fit(model, DATA)
        assert server.wait() == 0
    steps, tokens = counted(callback)
    assert steps > 0
    assert tokens == samples * steps
    newest = max((tmp_path / "saved").glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
    saved = torch.load(newest, weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    logger.save()
    [figures] = (tmp_path / "logs").rglob("metrics.csv")
    rows = list(csv.DictReader(figures.open()))
    assert {"island/version", "island/merges", "island/bytes_sent"} <= rows[0].keys()
    assert '"loss":' in (tmp_path / "tape").read_text().replace('"loss":null', "")


def train_on(server, shapes) -> None:
    """Another learner of the run, which makes steps to its end."""
    arrays = {name: np.zeros(shape, "f4") for name, shape in shapes.items()}
    with Learner(arrays, f"127.0.0.1:{server.port}", learner_id=1, fragments=2) as learner:
        learner.adopt()
        while not learner.step(8).finished:
            time.sleep(0.001)
        learner.finish()


@pytest.mark.parametrize("end", [{"max_steps": 5}, {"max_epochs": 1, "limit_train_batches": 5}])
def test_a_trainer_that_is_through_early_waits_for_the_end(tmp_path, end):
    """And its last checkpoint has the final model."""
    saver = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_epochs=1)
    model = Line()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    with ServerProcess(tmp_path, "--min-round-interval-ms", "20", "--final-state",
                       str(tmp_path / "final"), learners=2, steps=30) as server:
        other = threading.Thread(target=train_on, args=(server, shapes))
        other.start()
        trainer = trainer_of(tmp_path, [saver, island_at(server)], enable_checkpointing=True,
                             **end)
        trainer.fit(model, DATA)
        other.join()
        assert server.wait() == 0
    final = (tmp_path / "final").read_bytes()
    for value in model.state_dict().values():
        assert value.numpy().tobytes() in final
    if "max_epochs" in end:
        [last] = (tmp_path / "saved").glob("*.ckpt")
        saved = torch.load(last, weights_only=True)["state_dict"]
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


class Failing(Line):
    """Raises in the middle of training."""

    def training_step(self, batch):
        if self.global_step == 7:
            raise ZeroDivisionError
        return super().training_step(batch)


def test_an_exception_leaves_the_run_and_a_checkpoint_goes_on(tmp_path):
    saver = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "saved", every_n_train_steps=4, filename="at")
    with ServerProcess(tmp_path, "--min-round-interval-ms", "20", "--max-base-lag", "1000",
                       steps=200) as server:
        first = island_at(server, tokens=len)
        with pytest.raises(ZeroDivisionError):
            trainer_of(tmp_path, [first, saver], enable_checkpointing=True).fit(Failing(), DATA)
        with pytest.raises(LocalProtocolError, match="was closed"):
            first.island._boundary()
        second = island_at(server, tokens=len)
        at_start = []

        class Ear(lightning.Callback):
            def on_train_start(self, trainer, module):
                at_start.append((trainer.global_step, second.island.status.step))

        trainer_of(tmp_path, [second, Ear()]).fit(
            Line(), DATA, ckpt_path=tmp_path / "saved/at.ckpt", weights_only=True)
        assert server.wait() == 0
    assert at_start == [(4, 4)]
    steps, tokens = counted(second)
    assert steps > 4
    assert tokens == 8 * steps


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not both"):
        LightningIsland("127.0.0.1:1", tokens=len, tokens_per_step=4)
    with pytest.raises(ConfigError, match="min_steps"):
        trainer_of(tmp_path, [LightningIsland("127.0.0.1:1")], min_steps=3).fit(Line(), DATA)


def test_without_the_library_there_is_one_sentence(monkeypatch):
    module = LightningIsland.__module__
    for name in [each for each in sys.modules if each.partition(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ModuleNotFoundError, match="pip install lightning"):
        importlib.import_module(module)
