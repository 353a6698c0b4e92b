"""MobiAct (Vavoulas et al. 2016): six activities of 50 phone users in windows of 100 samples x 9 channels."""

from dataclasses import replace
from pathlib import Path

from manyheads.data import arrays
from manyheads.data.dataset import Dataset, standardise
from manyheads.data.download import find, missing, search_path
from manyheads.errors import UserError

FILE = "mobiact6.npz"
NUM_CHANNELS = 9
NUM_FEATURES = 100 * NUM_CHANNELS


def load(data_dir: str | Path | None = None, *, standardised: bool = True) -> Dataset:
    """The data set with x [samples, 900] and its users, per-channel standardised on the train part unless switched off.

    For the file see ``arrays.load``.
    """
    folders = search_path(data_dir)
    folder = find(folders, ".", [FILE])
    if folder is None:
        why = f"has no direct download (an npz with x [samples, {NUM_FEATURES}], y, user and split)"
        raise missing("mobiact", why, f"put {FILE} into {folders[0]}")
    found = arrays.load(folder / FILE)
    if found.input_shape != (NUM_FEATURES,):
        raise UserError(
            f"{folder / FILE} holds samples of shape {list(found.input_shape)}; mobiact's are [{NUM_FEATURES}]:"
            " put its file there."
        )
    x_train, x_test = found.x_train, found.x_test
    if standardised:
        x_train, x_test = standardise(x_train, x_test, NUM_CHANNELS)
    # Notes are for those who choose what is in their file.
    return replace(found, name="mobiact", x_train=x_train, x_test=x_test, notes=())
