"""Writes a learner's control socket with TLS, and repeats its last heartbeat in a pause.

Must not know what a frame or a step is. `Pulse` does the same for a plain socket without the GIL;
TLS is Python's, so a training loop that holds the GIL is silent for as long.
"""

from __future__ import annotations

import threading
import time

from syncer.tls import TlsSocket


class TlsPulse:
    """The writing side of one connected, blocking socket, and the thread that repeats a frame."""

    def __init__(self, sock: TlsSocket):
        self.sock = sock
        self.writing = threading.Lock()
        self.changed = threading.Condition()
        self.frame, self.every_s = b"", 0.0
        self.due_s: float | None = None
        self.stopping = False
        self.beats = 0
        self.thread = threading.Thread(target=self._keep_beating, daemon=True,
                                       name="syncer-heartbeats")

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError when it cannot be made."""
        self.thread.start()

    def repeat(self, frame: bytes, due_s: float, every_s: float) -> None:
        """From `due_s` of the monotonic clock on, `frame` is sent every `every_s` seconds."""
        with self.changed:
            sooner = self.due_s is None or due_s < self.due_s
            self.frame, self.due_s, self.every_s = frame, due_s, every_s
            if sooner:  # else the thread looks when the moment that it knows has come
                self.changed.notify()

    def send(self, buffers: list[bytes | memoryview]) -> int:
        """Hands one whole frame to the kernel; the number of its bytes. Raises OSError."""
        frame = b"".join(buffers)
        with self.writing:
            self.sock.sendall(frame)
        return len(frame)

    def _keep_beating(self) -> None:
        while True:
            with self.changed:
                while not self.stopping:
                    now = time.monotonic()
                    if self.due_s is not None and self.due_s <= now:
                        break
                    self.changed.wait(None if self.due_s is None else
                                      min(self.due_s - now, threading.TIMEOUT_MAX))
                if self.stopping:
                    return
                self.due_s, frame = now + self.every_s, self.frame
            if not self.writing.acquire(blocking=False):
                continue  # bytes are flowing
            try:
                self.sock.sendall(frame)
                self.beats += 1
            except OSError:
                return  # its reader finds out, too
            finally:
                self.writing.release()

    def stop(self) -> None:
        """Ends the thread; the socket is shut by now, so that it does not wait in it."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        if self.thread.ident is not None:
            self.thread.join()

    def forget(self) -> None:
        """In a forked child there is no thread."""
