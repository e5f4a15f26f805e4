"""`python experiments/robust_directions.py`: which robust rule for directions and their lengths?

Five learners, one of them hostile, one tensor of 1,024 elements. An honest gradient is a common one
plus noise of its own, as long as it or three times as long. Compared with what the four honest ones
give by the plain rule (the mean direction times the mean norm): the cosine with it, and the length
as a share of its length. Means over 30 rounds; the worst cosine behind it.
"""

from __future__ import annotations

import numpy as np

ELEMENTS, ROUNDS = 1024, 30
ATTACKS = ("none", "opposite", "opposite, 1000 x", "noise, 1e6 x", "one element, 1e30", "zero",
           "mean - 1.2 sigma")


def norms(grads):
    return np.linalg.norm(grads, axis=1)


def plain(grads):
    """The mean of the unit vectors, as long as the mean of the norms."""
    direction = (grads / np.maximum(norms(grads), 1e-300)[:, None]).mean(axis=0)
    return direction / np.linalg.norm(direction) * norms(grads).mean()


def inner_mean(values):
    """Without the lowest and the highest."""
    return np.sort(values, axis=0)[1:-1].mean(axis=0)


def coordinates(middle):
    """Coordinate by coordinate on the unit vectors, and the same of the norms."""
    def rule(grads):
        direction = middle(grads / np.maximum(norms(grads), 1e-300)[:, None])
        return direction / np.linalg.norm(direction) * middle(norms(grads))
    return rule


def geometric(grads):
    """The point with the least sum of distances to the unit vectors (50 steps of Weiszfeld)."""
    units = grads / np.maximum(norms(grads), 1e-300)[:, None]
    point = units.mean(axis=0)
    for _ in range(50):
        weight = 1 / np.maximum(np.linalg.norm(units - point, axis=1), 1e-12)
        point = weight @ units / weight.sum()
    return point / np.linalg.norm(point) * np.median(norms(grads))


def median(values):
    return np.median(values, axis=0)


RULES = {
    "mean": plain,
    "trimmed, units": coordinates(inner_mean), "median, units": coordinates(median),
    "trimmed, raw": inner_mean, "median, raw": median,
    "geometric median, units": geometric,
}


def hostile(attack, honest, rng):
    """The fifth gradient."""
    mean = honest.mean(axis=0)
    if attack == "none":
        return honest[rng.integers(4)] + rng.standard_normal(ELEMENTS) / np.sqrt(ELEMENTS)
    if attack.startswith("opposite"):
        return -mean * (1000 if "1000" in attack else 1)
    if attack.startswith("noise"):
        return 1e6 * rng.standard_normal(ELEMENTS)
    if attack.startswith("one"):
        return np.eye(1, ELEMENTS, rng.integers(ELEMENTS))[0] * 1e30
    if attack == "zero":
        return np.zeros(ELEMENTS)
    return mean - 1.2 * honest.std(axis=0)


def measure(rule, attack, noise):
    """(mean cosine, worst cosine, mean length) against the honest four."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(ROUNDS):
        common = rng.standard_normal(ELEMENTS)
        common /= np.linalg.norm(common)
        own = noise * rng.standard_normal((4, ELEMENTS)) / np.sqrt(ELEMENTS)
        honest = (common + own) * rng.uniform(0.7, 1.4, (4, 1))
        grads = np.vstack([honest, hostile(attack, honest, rng)])
        wanted, merged = plain(honest), rule(grads)
        lengths = np.linalg.norm(wanted), np.linalg.norm(merged)
        found.append((wanted @ merged / lengths[0] / lengths[1], lengths[1] / lengths[0]))
    cosines, shares = np.array(found).T
    return cosines.mean(), cosines.min(), shares.mean()


def main():
    for noise in (1.0, 3.0):
        print(f"\nnoise {noise:g} x\n{'hostile':20}" + "".join(f"{name:>26}" for name in RULES))
        for attack in ATTACKS:
            cells = [measure(rule, attack, noise) for rule in RULES.values()]
            print(f"{attack:20}" + "".join(
                f"{mean:10.3f} {worst:6.3f} {share:8.3g}" for mean, worst, share in cells))


if __name__ == "__main__":
    main()
