"""The update of a layer in one go, without its gradient in memory."""

import torch

from manyheads.engine.cuda_graphs.descent import UpdateRule, descend_
from manyheads.engine.cuda_graphs.fused import PlainUpdate
from manyheads.engine.cuda_graphs.rows import Extras, FlatRows, Kind

CPU = torch.device("cpu")


def test_a_layer_update_is_a_descent_along_its_gradient() -> None:
    torch.manual_seed(0)
    rule, rate = UpdateRule(0.9, 0.01, None, 0.5), torch.tensor([0.1], dtype=torch.float64)
    shapes = {"fc.weight": (3, 4), "fc.bias": (3,)}
    rows = FlatRows(shapes, Kind(3, CPU, torch.float64), Extras(False, True, True, True))
    part = rows.parts[0]
    for flat in (part.weight, part.momentum, part.anchor):
        assert flat is not None
        flat.copy_(torch.randn_like(flat))
    assert part.momentum is not None
    before, momentum = part.weight.clone(), part.momentum.clone()
    d, x = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    factor, count = torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([5, 0])
    PlainUpdate(rule).by_factors(part, "fc", d, x, factor, count, rate, bias=True)
    expected, here = before[:1, :12].clone(), slice(0, 12)
    gradient = torch.einsum("bo,bi->oi", d[0], x[0]).reshape(1, -1)
    anchor, mask = part.anchor, part.mask
    assert anchor is not None and mask is not None
    args = (None, None, momentum[:1, here], anchor[:1, here], mask[:1, here])
    descend_(expected, gradient * factor[0], rate, rule, *args)
    torch.testing.assert_close(part.weight[:1, here], expected)
    assert torch.equal(part.weight[1:], before[1:]), "a finished worker and one beyond the first rows stay"
    assert not torch.equal(part.weight[0, 64:67], before[0, 64:67]), "the bias moves"
