"""The directory of a saved model: written completely or not at all, and validated on load."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ssla._checks import warn
from ssla.files.replacing import being_saved, new_folder, surviving

FORMAT, VERSION = "ssla", 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
LARGEST_MANIFEST = 256 << 20
MOST_TRIES = 20
CHECKS, PAUSE = 10, 0.03  # seconds: a rename takes less, also on a busy machine
COPIES = 4  # of the tensors that are in memory at once while they are written or read


class FileError(ValueError):
    """A saved model that cannot be used: missing, not from ssla, damaged, too new, or for
    another network.
    """


def write(
    path: str | os.PathLike[str],
    kind: str,
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> Path:
    """Write the directory beside the target, then move it there.

    The old one stays until the new one is complete.
    """
    target = Path(path)
    check_target(target)
    with enough_memory(
        COPIES * sum(value.nbytes for value in tensors.values()), f"Saving {target}"
    ):
        data = _serialized(tensors)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "tensors": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "content": content,
    }
    manifest["sha256"] = _digest(manifest)
    text = json.dumps(manifest, indent=1, allow_nan=False)
    try:
        with new_folder(target) as fresh:
            _write_bytes(fresh / TENSORS, data)
            _write_bytes(fresh / MANIFEST, text.encode())
    except OSError as error:
        raise FileError(
            f"{target} cannot be written ({error}). Nothing was changed. Give a folder with write "
            "permission."
        ) from error
    return target


def _serialized(tensors: Mapping[str, Tensor]) -> bytes:
    copies = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    data: bytes = _safetensors().save(copies)
    return data


@contextlib.contextmanager
def enough_memory(size: int, what: str) -> Iterator[None]:
    """MemoryError where `size` bytes cannot be allocated: safetensors would end the process
    there.
    """
    try:
        bytearray(size)
        yield
    except MemoryError as error:
        raise MemoryError(
            f"{what} needs about {size / 2**20:,.0f} MiB of memory, which this process cannot "
            "have. Nothing was changed. Free memory, or raise its limit (ulimit -v)."
        ) from error


def check_target(target: Path) -> None:
    """Refuse what is not ours.

    Each question is asked once: another writer may replace the directory between two of them.
    """
    try:
        names = os.listdir(target)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        if not target.exists():  # below a file: the attempt to write will say so
            return
        raise FileError(
            f"{target} is a file, but a saved model is a directory. Give another path."
        ) from None
    if names and MANIFEST not in names:
        raise FileError(
            f"{target} is a directory with other files, which are not overwritten. Give another "
            "path."
        )
    if os.path.realpath(target) == os.path.realpath("."):
        raise FileError(
            f"{target} is the current directory, which is not replaced. Give another path."
        )


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content and tensors of a directory, after every check that needs no network.

    If a save replaces the directory while it is read, it is read again.
    """
    for _ in range(MOST_TRIES):
        source, interrupted = surviving(Path(path))
        before = _generation(source)
        try:
            found = _read(source, kind)
        except FileError as error:
            fault = error
            after = _generation(surviving(Path(path))[0])
            if after == before and not (
                after is None and being_saved(Path(path))
            ):  # between two renames there is none
                break
            continue
        if interrupted and not _stays(Path(path), source):  # a writer was alive, and has gone on
            fault = FileError(f"{path} is replaced all the time. Try again later.")
            continue
        if interrupted:
            warn(
                f"The last save to {path} was interrupted. The model that was there before is read "
                f"from {source}. Save the model again, or move that directory back."
            )
        return found
    raise fault


def _stays(path: Path, source: Path) -> bool:
    """Whether the model of an interrupted save stays where it is for a while: another writer
    may be about to replace it.
    """
    for _ in range(CHECKS):
        if surviving(path) != (source, True):
            return False
        time.sleep(PAUSE)
    return surviving(path) == (source, True)


def _generation(source: Path) -> tuple[Path, int, int] | None:
    """A value that changes if a save replaces the directory."""
    try:
        state = source.stat()
    except OSError:
        return None
    return source, state.st_ino, state.st_ctime_ns


def kind_of(path: str | os.PathLike[str]) -> str:
    """What a directory holds: "posterior" or "estimator"."""
    source = surviving(Path(path))[0]
    with guarded(source):
        return str(_manifest(source).get("kind"))


def _read(source: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with guarded(source):
        manifest = _manifest(source)
        found = manifest.get("kind")
        if found != kind:
            raise FileError(
                f"{source} holds a saved {found!r}, but a {kind!r} was expected. {_LOADERS}"
            )
        return manifest["content"], _tensors(source, manifest["tensors"])


_LOADERS = "ssla.load(path, model) opens a posterior, ssla.sklearn.load(path) an estimator."


def _manifest(source: Path) -> dict[str, Any]:
    if not source.exists():
        raise FileError(f"There is no saved model at {source}.")
    if not source.is_dir():
        raise FileError(
            f"{source} is a file, but a saved model is a directory with {MANIFEST} in it."
        )
    file = source / MANIFEST
    if not file.is_file():
        raise FileError(f"{source} is not a saved model: it has no {MANIFEST}.")
    if file.stat().st_size > LARGEST_MANIFEST:
        raise FileError(f"{file} is not a manifest: it is {file.stat().st_size:,} bytes long.")
    try:
        manifest = json.loads(file.read_bytes().decode("utf-8"), parse_constant=_no_constants)
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{file} is damaged: it is not valid JSON ({str(error)[:80]}). Save the model again."
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FileError(f"{file} was not written by ssla.")
    version = manifest.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileError(f"{file} is damaged: its version is {version!r}.")
    if version > VERSION:
        raise FileError(
            f"{source} was written by a newer ssla (format {version}; this one reads up to "
            f"{VERSION}). Update ssla."
        )
    stated = manifest.pop("sha256", None)
    if stated != _digest(manifest):
        raise FileError(
            f"{file} is damaged or was edited: its checksum does not match. Save the model again."
        )
    return manifest


def _tensors(source: Path, stated: Mapping[str, Any]) -> dict[str, Tensor]:
    file = source / TENSORS
    if not file.is_file():
        raise FileError(f"{source} is incomplete: it has no {TENSORS}. Copy the whole directory.")
    size = file.stat().st_size
    if size != stated["bytes"]:
        word = "truncated" if size < stated["bytes"] else "too long"
        raise FileError(f"{file} is {word}: {size:,} of {stated['bytes']:,} bytes. Copy it again.")
    with enough_memory(COPIES * size, f"Reading {file}"):
        data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != stated["sha256"]:
        raise FileError(f"{file} is damaged: its checksum does not match. Copy it again.")
    tensors: dict[str, Tensor] = _safetensors().load(data)
    return tensors


@contextlib.contextmanager
def guarded(source: Path) -> Iterator[None]:
    """Turns any exception from a bad file into a FileError."""
    try:
        yield
    except FileError:
        raise
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise FileError(
            f"{source} does not hold a usable model ({type(error).__name__}: {str(error)[:200]})."
        ) from error


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def _no_constants(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "Saving and loading need safetensors: pip install 'ssla[files]'."
        ) from None
    return safetensors.torch
