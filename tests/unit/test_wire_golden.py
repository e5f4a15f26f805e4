"""The golden bytes of the protocol: every example must be written and read exactly so."""

import hashlib
import struct

import numpy as np
import pytest

from syncer import kernels
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.protocol import (
    DTYPE_BF16,
    DTYPE_F32,
    LAYOUT_DOMAIN,
    MAGIC_BYTES,
    PROFILE_DOMAIN,
    RL_CONTRACT_DOMAIN,
    Msg,
)
from syncer.wire import encode, extended
from syncer.wire import messages as m
from syncer.wire.contracts import rl_contract, run_contract
from syncer.wire.extension import Extension, Held, RunClaim, encode_extension
from syncer.wire.hello import Hello, hello_mac, parse_hello
from syncer.wire.names import FragmentNames, fingerprint
from tests.bulk_frames import (
    encode_bcast,
    encode_change,
    encode_final_fragment,
    encode_init,
    encode_push,
)

L1 = Layout((FragmentLayout(RDA, (4,)),))
L2 = Layout((FragmentLayout(AVG, (6,)), FragmentLayout(ISO, (6, 4), ((2, 3), (2, 2)))))
L1_PRINT = bytes.fromhex("3d2c1598d87e386e871e06824ffc0e4effc1c0723722c07bc1969756d0ef1fb2")
L2_PRINT = bytes.fromhex("70262f63fc2606ef859df27f553bd52724078440d1bfc305c7d748bb250c8b4b")
GENERATION = 0x0102030405060708
H1 = Hello(7, GENERATION, DTYPE_F32, L1, L1_PRINT, L1_PRINT, num_streams=3)
H2 = Hello(0, 1, DTYPE_BF16, L2, L2_PRINT, L2_PRINT)
H1_PAYLOAD = (
    "0400 07000000 0807060504030201 01 01000000  01 01000000 0400000000000000"
    + 2 * L1_PRINT.hex()
    + "0300"
)
GROUP = "59434731 0b000000 6e76696469612d68313030"
PROFILE = bytes(range(32))


def raw(text: str) -> bytes:
    return bytes.fromhex(text.replace("|", ""))


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_constants_have_the_published_bytes():
    assert MAGIC_BYTES.hex() == "dec070d1"
    assert [len(d) for d in (LAYOUT_DOMAIN, RL_CONTRACT_DOMAIN, PROFILE_DOMAIN)] == [15, 28, 32]


def test_fingerprint_example_starts_with_the_layout_domain():
    encoding = raw(
        "7965746f2d6c61796f75742d763100 01000000 01 01000000 01000000 77 0400000000000000"
        "01000000 0400000000000000"
    )
    assert encoding.startswith(LAYOUT_DOMAIN)
    assert hashlib.sha256(encoding).digest() == L1_PRINT


HELLOS = {
    "H1": (H1, H1_PAYLOAD, 98),
    "group": (H1._replace(compat_group="nvidia-h100"), H1_PAYLOAD + GROUP, 117),
    "group and profile": (
        H1._replace(compat_group="nvidia-h100", profile_hash=PROFILE),
        H1_PAYLOAD[:-4] + PROFILE.hex() + "0300" + GROUP,
        149,
    ),
    "H2": (
        H2,
        "0400 00000000 0100000000000000 02 02000000 00 01000000 0600000000000000"
        "02 02000000 0600000000000000 0400000000000000 0200000000000000 0300000000000000"
        "0200000000000000 0200000000000000" + 2 * L2_PRINT.hex() + "0000",
        151,
    ),
}


@pytest.mark.parametrize("name", HELLOS)
def test_hello(name):
    hello, payload, size = HELLOS[name]
    payload = raw(payload)
    assert len(payload) == size
    assert encode.encode_hello(hello) == raw("dec070d1 01") + struct.pack("<Q", size) + payload
    assert parse_hello(payload, key=None, learners=8) == hello


def test_hello_h1_frame_header():
    assert encode.encode_hello(H1)[:13] == raw("dec070d1 01 6200000000000000")


