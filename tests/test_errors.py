"""Errors a user can mend, in one line."""

from manyheads.errors import UserError, unknown


def test_the_nearest_name_is_offered():
    error = unknown("graph", "rong", ["ring", "full", "star"])
    assert isinstance(error, UserError) and isinstance(error, ValueError)
    assert str(error) == "unknown graph 'rong'. Did you mean 'ring'? Allowed: full, ring, star."


def test_the_nearest_name_is_offered_in_whatever_case():
    assert "Did you mean 'deprl'?" in str(unknown("algorithm", "DePRL", ["deprl", "local"]))
    assert "Did you mean 'layerNorm'?" in str(unknown("head", "layernrm", ["layerNorm"]))


def test_nothing_near_is_nothing_offered():
    assert str(unknown("data", "xyz", ["digits"])) == "unknown data 'xyz'. Allowed: digits."
