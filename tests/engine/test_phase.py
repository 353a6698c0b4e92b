"""Loss and metric of the phase language, by hand."""

import torch

from manyheads.engine.phase import Progress, accuracy, cross_entropy, single_head


def test_cross_entropy_is_per_sample():
    scores = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.stack([scores[0].exp().sum().log() - 2.0, torch.tensor(3.0, dtype=torch.float64).log()])
    torch.testing.assert_close(cross_entropy(scores, torch.tensor([1, 2])), expected)


def test_accuracy_is_per_sample():
    scores = torch.tensor([[1.0, 2.0, 0.5], [3.0, 0.0, 0.0]], dtype=torch.float64)
    assert accuracy(scores, torch.tensor([1, 2])).tolist() == [1.0, 0.0]
    assert accuracy(scores, torch.tensor([1, 2])).dtype == torch.float64


def test_single_head_reads_the_head():
    scores = torch.randn(4, 3)
    y = torch.tensor([0, 1, 2, 0])
    outputs = {"generic": -scores, "head": scores, "other": -scores}
    assert torch.equal(single_head(cross_entropy)(outputs, y, {}), cross_entropy(scores, y))


def test_a_phase_that_is_over_is_not_going_on():
    assert str(Progress()) == str(Progress(82, 82)) == ""
    assert str(Progress(1000, 8200)) == "1,000 of 8,200 mini-batches"
