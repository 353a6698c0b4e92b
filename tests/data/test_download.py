import hashlib
import io
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from manyheads.data import download
from manyheads.data.download import Download, Layout
from manyheads.errors import UserError

CONTENT = {"a.bin": b"first" * 1000, "b.bin": b"second" * 1000}
MD5 = {name: hashlib.md5(content).hexdigest() for name, content in CONTENT.items()}


def pack(path: Path, members: dict[str, bytes], extra: Callable[[tarfile.TarFile], None] | None = None) -> str:
    """Write a tar.gz; returns its md5."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if extra is not None:
            extra(tar)
    return hashlib.md5(path.read_bytes()).hexdigest()


def archive_layout(folder: Path) -> Layout:
    """A layout whose 'official address' is an archive in a folder of this machine."""
    folder.mkdir(exist_ok=True)
    path = folder / "set.tar.gz"
    md5 = pack(path, {f"set/{name}": content for name, content in CONTENT.items()} | {"set/readme.html": b"hello"})
    return Layout("set", MD5, (Download(path.as_uri(), md5),))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_folders_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHEADS_DATA", str(tmp_path / "shared"))
    given, shared, cache = download.search_path(tmp_path / "given")
    assert (given, shared, cache) == (tmp_path / "given", tmp_path / "shared", tmp_path / "cache" / "manyheads")
    for folder in (cache, shared, given):
        (folder / "set").mkdir(parents=True)
        (folder / "set" / "a.bin").write_bytes(b"")
        assert download.find((given, shared, cache), "set", ["a.bin"]) == folder / "set"


def test_a_folder_with_a_file_missing_is_passed_over(tmp_path: Path) -> None:
    for name, held in {"one": ["a.bin"], "two": ["a.bin", "b.bin"]}.items():
        (tmp_path / name).mkdir()
        for file in held:
            (tmp_path / name / file).write_bytes(b"")
    assert download.find([tmp_path / "one", tmp_path / "two"], "set", ["a.bin", "b.bin"]) == tmp_path / "two"


def test_download_unpacks_reports_and_leaves_nothing_else(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int | None]] = []
    layout = archive_layout(tmp_path / "official")
    found, place = download.obtain("set", [layout], tmp_path / "data", lambda *call: calls.append(call))
    assert found is layout and place == tmp_path / "data" / "set"
    assert {name: (place / name).read_bytes() for name in MD5} == CONTENT
    assert leftovers(tmp_path / "data") == ["a.bin", "b.bin"]
    size = (tmp_path / "official" / "set.tar.gz").stat().st_size
    assert calls[-1] == ("set.tar.gz", size, size)


def test_download_of_single_files(tmp_path: Path) -> None:
    (tmp_path / "official").mkdir()
    for name, content in CONTENT.items():
        (tmp_path / "official" / name).write_bytes(content)
    downloads = tuple(Download((tmp_path / "official" / name).as_uri(), md5) for name, md5 in MD5.items())
    place = tmp_path / "cache" / "manyheads" / "set"
    # One of them, put in the folder above, is neither enough nor an archive of all.
    place.parent.mkdir(parents=True)
    (place.parent / "a.bin").write_bytes(CONTENT["a.bin"])
    assert download.obtain("set", [Layout("set", MD5, downloads)], None, None)[1] == place
    assert {name: (place / name).read_bytes() for name in MD5} == CONTENT


def test_an_archive_put_by_hand_is_unpacked_and_kept(tmp_path: Path) -> None:
    layout = archive_layout(tmp_path / "data")
    offline = Layout(
        layout.folder, layout.md5, (Download("https://nowhere.invalid/set.tar.gz", layout.downloads[0].md5),)
    )
    _, place = download.obtain("set", [offline], tmp_path / "data", None)
    assert place == tmp_path / "data" / "set"
    assert leftovers(tmp_path / "data") == ["a.bin", "b.bin", "set.tar.gz"]


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path: Path) -> None:
    layout = archive_layout(tmp_path / "official")
    wrong = Layout(layout.folder, layout.md5, (Download(layout.downloads[0].url, "0" * 32),))
    with pytest.raises(UserError, match=r"set\.tar\.gz gave a file with a wrong checksum") as caught:
        download.obtain("set", [wrong], tmp_path / "data", None)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path / "data") == []


def test_without_a_network_one_line_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    layout = Layout("set", MD5, (Download("https://nowhere.invalid/set.tar.gz", "0" * 32),))
    with pytest.raises(UserError) as caught:
        download.obtain("toys", [layout], tmp_path / "data", None)
    message = str(caught.value)
    assert message.startswith("toys was not found and could not be downloaded (")
    assert f"put a.bin, b.bin into {tmp_path / 'data' / 'set'}" in message
    archive = tmp_path / "data" / "set.tar.gz"
    assert f"run curl -L --create-dirs -o {archive} https://nowhere.invalid/set.tar.gz, or" in message
    assert "Name or service not known" in message and "\n" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [TimeoutError("timed out"), ConnectionResetError(104, "Connection reset by peer")])
def test_a_network_that_fails_on_the_way_is_not_taken_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    class Failing(io.BytesIO):
        headers: ClassVar = {"Content-Length": "9"}

        def read(self, size: int | None = -1) -> bytes:
            if not (content := super().read(size)):
                raise error
            return content

    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Failing(b"half"))
    with pytest.raises(UserError, match=rf"could not be downloaded \(.*{error.strerror or error}\): where"):
        download.obtain("set", [archive_layout(tmp_path / "official")], tmp_path / "data", None)
    assert leftovers(tmp_path / "data") == []


def test_a_download_is_cut_off_at_the_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_CHUNK", 16)
    monkeypatch.setattr(download, "_MAX_DOWNLOAD", 64)
    with pytest.raises(UserError, match=r"\(80 bytes"):
        download.obtain("set", [archive_layout(tmp_path / "official")], tmp_path / "data", None)
    assert leftovers(tmp_path / "data") == []


def test_unpack_writes_only_the_expected_names(tmp_path: Path) -> None:
    def links(tar: tarfile.TarFile) -> None:
        link = tarfile.TarInfo("set/b.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)

    hostile = {
        "../outside": b"x",
        "/absolute": b"x",
        "set/../../outside": b"x",
        "other/a.bin": b"x",
        "set/a.bin": b"good",
    }
    pack(tmp_path / "set.tar.gz", hostile, links)
    with pytest.raises(UserError, match=r"set\.tar\.gz lacks set/b\.bin"):
        download.unpack(tmp_path / "set.tar.gz", tmp_path / "data" / "set", ["a.bin", "b.bin"])
    assert leftovers(tmp_path) == ["a.bin", "set.tar.gz"]
    assert (tmp_path / "data" / "set" / "a.bin").read_bytes() == b"good"


def test_unpack_refuses_members_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_MAX_MEMBER", 10)
    pack(tmp_path / "set.tar.gz", {"set/a.bin": b"x" * 11})
    with pytest.raises(UserError, match=r"lacks"):
        download.unpack(tmp_path / "set.tar.gz", tmp_path / "set", ["a.bin"])


@pytest.mark.parametrize("keep", [0, 15, 60])
def test_a_damaged_archive_is_named(tmp_path: Path, keep: int) -> None:
    pack(tmp_path / "set.tar.gz", {f"set/{name}": content for name, content in CONTENT.items()})
    (tmp_path / "set.tar.gz").write_bytes((tmp_path / "set.tar.gz").read_bytes()[:keep])
    with pytest.raises(UserError, match=r"cannot unpack .*set\.tar\.gz"):
        download.unpack(tmp_path / "set.tar.gz", tmp_path / "set", list(CONTENT))
    assert not list(tmp_path.rglob("*.part"))


def test_read_names_a_file_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"cannot read {tmp_path}"):
        download.read(tmp_path, "0" * 32)


def test_replacing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), download.replacing(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    with download.replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert leftovers(tmp_path) == ["file"]
