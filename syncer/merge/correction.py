"""Constants of the HeLoCo correction of a delta against the momentum; must not touch arrays.

The correction itself runs in csrc/merge_correct.c, per learner and tensor, before avg, rda or iso.
With d the gradient, m the momentum, du and dm their norms and c = d.m/(du*dm):

  du < eps or dm < eps, or c >= c_ok   unchanged
  conf = du / (du + kappa*dm + eps)
  c < 0 (shrink)   beta = min(k_s*(-c)*conf, beta_max);  d = d + f32(-beta*c*du/dm) * m
  else  (rotate)   lambda = min(k_d*(1-c)*conf, 1);  t = (1-lambda)/du*d + lambda/dm*m in f64;
                   d = f32(t) * f32(du / max(norm of t, eps))
"""

from __future__ import annotations

import math
from typing import NamedTuple

from syncer.errors import ConfigError


class HelocoConstants(NamedTuple):
    """The published set by default; the order is that of the compiled pass."""

    c_ok: float = 0.2
    """A cosine with the momentum from which on a delta is left alone, -1 .. 1."""
    k_s: float = 0.5
    """Strength of shrinking, >= 0."""
    k_d: float = 1.0
    """Strength of rotating, >= 0."""
    beta_max: float = 0.5
    """Most of the opposing part that is taken away, 0 .. 1."""
    kappa: float = 3.0
    """How much a long momentum weakens a correction, >= 0."""
    eps: float = 1e-8
    """Norm below which a vector has no direction, > 0."""


def checked(constants: HelocoConstants) -> HelocoConstants:
    """The constants. Raises ConfigError naming the first one out of its range."""
    ranges = {"c_ok": (-1.0, 1.0), "k_s": (0.0, math.inf), "k_d": (0.0, math.inf),
              "beta_max": (0.0, 1.0), "kappa": (0.0, math.inf), "eps": (0.0, math.inf)}
    for name, value in constants._asdict().items():
        low, high = ranges[name]
        if not (math.isfinite(value) and low <= value <= high and (name != "eps" or value > 0.0)):
            bound = "finite" if high == math.inf else f"at most {high:g}"
            least = "above 0" if name == "eps" else f"at least {low:g}"
            raise ConfigError(f"HeLoCo constant {name} must be {least} and {bound}, not {value}")
    return constants
