"""What learners are sent of each version where broadcasts go down as changes (--downlink q4).

It must not know who receives what: an outbox chooses between a change and the whole.

rule 18.1. Learners hold one *anchor* of each version, whoever they are. It is not the parameters:
    of those a change in 4 bits tells only so much. What it leaves out is in the next change, since
    that is taken from the anchor and not from the parameters before; so nothing drifts.
rule 18.2. An anchor is a value of the bulk dtype: who gets it whole, in a BCAST_FRAGMENT as ever,
    has the same bits as who has made it of a change, and the deltas of all are relative to one
    thing.
rule 18.3. What a change would make infinite is sent whole, and so is what there is no memory for:
    the anchor is then the parameters in the bulk dtype, as without this flag. The first anchors
    are, too, of the initial values or of what was resumed.

An anchor is computed by the worker that has merged, behind the merge: it is ready when the step
commits, and no socket waits for it.
"""

from __future__ import annotations

from syncer.kernels import encode_bf16, encode_change
from syncer.merge.buffers import BufferPool
from syncer.merge.versions import FragmentVersion
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Msg, tensor_bytes
from syncer.server.wire_version import CutOnce, Source
from syncer.server.workers import INLINE_ELEMENTS_MAX
from syncer.wire.encode import bcast_head, change_head


class ChangeImage(CutOnce):
    """A version as the change of the one before it."""

    __slots__ = ("base", "fragment", "version")
    change = None

    def __init__(self, source: Source, base: int, body: memoryview):
        self.fragment, self.base, self.version = source.fragment, base, source.version
        super().__init__(Msg.BCAST_CHANGE, change_head(source.fragment, base, source.version), body)


class AnchorImage(CutOnce):
    """A version as its whole anchor. `change`: what makes it of the anchor before."""

    __slots__ = ("change", "fragment", "version")

    def __init__(self, source: Source, body: memoryview, change: ChangeImage):
        self.fragment, self.version, self.change = source.fragment, source.version, change
        super().__init__(Msg.BCAST_FRAGMENT, bcast_head(source.fragment, source.version), body)


class Downlink:
    """The anchors of a run. dtype: bulk dtype of the session. `next` runs on workers, one at a time
    for each fragment."""

    def __init__(self, dtype: int, threads: int):
        self.dtype, self.threads = dtype, threads
        self.anchors: dict[int, AnchorImage] = {}
        """By fragment, of its current version; of one that is not here, it is the parameters."""
        self.pool = BufferPool()

    # rule 18.1
    def next(self, before: FragmentVersion, after: FragmentVersion) -> AnchorImage | None:
        """The anchor of what was merged; None: it is the parameters."""
        numel = len(after.params)
        threads = 1 if numel <= INLINE_ELEMENTS_MAX else self.threads
        try:
            body, delta = self._take(numel, self.dtype), self._take(numel, DTYPE_Q4)
            bad = encode_change(self.dtype, after.params, self._base(before, threads), delta, body,
                                threads)
        except MemoryError:
            return None
        if bad >= 0:  # rule 18.3
            return None
        return AnchorImage(after, body, ChangeImage(after, before.version, delta))

    def publish(self, fragment: int, anchor: AnchorImage | None) -> None:
        """A step has committed."""
        if anchor is None:
            self.anchors.pop(fragment, None)
        else:
            self.anchors[fragment] = anchor

    # rule 18.2
    def anchor_of(self, source: Source) -> AnchorImage | None:
        """Of a current version, whole; None: it is the parameters in the bulk dtype."""
        return self.anchors.get(source.fragment)

    # rule 18.3
    def _base(self, before: FragmentVersion, threads: int) -> memoryview:
        """The bytes that learners hold of the version before."""
        anchor = self.anchors.get(before.fragment)
        if anchor is not None:
            return anchor.body
        if self.dtype == DTYPE_F32:
            return before.params.data.cast("B")
        body = self._take(len(before.params), DTYPE_BF16)
        encode_bf16(before.params, body, threads)
        return body

    def _take(self, numel: int, dtype: int) -> memoryview:
        """Memory for so many elements. Raises MemoryError."""
        size = tensor_bytes(numel, dtype)
        return memoryview(self.pool.take(-(-size // 4))).cast("B")[:size]
