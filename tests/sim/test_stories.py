"""What seeds have found in the server, each as a small story of its own."""

from __future__ import annotations

import errno
import os

import pytest

from syncer.checkpoint.marker import marker_path
from syncer.server import restraint, run_session
from syncer.server.capacity import STRANGERS_MIN
from syncer.wire.encode import encode_hello
from tests.sim.clock import MS, SECOND
from tests.sim.disk import PATH, Inode, SimFiles
from tests.sim.fleet import Fleet
from tests.sim.link import Link
from tests.sim.network import NO_MEMORY, Network
from tests.sim.scale import scaled
from tests.sim.strangers import Stranger, openings
from tests.sim.told import lines_of
from tests.toy_driver import toy_config


def test_a_learner_that_dials_while_the_last_cut_is_written_is_not_told_off():
    """Its HELLO gets no answer, so that it dials the next server. Nor do its data sockets."""
    config = toy_config(learners=2, total_steps=50, checkpoint_path=PATH, checkpoint_every=30,
                        log_level="debug")
    fleet = Fleet(1, config=config, faults=[], settings={"streams": 3, "work_ms": 1,
                                                         "misconfigured": 0})
    fleet.disk.fault_chance = 0.0
    with scaled(fleet.settings):
        server = fleet.server
        fleet.world.wait(lambda: server.scheduler.global_step >= 3)
        fleet.disk.slow_ms = 10_000
        fleet.world.rng.seed(5)
        server.signal()
        fleet.learners[1].drop()
        begun_ns = fleet.world.now_ns
        fleet.world.wait(lambda: server.over)
    assert fleet.world.now_ns > begun_ns + 15 * SECOND, "the write was not slow"
    assert any(b"learner disconnected" in line for line in fleet.lines.lines)
    assert not any(b"connection refused" in line for line in fleet.lines.lines)
    fleet.play()
    fleet.check()


def test_a_second_defect_in_the_middle_of_the_goodbye_leaves_nothing_open():
    """`SimServer.check_closed` looks at what is left of the process."""
    fleet = Fleet(1, config=toy_config(learners=1, total_steps=3, checkpoint_path=PATH), faults=[])
    errors = 0

    def defect():
        nonlocal errors
        errors += 1
        raise MemoryError("as of a worker")

    with scaled(fleet.settings):
        server = fleet.server
        fleet.world.wait(lambda: server.scheduler.members.current_count)
        server.system.the_workers.failed = 2      # these are no defects of the server
        fleet.learners[0].link.stop_reading(5 * SECOND)  # so the goodbye lasts its two
        server.loop.post(defect)
        fleet.world.wait(lambda: errors)
        server.loop.post(defect)
        fleet.world.wait(lambda: server.over)
    assert b"".join(fleet.lines.lines).count(b"internal error: MemoryError") == errors == 2
    fleet.play()
    fleet.check()


def test_a_peer_that_stops_reading_does_not_hold_up_the_end():
    """The last frames get two seconds to leave, and two more to be read."""
    fleet = Fleet(2, config=toy_config(learners=2, total_steps=3, write_timeout_s=180), faults=[],
                  settings={"capacity": 300, "streams": 1})
    with scaled(fleet.settings):
        fleet.world.wait(lambda: fleet.server.scheduler.global_step >= 1)
        for wire in fleet.learners[1].link.wires:
            wire.pause()
        fleet.server.signal()
        begun_ns = fleet.world.now_ns
        fleet.world.wait(lambda: fleet.server.over)
    assert fleet.world.now_ns - begun_ns < 4 * SECOND + 100 * MS


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, NO_MEMORY])
@pytest.mark.parametrize("call", Network.CALLS)
def test_a_system_call_that_fails_for_one_connection_ends_that_one(call, number):
    """Whoever it meets, stranger or learner, is gone with a WARN; the run goes on to its end."""
    fleet = Fleet(3, config=toy_config(learners=2, total_steps=60), faults=[],
                  settings={"capacity": 40, "streams": 1})
    with scaled(fleet.settings):
        server = fleet.server
        fleet.world.wait(lambda: server.scheduler.global_step >= 3)
        fleet.network.failing[call].append(number)
        Stranger(fleet, b"rubbish, and more than the thirteen bytes of a header", 5 * SECOND)
        fleet.world.wait(lambda: server.over or not fleet.network.failing[call])
    assert not fleet.network.failing[call], "the call was never made"
    fleet.play()
    fleet.check()
    warnings = [line for line in fleet.lines.lines if b"the system failed a connection" in line]
    assert len(warnings) == 1
    assert os.strerror(number or errno.ENOMEM).encode() in warnings[0]
    assert b"WARN" in warnings[0]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EPROTO])
