"""What the parameters of a layout are called: the names record, and the fingerprint over names.

A layout travels without names; whoever has both can check one against the other. Must not know a
HELLO or a learner's arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple, TypeAlias

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.layout import ISO, Layout
from syncer.protocol import LAYOUT_DOMAIN, NO_TENSOR_NAME
from syncer.wire.cursor import Cursor
from syncer.wire.layout import FRAGMENT_HEAD


class FragmentNames(NamedTuple):
    """Names and framework shapes of the tensors of one fragment, in wire order."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """(name, dimensions); their product is the number of elements."""
    identity: bool = False
    """Whether the fingerprint covers all dimensions (identity shapes)."""


Names: TypeAlias = tuple[FragmentNames, ...]

NAME_SIZE = Struct("<I")
"""Of what the fingerprint is taken of: in front of a name in UTF-8."""
FLAT_TENSOR = Struct("<QIQ")
"""And behind it: elements, and the dimensions of a tensor that counts as flat."""


def fingerprint(layout: Layout, names: Sequence[FragmentNames]) -> bytes:
    """The 32-byte SHA-256 that stands for names, order, merge modes and shapes (wire 5.1, 5.2).

    A tensor's dimensions are its full shape where the fragment has `identity` set, (rows, columns)
    in an iso fragment, and (elements,) otherwise.
    """
    digest = hashlib.sha256(LAYOUT_DOMAIN + len(layout.fragments).to_bytes(4, "little"))
    for fragment, named in zip(layout.fragments, names, strict=True):
        parts = [FRAGMENT_HEAD.pack(fragment.merge_mode, len(fragment.numels))]
        dims: Iterable[tuple[int, ...]] | None = None  # of most fragments (elements,)
        if named.identity:
            dims = (shape for _, shape in named.tensors)
        elif fragment.merge_mode == ISO:
            dims = fragment.shapes
        texts = [name.encode() for name, _ in named.tensors]
        if dims is None:
            for text, numel in zip(texts, fragment.numels, strict=True):
                parts += NAME_SIZE.pack(len(text)), text, FLAT_TENSOR.pack(numel, 1, numel)
        else:
            for text, numel, shape in zip(texts, fragment.numels, dims, strict=True):
                parts += (NAME_SIZE.pack(len(text)), text,
                          Struct(f"<QI{len(shape)}Q").pack(numel, len(shape), *shape))
        digest.update(b"".join(parts))
    return digest.digest()


def encode_names(names: Sequence[FragmentNames]) -> bytes:
    """Bytes of the names record. Raises LocalProtocolError for a name that is no UTF-8."""
    parts = []
    try:
        for fragment in names:
            parts.append(bytes([fragment.identity]))
            for name, shape in fragment.tensors:
                text = name.encode()
                parts += [len(text).to_bytes(4, "little"), text,
                          Struct(f"<I{len(shape)}Q").pack(len(shape), *shape)]
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"the name of a tensor is no UTF-8: {error}") from None
    return b"".join(parts)


def parse_names(data: memoryview, layout: Layout) -> Names:
    """The names record of a layout. Raises RemoteProtocolError for names it cannot have.

    The fingerprint is the caller's to compare. Memory is taken for what is there only.
    """
    cursor, seen = Cursor(data, "names"), set()
    found = []
    for index, fragment in enumerate(layout.fragments):
        identity, tensors = cursor.number(1), []
        if identity > 1:
            raise RemoteProtocolError(f"names of fragment {index} have identity {identity}, "
                                      "expected 0 or 1")
        for numel in fragment.numels:
            try:
                name = str(cursor.take(cursor.number(4)), "utf-8")
            except UnicodeDecodeError:
                raise RemoteProtocolError(f"a name in fragment {index} is not UTF-8") from None
            if not name or name == NO_TENSOR_NAME or name in seen:
                raise RemoteProtocolError(
                    f"a name in fragment {index} is empty, {NO_TENSOR_NAME}, or there already")
            seen.add(name)
            count = cursor.number(4)
            sizes = cursor.take(8 * count)
            shape = Struct(f"<{count}Q").unpack(sizes)
            if not _makes(shape, numel):
                raise RemoteProtocolError(f"a tensor of fragment {index} has {count} dimensions "
                                          f"that do not make its {numel} elements")
            tensors.append((name, shape))
        found.append(FragmentNames(tuple(tensors), bool(identity)))
    if cursor.remaining:
        raise RemoteProtocolError(f"names have {cursor.remaining} bytes behind the last tensor")
    return tuple(found)


def _makes(shape: tuple[int, ...], numel: int) -> bool:
    """Whether the product is `numel`, without ever making a number much larger than that."""
    product = 1
    for size in shape:
        product *= size
        if not 0 < product <= numel:
            return False
    return product == numel
