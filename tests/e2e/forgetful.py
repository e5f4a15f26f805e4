"""A middlebox on loopback that forgets flows: what is sent on one afterwards goes nowhere.

It forgets a flow that was idle for a while, and now and then one that is not; nobody gets a FIN. On
a real network the ends notice after a minute (keep-alive, or bytes that nobody acknowledges). Here
both ends are acknowledged by this process's own kernel, so that minute is shortened to `notice_s`,
after which they get the reset that a real end would make of it.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
import time

PIECE = 1 << 16


class Flow:
    """Two sockets, and what one has sent and the other not yet taken."""

    def __init__(self, near: socket.socket, far: socket.socket):
        self.ends = {near: far, far: near}
        self.waiting = {near: b"", far: b""}
        """Bytes that are to go to a socket."""
        self.moved = time.monotonic()
        self.forgotten: float | None = None


class ForgetfulProxy:
    """Listens on a free loopback port and forwards to `target`; `with` ends it and all flows."""

    def __init__(self, target: int, *, idle_s: float, notice_s: float, every_s: float, seed: int):
        self.target, self.idle_s, self.notice_s, self.every_s = target, idle_s, notice_s, every_s
        self.forgot_idle = self.forgot_busy = 0
        self.away = False
        """While it is set every flow is reset, and every new one."""
        self._dice = random.Random(seed)
        self._flows: set[Flow] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._over = False
        self._thread = threading.Thread(target=self._run, name="forgetful", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        look = evict = time.monotonic()
        while not self._over:
            for key, events in self._selector.select(0.1):
                if key.data is None:
                    self._accept()
                elif key.data in self._flows:
                    self._move(key.data, key.fileobj, events)
            if self.away:
                for flow in list(self._flows):
                    self._reset(flow)
            now = time.monotonic()
            if now >= look + 0.1:
                look = now
                self._forget_idle(now)
            if now >= evict + self.every_s:
                evict = now
                self._forget_one(now)
        for flow in list(self._flows):
            self._reset(flow)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._listener.accept()
            if self.away:
                near.close()
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                near.close()
                return
            flow = Flow(near, far)
            self._flows.add(flow)
            for end in flow.ends:
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(end, selectors.EVENT_READ, flow)

    def _move(self, flow: Flow, end: socket.socket, events: int) -> None:
        if flow.forgotten is not None:
            return
        flow.moved = time.monotonic()
        other = flow.ends[end]
        try:
            if events & selectors.EVENT_READ:
                data = end.recv(PIECE)
                if not data:
                    self._close(flow)
                    return
                flow.waiting[other] += data
            for each in flow.ends:
                if flow.waiting[each]:
                    with contextlib.suppress(BlockingIOError):
                        sent = each.send(flow.waiting[each])
                        flow.waiting[each] = flow.waiting[each][sent:]
            for each in flow.ends:  # who is not read from has to wait, as on a real way
                blocked = flow.waiting[flow.ends[each]]
                mask = (0 if blocked else selectors.EVENT_READ) | (
                    selectors.EVENT_WRITE if flow.waiting[each] else 0)
                self._watch(each, mask, flow)
        except OSError:
            self._reset(flow)

    def _watch(self, end: socket.socket, mask: int, flow: Flow) -> None:
        watched = end.fileno() in self._selector.get_map()
        if mask and watched:
            self._selector.modify(end, mask, flow)
        elif mask:
            self._selector.register(end, mask, flow)
        elif watched:
            self._selector.unregister(end)

    def _forget_idle(self, now: float) -> None:
        for flow in list(self._flows):
            if flow.forgotten is not None:
                if now >= flow.forgotten + self.notice_s:
                    self._reset(flow)
            elif now >= flow.moved + self.idle_s:
                self.forgot_idle += 1
                self._forget(flow, now)

    def _forget_one(self, now: float) -> None:
        known = [flow for flow in self._flows if flow.forgotten is None]
        if known:
            self.forgot_busy += 1
            self._forget(self._dice.choice(known), now)

    def _forget(self, flow: Flow, now: float) -> None:
        flow.forgotten = now
        for end in flow.ends:
            self._watch(end, 0, flow)

    def _close(self, flow: Flow) -> None:
        """An end has said goodbye: what it has sent arrives, then the goodbye."""
        for end in flow.ends:
            end.setblocking(True)
            end.settimeout(5.0)
            with contextlib.suppress(OSError):
                end.sendall(flow.waiting[end])
        self._end(flow)

    def _reset(self, flow: Flow) -> None:
        for end in flow.ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._end(flow)

    def _end(self, flow: Flow) -> None:
        self._flows.discard(flow)
        for end in flow.ends:
            with contextlib.suppress(OSError, KeyError, ValueError):
                self._selector.unregister(end)
            end.close()

    def __enter__(self) -> ForgetfulProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join(30)
