"""Every rule of the block behind a HELLO, each with a block that breaks it."""

import struct

import pytest

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.layout import AVG, FragmentLayout, Layout
from syncer.protocol import DTYPE_F32, Msg
from syncer.wire import encode, extended
from syncer.wire.contracts import run_contract
from syncer.wire.extension import Extension, Held, Role, RunClaim, encode_extension
from syncer.wire.hello import Hello, parse_hello
from syncer.wire.limits import Limits
from syncer.wire.names import FragmentNames, fingerprint

LAYOUT = Layout((FragmentLayout(AVG, (4, 2)), FragmentLayout(AVG, (3,))))
NAMES = (FragmentNames((("a", (2, 2)), ("b", (2,)))), FragmentNames((("c", (3,)),)))
PRINT = fingerprint(LAYOUT, NAMES)
HELLO = Hello(0, 9, DTYPE_F32, LAYOUT, PRINT, PRINT)
BODY = encode.encode_hello(HELLO)[13:]
FULL = Extension("me", (Held(3, 4), None), NAMES)


def record(tag: int, data: bytes) -> bytes:
    return struct.pack("<HI", tag, len(data)) + data


def with_block(*records: bytes, revision: int = 1, body: bytes = BODY) -> bytes:
    block = struct.pack("<H", revision) + b"".join(records)
    return body + block + struct.pack("<I", len(block)) + b"SYX1"


def read(payload: bytes, learners: int = 4) -> Hello:
    return parse_hello(memoryview(payload), key=None, learners=learners)


def body(**changes) -> bytes:
    return encode.encode_hello(HELLO._replace(**changes))[13:]


HELD = struct.pack("<4Q", 3, 4, 0, 2**64 - 1)
NAME_BYTES = (b"\0" + struct.pack("<I", 1) + b"a" + struct.pack("<I2Q", 2, 2, 2)
              + struct.pack("<I", 1) + b"b" + struct.pack("<IQ", 1, 2)
              + b"\0" + struct.pack("<I", 1) + b"c" + struct.pack("<IQ", 1, 3))
BLUE = run_contract(PRINT, "blue")


def test_a_whole_block():
    payload = with_block(record(1, b"me"), record(2, HELD), record(3, NAME_BYTES))
    assert read(payload).extension == FULL
    assert encode_extension(FULL) == payload[len(BODY):]


def test_an_empty_block_and_one_of_the_future():
    assert read(with_block()).extension == Extension()
    assert read(with_block(record(77, b"?"), revision=9)).extension == Extension()


