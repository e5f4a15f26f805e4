"""A learner that does exactly what a test says, and a server process with its log as data.

Built on the wire room alone, with real sockets. Every wait is for bytes, a log line or an exit,
with a deadline far beyond what a loaded machine needs.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from syncer.checkpoint.files import FILES, Files
from syncer.config import Config
from syncer.kernels import decode_bf16, encode_bf16, encode_q4
from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.protocol import (
    DTYPE_BF16,
    DTYPE_F32,
    DTYPE_Q4,
    HASH_BYTES,
    Msg,
    bulk_dtype,
    tensor_bytes,
)
from syncer.server.log import Log
from syncer.server.onlookers import InvariantsWatch
from syncer.server.service import Server
from syncer.server.system import System, lines_to
from syncer.wire import encode, extended, messages
from syncer.wire.extension import Extension
from syncer.wire.frames import FrameReader, Reassembly
from syncer.wire.hello import Hello
from syncer.wire.limits import Limits
from tests.golden.change_reference import changed

PATIENCE_S = 60.0
"""How long a test waits for what must happen; only a defect makes it wait that long."""
ROOT = Path(__file__).resolve().parents[2]


def layout_of(*fragments: tuple[int, ...], mode: int = AVG) -> Layout:
    """One fragment per argument, all in one merge mode."""
    return Layout(tuple(FragmentLayout(mode, numels) for numels in fragments))


MIXED = Layout((FragmentLayout(AVG, (7, 1)), FragmentLayout(RDA, (300, 33)),
                FragmentLayout(RDA, (5,))))
"""A small layout with both merge modes and odd sizes."""


def wait_until(reached, what: str, patience_s: float = PATIENCE_S):
    """The first true value of `reached()`, polled."""
    deadline = time.monotonic() + patience_s
    while True:
        if value := reached():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience_s} s: {what}")
        time.sleep(0.005)


class EndOfStream(AssertionError):
    """The server closed the socket."""


class ScriptedLearner:
    """One connection group of a learner; `with` closes it."""

    def __init__(self, port: int, learner: int, layout: Layout = MIXED, *, dtype: int = DTYPE_F32,
                 generation: int | None = None, streams: int = 0, key: bytes | None = None,
                 fingerprint: bytes = b"\x11" * HASH_BYTES, contract: bytes | None = None,
                 profile_hash: bytes | None = None, compat_group: str | None = None,
                 extension: Extension | None = None, connect: bool = True,
                 source: str = "127.0.0.1"):
        self.port = port
        self.layout, self.dtype = layout, dtype
        self.hello = Hello(learner, generation or int.from_bytes(os.urandom(8), "little") or 1,
                           dtype, layout, fingerprint, contract or fingerprint, profile_hash,
                           streams, compat_group, extension)
        self.key, self.source = key, source
        limits = Limits.for_client(layout, dtype, extended=extension is not None,
                                   changes=extension is not None and bool(extension.changes),
                                   fates=extension is not None and extension.fates)
        self.limits, self.reassembly = limits, Reassembly(limits)
        self.readers: dict[socket.socket, FrameReader] = {}
        self.seen: list[Any] = []
        self.early: list[messages.Pull] = []
        self.versions: dict[int, int] = {}
        self.params: dict[int, np.ndarray] = {}
        self.final: dict[int, np.ndarray] = {}
        self.message_id = 0
        self.control: socket.socket | None = None
        self.data: dict[int, socket.socket] = {}
        if connect:
            try:
                self.dial()
                for stream in range(streams):
                    self.dial_data(stream)
            except OSError:
                self.close()
                raise

    # -------------------------------------------------------------------------------- sockets
    @property
    def learner(self) -> int:
        return self.hello.learner

    def dial(self) -> ScriptedLearner:
        self.control = self.open_socket()
        self.say_hello()
        return self

    def say_hello(self) -> None:
        self.control.sendall(encode.encode_hello(self.hello, self.key))

    def dial_data(self, stream: int) -> socket.socket:
        sock = self.open_socket()
        hello = messages.DataHello(self.learner, self.hello.generation, stream)
        proved = None if self.hello.extension is None else self.key
        sock.sendall(encode.encode_data_hello(hello, proved))
        self.data[stream] = sock
        return sock

    def open_socket(self, receive_buffer_bytes: int = 0) -> socket.socket:
        """A connected socket; a small receive buffer makes a reader that stops felt at once."""
        sock = socket.socket()
        sock.settimeout(PATIENCE_S)
        if receive_buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.readers[sock] = FrameReader(self.limits, self.reassembly)
        sock.bind((self.source, 0))
        sock.connect(("127.0.0.1", self.port))
        return sock

    def close(self) -> None:
        for sock in (*self.readers, *self.data.values()):
            sock.close()
        self.readers.clear()

    def __enter__(self) -> ScriptedLearner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------- sending
    def send(self, data: bytes) -> None:
        self.control.sendall(data)

    def send_bulk(self, kind: Msg, head: bytes, body: bytes, *, chunked: bool = True) -> None:
        """One message: in chunks over the data sockets, or bare on the control socket."""
        streams = [self.data[i] for i in sorted(self.data)] or [self.control]
        if not chunked:
            self.send(b"".join(encode.bare_message(kind, head, body)))
            return
        self.message_id += 1
        for i, piece in enumerate(encode.chunk_message(kind, head, body, self.message_id)):
            streams[i % len(streams)].sendall(b"".join(piece))

    def send_init(self, values: list[np.ndarray], *, chunked: bool = True) -> None:
        for fragment, value in enumerate(values):
            self.send_bulk(Msg.INIT_PARAMS, encode.init_head(fragment),
                           to_wire(value, bulk_dtype(self.dtype)), chunked=chunked)

    def push(self, pull: messages.Pull, delta: np.ndarray, *, base: int | None = None,
             local_step: int = 1, c_steps: int = 1, c_tokens: int = 1, chunked: bool = True,
             learner: int | None = None) -> None:
        """Answer `pull` with a delta on top of `base` (default: the version applied last)."""
        push = messages.Push(
            self.learner if learner is None else learner, pull.fragment, pull.step, pull.attempt,
            self.versions.get(pull.fragment, 0) if base is None else base, local_step, c_steps,
            c_tokens, memoryview(b""))
        self.send_bulk(Msg.PUSH_FRAGMENT, encode.push_head(push), to_wire(delta, self.dtype),
                       chunked=chunked)

    def acknowledge(self, step: int) -> None:
        self.send(encode.encode_final_ack(messages.FinalAck(step)))

    # ------------------------------------------------------------------------------ receiving
    def next(self, patience_s: float = PATIENCE_S) -> Any:
        """The next message, parsed. Raises `EndOfStream` when the control socket has ended."""
        deadline = time.monotonic() + patience_s
        while True:
            for reader in self.readers.values():
                frame = next(reader, None)
                if frame is not None:
                    return self._parsed(*frame)
            ready, _, _ = select.select(list(self.readers), [], [],
                                        max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"learner {self.learner}: no message in {patience_s} s; seen "
                                     f"{self.seen[-5:]}")
            for sock in ready:
                self._receive(sock)

    def _receive(self, sock: socket.socket) -> None:
        try:
            count = sock.recv_into(self.readers[sock].buffer())
        except ConnectionResetError:
            count = 0
        if count == 0:
            del self.readers[sock]
            sock.close()
            if sock is self.control or not self.readers:
                raise EndOfStream(f"learner {self.learner}: the server closed; seen "
                                  f"{self.seen[-5:]}")
            return
        self.readers[sock].received(count)

    def _parsed(self, kind: int, payload: memoryview) -> Any:
        match kind:
            case Msg.PULL_REQ:
                message = messages.parse_pull(payload, self.layout)
            case Msg.BCAST_FRAGMENT:
                message = messages.parse_bcast(payload, self.layout, self.dtype)
                self.params[message.fragment] = from_wire(message.tensor, bulk_dtype(self.dtype))
                self.versions[message.fragment] = message.version
            case Msg.BCAST_CHANGE:
                message = messages.parse_bcast_change(payload, self.layout)
                fragment, base, version, delta = message
                assert self.versions[fragment] == base, message[:3]
                self.params[fragment] = changed(self.params[fragment], bytes(delta),
                                                bulk_dtype(self.dtype))
                self.versions[fragment] = version
            case Msg.FINAL_FRAGMENT:
                message = messages.parse_final_fragment(payload, self.layout)
                self.final[message.fragment] = from_wire(message.tensor, DTYPE_F32)
            case Msg.FINAL_MANIFEST:
                message = messages.parse_manifest(payload, self.layout)
            case Msg.ERROR:
                message = messages.parse_error(payload)
            case Msg.SHUTDOWN:
                message = Msg.SHUTDOWN
            case Msg.WELCOME:
                message = extended.parse_welcome(payload, len(self.layout.fragments))
            case Msg.NOTICE:
                message = extended.parse_notice(payload)
            case Msg.PUSH_FATE:
                message = extended.parse_fate(payload, len(self.layout.fragments))
            case _:
                raise AssertionError(f"a learner got message type {kind}")
        self.seen.append(message)
        return message

    def until(self, wanted, what: str = "") -> Any:
        """The next message that is of the type `wanted`, or for which `wanted(message)` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            message = self.next(max(0.0, deadline - time.monotonic()))
            if isinstance(wanted, type) and not issubclass(wanted, int):
                if isinstance(message, wanted):
                    return message
            elif message == wanted if isinstance(wanted, Msg) else wanted(message):
                return message

    def pull(self, step: int | None = None) -> messages.Pull:
        """The next pull, or that of a step: over several sockets pulls may overtake each other."""
        for pull in self.early:
            if pull.step == step:
                self.early.remove(pull)
                return pull
        while True:
            pull = self.until(messages.Pull)
            if step in (None, pull.step):
                return pull
            self.early.append(pull)

    def holding(self, versions: dict[int, int]) -> None:
        """Reads on until these have come: a pull overtakes what is about other fragments."""
        while self.versions != versions:
            self.next()

    def error(self) -> str:
        """The text of the ERROR that ends this connection, with the end after it."""
        text = self.until(str)
        self.ended()
        return text

    def ended(self) -> None:
        """The control socket has ended; whatever comes before is recorded in `seen`."""
        try:
            while True:
                self.next()
        except EndOfStream:
            return

    def take_cut(self) -> messages.Manifest:
        """Receive the final cut and acknowledge it."""
        manifest = self.until(messages.Manifest)
        while len(self.final) < len(self.layout.fragments):
            self.next()
        self.acknowledge(manifest.step)
        return manifest

    def finish(self) -> messages.Manifest:
        """Take the cut and see SHUTDOWN: for the last learner that a run waits for."""
        manifest = self.take_cut()
        self.until(Msg.SHUTDOWN)
        return manifest


