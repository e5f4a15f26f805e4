"""What is written beside its caller: order, whole lines, what is lost and how that is said."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

from syncer.server import tape as tape_module
from syncer.server.log import Log
from syncer.server.system import AppendFile, lines_to, thread_aside
from syncer.server.tape import Recorder, Tape
from syncer.streams import Backlog, LineWriter, WriterThread
from tests.e2e.waiting import until

SMALLEST_PIPE = 4096


def gap(count: int) -> bytes:
    return b"(%d)" % count


def drained(backlog: Backlog) -> list[bytes]:
    pieces = []
    while (piece := backlog.take()) is not None:
        pieces.append(piece)
        backlog.done(True)
    return pieces


# -------------------------------------------------------------------------------------- backlog
def test_a_gap_stands_where_pieces_found_no_place():
    backlog = Backlog(4, gap)
    assert backlog.put(b"ab")
    assert backlog.put(b"cd")
    assert not backlog.put(b"e")
    assert not backlog.put(b"f")
    assert backlog.take() == b"ab"
    backlog.done(True)
    assert backlog.put(b"g")
    assert backlog.left == 4
    assert drained(backlog) == [b"cd", b"(2)", b"g"]
    assert backlog.left == 0


def test_a_gap_at_the_end_is_said_without_another_piece():
    backlog = Backlog(2, gap)
    backlog.put(b"ab")
    assert not backlog.put(b"c")
    assert drained(backlog) == [b"ab", b"(1)"]


def test_a_piece_larger_than_the_limit_goes_into_an_empty_backlog():
    backlog = Backlog(2, gap)
    assert backlog.put(b"abcdef")
    assert not backlog.put(b"g")
    assert drained(backlog) == [b"abcdef", b"(1)"]


def test_what_cannot_be_written_is_counted_until_the_count_can_be_written():
    backlog = Backlog(100, gap)
    for piece in (b"a", b"b"):
        backlog.put(piece)
        assert backlog.take() in (b"a", gap(1))
        backlog.done(False)
        while backlog.take() is not None:
            backlog.done(False)
    assert backlog.left == 2
    assert backlog.take() is None               # it does not try the same again and again
    backlog.put(b"c")
    assert drained(backlog) == [b"(2)", b"c"]


# --------------------------------------------------------------------------------------- thread
def test_pieces_of_many_threads_are_written_in_order_and_all_at_the_end():
    written: list[bytes] = []
    writer = WriterThread("writes", Backlog(1 << 20, gap), written.append)

    def put(name: int) -> None:
        for number in range(200):
            writer.put(b"%d %d" % (name, number))

    threads = [threading.Thread(target=put, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close(60) == 0
    for name in range(3):
        mine = [piece for piece in written if piece.startswith(b"%d " % name)]
        assert mine == [b"%d %d" % (name, number) for number in range(200)]
    assert not writer.put(b"behind the end")


def test_a_writer_that_hangs_holds_nobody_up():
    hanging = threading.Event()
    writer = WriterThread("hangs", Backlog(1 << 20, gap), lambda piece: hanging.wait())
    for _ in range(3):
        assert writer.put(b"x")
    assert writer.close(0.05) == 3
    assert writer.close(1e6) == 3               # nobody waits a second time
    hanging.set()
    writer.thread.join()


def test_an_error_of_any_kind_costs_one_piece():
    written: list[bytes] = []

    def write(piece: bytes) -> None:
        if piece == b"bad":
            raise ValueError("nobody expects it")
        written.append(piece)

    writer = WriterThread("fails", Backlog(1 << 20, gap), write)
    for piece in (b"a", b"bad", b"b"):
        writer.put(piece)
        until(lambda: not writer.backlog.pieces and not writer.backlog.in_hand, "written")
    assert writer.close(60) == 0
    assert written == [b"a", b"(1)", b"b"]


# --------------------------------------------------------------------------------------- a pipe
@pytest.fixture
def pipe():
    """The smallest one: (read end, write end)."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)
    yield reader, writer
    for end in reader, writer:
        os.close(end)


