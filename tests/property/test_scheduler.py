"""The scheduler under arbitrary events: never an exception, never a broken rule, and it gets done.

Each example draws a configuration and a list of operations in the state at hand: learners come, go,
return under new generations, push well, badly, twice or for the wrong round; merges end in any
order; catch-ups end or not; time passes. tests.watch checks every event. Then the faults stop, and
a fleet that answers its pulls must bring the run to exit 0.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.run.phases import Phase
from tests.toy_driver import MS, ToyDriver, toy_config

SLOW_OK = [HealthCheck.too_slow, HealthCheck.data_too_large]


@st.composite
def configurations(draw):
    learners = draw(st.integers(1, 4))
    quorum = draw(st.integers(1, learners))
    fixed = draw(st.booleans())
    return {
        "learners": learners,
        "quorum": learners if fixed else quorum,
        "total_steps": draw(st.integers(4, 16)),
        "pipeline": draw(st.integers(1, 3)),
        "grace_ms": 0 if fixed else draw(st.sampled_from([0, 20, 5000])),
        "max_base_lag": 0 if fixed else draw(st.sampled_from([None, 1, 3])),
        "min_round_interval_ms": draw(st.sampled_from([0, 30])),
        "sync_interval_steps": draw(st.sampled_from([0.0, 4.0])),
        "quorum_timeout_s": draw(st.sampled_from([1, 10])),
        "final_ack_timeout_s": 10_000,
        **draw(st.sampled_from([{}, {}, {"every": 1}, {"every": 2}, {"every": 3},
                                {"every": 2, "background_checkpoint": True}]).map(checkpoints)),
    }


def checkpoints(options: dict) -> dict:
    """Settings of a run that writes a checkpoint every so many steps, or none."""
    if not options:
        return {}
    return {"checkpoint_path": "c", "checkpoint_every": options["every"],
            "background_checkpoint": options.get("background_checkpoint", False)}


class Fleet:
    """A driver and what its learners know: enough to give events that make sense, and others."""

    def __init__(self, options: dict, fragments: int):
        self.driver = ToyDriver(toy_config(**options), fragments)
        self.now_ms = 0
        self.generation = 0
        self.connected: list = []
        self.catching_up: list = []
        self.pulls: dict = {}
        self.seen: dict = {}
        self.finals: list = []
        self.saving = False
        self.opened: dict = {}
        self.listener = None

    @property
    def scheduler(self):
        return self.driver.scheduler

    def feed(self, event):
        for action in self.driver.feed(self.now_ms * MS, event):
            if isinstance(action, act.Pull):
                for member in action.members:
                    self.pulls.setdefault(member, []).append(action)
            elif isinstance(action, act.CatchUp):
                self.catching_up.append((action.learner, action.generation))
            elif isinstance(action, act.Broadcast):
                for member in action.members:
                    self.seen.setdefault(member, {})[action.fragment] = action.version
            elif isinstance(action, act.SendFinal):
                self.finals.append((action.learner, action.generation, action.step))
            elif isinstance(action, act.Save):
                self.saving = True
            if self.listener is not None:
                self.listener(action)

    # ---- operations ------------------------------------------------------------------------------

    def hello(self, learner: int, again: bool = False):
        if again and self.connected:
            self.feed(self.driver.hello(*self.connected[0]))
            return
        self.generation += 1
        self.connected.append((learner, self.generation))
        self.feed(self.driver.hello(learner, self.generation))

    def gone(self, choice: int):
        if self.connected:
            member = self.connected.pop(choice % len(self.connected))
            self.forget(member)
            self.feed(ev.Disconnected(*member))

    def forget(self, member):
        self.pulls.pop(member, None)
        self.catching_up = [m for m in self.catching_up if m != member]
        self.finals = [final for final in self.finals if final[:2] != member]

    def init(self, fragment: int):
        """Every connection of learner 0 sends the fragment; the superseded ones in vain."""
        for member in self.connected:
            if member[0] == 0:
                self.feed(self.driver.init(*member, fragment % self.driver.fragments, 1.0))

    def answer(self, choice: int, lag: int = 0, keep: bool = False):
        """Answer one pull; `lag`: from an older anchor; `keep`: and again later."""
        waiting = sorted(member for member in self.pulls if self.pulls[member])
        if not waiting:
            return
        member = waiting[choice % len(waiting)]
        pull = self.pulls[member][0] if keep else self.pulls[member].pop(0)
        base = max(0, self.seen.get(member, {}).get(pull.fragment, 0) - lag)
        self.feed(self.driver.push(*member, pull.step, 0.5, attempt=pull.attempt, base=base,
                                   fragment=pull.fragment, local_step=self.now_ms))

    def junk(self, learner: int, generation: int, step: int, attempt: int):
        """A push that nobody asked for."""
        self.feed(self.driver.push(learner, generation, step, 9.0, attempt=attempt, base=step % 5))

    def caught_up(self, choice: int):
        if self.catching_up:
            member = self.catching_up.pop(choice % len(self.catching_up))
            event = self.driver.caught_up(*member)
            self.seen.setdefault(member, {}).update(enumerate(event.delivered))
            self.feed(event)

    def stalled(self, choice: int, is_still: bool):
        """A catch-up stands still, or moves."""
        if self.catching_up:
            member = self.catching_up[choice % len(self.catching_up)]
            self.feed(ev.Stalled(*member, is_still))

    def merged(self, choice: int):
        if self.driver.merging:
            step = sorted(self.driver.merging)[choice % len(self.driver.merging)]
            self.feed(ev.MergeDone(step, 1000, 1.0))

    def synced(self, choice: int):
        if self.driver.to_sync:
            self.feed(ev.Synced(self.driver.to_sync.pop(choice % len(self.driver.to_sync)), 1000))

    def heartbeat(self, learner: int, generation: int):
        self.feed(ev.Heartbeat(learner, generation, self.now_ms))

    def beat(self, choice: int):
        """A heartbeat of any connection, current or not."""
        if self.connected:
            self.heartbeat(*self.connected[choice % len(self.connected)])

    def acknowledge(self, choice: int, wrong: bool = False):
        if self.finals:
            learner, generation, step = self.finals.pop(choice % len(self.finals))
            if wrong:
                self.finals.append((learner, generation, step))
            self.feed(ev.FinalAck(learner, generation, step + wrong))

    def saved(self):
        if self.saving:
            self.saving = False
            self.feed(ev.Saved(self.driver.saving, self.scheduler.global_step))

    def wait(self, ms: int):
        """Time passes, with every timer at its moment."""
        until = self.now_ms + ms
        for _ in range(10_000):
            due = self.scheduler.deadline_ns()
            if due is None or due > until * MS:
                break
            self.now_ms = max(self.now_ms, -(-due // MS))
            self.feed(ev.Tick())
        else:
            raise AssertionError("timers without end")
        self.now_ms = max(self.now_ms, until)

    def work(self, members: int):
        """Some members (a bit mask of learner ids) answer all their pulls; merges end."""
        for member in sorted(self.pulls):
            while members >> member[0] & 1 and self.pulls.get(member):
                pull = self.pulls[member].pop(0)
                self.feed(self.driver.push(*member, pull.step, 1.0, attempt=pull.attempt,
                                           fragment=pull.fragment, local_step=self.now_ms))
        while self.driver.merging:
            self.merged(0)
        while self.driver.to_sync:
            self.synced(0)

    def stale(self, choice: int, lag: int):
        """Answer the newest round from an anchor that is some versions of the fragment old."""
        rounds = [pulls[-1] for pulls in self.pulls.values() if pulls]
        if rounds:
            newest = max(pull.step for pull in rounds)
            members = sorted(m for m, pulls in self.pulls.items()
                             if pulls and pulls[-1].step == newest)
            member = members[choice % len(members)]
            pull = self.pulls[member].pop()
            base = max(0, newest - (1 + lag) * self.driver.fragments)
            self.feed(self.driver.push(*member, pull.step, 0.5, attempt=pull.attempt, base=base))

    def late(self, choice: int, rounds_ago: int):
        """A live member pushes for one of the last closed rounds, from the anchor it had then."""
        fragments = self.driver.fragments
        step = self.scheduler.global_step - rounds_ago
        if step >= 1 and self.connected:
            member = self.connected[choice % len(self.connected)]
            self.feed(self.driver.push(*member, step, 2.0, base=max(0, step - fragments)))

    def folded(self):
        while self.driver.to_fold:
            self.feed(self.driver.to_fold.pop(0))

    def budget(self, chance: int, choice: int):
        """Now and then a learner has spent its budget, in a run that has one."""
        current = [m for m in self.scheduler.members.current if m is not None]
        steps = self.driver.config.learner_budget_steps
        running = self.scheduler.phase in (Phase.RUNNING, Phase.CUTOFF)
        if steps and current and running and chance == 0:
            member = current[choice % len(current)]
            self.feed(ev.BudgetDone(member.learner, member.generation, steps))

    # ---- liveness --------------------------------------------------------------------------------

    def settle(self):
        """One round of a fleet without faults: everybody is there and answers at once."""
        learners = self.driver.config.learners
        for learner in range(learners):
            current = self.scheduler.members.current[learner]
            if current is None:
                self.hello(learner)
        for fragment in range(self.driver.fragments):
            if self.scheduler.phase == Phase.WAITING:
                self.init(fragment)
        while self.catching_up:
            self.caught_up(0)
        while any(self.pulls.values()):
            self.answer(0)
        self.folded()
        while self.driver.merging:
            self.merged(0)
        while self.driver.to_sync:
            self.synced(0)
        if self.scheduler.phase == Phase.CUTOFF:
            for choice in range(learners):
                self.budget(0, choice)
        while self.finals:
            self.acknowledge(0)
        self.saved()


small = st.integers(0, 5)
learner_ids = st.integers(0, 3)
COMMON = [
    st.tuples(st.just("hello"), learner_ids),
    st.tuples(st.just("hello"), learner_ids),
    st.tuples(st.just("gone"), small),
    st.tuples(st.just("answer"), small),
    st.tuples(st.just("caught_up"), small),
    st.tuples(st.just("merged"), small),
    st.tuples(st.just("synced"), small),
    st.tuples(st.just("work"), st.integers(1, 15)),
    st.tuples(st.just("work"), st.integers(1, 15)),
    st.tuples(st.just("wait"), st.sampled_from([1, 20, 100, 1000, 10_000])),
]
RARE = [
    st.tuples(st.just("hello"), st.just(0), st.just(True)),
    st.tuples(st.just("init"), small),
    st.tuples(st.just("answer"), small, small, st.booleans()),
    st.tuples(st.just("stale"), small, st.integers(0, 4)),
    st.tuples(st.just("stalled"), small, st.booleans()),
    st.tuples(st.just("junk"), small, small, st.integers(1, 12), st.integers(1, 3)),
    st.tuples(st.just("heartbeat"), learner_ids, small),
    st.tuples(st.just("beat"), small),
    st.tuples(st.just("acknowledge"), small, st.booleans()),
    st.tuples(st.just("saved")),
]
OPERATIONS = st.lists(st.one_of(*COMMON, *COMMON, *RARE), min_size=20, max_size=80)


def usable(operation, learners: int) -> bool:
    return operation[0] not in ("hello", "heartbeat") or operation[1] < learners


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW_OK)
@given(configurations(), st.integers(1, 3), st.booleans(), st.booleans(),
       OPERATIONS)
def test_any_events_then_a_healthy_fleet_finishes(options, fragments, started, final_state,
                                                  operations):
    if final_state:
        options["final_state"] = "final.bin"
    fleet = Fleet(options, fragments)
    if started:
        for learner in range(options["learners"]):
            fleet.hello(learner)
        for fragment in range(fragments):
            fleet.init(fragment)
    for name, *arguments in operations:
        if usable((name, *arguments), options["learners"]):
            getattr(fleet, name)(*arguments)
    for _ in range(40 * options["total_steps"] + 100):
        if fleet.driver.exit is not None:
            break
        fleet.settle()
        fleet.wait(1000)
    finished(fleet)


def finished(fleet: Fleet):
    """Exit 0, unless the run ended in one of the ways that its own configuration asks for."""
    exit_action = fleet.driver.exit
    assert exit_action is not None, f"stuck at {fleet.scheduler.global_step}"
    config, text = fleet.driver.config, exit_action.text
    if exit_action.status == 0 and "budget" in text:
        assert fleet.scheduler.budget.leases == {}
    elif exit_action.status == 0:
        assert fleet.scheduler.global_step == config.total_steps
        assert sum(e[0] for e in fleet.scheduler.ledger.values()) >= config.total_steps
    else:
        strict = config.max_base_lag == 0 and "max-base-lag 0" in text
        nobody = not config.fixed_roster and "no learner is connected" in text
        lease = (config.learner_budget_steps
                 and "learner budget not reported in time" in text)
        assert strict or nobody or lease, exit_action


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW_OK)
@given(configurations(), OPERATIONS, st.sampled_from([2, 15]))
def test_a_signal_frees_everything_at_once(options, operations, signal):
    fleet = Fleet(options, 2)
    for learner in range(options["learners"]):
        fleet.hello(learner)
    fleet.init(0)
    fleet.init(1)
    for name, *arguments in operations:
        if usable((name, *arguments), options["learners"]):
            getattr(fleet, name)(*arguments)
    if fleet.driver.exit is None:
        failed = fleet.scheduler.phase == Phase.STOPPING  # its last cut is being written
        fleet.feed(ev.Stop(signal))
        for _ in range(3):  # a write under way, one in the background, and that of the last cut
            fleet.saved()
        assert fleet.driver.exit.status == (1 if failed else 128 + signal)
    assert fleet.scheduler.deadline_ns() is None


RARE_PATHS = {
    "asked again after a refused push", "older connection is current again",
    "a round cannot close without a learner that has gone",
    "a silent connection gave its slot away",
    "recovery replay", "late joiner pulled into open round", "rebound outstanding pull",
    "quorum timeout: new frozen-membership attempt", "stale base-relative delta admitted",
    "quorum timeout: relaunch deferred, too few learners",
    "quorum timeout: missing learners of the fixed roster pulled again",
    *act.PushRefusal,
    "late push carried into round", "late push waits for the next round",
    "learner-budget cutoff checkpoint written",
    "tape carried", "tape released", "tape joined", "closed by carry alone", "late fold reopened",
    "capacity shrink", "closed without quorum",
}


def features(rng: random.Random, learners: int) -> dict:
    """Optional parts of a dynamic run, none in most of the seeds."""
    kind = rng.choice(["", "", "carry", "carry", "capacity", "exact", "streaming", "budget"])
    if kind == "carry":
        return {"late_carry": True, "carry_answers_round": rng.random() < 0.5,
                "fold": rng.choice(["batch", "streaming"]), "max_carry_lag": rng.choice([0, 1, 2])}
    if kind == "capacity":
        return {"quorum_capacity": rng.choice([0.3, 0.6, 1.0]), "q_min": rng.randint(1, learners),
                "learner_capacity": ((0, 2.5),), "soft_deadline_s": rng.choice([None, 1, 5])}
    if kind in ("exact", "streaming"):
        exact = {"quorum": learners, "learner_weight": "equal"} if kind == "exact" else {}
        return {"fold": kind, **exact}
    return {"learner_budget_steps": 50, "checkpoint_path": "c"} if kind == "budget" else {}


class Marks:
    """Which rare paths a history has taken, read from what the scheduler says."""

    def __init__(self, fleet, reached: set):
        self.fleet = fleet
        self.reached = reached

    def __call__(self, action):
        if isinstance(action, act.Log):
            self.reached.add(action.fields.get("reason", action.text))
            died = action.fields.get("learner"), action.fields.get("died")
            if died in self.fleet.scheduler.members.members:
                self.reached.add("a silent connection gave its slot away")
        elif isinstance(action, act.Record) and "step" in action.fields:
            fields = action.fields
            self.reached.update(f"tape {key}" for key in ("carried", "released", "joined")
                                if key in fields)
            if not fields.get("responders", True):
                self.reached.add("closed by carry alone")
            if fields.get("quorum_ms", 0) is None and fields.get("missed_grace"):
                self.reached.add("closed without quorum")
            if "released" in fields and self.fleet.driver.config.max_base_lag is None:
                self.reached.add("capacity shrink")
        elif isinstance(action, act.OpenFold):
            if self.fleet.opened.get(action.step) == action.attempt:
                self.reached.add("late fold reopened")
            self.fleet.opened[action.step] = action.attempt


def random_history(seed: int, reached: set) -> Fleet:
    """One run drawn from a seed, with each kind of operation as likely as the seed says."""
    rng = random.Random(seed)
    learners = rng.randint(1, 5)
    fixed = rng.random() < 0.25
    fleet = Fleet({
        "learners": learners,
        "start_learners": learners if fixed else rng.randint(1, learners),
        "quorum": learners if fixed else rng.randint(1, learners),
        "total_steps": rng.randint(6, 20),
        "pipeline": rng.randint(1, 3),
        "grace_ms": 0 if fixed else rng.choice([0, 20, 5000]),
        "max_base_lag": 0 if fixed else rng.choice([None, 1, 3]),
        "quorum_timeout_s": rng.choice([1, 10]),
        "final_ack_timeout_s": 10_000,
        **({} if fixed else features(rng, learners)),
    }, rng.randint(1, 4))
    fleet.listener = Marks(fleet, reached)
    operations = {
        "hello": lambda: fleet.hello(rng.randrange(learners)),
        "gone": lambda: fleet.gone(rng.randrange(9)),
        "answer": lambda: fleet.answer(rng.randrange(9), 0, rng.random() < 0.2),
        "stale": lambda: fleet.stale(rng.randrange(9), rng.randint(-1, 4)),
        "junk": lambda: fleet.junk(rng.randrange(learners), fleet.generation, rng.randrange(20), 1),
        "caught_up": lambda: fleet.caught_up(rng.randrange(9)),
        "stalled": lambda: fleet.stalled(rng.randrange(9), rng.random() < 0.7),
        "merged": lambda: fleet.merged(rng.randrange(9)),
        "synced": lambda: fleet.synced(rng.randrange(9)),
        "work": lambda: fleet.work(rng.randrange(32)),
        "late": lambda: fleet.late(rng.randrange(9), rng.randint(0, 4)),
        "folded": fleet.folded,
        "beat": lambda: fleet.beat(rng.randrange(9)),
        "budget": lambda: fleet.budget(rng.randrange(30), rng.randrange(200)),
        "wait": lambda: fleet.wait(rng.choice([1, 20, 100, 1000, 10_000])),
        "acknowledge": lambda: fleet.acknowledge(rng.randrange(9), rng.random() < 0.2),
    }
    weights = [rng.choice([0, 1, 1, 3, 9]) for _ in operations]
    weights[-1] += 1
    fleet.settle()
    for name in rng.choices(list(operations), weights, k=rng.randint(20, 150)):
        if name not in ("stale", "late") or not fixed:
            operations[name]()
    for _ in range(1000):
        if fleet.driver.exit is not None:
            break
        fleet.settle()
        fleet.wait(1000)
    finished(fleet)
    return fleet


def test_random_histories_reach_every_rare_path():
    reached: set = set()
    for seed in range(600):
        try:
            random_history(seed, reached)
        except Exception as error:
            raise AssertionError(f"random_history({seed}, set()) fails") from error
    assert reached >= RARE_PATHS, f"never happened: {RARE_PATHS - reached}"


def test_same_events_same_actions():
    """The scheduler is a function: a replay gives equal actions."""
    def run():
        fleet = Fleet({"learners": 3, "quorum": 2, "total_steps": 6, "pipeline": 2}, 2)
        seen = []
        for _ in range(40):
            fleet.settle()
            fleet.wait(10)
            seen.append((fleet.now_ms, fleet.scheduler.global_step, list(fleet.driver.values)))
        assert fleet.driver.exit.status == 0
        return seen

    assert run() == run()
