"""Small data sets for the tests of the data rooms."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from manyheads.data.dataset import Dataset


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test finds does not depend on the data sets that this machine has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MANYHEADS_DATA", raising=False)


@pytest.fixture(scope="session")
def toy() -> Callable[..., Dataset]:
    """A data set with the given numbers of train and test samples per class."""

    def make(train: list[int], test: list[int], users: int | None = None) -> Dataset:
        def pool(sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
            x = torch.stack([y.float(), torch.arange(len(y)).float()], dim=1)
            return x, y, None if users is None else torch.arange(len(y)) % users

        (x, y, user), (x_test, y_test, user_test) = pool(train), pool(test)
        return Dataset("toy", x, y, x_test, y_test, len(train), user, user_test)

    return make


@pytest.fixture(scope="session")
def regression() -> Dataset:
    """A data set with float targets and no classes."""
    x = torch.linspace(-1, 1, 60).view(30, 2)
    return Dataset("line", x, x.sum(1), x[:10], x[:10].sum(1), None)
