"""One simulated run: a fleet, a server and a subset of faults from a seed, played and judged.

While the faults last, anything may happen to learners, links and the server. Then they stop, and
the fleet must finish. What must hold is checked all along by `history.Witness` and `tests.watch`,
when a server process ends by `SimServer`, and at the end by `check`.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import cached_property
from typing import Any

from syncer.config import Config
from syncer.errors import CheckpointError, ConfigError
from syncer.exits import Exit
from syncer.server.addresses import BindError
from syncer.server.capacity import STRANGERS_MIN
from syncer.wire.hello import Hello
from tests.sim import operator, outcome, reader, renumbered, scale, strangers, tls
from tests.sim.anchors import Anchors, of_process
from tests.sim.clock import MS, SECOND, World
from tests.sim.disk import PATH, Disk
from tests.sim.draw import (
    FAULTS,
    LARGE,
    LARGE_SETTINGS,
    SERVER_FAULTS,
    draw_config,
    draw_layout,
    draw_settings,
)
from tests.sim.history import History, Witness
from tests.sim.introduced import RunOfFleet
from tests.sim.intruders import Intruders
from tests.sim.learner import SimLearner
from tests.sim.neglect import Neglect
from tests.sim.network import KEEPALIVE_NS, NO_MEMORY, Network
from tests.sim.server import SimServer
from tests.sim.system import LogLines, Scarce, SimSystem, SimTape

RESTARTS = (Exit.NOT_WRITTEN, Exit.NEVER_STARTED, 128 + 15)
"""Statuses after which a server is started again, as an operator would: a checkpoint that could not
be written, learners that did not come, a signal."""
EXPLAINED = {
    "not acknowledged in time": "", "nothing finite": "overflow",
    "with --max-base-lag 0": "stale",
    "session mismatch": "stranger: a HELLO in a strict run",
}
"""What the last sentence of a failed run may say, and the fault or mark that must explain it."""


class Fleet:
    """A run drawn from a seed. `marks` are the rare paths it took.

    config, faults, settings: instead of what the seed would draw.
    """

    def __init__(self, seed: int, steps: int | None = None, *, config: Config | None = None,
                 faults: list[str] | None = None, settings: dict[str, Any] | None = None):
        self.seed = seed
        self.world = world = World(seed)
        rng = world.rng
        self.config = config or draw_config(rng, steps)
        self.key = self.config.key_bytes
        self.supervised = self.saves and self.config.total_steps % 3 > 0  # --resume auto
        self.dtype = rng.choice([1, 2, 3])
        self.layout = draw_layout(rng, self.config)
        self.large = config is None and rng.random() < 0.007
        if self.large:                            # pieces and turns of real size
            self.config = replace(self.config, total_steps=3)
            self.layout = LARGE
        self.identity = RunOfFleet(self.config, self.layout, bytes(
            rng.randrange(256) for _ in range(32)).hex())
        self.fingerprint, self.contract = self.identity.fingerprint, self.identity.contract
        self.config = config or self.identity.asked_by(self.config)
        self.group = rng.choice([None, None, "a group", "eine\nGruppe\x1b[0m"])
        self.settings = draw_settings(world, self.config) | (settings or {}) | (
            LARGE_SETTINGS if self.large else {})
        self.network = self.new_network(with_tls=config is None and seed % 8 == 5)
        weights = {fault: rng.choice([0, 0, 0, 0, 1, 3]) for fault in FAULTS}
        self.faults = [fault for fault, weight in weights.items() for _ in range(weight)]
        if self.config.late_carry or rng.random() < 0.1:
            self.faults += ["stall"] * 3          # late pushes need somebody who is late
        if self.saves and self.config.total_steps % 4 == 1:
            self.faults += ["away"]
        if faults is not None:
            self.faults = faults
        self.fault_gap_ns = world.between(50, 5000) * MS
        self.faults_end_ns = int(world.between(1, 4 if self.large else 60) * SECOND)
        self.marks: set[str] = set()
        self.generations: dict[int, int] = {}
        """Of all HELLOs, and whose they were."""
        self.disk = Disk(world, world.between(1, 5000))
        if self.config.checkpoint_path or self.config.final_state:
            self.disk.fault_chance = rng.choice([0, 0, 0.05, 0.3])
        world.after(self.faults_end_ns, self.heal)
        self.tape = SimTape()
        self.begun: list[tuple[int, int]] = []
        """Where on the tape each process after the first one begins, and its step."""
        self.lines = LogLines(rng.random() < 0.3)
        self.history = History(self.config, self.layout, seed, self.dtype != 1)
        self.other_history = False
        self.more_steps = rng.choice([0, 0, 0, 3]) if self.saves and not config else 0
        self.lost_records = False
        self.profile = self.draw_profile()
        self.server: SimServer = self.start(
            operator.command_line(self, self.config), faultless=True)
        self.learners = [SimLearner(world, self, i, self.settings)
                         for i in range(self.config.learners)]
        self.readers = reader.draw(self) if config is None else []
        self.neglect = Neglect(self)
        if self.faults:
            world.after(self.fault_gap_ns, self.fault)

    def new_network(self, with_tls: bool) -> Network:
        """A fleet with TLS is what it would be without."""
        settings = self.settings
        if with_tls:
            self.config = tls.asked_by(self.config, self.seed)
            settings["capacity"] = max(settings["capacity"], tls.CAPACITY)
            Intruders(self)
        network = Network(self.world, settings["ns_per_byte"], settings["capacity"],
                          settings["spurious"])
        network.tls = tls.certificates().learners if with_tls else None
        return network

    @cached_property
    def anchors(self) -> Anchors:
        """What its learners are sent."""
        return Anchors(alternate=self.config.total_steps % 5 == 4)

    def draw_profile(self) -> bytes | None:
        """Learners may bind to the profile, which says whether a run was resumed."""
        if self.saves or self.world.rng.random() < 0.6:
            return None
        self.config = replace(self.config, require_profile_binding=self.world.chance(0.5))
        self.history.config = self.config
        return self.config.profile_hash

    @property
    def last_step(self) -> int:
        """That ends the run."""
        return self.config.total_steps + self.history.renumbered

    @property
    def saves(self) -> bool:
        return self.config.checkpoint_path is not None

    @property
    def session_is_fixed(self) -> bool:
        """A HELLO of another session can only be refused, whenever it comes: somebody is in, and
        there will be no other process. (In a strict run it ends the run.)"""
        lasts = not (set(self.faults) & set(SERVER_FAULTS) or self.saves
                     or self.config.final_state or self.config.max_base_lag == 0)
        return lasts and not self.server.ended and self.server.scheduler.fragments > 0

    @property
    def model_is_fixed(self) -> bool:
        """The same for a HELLO of another model: a resumed process knows its own at once."""
        return self.session_is_fixed or (
            self.server.resumed and self.config.max_base_lag != 0)

    @property
    def strict_and_resumed(self) -> bool:
        return self.server.resumed and self.config.max_base_lag == 0

    def hello(self, learner: int, generation: int) -> Hello:
        """What a learner of this run says."""
        self.generations[generation] = learner
        return Hello(learner, generation, self.dtype, self.layout, self.fingerprint, self.contract,
                     self.profile, self.settings["streams"], self.group)

    # ---- server processes ------------------------------------------------------------------------

    def start(self, config: Config, faultless: bool = False) -> SimServer:
        """A new process. Raises what its start raises."""
        witness = Witness(self.history, self.disk if self.saves else None, self.marks)
        system = SimSystem(self.world, self.network, self.disk, self.settings["work_ms"])
        system.tape, system.lines = self.tape, self.lines
        if self.settings["tight"]:
            system.sockets_max = STRANGERS_MIN + config.learners * (1 + self.settings["streams"])
        if config.resume and not faultless:
            system.files.may_garble = (config.checkpoint_format == "safetensors"
                                       and not config.no_verify)
            system.files.begin_resume()
        config = of_process(self, config)
        server = SimServer(self.world, config, system, witness, self.settings["turn_ns"])
        if config.downlink != "whole":
            self.anchors.changing.add(server.server.persistence.lineage.instance)
        return server

    def crash(self, kind: str) -> None:
        """The server dies and a new one takes up what is left a little later."""
        if self.server.ended:
            return
        self.marks.add(f"server lost: {kind}")
        self.server.kill(kind == "power")
        if not self.over():                       # it had nothing left to do but to say goodbye
            self.replace_server()

    def replace_server(self) -> None:
        self.server.replaced = True
        self.world.after(self.world.between(10, 5000) * MS, self.resume)

    def resume(self) -> None:
        """Start the next process on what the disk holds, or anew if there is nothing."""
        if self.saves and self.disk.is_away:
            return operator.start_in_vain(self)
        if self.saves:
            operator.go_back(self)
        state = self.disk.load(self.config) if self.saves else None
        config = operator.command_line(self, self.config)
        if self.saves and self.world.chance(0.2):
            operator.start_wrongly(self, state)
        if state is not None:
            config = replace(config, resume=config.resume or True, learner_budget_steps=None,
                             no_verify=self.world.chance(0.2))
            self.config = replace(config, resume=False, no_verify=False)
        step, shown_step = -1 if state is None else state["step"], self.history.shown_step
        self.check_resumed(state)
        config = renumbered.asked_for(self, config, shown_step - step)
        try:
            self.history.go_back_to(step, state and state["cut"], state["renumbered"] if state
                                    else 0)
            self.begun.append((len(self.tape.data), step))
            self.server = self.start(config)
        except CheckpointError:
            if not self.disk.fault_chance:
                raise
            self.marks.add("not resumed")
            renumbered.left_in_vain(self, config, state)
            self.replace_server()
            return
        if state is not None:
            step = renumbered.begun_from(self, state, shown_step)
        self.disk.gone_back = self.server.raised > 0  # until the raised cut is saved
        if shown_step > step:
            self.roll_back(step)
        elif self.server.raised:
            operator.start_finished_again(self)
        if config.resume == "auto":
            self.marks.add("started again by a supervisor")

    def roll_back(self, step: int) -> None:
        """Learners keep anchors that this history has not got: somebody starts those again, too,
        that cannot know."""
        self.marks.add("rolled back")
        self.other_history = True
        self.history.shown_step = step
        soon = self.config.learner_budget_steps is not None  # reports what it did before
        for learner in self.learners:
            if soon or learner.is_left_behind:
                operator.start_again(
                    learner, 0 if soon else self.world.rng.random() * 20 * SECOND)

    def check_resumed(self, state: dict[str, Any] | None) -> None:
        """13: what is on the disk is one cut of this run, and with every step saved the newest."""
        history, step = self.history, -1 if state is None else state["step"]
        if (self.saves and self.config.checkpoint_every == 1 and not self.disk.gone_back
                and not self.config.goes_on_unsaved):
            assert step >= history.shown_step, f"12: {history.shown_step} was shown, {step} is left"
        if state is None:
            shown = self.saves and history.shown_step >= 0
            assert not shown or any(mark.startswith("not saved") for mark in self.marks), (
                f"10.2: {history.shown_step} was shown, and there is no file")
            return
        if step > max(history.shown_step, 0):
            self.marks.add("resumed at a step that nobody had seen")
        assert step in history.cuts, f"13: a checkpoint of step {step}, which never was"
        found = [(version, params.tobytes(), {name: a.tobytes() for name, a in arrays.items()})
                 for version, params, arrays in state["cut"]]
        assert found == history.cuts[step], f"13: the checkpoint of step {step} is no cut"

    # ---- faults ----------------------------------------------------------------------------------

    def fault(self) -> None:
        if self.world.now_ns >= self.faults_end_ns or (self.server.over and self.over()):
            return
        kind = self.world.rng.choice(self.faults)
        learner = self.world.rng.choice(self.learners)
        self.marks.add(f"fault: {kind}")
        if hasattr(learner, kind):
            getattr(learner, kind)()
        elif kind in ("kill", "power"):
            self.crash(kind)
        else:
            getattr(self, f"fault_{kind}")()
        self.world.after(self.fault_gap_ns * self.world.between(0.3, 3), self.fault)

    def fault_signal(self) -> None:
        self.server.signal()

    def fault_no_memory(self) -> None:
        self.server.system.the_workers.failing += 1

    def fault_stranger(self) -> None:
        strangers.visit(self)

    def fault_second_fleet(self) -> None:
        strangers.SecondFleet(self)

    def fault_no_descriptors(self) -> None:
        numbers = (errno.EMFILE, errno.ENOMEM, errno.ECONNABORTED, errno.EINTR)
        self.server.system.listener.failing.append(self.world.rng.choice(numbers))

    def fault_system_call(self) -> None:
        """The next connection for which the system is asked for this gets an error; or broadcasts
        find no memory for a while."""
        rng = self.world.rng
        call = rng.choice((*self.network.CALLS, "broadcast"))
        if call == "broadcast":
            lasts_ns = min(20, 0.9 * self.config.quorum_timeout_s) * SECOND * rng.random()
            self.starve(min(self.world.now_ns + lasts_ns, self.faults_end_ns))
            return
        self.network.failing[call].append(rng.choice([errno.ENOSPC, errno.ENOMEM, NO_MEMORY]))

    def starve(self, end_ns: float) -> None:
        """Until then there is no memory to encode a version in."""
        session = self.server.server.session
        if session is not None and not (self.server.ended
                                        or isinstance(session.outgoing.pool, Scarce)):
            session.outgoing.pool = Scarce(self.world, session.outgoing.pool, end_ns)

    def fault_freeze(self) -> None:
        self.server.freeze(self.world.between(10, 10_000) * MS)

    def fault_full_tape(self) -> None:
        self.lost_records = True
        self.tape.trouble.append(self.world.rng.choice(["full", "short"]))

    def fault_unread(self) -> None:
        """Nobody reads log and tape for a while."""
        self.lost_records = True
        for aside in self.server.system.asides:
            aside.stop_reading(self.world.between(0.1, 30) * SECOND, 1000)

    def fault_second_server(self) -> None:
        """Somebody starts another one: it says why not, and changes nothing."""
        if self.server.ended or not self.network.listener:
            return                                # gone, or about to go
        try:
            self.start(replace(self.config, learner_budget_steps=None))
        except (BindError, ConfigError):
            return
        raise AssertionError("two servers at once")

    def fault_chown(self) -> None:
        """The checkpoint belongs to somebody else from now on."""
        inode = self.disk.names.get(PATH)
        if inode is not None:
            inode.owner, inode.mode = self.world.rng.choice([0, 1000]), 0o600

    def fault_away(self) -> None:
        """Nobody finds the directory of the checkpoint for a while."""
        self.disk.away_until_ns = self.world.now_ns + int(self.world.between(10, 5000) * MS)

    def heal(self) -> None:
        """The faults stop."""
        self.disk.away_until_ns = 0
        self.disk.fault_chance = 0.0
        self.server.system.the_workers.failing = 0
        for numbers in self.network.failing.values():
            numbers.clear()
        scale.forgive()

    def refused(self, learner: SimLearner, error: Exception) -> None:
        """A learner was told off."""
        outcome.look_refused(self, learner, error)

    # ---- play and judge --------------------------------------------------------------------------

    def play(self) -> None:
        """Run to the end. AssertionError if the fleet gets stuck after its faults have stopped."""
        with scale.scaled(self.settings):
            if self.world.now_ns >= self.faults_end_ns:
                scale.forgive()
            while not self.over():
                assert self.world.step(), "nothing is left to happen"
                if self.world.done % 64 == 0:
                    assert self.world.now_ns <= self.patience_ns, self.stuck()
                    self.neglect.look()
            end_ns = self.world.now_ns + 5 * SECOND
            while self.world.now_ns < end_ns and self.world.step():
                pass

    @property
    def lost_processes(self) -> bool:
        """Whether a process ended without having finished what it had begun."""
        return any(mark.startswith(("server lost", "ended with status 1")) for mark in self.marks)

    @property
    def patience_ns(self) -> int:
        """When the run must be over at the latest: what an honest learner may wait for once the
        faults have stopped, then every step as if it stood alone, one after the other."""
        config, settings = self.config, self.settings
        again_s = (KEEPALIVE_NS / SECOND          # until a dead connection is known to be dead
                   + 3 * 30                       # dialing again, each time refused or lost
                   + 60 + 20 + 20                 # strangers, stalls and the deaf
                   + 2 * (config.start_timeout_s or 0)
                   + min(config.final_ack_timeout_s or 0, 1000))
        push_s = 1.25 * 3 * settings["step_ms"][1] / 1000 + 5  # its steps, and the way there
        work_s = 10 * settings["work_ms"] / 1000
        save_s = 60 * 3 * self.disk.slow_ms / 1000 if self.saves else 0
        round_s = 3 * config.quorum_timeout_s + push_s + work_s + save_s
        whole_s = 2 * again_s + (config.total_steps + 5) * round_s
        return self.faults_end_ns + int(whole_s * SECOND)

    def stuck(self) -> str:
        """What the fleet looks like that did not finish in time."""
        scheduler = self.server.scheduler
        return (f"stuck in phase {scheduler.phase} at step {scheduler.global_step} of "
                f"{self.config.total_steps} after {self.world.now_ns / SECOND:.0f} s: "
                f"{scheduler.gathering}")

    def over(self) -> bool:
        """Has the run ended? A server that ended for a reason that passes is started again."""
        server = self.server
        if server.crashed:
            return (server.status == 0 and not server.replaced
                    and "learner budget" not in server.exit_text)
        if not server.over:
            return False
        text = server.exit_text
        self.marks.add(f"ended with status {server.status}")
        passes = server.status and (
            server.status in RESTARTS or server.system.the_workers.failed > 0
            or any(told in text and (not fault or fault in self.faults or fault in self.marks)
                   for told, fault in EXPLAINED.items()))
        if "learner budget" in text:
            self.second_process()
        elif passes and not server.complete:
            if "nothing finite" in text or "--max-base-lag 0" in text:  # somebody mends that
                for learner in self.learners:
                    learner.mend()
            server.crashed = True
            self.replace_server()
        elif server.status == 0 and self.more_steps:
            self.go_on()
        return not server.crashed

    def go_on(self) -> None:
        """Somebody wants more steps after the end: everything is started again, on its file."""
        self.marks.add("went on after the end")
        self.config = replace(self.config, total_steps=self.config.total_steps + self.more_steps)
        self.history.config = self.config
        self.more_steps = 0
        self.faults_end_ns = max(self.faults_end_ns, self.world.now_ns)
        self.server.crashed = True
        for learner in self.learners:
            learner.done = False
            learner.restart()
        self.replace_server()

    def second_process(self) -> None:
        """What follows a budget run: its checkpoint goes on for some steps, without a budget.

        Every learner forgets which versions it has seen, and keeps its values. A report that never
        came, because a learner was away or had just begun anew, ends a budget run with status 1.
        """
        server = self.server
        assert server.status == 0 or "not reported in time" in server.exit_text
        self.marks.add("second process of a budget")
        self.config = replace(self.config, learner_budget_steps=None,
                              total_steps=max(self.config.total_steps,
                                              server.scheduler.global_step + 1))
        self.history.config = self.config
        server.crashed = True
        for learner in self.learners:
            learner.new_session()
        self.replace_server()

    def check(self) -> None:
        """What must be true of a run that is over."""
        outcome.check(self)
