"""Blocks and the messages of who has introduced itself survive their own encoding, and no bytes
make a parser raise anything but a refusal."""

from hypothesis import given
from hypothesis import strategies as st

from syncer.protocol import HEADER_BYTES
from syncer.wire import encode, extended
from syncer.wire.contracts import run_contract
from syncer.wire.extension import Extension, Held, Role, RunClaim
from syncer.wire.hello import Hello, parse_hello
from syncer.wire.names import FragmentNames, fingerprint
from tests.property.test_wire_messages import HASHES, HELLOS, U32, U64, layouts

LEARNERS = 10
CLIENTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp", "Cs")),
                  max_size=60)
RUNS = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
POSITIVE = st.integers(1, 2**64 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def names_of(draw, layout):
    """Names for a layout: shapes as the framework could have them."""
    found = []
    for f, fragment in enumerate(layout.fragments):
        tensors = []
        for t, numel in enumerate(fragment.numels):
            ones = draw(st.integers(0, 2))
            shape = fragment.shapes[t] if fragment.shapes else (1,) * ones + (numel,)
            tensors.append((f"{draw(st.sampled_from(['w', 'ä']))}{f}.{t}", shape))
        found.append(FragmentNames(tuple(tensors), draw(st.booleans())))
    return tuple(found)


@st.composite
def extended_hellos(draw):
    hello = draw(HELLOS)
    layout = hello.layout
    names = draw(st.none() | names_of(layout)) if hello.learner == 0 else None
    if names is not None:
        hello = hello._replace(fingerprint=fingerprint(layout, names))
    base = draw(HASHES)
    run = draw(st.none() | RUNS.map(lambda name: RunClaim(base, name)))
    if run is not None:
        hello = hello._replace(contract=run_contract(*run))
    count = len(layout.fragments)
    one = st.none() | st.builds(Held, POSITIVE, U64)
    held = draw(st.none() | st.tuples(*[one] * count))
    changes = tuple(draw(st.binary(max_size=16)))
    return hello._replace(extension=Extension(draw(st.none() | CLIENTS), held, names, run=run,
                                              changes=changes, fates=draw(st.booleans())))


def read(hello: Hello, key: bytes | None = None) -> Hello:
    payload = encode.encode_hello(hello, key)[HEADER_BYTES:]
    return parse_hello(memoryview(payload), key=key, learners=LEARNERS)


@given(extended_hellos(), st.none() | st.binary(min_size=1, max_size=40))
def test_hello_with_a_block_round_trip(hello, key):
    assert read(hello, key) == hello


@given(extended_hellos(), U32, st.sampled_from([Role.READER, Role.FOLLOWER]))
def test_a_reader_has_any_id(hello, learner, role):
    reader = hello._replace(
        learner=learner, num_streams=0, dtype=1,
        extension=hello.extension._replace(role=role, names=None))
    assert read(reader) == reader


WELCOMES = st.builds(
    extended.Welcome, POSITIVE, POSITIVE, U64, U64, U32, U32, FINITE,
    st.sampled_from(extended.RunState), CLIENTS, st.just("") | RUNS, U64,
    st.lists(st.booleans(), max_size=9).map(tuple), st.integers(0, 255))
REPORTS = st.builds(extended.LearnerReport, *[st.none() | FINITE] * 4)


@given(WELCOMES)
def test_welcome_round_trip(welcome):
    payload = encode_payload(extended.encode_welcome(welcome))
    assert extended.parse_welcome(payload, len(welcome.kept)) == welcome


@given(REPORTS)
def test_report_round_trip(report):
    assert extended.parse_report(encode_payload(extended.encode_report(report))) == report


@given(layouts(), st.data())
def test_layout_round_trip(layout, data):
    session = extended.SessionLayout(
        data.draw(st.sampled_from([1, 2, 3])), layout, data.draw(HASHES), data.draw(HASHES),
        data.draw(st.none() | names_of(layout)))
    payload = encode_payload(extended.encode_session_layout(session))
    assert extended.parse_session_layout(payload) == session


def encode_payload(frame: bytes) -> memoryview:
    return memoryview(frame)[HEADER_BYTES:]
