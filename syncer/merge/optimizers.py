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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from syncer.errors import ConfigError
from syncer.merge import engine

Scalars = tuple[float, float, float, float]
"""(lr, mu, period, k) as the kernels take them, each rounded to f32 once."""


@dataclass(frozen=True, kw_only=True)
class OuterConstants:
    """Constants of the outer step. lr and momentum are used as f32."""

    lr: float = 0.7
    momentum: float = 0.9
    dn_period: int = 4
    dn_activation: float = 0.0


class Optimizer(NamedTuple):
    """One entry of the table."""

    name: str
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


OPTIMIZERS = {
    entry.name: entry
    for entry in (
        Optimizer("nesterov", ("momentum",), _nesterov),
        Optimizer("delayed-nesterov", ("momentum", "accumulator"), _delayed_nesterov),
        Optimizer("sgd", (), _sgd),
    )
}


def optimizer(name: str, constants: OuterConstants) -> Optimizer:
    """The entry of that name. Raises ConfigError for an unknown name or constants out of range."""
    if name not in OPTIMIZERS:
        raise ConfigError(
            f"outer optimizer {name!r} is not known; choose one of {', '.join(OPTIMIZERS)}"
        )
    period, activation = constants.dn_period, constants.dn_activation
    if period < 1:
        raise ConfigError(f"the period of delayed Nesterov must be at least 1, not {period}")
    if not 0.0 <= activation <= 1.0 / period:
        raise ConfigError(
            f"the activation of delayed Nesterov must lie in 0 .. 1/{period}, not {activation}"
        )
    return OPTIMIZERS[name]