@pytest.mark.parametrize(
    ("name", "mac", "size"),
    [
        ("H1", "9aff0a8eec6972119a4a45363011dd115f46a1ffa27b17b37f72e89fd51e3de7", 130),
        ("group", "9bffec26770c81cebd793825f1f6ff780f260b685cc21f6022bc4b4622f46805", 149),
    ],
)
def test_hello_mac(name, mac, size):
    hello, body, _ = HELLOS[name]
    assert hello_mac(b"secret", raw(body)) == raw(mac)
    payload = encode.encode_hello(hello, key=b"secret")[13:]
    assert payload == raw(body) + raw(mac)
    assert len(payload) == size
    assert parse_hello(payload, key=b"secret", learners=8) == hello


def test_rl_contract():
    expected = "44cc5a7c6ad4774b4167f929ca8fd30caad86c7ca3b22159ea75a858bc2dfe73"
    assert rl_contract(L1_PRINT, b"\x11" * 32).hex() == expected


INSTANCE = 0x1122334455667788
BLUE = bytes.fromhex("f2a3ebe9eb1dd142fd8c49372cf72032ab97c3d7f328b61468126f0c2e031958")
NAMES = (FragmentNames((("w", (2, 2)),)),)
BLOCK = Extension("syncer 1.0 on alpha", (Held(INSTANCE, 17),), NAMES,
                  run=RunClaim(L1_PRINT, "blue"))
H1_BLUE = H1._replace(contract=BLUE, extension=BLOCK)
BLOCK_BYTES = raw(
    "0100 0100 13000000 73796e63657220312e30206f6e20616c706861"
    "0200 10000000 8877665544332211 1100000000000000"
    "0300 1a000000 00 01000000 77 02000000 0200000000000000 0200000000000000"
    "0500 24000000 3d2c1598d87e386e871e06824ffc0e4effc1c0723722c07bc1969756d0ef1fb2 626c7565"
    "7b000000 53595831"
)


def test_run_contracts():
    assert run_contract(L1_PRINT, "blue") == BLUE
    one = fingerprint(Layout((FragmentLayout(AVG, (1,)),)), (FragmentNames((("f0.t0", (1,)),)),))
    assert one.hex().startswith("2d4c272a")
    assert run_contract(one, "blue").hex() == (
        "096518e00c029c963d4b4fc4137926bc5ef064760e645fda4b68e37767908fa7")


def test_hello_with_a_block():
    assert encode_extension(BLOCK) == BLOCK_BYTES
    payload = encode.encode_hello(H1_BLUE)[13:]
    assert payload == raw(H1_PAYLOAD.replace(2 * L1_PRINT.hex(), L1_PRINT.hex() + BLUE.hex())) + (
        BLOCK_BYTES)
    assert len(payload) == 229
    assert hashlib.sha256(payload).hexdigest() == (
        "42cb53e6cd3a6b85d1cb1f95a6766115337aaa20c785aa1b983bba1a6274e497")
    read = parse_hello(payload, key=None, learners=8)
    assert read == H1_BLUE._replace(extension=BLOCK._replace(names=None)), "it is not learner 0"
    assert parse_hello(encode.encode_hello(H1_BLUE._replace(learner=0))[13:], key=None,
                       learners=8) == H1_BLUE._replace(learner=0)


def test_hello_with_a_block_and_a_mac():
    payload = encode.encode_hello(H1_BLUE, b"secret")[13:]
    assert payload[-32:].hex() == "10421f3242ff2701b211a773325f094e82fa0e05b0a612df1a1b60ab5cb978c3"
    assert hashlib.sha256(payload).hexdigest() == (
        "56b8b182fd379a88b946f42566c72e1b5b03da04a49b01477975c391c0b7c041")


def test_data_hello_with_a_proof():
    hello = m.DataHello(7, GENERATION, 2)
    payload = encode.encode_data_hello(hello, b"secret")[13:]
    assert (len(payload), payload[:16]) == (48, encode.encode_data_hello(hello)[13:])
    assert m.parse_data_hello(payload) == hello._replace(proof=payload[16:])


