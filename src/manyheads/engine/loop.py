"""The plain kernel: one worker at a time through the module itself. Runs any net; other kernels are checked on it."""

from typing import ClassVar

import torch
from torch import Tensor

from manyheads.engine.kernel import Batch, dropout_keys, dropouts, point_at, set_modes, stacked_losses
from manyheads.engine.phase import Phase
from manyheads.engine.sgd import Descent
from manyheads.models.split import Split
from manyheads.tree import Buffers, Params, select


class LoopKernel:
    """One worker's module trained by autograd, its rows changed in place."""

    padded: ClassVar[bool] = False

    def __init__(
        self, model: Split, phase: Phase, params: Params, buffers: Buffers, dropout_layers: dict[str, int]
    ) -> None:
        self.model, self.phase, self.layers = model, phase, dropout_layers
        self.dropouts = dropouts(model)
        self.descent = Descent(phase, select(params, phase.update))
        point_at(model, params, buffers, 0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.descent.params)
        set_modes(model, phase)

    def step(self, batch: Batch) -> Tensor:
        for name, keys in dropout_keys(self.layers, list(self.dropouts), batch.dropout_base, batch.step).items():
            self.dropouts[name].key = keys[0]
        outputs = self.model.outputs(self.model.features(batch.x[0]))
        total, sums = stacked_losses(self.phase, {name: out.unsqueeze(0) for name, out in outputs.items()}, batch)
        moving = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(total, list(moving.values()), allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            self.descent.step({name: g.unsqueeze(0) for name, g in zip(moving, gradients, strict=True)})
        return sums
