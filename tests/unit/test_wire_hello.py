"""Every refusal of a HELLO, in the order of the protocol, and admission to a session."""

import struct

import pytest

from syncer.errors import LocalProtocolError, RemoteProtocolError
from syncer.layout import AVG, ISO, RDA, FragmentLayout, Layout
from syncer.protocol import DTYPE_BF16, DTYPE_F32, DTYPE_Q4
from syncer.wire.contracts import rl_contract, run_contract
from syncer.wire.encode import encode_hello
from syncer.wire.extension import Extension, RunClaim
from syncer.wire.hello import Hello, parse_hello
from syncer.wire.identity import Identity, Pins, identity_refusal, is_of_another_run, mismatch

LAYOUT = Layout((FragmentLayout(RDA, (4,)),))
HELLO = Hello(1, 9, DTYPE_F32, LAYOUT, b"f" * 32, b"c" * 32, num_streams=3)
BODY = encode_hello(HELLO)[13:]
HEAD_BYTES, FRAGMENT_BYTES = 19, 13
LAYOUT_AT = HEAD_BYTES
CONTRACT_END = HEAD_BYTES + FRAGMENT_BYTES + 64


def refusal(payload: bytes, key: bytes | None = None, learners: int = 4) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_hello(payload, key=key, learners=learners)
    return str(caught.value)


def head(version=4, learner=1, generation=9, dtype=1, fragments=1) -> bytes:
    return struct.pack("<HIQBI", version, learner, generation, dtype, fragments)


def with_layout(layout: bytes, fragments: int = 1) -> bytes:
    return head(fragments=fragments) + layout + BODY[HEAD_BYTES + FRAGMENT_BYTES :]


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def test_the_base_case_is_accepted():
    assert parse_hello(BODY, key=None, learners=4) == HELLO


# --- step 0 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        bytes(31),
        bytes(32),
        BODY,
        encode_hello(HELLO, key=b"other")[13:],
        encode_hello(HELLO, key=b"secret")[13:-1] + b"\0",
        b"\5" + encode_hello(HELLO, key=b"secret")[14:],
    ],
)
def test_authentication_comes_before_everything(payload):
    assert refusal(payload, key=b"secret").startswith("HELLO authentication failed")


def test_a_key_on_the_learner_only_is_not_called_an_authentication_failure():
    text = refusal(encode_hello(HELLO, key=b"secret")[13:])
    assert text.startswith("invalid HELLO: num_streams ")
    assert "exceeds limit 256" in text


