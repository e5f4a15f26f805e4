"""Fragments of the model and their versions; must not know sockets, rounds or clocks.

A published version never changes: whoever holds one reads the same bytes for as long as they like.
A merge writes the next version into memory of its own, and publishing it swaps one reference. When
the last holder of a version (or of one of its arrays) lets go, that memory is used again.

`prepare` may run on several threads at once, for different fragments; everything else belongs to
the thread that owns the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict

import numpy as np

from syncer.errors import ConfigError, InvariantViolation
from syncer.layout import AVG, ISO, MERGE_MODES, RDA, Layout
from syncer.merge import engine
from syncer.merge.buffers import Buffer, BufferPool
from syncer.merge.correction import checked
from syncer.merge.finite import Excluded, NothingFinite, worst
from syncer.merge.folds import ExactFold, Fold, FoldOptions, Member, StreamingFold
from syncer.merge.iso import flatten_all
from syncer.merge.optimizers import Optimizer, Scalars, optimizer
from syncer.merge.plan import Plan
from syncer.merge.robust import (
    ClipNorm,
    Robust,
    checked_clip,
    checked_robust,
    clip_factors,
    least,
    trim,
)
from syncer.merge.stats import LearnerSums, Statistics, explain
from syncer.merge.versions import FragmentVersion, Prepared, floats
from syncer.ranges import DELTA_CORRECTION, FOLD, HelocoConstants, OuterConstants
from syncer.steps import merges_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

Contribution: TypeAlias = "tuple[int, int, float, NDArray[np.float32]]"
"""(learner, generation, weight, gradient): f32 of the fragment's length, negated delta."""


class _Source(TypedDict):
    """What is merged, as `engine.run` takes it."""

    gradients: Sequence[NDArray[np.float32]]
    weights: Sequence[float]
    heloco: NotRequired[HelocoConstants | None]
    clip: NotRequired[list[float] | None]
    trim: NotRequired[int]
    fold: NotRequired[engine.FoldSums]
    fold_scale: NotRequired[float]


class _Step(TypedDict):
    """Where a merge starts from and what it writes, as `engine.run` takes it."""

    params: Buffer
    state: tuple[Buffer, ...]
    params_out: Buffer
    state_out: tuple[Buffer, ...]
    scalars: Scalars
    stats: bool
    most: int


