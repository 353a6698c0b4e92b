"""Errors a user can fix, in one line."""

import pytest
import torch

from manyheads.errors import UserError, first_line, one_line, unknown, user_code


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


def test_of_a_long_error_the_first_line_is_told_and_of_a_silent_one_its_kind():
    assert first_line(ValueError("\n one\ntwo")) == "ValueError: one"
    assert first_line(KeyError()) == "KeyError"


def test_a_failure_of_the_users_code_is_one_line_with_its_place():
    def broken():
        raise KeyError("first\nsecond")

    with pytest.raises(UserError) as caught, user_code("the loss"):
        broken()
    assert str(caught.value).startswith(f"the loss fails in {__file__}, line ")
    assert str(caught.value).endswith(": KeyError: 'first\\nsecond'")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("made", [True, False], ids=["used", "made"])
def test_a_line_of_the_users_is_told_before_the_layer_of_torchs_that_fails_there(made):
    """One that cannot be made would not even have what it is told by."""
    embedding = torch.nn.Embedding(9, 4)
    says = rf"^the model fails in {__file__}, line \d+: {'IndexError' if made else 'ValueError'}"
    with pytest.raises(UserError, match=says), user_code("the model"):
        embedding(torch.tensor([9])) if made else torch.nn.Conv2d(3, 4, 3, groups=2)


def test_what_is_not_surely_the_users_stays_as_it_is():
    theirs, ours = {"__name__": "nets"}, {"__name__": "manyheads.engine"}
    for scope in (theirs, ours):
        exec("def look(table): return table['absent']", scope)
    with pytest.raises(UserError, match="your code fails in <string>, line 1: KeyError: 'absent'"):
        with_scope(theirs, {})
    with pytest.raises(KeyError):
        with_scope(ours, {})
    for error in (UserError("as it is"), MemoryError("none left"), torch.OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(type(error), match=f"^{error}$"), user_code("the model"):
            raise error


@pytest.mark.parametrize("scope", [{"__name__": "manyheads.engine"}, {"__name__": "torch.func"}], ids=str)
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (torch.nn.Embedding(9, 4), "in Embedding(9, 4): IndexError: index out of range in self."),
        (
            torch.nn.EmbeddingBag(9, 4),
            "in EmbeddingBag(9, 4, mode='mean'): RuntimeError: Index 0 of input takes value 9 which is not in the"
            " valid range [0, 9).",
        ),
    ],
    ids=["IndexError", "RuntimeError"],
)
def test_a_layer_of_torchs_that_refuses_what_it_is_given_is_named(scope, layer, words):
    """Where a net is put together from torch's layers, none of its lines is in the user's files."""
    exec("def look(net): return net(9 * net[0].weight.new_ones(1, 1).long())", scope)
    with pytest.raises(UserError) as caught:
        with_scope(scope, torch.nn.Sequential(layer))
    assert str(caught.value) == f"your code fails {words} Change this layer, or what it is given."
    assert isinstance(caught.value.__cause__, (IndexError, RuntimeError))


OURS = """
class Layer(nn.Module):
    def forward(self, x): return [][x]

def look(wrong):
    net = nn.Sequential(nn.Embedding(9, 4), Layer())
    return {"a layer": lambda: net[1:](0), "outside": lambda: [][0]}[wrong]()
"""


@pytest.mark.parametrize("wrong", ["a layer", "outside"])
def test_what_may_be_our_mistake_stays_as_it_is_though_a_layer_of_torchs_is_near(wrong):
    ours = {"__name__": "manyheads.models", "nn": torch.nn}
    exec(OURS, ours)
    with pytest.raises(IndexError):
        with_scope(ours, wrong)


def with_scope(scope, given):
    call = compile("with user_code('your code', maybe_ours=True): look(given)", "<ours>", "exec")
    exec(call, {"__name__": "manyheads.rounds", "user_code": user_code, "look": scope["look"], "given": given})
