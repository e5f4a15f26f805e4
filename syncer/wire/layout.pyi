from struct import Struct

from syncer.layout import Layout

FRAGMENT_HEAD: Struct

def parse_layout(data: bytes, start: int, fragments: int) -> tuple[Layout, int]: ...
