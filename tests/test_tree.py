"""Trees of named tensors."""

import torch

from manyheads.tree import (
    add_prefix,
    by_row,
    clone,
    flatten,
    forms,
    group,
    leading,
    nbytes,
    repeat,
    row_forms,
    select,
    stack,
    strip_prefix,
    with_rows,
)

TREE = {"representation.fc1.weight": torch.arange(12.0).view(3, 2, 2), "head.bias": torch.arange(3.0).view(3, 1)}


def test_groups_are_first_names():
    assert group("representation.fc1.weight") == "representation" and group("head") == "head"
    assert list(select(TREE, {"head"})) == ["head.bias"]
    assert list(select(TREE, {"head", "representation"})) == list(TREE)
    assert select(TREE, {"hea"}) == {}


def test_prefixes_come_and_go():
    personal = add_prefix(TREE, "personal")
    assert {group(name) for name in personal} == {"personal"}
    assert strip_prefix({**TREE, **personal}, "personal") == TREE
    assert strip_prefix({"personality.x": torch.ones(1)}, "personal") == {}


def test_copies_share_no_memory():
    copied = clone(TREE)
    copied["head.bias"] += 1
    assert TREE["head.bias"].flatten().tolist() == [0.0, 1.0, 2.0]
    row = {"w": torch.ones(2)}
    repeated = repeat(row, 3)
    repeated["w"][0] = 5
    assert repeated["w"].tolist() == [[5, 5], [1, 1], [1, 1]] and row["w"].tolist() == [1, 1]


def test_a_stack_is_made_of_its_rows():
    single = [{name: leaf[w] for name, leaf in TREE.items()} for w in range(3)]
    assert all(torch.equal(leaf, TREE[name]) for name, leaf in stack(single).items())


def test_some_rows_are_taken_from_the_new_tree():
    new = {name: -leaf - 1 for name, leaf in TREE.items()}
    some = with_rows(TREE, new, torch.tensor([2, 0]))
    assert some["head.bias"].flatten().tolist() == [-1.0, 1.0, -3.0]
    assert TREE["head.bias"].flatten().tolist() == [0.0, 1.0, 2.0]
    assert with_rows(TREE, new, None) == new


def test_a_leaf_is_a_row_for_each_worker():
    leaves = map(torch.ones, ((3,), (3, 2), (3, 2, 4), (3, 0)))
    assert [flatten(leaf).shape for leaf in leaves] == [(3, 1), (3, 2), (3, 8), (3, 0)]


def test_a_number_for_each_worker_goes_with_all_of_its_row():
    for shape in ((3,), (3, 2), (3, 2, 4)):
        scaled = by_row(torch.arange(3.0), torch.ones(shape)) * torch.ones(shape)
        assert scaled.shape == shape and flatten(scaled)[:, 0].tolist() == [0, 1, 2]


def test_the_form_of_a_row_is_that_without_the_workers():
    assert row_forms(TREE) == forms({name: leaf[0] for name, leaf in TREE.items()})
    assert row_forms(leading(TREE, 0)) == row_forms(TREE)
    assert row_forms({"head.bias": torch.zeros(3, 1)}) != row_forms({"head.bias": torch.zeros(3, 1).double()})


def test_size():
    assert nbytes(TREE) == 5 * 4
    assert nbytes({**TREE, "mask": torch.ones(3, 7, dtype=torch.uint8)}) == 27