def test_a_connection_that_cannot_be_accepted_holds_up_nobody_behind_it(number):
    fleet = Fleet(3, config=toy_config(learners=1, total_steps=3), faults=[])
    with scaled(fleet.settings):
        fleet.server.system.listener.failing.append(number)
        fleet.world.wait(lambda: fleet.server.scheduler.global_step >= 1)
    said = b"".join(fleet.lines.lines)
    assert b"the system failed a connection" in said
    assert b"for a moment" not in said
    fleet.play()
    fleet.check()


def test_a_selector_without_room_for_the_listening_socket_is_asked_again():
    fleet = Fleet(3, config=toy_config(learners=1, total_steps=3), faults=[])
    with scaled(fleet.settings):
        fleet.server.system.listener.failing.append(errno.EMFILE)
        fleet.world.wait(lambda: b"for a moment" in b"".join(fleet.lines.lines))
        fleet.network.failing["register"].append(errno.ENOSPC)
        fleet.world.wait(lambda: fleet.server.scheduler.global_step >= 1)
    assert b"".join(fleet.lines.lines).count(b"for a moment") == 2
    fleet.play()
    fleet.check()


def test_what_no_run_would_take_does_not_end_a_strict_one():
    """A HELLO of another profile and another session: the first of both is why it is refused."""
    fleet = Fleet(5, config=toy_config(learners=2, quorum=2, grace_ms=0, max_base_lag=0,
                                       total_steps=9, checkpoint_path=PATH, checkpoint_every=1),
                  faults=[], settings={"streams": 0})
    fleet.disk.fault_chance = 0
    with scaled(fleet.settings):
        fleet.world.wait(lambda: fleet.server.scheduler.global_step >= 3)
        fleet.crash("kill")
        fleet.world.wait(lambda: fleet.server.resumed)
        stranger = Stranger(fleet, openings(fleet)["a HELLO of another profile and session"],
                            5 * SECOND)
        fleet.world.wait(lambda: stranger.closed)
    assert b"HELLO syncer semantic profile differs" in stranger.answer
    fleet.play()
    fleet.check()


def test_strangers_cannot_fill_the_log():
    """3,000 of them in six seconds: some lines, and then one now and then that says how many."""
    fleet = Fleet(6, config=toy_config(learners=1, total_steps=100_000, log_level="info",
                                       log_format="json"), faults=[], settings={"strangers": 1024})
    with scaled(fleet.settings):
        for number in range(3000):
            fleet.world.after(2 * number * MS, Stranger, fleet, b"GET / HTTP/1.1\r\n\r\n", SECOND)
        fleet.world.wait(lambda: fleet.world.now_ns > 10 * SECOND)
        fleet.server.signal()
        fleet.world.wait(lambda: fleet.server.over)
    refused = lines_of(fleet, "connection refused")
    assert sum(line.get("times", 1) for line in refused) == 3000
    assert restraint.BURST < len(refused) < restraint.BURST + 20
    assert all("bad magic" in line["reason"] for line in refused)


def test_each_step_of_a_moderate_run_has_its_line():
    """Whoever counts them at the default level finds every one; of a long and fast run, too, with
    `times`."""
    fleet = Fleet(7, config=toy_config(learners=1, total_steps=1500, log_level="info",
                                       log_format="json"), faults=[], settings={"streams": 1})
    fleet.play()
    fleet.check()
    steps = lines_of(fleet, "outer step")
    moderate = restraint.BURSTS["outer step"]
    assert [line["step"] for line in steps[:moderate]] == list(range(1, moderate + 1))
    assert not any("times" in line for line in steps[:moderate])
    assert moderate < len(steps) < 1500
    assert sum(line.get("times", 1) for line in steps) == steps[-1]["step"] == 1500


def test_a_learner_cannot_fill_the_log():
    """Every push is sent 300 times and refused 299 times; debug level has them all."""
    told = {}
    for level in ("info", "debug"):
        fleet = Fleet(7, config=toy_config(learners=1, total_steps=5, log_level=level,
                                           log_format="json"), faults=[],
                      settings={"duplicate": 0, "streams": 1})
        learner = fleet.learners[0]
        send = learner.send_push

        def often(push, delta, send=send):
            for _ in range(300):
                send(push, delta)

        learner.send_push = often
        fleet.play()
        fleet.check()
        told[level] = lines_of(fleet, "push rejected")
    assert len(told["debug"]) == sum(line.get("times", 1) for line in told["info"]) > 1000
    assert len(told["info"]) < len(told["debug"]) / 4