# --- steps 1 to 10 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"", "payload truncated: 2 bytes expected at offset 0, 0 are left"),
        (b"\4", "payload truncated: 2 bytes expected at offset 0, 1 are left"),
        (b"\5\0", "protocol version mismatch: learner speaks 5, this syncer speaks 4"),
        (b"\3\0garbage", "protocol version mismatch: learner speaks 3, this syncer speaks 4"),
        (head(learner=4)[:6], "learner_id 4 is outside configured range 0..3"),
        (head(generation=0)[:14], "generation must be nonzero"),
        (head(dtype=0)[:15], "unknown dtype 0, expected 1 (f32), 2 (bf16) or 3 (q4)"),
        (head(dtype=4)[:15], "unknown dtype 4, expected 1 (f32), 2 (bf16) or 3 (q4)"),
        (head(fragments=0), "layout must contain at least one fragment"),
        (head(fragments=2) + bytes(9), "num_fragments 2 does not fit in the 9 bytes left"),
        (head(fragments=2**32 - 1), "num_fragments 4294967295 does not fit in the 0 bytes left"),
        (with_layout(b"\3\1\0\0\0" + u64(4)), "fragment 0 has unknown merge mode 3"),
        (with_layout(b"\1\0\0\0\0" + u64(4)), "fragment 0 must contain at least one tensor"),
        (
            head() + b"\1\2\0\0\0" + u64(4) + bytes(7),
            "fragment 0 has num_tensors 2, which does not fit in the 15 bytes left",
        ),
        (with_layout(b"\1\2\0\0\0" + u64(4, 0)), "fragment 0 tensor 1 has no elements"),
        (
            with_layout(b"\1\2\0\0\0" + u64(2**64 - 1, 1)),
            "fragment 0 numel overflows 64 bits",
        ),
        (
            with_layout(2 * (b"\1\1\0\0\0" + u64(2**63)), fragments=2),
            "layout numel overflows 64 bits",
        ),
        (
            with_layout(b"\2\1\0\0\0" + u64(6, 2, 2)),
            "fragment 0 tensor 0 has shape 2 x 2, which is not its numel 6",
        ),
        (
            with_layout(b"\2\1\0\0\0" + u64(6, 0, 3)),
            "fragment 0 tensor 0 has shape 0 x 3, which is not its numel 6",
        ),
        (
            # The product is 2**64 + 4, which 64 bits would make a 4.
            with_layout(b"\2\1\0\0\0" + u64(4, 2**62 + 1, 4)),
            f"fragment 0 tensor 0 has shape {2**62 + 1} x 4, which is not its numel 4",
        ),
        (
            BODY[: CONTRACT_END - 1],
            "payload truncated: 32 bytes expected at offset 64, 31 are left",
        ),
        (
            BODY[:CONTRACT_END],
            "invalid HELLO profile extension length: 0 bytes after the contract, expected 2 or 34",
        ),
        (
            BODY + b"\0",
            "invalid HELLO profile extension length: 3 bytes after the contract, expected 2 or 34",
        ),
        (BODY[:-2] + b"\1\1", "num_streams 257 exceeds limit 256"),
        (BODY + b"YCG1" + struct.pack("<I", 2) + b"\xff\xfe", "compat group is not UTF-8"),
        (
            with_layout(b"\1\1\0\0\0" + u64(2**61)),
            f"layout needs a message of {2**63 + 12} bytes, more than {2**63 - 1} can be addressed",
        ),
    ],
)
def test_refusal(payload, text):
    assert refusal(payload) == f"invalid HELLO: {text}"


def test_iso_shapes_follow_all_numels_of_the_fragment():
    layout = with_layout(b"\2\2\0\0\0" + u64(6, 4, 2, 3, 2, 2))
    parsed = parse_hello(layout, key=None, learners=4).layout
    assert parsed == Layout((FragmentLayout(ISO, (6, 4), ((2, 3), (2, 2))),))
    short = head() + b"\2\1\0\0\0" + u64(6, 2)
    assert "payload truncated" in refusal(short)


def test_limits_of_the_numbers_are_allowed():
    assert parse_hello(BODY[:-2] + b"\0\1", key=None, learners=4).num_streams == 256
    last = parse_hello(head(learner=3, generation=2**64 - 1) + BODY[19:], key=None, learners=4)
    assert (last.learner, last.generation) == (3, 2**64 - 1)
    largest = with_layout(b"\1\1\0\0\0" + u64((2**63 - 1 - 61) // 4 - 1))
    assert parse_hello(largest, key=None, learners=4).layout.numel > 2**60


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("profile", [None, b"p" * 32])
def test_compat_group_and_profile_are_told_apart_by_length(size, profile):
    hello = HELLO._replace(compat_group="é" * (size // 2) + "x" * (size % 2), profile_hash=profile)
    assert parse_hello(encode_hello(hello)[13:], key=None, learners=4) == hello


@pytest.mark.parametrize("size", [0, 65])
def test_compat_group_of_a_wrong_size_is_no_trailer(size):
    text = refusal(BODY + b"YCG1" + struct.pack("<I", size) + b"x" * size)
    assert "invalid HELLO profile extension length" in text


def test_trailer_length_must_fit_exactly():
    for claimed in (1, 3):
        text = refusal(BODY + b"YCG1" + struct.pack("<I", claimed) + b"ab")
        assert "invalid HELLO profile extension length" in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"generation": 0}, "generation must be nonzero"),
        ({"dtype": 4}, "dtype is 4"),
        ({"num_streams": 257}, "num_streams is 257"),
        ({"learner": 2**32}, "HELLO cannot hold"),
        ({"generation": 2**64}, "HELLO cannot hold"),
        ({"contract": b"short"}, "contract has 5 bytes"),
        ({"profile_hash": b""}, "profile_hash has 0 bytes"),
        ({"compat_group": ""}, "compat group has 0 bytes"),
        ({"compat_group": "é" * 33}, "compat group has 66 bytes"),
        ({"layout": Layout(())}, "at least one fragment"),
        ({"layout": Layout((FragmentLayout(AVG, ()),))}, "at least one tensor"),
        ({"layout": Layout((FragmentLayout(AVG, (1, 0)),))}, "without elements"),
        ({"layout": Layout((FragmentLayout(ISO, (6,), ((2, 2),)),))}, "do not match its numels"),
        ({"layout": Layout((FragmentLayout(ISO, (6,)),))}, "do not match its numels"),
        ({"layout": Layout((FragmentLayout(AVG, (1,) * (1 << 21)),))}, "exceeds limit 16777216"),
    ],
)
def test_encoding_refuses_what_no_syncer_takes(change, text):
    with pytest.raises(LocalProtocolError, match=text):
        encode_hello(HELLO._replace(**change))


