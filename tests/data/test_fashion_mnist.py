import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from manyheads.data import fashion_mnist
from manyheads.data.download import Layout
from manyheads.errors import UserError


def idx(array: np.ndarray) -> bytes:
    """The published format."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """Four small files in the published format, and the layout that expects them."""
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "nowhere")
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 256, (7, 28, 28), np.uint8),
        np.array([0, 1, 2, 3, 4, 5, 9], np.uint8),
        rng.integers(0, 256, (3, 28, 28), np.uint8),
        np.array([6, 7, 8], np.uint8),
    ]
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    md5 = {}
    for name, array in zip(fashion_mnist.LAYOUT.md5, arrays, strict=True):
        content = idx(array)
        (folder / name).write_bytes(gzip.compress(content))
        md5[name] = hashlib.md5(content).hexdigest()
    return Layout("fashion-mnist", md5, ())


def test_images_are_framed_and_normalised(tmp_path: Path, published: Layout) -> None:
    data = fashion_mnist.load(tmp_path, layout=published)
    assert data.x_train.shape == (7, 1, 32, 32) and data.x_test.shape == (3, 1, 32, 32)
    assert data.y_train.tolist() == [0, 1, 2, 3, 4, 5, 9]
    pixels = data.x_train * fashion_mnist.STD + fashion_mnist.MEAN
    assert pixels[:, :, :2].abs().max() < 1e-6
    assert pixels[:, :, :, 30:].abs().max() < 1e-6
    first = np.frombuffer(
        gzip.decompress((tmp_path / "fashion-mnist/train-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8
    )
    assert np.allclose(pixels[0, 0, 2:30, 2:30].numpy() * 255, first[:784].reshape(28, 28), atol=1e-3)
    raw = fashion_mnist.load(tmp_path, layout=published, standardised=False)
    assert np.allclose(raw.x_train, pixels, atol=1e-6)
    assert data.pixels is not None and raw.pixels is not None
    assert np.array_equal(data.pixels.to_inputs_((raw.x_train * 255).round()), data.x_train)
    assert np.array_equal(raw.pixels.to_inputs_((raw.x_train * 255).round()), raw.x_train)


def test_a_file_of_other_content_is_named(tmp_path: Path, published: Layout) -> None:
    path = tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.array([1, 1, 1], np.uint8))))
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte.gz is truncated or not the published file"):
        fashion_mnist.load(tmp_path, layout=published)


@pytest.mark.parametrize("keep", [0, 5, 30])
def test_a_truncated_file_is_named(tmp_path: Path, published: Layout, keep: int) -> None:
    path = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz is truncated or"):
        fashion_mnist.load(tmp_path, layout=published)


def test_not_gzip_is_named(tmp_path: Path, published: Layout) -> None:
    path = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(UserError, match=r"not a gzip file"):
        fashion_mnist.load(tmp_path, layout=published)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        b"\0\0\x0d\1\0\0\0\4" + bytes(4),
        b"\0\0\x08\3" + bytes(5),
        idx(np.zeros((2, 3), np.uint8))[:-1],
        b"\0\0\x08\0",
    ],
)
def test_idx_headers_are_checked(content: bytes) -> None:
    with pytest.raises(UserError, match=r"^some.gz"):
        fashion_mnist.parse_idx(Path("some.gz"), content)


def test_images_are_standardised_by_their_train_images() -> None:
    """Mean and deviation of all pixels, computed once from the published file."""
    pixels = (fashion_mnist.MEAN, fashion_mnist.STD)
    assert pixels == pytest.approx((0.28604, 0.35302), abs=1e-4)
