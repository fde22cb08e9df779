"""Read files that users name, with limits on their size and kind, and write results atomically."""

from __future__ import annotations

import codecs
import io
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from packer.errors import FileFormatError, OutputError, ValidationError, reader, shown

MAX_BYTES = 2**31  # Largest accepted size of a file, and of the content of a compressed file.
MAX_RATIO = 200  # Largest accepted compression ratio of content above 64 MiB.
_FREE_BYTES = 2**26
_CHUNK_BYTES = 2**24


@reader
def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Content of a regular file, unpacked if it is gzip. Raises `FileFormatError`: the file is missing, not a regular
    file (a directory, pipe or device), unreadable, empty, too large, or a damaged gzip file."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileFormatError("expected a regular file, got a pipe or a device.")
            data = file.read(MAX_BYTES + 1)
    except FileFormatError:
        raise
    except FileNotFoundError:
        piped = " Standard input is not read: give a file." if os.fspath(path) == "-" else ""
        raise FileFormatError(f"there is no such file.{piped}") from None
    except IsADirectoryError:
        raise FileFormatError("expected a file, got a directory.") from None
    except (OSError, ValueError) as error:
        raise FileFormatError(f"the file can't be read: {error}.") from None
    if len(data) > MAX_BYTES:
        raise FileFormatError(f"expected at most {MAX_BYTES:,} bytes, got more.")
    if data[:2] == b"\x1f\x8b":
        data = _gunzip(data)
    if not data or data.isspace():
        raise FileFormatError("the file is empty.")
    return data


def _gunzip(data: bytes) -> bytes:
    import gzip
    import zlib

    most = min(MAX_BYTES, max(_FREE_BYTES, MAX_RATIO * len(data)))
    content = bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while len(content) <= most and (part := file.read(_CHUNK_BYTES)):
                content += part
    except (EOFError, OSError, zlib.error) as error:
        raise FileFormatError(f"the gzip file is damaged or cut short: {error}.") from None
    if len(content) > most:
        raise FileFormatError(f"expected a gzip file that unpacks to at most {most:,} bytes, got more.")
    return bytes(content)


@reader
def read_text(path: str | os.PathLike[str]) -> str:
    """Content of a UTF-8 text file, unpacked if it is gzip; the error of a bad byte names its row."""
    return decode(read_bytes(path))


def decode(data: bytes) -> str:
    """UTF-8 bytes of a file as text; the error of a bad byte names its row. Windows writes UTF-16, with its mark."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        with suppress(UnicodeDecodeError):
            return data.decode("utf-16")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        rule = f"expected UTF-8 text, got the byte 0x{data[error.start]:02x} at offset {error.start}."
        raise FileFormatError(rule, row=row) from None


ENDINGS = {"page": (".html", ".htm"), "picture": (".html", ".png", ".svg"), "table": (".csv", ".parquet")}


def check_ending(path: str | os.PathLike[str], what: str, endings: Sequence[str] = ()) -> str:
    """The suffix of a path, in lower case; raises `ValidationError` if it is none of `endings`, else of `ENDINGS`."""
    ending, endings = Path(path).suffix.lower(), endings or ENDINGS[what]
    if ending not in endings:
        raise ValidationError(f"Expected a {what}'s file to end in {', '.join(endings)}, got {shown(os.fspath(path))}.")
    return ending


def check_writable(path: str | os.PathLike[str], *, force: bool) -> Path:
    """Raise `OutputError` now, before long work, if `path` could not be written later. Returns the file that would be
    written: the target, if `path` is a symbolic link."""
    target = Path(path)
    try:
        target = Path(os.path.realpath(target)) if target.is_symlink() else target
        if target.is_symlink():
            raise OutputError(f"{target}: expected a file to write, got a link that leads to itself.")
        if target.is_dir():
            raise OutputError(f"{target}: expected a file to write, got a directory.")
        if target.exists() and not target.is_file():  # replacing a device would break the machine
            raise OutputError(f"{target}: expected a regular file to write.")
        if target.exists() and not force:
            raise OutputError(f"{target}: the file exists; --force overwrites it.")
        parent = target.parent
        if not parent.is_dir():
            raise OutputError(f"{target}: there is no directory {str(parent)!r} to write into.")
        if not os.access(parent, os.W_OK):
            raise OutputError(f"{target}: the directory {str(parent)!r} is not writable.")
        os.lstat(target)  # finds names that no file can have
    except OutputError:
        raise
    except FileNotFoundError:
        return target
    except (ValueError, OSError) as error:
        raise OutputError(f"{target}: can't be written: {error}.") from None
    return target


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder and its parents if they do not exist; raises `OutputError`."""
    try:
        os.makedirs(path, exist_ok=True)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: the folder can't be made: {error}.") from None


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, force: bool = True) -> Iterator[Path]:
    """A temporary path in the same folder, which replaces `path` when the block succeeds and is removed otherwise."""
    target = check_writable(path, force=force)
    try:
        handle, name = tempfile.mkstemp(prefix=".packer-", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise OutputError(f"{target}: can't be written: {error}.") from None
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{target}: can't be written: {error}.") from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Lock a folder, made if needed, against other processes in the block; raises `OutputError`."""
    import fcntl

    make_folder(folder)
    with ExitStack() as held:
        try:
            lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
            held.callback(os.close, lock)  # the lock ends with its descriptor, or with the process
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), os.stat(folder / ".lock")):
                raise BlockingIOError  # the process that held the lock has removed the folder
        except (BlockingIOError, FileNotFoundError):
            raise OutputError(f"{folder}: another process writes into this folder.") from None
        except OSError as error:
            raise OutputError(f"{folder}: can't be written: {error}.") from None
        yield folder


def write_all(texts: Mapping[str, str], *, force: bool = True) -> None:
    """Write text files by path, and their folders: all of the files, or none if one of them does not fit there."""
    with ExitStack() as writes:
        for path, text in texts.items():
            make_folder(os.path.dirname(path) or ".")
            writes.enter_context(atomic_path(path, force=force)).write_bytes(text.encode())


def write_text(path: str | os.PathLike[str], text: str, *, force: bool = True) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode(), force=force)


def write_bytes(path: str | os.PathLike[str], data: bytes, *, force: bool = True) -> None:
    """Write a file atomically."""
    with atomic_path(path, force=force) as temporary:
        temporary.write_bytes(data)
