# Compiled from small_push.pyx, where the docstrings are.
from syncer.core.events import Push
from syncer.merge.buffers import BufferPool
from syncer.server.group import Group

def small_push(group: Group, payload: memoryview, pool: BufferPool, keep_wire: bool
               ) -> Push | None: ...
