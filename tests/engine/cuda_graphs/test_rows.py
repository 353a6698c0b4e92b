"""Rows of weights in flat memory."""

import torch

from manyheads.engine.cuda_graphs.rows import Layout


def test_leaves_lie_apart_aligned_and_channels_last() -> None:
    shapes = {"a": (3,), "w": (4, 2, 3, 3), "s": (), "none": (0, 3), "no_image": (2, 0, 3, 3)}
    layout = Layout(shapes, channels_last=True)
    flat = torch.zeros(2, layout.size)
    views = layout.views(flat)
    for k, (name, view) in enumerate(views.items()):
        assert view.shape == (2, *shapes[name])
        assert layout.offsets[name] % 64 == 0
        view.fill_(k + 1)
    assert views["w"][0].is_contiguous(memory_format=torch.channels_last)
    assert [int((flat == k + 1).sum()) for k in range(3)] == [6, 144, 2], "no leaf runs into another"
