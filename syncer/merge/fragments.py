"""Fragments of the model and their versions; must not know sockets, rounds or clocks.

A published version never changes: whoever holds one reads the same bytes for as long as they like.
A merge writes the next version into spare buffers, and publishing it swaps one reference. When the
last holder of a version (or of one of its arrays) lets go, its buffers become spares again.

`prepare` may run on several threads at once, for different fragments; everything else belongs to
the thread that owns the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from syncer.core.layout import AVG, ISO, MERGE_MODES, Layout
from syncer.errors import ConfigError, InvariantViolation, NumericsError
from syncer.merge import plan as plans
from syncer.merge.buffers import Buffer, BufferPool
from syncer.merge.correction import HelocoConstants, checked
from syncer.merge.iso import flatten_all
from syncer.merge.optimizers import Optimizer, OuterConstants, optimizer

Contribution = tuple[int, int, float, Any]
"""(learner, generation, weight, gradient): f32 of the fragment's length, negated delta."""


class FragmentVersion:
    """One immutable version of a fragment: its parameters and optimizer state, f32, read-only."""

    __slots__ = ("__weakref__", "_buffers", "_names", "commits", "fragment", "params", "version")

    def __init__(self, fragment: int, version: int, commits: int, names: Sequence[str],
                 buffers: Sequence[Buffer]):
        self.fragment = fragment
        self.version = version
        """Step of the merge that made it, 0 for the initial parameters."""
        self.commits = commits
        """Merges of this fragment up to this version."""
        self._names = tuple(names)
        self._buffers = tuple(buffer.freeze() for buffer in buffers)
        self.params = np.frombuffer(buffers[0], np.float32)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The optimizer's arrays by name, in the order of its table entry."""
        return {name: np.frombuffer(buffer, np.float32)
                for name, buffer in zip(self._names, self._buffers[1:], strict=True)}

    @property
    def momentum(self) -> np.ndarray | None:
        """The momentum, or None if the optimizer keeps none."""
        return self.state.get("momentum")


class Prepared:
    """A merge result that is not published: finite, complete, and invisible to every reader."""

    __slots__ = ("base", "fragment", "gnorm", "result", "step")

    def __init__(self, step: int, gnorm: float, base: FragmentVersion, result: FragmentVersion):
        self.step = step
        self.fragment = base.fragment
        self.gnorm = gnorm
        """Norm of the merged gradient (f64 root of its blocked sums)."""
        self.base: FragmentVersion | None = base
        self.result: FragmentVersion | None = result

    def drop(self) -> None:
        """Lets go of both versions; the object keeps its numbers."""
        self.base = self.result = None