PUSH = m.Push(7, 0, 5, 1, 4, 10, 3, 300, memoryview(f32(0.5, -0.25, 0.0, -2.0)))
PUSH_FRAME = raw(
    "dec070d1044000000000000000 07000000 00000000 0500000000000000 01000000 0400000000000000"
    "0a00000000000000 03000000 2c01000000000000 0000003f 000080be 00000000 000000c0"
)
BF16 = raw("803f 20c0 203e 0000")
Q4 = raw("0000803f e705" + 126 * "00")
TWO = Layout((FragmentLayout(RDA, (2,)),))
THREE = Layout((FragmentLayout(RDA, (1,)),) * 3)

FRAMES = {
    Msg.DATA_HELLO: (
        m.DataHello(7, GENERATION, 2),
        encode.encode_data_hello,
        m.parse_data_hello,
        "dec070d1081000000000000000 0400 07000000 0807060504030201 0200",
    ),
    Msg.INIT_PARAMS: (
        m.Init(0, memoryview(f32(1, 2, 3, 4))),
        encode_init,
        lambda payload: m.parse_init(payload, 0, L1, DTYPE_F32),
        "dec070d1021400000000000000 00000000 0000803f 00000040 00004040 00008040",
    ),
    Msg.PULL_REQ: (
        m.Pull(0, 5, 1),
        encode.encode_pull,
        lambda payload: m.parse_pull(payload, L1),
        "dec070d1031000000000000000 00000000 0500000000000000 01000000",
    ),
    Msg.HEARTBEAT: (
        m.Heartbeat(7, 11),
        encode.encode_heartbeat,
        lambda payload: m.parse_heartbeat(payload, 7),
        "dec070d1060c00000000000000 07000000 0b00000000000000",
    ),
    Msg.FINAL_MANIFEST: (
        m.Manifest(17, (15, 16, 17)),
        encode.encode_manifest,
        lambda payload: m.parse_manifest(payload, THREE),
        "dec070d10b2600000000000000 0100 1100000000000000 03000000 0f00000000000000"
        "1000000000000000 1100000000000000",
    ),
    Msg.FINAL_ACK: (
        m.FinalAck(17),
        encode.encode_final_ack,
        m.parse_final_ack,
        "dec070d10c0a00000000000000 0100 1100000000000000",
    ),
    Msg.FINAL_FRAGMENT: (
        m.FinalFragment(0, 17, memoryview(f32(1, -2.5))),
        encode_final_fragment,
        lambda payload: m.parse_final_fragment(payload, TWO),
        "dec070d10d1400000000000000 00000000 1100000000000000 0000803f 000020c0",
    ),
    Msg.BUDGET_DONE: (
        m.BudgetDone(4),
        encode.encode_budget_done,
        m.parse_budget_done,
        "dec070d10e0800000000000000 0400000000000000",
    ),
    Msg.WELCOME: (
        extended.Welcome(3, INSTANCE, 17, 40, 4, 2, 24.0, extended.RunState.RUNNING, "syncer 1.0",
                         "blue", 0, (True,)),
        extended.encode_welcome,
        lambda payload: extended.parse_welcome(payload, 1),
        "dec070d10f5200000000000000 0100 0300000000000000 8877665544332211 1100000000000000"
        "2800000000000000 04000000 02000000 0000000000003840 01 0a00 73796e63657220312e30"
        "0400 626c7565 0000000000000000 01000000 01",
    ),
    Msg.NOTICE: (
        extended.NoticeText(1, "waiting for learner 1"),
        extended.encode_notice,
        extended.parse_notice,
        "dec070d1101700000000000000 0100 77616974696e6720666f72206c6561726e65722031",
    ),
    Msg.REPORT: (
        extended.LearnerReport(loss=2.5, tokens_per_s=1000.0),
        extended.encode_report,
        extended.parse_report,
        "dec070d1111e00000000000000 0100 0100 08000000 0000000000000440"
        "0200 08000000 0000000000408f40",
    ),
    Msg.LAYOUT: (
        extended.SessionLayout(DTYPE_F32, L1, L1_PRINT, BLUE, NAMES),
        extended.encode_session_layout,
        extended.parse_session_layout,
        "dec070d1127400000000000000 0100 01 01000000 01 01000000 0400000000000000"
        + L1_PRINT.hex() + BLUE.hex()
        + "0300 1a000000 00 01000000 77 02000000 0200000000000000 0200000000000000",
    ),
    Msg.BCAST_FRAGMENT: (
        m.Bcast(0, 9, memoryview(BF16)),
        encode_bcast,
        lambda payload: m.parse_bcast(payload, L1, DTYPE_BF16),
        "dec070d1051400000000000000 00000000 0900000000000000 803f 20c0 203e 0000",
    ),
    Msg.BCAST_CHANGE: (
        m.BcastChange(0, 8, 9, memoryview(Q4)),
        encode_change,
        lambda payload: m.parse_bcast_change(payload, L1),
        "dec070d1139800000000000000 00000000 0800000000000000 0900000000000000" + Q4.hex(),
    ),
    Msg.PUSH_FATE: (
        extended.Fate(0, 5, 2, 5),
        extended.encode_fate,
        lambda payload: extended.parse_fate(payload, 1),
        "dec070d1141100000000000000 00000000 0500000000000000 02000000 05",
    ),
    Msg.PUSH_FRAGMENT: (
        PUSH,
        encode_push,
        lambda payload: m.parse_push(payload, 7, L1, DTYPE_F32),
        PUSH_FRAME.hex(),
    ),
}


