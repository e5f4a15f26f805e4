"""The learner side: `Learner` for NumPy loops, on a sans-IO session and a threaded client.

Must not know the server's rounds or merges; kernels run single-threaded here.
"""

from syncer.learner.failures import ConnectionFailed, RunLost, RunMismatch
from syncer.learner.learner import Learner, Status
from syncer.learner.partition import build_layout, layout_fingerprint, load_layout, save_layout

__all__ = ["ConnectionFailed", "Learner", "RunLost", "RunMismatch", "Status", "build_layout",
           "layout_fingerprint", "load_layout", "save_layout"]
