"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), in the published binary layout or the Python one."""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manyheads.data.dataset import Dataset
from manyheads.data.download import Download, DownloadProgress, Layout, obtain, read
from manyheads.data.pixels import Pixels
from manyheads.errors import UserError, first_line

_SITE = "https://www.cs.toronto.edu/~kriz"
_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Cifar:
    """What differs between the two data sets. In every layout the last file is the test part."""

    name: str
    binary: Layout
    python: Layout
    label_bytes: int
    """Bytes before the pixels of a binary record; the last one is the (fine) label."""
    label_key: bytes
    """Where the Python layout keeps the (fine) labels."""
    mean: tuple[float, float, float]
    """Of the train pixels in 0..1, per channel."""
    std: tuple[float, float, float]
    classes: tuple[str, ...]


CIFAR10 = Cifar(
    name="cifar10",
    binary=Layout(
        "cifar-10-batches-bin",
        {
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        (Download(f"{_SITE}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    ),
    python=Layout(
        "cifar-10-batches-py",
        {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
        (Download(f"{_SITE}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
    ),
    label_bytes=1,
    label_key=b"labels",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)

_CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
    "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
    "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
    "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)

CIFAR100 = Cifar(
    name="cifar100",
    binary=Layout(
        "cifar-100-binary",
        {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15", "test.bin": "4499cfba6c016c1be1438163640a0898"},
        (Download(f"{_SITE}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
    ),
    python=Layout(
        "cifar-100-python",
        {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        (Download(f"{_SITE}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
    ),
    label_bytes=2,
    label_key=b"fine_labels",
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    classes=tuple(_CIFAR100_CLASSES.split()),
)


def load(
    cifar: Cifar,
    data_dir: str | Path | None = None,
    progress: DownloadProgress | None = None,
    *,
    standardised: bool = True,
) -> Dataset:
    """The data set with x [samples, 3, 32, 32] in 0..1, standardised per channel by the constants above if wanted."""
    layout, folder = obtain(cifar.name, [cifar.binary, cifar.python], data_dir, progress)
    parse = parse_binary if layout is cifar.binary else parse_python
    parts = [parse(folder / name, read(folder / name, md5), cifar) for name, md5 in layout.md5.items()]
    pixels = Pixels(mean=cifar.mean, std=cifar.std) if standardised else Pixels()
    x_train, y_train = _pool(parts[:-1], pixels)
    x_test, y_test = _pool(parts[-1:], pixels)
    return Dataset(
        cifar.name,
        x_train,
        y_train,
        x_test,
        y_test,
        len(cifar.classes),
        classes=cifar.classes,
        pixels=pixels,
        source=str(folder),
    )


def parse_binary(path: Path, content: np.ndarray, cifar: Cifar) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [records, 3072] uint8 and labels [records] of one binary file: label byte(s), then the pixels."""
    record = cifar.label_bytes + _PIXELS
    if len(content) == 0 or len(content) % record:
        raise UserError(
            f"{path} has {len(content)} bytes, not a whole number of {record}-byte {cifar.name} records: "
            "put the published file there."
        )
    rows = content.reshape(-1, record)
    return rows[:, cifar.label_bytes :], _checked_labels(path, rows[:, cifar.label_bytes - 1], cifar)


def parse_python(path: Path, content: np.ndarray, cifar: Cifar) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [records, 3072] uint8 and labels [records] of one file of the Python layout."""
    try:
        batch = _ArraysOnly(io.BytesIO(content.data), encoding="bytes").load()
        pixels, labels = batch[b"data"].array, np.array(batch[cifar.label_key], dtype=np.int64)
        if pixels.shape != (len(labels), _PIXELS) or len(labels) == 0:
            raise ValueError(f"{list(pixels.shape)} pixels for {len(labels)} labels")
    except Exception as error:  # a foreign file can make the unpickler raise anything
        raise UserError(
            f"{path} is not a batch of {cifar.name} in the Python layout ({first_line(error)}): "
            "put the published file there."
        ) from None
    return pixels, _checked_labels(path, labels, cifar)


def _checked_labels(path: Path, labels: np.ndarray, cifar: Cifar) -> np.ndarray:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= len(cifar.classes):
        raise UserError(
            f"{path} has label {low if low < 0 else high}; {cifar.name} has labels 0..{len(cifar.classes) - 1}: "
            "put the published file there."
        )
    return labels.astype(np.int64)


def _pool(parts: list[tuple[np.ndarray, np.ndarray]], how: Pixels) -> tuple[Tensor, Tensor]:
    """One pool out of the files' pixels and labels, written once: the pixels are most of a gigabyte as floats."""
    y = torch.from_numpy(np.concatenate([labels for _, labels in parts]))
    x = torch.empty(len(y), 3, 32, 32)
    start = 0
    for pixels, _ in parts:
        x[start : start + len(pixels)] = torch.from_numpy(pixels).view(-1, 3, 32, 32)
        start += len(pixels)
    return how.to_inputs_(x), y


class _Array:
    """Stands in for a numpy array while unpickling; only bytes can become one."""

    array: np.ndarray

    def __setstate__(self, state: tuple[int, tuple[int, ...], "_Dtype", bool, bytes]) -> None:
        _, shape, _, fortran, raw = state
        self.array = np.frombuffer(bytearray(raw), np.uint8).reshape(shape, order="F" if fortran else "C")


class _Dtype:
    """Stands in for numpy's type of bytes, the only one the files hold."""

    def __setstate__(self, state: tuple[object, ...]) -> None:
        pass


def _make_dtype(code: str | bytes, align: object, copy: object) -> _Dtype:
    if code not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"an array of {code!r} where bytes belong")
    return _Dtype()


_ALLOWED: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _make_dtype,
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
}


class _ArraysOnly(pickle.Unpickler):
    """Builds arrays of bytes, strings, numbers, lists and dicts; any other name is refused before it is looked up."""

    def find_class(self, module_name: str, global_name: str, /) -> Callable[..., object]:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}") from None
