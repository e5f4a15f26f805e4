"""Data sockets that a HELLO has promised and that do not come (rule 14.11).

Nobody waits for them: what is sent goes over those that came. But pieces of a message that were to
come over one that is not there never come, and their sender believes that it has sent them. Must
not know what messages say.
"""

from __future__ import annotations

from syncer.server.group import Group
from syncer.server.log import Log
from syncer.server.loop import Timer

STREAMS_WAIT_NS = 10 * 10**9
"""From HELLO until those that are missing are named."""
INCOMPLETE_NS = 30 * 10**9
"""So long a message of such a group may stand still."""
LOOK_NS = 5 * 10**9
STREAMS_SHOWN_MAX = 8


class Promised:
    """Looks after the streams of one group until all are there, or it has ended."""

    def __init__(self, group: Group, log: Log):
        self.group, self.log = group, log
        self.told = False
        self.stood: dict[int, tuple[int, int]] = {}
        """Of each open message: bytes that are there, and since when it has no more of them."""
        self.timer: Timer | None = None
        if self.missing():
            self._look_after(STREAMS_WAIT_NS)

    def missing(self) -> list[int]:
        """Numbers of the streams that have not come."""
        return [number for number in range(self.group.hello.num_streams)
                if number not in self.group.data]

    def cancel(self) -> None:
        """The group has ended."""
        if self.timer is not None:
            self.timer.cancel()

    def _look_after(self, wait_ns: int) -> None:
        loop = self.group.loop
        self.timer = loop.call_at(loop.now_ns() + wait_ns, self._look)

    # rule 14.11
    def _look(self) -> None:
        group, missing = self.group, self.missing()
        if group.ended or not missing:
            return
        shown = ",".join(map(str, missing[:STREAMS_SHOWN_MAX]))
        if len(missing) > STREAMS_SHOWN_MAX:
            shown += "..."
        if not self.told:
            self.told = True
            self.log.warning("data sockets that a HELLO declared have not come",
                             learner=group.learner, generation=group.generation,
                             peer=group.control.peer, streams=shown,
                             declared=group.hello.num_streams)
        now_ns = group.loop.now_ns()
        before, self.stood = self.stood, {}
        assert group.reassembly is not None  # it has not ended
        for message, filled in group.reassembly.progress.items():
            bytes_then, since_ns = before.get(message, (-1, now_ns))
            self.stood[message] = filled, since_ns if bytes_then == filled else now_ns
            if now_ns - self.stood[message][1] >= INCOMPLETE_NS:
                text = (f"chunked message {message} stands still at {filled} bytes for "
                        f"{INCOMPLETE_NS // 10**9} s: data stream {shown} of "
                        f"{group.hello.num_streams} never came; try again later")
                group.end(text, text)
                return
        self._look_after(LOOK_NS)