def test_a_change_makes_the_broadcast_that_it_stands_for():
    """1, -2.5, 0.15625, 0 and the change 1, -0.5, 0.25, 0."""
    after = raw("0040 40c0 d03e 0000")
    out = bytearray(8)
    kernels.apply_change(DTYPE_BF16, BF16, Q4, out)
    assert out == after
    told, made = bytearray(132), bytearray(8)
    values = np.array([2.125, -3, 0.40625, 0.001], np.float32)  # 1.125, -0.5, 0.25, 0.001
    assert kernels.encode_change(DTYPE_BF16, values, BF16, told, made) == -1
    assert told == raw("0000903f e705" + 126 * "00")
    assert made == raw("0840 44c0 e03e 0000")


def test_who_asks_for_fates_says_so():
    block = encode_extension(BLOCK._replace(fates=True))
    assert block == BLOCK_BYTES[:-8] + raw("0700 00000000  81000000 53595831")


def test_who_takes_changes_says_so_and_is_told():
    block = encode_extension(BLOCK._replace(changes=(3,)))
    assert block == BLOCK_BYTES[:-8] + raw("0600 01000000 03  82000000 53595831")
    message, _, _, expected = FRAMES[Msg.WELCOME]
    told = message._replace(changes=3)
    frame = raw(expected.replace("5200", "5300", 1).replace("0100 03", "0200 03", 1) + "03")
    assert extended.encode_welcome(told) == frame
    assert extended.parse_welcome(frame[13:], 1) == told


@pytest.mark.parametrize("msg_type", FRAMES)
def test_frame(msg_type):
    message, encoder, parser, expected = FRAMES[msg_type]
    assert encoder(message).hex() == raw(expected).hex()
    assert parser(memoryview(raw(expected))[13:]) == message
    assert raw(expected)[4] == msg_type


def test_shutdown():
    assert encode.encode_shutdown() == raw("dec070d1070000000000000000")
    m.parse_shutdown(b"")


def test_error():
    assert encode.encode_error("boom") == raw("dec070d10a0400000000000000 626f6f6d")
    assert m.parse_error(memoryview(b"boom")) == "boom"


def test_chunk():
    gathers = encode.chunk_message(Msg.PUSH_FRAGMENT, encode.push_head(PUSH), PUSH.delta, 0)
    assert [b"".join(gather) for gather in gathers] == [
        raw("dec070d1096500000000000000 0000000000000000 4d00000000000000 0000000000000000")
        + PUSH_FRAME
    ]
