from typing import final

from typing_extensions import Buffer as _Readable

@final
class Buffer:
    numel: int
    frozen: bool
    def freeze(self) -> Buffer: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class BufferPool:
    live: int
    live_bytes: int
    spare_bytes: int
    spare_bytes_max: int
    def take(self, numel: int, zero: bool = False) -> Buffer: ...
    def adopt(self, source: _Readable) -> Buffer: ...