def test_a_stream_that_never_comes_is_named_and_what_waits_for_it_ends():
    """The first connection of each learner lacks one; they dial again, and the run goes on."""
    fleet = Fleet(8, config=toy_config(learners=2, quorum=2, total_steps=5), faults=[],
                  settings={"streams": 3, "misconfigured": 0, "chunk_bytes": 17, "tight": False,
                            "impatience": 0})
    fleet.large = False
    begin, without = Link.begin, []

    def lacking(link):
        if len(without) < 2:
            link.missing = 2
            without.append(link)
        begin(link)

    Link.begin = lacking
    try:
        fleet.play()
    finally:
        Link.begin = begin
    fleet.check()
    said = b"".join(fleet.lines.lines)
    assert len(without) == 2
    assert said.count(b"data sockets that a HELLO declared have not come") == 2
    assert b"data stream 1 of 3 never came" in said


@pytest.mark.parametrize("eager", [0, 1])
@pytest.mark.parametrize("fold", ["batch", "exact"])
def test_a_slow_data_socket_costs_no_quorum_timeout(eager, fold):
    """A pull that comes before its broadcast is answered late, or in vain and sent again."""
    config = toy_config(learners=1, total_steps=10, max_base_lag=1, quorum_timeout_s=900, fold=fold,
                        learner_weight="equal")
    fleet = Fleet(3, config=config, faults=[], settings={  # answers in vain, if it is eager
        "streams": 1, "eager": eager, "gates": [1], "step_ms": (20, 20), "duplicate": 0,
        "misconfigured": 0, "impatience": 0})
    fleet.learners[0].data_ns = 1 * SECOND
    with scaled(fleet.settings):
        fleet.world.wait(lambda: fleet.server.scheduler.global_step >= 9)
    assert fleet.world.now_ns < 900 * SECOND, "a round stood still"
    fleet.play()
    fleet.check()
    assert ("asked again after a refused push" in fleet.marks) == bool(eager)


def members_of(fleet: Fleet, learner: int) -> list[tuple[int, int]]:
    """Connections of a learner, oldest first."""
    session = fleet.server.server.session
    return [] if session is None else [each for each in session.groups if each[0] == learner]


def test_the_oldest_of_too_many_connections_of_a_learner_is_ended():
    fleet = Fleet(9, config=toy_config(learners=1, total_steps=100_000), faults=[], settings={
        "streams": 0, "impatience": 0, "misconfigured": 0, "tight": False,
        "stranger_bytes": 1 << 20, "strangers": 1024})
    with scaled(fleet.settings):
        fleet.world.wait(lambda: members_of(fleet, 0))
        run_session.CONNECTIONS_MAX = 2
        (first,) = members_of(fleet, 0)
        others = [Stranger(fleet, encode_hello(fleet.hello(0, generation), fleet.key), 30 * SECOND)
                  for generation in (5, 6)]
        fleet.world.wait(lambda: first not in members_of(fleet, 0))
        assert set(members_of(fleet, 0)) == {(0, 5), (0, 6)}
        assert not any(other.closed for other in others)
        fleet.server.signal()
        fleet.world.wait(lambda: fleet.server.over)


def test_a_learner_whose_sockets_do_not_fit_beside_its_own_makes_room():
    """Room for each learner once: its next connection takes the place of the one before."""
    fleet = Fleet(10, config=toy_config(learners=2, total_steps=100_000), faults=[], settings={
        "connections": 4, "tight": True, "streams": 3, "impatience": 0, "misconfigured": 0,
        "stranger_bytes": 1 << 20, "strangers": 1024})
    with scaled(fleet.settings):
        fleet.world.wait(lambda: members_of(fleet, 0) and members_of(fleet, 1))
        (first,) = members_of(fleet, 0)
        Stranger(fleet, encode_hello(fleet.hello(0, 5), fleet.key), 30 * SECOND)
        fleet.world.wait(lambda: (0, 5) in members_of(fleet, 0))
        assert first not in members_of(fleet, 0)
        assert fleet.server.server.capacity.promised == 8
        fleet.server.signal()
        fleet.world.wait(lambda: fleet.server.over)


