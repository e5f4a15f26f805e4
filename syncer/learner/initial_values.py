"""The values that a run begins with, brought by learner 0 (wire 12.4); must not decide when."""

from __future__ import annotations

import time
from collections.abc import Sequence

from syncer.learner.client import Client
from syncer.learner.client_group import Receipt
from syncer.learner.failures import ConnectionFailed
from syncer.learner.holding import LocalFragment
from syncer.learner.send_buffers import SendBuffers
from syncer.learner.session import Session

REPORT_S = 30.0
"""Time between two progress lines while they are sent before training begins."""
UNDER_WAY_MAX = 2
"""Fragments that are packed and wait for the network at a time."""


class InitialValues:
    """Sends the parameters of learner 0 as they are; does nothing for any other learner.

    Until a first broadcast shows that the server has them, every new connection gets them from the
    start: what the kernel took may not have arrived, or the server may be a fresh one, and nobody
    else can bring them. A server that has them drops them.
    """

    def __init__(self, session: Session, client: Client, fragments: Sequence[LocalFragment],
                 buffers: SendBuffers):
        self._session, self._client = session, client
        self._fragments, self._buffers = fragments, buffers
        self._generation: int | None = None
        self._receipts: list[Receipt] = []
        """Of each fragment handed to the connection of that generation, in order."""

    def send_all(self) -> None:
        """Every fragment, in order; waits until the kernel has them or they are not wanted.

        A server that takes more than on any connection before is waited for, however slow it is.
        Raises `ConnectionFailed` when that was not so for the time of a first connection.
        """
        client, patience_s = self._client, self._client.connect_timeout_s
        most, moved = 0, time.monotonic()
        report = moved + REPORT_S
        while self._wanted() and not self._all_sent():
            client.wait_for(lambda: self.can_go_on() or self._all_sent() or not self._wanted(),
                            min(report, moved + patience_s) - time.monotonic())
            now, sent = time.monotonic(), client.bytes_on_connection
            if sent > most:
                most, moved = sent, now
            if now >= report:
                report = now + REPORT_S
                client.say(f"sending the initial values: {self._progress()}"
                           + (f"; the server has taken nothing for {now - moved:.0f} s"
                              if now - moved > REPORT_S / 2 else ""))
            if now - moved >= patience_s:
                raise ConnectionFailed(
                    f"the server took no byte more of the initial values for {patience_s:.0f} s: "
                    f"it accepts connections and does not read ({self._progress()}); is it one of "
                    "this run, and does it still run?")
            if self.can_go_on():
                self.offer()
                moved = time.monotonic()  # packing took its time, and there was nothing to take

    def _progress(self) -> str:
        sent = sum(receipt.sent for receipt in self._receipts)
        return f"{sent} of {len(self._fragments)} fragments sent"

    def offer(self) -> None:
        """The next fragments, as many as may be under way now."""
        session = self._session
        while self.can_go_on():
            if session.last_generation != self._generation:
                self._generation, self._receipts = session.last_generation, []
            index = len(self._receipts)
            values = self._buffers.take(session.tensors.init_bytes(index))
            self._fragments[index].pack_values(values)
            receipt = self._client.send(session.tensors.init(index, values.data))
            self._buffers.lend(receipt, values)
            self._receipts.append(receipt)

    def can_go_on(self) -> bool:
        """Whether `offer` would send something now."""
        if not self._wanted() or not self._client.connected:
            return False
        if self._session.last_generation != self._generation:
            return True
        return len(self._receipts) < len(self._fragments) and all(
            receipt.settled for receipt in self._receipts[:1 - UNDER_WAY_MAX])

    def _wanted(self) -> bool:
        return self._session.wants_initial_values

    def _all_sent(self) -> bool:
        return len(self._receipts) == len(self._fragments) and all(
            receipt.sent for receipt in self._receipts)
