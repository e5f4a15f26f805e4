"""What the server computes from the pushes of a round; must not know sockets or rounds."""

from syncer.merge.correction import HelocoConstants
from syncer.merge.fragments import FragmentStore, FragmentVersion, Prepared

__all__ = ["FragmentStore", "FragmentVersion", "HelocoConstants", "Prepared"]
