"""Data files: looked for in three places, else downloaded; checked against their checksums and safely unpacked."""

import hashlib
import os
import shlex
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path

import numpy as np

from manyheads.errors import UserError
from manyheads.files import disk_errors, replacing
from manyheads.machine import expanded

DownloadProgress = Callable[[str, int, int | None], None]
"""Called while a file is downloaded: its name, the bytes so far, and the bytes in all (None: not known)."""

_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 10.0
_MAX_DOWNLOAD = 1 << 29
_MAX_MEMBER = 1 << 28


@dataclass(frozen=True)
class Download:
    """One file at its official address."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]

    @property
    def is_archive(self) -> bool:
        return self.name.endswith(".tar.gz")


@dataclass(frozen=True)
class Layout:
    """One published form of a data set: its folder, the files in it, and where they come from."""

    folder: str
    md5: Mapping[str, str]
    """File name -> md5 of what the file holds."""
    downloads: tuple[Download, ...]
    """The files themselves, or an archive of the folder."""
    package: str = ""
    """What Debian calls them."""


def search_path(data_dir: str | Path | None) -> list[Path]:
    """The folders data are looked for in: the one given, then $MANYHEADS_DATA, then the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "manyheads")
    named = [Path(folder) for folder in (data_dir, os.environ.get("MANYHEADS_DATA")) if folder]
    return [*map(expanded, (*named, cache))]


def find(folders: Iterable[Path], subfolder: str, names: Collection[str]) -> Path | None:
    """The first of the folders, or of their subfolders of that name, that holds all the names."""
    places = (place for folder in folders for place in (folder / subfolder, folder))
    return next((place for place in places if all((place / name).exists() for name in names)), None)


def obtain(
    data: str,
    layouts: Sequence[Layout],
    data_dir: str | Path | None,
    progress: DownloadProgress | None,
    *,
    also: Sequence[Path] = (),
) -> tuple[Layout, Path]:
    """One of the layouts and the folder it lies in: found, else unpacked from its archive, else downloaded.

    ``also`` names further folders to look in, after the usual ones.
    """
    folders = search_path(data_dir)
    for layout in layouts:
        if place := find([*folders, *also], layout.folder, layout.md5.keys()):
            return layout, place
    for layout in layouts:
        for archive in (download for download in layout.downloads if download.is_archive):
            if home := find(folders, ".", [archive.name]):
                read(home / archive.name, archive.md5)
                return layout, unpack(home / archive.name, home / layout.folder, layout.md5.keys())
    layout, place = layouts[0], folders[0] / layouts[0].folder
    try:
        for download in layout.downloads:
            _fetch(download, layout, place, progress)
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        what = f"put {', '.join(layout.md5)} into {place}"
        if layout.package:
            what = f"on Debian run apt-get install {layout.package}, or {what}"
        for archive in (download for download in layout.downloads if download.is_archive):
            fetch = shlex.join(["curl", "-L", "--create-dirs", "-o", str(place.parent / archive.name), archive.url])
            what = f"where there is a network run {fetch}, or {what}"
        raise missing(data, f"could not be downloaded ({reason})", what) from None
    return layout, place


def missing(data: str, why: str, what: str) -> UserError:
    """The one line that says what to do: ``missing("toys", "has no download", "put a.bin into /data")``."""
    return UserError(
        f"{data} was not found and {why}: {what}, or name the folder that holds them with --data-dir or MANYHEADS_DATA."
    )


def read(path: Path, md5: str) -> np.ndarray:
    """The bytes of a file, [size] uint8, that must be the published ones."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): restore its permissions or replace it.") from None
    check_md5(path, content.data, md5)
    return content


def check_md5(path: Path, content: memoryview | bytes, md5: str) -> None:
    """Refuse content that is not the published one."""
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise UserError(
            f"{path} is truncated or not the published file ({len(content)} bytes, md5 {found}, expected {md5}): "
            "delete it to have it downloaded again, or put the published file there."
        )


def unpack(archive: Path, folder: Path, names: Collection[str]) -> Path:
    """Write the named members of an archive of ``folder`` into it, and nothing else; returns the folder."""
    # Members are matched against the names we expect and written under those: no path of the archive is ever used.
    wanted = {f"{folder.name}/{name}": folder / name for name in names}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.isfile() and member.name in wanted and member.size <= _MAX_MEMBER:
                    source = tar.extractfile(member)
                    assert source is not None, "a regular file has content"
                    with replacing(_in_folder(wanted.pop(member.name))) as target:
                        shutil.copyfileobj(source, target)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise UserError(
            f"cannot unpack {archive} into {folder} ({error}): replace the archive or clear the folder."
        ) from None
    if wanted:
        raise UserError(f"{archive} lacks {', '.join(sorted(wanted))}: put the published archive there.")
    return folder


def _in_folder(path: Path) -> Path:
    """The path itself, after making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _fetch(download: Download, layout: Layout, place: Path, progress: DownloadProgress | None) -> None:
    """Download into ``place``, or next to it and unpack; nothing is left behind when that fails."""
    target = place.parent / download.name if download.is_archive else place / download.name
    digest, done = hashlib.md5(usedforsecurity=False), 0
    with (
        urllib.request.urlopen(download.url, timeout=_TIMEOUT_SECONDS) as source,
        disk_errors(target),
        replacing(_in_folder(target)) as file,
    ):
        length = source.headers.get("Content-Length")
        while (chunk := _received(source)) and done <= _MAX_DOWNLOAD:
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(download.name, done, int(length) if length else None)
        if digest.hexdigest() != download.md5:
            raise UserError(
                f"{download.url} gave a file with a wrong checksum ({done} bytes, md5 {digest.hexdigest()}, expected "
                f"{download.md5}): try again later, or put {', '.join(layout.md5)} into {place} yourself."
            )
    if download.is_archive:
        unpack(target, place, layout.md5.keys())
        target.unlink()


def _received(source: HTTPResponse) -> bytes:
    """The next bytes. A network error becomes an HTTPException, so that it is not reported as one of the disk."""
    try:
        return source.read(_CHUNK)
    except OSError as error:
        raise HTTPException(str(error)) from error
