"""Numbers of the wire protocol, version 4, and the byte lengths that follow from them.

Must not parse, allocate or know a peer: every other module of this room builds on it.
"""

from __future__ import annotations

from enum import IntEnum

MAGIC = 0xD170C0DE
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
PROTOCOL_VERSION = 4
FINALIZATION_REVISION = 1

HEADER_BYTES = 13
"""magic u32, type u8, payload length u64."""
CHUNK_HEAD_BYTES = 24
"""msg_id u64, total_len u64, offset u64; the piece follows."""
CHUNK_SIZE = 4 * 1024 * 1024
"""Bytes of the inner frame (header included) that one CHUNK carries at most."""
PARTIAL_MESSAGES_MAX = 64
"""Messages of one connection group and direction that may be in reassembly at a time."""
OPEN_BYTES_FLOOR = 2 * 1024**3
"""Declared totals in reassembly per group: at most this, or four of the largest message."""
HELLO_FRAME_BYTES_MAX = 16 * 1024 * 1024
ERROR_FRAME_BYTES_MAX = 65_536
FRAME_BYTES_MAX = 2**63 - 1
"""Largest payload length any limit may reach: what a signed size can address."""
STREAMS_MAX = 256

COMPAT_MAGIC = b"YCG1"
COMPAT_GROUP_BYTES_MAX = 64
HASH_BYTES = 32
HELLO_MAC_DOMAIN = b"yeto-hello-mac-v1\0"
LAYOUT_DOMAIN = b"yeto-layout-v1\0"
RL_CONTRACT_DOMAIN = b"yeto-rl-session-contract-v2\0"
PROFILE_DOMAIN = b"yeto-syncer-semantic-profile-v1\0"


class Msg(IntEnum):
    """Message types; the value is the type byte of the frame header."""

    HELLO = 1
    INIT_PARAMS = 2
    PULL_REQ = 3
    PUSH_FRAGMENT = 4
    BCAST_FRAGMENT = 5
    HEARTBEAT = 6
    SHUTDOWN = 7
    DATA_HELLO = 8
    CHUNK = 9
    ERROR = 10
    FINAL_MANIFEST = 11
    FINAL_ACK = 12
    FINAL_FRAGMENT = 13
    BUDGET_DONE = 14


def msg_name(msg_type: int) -> str:
    """`9 (CHUNK)` for a known type, the bare number for any other."""
    try:
        return f"{msg_type} ({Msg(msg_type).name})"
    except ValueError:
        return str(msg_type)


DTYPE_F32, DTYPE_BF16, DTYPE_Q4 = 1, 2, 3
DTYPES = {DTYPE_F32: "f32", DTYPE_BF16: "bf16", DTYPE_Q4: "q4"}
Q4_BLOCK = 256
Q4_BLOCK_BYTES = 132
"""One q4 block: an f32 scale and 256 values of four bits."""


def bulk_dtype(dtype: int) -> int:
    """Element type of INIT and BCAST tensors in a session of `dtype`: q4 packs deltas only."""
    return DTYPE_BF16 if dtype == DTYPE_Q4 else dtype


def tensor_bytes(numel: int, dtype: int) -> int:
    """Wire bytes of `numel` elements in `dtype` (q4: whole blocks, the last one padded)."""
    if dtype == DTYPE_F32:
        return 4 * numel
    if dtype == DTYPE_BF16:
        return 2 * numel
    return -(-numel // Q4_BLOCK) * Q4_BLOCK_BYTES


# Payload bytes before the tensor (bulk messages), or of the whole payload (small ones).
INIT_HEAD_BYTES = 4
PULL_BYTES = 16
PUSH_HEAD_BYTES = 48
BCAST_HEAD_BYTES = 12
FINAL_HEAD_BYTES = 12
HEARTBEAT_BYTES = 12
DATA_HELLO_BYTES = 16
MANIFEST_HEAD_BYTES = 14
FINAL_ACK_BYTES = 10
BUDGET_DONE_BYTES = 8
