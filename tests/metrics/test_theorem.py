from dataclasses import replace
from math import log10, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.metrics.theorem import Problem, assess, constants, describe
from manyheads.topology import Mixing, build_mixing


@pytest.mark.parametrize(
    ("p", "num_workers", "c", "one_minus_q", "beta", "printed", "repaired"),
    [
        (1 / 3, 4, 2.2, -2.5, -6.0, 12.5, 26.2),
        (1 / 3, 16, 7.9, -8.8, -18.6, 38.4, 78.4),
        (1 / 3, 128, 61.4, -63.2, -127.3, 256.7, 515.6),
        (1 / 128, 128, 270.0, -271.8, -544.6, 1091.3, 2184.8),
    ],
)
def test_known_numbers(
    p: float, num_workers: int, c: float, one_minus_q: float, beta: float, printed: float, repaired: float
) -> None:
    """Rings of 4, 16 and 128 and the full graph of 128, the last beyond what a float holds."""
    found = constants(p, num_workers)
    numbers = (found.c, found.one_minus_q, found.beta, found.rounds_printed, found.rounds_repaired)
    assert numbers == pytest.approx((c, one_minus_q, beta, printed, repaired), abs=0.051)
    assert found.vacuous


@given(st.floats(0.05, 0.9), st.integers(2, 8), st.floats(0.01, 100), st.integers(1, 3000))
def test_as_the_formulas_say(p: float, n: int, lipschitz: float, tau: int) -> None:
    """Against the plain formulas, where a float can follow them, and the repaired condition just holds."""
    found = constants(p, n, lipschitz=lipschitz, tau=tau)
    c, q = 2 * (1 + p**-n) / (1 - p**n), (1 - p**n) ** (1 / n)
    beta = min(1 / lipschitz, n / 2, (1 - q) / (3 * sqrt(2) * c * lipschitz * n))
    assert (found.c, found.one_minus_q, found.beta) == pytest.approx((log10(c), log10(1 - q), log10(beta)), abs=1e-4)
    # As Corollary 1 prints them.
    least = (18 * c**2 * lipschitz**2 * n**3 / (1 - q) ** 2, (2 * lipschitz**2 + 2) ** 2 / (n * lipschitz**4))
    assert found.rounds_printed == pytest.approx(log10(max(*least, n * lipschitz**2)), abs=1e-3)

    k = 10**found.rounds_repaired
    alpha, beta = 1 / (tau * sqrt(k)), sqrt(n / k)
    held = [
        18 * (c * lipschitz * n) ** 2 * (beta**2 + n * (2 * alpha * tau + beta)) / (1 - q) ** 2,
        beta * lipschitz,
        beta * (2 * lipschitz**2 + 2) / (n * lipschitz**2),
        alpha * tau * lipschitz * (1 + 36 * tau**2),
    ]
    assert max(held) == pytest.approx(1, rel=1e-2)


def test_small_powers_meet_the_exact_ones() -> None:
    """1 - q changes its formula where p^N gets too small for the exact one; nothing jumps there."""
    values = [constants(10**-x, 2).one_minus_q for x in (5.9, 5.95, 6.0, 6.05, 6.1)]
    assert np.diff(values) == pytest.approx(-0.1, abs=1e-4)


def test_some_are_within_reach() -> None:
    assert not constants(0.5, 2, lipschitz=0.01).vacuous
    assert constants(0.5, 2).vacuous
    flat = constants(0.9, 2, lipschitz=1e-4)
    assert flat.beta == 0, "N/2 is the least of the three"
    assert flat.rounds_printed == flat.rounds_repaired == pytest.approx(log10(2) + 16), "(2 L^2 + 2)^2 / (N L^4)"


def test_lines_for_a_graph() -> None:
    lines = dict(describe(assess(build_mixing("ring", 4))))
    assert "vacuous" in lines["theorem 1"]
    assert lines["  C"] == "10^2.2"
    assert lines["  1 - q"] == "10^-2.5 (spectral gap 10^-0.2)"
    assert lines["  largest beta"].startswith("10^-6.0 ")
    assert lines["  fewest rounds"] == "10^12.5 as printed, 10^26.2 repaired"
    assert "within reach" in dict(describe(assess(build_mixing("full", 2), lipschitz=0.01)))["theorem 1"]


@pytest.mark.parametrize(
    "mixing",
    [
        build_mixing("one-peer-exponential", 8),
        build_mixing("star", 5, weights="uniform"),
    ],
    ids=["changes", "not doubly stochastic"],
)
def test_where_the_theorem_says_nothing(mixing: Mixing) -> None:
    ((label, text),) = describe(assess(mixing))
    assert label == "theorem 1"
    assert "does not apply" in text


def test_the_theorem_says_nothing_where_workers_swap_without_mixing(lab) -> None:
    swapping = lab.mixing_of(np.roll(np.eye(3), 1, axis=1), directed=True)
    test_where_the_theorem_says_nothing(swapping)


def test_the_terms_of_the_bound() -> None:
    """With numbers small enough for pencil and paper: each term by itself, the others switched off."""
    plain = Problem(
        start_loss=3.0, rounds=10, workers=4, beta=0.5, alpha=0.1, tau=2, lipschitz=2.0, noise=0.0, variability=0.0
    )
    assert plain.bound() == pytest.approx(
        {"start": 2.4, "mini-batches": 0, "head drift": 0, "head mini-batches": 0, "consensus": 0}
    )
    noisy = replace(plain, start_loss=0.0, noise=6.0).bound()
    # 2 b L s/N; 12 a^3 L^2 t (t-1) (6t+1) s/b; 2 a^2 t L s/b; 2b/(3N) (1 + 1/L^2) s.
    assert noisy == pytest.approx(
        {"start": 0, "mini-batches": 3.0, "head drift": 14.976, "head mini-batches": 0.96, "consensus": 0.625}
    )
    assert replace(plain, start_loss=0.0, variability=8.0).bound()["consensus"] == pytest.approx(2.5)
    assert replace(plain, noise=6.0, tau=1).bound()["head drift"] == 0, "one step does not drift"
