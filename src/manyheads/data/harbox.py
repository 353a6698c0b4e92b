"""HARBox (Ouyang et al. 2021): five activities of 120 phone users in windows of 2 s, split by time."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyheads.data.dataset import Dataset, standardise
from manyheads.data.download import find, missing, search_path
from manyheads.errors import UserError

FOLDER = "large_scale_HARBox"
ACTIVITIES = ("Call", "Hop", "typing", "Walk", "Wave")
NUM_CHANNELS = 9
"""Accelerometer, gyroscope and magnetometer, x y z each; a timestamp stands before them in every row."""
WINDOW = 100
"""Rows of a window, at 50 Hz. Consecutive windows overlap by half."""

_HOME_PAGE = "https://github.com/xmouyang/FL-Datasets-for-HAR"

_Recorded = tuple[np.ndarray, int, int]
"""One user's windows of one activity, [windows, 900]; the activity's label; the user."""


def load(data_dir: str | Path | None = None, *, standardised: bool = True) -> Dataset:
    """The data set with x [samples, 900] and its users, per-channel standardised on the train part unless switched off.

    The last fifth of a user's windows of an activity is its test part. Users whose recordings repeat an earlier user's
    are left out.
    """
    folders = search_path(data_dir)
    root = find(folders, FOLDER, ["1"])
    if root is None:
        why = f"has no direct download (see {_HOME_PAGE})"
        raise missing("harbox", why, f"put its user folders 1, 2, ... into {folders[0] / FOLDER}")
    train: list[_Recorded] = []
    test: list[_Recorded] = []
    seen: set[bytes] = set()
    for folder in sorted((path for path in root.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)):
        files = ((label, folder / f"{activity}_train.txt") for label, activity in enumerate(ACTIVITIES))
        recorded = [(label, read_windows(path)) for label, path in files if path.exists()]
        content = hashlib.sha256(b"".join(windows.tobytes() for _, windows in recorded)).digest()
        if content in seen:
            continue
        seen.add(content)
        for label, windows in recorded:
            early, late = split_by_time(windows)
            train.append((early, label, int(folder.name)))
            test.append((late, label, int(folder.name)))
    if not any(len(windows) for windows, _, _ in test):
        raise UserError(f"{root} holds no activity with three windows or more: put the published user folders there.")
    (x_train, y_train, user_train), (x_test, y_test, user_test) = _pool(train), _pool(test)
    if standardised:
        x_train, x_test = standardise(x_train, x_test, NUM_CHANNELS)
    return Dataset(
        "harbox", x_train, y_train, x_test, y_test, len(ACTIVITIES), user_train, user_test, ACTIVITIES, source=str(root)
    )


def read_windows(path: Path) -> np.ndarray:
    """The windows of one file in the order of time, [windows, 900] float32. A hundred rows of ten are a window."""
    try:
        rows = np.loadtxt(path, dtype=np.float64, comments=None, ndmin=2) if path.stat().st_size else np.empty((0, 0))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as numbers ({error}): put the published file there.") from None
    if rows.shape[1] != 1 + NUM_CHANNELS or len(rows) % WINDOW:
        raise UserError(
            f"{path} has {len(rows)} rows of {rows.shape[1]} numbers; whole windows of {WINDOW} rows of "
            f"{1 + NUM_CHANNELS} belong there: put the published file there."
        )
    if not np.isfinite(rows).all():
        raise UserError(f"{path} holds NaN or infinite numbers: put the published file there.")
    windows = rows.reshape(-1, WINDOW, 1 + NUM_CHANNELS)
    in_time = np.argsort(windows[:, 0, 0], kind="stable")
    return windows[in_time, :, 1:].reshape(-1, WINDOW * NUM_CHANNELS).astype(np.float32)


def split_by_time(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Early windows for training and the last fifth for test.

    The window before the cut shares half its samples with the first test window, so it belongs to neither. With fewer
    than three windows all are for training.
    """
    if len(windows) < 3:
        return windows, windows[:0]
    cut = len(windows) - max(1, round(len(windows) / 5))
    return windows[: cut - 1], windows[cut:]


def _pool(parts: Sequence[_Recorded]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [samples, 900], labels [samples] and users [samples]."""
    windows, labels, users = zip(*parts, strict=True)
    sizes = torch.tensor([len(of_user) for of_user in windows])
    y, user = (torch.tensor(values).repeat_interleave(sizes) for values in (labels, users))
    return torch.from_numpy(np.concatenate(windows)), y, user
