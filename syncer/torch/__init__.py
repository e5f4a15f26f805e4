"""The PyTorch side: `Diloco` makes a training loop an island of a run in two lines.

Must not know the protocol: `syncer.learner` does, and sees of a model what a `Holding` shows.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "syncer.torch needs PyTorch, which is not installed for this Python; install it with: "
        "pip install 'diloco-syncer[torch]'", name="torch") from None

from syncer.learner import ConnectionFailed, RunLost, RunMismatch, Status
from syncer.torch.island import Diloco
from syncer.torch.ranks import IslandBroken

__all__ = ["ConnectionFailed", "Diloco", "IslandBroken", "RunLost", "RunMismatch", "Status"]
