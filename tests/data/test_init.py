from pathlib import Path

import pytest

from manyheads import data
from manyheads.errors import UserError


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"unknown data 'cifar'\. Did you mean 'cifar10'\?.*path to your own arrays"):
        data.load("cifar")


def test_a_path_to_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file .*absent\.npz"):
        data.load(tmp_path / "absent.npz")


@pytest.mark.parametrize("name", [name for name in data.NAMES if name != "digits"])
def test_a_data_set_that_is_nowhere_says_what_to_put_where(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    monkeypatch.setattr("manyheads.data.fashion_mnist.DEBIAN", tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"^{name} was not found .*put .* into {tmp_path}.*--data-dir"):
        data.load(name, tmp_path)


def test_raw_is_said_after_a_name() -> None:
    with pytest.raises(UserError, match=r"unknown data 'digits:raw'.*cifar10:raw"):
        data.load("digits:raw")
    assert not data.is_own_file("cifar10:raw")
    assert data.is_own_file("mine.npz")


def test_data_without_a_checksum_may_change_under_their_name() -> None:
    names = {"harbox", "harbox:raw", "mobiact", "mobiact:raw", "mine.npz", "site-{worker}.npz"}
    assert {name for name in (*data.NAMES, *names, "cifar10:raw") if data.may_change(name)} == names
    assert not data.may_change(data.load("digits"))