# --- steps 11 to 13 ------------------------------------------------------------------------------

OWN, OTHER = b"o" * 32, b"x" * 32


def admitted(hello, established=None, *, required=False, pinned=None):
    identity = None if established is None else Identity.of_hello(established)
    return identity_refusal(identity, hello, Pins(OWN, required, pinned))


def session_refusal(established, hello):
    return mismatch(Identity.of_hello(established), hello)


@pytest.mark.parametrize("required", [False, True])
def test_profile(required):
    assert admitted(HELLO._replace(profile_hash=OWN), required=required) is None
    text = admitted(HELLO._replace(profile_hash=OTHER), required=required)
    assert text == (
        f"HELLO syncer semantic profile differs: expected {OWN.hex()}, got {OTHER.hex()}"
    )


def test_missing_profile():
    assert admitted(HELLO) is None
    text = admitted(HELLO, required=True)
    assert text.startswith("HELLO is missing the required syncer semantic profile")


def test_pinned_contract():
    identity = b"\x11" * 32
    expected = rl_contract(HELLO.fingerprint, identity)
    assert admitted(HELLO._replace(contract=expected), pinned=identity) is None
    text = admitted(HELLO, pinned=identity)
    assert text.startswith("session mismatch")
    assert f"expected session_contract_hash={expected.hex()}" in text
    assert f"got session_contract_hash={HELLO.contract.hex()}" in text


def test_profile_comes_before_pin_and_pin_before_session():
    wrong = HELLO._replace(profile_hash=OTHER, compat_group="a")
    assert admitted(wrong, HELLO, pinned=OTHER).startswith("HELLO syncer semantic profile")
    assert "pinned" in admitted(wrong._replace(profile_hash=None), HELLO, pinned=OTHER)
    assert "兼容组不同" in admitted(wrong._replace(profile_hash=None), HELLO)


def test_connection_fields_do_not_belong_to_the_session():
    assert session_refusal(HELLO, HELLO._replace(learner=0, generation=1, num_streams=0)) is None
    # An empty group and none at all are the same.
    assert session_refusal(HELLO, HELLO._replace(compat_group="")) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"),
    [
        ("a100", "910b", "a100 对 910b"),
        (None, "昇腾", "未声明 对 昇腾"),
        ("a", None, "a 对 未声明"),
    ],
)
def test_compat_group_is_reported_first(ours, theirs, shown):
    one = HELLO._replace(compat_group=ours)
    two = HELLO._replace(compat_group=theirs, contract=OTHER)
    assert session_refusal(one, two) == f"session mismatch: 兼容组不同：{shown}，容差未标定"


ISO_A = Layout((FragmentLayout(ISO, (6,), ((2, 3),)),))
ISO_B = Layout((FragmentLayout(ISO, (6,), ((3, 2),)),))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (HELLO, HELLO._replace(dtype=DTYPE_BF16)),
        (HELLO._replace(dtype=DTYPE_Q4), HELLO._replace(dtype=DTYPE_BF16)),
        (HELLO, HELLO._replace(layout=Layout((FragmentLayout(AVG, (4,)),)))),
        (HELLO, HELLO._replace(layout=Layout((FragmentLayout(RDA, (2, 2)),)))),
        (HELLO, HELLO._replace(layout=Layout(LAYOUT.fragments * 2))),
        (HELLO._replace(layout=ISO_A), HELLO._replace(layout=ISO_B)),
        (HELLO, HELLO._replace(fingerprint=OTHER)),
        (HELLO, HELLO._replace(contract=OTHER)),
        (HELLO, HELLO._replace(profile_hash=OWN)),
        (HELLO._replace(profile_hash=OWN), HELLO),
    ],
)
def test_every_other_difference_names_both_sides(one, two):
    text = session_refusal(one, two)
    assert text.startswith(
        f"session mismatch: expected session_contract_hash={one.contract.hex()} "
    )
    assert f"; got session_contract_hash={two.contract.hex()} " in text
    for hello in (one, two):
        assert f"fingerprint={hello.fingerprint.hex()}" in text
        assert f"dtype={ {1: 'f32', 2: 'bf16', 3: 'q4'}[hello.dtype] }" in text
        assert f"fragments={len(hello.layout.fragments)}" in text