@pytest.mark.parametrize("eager", [0, 1])
def test_a_slow_uplink_under_a_short_quorum_timeout_is_waited_for(eager):
    """Three pulls in two seconds are more than it carries: without more time it would answer
    attempts further and further behind, and no step be made, also by other programs."""
    fleet = Fleet(9, config=toy_config(learners=2, quorum=2, quorum_timeout_s=2, total_steps=9,
                                       final_ack_timeout_s=1000,
                                       pipeline=3, log_level="info", log_format="json"),
                  faults=[], settings={"streams": 1, "eager": eager, "step_ms": (50, 60),
                                       "slow_data_ms": 0, "misconfigured": 0, "duplicate": 0,
                                       "resend": 0, "gates": [1], "capacity": 65536,
                                       "chunk_bytes": 4 << 20})

    def slow_down() -> None:
        link = fleet.learners[1].link
        for wire in [] if link is None else link.wires:
            wire.up.ns_per_byte = 12 * MS
        fleet.world.after(100 * MS, slow_down)

    slow_down()
    with scaled(fleet.settings):
        fleet.world.wait(lambda: fleet.server.over or fleet.world.now_ns > 600 * SECOND)
    assert fleet.server.over, fleet.stuck()
    fleet.play()
    fleet.check()
    lengthened = lines_of(fleet, "answers came too late: this attempt has more time")
    assert lengthened
    assert max(line["timeout_s"] for line in lengthened) <= 32


def test_a_marker_that_is_left_under_its_second_name_alone_is_written_anew():
    """A power failure can leave that of it; a link whose first name is missing fails for that
    reason, not because the second one is there."""
    fleet = Fleet(9, config=toy_config(learners=1, total_steps=3, checkpoint_path=PATH,
                                       checkpoint_every=2, mark_final_checkpoint=True), faults=[])
    fleet.disk.names[f"{marker_path(PATH)}.old.tmp"] = Inode()
    fleet.play()
    fleet.check()
    assert fleet.disk.marked_step() == 3
    assert f"{marker_path(PATH)}.old.tmp" not in fleet.disk.names


def calls_of_first_saves(fleet: Fleet, kind: str, number: int) -> bool:
    """Crash the server at this call of its saver. False: it makes fewer before it is done."""
    made, server = 0, fleet.server
    call = SimFiles._call

    def counted(files: SimFiles, name: str) -> None:
        nonlocal made
        if files is server.system.files and files.pause_ns:
            made += 1
            if made == number:
                fleet.world.after(0, fleet.crash, kind)
        call(files, name)

    SimFiles._call = counted
    try:
        with scaled(fleet.settings):
            fleet.world.wait(lambda: server.crashed or server.scheduler.global_step >= 2)
    finally:
        SimFiles._call = call
    return server.crashed


@pytest.mark.parametrize("synced", [True, False], ids=["", "without fsync of directories"])
@pytest.mark.parametrize("kind", ["kill", "power"])
def test_a_crash_at_any_call_of_the_first_saves_leaves_one_cut(monkeypatch, kind, synced):
    """Version 0 is written before anybody has seen it: what is resumed is that, or nothing; and
    with every step saved nothing that was seen is lost. `Fleet.check_resumed` looks."""
    def draw_fault(files, calls):
        files.fault = None if synced else "sync_directory"
        files.fault_number, files.fault_count = errno.EOPNOTSUPP, 1 << 30

    monkeypatch.setattr(SimFiles, "_draw_fault", draw_fault)
    number, steps = 0, []
    while True:
        number += 1
        config = toy_config(learners=2, quorum=2, total_steps=3, checkpoint_path=PATH,
                            checkpoint_every=1, checkpoint_keep=1)
        fleet = Fleet(9, config=config, faults=[])
        crashed = calls_of_first_saves(fleet, kind, number)
        fleet.play()
        fleet.check()
        if not crashed:
            break
        steps += [step for _, step in fleet.begun]
    assert number > 20
    assert {-1, 0} <= set(steps)


def test_learners_that_wait_for_an_answer_leave_descriptors_for_files():
    """A run that ends answers no HELLO (rule 13.5): of few descriptors those of its files stay
    free, which the listener of the simulator counts."""
    config = toy_config(learners=2, total_steps=50, checkpoint_path=PATH, checkpoint_every=30)
    fleet = Fleet(1, config=config, faults=[], settings={
        "streams": 0, "work_ms": 1, "misconfigured": 0, "tight": True})
    fleet.disk.fault_chance = 0.0
    with scaled(fleet.settings):
        server = fleet.server
        fleet.world.wait(lambda: server.scheduler.global_step >= 3)
        fleet.disk.slow_ms = 10_000
        server.signal()
        dialing = [Stranger(fleet, encode_hello(fleet.hello(1, generation), fleet.key), 30 * SECOND)
                   for generation in range(5, 5 + 2 * STRANGERS_MIN)]
        fleet.world.wait(lambda: server.over)
    assert any(b"who comes now is closed" in line for line in fleet.lines.lines)
    assert all(stranger.closed for stranger in dialing)
