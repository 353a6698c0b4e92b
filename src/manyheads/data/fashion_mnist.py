"""Fashion-MNIST (Xiao et al. 2017) in the published IDX files, padded from 28x28 to 32x32."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.data.dataset import Dataset
from manyheads.data.download import Download, DownloadProgress, Layout, check_md5, obtain
from manyheads.data.pixels import Pixels
from manyheads.errors import UserError

_SITE = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion"

LAYOUT = Layout(
    "fashion-mnist",
    # Of the uncompressed content: Debian compresses the same content into other bytes.
    {
        "train-images-idx3-ubyte.gz": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte.gz": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte.gz": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte.gz": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    (
        Download(f"{_SITE}/train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Download(f"{_SITE}/train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        Download(f"{_SITE}/t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        Download(f"{_SITE}/t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    package="dataset-fashion-mnist",
)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""

MEAN, STD = 0.2860, 0.3530
"""Of the train pixels in 0..1, before padding."""
CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

_BYTES = 0x08
_MAX_SIZE = 1 << 26


def load(
    data_dir: str | Path | None = None,
    progress: DownloadProgress | None = None,
    *,
    standardised: bool = True,
    layout: Layout = LAYOUT,
) -> Dataset:
    """The data set with x [samples, 1, 32, 32]: 28x28 images in a black frame, in 0..1 or standardised as above."""
    _, folder = obtain("fashion-mnist", [layout], data_dir, progress, also=[DEBIAN])
    images_train, labels_train, images_test, labels_test = (
        parse_idx(folder / name, read_gzip(folder / name, md5)) for name, md5 in layout.md5.items()
    )
    pixels = Pixels(mean=(MEAN,), std=(STD,)) if standardised else Pixels()
    return Dataset(
        "fashion-mnist",
        pixels.to_inputs_(_framed(images_train)),
        torch.from_numpy(labels_train).long(),
        pixels.to_inputs_(_framed(images_test)),
        torch.from_numpy(labels_test).long(),
        num_classes=len(CLASSES),
        classes=CLASSES,
        pixels=pixels,
        source=str(folder),
    )


def read_gzip(path: Path, md5: str) -> bytes:
    """The uncompressed content of a file, which must be the published one."""
    try:
        with gzip.open(path) as file:
            content = file.read(_MAX_SIZE)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is truncated or not a gzip file ({error}): put the published file there.") from None
    check_md5(path, content, md5)
    return content


def parse_idx(path: Path, content: bytes) -> np.ndarray:
    """The array of an IDX file of bytes: two zeros, the type, the number of axes, their big-endian sizes, the bytes."""
    if len(content) < 4 or content[:3] != bytes([0, 0, _BYTES]):
        raise UserError(f"{path} is not an IDX file of bytes: put the published file there.")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], ">u4").astype(int).tolist() if len(content) >= start else []
    if len(content) - start != np.prod(shape, dtype=object) or not shape:
        raise UserError(f"{path} does not hold the {shape} bytes its header says: put the published file there.")
    return np.frombuffer(bytearray(content[start:]), np.uint8).reshape(shape)


def _framed(images: np.ndarray) -> Tensor:
    """[samples, 28, 28] bytes -> [samples, 1, 32, 32] float32."""
    return F.pad(torch.from_numpy(images).unsqueeze(1), (2, 2, 2, 2)).float()
