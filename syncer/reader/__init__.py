"""The reading side: whole cuts of a run that goes on, for whoever evaluates, serves or keeps them.

Must not take part in a run: nothing that is sent from here changes a bit of it.
"""

from syncer.reader.pulling import LiveCut, PullFailed, cuts, pull

__all__ = ["LiveCut", "PullFailed", "cuts", "pull"]
