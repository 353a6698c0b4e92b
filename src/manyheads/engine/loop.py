"""The plain kernel: one worker at a time through the module itself. Runs any net; other kernels are checked on it."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.engine.batches import dropout_key
from manyheads.engine.kernel import Batch, point_at, set_modes, summed_loss
from manyheads.engine.phase import Phase
from manyheads.engine.sgd import Descent
from manyheads.models.dropout import dropouts
from manyheads.models.split import Split
from manyheads.tree import Buffers, Params, select


class LoopKernel:
    """One worker's module trained by autograd, its rows changed in place."""

    padded: ClassVar[bool] = False

    def __init__(self, model: Split, phase: Phase, params: Params, buffers: Buffers) -> None:
        self.model, self.phase, self.dropouts = model, phase, dropouts(model)
        self.descent = Descent(phase, select(params, phase.update))
        point_at(model, params, buffers, 0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.descent.params)
        self.moving = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.constants = {name: leaf[0] for name, leaf in phase.constants.items()}
        set_modes(model, phase)

    def step(self, batch: Batch) -> Tensor:
        for layer in self.dropouts.values():
            layer.key = dropout_key(batch.dropout_base[0], batch.step, layer.number)
        outputs = self.model.outputs(batch.x[0])
        total = summed_loss(self.phase.objective, outputs, batch.y[0], self.constants, None)
        mean, weights = total / batch.count[0], list(self.moving.values())
        gradients = torch.autograd.grad(mean, weights, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            self.descent.step({name: g.unsqueeze(0) for name, g in zip(self.moving, gradients, strict=True)})
        return total.detach().unsqueeze(0)

    @staticmethod
    def scoring(model: Split, params: Params, buffers: Buffers) -> Callable[[Tensor], Tensor]:
        point_at(model, params, buffers, 0)
        model.eval()
        return lambda x: model(x[0]).unsqueeze(0)
