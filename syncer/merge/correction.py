"""The HeLoCo correction of a delta against the momentum: its rule; must not touch arrays.

The correction itself runs in csrc/merge_correct.c, per learner and tensor, before avg, rda or iso.
With d the gradient, m the momentum, du and dm their norms and c = d.m/(du*dm):

  du < eps or dm < eps, or c >= c_ok   unchanged
  conf = du / (du + kappa*dm + eps)
  c < 0 (shrink)   beta = min(k_s*(-c)*conf, beta_max);  d = d + f32(-beta*c*du/dm) * m
  else  (rotate)   lambda = min(k_d*(1-c)*conf, 1);  t = (1-lambda)/du*d + lambda/dm*m in f64;
                   d = f32(t) * f32(du / max(norm of t, eps))
"""

from __future__ import annotations

from syncer.ranges import HELOCO, HelocoConstants


def checked(constants: HelocoConstants) -> HelocoConstants:
    """The constants. Raises ConfigError naming the first one out of its range."""
    for name, value in constants._asdict().items():
        HELOCO[name].check(f"HeLoCo constant {name}", value)
    return constants
