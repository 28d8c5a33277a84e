"""The directory of a saved model: written completely or not at all, and validated on load.

The manifest is a JSON file with the kind of the model ("posterior" or "estimator"), the version of
the format, the content (everything that is not a tensor) and checksums. A folder may be replaced by
another process at any time, also while it is read: see `replacing`.
"""

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
from ssla.files.replacing import is_being_saved, locate_folder, replace_folder

FORMAT, VERSION = "ssla", 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
LARGEST_MANIFEST = 256 << 20  # bytes; a guess
MOST_TRIES = 20  # of reading a directory that is replaced meanwhile; a guess
# How often, and after how many seconds each time, a directory is looked for again. A rename takes
# less time in all, also on a busy machine. Guesses.
CHECKS, PAUSE = 10, 0.03
COPIES = 4  # of the tensors that are in memory at once while they are written or read; a guess
LOADERS = "ssla.load(path, model) opens a posterior, ssla.sklearn.load(path) an estimator."


class FileError(ValueError):
    """A saved model that cannot be used.

    The model is missing, not from ssla, damaged, too new, or for another network.
    """


def write_model(
    path: str | os.PathLike[str],
    model_kind: str,
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> Path:
    """Write a saved model to the directory `path`, and return the path.

    model_kind: what it holds, "posterior" or "estimator". content: values that JSON can hold. An
    old directory stays until the new one is complete. Raises FileError if the path cannot be
    written or replaced, and MemoryError if the copies of the tensors do not fit.
    """
    target = Path(path)
    check_target(target)
    with require_memory(
        COPIES * sum(value.nbytes for value in tensors.values()), f"Saving {target}"
    ):
        data = _serialize(tensors)

    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "kind": model_kind,
        "tensors": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "content": content,
    }
    manifest["sha256"] = _compute_checksum(manifest)
    text = json.dumps(manifest, indent=1, allow_nan=False)
    try:
        with replace_folder(target) as draft:
            _write_bytes(draft / TENSORS, data)
            _write_bytes(draft / MANIFEST, text.encode())
    except OSError as error:
        raise FileError(
            f"{target} cannot be written ({error}). Nothing was changed. Give a folder with write "
            "permission."
        ) from error

    return target


def _serialize(tensors: Mapping[str, Tensor]) -> bytes:
    """Return named tensors of any shape as bytes in the format of safetensors."""
    # safetensors refuses tensors that share memory or are not contiguous, so it gets copies.
    copies = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
    }
    data: bytes = _import_safetensors().save(copies)
    return data


@contextlib.contextmanager
def require_memory(size: int, task: str) -> Iterator[None]:
    """Raise MemoryError before or in the block if it needs more memory than there is.

    size: the bytes that the block needs. They are allocated and freed before it, because
    safetensors ends the process if memory runs out. task: the work, for the error.
    """
    try:
        bytearray(size)
        yield
    except MemoryError as error:
        raise MemoryError(
            f"{task} needs about {size / 2**20:,.0f} MiB of memory, which this process cannot "
            "have. Nothing was changed. Free memory, or raise its limit (ulimit -v)."
        ) from error


