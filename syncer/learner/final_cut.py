"""The final cut as it arrives at a learner: fragments and manifest, in any order, with repeats.

Wire 11.4 and 14.2. Must not apply it or answer for it.
"""

from __future__ import annotations

from syncer.errors import RemoteProtocolError
from syncer.learner.changes import Digest
from syncer.wire.messages import Bcast, FinalFragment, Manifest


def is_news(message: Bcast | FinalFragment, digest: Digest,
            seen: tuple[int, Digest] | None, name: str) -> bool:
    """Whether a version of a fragment is newer than the one seen before.

    digest: SHA-256 of its tensor. An equal version with equal bytes is a replay. Raises
    `RemoteProtocolError` for an equal version with other bytes.
    """
    if seen is None or message.version > seen[0]:
        return True
    if message.version == seen[0] and digest != seen[1]:
        raise RemoteProtocolError(
            f"{name} fragment {message.fragment} version {message.version} came with other bytes "
            f"than before: SHA-256 first {bytes(seen[1]).hex()}, now {bytes(digest).hex()}")
    return False


class ArrivingCut:
    """The newest final version of every fragment, and the manifest that says which make the cut."""

    def __init__(self, fragments: int):
        self.manifest: Manifest | None = None
        self._seen: list[tuple[int, Digest] | None] = [None] * fragments
        self._tensors: dict[int, memoryview] = {}

    def take(self, message: FinalFragment, digest: Digest) -> bool:
        """True if it is news. Raises as `is_news`."""
        if not is_news(message, digest, self._seen[message.fragment], "FINAL_FRAGMENT"):
            return False
        self._seen[message.fragment] = message.version, digest
        self._tensors[message.fragment] = message.tensor
        return True

    def take_manifest(self, manifest: Manifest) -> bool:
        """True if it is the first one. Raises `RemoteProtocolError` when it has changed."""
        if self.manifest is not None:
            if manifest == self.manifest:
                return False
            raise RemoteProtocolError(
                f"FINAL_MANIFEST changed: this learner has the final cut of step "
                f"{self.manifest.step} (versions {_versions(self.manifest)}), and the server sends "
                f"one of step {manifest.step} (versions {_versions(manifest)}): the run has gone "
                "back or on behind it; start this learner again")
        self.manifest = manifest
        return True

    def missing(self) -> list[int]:
        """Fragments whose version of the manifest is not here; all while there is no manifest."""
        if self.manifest is None:
            return list(range(len(self._seen)))
        return [fragment for fragment, (seen, version) in enumerate(
                    zip(self._seen, self.manifest.versions, strict=True))
                if seen is None or seen[0] != version]

    def tensors(self) -> list[memoryview] | None:
        """The f32 bytes of every fragment, once they are exactly the manifest's versions."""
        if self.missing():
            return None
        return [self._tensors[fragment] for fragment in range(len(self._seen))]


def _versions(manifest: Manifest) -> str:
    """The first of them."""
    shown = ", ".join(map(str, manifest.versions[:4]))
    return shown + ", ..." * (len(manifest.versions) > 4)
