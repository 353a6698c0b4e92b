"""Errors a user can mend, in one line."""

from manyheads.errors import UserError, one_line, unknown


def test_the_nearest_name_is_offered():
    error = unknown("graph", "rong", ["ring", "full", "star"])
    assert isinstance(error, UserError) and isinstance(error, ValueError)
    assert str(error) == "unknown graph 'rong'. Did you mean 'ring'? Allowed: full, ring, star."


def test_the_nearest_name_is_offered_in_whatever_case():
    assert "Did you mean 'deprl'?" in str(unknown("algorithm", "DePRL", ["deprl", "local"]))
    assert "Did you mean 'layerNorm'?" in str(unknown("head", "layernrm", ["layerNorm"]))


def test_nothing_near_is_nothing_offered():
    assert str(unknown("data", "xyz", ["digits"])) == "unknown data 'xyz'. Allowed: digits."


def test_a_message_is_one_line_that_no_terminal_obeys():
    assert one_line("a\x1b[31m b\n\n  c\td") == "a?[31m b c d"
    assert one_line(shown := one_line(3000 * "x\x07")) == shown and len(shown) == 2000
