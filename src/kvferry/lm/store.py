"""Files under the cache directory: written whole or not at all, checked when read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from kvferry.errors import ModelUnavailableError, StorageError

MANIFEST = "kvferry.json"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


def cache_root(cache_dir: Path | str | None = None) -> Path:
    """The folder that holds converted models and extracted text.

    Order: the argument, `$KVFERRY_CACHE`, `$XDG_CACHE_HOME/kvferry`, `~/.cache/kvferry`.
    """
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    named = os.environ.get("KVFERRY_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvferry"


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk below `path` into a `StorageError`.

    Some libraries raise their own error type on a full disk, so its text is looked at as well.
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        full = number in _FULL or "No space left" in str(error)
        if not full and number not in _FORBIDDEN:
            raise
        what = "The disk is full" if full else "The folder cannot be written"
        raise StorageError(
            f"{what}: {path}",
            found=f"{_free(path)} free; {error}",
            fix="Free some space, or point KVFERRY_CACHE at a folder on another disk. "
            "Nothing half-written was left behind.",
        ) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path.lock`, so that one process writes `path` while others wait for it."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final` that becomes `final` if the body succeeds.

    Raises:
        StorageError: the disk is full or may not be written; nothing is left behind.
    """
    with storage_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        try:
            yield temporary
            # mkdtemp and safetensors write for the owner alone; a cache may be shared.
            temporary.chmod(0o755)
            for path in temporary.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            os.replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def new_file(final: Path) -> Iterator[Path]:
    """A temporary path beside `final` that becomes `final` if the body succeeds."""
    with storage_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        try:
            yield temporary
            os.replace(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, read in chunks."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(folder: Path, about: Mapping[str, object]) -> None:
    """Record size, time and sha256 of every file of `folder`, and where they came from."""
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "sha256": file_sha256(path),
        }
        for path in sorted(folder.iterdir())
    }
    content = json.dumps({"format": 1, **about, "files": files}, indent=2)
    (folder / MANIFEST).write_text(content + "\n")


def verify_manifest(folder: Path) -> None:
    """Check `folder` against its manifest: sizes always, sha256 where the time stamp changed.

    Raises:
        ModelUnavailableError: a file is missing, truncated or altered.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        recorded = manifest["files"].items()
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(folder, MANIFEST, f"unreadable ({error})", "a manifest") from error
    touched = False
    for name, entry in recorded:
        path = folder / name
        if not path.is_file():
            raise _damaged(folder, name, "missing", f"{entry['bytes']:,} bytes")
        stat = path.stat()
        if stat.st_size != entry["bytes"]:
            found = f"{stat.st_size:,} bytes"
            raise _damaged(folder, name, found, f"{entry['bytes']:,} bytes")
        if stat.st_mtime_ns != entry["mtime_ns"]:
            digest = file_sha256(path)
            if digest != entry["sha256"]:
                raise _damaged(folder, name, f"sha256 {digest}", f"sha256 {entry['sha256']}")
            entry["mtime_ns"], touched = stat.st_mtime_ns, True
    if touched and os.access(folder, os.W_OK):
        with new_file(folder / MANIFEST) as temporary:
            temporary.write_text(json.dumps(manifest, indent=2) + "\n")


def _damaged(folder: Path, name: str, found: str, expected: str) -> ModelUnavailableError:
    return ModelUnavailableError(
        f"The cached file {name} is damaged.",
        found=found,
        expected=expected,
        fix=f"Delete the folder {folder} and run again; it is then fetched anew.",
    )


def _free(path: Path) -> str:
    existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    return f"{shutil.disk_usage(existing).free / 1e6:,.0f} MB"