# --- a session that a checkpoint states ----------------------------------------------------------

FILE = Identity(HELLO.fingerprint, HELLO.contract, LAYOUT, step=7)
LIKE_IT = Layout((FragmentLayout(AVG, (3, 1)),))
"""Another layout of the same sizes."""


@pytest.mark.parametrize("change", [
    {}, {"dtype": DTYPE_Q4}, {"profile_hash": OTHER}, {"compat_group": "a"}, {"learner": 3},
])
def test_what_a_checkpoint_does_not_state_is_not_compared(change):
    assert mismatch(FILE, HELLO._replace(**change)) is None
    assert mismatch(FILE._replace(shape=(4,)), HELLO._replace(layout=LIKE_IT, **change)) is None


@pytest.mark.parametrize(("identity", "change"), [
    (FILE, {"fingerprint": OTHER}),
    (FILE, {"contract": OTHER}),
    (FILE, {"layout": LIKE_IT}),
    (FILE._replace(shape=(5,)), {}),
    (FILE._replace(shape=(4, 4)), {}),
    (FILE._replace(shape=(4,)), {"layout": Layout(LAYOUT.fragments * 2)}),
])
def test_another_session_than_the_checkpoints(identity, change):
    hello = HELLO._replace(**change)
    numels = [f.numel for f in hello.layout.fragments]
    text = mismatch(identity, hello)
    expected = [4] if identity.shape is LAYOUT else identity.shape
    assert text == (
        f"session mismatch: expected session_contract_hash={identity.contract.hex()} "
        f"fingerprint={identity.fingerprint.hex()} fragments={len(expected)} "
        f"elements={sum(expected)} (the checkpoint at step 7); got "
        f"session_contract_hash={hello.contract.hex()} fingerprint={hello.fingerprint.hex()} "
        f"fragments={len(numels)} elements={sum(numels)}"
    )


def test_the_whole_text_of_a_mismatch():
    other = HELLO._replace(dtype=DTYPE_Q4, profile_hash=OWN, layout=Layout(LAYOUT.fragments * 2))
    both = f"session_contract_hash={'63' * 32} fingerprint={'66' * 32}"
    assert session_refusal(HELLO, other) == (
        f"session mismatch: expected {both} dtype=f32 fragments=1 elements=4 profile=none; "
        f"got {both} dtype=q4 fragments=2 elements=8 profile={'6f' * 32}"
    )


# --- runs ----------------------------------------------------------------------------------------

ISLAND = b"\x77" * 32


def of_run(name: str | None, base: bytes | None = None, *, told: bool = True) -> Hello:
    """A HELLO of a run, with the block that says so, or as one that was only given the contract."""
    base = HELLO.fingerprint if base is None else base
    if name is None:
        return HELLO._replace(contract=base, extension=Extension() if told else None)
    return HELLO._replace(contract=run_contract(base, name), extension=Extension(
        run=RunClaim(base, name)) if told else None)


def run_refusal(hello: Hello, run: str | None = None, island: bytes | None = None) -> str | None:
    return identity_refusal(None, hello, Pins(OWN, run=run, island=island))


