"""Trees of named tensors."""

import torch

from manyheads.tree import add_prefix, clone, flatten, group, nbytes, repeat, rows, select, stack, strip_prefix

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


def test_rows_and_stacks_are_inverse():
    single = [{name: leaf[w] for name, leaf in TREE.items()} for w in range(3)]
    assert all(torch.equal(leaf, TREE[name]) for name, leaf in stack(single).items())
    chosen = rows(TREE, torch.tensor([2, 0]))
    assert chosen["head.bias"].flatten().tolist() == [2.0, 0.0]


def test_flatten_and_size():
    assert flatten(TREE).shape == (3, 5)
    assert flatten(TREE)[1].tolist() == [4.0, 5.0, 6.0, 7.0, 1.0]
    assert nbytes(TREE) == 5 * 4
    assert nbytes({**TREE, "mask": torch.ones(3, 7, dtype=torch.uint8)}) == 27
