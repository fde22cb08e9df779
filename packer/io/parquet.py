"""Parquet files, decoded in a process of their own: a damaged one can abort the decoder, not only raise."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from packer.errors import FileFormatError

if TYPE_CHECKING:
    import polars as pl

TIME_LIMIT_S = 600.0

_DECODE = """
import io, sys
import polars
try:
    frame = polars.read_parquet(io.BytesIO(sys.stdin.buffer.read()))
    frame.write_ipc(sys.stdout.buffer)
except Exception as error:
    sys.exit(str(error).partition(chr(10))[0][:200] or type(error).__name__)
"""


def read_parquet(data: bytes, path: str | os.PathLike[str]) -> pl.DataFrame:
    """The table in the bytes of a Parquet file.

    Raises
    ------
    FileFormatError
        It is damaged, cut short or not Parquet.
    """
    import polars as pl

    if len(data) < 12 or data[:4] != b"PAR1" or data[-4:] != b"PAR1":
        raise FileFormatError("the Parquet file is damaged or cut short.", path=path)
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", _DECODE],
            input=data,
            capture_output=True,
            timeout=TIME_LIMIT_S,
            env={**os.environ, "RUST_BACKTRACE": "0"},
        )
    except subprocess.TimeoutExpired:
        raise FileFormatError("the Parquet file can't be read in reasonable time.", path=path) from None
    if child.returncode == 1 and b"panicked" not in child.stderr:
        reason = child.stderr.decode(errors="replace").strip().rstrip(".")
        raise FileFormatError(f"the Parquet file can't be read: {reason[:200]}.", path=path)
    if child.returncode != 0:
        raise FileFormatError("the Parquet file is damaged.", path=path)
    return pl.read_ipc(io.BytesIO(child.stdout))
