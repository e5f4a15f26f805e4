"""What one connection of a reader believes, and what a pull makes of several."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from syncer.errors import ConfigError, RemoteProtocolError
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import DTYPE_BF16, DTYPE_F32, Msg, NoticeCode, RunState
from syncer.reader.cut_session import ReaderSession, ReceivedCut, Refused, ServerEnd
from syncer.reader.pulling import SAY_AGAIN_S, Lost, PullFailed, Pulling, cuts, pull
from syncer.wire import encode
from syncer.wire.extended import (
    NoticeText,
    SessionLayout,
    Welcome,
    encode_notice,
    encode_session_layout,
    encode_welcome,
)
from syncer.wire.messages import Manifest, Pull

LAYOUT = Layout((FragmentLayout(AVG, (2,)), FragmentLayout(AVG, (1, 1))))
SESSION = encode_session_layout(SessionLayout(DTYPE_F32, LAYOUT, bytes(32), bytes(32)))


def welcome(epoch: int = 1, instance: int = 7) -> bytes:
    return encode_welcome(Welcome(epoch, instance, 0, 9, 1, 1, 24.0, RunState.RUNNING, "syncer"))


def tensor(fragment: int, version: int, *, final: bool = False) -> bytes:
    kind = Msg.FINAL_FRAGMENT if final else Msg.BCAST_FRAGMENT
    head = (encode.final_head if final else encode.bcast_head)(fragment, version)
    return b"".join(encode.bare_message(kind, head, np.full(2, version, "<f4")))


def manifest(step: int, *versions: int) -> bytes:
    return encode.encode_manifest(Manifest(step, versions))


def told(session: ReaderSession, *frames: bytes) -> list:
    """What the session makes of these bytes, which come one by one."""
    found = []
    for byte in b"".join(frames):
        window = session.buffer()
        window[0] = byte
        found += session.received(1)
    return found


def test_a_cut_is_whole_when_its_manifest_fits_every_fragment():
    session = ReaderSession(DTYPE_F32, follows=True)
    found = told(session, welcome(), SESSION, tensor(1, 0), tensor(0, 1), manifest(1, 1, 0),
                 tensor(1, 2), manifest(2, 1, 2), tensor(0, 3, final=True),
                 tensor(1, 2, final=True), manifest(3, 3, 2), encode.encode_shutdown())
    whole = [each for each in found if isinstance(each, ReceivedCut)]
    assert [(cut.step, cut.is_final) for cut in whole] == [(1, False), (2, False), (3, True)]
    assert [np.frombuffer(each, "<f4")[0] for each in whole[1].tensors] == [1, 2]
    assert isinstance(found[-1], ServerEnd)


@pytest.mark.parametrize(("frames", "text"), [
    ((SESSION,), "before its WELCOME"),
    ((welcome(), tensor(0, 0)), "message type"),
    ((welcome(), welcome()), "before its LAYOUT"),
    ((welcome(), SESSION, SESSION), "message type"),
    ((welcome(), SESSION, encode.encode_pull(Pull(0, 1, 1))), "cannot receive message type"),
    ((welcome(), SESSION, tensor(0, 0), manifest(0, 0, 0)), "and none has come"),
    ((welcome(), SESSION, tensor(0, 1), tensor(1, 0), manifest(0, 0, 0)), "and 1 has come"),
    ((welcome(), SESSION, tensor(0, 1), tensor(1, 4), manifest(1, 1, 4)), "expected 0"),
    ((welcome(), SESSION, manifest(0, 0)), "1 fragments"),
    ((welcome(), SESSION, encode.encode_error("why")[:5] + b"\xff" * 8), "exceeds"),
])
def test_what_no_server_sends_is_an_error(frames, text):
    with pytest.raises(RemoteProtocolError, match=text):
        told(ReaderSession(DTYPE_F32, follows=False), *frames)


def pulling(**settings) -> Pulling:
    lines: list[str] = []
    made = Pulling("127.0.0.1:1", follow=True, say=lines.append, **settings)
    made.lines = lines  # type: ignore[attr-defined]
    return made


def cuts_of(made: Pulling, *frames: bytes) -> list:
    """The cuts of one connection that brings these frames."""
    session, found = ReaderSession(made.dtype, follows=True), []
    for each in told(session, *frames):
        if isinstance(each, ReceivedCut):
            found.append(made._cut(session, each))
        elif not isinstance(each, ServerEnd):
            made._told(each)
    return [cut for cut in found if cut is not None]


def test_a_new_connection_goes_on_where_the_run_is():
    made = pulling()
    first = (welcome(), SESSION, tensor(0, 3), tensor(1, 4), manifest(4, 3, 4))
    assert [cut.step for cut in cuts_of(made, *first)] == [4]
    assert cuts_of(made, *first) == []  # it has that one
    resumed = (welcome(epoch=2, instance=8), SESSION, tensor(0, 1), tensor(1, 2),
               manifest(2, 1, 2))
    assert [cut.step for cut in cuts_of(made, *resumed)] == [2]
    assert made.lines[-1] == "the run has gone back from step 4 to step 2"


def test_a_server_that_is_no_successor_ends_it():
    made = pulling()
    cuts_of(made, welcome(epoch=2), SESSION, tensor(0, 1), tensor(1, 2), manifest(2, 1, 2))
    for epoch in (1, 2):
        with pytest.raises(PullFailed, match=f"another server answers .*epoch {epoch}"):
            cuts_of(made, welcome(epoch, instance=9))
    other = encode_session_layout(SessionLayout(DTYPE_F32, LAYOUT, b"\x01" * 32, bytes(32)))
    with pytest.raises(PullFailed, match="has another model now"):
        cuts_of(made, welcome(epoch=3, instance=9), other)


def test_what_may_pass_by_is_tried_again_and_the_rest_is_not():
    made = pulling()
    with pytest.raises(Lost, match="try again later"):
        made._told(Refused("this syncer has 8 readers already; try again later"))
    with pytest.raises(PullFailed, match="refuses: session mismatch"):
        made._told(Refused("session mismatch: expected run a, got run b"))


def test_the_final_cut_has_the_dtype_that_was_asked_for():
    made = pulling(dtype="bf16")
    (cut,) = cuts_of(made, welcome(), SESSION, tensor(0, 1, final=True),
                     tensor(1, 2, final=True), manifest(2, 1, 2))
    assert (cut.dtype, cut.is_final) == (DTYPE_BF16, True)
    assert [len(each) for each in cut.tensors] == [4, 4]
    assert [list(values) for values in cut.parameters().values()] == [[1, 1], [2, 2]]


@contextmanager
def server_of(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a server that takes one connection, and that alone."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)

        def run() -> None:
            with suppress(OSError), listening.accept()[0] as sock:  # who has enough hangs up
                serve(sock)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            thread.join()


def test_word_of_what_the_run_waits_for_is_no_part_of_a_cut():
    """Whoever wants one cut gives up all the same, and with these words."""
    stop = threading.Event()

    def serve(sock: socket.socket) -> None:
        sock.sendall(welcome())
        while not stop.wait(0.01):
            sock.sendall(encode_notice(NoticeText(NoticeCode.LEARNERS, "learner 1 is missing")))

    with server_of(serve) as address:
        try:
            with pytest.raises(PullFailed, match=r"1 s; 127\.0\.0\.1:\d+ says: learner 1 is miss"):
                pull(address, timeout_s=1)
        finally:
            stop.set()


@pytest.mark.parametrize(("frames", "text"), [
    ((welcome(), encode.encode_shutdown()), "has ended, and no cut of it has come"),
    ((b"\xff" * 64,), "sends what no syncer sends: "),
])
def test_what_no_further_dial_can_mend_ends_it(frames, text):
    def serve(sock: socket.socket) -> None:
        sock.sendall(b"".join(frames))
        with suppress(OSError):  # whoever gives up may leave bytes unread
            while sock.recv(65536):
                pass

    with server_of(serve) as address, pytest.raises(PullFailed, match=text):
        pull(address, timeout_s=60)


def test_a_dtype_that_no_cut_has():
    with pytest.raises(ConfigError, match="dtype 'q4' cannot be pulled: give one of f32, bf16"):
        Pulling("127.0.0.1:1", dtype="q4")


def test_who_has_the_final_cut_is_done_whatever_becomes_of_the_server():
    def serve(sock: socket.socket) -> None:
        sock.sendall(b"".join((welcome(), SESSION, tensor(0, 1, final=True),
                               tensor(1, 2, final=True), manifest(2, 1, 2))))

    with server_of(serve) as address:
        assert [(cut.step, cut.is_final) for cut in cuts(address, timeout_s=60)] == [(2, True)]


def test_who_follows_and_dials_for_long_is_told_that_nobody_tells_it_of_an_end():
    now = [0.0]
    made = pulling(clock=lambda: now[0], pause=lambda seconds: None)
    cuts_of(made, welcome(), SESSION, tensor(0, 1), tensor(1, 2), manifest(2, 1, 2))
    made._again("Connection refused")
    assert "away" not in made.lines[-1]
    now[0] = SAY_AGAIN_S
    made._again("Connection refused")
    assert "away for 30 s (the last cut is that of step 2): if its run is over" in made.lines[-1]
