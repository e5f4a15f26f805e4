"""Parameter server and learner library for Decoupled DiLoCo training.

`python -m syncer.server` runs the server; `from syncer.learner import Learner` joins a run.
This module must load no room, so that importing one never loads another.
"""

from syncer import unbuilt

__version__ = "0.1.0"

unbuilt.install()
