"""The table of outer optimizers: name, state arrays, element-wise kernel; must not touch arrays.

The arithmetic is one kernel per entry in csrc/blend_*.c, in f32, in the order written here:

  nesterov          b = mu*b + g; p = p - lr*(g + mu*b)                  no dampening, no decay
  delayed-nesterov  a = a + g; every N-th commit of the fragment: b = mu*b + a/N,
                    p = p - lr*(k*b + g/N) with k = f32((1 - c*N + c)*mu), a = 0; otherwise
                    p = p - lr*(f32(c*mu)*b + g/N)                       arXiv 2401.09135
  sgd               p = p - lr*g
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from syncer.errors import ConfigError
from syncer.merge import engine
from syncer.ranges import (
    DN_ACTIVATION,
    DN_PERIOD,
    OUTER_OPTIMIZER,
    OuterConstants,
    OuterOptimizer,
    activation_fits,
)

Scalars = tuple[float, float, float, float]
"""(lr, mu, period, k) as the kernels take them, each rounded to f32 once."""


class Optimizer(NamedTuple):
    """One entry of the table."""

    name: OuterOptimizer
    state: tuple[str, ...]
    """Arrays kept beside the parameters, each as long and +0 at first; the momentum leads."""
    step: Callable[[OuterConstants, int], tuple[int, Scalars]]
    """(constants, commits of the fragment before this one) -> (kernel, its scalars)."""


def _nesterov(constants: OuterConstants, commits: int) -> tuple[int, Scalars]:
    return engine.STEP_NESTEROV, (constants.lr, constants.momentum, 1.0, 0.0)


def _sgd(constants: OuterConstants, commits: int) -> tuple[int, Scalars]:
    return engine.STEP_SGD, (constants.lr, 0.0, 1.0, 0.0)


def _delayed_nesterov(constants: OuterConstants, commits: int) -> tuple[int, Scalars]:
    period, activation = constants.dn_period, constants.dn_activation
    momentum = float(np.float32(constants.momentum))
    if (commits + 1) % period == 0:
        kernel, k = engine.STEP_DELAYED_APPLY, (1.0 - activation * period + activation) * momentum
    else:
        kernel, k = engine.STEP_DELAYED_HOLD, activation * momentum
    return kernel, (constants.lr, constants.momentum, float(period), k)


OPTIMIZERS: dict[str, Optimizer] = {
    entry.name: entry
    for entry in (
        Optimizer("nesterov", ("momentum",), _nesterov),
        Optimizer("delayed-nesterov", ("momentum", "accumulator"), _delayed_nesterov),
        Optimizer("sgd", (), _sgd),
    )
}


def optimizer(name: str, constants: OuterConstants) -> Optimizer:
    """The entry of that name. Raises ConfigError for an unknown name or constants out of range."""
    OUTER_OPTIMIZER.check("outer optimizer", name)
    period, activation = constants.dn_period, constants.dn_activation
    DN_PERIOD.check("period of delayed Nesterov", period)
    DN_ACTIVATION.check("activation of delayed Nesterov", activation)
    if name == "delayed-nesterov" and not activation_fits(activation, period):
        raise ConfigError(f"activation of delayed Nesterov {activation} is too large for a period "
                          f"of {period}: give at most 1/{period}")
    return OPTIMIZERS[name]
