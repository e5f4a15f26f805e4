"""An island in Lightning's `Trainer`: fits y = x1 - 2 x2 + 3 x3 + 0.5 to noisy points of its own.

    python examples/lightning_line.py LEARNER_ID HOST:PORT

`pip install lightning`.
"""

import sys
from collections.abc import Iterator

import lightning as L
import torch

from syncer.torch.trainers.lightning import LightningIsland


class Points(torch.utils.data.IterableDataset):
    """Without an end: the run decides when training is over."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            inputs = torch.randn(3)
            target = inputs @ torch.tensor([1.0, -2.0, 3.0]) + 0.5 + 0.1 * torch.randn(())
            yield inputs, target.unsqueeze(0)


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(3, 1)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.line(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.0)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    learner_id, address = int(sys.argv[1]), sys.argv[2]
    torch.manual_seed(learner_id)  # every island has its own data
    model = Line()
    trainer = L.Trainer(
        max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[LightningIsland(address, learner_id=learner_id, run="line")])
    trainer.fit(model, torch.utils.data.DataLoader(Points(), batch_size=64))
    print(model.line.weight.tolist(), model.line.bias.tolist())  # the same in every island


if __name__ == "__main__":
    main()
