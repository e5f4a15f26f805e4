"""Arithmetic on one fragment of a learner: anchor, blend, delta, packing; f32 throughout.

The local values are the caller's arrays and are changed in place. Kernels run single-threaded,
since trainers fork. Must not know rounds, versions or sockets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from syncer import kernels
from syncer.protocol import DTYPE_BF16, DTYPE_F32, bulk_dtype, tensor_bytes

Floats: TypeAlias = npt.NDArray[np.float32]
Packed: TypeAlias = npt.NDArray[np.uint8]

WINDOW = 256 * 256
"""Elements packed at a time: whole q4 blocks, and a scratch that stays in the cache."""


def checked_floats(values: Floats, numel: int) -> Floats:
    """A flat f32 copy; raises `ValueError` if there are more or fewer."""
    flat: Floats = np.array(values, np.float32).reshape(-1)
    if flat.size != numel:
        raise ValueError(f"{flat.size} values of a fragment that has {numel}")
    return flat


class Fragment:
    """Some parameters as one flat vector in wire order.

    tensors: C-contiguous, writable f32 arrays of any shape. dtype: that of the session.
    """

    def __init__(self, tensors: Sequence[Floats], dtype: int):
        self.numel = sum(tensor.size for tensor in tensors)
        self.anchor: Floats | None = None
        """f32, the exact values of the last broadcast; None before the first."""
        self.error: Floats | None = None
        """What the last delta has lost when it was packed; None: nothing that is to be carried."""
        self._feeds_back = False
        self._dtype = dtype
        self._locals = [tensor.reshape(-1) for tensor in tensors]
        self._offsets: list[int] = np.cumsum([0, *(tensor.size for tensor in tensors)]).tolist()
        if any(not np.shares_memory(flat, tensor)
               for flat, tensor in zip(self._locals, tensors, strict=True)):
            raise ValueError("parameters must be C-contiguous")

    def rebase(self, tensor: memoryview, alpha: float) -> None:
        """Takes a broadcast: it becomes the anchor, and the local values move towards it.

        tensor: its bytes in the bulk dtype. local = f32(alpha)*local + f32(1-alpha)*anchor, two
        rounded products and a rounded sum; alpha 0 overwrites.
        """
        if bulk_dtype(self._dtype) == DTYPE_F32:
            self.anchor = np.require(np.frombuffer(tensor, "<f4"), np.float32, "A")
        else:
            if self.anchor is None:
                self.anchor = np.empty(self.numel, np.float32)
            kernels.decode_bf16(tensor, self.anchor, False)
        for local, anchor in self._beside(self.anchor):
            if alpha == 0:
                np.copyto(local, anchor)
            else:
                kernels.axpby_blend(local, anchor, alpha)

    def restore(self) -> None:
        """Sets the local values to the anchor; there must be one."""
        for local, anchor in self._beside(self._anchored()):
            np.copyto(local, anchor)

    def overwrite(self, tensor: memoryview) -> None:
        """Sets the local values to f32 bytes of the final cut, exactly."""
        for local, values in self._beside(np.frombuffer(tensor, "<f4")):
            np.copyto(local, values)

    def pack_values(self, out: Packed) -> None:
        """Writes the local values in the bulk dtype of the session.

        out: uint8, exactly the bytes of this fragment.
        """
        dtype = bulk_dtype(self._dtype)
        if dtype == DTYPE_F32:
            for local, values in self._beside(out.view("<f4")):
                np.copyto(values, local)
        else:
            for (start, stop), local in zip(self._ranges(), self._locals, strict=True):
                kernels.encode_bf16(local, out[2 * start:2 * stop])

    def pack_delta(self, out: Packed) -> None:
        """Writes local - anchor in the session dtype; the anchor must be there.

        out: uint8, exactly the bytes of this fragment. After `feed_back` the error of the delta
        before is added, in a rounded sum, and what this one loses is the error from now on.
        """
        with kernels.exact_floats():  # whatever the trainer's thread does with subnormal numbers
            self._pack_delta(self._anchored(), out)

    def feed_back(self) -> None:
        """Keep errors from now on, in another 4 bytes a parameter."""
        self._feeds_back = True

    def forget_error(self) -> None:
        """The last delta was not merged: what it has lost is in no merge's way."""
        self.error = None

    def kept(self) -> dict[str, Floats]:
        """A copy of what is here beside the local values."""
        found = {"anchor": self.anchor, "error": self.error}
        return {name: values.copy() for name, values in found.items() if values is not None}

    def keep(self, values: Mapping[str, Floats]) -> Floats:
        """Takes what `kept` of another process gave, and shows the anchor; raises `ValueError` for
        other sizes."""
        self.anchor = checked_floats(values["anchor"], self.numel)
        if self._feeds_back and "error" in values:
            self.error = checked_floats(values["error"], self.numel)
        return self.anchor

    def _pack_delta(self, anchor: Floats, out: Packed) -> None:
        if self._dtype == DTYPE_F32:
            values = out.view("<f4")
            for start, stop, local in self._spans(0, self.numel):
                np.subtract(local, anchor[start:stop], out=values[start:stop])
            return
        encode = kernels.encode_bf16 if self._dtype == DTYPE_BF16 else kernels.encode_q4
        decode = kernels.decode_bf16 if self._dtype == DTYPE_BF16 else kernels.decode_q4
        scratch = np.empty(min(WINDOW, self.numel), np.float32)
        before = self.error
        if self._feeds_back and before is None:
            self.error = np.empty(self.numel, np.float32)
        for begin in range(0, self.numel, WINDOW):
            end = min(begin + WINDOW, self.numel)
            packed = out[tensor_bytes(begin, self._dtype):tensor_bytes(end, self._dtype)]
            delta = scratch[:end - begin]
            for start, stop, local in self._spans(begin, end):
                np.subtract(local, anchor[start:stop], out=scratch[start - begin:stop - begin])
            if before is not None:
                np.add(delta, before[begin:end], out=delta)
            encode(delta, packed)
            if self.error is not None:
                lost = self.error[begin:end]
                decode(packed, lost, False)
                np.subtract(delta, lost, out=lost)

    def _anchored(self) -> Floats:
        if self.anchor is None:
            raise ValueError("no broadcast has come yet: the fragment has no anchor")
        return self.anchor

    def _ranges(self) -> Iterator[tuple[int, int]]:
        return zip(self._offsets[:-1], self._offsets[1:], strict=True)

    def _beside(self, flat: Floats) -> Iterator[tuple[Floats, Floats]]:
        """(local tensor, its part of a flat vector), in wire order."""
        for (start, stop), local in zip(self._ranges(), self._locals, strict=True):
            yield local, flat[start:stop]

    def _spans(self, begin: int, end: int) -> Iterator[tuple[int, int, Floats]]:
        """(start, stop, local values) of the pieces that make up [begin, end)."""
        index = bisect_right(self._offsets, begin) - 1
        while index < len(self._locals) and self._offsets[index] < end:
            first = self._offsets[index]
            start, stop = max(begin, first), min(end, self._offsets[index + 1])
            yield start, stop, self._locals[index][start - first:stop - first]
            index += 1
