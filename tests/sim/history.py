"""What a run did, told by events and actions alone, and computed a second time.

`History` outlives server processes: the merges in order, the ledger they add up to, and a twin of
the model that takes every merge again, with its contributions in another order. So it knows the
bits of every cut before anybody writes or sends one. `Witness` is how it sees one process. Must not
look into the server, and never changes what it is shown.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from syncer.config import Config
from syncer.core import actions as act
from syncer.core import events as ev
from syncer.core.run.scheduler import Scheduler
from syncer.errors import NumericsError
from syncer.layout import Layout
from syncer.merge import FragmentStore
from syncer.merge.correction import HelocoConstants
from syncer.steps import version_at
from tests.sim.disk import Disk
from tests.sim.lane import Killed
from tests.sim.marks import Marks
from tests.watch import Watch

Part = tuple[act.Contribution, np.ndarray | None]
"""What was pushed, and its values as long as the merge may still be taken."""
Cut = list[tuple[int, bytes, dict[str, bytes]]]
"""(version, parameters, optimizer state by name) of every fragment."""


class Broken(Killed):
    """A rule was broken. Not an Exception: the server must not take it for a defect of its own."""


class Merge(NamedTuple):
    """What went into one outer step."""

    step: int
    fragment: int
    parts: list[Part]
    folded: bool = False
    dropped: tuple[ev.Dropped, ...] = ()
    """What the server left out of it."""


class History:
    """Steps, values and ledger of the run as far as they are known. `seed` mixes contributions."""

    def __init__(self, config: Config, layout: Layout, seed: int, bf16: bool):
        self.config, self.layout, self.seed, self.bf16 = config, layout, seed, bf16
        self.merges: list[Merge] = []
        self.told: list[tuple[Any, tuple[int, bytes, dict[str, bytes]]] | None] = (
            [None] * len(layout.fragments))
        """Of each fragment the version that `current` was asked about last: cuts share bytes."""
        self.cuts: dict[int, Cut] = {}
        self.store = self.new_store()
        self.renumbered = 0
        """So many steps were added to those that were taken."""
        self.short: dict[int, int] = {}
        """The step where as many were added that the format has no place for: none takes them."""
        self.raised_in_vain: int | None = None
        """The step of a file that was renumbered by a start that came no further."""
        self.shown_step = -1
        """Newest version that may have left a server."""

    def new_store(self) -> FragmentStore:
        """One thread, whatever the server has: every count gives the same bits."""
        config = self.config
        return FragmentStore(
            self.layout, lr=config.outer_lr, momentum=config.outer_momentum, threads=1,
            outer_optimizer=config.outer_optimizer, dn_period=config.dn_period,
            dn_activation=config.dn_activation, delta_correction=config.delta_correction,
            heloco=HelocoConstants(config.heloco_c_ok, config.heloco_k_s, config.heloco_k_d,
                                   config.heloco_beta_max, config.heloco_kappa,
                                   config.heloco_eps),
            clip_norm=config.clip_norm, robust=config.robust, bf16=self.bf16)

    def adopt(self, fragment: int, values: np.ndarray) -> None:
        """An initial value."""
        self.store.adopt(fragment, values.copy())

    def current(self) -> Cut:
        for fragment, told in enumerate(self.told):
            version = self.store.current(fragment)
            if told is None or told[0] is not version:
                self.told[fragment] = version, _bytes_of(version)
        return [told[1] for told in self.told]

    def note_cut(self, step: int) -> None:
        self.cuts[step] = self.current()

    def commit(self, merge: Merge, published: bool) -> None:
        """The next step, about to be written, or published."""
        if merge.step in self.cuts:
            return                                # written before it was published
        prepared = self.prepare(merge)
        assert prepared is not None, f"step {merge.step} was merged although it is not finite"
        assert prepared.excluded == merge.dropped, f"step {merge.step} left out others"
        self.store.publish(prepared)
        left = {dropped.position for dropped in merge.dropped}
        self.merges.append(merge._replace(
            parts=[(c, None) for i, (c, _) in enumerate(merge.parts) if i not in left]))
        self.note_cut(merge.step)

    def prepare(self, merge: Merge) -> Any:
        """The same merge again; None if it is not finite."""
        try:
            if merge.folded and self.config.fold == "streaming":  # its order counts, and is kept
                fold = self.store.fold(merge.fragment, "streaming")
                for c, values in merge.parts:
                    fold.add(c.learner, c.generation, c.weight, values)
                return self.store.prepare_fold(merge.step, fold)
            parts = list(merge.parts)
            if not any(c.carried for c, _ in parts):  # two of one learner keep their order
                random.Random(self.seed + merge.step).shuffle(parts)
            return self.store.prepare(merge.fragment, merge.step, [
                (c.learner, c.generation, c.weight, values) for c, values in parts])
        except NumericsError:
            return None

    def go_back_to(self, step: int, cut: list[tuple] | None, renumbered: int = 0) -> None:
        """A server begins from what was left: -1 is nothing, and the run begins anew."""
        self.renumbered = renumbered
        self.short = {t: by for t, by in self.short.items() if t <= step}
        self.cuts = {t: known for t, known in self.cuts.items() if t <= step}
        self.merges = [merge for merge in self.merges if merge.step <= step]
        self.store = self.new_store()
        for fragment, (version, params, state) in enumerate(cut or ()):
            self.store.adopt(fragment, params.copy(), version=version, renumbered=renumbered,
                             state={name: array.copy() for name, array in state.items()})

    def raise_steps(self, step: int, by: int, cut: list[tuple], lasting: bool) -> None:
        """The server that began from `step` calls it otherwise: 1.9."""
        count = len(cut)
        raised = [(version_at(step + by, fragment, count), params, state)
                  for fragment, (_, params, state) in enumerate(cut)]
        merges, cuts = self.merges, self.cuts
        self.go_back_to(step + by, raised, self.renumbered + (by if lasting else 0))
        self.merges, self.cuts = merges, cuts
        if not lasting:
            self.short[step + by] = by
        self.note_cut(step + by)

    def ledger(self) -> dict[int, list[int]]:
        """learner -> [merges, steps, tokens] of everything that was merged."""
        found: dict[int, list[int]] = {}
        for merge in self.merges:
            for c, _ in merge.parts:
                entry = found.setdefault(c.learner, [0, 0, 0])
                entry[0] += 1
                entry[1] += c.c_steps
                entry[2] += c.c_tokens
        return found


class Witness:
    """The `watch` of one server process; every rule that it sees broken is a `Broken`."""

    def __init__(self, history: History, disk: Disk | None, found: set[str]):
        self.history, self.disk = history, disk
        self.config = history.config
        self.found = found
        self.values: dict[int, tuple[Any, np.ndarray]] = {}
        """Of payloads that are not given back: handle and a copy, by identity."""
        self.folds: dict[int, list[Part]] = {}
        self.merging: dict[int, Merge] = {}
        self.exit: act.Exit | None = None
        self.committed_ns = 0
        self.pulled_ns: dict[int, int] = {}
        self.scheduler: Any = None

    def begin(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.watch = Watch(scheduler, scheduler.saves.durable_step,
                           scheduler.policy.total_steps - scheduler.config.total_steps)
        self.marks = Marks(scheduler, self.found)

    def before(self, event: Any) -> None:
        try:
            if isinstance(event, ev.Push | ev.Init):
                self.values[id(event.payload)] = event.payload, event.payload.array.copy()
            if isinstance(event, ev.MergeDone) and event.step in self.merging:
                self.merged(event)
            self.watch.event(event)
            self.marks.before(event)
        except AssertionError as error:
            raise Broken(*error.args) from error

    def after(self, event: Any, actions: list) -> None:
        try:
            self.marks.after(event, actions)
            for action in actions:
                name = f"on_{type(action).__name__.lower()}"
                if hasattr(self, name):
                    getattr(self, name)(action)
            self.watch.actions(actions)
            self.bounds()
        except AssertionError as error:
            raise Broken(*error.args) from error

    def merged(self, event: ev.MergeDone) -> None:
        """A merge is computed, or its round gathers again."""
        if event.nothing_left:
            del self.merging[event.step]
        else:
            merge = self.merging[event.step]
            self.merging[event.step] = merge._replace(dropped=event.dropped)

    def forget(self) -> None:
        """Let go of every payload: the process has ended."""
        del self.watch, self.marks
        self.values.clear()
        self.merging.clear()
        self.folds.clear()

    def bounds(self) -> None:
        """No queue grows with the length of the run."""
        scheduler = self.scheduler
        for queue in (scheduler.rounds, self.merging, self.folds):
            assert len(queue) <= max(scheduler.depth, 1), f"queue of {len(queue)}"
        if scheduler.late is not None:
            for waiting in scheduler.late.waiting.values():
                assert len(waiting) <= self.config.learners, "late pushes pile up"

    # ---- what the actions say ----------------------------------------------------------------

    def values_of(self, payload: Any) -> np.ndarray:
        return self.values[id(payload)][1]

    def on_release(self, action: act.Release) -> None:
        del self.values[id(action.payload)]

    def on_adoptinit(self, action: act.AdoptInit) -> None:
        self.history.adopt(action.fragment, self.values.pop(id(action.payload))[1])

    def on_openfold(self, action: act.OpenFold) -> None:
        self.folds[action.step] = []

    def on_fold(self, action: act.Fold) -> None:
        c = action.contribution
        self.folds[action.step].append((c, self.values_of(c.payload)))

    def on_startmerge(self, action: act.StartMerge) -> None:
        parts = self.folds.pop(action.step, None)
        if parts is None:
            parts = [(c, self.values_of(c.payload)) for c in action.contributions]
        self.merging[action.step] = Merge(
            action.step, action.fragment, [(c._replace(payload=None), v) for c, v in parts],
            action.contributions[0].payload is None)

    def on_pull(self, action: act.Pull) -> None:
        for learner, _ in action.members:
            self.pulled_ns[learner] = self.scheduler.now_ns

    def on_publish(self, action: act.Publish) -> None:
        self.committed_ns = self.scheduler.now_ns
        self.history.commit(self.merging.pop(action.step), True)

    def on_broadcast(self, action: act.Broadcast) -> None:
        self.visible(action.version)
        if action.version == 0 == self.scheduler.global_step:
            self.history.note_cut(0)

    def on_sendfinal(self, action: act.SendFinal) -> None:
        self.visible(action.step)

    def visible(self, version: int) -> None:
        """12: with a checkpoint of every step nothing goes out that is not on disk, and with any
        not version 0; unless the run goes on without a file that could not be written."""
        self.history.shown_step = max(self.history.shown_step, version)
        if self.disk is None or (self.watch.save_failed and self.config.goes_on_unsaved):
            return
        if self.config.checkpoint_every == 1 or version == self.scheduler.global_step == 0:
            assert self.disk.durable_step() >= version, f"12: {version} is not on the disk"

    def on_save(self, action: act.Save) -> None:
        if action.kind is act.SaveKind.ROUND and action.step in self.merging:
            self.history.commit(self.merging[action.step], False)
        elif action.kind is not act.SaveKind.FINAL_STATE:
            self.history.note_cut(action.step)
        self.found.add(f"saved {action.kind}" + (
            " in the background" if action.background else ""))

    def on_exit(self, action: act.Exit) -> None:
        self.exit = action


def _bytes_of(version: Any) -> tuple[int, bytes, dict[str, bytes]]:
    return version.version, version.params.tobytes(), {
        name: array.tobytes() for name, array in version.state.items()}
