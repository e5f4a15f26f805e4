"""The native writer of a control socket: whole frames only, and frames while nobody has the GIL."""

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time

import pytest

from syncer.learner.pulse import Pulse

FOREVER = 1e9
DEADLINE_S = 60.0
HEARTBEAT = b"heartbeat"


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    theirs.settimeout(DEADLINE_S)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def pulse(pair):
    made = Pulse(pair[0].fileno())
    made.start()
    yield made
    with contextlib.suppress(OSError):
        pair[0].shutdown(socket.SHUT_RDWR)
    made.stop()


def test_a_frame_is_repeated_while_the_gil_is_held(pair, pulse):
    receiver, expected = pair[1], 5 * HEARTBEAT
    receiver.setblocking(True)
    patience = struct.pack("ll", int(DEADLINE_S), 0)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    pulse.repeat(HEARTBEAT, time.monotonic() + 0.02, 0.02)
    held = ctypes.create_string_buffer(len(expected))
    # A PyDLL does not let go of the GIL.
    ctypes.PyDLL(None).recv(receiver.fileno(), held, len(expected), socket.MSG_WAITALL)
    assert held.raw == expected


def test_nothing_is_repeated_before_it_is_due(pair, pulse):
    pulse.repeat(HEARTBEAT, time.monotonic() + FOREVER, 0.001)
    pulse.send([b"frame"])
    assert pair[1].recv(100) == b"frame"
    assert pulse.beats == 0


def test_a_moment_that_comes_nearer_wakes_the_thread(pair, pulse):
    pulse.repeat(b"far", time.monotonic() + FOREVER, FOREVER)
    time.sleep(0.01)  # mostly it has begun to wait by then; either way it must not sleep on
    pulse.repeat(b"near", time.monotonic() + 0.01, FOREVER)
    assert pair[1].recv(100) == b"near"


def test_a_step_moves_the_moment(pair, pulse):
    """The thread knew an earlier one: it looks again, and goes on sleeping."""
    pulse.repeat(b"first", time.monotonic() + 0.05, FOREVER)
    pulse.repeat(b"second", time.monotonic() + FOREVER, FOREVER)
    pulse.repeat(b"third", 0.0, FOREVER)
    assert pair[1].recv(100) == b"third"


def test_frames_of_two_writers_do_not_mix(pair, pulse):
    """Through a socket that takes few bytes at a time: most frames are written in parts."""
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    frames, size = 300, 20_000
    body = bytes([7]) * size
    pulse.repeat(b"\x01" * 25, time.monotonic(), 0.0001)

    def write():
        for _ in range(frames):
            assert pulse.send([b"\x02", body[:100], memoryview(body)[100:], b""]) == 1 + size
        pulse.repeat(b"", time.monotonic() + FOREVER, FOREVER)
        ours.shutdown(socket.SHUT_WR)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    with theirs.makefile("rb") as stream:
        found = {b"\x01": 0, b"\x02": 0}
        while kind := stream.read(1):
            found[kind] += 1
            rest = stream.read(24 if kind == b"\x01" else size)
            assert rest == (b"\x01" * 24 if kind == b"\x01" else body)
    writer.join(DEADLINE_S)
    assert found[b"\x02"] == frames
    assert found[b"\x01"] == pulse.beats


def test_a_full_socket_is_left_alone_and_ends_at_once(pair):
    """Nobody reads: repetitions wait for room, and neither they nor a writer outlive the socket."""
    ours, _ = pair
    made = Pulse(ours.fileno())
    made.start()
    made.repeat(HEARTBEAT, time.monotonic(), 0.0001)
    failed = []

    def write():
        try:
            while True:
                made.send([bytes(100_000)])
        except OSError as error:
            failed.append(error)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    ours.shutdown(socket.SHUT_RDWR)
    writer.join(DEADLINE_S)
    assert failed
    made.stop()
    made.stop()
    with pytest.raises(OSError, match="pipe"):
        made.send([b"more"])


def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not(pair, pulse):
    pulse.repeat(HEARTBEAT, time.monotonic(), 0.001)
    pair[1].recv(1)
    child = os.fork()
    if child == 0:
        pulse.forget()
        pulse.stop()
        os._exit(0)
    deadline = time.monotonic() + DEADLINE_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    before = pulse.beats
    while pulse.beats == before:
        assert pair[1].recv(1 << 16)


def test_what_cannot_be_repeated_or_written_is_said(pulse):
    with pytest.raises(ValueError, match="65 bytes"):
        pulse.repeat(bytes(65), 0.0, 1.0)
    with pytest.raises(ValueError, match="17 buffers"):
        pulse.send([b"x"] * 17)
    with pytest.raises(TypeError):
        pulse.send([1])