@pytest.mark.parametrize(("hello", "run", "island"), [
    (of_run("blue"), None, None), (of_run(None), None, None),
    (of_run("blue"), "blue", None), (of_run("blue", told=False), "blue", None),
    (of_run("blue", OTHER), "blue", None), (of_run("blue", OTHER), None, None),
    (of_run("blue", rl_contract(HELLO.fingerprint, ISLAND)), "blue", ISLAND),
    (of_run("blue", rl_contract(HELLO.fingerprint, ISLAND)), None, ISLAND),
    (of_run("blue", rl_contract(HELLO.fingerprint, ISLAND), told=False), "blue", ISLAND),
    (of_run(None, rl_contract(HELLO.fingerprint, ISLAND)), None, ISLAND),
])
def test_who_belongs_to_a_run(hello, run, island):
    assert run_refusal(hello, run, island) is None


@pytest.mark.parametrize(("hello", "run", "island", "got"), [
    (of_run("red"), "blue", None, " (run red)"),
    (of_run(None), "blue", None, " (no run)"),
    (of_run(None, told=False), "blue", None, " (no run)"),
    (of_run("red", told=False), "blue", None, ""),
    (of_run("blue"), "blue", ISLAND, " (run blue)"),
    (of_run("blue"), None, ISLAND, " (run blue)"),
    (of_run("blue", rl_contract(HELLO.fingerprint, ISLAND), told=False), None, ISLAND, ""),
    (of_run("red", rl_contract(HELLO.fingerprint, ISLAND)), "blue", ISLAND, " (run red)"),
    (of_run(None, rl_contract(HELLO.fingerprint, ISLAND)), "blue", ISLAND, ""),
])
def test_who_does_not(hello, run, island, got):
    base = HELLO.fingerprint if island is None else rl_contract(HELLO.fingerprint, island)
    name = run or (hello.extension and hello.extension.run and hello.extension.run.name)
    expected = base if name is None else run_contract(base, name)
    text = run_refusal(hello, run, island)
    named = "" if name is None else f" (run {name})"
    assert text.startswith(f"session mismatch: expected session_contract_hash={expected.hex()}"
                           f"{named}")
    assert text.endswith(f"got session_contract_hash={hello.contract.hex()}{got}")


def test_who_says_no_name_means_the_one_that_the_run_has_by_itself():
    """Learners of protocol 4 that were given the contract, and a server without --run that has its
    name from a checkpoint or from the first learner who said one."""
    base = rl_contract(HELLO.fingerprint, ISLAND)
    pins = Pins(OWN, island=ISLAND, known_run="blue")
    for admitted_one in (of_run("blue", base, told=False), of_run("blue", base)):
        assert identity_refusal(None, admitted_one, pins) is None
    for refused in (of_run(None, base, told=False), of_run("red", base, told=False)):
        assert identity_refusal(None, refused, pins).startswith(
            f"session mismatch: expected session_contract_hash={run_contract(base, 'blue').hex()} "
            "(run blue) (pinned island contract)")


def test_a_refusal_names_both_runs_as_far_as_they_are_known():
    blue, red, nameless = of_run("blue"), of_run("red"), of_run(None, told=False)
    given = of_run("red", told=False)
    for one, two, ours, theirs in ((blue, red, " (run blue)", " (run red)"),
                                   (blue, nameless, " (run blue)", " (no run)"),
                                   (nameless, blue, " (no run)", " (run blue)"),
                                   (blue, given, " (run blue)", ""),
                                   (given, blue, "", " (run blue)"),
                                   (nameless, given, "", "")):
        text = session_refusal(one, two)
        assert f"expected session_contract_hash={one.contract.hex()}{ours} fingerprint=" in text
        assert f"got session_contract_hash={two.contract.hex()}{theirs} fingerprint=" in text
    # Once somebody has said how the session is called, it is.
    identity = Identity.of_hello(given).of_run("red")
    assert f"{given.contract.hex()} (run red) " in mismatch(identity, blue)
    assert mismatch(identity, red) is None


@pytest.mark.parametrize(("name", "hello", "another"), [
    ("blue", of_run("red"), True), ("blue", of_run(None), True),
    ("blue", of_run("red", told=False), True), ("blue", of_run("blue"), False),
    ("blue", of_run("blue", told=False), False), ("", of_run("blue"), True),
    ("", of_run("blue", told=False), False), ("", of_run(None), False),
])
def test_a_hello_of_another_run(name, hello, another):
    own = of_run(name or None, told=False)
    identity = Identity(own.fingerprint, own.contract, LAYOUT, step=7).of_run(name)
    assert is_of_another_run(identity, hello) is another
