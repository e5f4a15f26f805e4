"""Tensors in the dtypes of the protocol, in plain operations of torch on any device.

The slow twin of the kernels on a CPU: the same bits for every finite value. Must not copy between
devices, or know what a fragment is.
"""

from __future__ import annotations

import torch

from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4, Q4_BLOCK, Q4_BLOCK_BYTES

ABSOLUTE = 0x7FFFFFFF
INFINITY = 0x7F800000
NOT_A_NUMBER = 0x7FC00000
THRESHOLDS = (0x3C3504F2, 0x3CB504F6, 0x3D3504F2, 0x3DB504F5, 0x3E3504F3, 0x3EB504F4, 0x3F3504F3)
"""Bits of |x| / scale from which the next level of q4 begins (wire 10.3)."""
SHARES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Of the scale that each level of q4 stands for."""


def pack(values: torch.Tensor, dtype: int) -> torch.Tensor:
    """The bytes of flat f32 values in a dtype of the protocol, as uint8 on their device."""
    if dtype == DTYPE_F32:
        return values.view(torch.uint8)
    if dtype == DTYPE_BF16:
        return values.to(torch.bfloat16).view(torch.uint8)
    return _pack_q4(values)


def widen(packed: torch.Tensor, dtype: int) -> torch.Tensor:
    """f32 values of bytes in a bulk dtype; f32 is seen where it is."""
    if dtype == DTYPE_F32:
        return packed.view(torch.float32)
    return packed.view(torch.bfloat16).to(torch.float32)


def unpack(packed: torch.Tensor, dtype: int, numel: int) -> torch.Tensor:
    """f32 values of what `pack` has made."""
    return _unpack_q4(packed, numel) if dtype == DTYPE_Q4 else widen(packed, dtype)


def blend(local: torch.Tensor, anchor: torch.Tensor, alpha: float) -> torch.Tensor:
    """`local` becomes f32(alpha)*local + f32(1-alpha)*anchor: two rounded products, one sum."""
    return local.mul_(alpha).add_(anchor * (1.0 - alpha))


def _pack_q4(values: torch.Tensor) -> torch.Tensor:
    blocks = -(-values.numel() // Q4_BLOCK)
    padded = torch.zeros(blocks * Q4_BLOCK, dtype=torch.float32, device=values.device)
    padded[:values.numel()] = values
    padded = padded.view(blocks, Q4_BLOCK)
    sizes = padded.view(torch.int32) & ABSOLUTE
    scale = sizes.amax(1, keepdim=True)
    scale[scale > INFINITY] = NOT_A_NUMBER
    safe = scale.view(torch.float32).clone()
    safe[~(safe > 0)] = 1.0
    ratio = sizes.view(torch.float32) / safe
    bits = torch.where(ratio > 0, ratio, 0.0).view(torch.int32)  # not of NaN either
    nibbles = torch.zeros((blocks, Q4_BLOCK), dtype=torch.uint8, device=values.device)
    for threshold in THRESHOLDS:
        nibbles += bits >= threshold
    nibbles |= ((padded < 0) & (nibbles > 0)).to(torch.uint8) << 3
    pairs = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return torch.cat((scale.view(torch.uint8), pairs), dim=1).view(-1)


def _unpack_q4(packed: torch.Tensor, numel: int) -> torch.Tensor:
    blocks = packed.view(-1, Q4_BLOCK_BYTES)
    scale = blocks[:, :4].contiguous().view(torch.float32)
    pairs = blocks[:, 4:]
    nibbles = torch.stack((pairs & 15, pairs >> 4), dim=2).view(len(blocks), Q4_BLOCK)
    levels = torch.tensor(SHARES, dtype=torch.float32, device=packed.device)
    values = levels[(nibbles & 7).to(torch.int64)] * scale
    return torch.where(nibbles > 7, -values, values).view(-1)[:numel]
