"""Opening and writing files."""

from __future__ import annotations

import gzip
import os
import stat
from pathlib import Path

import pytest

from packer.errors import FileFormatError, OutputError
from packer.io import files
from packer.io.files import atomic_path, check_writable, read_bytes, read_text, write_all, write_text


def test_files_that_belong_together_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is full before the last of them, all stay as they were, and the error names one that failed."""
    paths = [str(tmp_path / name) for name in ("a", "own/b", "c")]
    write_all(dict.fromkeys(paths, "old"))
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if data == b"long":
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match=r"^\S+/own/b: can't be written: \[Errno 28\] No space left on device\.$"):
        write_all(dict(zip(paths, ("new", "long", "new"), strict=True)))
    assert [Path(path).read_text() for path in paths] == ["old"] * 3
    assert {each.name for each in tmp_path.rglob("*")} == {"a", "own", "b", "c"}


def test_gzip_is_told_by_content(tmp_path: Path) -> None:
    """A gzip file is unpacked whatever it is called; a damaged one is refused."""
    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(b"hello"))
    assert read_text(path) == "hello"
    path.write_bytes(gzip.compress(os.urandom(1000))[:500])
    with pytest.raises(FileFormatError, match="damaged or cut short"):
        read_bytes(path)


@pytest.mark.parametrize("content", [b"", b" \n\t\n", gzip.compress(b"", mtime=0)])
def test_empty_files_are_refused(tmp_path: Path, content: bytes) -> None:
    """A file of nothing, or of blanks only, is called empty."""
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="empty"):
        read_bytes(path)


def test_missing_file_directory_and_odd_names(tmp_path: Path) -> None:
    """Each gets its own message."""
    for path, message in [
        (tmp_path / "no.csv", "no such file"),
        (tmp_path, "got a directory"),
        ("a\0b", "can't be read"),
        (tmp_path / ("x" * 300), "can't be read"),
    ]:
        with pytest.raises(FileFormatError, match=message):
            read_bytes(path)


def test_a_bad_byte_is_located(tmp_path: Path) -> None:
    """Text that is not UTF-8 names the row and the byte; a byte-order mark is no part of the text, and that of UTF-16,
    as Windows writes it, tells how the text is read."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n1,2\n\xe9,3\n")
    with pytest.raises(FileFormatError, match="row 3: expected UTF-8 text, got the byte 0xe9"):
        read_text(path)
    for mark in (b"\xef\xbb\xbfa,b", "a,b".encode("utf-16"), b"\xfe\xff" + "a,b".encode("utf-16-be")):
        path.write_bytes(mark)
        assert read_text(path) == "a,b"
    path.write_bytes(b"\xff\xfea")
    with pytest.raises(FileFormatError, match="row 1: expected UTF-8 text, got the byte 0xff"):
        read_text(path)


def test_an_existing_file_needs_force(tmp_path: Path) -> None:
    """Nothing is overwritten unasked."""
    path = tmp_path / "out"
    write_text(path, "one", force=False)
    with pytest.raises(OutputError, match=f"^{path}: the file exists; --force overwrites it.$"):
        write_text(path, "two", force=False)
    assert path.read_text() == "one"
    write_text(path, "two", force=True)
    assert path.read_text() == "two"


def test_a_failure_leaves_no_trace(tmp_path: Path) -> None:
    """When the writer fails, the old file stands and no temporary one is left."""
    path = tmp_path / "out"
    path.write_text("old")

    def fail() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert path.read_text() == "old"


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    """A result is readable by whom the umask allows, not by its owner alone."""
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "out", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o644


def test_unwritable_places_are_found_before_long_work(tmp_path: Path) -> None:
    """A directory, a missing parent, a file as parent, a device and an impossible name are refused."""
    (tmp_path / "file").write_text("x")
    for path in (
        tmp_path,
        tmp_path / "no" / "out",
        tmp_path / "file" / "out",
        tmp_path / ("x" * 300),
        "a\0b",
        "/dev/null",
    ):
        with pytest.raises(OutputError):
            check_writable(path, force=True)


def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    """Reading a pipe could wait for ever, and /dev/zero has no end."""
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (tmp_path / "pipe.csv", "/dev/zero", "/dev/null"):
        with pytest.raises(FileFormatError, match="expected a regular file"):
            read_bytes(path)


def test_unpacking_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of gzip that unpack to gigabytes are refused before memory is spent."""
    monkeypatch.setattr(files, "_FREE_BYTES", 2**20)
    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(bytes(2**23)))
    with pytest.raises(FileFormatError, match=r"unpacks to at most 1,6\d\d,\d{3} bytes"):
        read_bytes(path)
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    path.write_bytes(b"x" * 1001)
    with pytest.raises(FileFormatError, match="at most 1,000 bytes"):
        read_bytes(path)


def test_gzip_members_are_joined(tmp_path: Path) -> None:
    """Logs are appended to as further gzip members; zeros after the last one are padding."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n") + bytes(100))
    assert read_bytes(path) == b"one\ntwo\n"


def test_a_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    """Writing through a link changes the file that it points at, as a shell's redirection does."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "real")
    write_text(tmp_path / "link", "one", force=False)
    with pytest.raises(OutputError, match="the file exists"):
        write_text(tmp_path / "link", "two", force=False)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "real").read_text() == "one"


def test_a_link_to_itself_is_no_place_to_write(tmp_path: Path) -> None:
    """It is left as it is."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match="a link that leads to itself"):
        check_writable(tmp_path / "loop", force=True)
    assert (tmp_path / "loop").is_symlink()
