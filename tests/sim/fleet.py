"""One simulated run: draws a fleet and a subset of faults from a seed, plays it, checks the result.

While the faults last, anything may happen to learners, links and the server. Then they stop, and
the fleet must finish. What must hold is checked all along by tests.watch and at the end by `check`:
the tape is contiguous, the ledger is the sum of what was merged, a serial replay of the merges in
another order gives the final parameters bit for bit, and so does every learner that acknowledged.
"""

from __future__ import annotations

from dataclasses import replace

from syncer.core import events as ev
from syncer.layout import AVG, RDA, FragmentLayout, Layout
from syncer.merge import FragmentStore
from tests.sim.clock import MS, SECOND, World
from tests.sim.disk import Disk
from tests.sim.learner import SimLearner
from tests.sim.server import SimServer, optimizer_of, shuffled
from tests.toy_driver import toy_config

FAULTS = ("drop", "restart", "dial_again", "garbage", "stall", "kill", "power", "signal", "leave")
RESTARTS = (5, 128 + 15)                         # a checkpoint failed, a signal: started again


class Fleet:
    """A run drawn from a seed. `marks` are the rare paths it took."""

    def __init__(self, seed: int, steps: int | None = None):
        self.seed = seed
        self.world = world = World(seed)
        rng = world.rng
        self.learner_count = rng.randint(1, 5)
        self.config = toy_config(**self.draw_config(steps))
        self.dtype = rng.choice([1, 2, 3])
        numels = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        self.layout = Layout(tuple(
            FragmentLayout(rng.choice([AVG, RDA]), (numel, rng.randint(1, 4)))
            for numel in numels))
        self.fingerprint = bytes(rng.randrange(256) for _ in range(32))
        self.settings = {
            "step_ms": (5, 400), "work_ms": world.between(0.1, 300), "gates": [1, 1, 1, 3],
            # Without data streams a pull cannot overtake the broadcast it is about, which a strict
            # run could not forgive.
            "streams": 0 if self.config.fixed_roster else rng.choice([0, 1, 3]),
            "ns_per_byte": world.between(1, 1e5), "half_open_ms": world.between(10, 20_000),
            "duplicate": rng.choice([0, 0, 0.3]), "impatience": rng.choice([0, 0, 0, 0.3]),
        }
        weights = {fault: rng.choice([0, 0, 0, 1, 3]) for fault in FAULTS}
        self.faults = [fault for fault, weight in weights.items() for _ in range(weight)]
        if self.config.late_carry or rng.random() < 0.1:
            self.faults += ["stall"] * 3          # late pushes need somebody who is late
        self.fault_gap_ns = world.between(50, 5000) * MS
        self.faults_end_ns = int(world.between(1, 60) * SECOND)
        self.marks: set[str] = set()
        self.tape: list[dict] = []
        self.merged: list[tuple] = []
        self.initial: dict = {}
        self.cuts: dict[int, list[bytes]] = {}
        self.other_history = False
        self.disk = None
        if self.config.checkpoint_path is not None:
            self.disk = Disk(world, world.between(1, 5000), self.config.checkpoint_format)
            self.disk.fault_chance = rng.choice([0, 0, 0.05, 0.3])
            world.after(self.faults_end_ns, self.heal_disk)
        self.server: SimServer | None = SimServer(world, self.config, self.settings,
                                                  disk=self.disk)
        self.learners = [SimLearner(world, self, i, self.settings)
                         for i in range(self.learner_count)]
        if self.faults:
            world.after(self.fault_gap_ns, self.fault)

    def draw_config(self, steps: int | None) -> dict:
        rng, learners = self.world.rng, self.learner_count
        fixed = rng.random() < 0.2
        options = {
            "learners": learners,
            "total_steps": steps or rng.randint(3, 25),
            "quorum": learners if fixed else rng.randint(1, learners),
            "grace_ms": 0 if fixed else rng.choice([0, 20, 1000]),
            "pipeline": rng.randint(1, 4),
            "max_base_lag": 0 if fixed else rng.choice([None, None, 2, 8]),
            "quorum_timeout_s": rng.choice([2, 10]),
            "final_ack_timeout_s": 1_000_000,
            "sync_interval_steps": rng.choice([0.0, 0.0, 4.0]),
            "outer_lr": 0.5,
            "merge_threads": 1,
            "final_state": rng.choice([None, "f"]),
        }
        options |= self.draw_checkpoints()
        if fixed:
            return options
        options["start_learners"] = rng.randint(1, learners)
        if "checkpoint_path" in options and not options["mark_final_checkpoint"] and (
                rng.random() < 0.3):
            options["learner_budget_steps"] = rng.randint(10, 60)
        kind = rng.choice(["", "", "carry", "capacity", "exact", "streaming"])
        if kind == "carry":
            options |= {"late_carry": True, "carry_answers_round": rng.random() < 0.5,
                        "quorum_timeout_s": 1, "quorum": rng.choice([1, learners])}
        elif kind == "capacity":
            options |= {"quorum_capacity": rng.choice([0.3, 0.6, 1.0]),
                        "q_min": rng.randint(1, learners), "learner_capacity": ((0, 2.5),),
                        "soft_deadline_s": rng.choice([None, 1])}
        elif kind == "exact":
            options |= {"fold": "exact", "quorum": learners, "learner_weight": "equal",
                        "max_base_lag": rng.choice([None, 1, 1])}
        elif kind == "streaming":
            options |= {"fold": "streaming"}
        return options

    def draw_checkpoints(self) -> dict:
        """None, every step, now and then, or now and then in the background."""
        rng = self.world.rng
        kind = rng.choice(["none", "none", "round", "periodic", "background"])
        if kind == "none":
            return {}
        return {"checkpoint_path": "c", "checkpoint_every": 1 if kind == "round" else
                rng.randint(2, 6), "background_checkpoint": kind == "background",
                "mark_final_checkpoint": rng.random() < 0.5,
                "checkpoint_format": rng.choice(["safetensors", "yeto-v3"])}

    # ---- faults ----------------------------------------------------------------------------------

    def fault(self) -> None:
        ended = self.server.exit is not None and not self.server.crashed
        if ended or self.world.now_ns >= self.faults_end_ns:
            return
        kind = self.world.rng.choice(self.faults)
        learner = self.world.rng.choice(self.learners)
        if kind in ("kill", "power"):
            self.crash(kind)
        elif kind == "signal":
            self.server.handle(ev.Stop(15))
        elif kind == "stall":
            learner.stalled_until_ns = self.world.now_ns + self.world.between(100, 20_000) * MS
        elif kind == "leave":
            learner.redial_s = 30
            learner.drop()
        else:
            getattr(learner, kind)()
        self.world.after(self.fault_gap_ns * self.world.between(0.3, 3), self.fault)

    def heal_disk(self) -> None:
        self.disk.fault_chance = 0.0

    def crash(self, kind: str) -> None:
        """The server dies and a new one takes up what is left a little later.

        Without checkpoints that is the last committed cut, and the end is not played twice.
        """
        server = self.server
        if server.crashed or server.exit is not None:
            return
        if self.disk is None and server.scheduler.phase > 1:
            return
        self.marks.add(f"server lost: {kind}")
        server.crash(kind == "power")
        self.replace_server()

    def replace_server(self) -> None:
        """Collect what the process left behind, and start the next one."""
        self.collect()
        self.world.after(self.world.between(10, 5000) * MS, self.resume, self.server)

    def resume(self, old: SimServer) -> None:
        state = (old.last_cut() if self.disk is None else
                 self.disk.load(optimizer_of(self.config), self.config.total_steps))
        if state is not None:
            self.marks.add("resumed" if state["step"] < self.config.total_steps else
                           "resumed at the end")
            self.check_resumed(state, old)
            if self.config.learner_budget_steps is not None:  # which cannot be resumed with
                self.config = replace(self.config, learner_budget_steps=None)
        step = -1 if state is None else state["step"]
        self.cuts = {t: cut for t, cut in self.cuts.items() if t <= step}
        self.tape = [record for record in self.tape if record.get("step", 0) <= step]
        self.merged = [entry for entry in self.merged if entry[0] <= step]
        if self.disk is not None and step < self.config.total_steps:
            self.disk.unmark()
        self.server = SimServer(self.world, self.config, self.settings, state, self.disk)
        if old.shown_step > step:
            # Learners keep anchors that this history has not got: somebody starts them again, too.
            self.marks.add("rolled back")
            self.other_history = True
            soon = self.config.learner_budget_steps is not None  # reports what it did before
            for learner in self.learners:
                delay_ns = 0 if soon else self.world.rng.random() * 20 * SECOND
                self.world.after(delay_ns, learner.restart_if, learner.process)

    def check_resumed(self, state: dict, old: SimServer) -> None:
        """13: what is on the disk is one cut of this run, and with every step saved the newest."""
        step = state["step"]
        if old.in_cut is not None and old.in_cut[0] == step and (
                not self.merged or self.merged[-1][0] < step):
            self.marks.add("resumed at a step that nobody had seen")
            self.merged.append(old.in_cut)
        params = [entry[1].tobytes() for entry in state["cut"]]
        if step == 0 and self.disk is None:
            self.cuts[0] = params
        assert step in self.cuts, f"13: a checkpoint of step {step}, which never was"
        assert params == self.cuts[step], f"13: the checkpoint of step {step} is no cut of this run"
        if self.disk is None or self.config.checkpoint_every == 1:
            assert step >= old.shown_step, f"12: step {old.shown_step} was shown, {step} is left"

    def refused(self, learner: SimLearner, error: Exception) -> None:
        """A learner was told off: only for what it did, which the faults of this run explain.

        After a roll back it may also see another version of the same number.
        """
        self.marks.add("a learner was refused")
        rolled_back = self.other_history and "other bytes" in str(error)
        assert rolled_back or "garbage" in self.faults, f"learner {learner.learner}: {error}"

    def collect(self) -> None:
        """Keep what a server process leaves behind."""
        self.marks |= self.server.marks
        self.tape += self.server.tape
        self.merged += self.server.merged
        self.cuts |= self.server.cuts
        if self.server.initial:
            self.initial = self.server.initial

    # ---- play and judge --------------------------------------------------------------------------

    def play(self, callbacks_max: int = 400_000) -> None:
        """Run to the end. AssertionError if the fleet gets stuck after its faults have stopped."""
        while not self.over():
            assert self.world.step(), "nothing is left to happen"
            assert self.world.done < callbacks_max, (
                f"stuck at step {self.server.scheduler.global_step} of "
                f"{self.config.total_steps} after {self.world.now_ns / SECOND:.0f} s: "
                f"{self.server.scheduler.gathering}")
        end_ns = self.world.now_ns + 5 * SECOND
        while self.world.now_ns < end_ns and self.world.step():
            pass
        self.collect()

    def over(self) -> bool:
        """Has the run ended? A server that ended for a reason that passes is started again."""
        server = self.server
        if server.exit is None or server.crashed:
            return False
        passes = server.exit.status in RESTARTS or "final-state" in server.exit.text
        if "learner budget" in server.exit.text:
            self.second_process()
        elif passes:
            server.crashed = True
            self.replace_server()
        return not passes and not server.crashed

    def second_process(self) -> None:
        """What follows a budget run: its checkpoint goes on for some steps, without a budget.

        Every learner forgets which versions it has seen, and keeps its values. A report that never
        came, because a learner was away or had just begun anew, ends a budget run with status 1.
        """
        server = self.server
        assert server.exit.status == 0 or "not reported in time" in server.exit.text, server.exit
        self.marks.add("second process of a budget")
        self.config = replace(self.config, learner_budget_steps=None,
                              total_steps=max(self.config.total_steps,
                                              server.scheduler.global_step + 1))
        server.crash()
        for learner in self.learners:
            learner.new_session()
        self.replace_server()

    def check(self) -> None:
        exit_action = self.server.exit
        if exit_action.status != 0:
            assert "no learner is connected" in exit_action.text, exit_action
            assert not self.config.fixed_roster
            return
        steps = [step for step, _, _ in self.merged]
        assert steps == list(range(1, self.config.total_steps + 1)), steps
        self.check_ledger()
        self.check_tape()
        final = self.check_replay()
        self.check_disk(final)
        acknowledged = self.server.scheduler.final_cut.acknowledged
        assert acknowledged, "nobody has the result"
        for learner in self.learners:
            if learner.done:
                for fragment, values in enumerate(learner.values):
                    assert values.tobytes() == final[fragment], (
                        f"learner {learner.learner} ends with other values than the server")

    def check_ledger(self) -> None:
        expected: dict[int, list[int]] = {}
        for _, _, parts in self.merged:
            for c, _ in parts:
                entry = expected.setdefault(c.learner, [0, 0, 0])
                entry[0] += 1
                entry[1] += c.c_steps
                entry[2] += c.c_tokens
        assert self.server.scheduler.ledger == expected

    def check_tape(self) -> None:
        """Each merge is told once and in order; a server that was lost may owe its last ones."""
        merges = [record for record in self.tape if "responders" in record]
        told = {record["step"]: record for record in merges}
        assert [record["step"] for record in merges] == sorted(told), "a step is told twice"
        for step, _, parts in self.merged:
            if step in told:
                pushed = [c.learner for c, _ in parts if not c.carried]
                assert [entry["id"] for entry in told[step]["responders"]] == sorted(pushed)
            else:
                assert any(mark.startswith("server lost") for mark in self.marks), step

    def check_disk(self, final: list[bytes]) -> None:
        """The file holds the end of the run, and its marker says so if one was asked for."""
        if self.disk is None:
            return
        total_steps = self.config.total_steps
        assert self.disk.durable_step() == total_steps
        state = self.disk.load(optimizer_of(self.config), total_steps)
        assert [entry[1].tobytes() for entry in state["cut"]] == final
        assert state["ledger"] == self.server.scheduler.ledger
        marked = total_steps if self.config.mark_final_checkpoint else None
        assert self.disk.marked_step() == marked

    def check_replay(self) -> list[bytes]:
        """All merges again, one after the other, contributions in another order: the same bits.

        A streaming fold depends on its order, which is kept.
        """
        store = FragmentStore(self.layout, lr=self.config.outer_lr,
                              momentum=self.config.outer_momentum)
        for fragment in range(len(self.layout.fragments)):
            store.adopt(fragment, self.initial[fragment].copy())
        streaming = self.server.scheduler.policy.folds and not (
            self.server.scheduler.policy.exact_fold)
        for step, fragment, parts in self.merged:
            if streaming:
                fold = store.fold(fragment, "streaming")
                for c, values in parts:
                    fold.add(c.learner, c.generation, c.weight, values)
                store.publish(store.prepare_fold(step, fold))
                continue
            two_of_one = any(c.carried for c, _ in parts)  # they keep their order
            mixed = parts if two_of_one else shuffled(parts, self.seed + step)
            store.publish(store.prepare(fragment, step, [
                (c.learner, c.generation, c.weight, values) for c, values in mixed]))
        final = []
        for fragment in range(len(self.layout.fragments)):
            ours = store.current(fragment).params.tobytes()
            theirs = self.server.store.current(fragment).params.tobytes()
            assert ours == theirs, f"fragment {fragment}: a replay gives other bits"
            final.append(ours)
        return final
