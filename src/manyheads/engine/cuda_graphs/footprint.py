"""A net tried out on samples without numbers: whether it can be captured, how much it computes and keeps."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.models.split import Split


@dataclass(frozen=True)
class Footprint:
    """What one pass over one sample takes."""

    blocked: str | None
    """The module that failed: it looks at numbers, or computes some again in its backward pass. None: there is none."""
    activations: int
    """Numbers in the outputs of layers."""
    products: int
    """Multiplications of convolutions and linear layers."""
    patches: int
    """Numbers in the image patches that convolutions multiply by their weights."""


def footprint_of(model: Split, input_shape: tuple[int, ...]) -> Footprint:
    """Run the net in train mode on the meta device, where tensors have shapes and no numbers."""
    net = copy.deepcopy(model).to("meta").train()
    inside: list[str] = []
    numbers = {"activations": 0, "products": 0, "patches": 0}

    def watch(name: str, module: nn.Module) -> None:
        def enter(*_: object) -> None:
            inside.append(name)

        def leave(module: nn.Module, _: object, output: object) -> None:
            inside.pop()
            if isinstance(output, Tensor) and not list(module.children()):
                numbers["activations"] += output.numel()
                numbers["products"] += _products(module, output)
                if isinstance(module, nn.modules.conv._ConvNd):
                    numbers["patches"] += _products(module, output) // module.out_channels

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    for name, module in net.named_modules():
        watch(name or type(module).__name__, module)
    dtype = next((p.dtype for p in net.parameters()), torch.float32)
    # Two, as BatchNorm in train mode refuses a single value per channel.
    samples = 2
    blocked = None
    try:
        # Activation checkpointing, which hooks find out, would compute again with other weights than the recorded ones.
        with torch.enable_grad(), torch.autograd.graph.disable_saved_tensors_hooks("this cannot be recorded"):
            net(torch.empty(samples, *input_shape, dtype=dtype, device="meta"))
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        blocked = inside[-1] if inside else "the model"
    return Footprint(blocked, **{name: number // samples for name, number in numbers.items()})


def output_shape(module: nn.Module, input_shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a module's output for one sample, in eval mode."""
    net = copy.deepcopy(module).to("meta").eval()
    with torch.no_grad():
        return tuple(net(torch.empty(2, *input_shape, dtype=dtype, device="meta")).shape[1:])


def _products(module: nn.Module, output: Tensor) -> int:
    if isinstance(module, nn.Linear):
        return output.numel() * module.in_features
    if isinstance(module, nn.modules.conv._ConvNd):
        return output.numel() * module.weight[0].numel()
    return 0
