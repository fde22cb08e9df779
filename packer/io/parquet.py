"""Parquet files, decoded in a separate process: a damaged file can abort the decoder or exhaust memory."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from packer.errors import FileFormatError
from packer.io.files import write_bytes
from packer.io.frames import pl
from packer.io.tables import QUOTE_FORMULAS, unformulated

MAGIC = b"PAR1"  # First bytes of a Parquet file.
TIME_LIMIT_S = 600.0
MAX_CELLS = 200_000_000
MAX_TABLE_BYTES = 2**31

_DECODE = """
import io, json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
except (ImportError, ValueError, OSError):
    pass
import polars
source = sys.stdin.buffer
try:
    frames = []
    cells = 0
    for size in json.loads(source.readline()):
        data = source.read(size)
        rows = polars.scan_parquet(io.BytesIO(data)).select(polars.len()).collect().item()
        cells += rows * len(polars.read_parquet_schema(io.BytesIO(data)))
        if cells > MAX_CELLS:
            sys.exit(f'it has more than {MAX_CELLS:,} cells')
        frames.append(polars.read_parquet(io.BytesIO(data)))
    frame = polars.concat(frames)
    if frame.estimated_size() > MAX_TABLE_BYTES:
        sys.exit(f'its table needs more than {MAX_TABLE_BYTES:,} bytes of memory')
    notes = polars.read_parquet_metadata(io.BytesIO(data))
    sys.stdout.buffer.write(json.dumps({k: v for k, v in notes.items() if k != 'ARROW:schema'}).encode())
    sys.stdout.buffer.write(bytes([10]))
    frame.write_ipc(sys.stdout.buffer)
except MemoryError:
    sys.exit('its table does not fit into memory')
except Exception as error:
    sys.exit(str(error).partition(chr(10))[0][:200] or type(error).__name__)
"""


def read_parquet(data: bytes) -> pl.DataFrame:
    """The table in the content of a Parquet file; raises what `decoded` raises."""
    return decoded([data])[0]


def decoded(files: Sequence[bytes]) -> tuple[pl.DataFrame, Mapping[str, str]]:
    """Rows of Parquet files with the same columns, and the last file's metadata; raises `FileFormatError`."""
    for data in files:
        if len(data) < 12 or data[:4] != b"PAR1" or data[-4:] != b"PAR1":
            raise FileFormatError("the Parquet file is damaged or cut short.")
    limits = f"MAX_CELLS, MAX_TABLE_BYTES = {MAX_CELLS}, {MAX_TABLE_BYTES}\n"
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", limits + _DECODE],
            input=json.dumps([len(data) for data in files]).encode() + b"\n" + b"".join(files),
            capture_output=True,
            timeout=TIME_LIMIT_S,
            env={**os.environ, "RUST_BACKTRACE": "0"},
        )
    except subprocess.TimeoutExpired:
        raise FileFormatError("the Parquet file can't be read in reasonable time.") from None
    if child.returncode == 1 and b"panicked" not in child.stderr:
        reason = child.stderr.decode(errors="replace").strip().rstrip(".")
        raise FileFormatError(f"the Parquet file can't be read: {reason[:200]}.")
    if child.returncode != 0:
        raise FileFormatError("the Parquet file is damaged.")
    notes, _, table = child.stdout.partition(b"\n")
    return pl.read_ipc(io.BytesIO(table)), json.loads(notes)


def check_plain(frame: pl.DataFrame) -> None:
    """Raise `FileFormatError` unless every column holds text, numbers, booleans or times."""
    for name, kind in frame.schema.items():
        if kind.is_nested() or kind in (pl.Binary, pl.Object):
            raise FileFormatError(f"expected text, numbers or times, got a column of {kind}.", column=name[:80])


def parquet_bytes(frame: pl.DataFrame, metadata: Mapping[str, str] | None = None) -> bytes:
    """A table as the content of a Parquet file."""
    data = io.BytesIO()
    frame.write_parquet(data, metadata=dict(metadata or {}))
    return data.getvalue()


def write_frame(frame: pl.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write a table as CSV if `path` ends in .csv, else as Parquet, atomically."""
    csv = os.fspath(path).lower().endswith(".csv")
    if csv and os.environ.get(QUOTE_FORMULAS):
        texts = [name for name, kind in frame.schema.items() if kind == pl.String]
        frame = frame.with_columns(pl.col(texts).map_elements(unformulated, return_dtype=pl.String))
    write_bytes(path, frame.write_csv().encode() if csv else parquet_bytes(frame))
