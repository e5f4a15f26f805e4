"""An island beside a scripted server, and what several files of this tier start from."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; .ci/torch runs these tests")

import numpy as np  # noqa: E402

from syncer.torch import Diloco  # noqa: E402
from tests.e2e.scripted_server import ScriptedServer  # noqa: E402
from tests.e2e.waiting import until  # noqa: E402

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = ["cpu", CUDA]


def line_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))


class Place:
    """One model, its optimizer and its island at a server that does what a test says."""

    def __init__(self, server: ScriptedServer, model=None, optimizer=None, **options):
        self.server = server
        self.model = line_model() if model is None else model
        self.optimizer = (torch.optim.SGD(self.model.parameters(), lr=0.1)
                          if optimizer is None else optimizer)
        self.island = Diloco(
            self.model, self.optimizer, server.address,
            **{"learner_id": 0, "dtype": "f32", "fragments": 2, "num_streams": 0} | options)

    def __enter__(self) -> Place:
        self.island.__enter__()
        self.peer = self.server.accept()
        return self

    def __exit__(self, *_) -> None:
        self.island.__exit__(AssertionError, None, None)

    @property
    def numels(self) -> list[int]:
        return [fragment.numel for fragment in self.island._joined().layout.fragments]

    def train(self, tokens: int = 7) -> None:
        """One step of an ordinary loop."""
        inputs = torch.ones(2, 4, device=next(self.model.parameters()).device)
        self.model(inputs).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.island.tokens(tokens)

    def broadcast(self, version: int = 0, fill: float = 0.0) -> None:
        """Every fragment, all of one value, and steps until all are applied."""
        for fragment, numel in enumerate(self.numels):
            self.peer.bcast(fragment, version, np.full(numel, fill, "<f4"))
        self.until(lambda: min(self.island.status.versions) >= version
                   and not self.island._joined()._session.unapplied())

    def until(self, reached) -> None:
        def trained() -> bool:
            self.train()
            return reached()

        until(trained, "what the loop trains for")

    def final(self, version: int, fill: float) -> None:
        """The final cut, all of one value."""
        for fragment, numel in enumerate(self.numels):
            self.peer.final(fragment, version, np.full(numel, fill, "<f4"))
        self.peer.manifest(version, [version] * len(self.numels))


def values(model) -> list[float]:
    return torch.cat([p.detach().float().reshape(-1).cpu() for p in model.parameters()]).tolist()
