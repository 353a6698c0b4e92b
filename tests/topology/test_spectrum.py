"""Contraction rates, against closed forms and the numbers known for the paper's graphs."""

from dataclasses import replace

import numpy as np
import pytest

from manyheads.topology import build_mixing, describe, spectral, spectrum


@pytest.mark.parametrize(("num_workers", "rho"), [(8, 0.805), (16, 0.949), (32, 0.987), (64, 0.9968), (128, 0.99920)])
def test_rings(num_workers, rho):
    found = spectral(build_mixing("ring", num_workers))
    assert found.rho == pytest.approx(rho, abs=5e-4 if num_workers < 64 else 5e-5)
    assert found.rho == pytest.approx(1 / 3 + 2 / 3 * np.cos(2 * np.pi / num_workers), abs=1e-12)
    assert (found.min_degree, found.max_degree) == (2, 2)


def test_the_ring_of_the_paper_needs_about_1245_rounds():
    assert 1 / spectral(build_mixing("ring", 128)).gap == pytest.approx(1245, abs=1)


@pytest.mark.parametrize(("weights", "rho"), [("uniform", 0.31), ("metropolis", 0.45), ("max-degree", 0.60)])
def test_the_random_graph_of_the_paper(weights, rho):
    found = spectral(build_mixing("random:0.25", 128, weights=weights))
    assert found.rho == pytest.approx(rho, abs=0.04)
    assert found.doubly_stochastic == (weights != "uniform")
    if weights == "uniform":
        assert found.column_sums == pytest.approx((0.64, 1.48), abs=0.12)


def test_the_full_graph_agrees_at_once_and_the_identity_never(lab):
    assert spectral(build_mixing("full", 16)).rho < 1e-12
    identity = lab.mixing_of(np.eye(4))
    assert spectral(identity).rho == 1
    assert dict(describe(identity))["1 / gap"] == "never agree"


@pytest.mark.parametrize("graph", ["ring", "full", "exponential", "one-peer-exponential"])
@pytest.mark.parametrize("num_workers", [2, 9, 16])
@pytest.mark.parametrize("weights", ["metropolis", "lazy"])
def test_shifted_rows_are_measured_as_dense_ones_are(graph, num_workers, weights, monkeypatch):
    quick = spectral(build_mixing(graph, num_workers, weights=weights))
    monkeypatch.setattr(spectrum, "_first_of_shifted", lambda rows: None)
    dense = spectral(build_mixing(graph, num_workers, weights=weights))
    # A product that is zero but for rounding has a root that is not.
    assert quick.rho**quick.rounds == pytest.approx(dense.rho**dense.rounds, abs=1e-12)
    assert replace(quick, rho=0.0) == replace(dense, rho=0.0)


def test_equal_links_with_unequal_weights_are_no_shifts():
    """A ring of four with links that weigh 0.1 and 0.4 in turn: 1 - 2 * 0.1 is its second largest eigenvalue."""
    mixing = build_mixing("links:0-1=0.1,1-2=0.4,2-3=0.1,3-0=0.4", 4)
    assert spectral(mixing).rho == pytest.approx(0.8)


def test_a_ring_may_be_large():
    """A dense P of so many workers would take 80 GB."""
    found = spectral(build_mixing("ring", 100_000))
    assert found.gap == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / 100_000)), rel=1e-4)


def test_lazy_weights_halve_the_gap():
    gaps = [spectral(build_mixing("ring", 12, weights=weights)).gap for weights in ("metropolis", "lazy")]
    assert gaps[1] == pytest.approx(gaps[0] / 2)


def test_a_period_counts_as_a_whole():
    assert spectral(build_mixing("one-peer-exponential", 16)).rho == 0
    mixing = build_mixing("one-peer-exponential", 12)
    found = spectral(mixing)
    product = np.linalg.multi_dot([mixing.rows(round).dense() for round in (3, 2, 1, 0)])
    assert found.rounds == 4
    assert found.rho**4 == pytest.approx(np.linalg.norm(product - 1 / 12, 2))


def test_the_rate_of_a_row_stochastic_matrix_is_what_happens_in_the_long_run():
    mixing = build_mixing("in-neighbours:3", 20, weights="uniform")
    matrix = mixing.rows(0).dense()
    power = np.linalg.matrix_power
    early, late = (np.linalg.norm(power(matrix, k) - power(matrix, 300), 2) for k in (20, 40))
    assert spectral(mixing).rho == pytest.approx((late / early) ** (1 / 20), rel=0.02)


@pytest.mark.parametrize(("graph", "weights"), [("random:0.4", "metropolis"), ("in-neighbours:2", "uniform")])
def test_rounds_that_differ_are_measured_as_their_product_in_order(graph, weights):
    """By its norm where the mean is kept, which its eigenvalues may lie far below; else by these."""
    mixing = build_mixing(graph, 6, weights=weights, redraw=True)
    product = np.linalg.multi_dot([mixing.rows(round).dense() for round in range(7, -1, -1)])
    norm, second = np.linalg.norm(product - 1 / 6, 2), np.sort(np.abs(np.linalg.eigvals(product)))[-2]
    assert spectral(mixing).rho ** 8 == pytest.approx(norm if mixing.doubly_stochastic else second, rel=1e-6)


def test_failures_slow_the_mixing_down():
    rates = [spectral(build_mixing("ring", 16, link_failure=p)).rho for p in (0.0, 0.3, 0.9)]
    assert rates[0] < rates[1] < rates[2] <= 1


def test_describe_says_it_all_in_short_lines():
    lines = describe(build_mixing("random:0.25", 16, weights="uniform"))
    facts = dict(lines)
    assert facts["graph"] == "random:0.25"
    assert facts["workers"] == "16"
    assert facts["changes"] == "never"
    assert facts["P"].startswith("row-stochastic, column sums 0.")
    assert "row-stochastic only" in facts["note"]
    assert float(facts["rho"]) + float(facts["spectral gap"]) == pytest.approx(1, abs=1e-2)
    assert "e" not in facts["spectral gap"], "0.05, not 5.07e-02"
    assert dict(describe(build_mixing("full", 8)))["1 / gap"] == "1 round"
    ring = dict(describe(build_mixing("ring", 128)))
    assert (ring["links"], ring["messages a round"], ring["neighbours"]) == ("128", "256", "2")
    assert (ring["P"], ring["1 / gap"]) == ("doubly stochastic", "1,245 rounds")
    assert "note" not in ring
    assert dict(describe(build_mixing("full", 8)))["1 / gap"] == "1 round"
    assert dict(describe(build_mixing("star", 5)))["neighbours"] == "1 to 4"
    assert dict(describe(build_mixing("one-peer-exponential", 12)))["changes"] == "in a cycle of 4 rounds"
    assert "first 8" in dict(describe(build_mixing("ring", 12, link_failure=0.1)))["changes"]
