"""Which NOTICE of a server becomes a line, so that a wait is not told twice; must not print."""

from __future__ import annotations

from collections import deque

from syncer.wire.extended import NoticeText

NOTICE_AGAIN_S = 29.0
"""A text is told again after so long: a server says it every 30 s, and the network is not exact."""


class Notices:
    """The texts that were told, and when; now: monotonic seconds."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}
        self._newest: tuple[str, float] | None = None

    def take(self, waiting: deque[NoticeText], now: float) -> str | None:
        """The next text that is worth a line."""
        while waiting:
            text = waiting.popleft().text
            self._newest = text, now
            self._told = {told: at for told, at in self._told.items() if now < at + NOTICE_AGAIN_S}
            if text not in self._told:
                self._told[text] = now
                return text
        return None

    def since(self, when: float) -> str | None:
        """What the server said last, unless that was before `when`: then it may be over."""
        return self._newest[0] if self._newest is not None and self._newest[1] >= when else None
