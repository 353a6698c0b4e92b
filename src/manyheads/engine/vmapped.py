"""The general stacked kernel: any net without randomness of its own, through torch.func's vmap over workers."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from manyheads.engine.kernel import Batch, dropout_keys, set_modes, summed_loss
from manyheads.engine.phase import Phase
from manyheads.engine.sgd import Descent
from manyheads.errors import UserError
from manyheads.models.dropout import dropouts
from manyheads.models.norm import BatchNorm
from manyheads.models.split import Split, twin
from manyheads.tree import Buffers, Params, add_prefix, clone, leading, select

# torch repeats it for every layer, and asks to report it to its authors. By default such nets run in ``loop`` anyway.
warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")


class Outputs(nn.Module):
    """The net with its heads' outputs apart, as objectives want them."""

    def __init__(self, net: Split) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.net.outputs(x)


class VmapKernel:
    """A chunk of workers in one vectorised call."""

    padded: ClassVar[bool] = True

    def __init__(self, model: Split, phase: Phase, params: Params, buffers: Buffers) -> None:
        # A copy: after a functional call, tied layers may have lost the tensors that point at a worker's row.
        model = twin(model)
        self.net, self.phase, self.dropouts = Outputs(model), phase, dropouts(model)
        self.norms = [name for name, module in model.named_modules() if isinstance(module, BatchNorm)]
        self.descent = Descent(phase, select(params, phase.update))
        self.frozen = {name: leaf for name, leaf in params.items() if name not in self.descent.params}
        self.buffers = buffers
        set_modes(model, phase)

    def step(self, batch: Batch) -> Tensor:
        active = len(batch.x)
        supplied = dropout_keys(self.dropouts, batch.dropout_base, batch.step)
        weight = batch.weight
        if weight is None:
            weight = batch.count.new_ones(batch.y.shape[:2])
        supplied |= {f"{name}.sample_weight": weight for name in self.norms if batch.weight is not None}

        def loss(
            moving: Params, others: Params, x: Tensor, y: Tensor, weight: Tensor, count: Tensor, constants: Params
        ) -> tuple[Tensor, tuple[Tensor, Buffers]]:
            tensors = add_prefix({**others, **moving}, "net")
            outputs = functional_call(self.net, tensors, (x,))
            total = summed_loss(self.phase.objective, outputs, y, constants, weight)
            statistics = {name: tensors[f"net.{name}"] for name in self.buffers}
            return total / count, (total, statistics)

        moving, constants = leading(self.descent.params, active), leading(self.phase.constants, active)
        # Statistics are written in place: on copies, so that a failed step leaves the rows as they were.
        others = leading(self.frozen, active) | clone(leading(self.buffers, active)) | supplied
        with _batchable():
            gradients, (_, (sums, statistics)) = vmap(grad_and_value(loss, has_aux=True))(
                moving, others, batch.x, batch.y, weight, batch.count, constants
            )
        self.descent.step(gradients)
        for name, value in statistics.items():
            self.buffers[name][:active] = value
        return sums

    @staticmethod
    def scoring(model: Split, params: Params, buffers: Buffers) -> Callable[[Tensor], Tensor]:
        net, tensors = twin(model).eval(), {**params, **buffers}

        def outputs(x: Tensor) -> Tensor:
            with _batchable():
                return vmap(lambda own, x: functional_call(net, own, (x,)))(leading(tensors, len(x)), x)

        return outputs


@contextmanager
def _batchable() -> Iterator[None]:
    """Not every operation can be batched by vmap."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
        raise UserError(f"engine 'batched' cannot run this net ({reason}): use 'loop'.") from error
