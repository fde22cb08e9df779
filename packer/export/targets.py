"""Where the files of an exported plan go: a folder for all of them, or a file for one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from packer.errors import OutputError
from packer.io.files import check_writable

_SAME = {".yml": ".yaml"}
_FILE_SUFFIX = re.compile(r"\.[a-z][a-z0-9]{1,5}")
"""Usual endings of files; `.d` or `.2` may well end the name of a folder."""


def output_paths(names: Sequence[str], output: str, *, force: bool) -> dict[Path, str]:
    """Where each file of a format goes; if `output` is a file, only the one that it names.

    Raises `OutputError`: one of them could not be written, or `output` ends as a file of another kind does. Nothing
    is made.
    """
    target = Path(output)
    if os.path.isdir(target):
        return {check_writable(target / name, force=force): name for name in names}
    name = None if output.endswith("/") else _file_meant(names, target)
    if name is not None:
        return {check_writable(target, force=force): name}
    _check_new_folder(target)
    return {target / name: name for name in names}


def _file_meant(names: Sequence[str], target: Path) -> str | None:
    """The file of the format with that name or else that ending; None where the target is a folder."""
    suffix = target.suffix.lower()
    alike = [name for name in names if Path(name).suffix == _SAME.get(suffix, suffix)]
    if target.name in names:
        return target.name
    if alike:
        return alike[0]
    if _FILE_SUFFIX.fullmatch(suffix):
        known = ", ".join(sorted({Path(name).suffix for name in names}))
        raise OutputError(
            f"{target}: expected a folder or a file that ends in {known}, got the ending {suffix!r}; "
            "a slash at the end makes it a folder."
        )
    return None


def _check_new_folder(target: Path) -> None:
    """Raise `OutputError` if the folder could not be made."""
    nearest = next((path for path in (target, *target.parents) if os.path.lexists(path)), target)
    if not nearest.is_dir():
        raise OutputError(f"{target}: the folder can't be made: {str(nearest)!r} is a file.")
    if not os.access(nearest, os.W_OK):
        raise OutputError(f"{target}: the folder can't be made: {str(nearest)!r} is not writable.")
    try:
        os.lstat(target)  # finds names that no folder can have
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise OutputError(f"{target}: the folder can't be made: {error}.") from None
