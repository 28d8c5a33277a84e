"""Files and directories are written beside their target and then moved there in one step.

    .name.5f0c….saving/     beside the target
      lock                  locked while the writing process is alive
      new                   the draft
      old                   only without an atomic exchange: the old target, between two renames
      gone                  the same, while it is removed

At all times the complete old or the complete new one is at the target. Without an atomic exchange
of two directories (renameat2 of Linux) a process that is killed between two renames leaves `old`:
`surviving` finds it, and the next save moves it back. A `.saving` directory whose lock is free has
no writer, and the next save removes it. Permissions follow the umask.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: no locks, so files of other processes are not removed
    fcntl = None  # type: ignore[assignment]

MARK = ".saving"
AT_FDCWD, EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # by the kernel or by the file system
MOST_TRIES = 100


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A draft with the suffix of `path`, which replaces `path` if the block ends without an error.

    Links are followed.
    """
    target = Path(os.path.realpath(path))
    with _place(target) as place:
        draft = place / f"new{target.suffix}"
        yield draft
        os.replace(draft, target)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty directory, which replaces `path` with its content if the block ends without an
    error. Links are followed.
    """
    target = Path(os.path.realpath(path))
    with _place(target) as place:
        draft = place / "new"
        draft.mkdir()
        yield draft
        _put(draft, target, place / "old")


def surviving(path: Path) -> tuple[Path, bool]:
    """Where a directory is: at `path`, or where a save moved it; and whether the writer of that
    save has ended.
    """
    target = Path(os.path.realpath(path))
    if not target.exists():
        for place in _places(target):
            if (place / "old").is_dir():
                with _abandoned(place, create=False) as certain:
                    return place / "old", certain
    return path, False


def being_saved(path: Path) -> bool:
    """Whether there is a save to this place that has not ended."""
    return bool(_places(Path(os.path.realpath(path))))


@contextlib.contextmanager
def _place(target: Path) -> Iterator[Path]:
    """A locked directory beside the target. Remains of ended writers are removed first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for place in _places(target):
        with _abandoned(place) as certain:
            if certain:
                _leave(place, target)
    place, lock = _locked_place(target)
    with lock or contextlib.nullcontext():
        try:
            yield place
        finally:
            _leave(place, target)


def _leave(place: Path, target: Path) -> None:
    """Remove the directory; an `old` in it is first moved back to the target, unless the target
    exists.
    """
    old = place / "old"
    if old.exists() and not target.exists():
        with contextlib.suppress(OSError):  # another writer was faster
            os.rename(old, target)
    if target.exists() or not old.exists():
        with contextlib.suppress(OSError):  # an interrupt inside rmtree can raise one
            _discard(old)
            shutil.rmtree(place, ignore_errors=True)


def _discard(old: Path) -> None:
    """Remove a directory under another name, so that no reader finds it when half of it is gone."""
    gone = old.with_name("gone")
    with contextlib.suppress(OSError):  # there is none
        os.rename(old, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _put(draft: Path, target: Path, old: Path) -> None:
    """Move the draft to the target, also if other writers do the same at this moment."""
    for _ in range(MOST_TRIES):
        with contextlib.suppress(
            FileNotFoundError
        ):  # the target does not exist, or another writer has moved it
            if _exchange(draft, target):
                return
            _discard(old)  # from an earlier try; the target is complete
            os.rename(target, old)
        try:
            os.rename(draft, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    raise OSError(
        errno.EBUSY, f"other processes keep writing to it ({MOST_TRIES} tries)", str(target)
    )


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; False if the system does not support it."""
    if _renameat2 is None:
        return False
    if _renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))


_renameat2 = (
    getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if sys.platform == "linux"
    else None
)


def _places(target: Path) -> list[Path]:
    """The directories of all saves to this target, the newest first."""
    found = []
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if entry.name.startswith(f".{target.name}.") and entry.name.endswith(MARK):
                with contextlib.suppress(OSError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
    return [Path(path) for _, path in sorted(found, reverse=True)]


def _locked_place(target: Path) -> tuple[Path, IO[bytes] | None]:
    while True:
        place = target.with_name(f".{target.name}.{secrets.token_hex(8)}{MARK}")
        place.mkdir()
        with contextlib.suppress(
            BlockingIOError, FileNotFoundError
        ):  # another writer considers it abandoned and removes it
            return place, _lock(place)


@contextlib.contextmanager
def _abandoned(place: Path, create: bool = True) -> Iterator[bool]:
    """Whether its writer has certainly ended: a running writer holds the lock.

    In the block this process holds it.

    create: take the lock also where the directory has none. A writer that removes its directory
    removes the lock before the rest.
    """
    try:
        lock = _lock(place, create)
    except OSError:
        lock = None
    with lock or contextlib.nullcontext():
        yield lock is not None


def _lock(place: Path, create: bool = True) -> IO[bytes] | None:
    """An open, locked file.

    None if the system has no locks; OSError if it is locked, or the directory was removed.
    """
    if fcntl is None:
        return None
    with contextlib.ExitStack() as stack:
        file = stack.enter_context((place / "lock").open("ab" if create else "r+b"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # the file system has no locks
            return None
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
        stack.pop_all()
    return file
