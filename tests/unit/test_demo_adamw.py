"""AdamW against the formulas of its paper written out in float64."""

import numpy as np

from syncer.demo.model.adamw import AdamW


def test_matches_the_paper():
    rng = np.random.default_rng(1)
    parameters = rng.standard_normal(500).astype(np.float32)
    p, m, v = parameters.astype(np.float64), np.zeros(500), np.zeros(500)
    optimizer = AdamW(500, beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1)
    for t in range(1, 30):
        gradient = rng.standard_normal(500).astype(np.float32)
        kept, lr = gradient.copy(), 0.01 / t
        optimizer.step(parameters, gradient, lr)
        m = 0.8 * m + 0.2 * kept
        v = 0.95 * v + 0.05 * kept.astype(np.float64) ** 2
        p = p - lr * ((m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6) + 0.1 * p)
        assert np.array_equal(gradient, kept)
        np.testing.assert_allclose(parameters, p, rtol=2e-5, atol=2e-6)


def test_first_step_has_the_size_of_the_learning_rate():
    parameters = np.zeros(4, np.float32)
    AdamW(4, weight_decay=0.0).step(parameters, np.float32([1e-3, -5, 100, 0]), lr=0.5)
    np.testing.assert_allclose(parameters, [-0.5, 0.5, -0.5, 0], rtol=1e-3)


def test_decay_does_not_pass_through_the_moments():
    decayed, plain = np.ones(1, np.float32), np.ones(1, np.float32)
    a, b = AdamW(1, weight_decay=0.5), AdamW(1, weight_decay=0.0)
    a.step(decayed, np.float32([2.0]), lr=0.1)
    b.step(plain, np.float32([2.0]), lr=0.1)
    np.testing.assert_allclose(decayed, plain - 0.05, rtol=1e-6)


def test_minimises_a_quadratic():
    target = np.linspace(-3, 3, 50).astype(np.float32)
    parameters = np.zeros(50, np.float32)
    optimizer = AdamW(50, weight_decay=0.0)
    for _ in range(400):
        optimizer.step(parameters, parameters - target, lr=0.05)
    np.testing.assert_allclose(parameters, target, atol=0.05)