class FragmentStore:
    """All fragments of a model: their current versions, and the merges that make the next ones.

    layout: `layout.Layout`. lr, momentum: of the outer step, used as f32. threads: most
    threads of one merge; every count gives the same bits. delta_correction: "none" or "heloco".
    clip_norm, robust: see robust.py. merge_stats: every `Prepared` explains itself. bf16: the
    parameters have to be finite as bf16, too.
    Raises ConfigError for an unknown merge mode or setting.

    Large: it holds all that an outer step is set up with, so that a caller names a fragment and a
    step and nothing else.
    """

    def __init__(self, layout: Layout, *, lr: float, momentum: float, threads: int = 1,
                 outer_optimizer: str = "nesterov", dn_period: int = 4,
                 dn_activation: float = 0.0, delta_correction: str = "none",
                 heloco: HelocoConstants | None = None, clip_norm: ClipNorm = None,
                 robust: Robust = None, merge_stats: bool = False, bf16: bool = False):
        for p, f in enumerate(layout.fragments):
            if f.merge_mode not in MERGE_MODES:
                raise ConfigError(f"fragment {p}: merge mode {f.merge_mode} is not known; use avg "
                                  "(0), rda (1) or iso (2)")
            if f.merge_mode == ISO and [r * c for r, c in f.shapes] != list(f.numels):
                raise ConfigError(f"fragment {p}: iso needs the rows and columns of every tensor")
        self.layout = layout
        self._constants = OuterConstants(lr=lr, momentum=momentum, dn_period=dn_period,
                                         dn_activation=dn_activation)
        self._optimizer: Optimizer = optimizer(outer_optimizer, self._constants)
        DELTA_CORRECTION.check("delta correction", delta_correction)
        constants = checked(heloco or HelocoConstants())
        # without a momentum there is nothing to correct against
        self._heloco = (constants if delta_correction == "heloco"
                        and "momentum" in self._optimizer.state else None)
        self._clip_norm = checked_clip(clip_norm)
        self._robust = checked_robust(robust)
        self._stats = merge_stats
        self._most = engine.FINITE_BF16 if bf16 else engine.FINITE_F32
        self._threads = threads
        self._plans = [Plan(f.numels, threads) for f in layout.fragments]
        self._current: list[FragmentVersion | None] = [None] * len(layout.fragments)
        self._pool = BufferPool(lasting=True)
        self._nothing = np.zeros(layout.largest, np.float32)
        """+0 for every element of a fragment, in memory that is never written, so takes none. From
        the beginning: who brings initial values must not be the one to find that there is none."""
        self._arrays = 1 + len(self._optimizer.state)

    @property
    def live_buffers(self) -> int:
        """Arrays that a version, a prepared merge or a reader still holds."""
        return self._pool.live

    @property
    def live_bytes(self) -> int:
        """Bytes of the live buffers."""
        return self._pool.live_bytes

    def adopt(self, fragment: int, params: NDArray[np.float32], *, version: int = 0,
              renumbered: int = 0,
              state: Mapping[str, NDArray[np.float32]] | None = None) -> FragmentVersion:
        """Makes `params` (f32, contiguous, finite) the fragment's current version.

        Takes ownership: the arrays must not be written any more. Without `state` every optimizer
        array starts at +0; a restored cut gives them by name. version: step of the last merge,
        counted from `renumbered`. Raises ValueError for a wrong size or dtype, or for state
        arrays the optimizer does not keep.
        """
        numel = self.layout.fragments[fragment].numel
        names = self._optimizer.state
        if state is not None and set(state) != set(names):
            raise ValueError(f"fragment {fragment}: the optimizer keeps {sorted(names)}, "
                             f"the given state has {sorted(state)}")
        buffers = [self._pool.adopt(params)]
        for name in names:
            buffers.append(self._zero(numel) if state is None
                           else self._pool.adopt(state[name]))
        for name, buffer in zip(("params", *names), buffers, strict=True):
            if len(buffer) != numel:
                raise ValueError(f"fragment {fragment}: {name} must hold {numel} elements, "
                                 f"got {len(buffer)}")
        fragments = len(self.layout.fragments)
        commits = merges_at(max(0, version - renumbered), fragment, fragments)
        adopted = FragmentVersion(fragment, version, commits, names, buffers)
        self._current[fragment] = adopted
        return adopted

    def current(self, fragment: int) -> FragmentVersion:
        """The published version. Raises InvariantViolation before the fragment was adopted."""
        version = self._current[fragment]
        if version is None:
            raise InvariantViolation(f"fragment {fragment} has no parameters yet")
        return version

    def prepare(self, fragment: int, step: int,
                contributions: Iterable[Contribution]) -> Prepared:
        """Merges the contributions and takes the outer step, into buffers nobody can see.

        Learner order is ascending (learner, generation) whatever order they come in. The gradients
        are only read. What would make a result infinite is left out (see finite.py): the result is
        that of the others alone. Raises NothingFinite naming the fragment and learners if nothing
        is left, and then nothing has changed; ValueError for a gradient of another size.
        """
        ordered = sorted(contributions, key=lambda c: (c[0], c[1]))
        left = list(range(len(ordered)))
        excluded: list[Excluded] = []
        restarted = False
        while True:
            source = self._source(fragment, [ordered[i] for i in left])
            members = [(ordered[i][0], ordered[i][1]) for i in left]
            prepared, element = self._prepare(fragment, step, members, source, restarted=restarted)
            if prepared is not None:
                prepared.excluded, prepared.restarted = tuple(excluded), restarted
                return prepared
            if not excluded and not restarted and not self._stands(fragment):
                restarted = True
                continue
            index = self._to_blame(fragment, element, source)
            if index is not None:
                excluded.append(Excluded(left.pop(index), element))
            if index is None or len(left) < least(self._robust):
                raise NothingFinite(
                    self._not_finite(fragment, element, [c[:2] for c in ordered]), excluded)

    def on_one_thread(self, fragment: int) -> bool:
        """Does a merge of this fragment take one pass or few, and no team of threads?"""
        return (self.layout.fragments[fragment].merge_mode != ISO
                and self._plans[fragment].threads == 1)

    def _source(self, fragment: int, contributions: Sequence[Contribution]) -> _Source:
        """These contributions, and all that is done to each of them."""
        gradients = [c[3] for c in contributions]
        source: _Source = {"gradients": gradients, "weights": [c[2] for c in contributions],
                           "heloco": self._heloco}
        if self._clip_norm is not None:
            lengths = engine.norms(self._plans[fragment], gradients)
            source["clip"] = clip_factors(self._clip_norm, lengths) if gradients else None
        source["trim"] = trim(self._robust, len(gradients)) if gradients else -1
        return source

    def _to_blame(self, fragment: int, element: int, source: _Source) -> int | None:
        """Which of the gradients is dropped for a bad value there; None if no one can be."""
        first = 0
        for numel in self.layout.fragments[fragment].numels:
            if element < first + numel:
                break
            first += numel
        gradients = source["gradients"]
        factors = [1.0] * len(gradients) if source.get("trim", -1) >= 0 else source["weights"]
        clip = source.get("clip") or [1.0] * len(gradients)
        return worst(gradients, [f * c for f, c in zip(factors, clip, strict=True)], first,
                     first + numel)

    def _zeros(self, base: FragmentVersion) -> tuple[Buffer, ...]:
        """Optimizer state as at the beginning."""
        return tuple(self._zero(len(buffer)) for buffer in base.buffers[1:])

    def _zero(self, numel: int) -> Buffer:
        return self._pool.adopt(self._nothing[:numel])

    def _stands(self, fragment: int) -> bool:
        """Is the step finite when only zeros are merged?"""
        base, plan = self.current(fragment), self._plans[fragment]
        kernel, scalars = self._optimizer.step(self._constants, base.commits)
        outputs = [self._pool.take(plan.numel) for _ in range(self._arrays)]
        return engine.run(
            plan, mode=AVG, gradients=[], weights=[], most=self._most,
            merged=self._zero(plan.numel), params=base.buffers[0],
            state=base.buffers[1:], params_out=outputs[0], state_out=tuple(outputs[1:]),
            outer=kernel, scalars=scalars)[1] < 0

    def fold(self, fragment: int, kind: str, roster: Sequence[int] = ()) -> Fold:
        """Opens the fold of a round: "streaming", or "exact" over the learners of `roster`.

        Its pushes are corrected against the current version. Dropping it (a relaunch) gives its
        sums back. Raises ConfigError for another kind, and for settings that need all pushes at
        once: the median for clipping, a robust merge; for exact also a correction and iso.
        """
        mode = self.layout.fragments[fragment].merge_mode
        FOLD.check("fold", kind)
        if kind == "batch":
            raise ConfigError("fold batch adds nothing up: merge its pushes with `prepare`")
        clip_norm = self._clip_norm
        if clip_norm == "median" or self._robust is not None:
            raise ConfigError("the median of the norms and robust merges compare all pushes of a "
                              "round; they need the batch fold")
        if kind == "exact" and (self._heloco is not None or mode == ISO):
            raise ConfigError("an exact fold allows neither a delta correction nor iso")
        base = self.current(fragment)
        directed = mode == RDA
        sums = engine.FoldSums(self._plans[fragment], self._pool, directed)
        options: FoldOptions = {
            "fragment": fragment, "base": base.version, "heloco": self._heloco,
            "momentum": base.buffers[1] if "momentum" in self._optimizer.state else None,
            "clip_norm": clip_norm, "stats": self._stats,
        }
        fold: Fold = (ExactFold(sums, roster, **options) if kind == "exact"
                      else StreamingFold(sums, **options))
        return fold

    def prepare_fold(self, step: int, fold: Fold) -> Prepared:
        """Merges what was folded, like `prepare` a batch, and closes the fold.

        Raises NumericsError `fold incomplete` for an exact fold that closes short, or one without a
        push; NothingFinite, without naming anybody, if the result is not finite;
        InvariantViolation if it is closed, or its fragment has another version by now.
        """
        sums = fold.open_sums()
        fold.check_complete()
        current = self.current(fold.fragment).version
        if current != fold.base:
            raise InvariantViolation(
                f"the fold of fragment {fold.fragment} was opened at version {fold.base}, "
                f"which is {current} by now")
        source: _Source = {"gradients": [], "weights": [], "fold": sums, "fold_scale": fold.scale}
        prepared, element = self._prepare(fold.fragment, step, fold.members, source,
                                          folded=fold.stats)
        if prepared is None:
            raise NothingFinite(self._not_finite(fold.fragment, element, fold.members))
        fold.close()
        return prepared

    def _prepare(self, fragment: int, step: int, members: Sequence[Member], source: _Source,
                 *, folded: list[LearnerSums] | None = None,
                 restarted: bool = False) -> tuple[Prepared | None, int]:
        """The merge and -1, or None and the first element of which a result is not finite."""
        base = self.current(fragment)
        plan = self._plans[fragment]
        outputs = [self._pool.take(plan.numel) for _ in range(self._arrays)]
        gnorm, bad, sums = self._run(base, outputs, source, restarted)
        if bad >= 0:
            return None, bad
        stats = None
        if sums is not None:
            mu = self._constants.momentum if self._optimizer.name == "nesterov" else None
            stats = explain((folded if folded is not None else sums[0], sums[1]), members, gnorm,
                            plan.numel, mu)
        result = FragmentVersion(fragment, step, base.commits + 1, self._optimizer.state, outputs)
        return Prepared(step, gnorm, base, result, stats), -1

    def _run(self, base: FragmentVersion, outputs: list[Buffer], source: _Source,
             restarted: bool) -> tuple[float, int, Statistics | None]:
        layout = self.layout.fragments[base.fragment]
        plan = self._plans[base.fragment]
        kernel, scalars = self._optimizer.step(self._constants, base.commits)
        common: _Step = {
            "params": base.buffers[0], "params_out": outputs[0],
            "state": self._zeros(base) if restarted else base.buffers[1:],
            "state_out": tuple(outputs[1:]), "scalars": scalars, "stats": self._stats,
            "most": self._most}
        if layout.merge_mode != ISO:
            return engine.run(plan, mode=layout.merge_mode, outer=kernel, **source, **common)
        mode = AVG if self._robust is None else RDA  # of its matrices: direction and length apart
        gnorm, bad, first = engine.run(plan, mode=mode, outer=engine.STEP_NONE, **source, **common)
        if bad >= 0:
            return gnorm, bad, None
        flatten_all(floats(outputs[0]), layout.shapes, self._threads)
        # the gradients serve the statistics alone from here on
        gnorm, bad, sums = engine.run(
            plan, mode=AVG, outer=kernel, merged=outputs[0], **common,
            gradients=source["gradients"] if self._stats else [],
            weights=source["weights"] if self._stats else [])
        if first is not None and sums is not None:
            sums = [(*after[:3], before[3])
                    for before, after in zip(first[0], sums[0], strict=True)], sums[1]
        return gnorm, bad, sums

    def _not_finite(self, fragment: int, element: int, members: Sequence[Member]) -> str:
        learners = ", ".join(str(learner) for learner, _ in sorted(members))
        mode = MERGE_MODES[self.layout.fragments[fragment].merge_mode]
        return (f"the {mode} merge of fragment {fragment} is not finite at element {element} "
                f"(learners {learners}); nothing was published")

    def publish(self, prepared: Prepared) -> FragmentVersion:
        """Makes the result current by swapping one reference, and returns it.

        Raises InvariantViolation if it was published or discarded before, or if the fragment's
        current version is not the one the merge started from.
        """
        result, base = prepared.result, prepared.base
        if result is None or base is None:
            raise InvariantViolation(
                f"the merge of step {prepared.step} was published or discarded before")
        if self._current[prepared.fragment] is not base:
            now = self.current(prepared.fragment).version
            raise InvariantViolation(
                f"the merge of step {prepared.step} started from version {base.version} "
                f"of fragment {prepared.fragment}, which is at version {now}")
        self._current[prepared.fragment] = result
        prepared.drop()
        return result

    def discard(self, prepared: Prepared) -> None:
        """Gives the buffers of a result that will not be published back; harmless when repeated."""
        if prepared.result is not None:
            prepared.drop()
