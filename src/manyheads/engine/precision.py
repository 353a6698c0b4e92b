"""The number format of a training: what runs in float64, float32, tf32 or bf16, and whether results repeat exactly."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyheads.engine.phase import PrecisionName

_MATRIX_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class Precision:
    """Stored weights, momentum, losses and scores have the model's own type; products follow ``name``."""

    name: PrecisionName = "float32"
    deterministic: bool = False

    @property
    def low(self) -> bool:
        """Whether training runs its products in bf16."""
        return self.name == "bf16"

    @property
    def tensor_cores(self) -> bool:
        """Whether products of float32 numbers may be rounded to tf32."""
        return self.name in ("tf32", "bf16")

    def autocast(self, device: torch.device) -> torch.autocast:
        """Inside, products run in bf16 where that is the precision."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.low, cache_enabled=False)

    def low_names(self, model: nn.Module) -> frozenset[str]:
        """Parameters of which forward and backward read a bf16 copy, which the optimiser writes in every step."""
        if not self.low:
            return frozenset()
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _MATRIX_LAYERS)]
        return frozenset(f"{name}.{own}" for name, layer in layers for own, _ in layer.named_parameters(recurse=False))

    @contextmanager
    def settings(self, device: torch.device, *, tune: bool = True) -> Iterator[None]:
        """Inside, torch's global settings are those of this precision; afterwards they are what they were.

        ``tune``: let cuDNN try its kernels on every new shape, which pays where few shapes come often.
        """
        if device.type != "cuda":
            yield
            return
        cudnn = torch.backends.cudnn
        before = (torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
        details: Any = torch.utils.deterministic
        strict, filled = torch.are_deterministic_algorithms_enabled(), details.fill_uninitialized_memory
        benchmark = tune and not self.deterministic
        _set("high" if self.tensor_cores else "highest", self.tensor_cores, benchmark, self.deterministic)
        if self.deterministic and not strict:
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Filling takes time, and nothing here reads memory before it is written.
            details.fill_uninitialized_memory = False
        try:
            with torch.cuda.device(device):
                yield
        finally:
            _set(*before)
            if self.deterministic and not strict:
                torch.use_deterministic_algorithms(False)
                details.fill_uninitialized_memory = filled


def _set(matmul: str, cudnn_tf32: bool, benchmark: bool, deterministic: bool) -> None:
    with warnings.catch_warnings():
        # Newer versions of torch warn that these switches get other names, which older versions do not have.
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn_tf32
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cudnn.deterministic = deterministic
