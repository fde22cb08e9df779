"""The folder of compiled kernels: one that only this user, or root, can write to, or none. Kept kernels are machine
code that is loaded unchecked. Code from a folder that others can write to is never loaded."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import stat
import time
import warnings
from pathlib import Path
from typing import NamedTuple

from packer.errors import KernelsNotKeptWarning

KEPT_S = 90 * 86400.0  # Compiled kernels older than this are removed; otherwise kernels of old versions pile up.


class Place(NamedTuple):
    """What a folder allows. `fault`: why kernels can't be kept there, empty if they can."""

    readable: bool
    fault: str = ""


def named_folder() -> Path:
    """Return the folder's path, whether or not it exists: in `NUMBA_CACHE_DIR` if it is set, else in the user's cache.
    Relative paths in `XDG_CACHE_HOME` and `HOME` are ignored: they would name a part of the working folder."""
    from numba.misc.appdirs import user_cache_dir

    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(given).absolute() / "kernels"
    users = Path(user_cache_dir("packer", appauthor=False))  # type: ignore[no-untyped-call]
    if not users.is_absolute():
        users = Path(os.path.expanduser("~/.cache/packer"))
    if users == Path("/.cache/packer") and not os.environ.get("HOME", "/"):
        users = Path(".cache/packer")  # an empty name of a home is none, not the root
    return users / "kernels"


def cache_folder() -> Path | None:
    """Return the folder that compiled kernels are loaded from, which may be read-only; None if there is none."""
    folder = named_folder()
    return folder if _place(folder).readable else None


def keeps() -> bool:
    """Whether compiled kernels can be kept in the folder."""
    folder = named_folder()
    return not _place(folder).fault and folder not in _FULL


_FULL: dict[Path, str] = {}  # Folders that could not take a file, and why.


def full(error: OSError) -> None:
    """Keep no more kernels in the folder, which could not take one."""
    _FULL[named_folder()] = error.strerror or str(error)


@functools.cache
def _place(folder: Path) -> Place:
    """Create the folder, and return what it allows."""
    if not folder.is_absolute():
        return Place(False, "the user has no home")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if os.name == "posix" and found.st_uid not in (0, os.geteuid()):
            return Place(False, "it belongs to another user")
        if os.name == "posix" and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return Place(False, "other users can write to it (chmod go-w)")
        with os.scandir(folder):  # thousands of files are not listed
            pass
    except OSError as error:
        return Place(False, error.strerror or str(error))
    try:
        probe = folder / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return Place(True, error.strerror or str(error))
    return Place(True)


@functools.cache
def prune(folder: Path) -> None:
    """Remove old files, once per process that keeps a kernel: to look at thousands of files takes long at a start."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                if time.time() - entry.stat().st_mtime > KEPT_S:
                    os.unlink(entry.path)


@functools.cache
def tell_once() -> None:
    """Warn that a kernel is compiled and not kept, in the process that the user started."""
    if multiprocessing.current_process().name != "MainProcess":
        return
    folder = named_folder()
    fault = _FULL.get(folder) or _place(folder).fault
    warnings.warn(
        f"compiled code can't be kept in {folder}: {fault}. Each command compiles it again, which takes 5 to "
        "30 s; NUMBA_CACHE_DIR names another folder.",
        KernelsNotKeptWarning,
        stacklevel=2,
    )
