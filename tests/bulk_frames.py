"""Bulk messages as one frame each, copied: what tests send where production sends CHUNKs."""

from __future__ import annotations

from syncer.protocol import Msg
from syncer.wire import messages as m
from syncer.wire.encode import (
    bare_message,
    bcast_head,
    change_head,
    final_head,
    init_head,
    push_head,
)


def encode_init(init: m.Init) -> bytes:
    """INIT_PARAMS as one frame."""
    return b"".join(bare_message(Msg.INIT_PARAMS, init_head(init.fragment), init.tensor))


def encode_push(push: m.Push) -> bytes:
    """PUSH_FRAGMENT as one frame."""
    return b"".join(bare_message(Msg.PUSH_FRAGMENT, push_head(push), push.delta))


def encode_bcast(bcast: m.Bcast) -> bytes:
    """BCAST_FRAGMENT as one frame."""
    head = bcast_head(bcast.fragment, bcast.version)
    return b"".join(bare_message(Msg.BCAST_FRAGMENT, head, bcast.tensor))


def encode_change(change: m.BcastChange) -> bytes:
    """BCAST_CHANGE as one frame."""
    head = change_head(change.fragment, change.base, change.version)
    return b"".join(bare_message(Msg.BCAST_CHANGE, head, change.delta))


def encode_final_fragment(final: m.FinalFragment) -> bytes:
    """FINAL_FRAGMENT as one frame."""
    head = final_head(final.fragment, final.version)
    return b"".join(bare_message(Msg.FINAL_FRAGMENT, head, final.tensor))
