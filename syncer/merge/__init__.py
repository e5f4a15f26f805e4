"""What the server computes from the pushes of a round; must not know sockets or rounds."""

from syncer.merge.folds import Fold
from syncer.merge.fragments import FragmentStore
from syncer.merge.optimizers import OPTIMIZERS
from syncer.merge.versions import FragmentVersion, Prepared
from syncer.ranges import HelocoConstants

__all__ = ["OPTIMIZERS", "Fold", "FragmentStore", "FragmentVersion", "HelocoConstants", "Prepared"]
