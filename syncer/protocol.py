"""The numbers and names of the protocol, version 4, each once; every room may import them.

Must not parse, allocate, know a peer, or import any room. The fields of a message are in its
Struct, in wire.messages.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

MAGIC = 0xD170C0DE
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
PROTOCOL_VERSION = 4
FINALIZATION_REVISION = 1

FRAME_HEADER = Struct("<IBQ")
"""magic, message type, payload length."""
HEADER_BYTES = FRAME_HEADER.size
CHUNK_HEAD = Struct("<QQQ")
"""msg_id, total length, offset; the piece follows."""
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
EXTENSION_MAGIC = b"SYX1"
EXTENSION_REVISION = 1
WELCOME_WITH_CHANGES = 2
"""Revision of a WELCOME that says that broadcasts may come as changes."""
EXTENSION_BYTES_MAX = 8 * 1024 * 1024
WELCOME_BYTES_MAX = 4096
"""And a byte for each fragment."""
NOTICE_TEXT_BYTES_MAX = 1024
REPORT_BYTES_MAX = 1024
RUN_NAME = "[A-Za-z0-9._-]{1,64}"
"""What a run may be called, as a pattern,"""
RUN_NAME_RULE = "1 to 64 of the characters A-Z a-z 0-9 . _ -"
"""and in words."""
NO_TENSOR_NAME = "__metadata__"
"""A safetensors file keeps this name for itself: no parameter is called so."""
HASH_BYTES = 32
# What a hash is of stands in front of what is hashed.
HELLO_MAC_DOMAIN = b"yeto-hello-mac-v1\0"
DATA_MAC_DOMAIN = b"syncer-data-mac-v1\0"
LAYOUT_DOMAIN = b"yeto-layout-v1\0"
RL_CONTRACT_DOMAIN = b"yeto-rl-session-contract-v2\0"
RUN_CONTRACT_DOMAIN = b"syncer-run-v1\0"
PROFILE_DOMAIN = b"yeto-syncer-semantic-profile-v1\0"
KEY_VARIABLES = ("SYNCER_HMAC_KEY", "YETO_ISLAND_HMAC_KEY")
"""Environment variables that may hold the island key, the first one that is set."""


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
    # Between those that have sent the block of extension.py alone.
    WELCOME = 15
    NOTICE = 16
    REPORT = 17
    LAYOUT = 18
    BCAST_CHANGE = 19
    PUSH_FATE = 20


class RunState(IntEnum):
    """Where the run is when somebody joins it."""

    WAITING = 0
    RUNNING = 1
    FINISHING = 2


class NoticeCode(IntEnum):
    """What a notice is about."""

    LEARNERS = 1
    INITIAL_VALUES = 2
    ANSWERS = 3
    """Of a round."""
    FILE = 4
    CLAIMED_TWICE = 5
    """One learner id, from two addresses."""
    OTHER = 6


class PushFate(IntEnum):
    """What became of the answer to a pull; only the first one is a merge."""

    MERGED = 0
    NOT_COME = 1
    """It has not come, and a later pull of the fragment is about to."""
    OUT_OF_ROUND = 2
    UNEXPECTED_MEMBER = 3
    FUTURE_BASE = 4
    STALE_BASE = 5
    DUPLICATE = 6
    CARRIED = 7
    """It was late, and may be merged in a later round."""
    GIVEN_UP = 8
    """With the attempt that it was for."""
    LEFT_OUT = 9
    """The merge would not have been finite with it."""


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

