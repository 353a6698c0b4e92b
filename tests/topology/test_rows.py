"""What a mixing matrix must satisfy, and how sparse rows hold it."""

from dataclasses import replace

import numpy as np
import pytest

from manyheads.errors import UserError
from manyheads.topology import Rows, check
from manyheads.topology.rows import SEARCHED_ROUNDS, check_rows, sparse_rows

SHIFT = (np.eye(3) + np.roll(np.eye(3), 1, axis=0)) / 2


def test_rows_are_sorted_and_keep_a_diagonal_of_zero():
    links = np.array([1, 1, 1, 0]), np.array([3, 0, 2, 1]), np.array([0.5, 0.25, 0.25, 1.0])
    rows = sparse_rows(*links, present=np.ones(4, dtype=bool))
    assert rows.offsets.tolist() == [0, 2, 6, 7, 8]
    assert rows.columns.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert rows.weights.tolist() == [0.0, 1.0, 0.25, 0.0, 0.25, 0.5, 1.0, 1.0]
    assert rows.receivers.tolist() == [0, 0, 1, 1, 1, 1, 2, 3]
    assert rows.dense().tolist() == [[0, 1, 0, 0], [0.25, 0, 0.25, 0.5], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert (rows.offsets.dtype, rows.columns.dtype, rows.weights.dtype) == (np.int64, np.int64, np.float64)


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        ([[0.5, 0.6], [0.5, 0.5]], "row 0 sums to 1.1"),
        ([[0.5, 0.5001], [0.5001, 0.5]], "row 0 sums to 1.0001"),
        ([[0.5, 0.5], [0.4, 0.6]], "column 1 sums to 1.1"),
        ([[1.5, -0.5], [-0.5, 1.5]], "weight -0.5"),
        ([[0.0, 1.0], [np.nan, 0.0]], "weight nan"),
        ([[np.inf, 0.5], [0.5, 0.5]], "weight inf"),
        (SHIFT, "not symmetric"),
        (np.eye(3), "not connected"),
        (np.kron(np.eye(2), np.full((2, 2), 0.5)), "not connected"),
    ],
)
def test_wrong_matrices_are_refused_in_one_line(lab, matrix, says):
    with pytest.raises(UserError) as error:
        check(lab.mixing_of(matrix))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_values_that_differ_across_the_diagonal_are_not_symmetric():
    skewed = np.full((3, 3), 1 / 3) + 0.1 * np.array([[0, 1, -1], [-1, 0, 1], [1, -1, 0]])
    everyone = np.ones(3, dtype=bool)
    receiver, sender = np.nonzero(~np.eye(3, dtype=bool))
    rows = sparse_rows(receiver, sender, skewed[receiver, sender], everyone)
    check_rows(rows, 0, directed=True, doubly_stochastic=True)
    with pytest.raises(UserError, match="not symmetric"):
        check_rows(rows, 0, directed=False, doubly_stochastic=True)


def test_a_one_way_chain_is_not_connected(lab):
    chain = np.array([[1.0, 0, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]])
    with pytest.raises(UserError, match="not connected"):
        check(lab.mixing_of(chain, doubly_stochastic=False))


def test_connection_counts_over_a_whole_period(lab):
    pairs = [np.kron(np.eye(2), np.full((2, 2), 0.5)), np.roll(np.kron(np.eye(2), np.full((2, 2), 0.5)), 1, (0, 1))]
    check(lab.mixing_of(*pairs))
    check(replace(lab.mixing_of(*pairs, *pairs), period=None))
    for period in (1, None):
        with pytest.raises(UserError, match="not connected"):
            check(replace(lab.mixing_of(*[pairs[0]] * SEARCHED_ROUNDS), period=period))


def test_check_finds_a_mixing_that_breaks_its_claim_in_any_round_of_its_period():
    class Liar:
        num_workers, name, period, directed, doubly_stochastic, notes = 2, "liar", 2, True, True, ()

        def rows(self, round: int) -> Rows:
            weight = np.array([0.5, 0.5 - round / 4])
            return sparse_rows(np.array([0, 1]), np.array([1, 0]), weight, np.ones(2, dtype=bool))

    with pytest.raises(UserError, match=r"in P of round 1, column 0 sums to 0\.75"):
        check(Liar())
