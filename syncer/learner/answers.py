"""Answers to pulls: what is due is packed, and sent as soon as it is packed.

Must not blend, count steps, or wait for the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from syncer.learner.client import Client
from syncer.learner.fragment import Packed
from syncer.learner.holding import LocalFragment, Underway
from syncer.learner.send_buffers import SendBuffers
from syncer.learner.session import Session
from syncer.wire.messages import Push


class Answers:
    """Of one learner, over all its connections; its training loop is the only caller."""

    def __init__(self, session: Session, client: Client, fragments: Sequence[LocalFragment],
                 buffers: SendBuffers):
        self._session, self._client = session, client
        self._fragments, self._buffers = fragments, buffers
        self._packing: deque[_Delta] = deque()
        """Those that a device still packs, in order."""
        self._said = False

    def give(self) -> tuple[tuple[int, int], ...]:
        """Answers what is due; (fragment, global step) of each delta that is on its way now."""
        if not self._session.pulls and not self._packing:
            return ()
        with self._client.lock:
            due = self._session.due_pulls()
        answered = self._send_packed()
        for pull in due:
            size = self._session.tensors.push_bytes(pull.fragment)
            if not self._client.has_room(size):
                break  # it stays pending: the network is slower than the pulls
            with self._client.lock:
                push, generation = self._session.answer(pull), self._session.last_generation
                carries = self._session.fates.carried(pull.fragment)
            if push is not None:
                if not carries:
                    self._fragments[pull.fragment].forget_error()
                self._look_untold()
                delta = self._buffers.take(size)
                underway = self._fragments[pull.fragment].pack_delta(delta)
                self._packing.append(_Delta(push, delta, underway, generation))
                answered += self._send_packed()
        return answered

    def _look_untold(self) -> None:
        """Errors that nobody says may be carried on are dropped: once, why."""
        if self._session.fates.untold and not self._said:
            self._said = True
            self._client.say("this server does not tell what becomes of a push: error_feedback has "
                             "no effect with it")

    def wait(self) -> bool:
        """Until a device has packed all that it was given; whether there was anything."""
        for delta in self._packing:
            if delta.underway is not None:
                delta.underway.wait()
        return bool(self._packing)

    def _send_packed(self) -> tuple[tuple[int, int], ...]:
        """Nothing is sent for a connection that has ended: it may be about an anchor that does not
        hold any more, and the next connection asks again."""
        sent = []
        while self._packing and self._packing[0].is_packed:
            push, delta, _, generation = self._packing.popleft()
            if generation != self._session.last_generation:
                continue
            receipt = self._client.send(self._session.tensors.push(push, delta.data))
            self._buffers.lend(receipt, delta)
            if not receipt.dropped:
                sent.append((push.fragment, push.step))
        return tuple(sent)


class _Delta(NamedTuple):
    """A push, and who may still be writing its bytes."""

    push: Push
    delta: Packed
    underway: Underway | None
    generation: int | None
    """Of the connection that has asked."""

    @property
    def is_packed(self) -> bool:
        return self.underway is None or self.underway.done()