def to_wire(values: np.ndarray, dtype: int) -> bytes:
    """Values as tensor bytes of `dtype`."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == DTYPE_F32:
        return values.tobytes()
    out = bytearray(tensor_bytes(values.size, dtype))
    (encode_q4 if dtype == DTYPE_Q4 else encode_bf16)(values, out)
    return bytes(out)


def from_wire(tensor, dtype: int) -> np.ndarray:
    """Tensor bytes of f32 or bf16 as f32 values."""
    if dtype == DTYPE_F32:
        return np.frombuffer(bytes(tensor), "<f4")
    assert dtype == DTYPE_BF16
    out = np.empty(len(tensor) // 2, np.float32)
    decode_bf16(tensor, out, False)
    return out


class LogFile:
    """Lines of a JSON log that somebody is writing."""

    def __init__(self, path: Path):
        self.path = path

    def text(self) -> str:
        return self.path.read_text("utf-8", "replace")

    def lines(self) -> list[dict]:
        """Complete JSON lines so far."""
        whole = self.text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def find(self, message: str, **fields) -> list[dict]:
        """Lines whose message contains `message` and that have all these fields."""
        return [line for line in self.lines() if message in line["message"]
                and all(line.get(name) == value for name, value in fields.items())]

    def wait(self, message: str, **fields) -> dict:
        return wait_until(lambda: self.find(message, **fields),
                          f"log line {message!r} {fields} in\n{self.text()[-3000:]}")[0]


class Hosting:
    """Learners of a test, closed with the server."""

    port: int
    learners: list[ScriptedLearner]

    def learner(self, learner: int, layout: Layout = MIXED, **settings: Any) -> ScriptedLearner:
        self.learners.append(ScriptedLearner(self.port, learner, layout, **settings))
        return self.learners[-1]

    def close_learners(self) -> None:
        for learner in self.learners:
            learner.close()


class ServerProcess(Hosting):
    """`python -m syncer.server` as its own process on a free port; `with` ends it."""

    def __init__(self, directory: Path, *flags: str, learners: int = 1, steps: int = 1,
                 environment: dict[str, str] | None = None, wait: bool = True,
                 module: tuple[str, ...] = ("syncer.server",), ulimit: str = ""):
        self.learners = []
        self.log_path = directory / f"server-{os.urandom(4).hex()}.log"
        self.log = LogFile(self.log_path)
        command = [sys.executable, "-m", *module, "--learners", str(learners),
                   "--total-steps", str(steps), "--port", "0", "--log-format", "json",
                   "--sync-interval-steps", "0", *flags]
        if ulimit:
            command = ["sh", "-c", f'ulimit {ulimit} && exec "$@"', "sh", *command]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SYNCER_", "YETO_"))}
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log,
                env=clean | {"SYNCER_CHECK": "1"} | (environment or {}))
        self.port = self._wait_for_port() if wait else 0

    def _wait_for_port(self) -> int:
        def listening():
            assert self.process.poll() is None, f"the server ended: {self.log.text()}"
            return self.log.find("syncer listening")

        try:
            return wait_until(listening, "syncer listening")[0]["port"]
        except BaseException:
            self.__exit__()
            raise

    def wait(self) -> int:
        """The exit status, once the process has ended by itself."""
        return self.process.wait(PATIENCE_S)

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    @property
    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close_learners()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


class Witness(InvariantsWatch):
    """Checks the scheduler after every event, and remembers the events."""

    def __init__(self):
        self.events: list[Any] = []

    def after(self, event, given):
        super().after(event, given)
        self.events.append(event)


class ServerThread(Hosting):
    """A server inside this process, on its own thread; `with` stops it and joins."""

    def __init__(self, directory: Path, *, files: Files = FILES, **settings: Any):
        self.learners = []
        self.log_path = directory / f"server-{os.urandom(4).hex()}.log"
        self.log = LogFile(self.log_path)
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        defaults = dict(learners=1, total_steps=1, port=0, sync_interval_steps=0.0)
        self.config = Config(**(defaults | settings))
        self.descriptor = descriptor
        self.witness = Witness()
        log = Log("debug", "json", lines_to(descriptor))
        try:
            self.server = Server(self.config, log, System(files), self.witness)
        except BaseException:
            log.close()
            os.close(descriptor)
            raise
        self.port = self.server.address[1]
        self.status: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.status = self.server.run()

    def wait(self) -> int:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), self.log.text()
        return self.status

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close_learners()
        if self.thread.is_alive():
            self.server.stop()
        self.wait()
        os.close(self.descriptor)
