"""Notices to learners that can carry them, and no more than one a second (rule 17.2).

Must not decide what is said or to whom; a learner that has not introduced itself is told nothing.
"""

from __future__ import annotations

from syncer.protocol import NoticeCode
from syncer.server.group import Group
from syncer.server.loop import Loop, Timer
from syncer.wire.extended import NoticeText, encode_notice

NOTICE_PAUSE_NS = 10**9
"""Between two notices to one connection."""


class PacedNotices:
    """The last notice of each connection, and the next one while it is too early for that."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self.said_ns: dict[Group, int] = {}
        self.next: dict[Group, tuple[bytes, Timer]] = {}

    # rule 17.2
    def say(self, group: Group, code: NoticeCode, text: str) -> None:
        """Tell a group; within a second of the last one later, in place of what waits then."""
        if not group.extended or group.ended:
            return
        frame, now_ns = encode_notice(NoticeText(code, text)), self.loop.now_ns()
        waiting = self.next.get(group)
        due_ns = self.said_ns.get(group, now_ns - NOTICE_PAUSE_NS) + NOTICE_PAUSE_NS
        if waiting is not None:
            self.next[group] = frame, waiting[1]
        elif now_ns < due_ns:
            self.next[group] = frame, self.loop.call_at(due_ns, lambda: self._say_next(group))
        else:
            self._send(group, frame)

    def _say_next(self, group: Group) -> None:
        frame, _ = self.next.pop(group)
        self._send(group, frame)

    def _send(self, group: Group, frame: bytes) -> None:
        self.said_ns[group] = self.loop.now_ns()
        group.outbox.frame(frame)
        group.pump()

    def leave(self, group: Group) -> None:
        """The group has ended."""
        self.said_ns.pop(group, None)
        waiting = self.next.pop(group, None)
        if waiting is not None:
            waiting[1].cancel()

    def close(self) -> None:
        for _, timer in self.next.values():
            timer.cancel()
        self.next.clear()