def check_target(target: Path) -> None:
    """Raise FileError if a save must not replace `target`.

    This is so for a file, a directory with other files, and the current directory. Nothing is read
    twice, because another writer may replace the directory in between.
    """
    try:
        names = os.listdir(target)
    except FileNotFoundError:  # nothing is replaced
        return
    except NotADirectoryError:
        if not target.exists():  # it is below a file: the attempt to write raises an error
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
    """Write a file, and wait until it is on the disk, so that a power cut does not lose it.

    path: of the file, whose folder exists. Raises OSError if it cannot be written.
    """
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_model(
    path: str | os.PathLike[str], model_kind: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content and tensors of a saved model, after every check that needs no network.

    model_kind: what it must hold, "posterior" or "estimator". If a save replaces the directory
    while it is read, it is read again. The model before an interrupted save is read with a warning.
    Raises FileError for a directory that does not hold an undamaged model of this kind.
    """
    target = Path(path)
    for _ in range(MOST_TRIES):
        source, was_interrupted = locate_folder(target)
        before = _identify_folder(source)
        try:
            content_and_tensors = _read_folder(source, model_kind)
        except FileError as error:
            fault = error
            after = _identify_folder(locate_folder(target)[0])
            # Between the two renames of a save there is no directory: that is no fault.
            between_renames = after is None and is_being_saved(target)
            if after == before and not between_renames:
                break
            continue

        if not was_interrupted:
            return content_and_tensors
        if _stays_after_wait(target, source):
            warn(
                f"The last save to {path} was interrupted. The model that was there before is read "
                f"from {source}. Save the model again, or move that directory back."
            )
            return content_and_tensors

        # The writer has not ended: it has replaced the directory in the meantime.
        fault = FileError(f"{path} is replaced all the time. Try again later.")

    raise fault


def _stays_after_wait(path: Path, source: Path) -> bool:
    """Wait a while, and return whether the folder `source` then still has the model.

    The model is the one before an interrupted save to `path`. Another writer may be about to
    replace it. The wait ends when it is gone.
    """
    for _ in range(CHECKS):
        if locate_folder(path) != (source, True):
            return False
        time.sleep(PAUSE)
    return locate_folder(path) == (source, True)


def _identify_folder(source: Path) -> tuple[Path, int, int] | None:
    """Return a value that changes if a save replaces the directory; None without a directory."""
    try:
        state = source.stat()
    except OSError:
        return None
    return source, state.st_ino, state.st_ctime_ns


def read_model_kind(path: str | os.PathLike[str]) -> str:
    """Return what a saved model is, "posterior" or "estimator".

    Raises FileError for a damaged one.
    """
    source = locate_folder(Path(path))[0]
    with convert_to_file_error(source):
        return str(_read_manifest(source).get("kind"))


def _read_folder(source: Path, model_kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content and tensors of a directory, without a second try.

    Raises FileError for a damaged directory, or a model of another kind.
    """
    with convert_to_file_error(source):
        manifest = _read_manifest(source)
        stored_kind = manifest.get("kind")
        if stored_kind != model_kind:
            raise FileError(
                f"{source} holds a saved {stored_kind!r}, but a {model_kind!r} was expected. "
                f"{LOADERS}"
            )
        return manifest["content"], _read_tensors(source, manifest["tensors"])


def _read_manifest(source: Path) -> dict[str, Any]:
    """Return the manifest of a saved model, less its checksum.

    Raises FileError for one that is missing, damaged, not of ssla, or too new.
    """
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
        manifest = json.loads(file.read_bytes().decode("utf-8"), parse_constant=_refuse_constant)
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
    if stated != _compute_checksum(manifest):
        raise FileError(
            f"{file} is damaged or was edited: its checksum does not match. Save the model again."
        )

    return manifest


def _read_tensors(source: Path, stated: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a saved model by name.

    stated: the size and the checksum of their file, from the manifest. Raises FileError if the file
    has others, and MemoryError if it does not fit.
    """
    file = source / TENSORS
    if not file.is_file():
        raise FileError(f"{source} is incomplete: it has no {TENSORS}. Copy the whole directory.")
    size = file.stat().st_size
    if size != stated["bytes"]:
        word = "truncated" if size < stated["bytes"] else "too long"
        raise FileError(f"{file} is {word}: {size:,} of {stated['bytes']:,} bytes. Copy it again.")
    with require_memory(COPIES * size, f"Reading {file}"):
        data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != stated["sha256"]:
        raise FileError(f"{file} is damaged: its checksum does not match. Copy it again.")
    tensors: dict[str, Tensor] = _import_safetensors().load(data)
    return tensors


@contextlib.contextmanager
def convert_to_file_error(source: Path) -> Iterator[None]:
    """Raise FileError in place of any exception in the block, which reads the file `source`.

    A bad file can cause any exception. FileError, ImportError and MemoryError pass.
    """
    try:
        yield
    except (FileError, ImportError, MemoryError):
        raise
    except Exception as error:
        raise FileError(
            f"{source} does not hold a usable model ({type(error).__name__}: {str(error)[:200]})."
        ) from error


def _compute_checksum(manifest: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest (without a checksum in it), for any order of its keys."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and infinities, which Python's parser accepts and JSON does not."""
    raise ValueError(f"{name} is not a number")


def _import_safetensors() -> ModuleType:
    """Return the module safetensors.torch.

    Raises ImportError with the remedy where it is missing.
    """
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "Saving and loading need safetensors: pip install 'ssla[files]'."
        ) from None
    return safetensors.torch
