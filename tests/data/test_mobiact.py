"""MobiAct: where its file is looked for, and what becomes of its windows."""

from pathlib import Path

import numpy as np
import pytest
import torch

from manyheads.data import load
from manyheads.data.dataset import standardise
from manyheads.errors import UserError

RNG = np.random.default_rng(0)


def test_it_is_standardised_per_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHEADS_DATA", str(tmp_path))
    x = (RNG.normal(size=(30, 100, 9)) * np.arange(1, 10) + 15).reshape(30, 900)
    split = np.where(np.arange(30) % 5 == 0, "test", "train")
    np.savez(tmp_path / "mobiact6.npz", x=x, y=np.arange(30) % 6, user=np.arange(30) % 3, split=split)
    data = load("mobiact")
    assert data.name == "mobiact" and data.num_classes == 6 and not data.notes
    by_channel = data.x_train.view(-1, 9)
    assert torch.allclose(by_channel.mean(0), torch.zeros(9), atol=1e-5)
    assert torch.allclose(by_channel.std(0, correction=0), torch.ones(9), atol=1e-5)
    assert data.user_train is not None and data.user_test is not None and not data.brought_by_workers
    assert data.user_train.tolist() == [k % 3 for k in range(30) if k % 5]
    assert data.user_test.tolist() == [k % 3 for k in range(0, 30, 5)]

    recorded = load("mobiact:raw")
    assert torch.equal(recorded.x_train, torch.from_numpy(x[split == "train"]).float())
    assert torch.equal(recorded.x_test, torch.from_numpy(x[split == "test"]).float())
    _, moved_along = standardise(recorded.x_train, recorded.x_test, 9)
    assert torch.equal(data.x_test, moved_along)


def test_missing_or_foreign(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"put mobiact6\.npz into {tmp_path},"):
        load("mobiact", tmp_path)
    np.savez(tmp_path / "mobiact6.npz", x=RNG.normal(size=(20, 4)), y=np.arange(20) % 5)
    with pytest.raises(UserError, match=r"mobiact6\.npz holds samples of shape \[4\]"):
        load("mobiact", tmp_path)