def filled(descriptor: int) -> int:
    """A pipe takes nothing any more; the bytes that are in it."""
    os.set_blocking(descriptor, False)
    count = 0
    try:
        while True:
            count += os.write(descriptor, bytes(SMALLEST_PIPE))
    except BlockingIOError:
        return count
    finally:
        os.set_blocking(descriptor, True)


def emptied(reader: int, count: int) -> None:
    while count:
        count -= len(os.read(reader, count))


def told(reader: int, last: bytes) -> list[bytes]:
    """Lines up to one that ends so, without their time."""
    text = b""
    while not text.endswith(last + b"\n"):
        text += os.read(reader, SMALLEST_PIPE)
    return [line.split(b" ", 1)[1] for line in text.splitlines()]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_log_that_nobody_reads_holds_nobody_up_and_says_what_was_lost(pipe, monkeypatch,
                                                                        blocking):
    reader, writer = pipe
    full = filled(writer)
    os.set_blocking(writer, blocking)
    monkeypatch.setattr("syncer.server.log.LOG_BYTES_MAX", 10_000)
    lines = lines_to(writer)
    log = Log("info", "text", lines)
    for number in range(1000):
        log.info("line", number=number)
    assert lines.aside.backlog.lost > 0
    emptied(reader, full)
    number = 0                                  # a gap may stand in the middle, too
    while number < 1000:
        for line in told(reader, b""):
            if b"log lines lost" in line:
                assert line.startswith(b"WARN ")
                number += int(line.split(b"lines=")[1])
            else:
                assert line == b"INFO  line number=%d" % number
                number += 1
    assert number == 1000
    log.info("heard again")
    log.close()
    assert told(reader, b"heard again") == [b"INFO  heard again"]


def test_a_log_whose_reader_has_gone_is_heard_again_by_the_next(pipe):
    reader, gone = os.pipe()
    os.close(reader)
    log = Log("info", "text", lines_to(gone))
    log.info("into the void")
    until(lambda: log.lines.aside.backlog.lost == 1, "the line is lost")
    os.dup2(pipe[1], gone)
    log.info("heard again")
    log.close()
    assert told(pipe[0], b"heard again") == [b"WARN  log lines lost lines=1",
                                             b"INFO  heard again"]
    os.close(gone)


def test_a_line_that_was_torn_is_ended_before_the_next(pipe, monkeypatch):
    write, calls = os.write, []

    def torn(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:3] if len(calls) == 1 else data)

    monkeypatch.setattr(os, "write", torn)
    writer = LineWriter(pipe[1])
    with pytest.raises(OSError, match="No space"):
        writer(b"abcdef\n")
    writer(b"whole\n")
    monkeypatch.undo()
    assert os.read(pipe[0], SMALLEST_PIPE) == b"abc\nwhole\n"


# --------------------------------------------------------------------------------------- a tape
def test_a_tape_that_takes_nothing_is_told_and_counted(tmp_path, monkeypatch):
    """And nobody waits for it."""
    monkeypatch.setattr(tape_module, "TAPE_BYTES_MAX", 100)
    os.mkfifo(tmp_path / "tape")
    reader = os.open(tmp_path / "tape", os.O_RDONLY | os.O_NONBLOCK)
    file = AppendFile(tmp_path / "tape")
    full = filled(file.descriptor)
    os.set_blocking(reader, True)
    heard, said = os.pipe()
    log = Log("info", "text", lines_to(said))
    recorder = Recorder(Tape(tmp_path / "tape", file), log, thread_aside)
    count = 0
    while not recorder.full:
        count += 1
        recorder.write({"step": count})
        until(lambda: recorder.aside.backlog.in_hand, "the first one waits for the reader")
    recorder.write({"step": count + 1})
    emptied(reader, full)
    assert told(heard, b"records=2")[0].startswith(
        b"WARN  event tape takes nothing: records are lost until it does path=")
    recorder.write({"step": "the end"})
    recorder.close()
    log.close()
    steps = [b'{"step": %d}' % step for step in range(1, count)]
    assert os.read(reader, SMALLEST_PIPE).splitlines() == [*steps, b'{"step": "the end"}']
    for end in reader, heard, said:
        os.close(end)
