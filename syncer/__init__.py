"""Parameter server and learner library for Decoupled DiLoCo training.

`python -m syncer.server` runs the server; `from syncer.learner import Learner` joins a run.
This module must stay empty of code, so that importing one room never loads another.
"""

__version__ = "0.1.0"
