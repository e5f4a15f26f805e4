"""A complete island in PyTorch: fits y = x1 - 2 x2 + 3 x3 + 0.5 to noisy points of its own.

    python examples/torch_line.py LEARNER_ID HOST:PORT
"""

import sys

import torch

from syncer.torch import Diloco

if len(sys.argv) != 3:
    sys.exit("usage: python examples/torch_line.py LEARNER_ID HOST:PORT")
learner_id, address = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(learner_id)  # every island has its own data
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)

with Diloco(model, optimizer, address, learner_id=learner_id, run="line") as island:
    while not island.finished:
        inputs = torch.randn(64, 3)
        targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0]]) + 0.5 + 0.1 * torch.randn(64, 1)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        island.tokens(len(inputs))

print(model.weight.tolist(), model.bias.tolist())  # the merged model, the same in every island
