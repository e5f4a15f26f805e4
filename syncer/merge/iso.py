"""iso: flattens the singular spectrum of averaged matrices; must not average or step itself.

For a rows x cols matrix A the result is s*U*V^T, where U*S*V^T is the singular value decomposition
of A and s the mean of all min(rows, cols) singular values. U*V^T comes from the cubic Newton-Schulz
polar iteration in f64. The products go through NumPy's BLAS, so iso alone is exact to a tolerance
(1e-5 relative) and not to the bit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from syncer.merge.blas import single_threaded

ROUNDS_MAX = 40
MOVED_MIN = 1e-9
"""The iteration stops when a round moves X by less than this share of its norm."""


def flatten(matrix: np.ndarray) -> np.ndarray:
    """The flattened matrix, f32. matrix: f32, rows x cols, finite.

    A zero matrix stays zero. A single row or column has one singular value, so it is its own
    result and is returned with the same bits. Missing directions of a rank-deficient matrix stay
    missing: they count in the mean, but get no values.
    """
    rows, cols = matrix.shape
    if rows == 1 or cols == 1 or not matrix.any():
        return matrix.copy()
    a = matrix.astype(np.float64)
    if rows > cols:
        a = np.ascontiguousarray(a.T)
    x = a / np.linalg.norm(a)
    for _ in range(ROUNDS_MAX):
        moved = (x @ x.T) @ x
        moved *= -0.5
        moved += 1.5 * x
        x, moved = moved, np.subtract(moved, x, out=x)
        if np.linalg.norm(moved) <= MOVED_MIN * np.linalg.norm(x):
            break
    mean = float(np.vdot(x, a)) / a.shape[0]
    x *= mean
    with np.errstate(over="ignore"):  # the outer step finds and names what is not finite
        return (x if rows <= cols else x.T).astype(np.float32)


def flatten_all(merged: np.ndarray, shapes: Sequence[tuple[int, int]], threads: int) -> None:
    """Flattens every tensor of an averaged fragment in place.

    merged: f32, writable, the tensors one after the other; shapes: (rows, cols) of each. Tensors
    run side by side on up to `threads` threads, the largest first, each product on one thread.
    """
    tensors, at = [], 0
    for rows, cols in shapes:
        tensors.append(merged[at:at + rows * cols].reshape(rows, cols))
        at += rows * cols

    def replace(tensor: np.ndarray) -> None:
        tensor[...] = flatten(tensor)

    tensors.sort(key=lambda tensor: -tensor.size)
    with single_threaded() as side_by_side:
        _share(replace, tensors, min(threads, len(tensors)) if side_by_side else 1)


def _share(work: Callable[[np.ndarray], None], tensors: Sequence[np.ndarray], threads: int) -> None:
    """`work(tensor)` for each, on this thread and on as many others as can be had up to `threads`
    in all. Not a pool of `concurrent.futures`: the end of a process would wait for it."""
    left = deque(tensors)
    errors: list[BaseException] = []

    def take() -> None:
        while left and not errors:
            try:
                tensor = left.popleft()
            except IndexError:  # somebody was faster
                return
            try:
                work(tensor)
            except BaseException as error:
                errors.append(error)

    helpers: list[threading.Thread] = []
    with suppress(RuntimeError):  # what Python makes of EAGAIN: it takes longer
        for index in range(1, threads):
            helper = threading.Thread(target=take, name=f"syncer-iso-{index}", daemon=True)
            helper.start()
            helpers.append(helper)
    take()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
