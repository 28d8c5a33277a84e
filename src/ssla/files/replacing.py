"""Writes files and directories beside their target, and then moves them there in one step.

    .name.5f0c….saving/     beside the target
      lock                  locked while the writing process is alive
      new                   the draft
      old                   only without an atomic exchange: the old target, between two renames
      gone                  the same, while it is removed

At all times the complete old or the complete new one is at the target. Without an atomic exchange
of two directories (renameat2 of Linux) a process that is killed between two renames leaves `old`:
`locate_folder` finds it, and the next save moves it back. A `.saving` directory whose lock is free
has no writer, and the next save removes it. Permissions follow the umask.
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

SUFFIX = ".saving"  # of a draft folder
AT_FDCWD, EXCHANGE = -100, 2  # AT_FDCWD of linux/fcntl.h, and RENAME_EXCHANGE of linux/fs.h
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # by the kernel or by the file system
MOST_TRIES = 100  # of moving a draft while other writers do the same; a guess


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, which replaces `path` if the block ends without an error.

    The draft has the suffix of `path`, and the block must write it. Links are followed. Raises
    OSError if the folder cannot be written.
    """
    target = Path(os.path.realpath(path))
    with _make_draft_folder(target) as folder:
        draft = folder / f"new{target.suffix}"
        yield draft
        os.replace(draft, target)


@contextlib.contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield an empty directory, which replaces `path` if the block ends without an error.

    Links are followed. Raises OSError if the folder cannot be written.
    """
    target = Path(os.path.realpath(path))
    with _make_draft_folder(target) as folder:
        draft = folder / "new"
        draft.mkdir()
        yield draft
        _move_to_target(draft, target, folder / "old")


def locate_folder(path: Path) -> tuple[Path, bool]:
    """Find a directory: at `path`, or where a save has moved it.

    Returns where it is, and whether that save was interrupted: its writer has ended. If there is no
    directory, the result is (path, False).
    """
    target = Path(os.path.realpath(path))
    if not target.exists():
        for folder in _list_draft_folders(target):
            if (folder / "old").is_dir():
                # Finding a directory must not make files in it.
                with _lock_if_abandoned(folder, create=False) as is_abandoned:
                    return folder / "old", is_abandoned
    return path, False


def is_being_saved(path: Path) -> bool:
    """Return whether a save to this path is running, or was interrupted."""
    return bool(_list_draft_folders(Path(os.path.realpath(path))))


@contextlib.contextmanager
def _make_draft_folder(target: Path) -> Iterator[Path]:
    """Make a locked draft folder beside the target, and remove it after the block.

    Draft folders of writers that have ended are removed first. Raises OSError if the folder cannot
    be made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in _list_draft_folders(target):
        with _lock_if_abandoned(folder) as is_abandoned:
            if is_abandoned:
                _remove_draft_folder(folder, target)

    folder, lock = _make_locked_folder(target)
    with lock or contextlib.nullcontext():
        try:
            yield folder
        finally:
            _remove_draft_folder(folder, target)


def _remove_draft_folder(folder: Path, target: Path) -> None:
    """Remove a draft folder; an `old` in it is first moved back, unless the target exists.

    Nothing is raised: what cannot be removed stays.
    """
    old = folder / "old"
    if old.exists() and not target.exists():
        with contextlib.suppress(OSError):  # another writer was faster
            os.rename(old, target)
    # Without a target, `old` is the only copy: it stays.
    if target.exists() or not old.exists():
        with contextlib.suppress(OSError):  # an interrupt inside rmtree can raise one
            _discard_folder(old)
            shutil.rmtree(folder, ignore_errors=True)


def _discard_folder(old: Path) -> None:
    """Remove a directory under another name, so that no reader finds it half removed.

    Nothing is raised, also if there is no such directory. old: the directory.
    """
    gone = old.with_name("gone")
    with contextlib.suppress(OSError):  # there is none
        os.rename(old, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _move_to_target(draft: Path, target: Path, old: Path) -> None:
    """Move the directory `draft` to the target, also if other writers do the same at this moment.

    old: where the old target is between two renames, if the system cannot exchange directories in
    one step. Raises OSError if the draft cannot be moved, or after too many tries.
    """
    for _ in range(MOST_TRIES):
        # FileNotFoundError: the target does not exist, or another writer has moved it.
        with contextlib.suppress(FileNotFoundError):
            if _exchange_folders(draft, target):
                return
            _discard_folder(old)  # from an earlier try; the target is complete
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


def _exchange_folders(first: Path, second: Path) -> bool:
    """Exchange two directories in one step, and return True; False if the system cannot do this.

    Raises OSError if it fails for another reason.
    """
    if _renameat2 is None:
        return False
    if _renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(second))


# The function of Linux that exchanges two directories; None elsewhere, and in old libraries.
_renameat2 = (
    getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if sys.platform == "linux"
    else None
)


def _list_draft_folders(target: Path) -> list[Path]:
    """Return the draft folders of all saves to this target, the newest first."""
    dated = []
    # An entry, or the parent itself, may be removed while it is listed.
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if entry.name.startswith(f".{target.name}.") and entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):
                    dated.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
    return [Path(path) for _, path in sorted(dated, reverse=True)]


def _make_locked_folder(target: Path) -> tuple[Path, IO[bytes] | None]:
    """Make a draft folder, lock it, and return it with its lock; None if the system has no locks.

    Raises OSError if the folder cannot be made. target: the file or directory that the draft will
    replace.
    """
    while True:
        folder = target.with_name(f".{target.name}.{secrets.token_hex(8)}{SUFFIX}")
        folder.mkdir()
        # Another writer may take the new folder for one of an ended writer, and lock or remove it.
        # Then the next round makes another.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            return folder, _lock_folder(folder)


@contextlib.contextmanager
def _lock_if_abandoned(folder: Path, create: bool = True) -> Iterator[bool]:
    """Lock a draft folder for the block, and yield whether its writer has certainly ended.

    A running writer holds the lock. The answer is False, without a lock, if the folder cannot be
    locked or the system has no locks. create: whether a missing lock file is made. With False,
    a folder without one counts as still in use, because its writer may be removing it.
    """
    try:
        lock = _lock_folder(folder, create)
    except OSError:
        # The folder has been removed, or its file cannot be written or locked. The writer may
        # still be running then, so the answer is False.
        lock = None
    with lock or contextlib.nullcontext():
        yield lock is not None


def _lock_folder(folder: Path, create: bool = True) -> IO[bytes] | None:
    """Open and lock the file `lock` of a draft folder, and return it: it is locked while open.

    create: whether a missing file is made. Returns None if the system has no locks. Raises OSError
    if another process has locked it, or the folder was removed.
    """
    if fcntl is None:
        return None
    with contextlib.ExitStack() as stack:
        file = stack.enter_context((folder / "lock").open("ab" if create else "r+b"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # the file system has no locks
            return None

        # Another process may have removed the file after it was opened and before it was locked: a
        # lock on it would protect nothing.
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        stack.pop_all()  # the file stays open

    return file