class FragmentStore:
    """All fragments of a model: their current versions, and the merges that make the next ones.

    layout: `core.layout.Layout`. lr, momentum: of the outer step, used as f32. threads: most
    threads of one merge; every count gives the same bits. Raises ConfigError for an unknown
    optimizer, and for a merge mode that is not known here.
    """

    def __init__(self, layout: Layout, *, lr: float, momentum: float, threads: int = 1,
                 outer_optimizer: str = "nesterov", dn_period: int = 4,
                 dn_activation: float = 0.0, delta_correction: str = "none",
                 heloco: HelocoConstants | None = None):
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
        if delta_correction not in ("none", "heloco"):
            raise ConfigError(f"delta correction {delta_correction!r} is not known; choose none or "
                              "heloco")
        constants = checked(heloco or HelocoConstants())
        # without a momentum there is nothing to correct against
        self._heloco = (constants if delta_correction == "heloco"
                        and "momentum" in self._optimizer.state else None)
        self._threads = threads
        self._plans = [plans.Plan(f.numels, threads) for f in layout.fragments]
        self._current: list[FragmentVersion | None] = [None] * len(layout.fragments)
        self._pool = BufferPool()
        self._arrays = 1 + len(self._optimizer.state)
        self._open = 0
        self._open_max = 0

    @property
    def live_buffers(self) -> int:
        """Arrays that a version, a prepared merge or a reader still holds."""
        return self._pool.live

    @property
    def live_bytes(self) -> int:
        """Bytes of the live buffers."""
        return self._pool.live_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes kept for the next merges: at most one result per round that commits at once."""
        return self._pool.spare_bytes

    def adopt(self, fragment: int, params: np.ndarray, *, version: int = 0,
              state: Mapping[str, np.ndarray] | None = None) -> FragmentVersion:
        """Makes `params` (f32, contiguous, finite) the fragment's current version.

        Takes ownership: the arrays must not be written any more. Without `state` every optimizer
        array starts at +0; a restored cut gives them by name. version: step of the last merge.
        Raises ValueError for a wrong size or dtype, or for state arrays the optimizer does not
        keep.
        """
        numel = self.layout.fragments[fragment].numel
        names = self._optimizer.state
        if state is not None and set(state) != set(names):
            raise ValueError(f"fragment {fragment}: the optimizer keeps {sorted(names)}, "
                             f"the given state has {sorted(state)}")
        buffers = [self._pool.adopt(params)]
        for name in names:
            buffers.append(self._pool.take(numel, zero=True) if state is None
                           else self._pool.adopt(state[name]))
        for name, buffer in zip(("params", *names), buffers, strict=True):
            if len(buffer) != numel:
                raise ValueError(f"fragment {fragment}: {name} must hold {numel} elements, "
                                 f"got {len(buffer)}")
        fragments = len(self.layout.fragments)
        commits = 0 if version == 0 else (version - fragment - 1) // fragments + 1
        self._current[fragment] = FragmentVersion(fragment, version, commits, names, buffers)
        return self._current[fragment]

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
        are only read. Raises NumericsError naming fragment, tensor index and learners if any result
        is not finite, and then nothing has changed; ValueError for a gradient of another size.
        """
        ordered = sorted(contributions, key=lambda c: (c[0], c[1]))
        base = self.current(fragment)
        result, gnorm = self._merge(base, step, ordered)
        self._open += 1
        if self._open > self._open_max:
            self._open_max = self._open
            pair_bytes = self._arrays * self.layout.largest * 4
            # the classes of the pool may round a capacity up by an eighth
            self._pool.spare_bytes_max = self._open_max * (pair_bytes + pair_bytes // 8 + 4096)
        return Prepared(step, gnorm, base, result)

    def _merge(self, base: FragmentVersion, step: int, ordered: list[Contribution]):
        layout = self.layout.fragments[base.fragment]
        plan = self._plans[base.fragment]
        outputs = [self._pool.take(plan.numel) for _ in range(self._arrays)]
        kernel, scalars = self._optimizer.step(self._constants, base.commits)
        arrays = {"params": base._buffers[0], "state": base._buffers[1:],
                  "params_out": outputs[0], "state_out": tuple(outputs[1:])}
        gradients, weights = [c[3] for c in ordered], [c[2] for c in ordered]
        if layout.merge_mode == ISO:
            _, bad = plans.run(plan, mode=AVG, gradients=gradients, weights=weights,
                               outer=plans.STEP_NONE, scalars=scalars, heloco=self._heloco,
                               **arrays)
            if bad < 0:
                flatten_all(np.frombuffer(outputs[0], np.float32), layout.shapes, self._threads)
                gnorm, bad = plans.run(plan, mode=AVG, gradients=[], weights=[], merged=outputs[0],
                                       outer=kernel, scalars=scalars, **arrays)
        else:
            gnorm, bad = plans.run(plan, mode=layout.merge_mode, gradients=gradients,
                                   weights=weights, outer=kernel, scalars=scalars,
                                   heloco=self._heloco, **arrays)
        if bad >= 0:
            raise self._not_finite(base.fragment, bad, ordered)
        return FragmentVersion(base.fragment, step, base.commits + 1, self._optimizer.state,
                               outputs), gnorm

    def _not_finite(self, fragment: int, tensor: int, ordered: list[Contribution]):
        members = ", ".join(str(c[0]) for c in ordered)
        mode = MERGE_MODES[self.layout.fragments[fragment].merge_mode]
        return NumericsError(
            f"the {mode} merge of fragment {fragment} is not finite in tensor {tensor} "
            f"(learners {members}); nothing was published"
        )

    def publish(self, prepared: Prepared) -> FragmentVersion:
        """Makes the result current by swapping one reference, and returns it.

        Raises InvariantViolation if it was published or discarded before, or if the fragment's
        current version is not the one the merge started from.
        """
        result = prepared.result
        if result is None:
            raise InvariantViolation(
                f"the merge of step {prepared.step} was published or discarded before")
        if self._current[prepared.fragment] is not prepared.base:
            now = self.current(prepared.fragment).version
            raise InvariantViolation(
                f"the merge of step {prepared.step} started from version {prepared.base.version} "
                f"of fragment {prepared.fragment}, which is at version {now}")
        self._current[prepared.fragment] = result
        self._close(prepared)
        return result

    def discard(self, prepared: Prepared) -> None:
        """Gives the buffers of a result that will not be published back; harmless when repeated."""
        if prepared.result is not None:
            self._close(prepared)

    def _close(self, prepared: Prepared) -> None:
        prepared.drop()
        self._open -= 1
