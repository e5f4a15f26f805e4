"""Merges of open rounds on the workers: batches, folds, and results that wait to be published.

It must not decide when a round closes or what counts; it keeps the scheduler's order where bits
depend on it: pushes enter a fold one at a time, as the `Fold` actions came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from syncer.checkpoint.reader import Loaded
from syncer.config import Config
from syncer.core import actions, events
from syncer.core.actions import SaveKind
from syncer.errors import ConfigError, NumericsError
from syncer.layout import ISO, Layout
from syncer.merge import FragmentStore, HelocoConstants
from syncer.merge.finite import Excluded, NothingFinite
from syncer.merge.folds import Fold
from syncer.merge.versions import FragmentVersion, Prepared
from syncer.server import workers
from syncer.server.decoded import Decoded
from syncer.server.downlink import AnchorImage, Downlink
from syncer.server.loop import Loop
from syncer.server.workers import Job, Workers

BF16_INFINITE = (2.0 - 2.0**-7 + 2.0**-8) * 2.0**127
"""From here on bf16 rounds to infinity."""


class Timed(NamedTuple):
    """What came of a merge, and how long it took."""

    prepared: Prepared | None
    compute_ns: int
    error: str | None = None
    """The sentence that says why there is none."""
    excluded: tuple[Excluded, ...] = ()
    nothing_left: bool = False
    anchor: AnchorImage | None = None
    """What learners are sent of it, if that is not its parameters."""


def check_as_bf16(loaded: Sequence[Loaded]) -> None:
    """A checkpoint may be of another session: raises `ConfigError` if a parameter of it would reach
    the learners of this one as infinity."""
    for fragment, found in enumerate(loaded):
        most = max(float(found.params.max()), float(found.params.min()), key=abs)
        if abs(most) >= BF16_INFINITE:
            raise ConfigError(
                f"fragment {fragment} of the checkpoint holds a parameter of {most:g}, which bf16 "
                f"rounds to infinity: resume it with learners whose dtype is f32")


class FoldWork:
    """The fold of one round attempt, and the jobs that use it: one at a time, in order. Its memory
    is taken by the first of them, on a worker."""

    __slots__ = ("attempt", "busy", "dropped", "given", "jobs", "lack", "open", "opened")

    def __init__(self, attempt: int, open_fold: Callable[[], Fold]):
        self.attempt = attempt
        self.open = open_fold
        self.opened: Fold | None = None
        self.jobs: deque[Job] = deque()
        self.busy = False
        self.dropped = False
        self.lack = ""
        """Why what it holds is no round: for a push of it there was no memory. Not the error, which
        would keep that push alive."""
        self.given: dict[actions.Member, deque[actions.Contribution]] = {}
        """Pushes handed to the fold and not yet in its sums; an exact fold keeps early ones."""

    def fold(self) -> Fold:
        """For a worker. Raises MemoryError."""
        if self.lack:
            raise MemoryError(self.lack)
        if self.opened is None:
            self.opened = self.open()
        return self.opened


class Merging:
    """The fragments of a run and everything that is computed on them.

    `handle` takes `Folded` and `MergeDone`; an error that no peer can cause is raised in the loop's
    thread. bf16: the session's broadcasts are. downlink: keeps the anchors, where they are not the
    parameters. Raises `ConfigError` for a layout that this
    configuration cannot merge.

    Large: a method per action that computes, with its half in a worker beside it.
    """

    def __init__(self, config: Config, layout: Layout, helpers: Workers, loop: Loop,
                 handle: Callable[[events.Event], None], *, bf16: bool = False,
                 downlink: Downlink | None = None):
        self.downlink = downlink
        self.workers, self.loop, self.handle = helpers, loop, handle
        self.limit_s = config.quorum_timeout_s
        self.store = FragmentStore(
            layout, lr=config.outer_lr, momentum=config.outer_momentum,
            threads=config.merge_threads, outer_optimizer=config.outer_optimizer,
            dn_period=config.dn_period, dn_activation=config.dn_activation,
            delta_correction=config.delta_correction,
            heloco=HelocoConstants(config.heloco_c_ok, config.heloco_k_s, config.heloco_k_d,
                                   config.heloco_beta_max, config.heloco_kappa,
                                   config.heloco_eps),
            clip_norm=config.clip_norm, robust=config.robust, merge_stats=config.merge_stats,
            bf16=bf16)
        self.kind = config.fold
        for index, fragment in enumerate(layout.fragments):
            if self.kind == "exact" and fragment.merge_mode == ISO:
                raise ConfigError(f"fragment {index} is iso, and this server runs with --fold "
                                  "exact, which allows avg and rda only")
        self.folds: dict[int, FoldWork] = {}
        self.prepared: dict[int, Prepared] = {}
        self.anchors: dict[int, AnchorImage | None] = {}
        """Of what is prepared."""
        self.stats: dict[int, dict[str, Any]] = {}
        self.torn: dict[int, Prepared] = {}
        """By fragment: committed, and publishing it was never done. Its values are whole."""
        self.published = 0
        self.digests: dict[int, str] = {}
        """SHA-256 of the wire bytes of each fragment's initial value."""

    # -------------------------------------------------------------------------- initial values
    def resume(self, loaded: Sequence[Loaded], renumbered: int = 0) -> None:
        """Begin with the fragments of a checkpoint; none: with initial values that will come."""
        for fragment, found in enumerate(loaded):
            self.store.adopt(fragment, found.params, version=found.version, state=found.state,
                             renumbered=renumbered)

    def adopt_init(self, action: actions.AdoptInit) -> str:
        """The payload is version 0 of its fragment; returns its digest."""
        decoded: Decoded = action.payload
        assert decoded.digest is not None  # every INIT is hashed
        self.store.adopt(action.fragment, decoded.buffer)
        digest = self.digests[action.fragment] = decoded.digest.hex()
        return digest

    # ---------------------------------------------------------------------------------- folds
    def open_fold(self, action: actions.OpenFold) -> None:
        """An empty fold for the round; one that a relaunch leaves behind is dropped."""
        old = self.folds.get(action.step)
        if old is not None:
            self._drop(old)
        self.folds[action.step] = FoldWork(action.attempt, lambda: self.store.fold(
            action.fragment, self.kind, action.learners))

    def fold(self, action: actions.Fold) -> None:
        """Add a push behind those that came before it."""
        work, push = self.folds[action.step], action.contribution
        member = push.learner, push.generation
        push.payload.borrow()
        work.given.setdefault(member, deque()).append(push)

        def run() -> list[actions.Member]:
            if work.dropped:  # while it waited for memory
                return []
            return work.fold().add(*member, push.weight, push.payload.values)

        self._enqueue(work, Job(run, lambda *done: self._folded(action.step, work, *done)))

    def _folded(self, step: int, work: FoldWork, members: list[actions.Member] | None,
                error: BaseException | None) -> None:
        if isinstance(error, MemoryError):
            work.lack = str(error) or "no memory for a push"  # the merge of the round is told
        elif error is not None:
            raise error  # no peer can cause it
        for member in members or ():
            waiting = work.given[member]
            push = waiting.popleft()
            if not waiting:
                del work.given[member]
            push.payload.give_back()
            self.handle(events.Folded(step, work.attempt, push.learner, push.carried))
        if work.dropped:
            self._forget(work)
        else:
            self._next(work)

    def _enqueue(self, work: FoldWork, job: Job) -> None:
        work.jobs.append(job)
        if not work.busy:
            self._next(work)

    def _next(self, work: FoldWork) -> None:
        work.busy = bool(work.jobs)
        if work.busy:
            self.workers.submit(work.jobs.popleft())

    def _drop(self, work: FoldWork) -> None:
        """Do no more of it; a push that is being added stays borrowed until that is done."""
        work.dropped = True
        work.jobs.clear()
        if not work.busy:
            self._forget(work)

    @staticmethod
    def _forget(work: FoldWork) -> None:
        for waiting in work.given.values():
            for push in waiting:
                push.payload.give_back()
        work.given.clear()

    # --------------------------------------------------------------------------------- merges
    def start(self, action: actions.StartMerge) -> None:
        """Compute the next version of a fragment; the answer is `MergeDone`."""
        work = self.folds.pop(action.step, None)
        if work is not None:
            self._enqueue(work, Job(
                self._timed(lambda: self.store.prepare_fold(action.step, work.fold())),
                lambda *done: self._merged(action, [], *done)))
            return
        payloads: list[Decoded] = [c.payload for c in action.contributions]
        for payload in payloads:
            payload.borrow()

        def prepare() -> Prepared:
            return self.store.prepare(
                action.fragment, action.step,
                [(c.learner, c.generation, c.weight, c.payload.values())
                 for c in action.contributions])

        run = self._timed(prepare)
        if self._takes_moments(action.fragment, len(payloads)):
            try:
                result = run()
            except MemoryError:
                pass  # a worker's, after all: there it is waited for
            else:
                self._merged(action, payloads, result, None)
                return
        self.workers.submit(Job(run, lambda *done: self._merged(action, payloads, *done)))

    def _takes_moments(self, fragment: int, payloads: int) -> bool:
        """Is a merge so small that a worker would cost more? The loop's thread has no team."""
        elements = self.store.layout.fragments[fragment].numel * payloads
        return elements <= workers.INLINE_ELEMENTS_MAX and self.store.on_one_thread(fragment)

    def _timed(self, prepare: Callable[[], Prepared]) -> Callable[[], Timed]:
        """The merge, or why there is none."""
        def run() -> Timed:
            begun_ns = self.loop.now_ns()
            try:
                prepared = prepare()
            except NothingFinite as error:
                return Timed(None, self.loop.now_ns() - begun_ns, str(error), error.excluded, True)
            except NumericsError as error:
                return Timed(None, self.loop.now_ns() - begun_ns, str(error))
            return Timed(prepared, self.loop.now_ns() - begun_ns, None, prepared.excluded,
                         anchor=self._anchor(prepared))

        return run

    def _anchor(self, prepared: Prepared) -> AnchorImage | None:
        """On the worker, behind its merge."""
        before, after = prepared.base, prepared.result
        if self.downlink is None or before is None or after is None:
            return None
        return self.downlink.next(before, after)

    def _merged(self, action: actions.StartMerge, payloads: list[Decoded], result: Timed,
                error: BaseException | None) -> None:
        if isinstance(error, MemoryError):
            result = Timed(None, 0, f"for {self.limit_s} s there was no memory for it: {error}; "
                           "give the server more, or a smaller --pipeline, and resume")
        elif error is not None:
            raise error
        for payload in payloads:
            payload.give_back()
        prepared, gnorm, restarted = result.prepared, 0.0, False
        if prepared is not None:
            self.prepared[action.step] = prepared
            self.anchors[action.step] = result.anchor
            gnorm, restarted = prepared.gnorm, prepared.restarted
            if prepared.stats is not None:
                self.stats[action.step] = prepared.stats.record()
        self.handle(events.MergeDone(
            action.step, result.compute_ns, gnorm, result.error,
            tuple(events.Dropped(*found) for found in result.excluded), result.nothing_left,
            restarted))

    def publish(self, step: int) -> FragmentVersion:
        """The result of this step becomes the current version of its fragment."""
        prepared = self.prepared[step]
        self.torn[prepared.fragment] = prepared
        version = self.store.publish(prepared)
        if self.downlink is not None:
            self.downlink.publish(prepared.fragment, self.anchors[step])
        del self.prepared[step], self.anchors[step], self.torn[prepared.fragment]
        self.published += 1
        return version

    # ----------------------------------------------------------------------- for disk and tape
    @property
    def versions(self) -> list[int]:
        """What is committed of each fragment."""
        return [version.version for version in self._committed()]

    def _committed(self) -> list[FragmentVersion]:
        found = [self.store.current(fragment)
                 for fragment in range(len(self.store.layout.fragments))]
        for fragment, prepared in self.torn.items():
            found[fragment] = prepared.result or found[fragment]
        return found

    def cut(self, action: actions.Save) -> list[FragmentVersion]:
        """The version of every fragment in the cut of a save: the published ones, and the result
        of a step that is to be durable before it is published."""
        versions = self._committed()
        prepared = self.prepared.get(action.step) if action.kind is SaveKind.ROUND else None
        if prepared is not None and prepared.result is not None:
            versions[prepared.fragment] = prepared.result
        return versions

    def with_figures(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A record of the scheduler with what only merges know: digests, statistics."""
        if fields.get("event") == "init":
            return fields | {"sha256": [self.digests.get(f) for f in sorted(self.digests)]}
        if "fragment" in fields and (stats := self.stats.pop(fields["step"], None)):
            return fields | {"stats": stats}
        return fields

    def close(self) -> None:
        """Let go of results that will never be published."""
        for prepared in self.prepared.values():
            self.store.discard(prepared)
        self.prepared.clear()
        self.anchors.clear()
        self.folds.clear()
