"""The tensor messages of a learner, INIT_PARAMS and PUSH_FRAGMENT, with their sizes checked.

A tensor is bytes here, packed by whoever owns it; must not touch them or know the session's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from syncer.errors import LocalProtocolError
from syncer.layout import Layout
from syncer.protocol import Msg, bulk_dtype, tensor_bytes
from syncer.wire.encode import init_head, push_head
from syncer.wire.messages import Push

if TYPE_CHECKING:
    from typing_extensions import Buffer


class TensorMessage(NamedTuple):
    """An outgoing message of a tensor; `body` must stay unchanged until it is sent."""

    msg_type: int
    head: bytes
    body: memoryview


class TensorMessages:
    """Makes them for one learner. Raises `LocalProtocolError` for what no syncer takes."""

    def __init__(self, learner: int, layout: Layout, dtype: int):
        self._learner = learner
        self._bulk_bytes = [tensor_bytes(f.numel, bulk_dtype(dtype)) for f in layout.fragments]
        self._delta_bytes = [tensor_bytes(f.numel, dtype) for f in layout.fragments]

    def init_bytes(self, fragment: int) -> int:
        """Bytes of an INIT tensor of this fragment."""
        return self._bulk_bytes[fragment]

    def push_bytes(self, fragment: int) -> int:
        """Bytes of a delta of this fragment."""
        return self._delta_bytes[fragment]

    def init(self, fragment: int, tensor: Buffer) -> TensorMessage:
        """INIT_PARAMS of one fragment; tensor: its bytes in the bulk dtype. Learner 0 only."""
        if self._learner != 0:
            raise LocalProtocolError(f"only learner 0 sends INIT_PARAMS, this is {self._learner}")
        body = _checked("INIT_PARAMS", fragment, tensor, self._bulk_bytes)
        return TensorMessage(Msg.INIT_PARAMS, init_head(fragment), body)

    def push(self, push: Push, delta: Buffer) -> TensorMessage:
        """PUSH_FRAGMENT for an `answer`; delta: its bytes in the session dtype."""
        body = _checked("PUSH_FRAGMENT", push.fragment, delta, self._delta_bytes)
        return TensorMessage(Msg.PUSH_FRAGMENT, push_head(push), body)


def _checked(name: str, fragment: int, body: Buffer, sizes: Sequence[int]) -> memoryview:
    if not 0 <= fragment < len(sizes):
        raise LocalProtocolError(f"{name} for fragment {fragment}, the layout has {len(sizes)}")
    view = memoryview(body)
    if view.nbytes != sizes[fragment]:
        raise LocalProtocolError(
            f"{name} fragment {fragment} has {view.nbytes} bytes, expected {sizes[fragment]}")
    return view
