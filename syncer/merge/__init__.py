"""What the server computes from the pushes of a round; must not know sockets or rounds."""

from syncer.merge.correction import HelocoConstants
from syncer.merge.folds import FOLDS, Fold
from syncer.merge.fragments import FragmentStore
from syncer.merge.optimizers import OPTIMIZERS
from syncer.merge.versions import FragmentVersion, Prepared

__all__ = ["FOLDS", "OPTIMIZERS", "Fold", "FragmentStore", "FragmentVersion", "HelocoConstants",
           "Prepared"]
