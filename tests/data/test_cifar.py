import hashlib
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from manyheads.data import cifar
from manyheads.data.cifar import CIFAR10, CIFAR100, Cifar
from manyheads.errors import UserError

RNG = np.random.default_rng(0)


def batch(kind: Cifar, size: int) -> tuple[np.ndarray, np.ndarray]:
    return RNG.integers(0, 256, (size, 3072), np.uint8), RNG.integers(0, len(kind.classes), size)


def binary(kind: Cifar, pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """The published record: for CIFAR-100 a coarse label first, then the fine one, then the pixels."""
    coarse = np.full((len(labels), kind.label_bytes - 1), 19, np.uint8)
    return np.concatenate([coarse, labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()


def python(kind: Cifar, pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """As the published files: protocol 2, byte strings as keys."""
    content = {b"data": pixels, kind.label_key: labels.tolist(), b"batch_label": b"one", b"filenames": [b"a.png"]}
    return pickle.dumps(content, protocol=2)


def publish(kind: Cifar, layout: str, folder: Path, parts: list[tuple[np.ndarray, np.ndarray]]) -> Cifar:
    """Write small files in one of the layouts; returns the data set that expects their checksums."""
    write = binary if layout == "binary" else python
    published = kind.binary if layout == "binary" else kind.python
    (folder / published.folder).mkdir(parents=True)
    md5 = {}
    for name, part in zip(published.md5, parts, strict=True):
        content = write(kind, *part)
        (folder / published.folder / name).write_bytes(content)
        md5[name] = hashlib.md5(content).hexdigest()
    return replace(kind, **{layout: replace(published, md5=md5)})


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100], ids=lambda kind: kind.name)
@pytest.mark.parametrize("layout", ["binary", "python"])
def test_both_layouts_give_the_same_normalised_pools(kind: Cifar, layout: str, tmp_path: Path) -> None:
    parts = [batch(kind, 3 + i) for i in range(len(kind.binary.md5))]
    parts[0] = (np.asfortranarray(parts[0][0]), parts[0][1])
    data = cifar.load(publish(kind, layout, tmp_path, parts), tmp_path)
    pixels = np.concatenate([part[0] for part in parts[:-1]]).reshape(-1, 3, 32, 32) / 255
    expected = (pixels - np.reshape(kind.mean, (3, 1, 1))) / np.reshape(kind.std, (3, 1, 1))
    assert np.allclose(data.x_train.numpy(), expected, atol=1e-5)
    assert data.y_train.tolist() == np.concatenate([part[1] for part in parts[:-1]]).tolist()
    assert data.y_test.tolist() == parts[-1][1].tolist()
    assert data.x_train.dtype == torch.float32 and data.y_test.dtype == torch.int64
    assert data.num_classes == len(kind.classes)


def test_raw_pixels_are_fractions(tmp_path: Path) -> None:
    parts = [batch(CIFAR10, 3) for _ in CIFAR10.binary.md5]
    kind = publish(CIFAR10, "binary", tmp_path, parts)
    pixels = cifar.load(kind, tmp_path, standardised=False).x_test.numpy()
    assert np.allclose(pixels, parts[-1][0].reshape(-1, 3, 32, 32) / 255)


@pytest.mark.parametrize("standardised", [True, False])
def test_it_says_what_became_of_the_pixels(standardised: bool, tmp_path: Path) -> None:
    parts = [batch(CIFAR10, 3) for _ in CIFAR10.binary.md5]
    data = cifar.load(publish(CIFAR10, "binary", tmp_path, parts), tmp_path, standardised=standardised)
    assert data.pixels is not None
    pixels = torch.from_numpy(parts[-1][0]).reshape(-1, 3, 32, 32)
    assert torch.equal(data.pixels.to_inputs_(pixels.float()), data.x_test)


def test_the_folder_itself_can_be_named(tmp_path: Path) -> None:
    kind = publish(CIFAR100, "binary", tmp_path, [batch(CIFAR100, 4)] * 2)
    assert len(cifar.load(kind, tmp_path / "cifar-100-binary").x_train) == 4


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_a_truncated_file_is_named(layout: str, tmp_path: Path) -> None:
    kind = publish(CIFAR100, layout, tmp_path, [batch(CIFAR100, 4)] * 2)
    name = "test.bin" if layout == "binary" else "test"
    path = next(tmp_path.glob(f"cifar*/{name}"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{path} is truncated or not the published file .*md5"):
        cifar.load(kind, tmp_path)


def test_small_files_under_the_published_names_are_refused(tmp_path: Path) -> None:
    publish(CIFAR10, "binary", tmp_path, [batch(CIFAR10, 2)] * 6)
    with pytest.raises(UserError, match=r"data_batch_1.bin is truncated or not the published file"):
        cifar.load(CIFAR10, tmp_path)


@pytest.mark.parametrize("size", [0, 3072, 3074])
def test_binary_records_must_be_whole(size: int) -> None:
    with pytest.raises(UserError, match=r"x.bin has .* not a whole number of 3073-byte cifar10 records"):
        cifar.parse_binary(Path("x.bin"), np.zeros(size, np.uint8), CIFAR10)


def test_labels_must_be_in_range() -> None:
    content = np.full(3073, 10, np.uint8)
    with pytest.raises(UserError, match=r"x.bin has label 10; cifar10 has labels 0..9"):
        cifar.parse_binary(Path("x.bin"), content, CIFAR10)
    content = np.frombuffer(python(CIFAR10, np.zeros((1, 3072), np.uint8), np.array([-3])), np.uint8)
    with pytest.raises(UserError, match=r"x has label -3"):
        cifar.parse_python(Path("x"), content, CIFAR10)


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch was-here",)


@pytest.mark.parametrize(
    "content",
    [
        {b"data": Malicious(), b"labels": [1]},
        {b"data": np.zeros((1, 3072), np.float64), b"labels": [1]},
        {b"data": np.array([[Malicious()]]), b"labels": [1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [10**30]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": []},
        {b"data": [0] * 3072, b"labels": [1]},
        {b"labels": [1]},
        [1, 2, 3],
        eval,
        Path("x"),
    ],
    ids=[
        "code",
        "floats",
        "code inside",
        "too few labels",
        "huge label",
        "no labels",
        "list",
        "no data",
        "no dict",
        "function",
        "path",
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_the_unpickler_builds_nothing_but_batches(
    content: object, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = np.frombuffer(pickle.dumps(content, protocol), np.uint8)
    with pytest.raises(UserError, match=r"^x is not a batch of cifar10 in the Python layout"):
        cifar.parse_python(Path("x"), raw, CIFAR10)
    assert not Path("was-here").exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "builtins.getattr", "numpy.load", "codecs.encode"])
def test_the_unpickler_looks_nothing_up(name: str) -> None:
    module, attribute = name.split(".")
    raw = np.frombuffer(f"c{module}\n{attribute}\n(S'x'\ntR.".encode(), np.uint8)
    with pytest.raises(UserError, match=f"it asks for {module}.{attribute}"):
        cifar.parse_python(Path("x"), raw, CIFAR10)


def test_the_published_python_2_form_is_read() -> None:
    """Written opcode by opcode as Python 2's cPickle did: old module names, 8-bit strings, no unicode."""
    pixels = bytes(range(256)) * 12
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
        b"(I1\n(I1\nI3072\ntcnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\n"
        b"T" + len(pixels).to_bytes(4, "little") + pixels + b"tb"
    )
    content = b"\x80\x02}(S'data'\n" + array + b"S'labels'\n(lI7\nau."
    read, labels = cifar.parse_python(Path("x"), np.frombuffer(content, np.uint8), CIFAR10)
    assert read.tobytes() == pixels
    assert labels.tolist() == [7]


def test_a_hundred_classes_in_alphabetical_order() -> None:
    assert len(set(CIFAR100.classes)) == 100
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)


def test_images_are_standardised_by_their_train_images() -> None:
    """Means and deviations of every channel's pixels, computed once from the published files."""
    assert CIFAR10.mean == pytest.approx((0.49140, 0.48216, 0.44653), abs=1e-4)
    assert CIFAR10.std == pytest.approx((0.24703, 0.24349, 0.26159), abs=1e-4)
    assert CIFAR100.mean == pytest.approx((0.50708, 0.48655, 0.44092), abs=1e-4)
    assert CIFAR100.std == pytest.approx((0.26733, 0.25644, 0.27615), abs=1e-4)