REFUSED = {
    "revision 0": with_block(revision=0),
    "record 1 has 5 bytes, 2 are left": with_block(record(1, b"hello")[:-3]),
    "record 77 is there twice": with_block(record(77, b""), record(77, b"")),
    "client is not UTF-8": with_block(record(1, b"\xff")),
    "a control character": with_block(record(1, b"a\nb")),
    "client has 257 bytes": with_block(record(1, b"x" * 257)),
    "held has 16 bytes, expected 32": with_block(record(2, HELD[:16])),
    "role is 03": with_block(record(4, b"\3")),
    "role is 0000": with_block(record(4, b"\0\0")),
    "a reader takes f32": with_block(record(4, b"\1"), body=body(dtype=3)),
    "no data sockets, found 2 streams": with_block(record(4, b"\2"), body=body(num_streams=2)),
    "run has 31 bytes": with_block(record(5, bytes(31))),
    "run has 32 bytes": with_block(record(5, bytes(32))),
    "run has 97 bytes": with_block(record(5, PRINT + b"x" * 65)),
    "run has 36 bytes": with_block(record(5, PRINT + b"bl/e")),
    "not that of the run blue": with_block(record(5, PRINT + b"blue")),
    "not that of the run bleu": with_block(record(5, PRINT + b"bleu"), body=body(contract=BLUE)),
    "changes has 0 bytes": with_block(record(6, b"")),
    "changes has 17 bytes": with_block(record(6, bytes(17))),
    "fates has 1 bytes, expected none": with_block(record(7, b"\1")),
    "names truncated": with_block(record(3, NAME_BYTES[:-1])),
    "1 bytes behind the last tensor": with_block(record(3, NAME_BYTES + b"\0")),
    "have identity 2": with_block(record(3, b"\2" + NAME_BYTES[1:])),
    "that do not make its 3 elements": with_block(record(3, NAME_BYTES[:-8] + b"\2" + bytes(7))),
    "is empty, __metadata__, or there already": with_block(
        record(3, NAME_BYTES.replace(b"c", b"a"))),
    "do not have the fingerprint": with_block(record(3, NAME_BYTES.replace(b"c", b"d"))),
    "65569 bytes without the names": with_block(record(77, bytes(64 * 1024 + 25))),
    "its length is 1 where": BODY + bytes(1) + struct.pack("<I", 1) + b"SYX1",
    "its length is 8388609 where": BODY + bytes(2**23 + 1) + struct.pack("<I", 2**23 + 1) + b"SYX1",
    "its length is 4 where 10 bytes": BODY[:-2] + bytes(2) + struct.pack("<I", 4) + b"SYX1",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused(reason):
    with pytest.raises(RemoteProtocolError) as caught:
        read(REFUSED[reason])
    assert str(caught.value).startswith("invalid HELLO extension: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize("left", range(1, 6))
def test_a_rest_that_is_no_record(left):
    with pytest.raises(RemoteProtocolError, match=f"extension: {left} bytes are left where"):
        read(with_block(record(1, b"me") + bytes(left)))


def test_a_group_that_ends_in_these_letters_is_a_group():
    for group in ("SYX1", "\0\0\0\2SYX1"):
        hello = HELLO._replace(compat_group=group)
        assert read(encode.encode_hello(hello)[13:]) == hello


def test_what_is_in_front_of_the_block_is_as_ever():
    with pytest.raises(RemoteProtocolError, match="invalid HELLO: invalid HELLO profile extension"):
        read(with_block(body=BODY + b"\0"))
    hello = HELLO._replace(compat_group="nvidia", profile_hash=bytes(32), extension=Extension())
    assert read(encode.encode_hello(hello)[13:]) == hello


def test_fates_are_asked_for_or_not():
    assert read(with_block(record(7, b""))).extension == Extension(fates=True)
    assert read(with_block()).extension == Extension()


def test_dtypes_of_changes_that_nobody_knows_yet_are_read():
    assert read(with_block(record(6, b"\7\3"))).extension == Extension(changes=(7, 3))


def test_the_range_of_ids_is_for_learners():
    outside = body(learner=4)
    for payload in (outside, with_block(body=outside)):
        with pytest.raises(RemoteProtocolError, match="invalid HELLO: learner_id 4 is outside"):
            read(payload)
    assert read(with_block(record(4, b"\1"), body=outside)).extension.role is Role.READER
    with pytest.raises(RemoteProtocolError, match="invalid HELLO: learner_id 4 is outside"):
        read(encode.encode_hello(HELLO._replace(learner=4, compat_group="SYX1"))[13:])


def test_names_of_others_are_not_read():
    assert read(with_block(record(3, b"rubbish"), body=body(learner=1))).extension == Extension()


def test_a_reader_may_name_a_run_of_any_contract():
    payload = with_block(record(4, b"\1"), record(5, PRINT + b"blue"))
    assert read(payload).extension.run == RunClaim(PRINT, "blue")


def test_iso_tensors_count_by_their_matrix_unless_shapes_are_identity():
    iso = Layout((FragmentLayout(2, (6,), ((2, 3),)),))
    plain = (FragmentNames((("w", (1, 2, 3)),)),)
    matrix = (FragmentNames((("w", (2, 3)),)),)
    assert fingerprint(iso, plain) == fingerprint(iso, matrix)
    assert fingerprint(iso, (plain[0]._replace(identity=True),)) != fingerprint(iso, matrix)
    assert fingerprint(iso, (matrix[0]._replace(identity=True),)) == fingerprint(iso, matrix)


@pytest.mark.parametrize(("extension", "text"), [
    (Extension(client="x" * 257), "client must be at most 256"),
    (Extension(client="a\tb"), "without control characters"),
    (Extension(run=RunClaim(PRINT, "")), "run is '', expected 1 to 64"),
    (Extension(names=(FragmentNames((("\ud800", (1,)),)),)), "is no UTF-8"),
    (Extension(names=(FragmentNames((("x" * 2**23, (1,)),)),)), "send it without names"),
])
def test_what_cannot_be_sent(extension, text):
    with pytest.raises(LocalProtocolError, match=text):
        encode_extension(extension)


WELCOME = extended.Welcome(1, 2, 3, 4, 5, 6, 7.0, extended.RunState.WAITING, "v", "", 0, (True,))


@pytest.mark.parametrize(("change", "text"), [
    ((0, b"\0\0"), "revision 0"),
    ((2, bytes(8)), "epoch 0"),
    ((10, bytes(8)), "instance 0"),
    ((50, b"\3"), "state 3"),
])
def test_a_welcome_that_is_refused(change, text):
    payload = bytearray(extended.encode_welcome(WELCOME)[13:])
    payload[change[0] : change[0] + len(change[1])] = change[1]
    with pytest.raises(RemoteProtocolError, match=text):
        extended.parse_welcome(payload, 1)


def test_a_welcome_of_another_layout_or_length():
    payload = extended.encode_welcome(WELCOME)[13:]
    with pytest.raises(RemoteProtocolError, match="WELCOME has 1 fragments, expected 2"):
        extended.parse_welcome(payload, 2)
    with pytest.raises(RemoteProtocolError, match="WELCOME payload has"):
        extended.parse_welcome(payload + b"\0", 1)
    assert extended.parse_welcome(b"\3" + payload[1:] + b"\0more", 1) == WELCOME
    with pytest.raises(RemoteProtocolError, match="WELCOME payload truncated"):
        extended.parse_welcome(b"\2" + payload[1:], 1)
    with pytest.raises(RemoteProtocolError, match="WELCOME payload has"):
        extended.parse_welcome(b"\2" + payload[1:] + b"\3\0", 1)
    with pytest.raises(LocalProtocolError, match="at most 4096"):
        extended.encode_welcome(WELCOME._replace(version="x" * 5000))


def test_a_notice_is_cut_at_a_character():
    notice = extended.NoticeText(6, "ä" * 600)
    payload = extended.encode_notice(notice)[13:]
    assert extended.parse_notice(payload) == extended.NoticeText(6, "ä" * 512)
    with pytest.raises(RemoteProtocolError, match="NOTICE payload truncated"):
        extended.parse_notice(b"\1")


def test_figures_that_are_not_finite_were_not_sent():
    report = extended.LearnerReport(float("nan"), float("inf"), 0.5)
    payload = extended.encode_report(report)[13:]
    assert extended.parse_report(payload) == extended.LearnerReport(lr=0.5)
    assert extended.parse_report(payload + record(99, b"later")).lr == 0.5


@pytest.mark.parametrize("payload", [
    b"", b"\0\0", b"\1\0\0", b"\1\0" + record(1, bytes(7)), b"\1\0" + record(1, bytes(8)) * 2,
    b"\1\0" + record(9, b"xx")[:-1]])
def test_a_report_that_is_refused(payload):
    with pytest.raises(RemoteProtocolError, match=r"^invalid REPORT: "):
        extended.parse_report(payload)


def test_only_who_introduced_itself_may_report():
    plain, more = Limits.for_server(LAYOUT, 1), Limits.for_server(LAYOUT, 1, extended=True)
    assert Msg.REPORT not in plain.frame_bytes_max
    assert more.frame_bytes_max[Msg.REPORT] == 1024
    assert set(Limits.for_reader_group().frame_bytes_max) == {Msg.HEARTBEAT}
    learner = Limits.for_client(LAYOUT, 1, extended=True).frame_bytes_max
    assert learner[Msg.WELCOME] == 4096 + 2
    assert learner[Msg.NOTICE] == 2 + 1024
    assert not {Msg.WELCOME, Msg.NOTICE} & set(Limits.for_client(LAYOUT, 1).frame_bytes_max)
