"""Parquet files."""

from __future__ import annotations

import io
from pathlib import Path

import polars as pl
import pytest

from packer.errors import FileFormatError
from packer.io import parquet
from packer.io.tables import csv_text


def content() -> bytes:
    data = io.BytesIO()
    pl.DataFrame({"adapter": ["a", "b"], "rate": [0.5, None], "rank": [8, 16]}).write_parquet(data)
    return data.getvalue()


def test_a_good_file_comes_back() -> None:
    """The table arrives whole, with types and nulls."""
    frame = parquet.read_parquet(content())
    assert frame.to_dict(as_series=False) == {"adapter": ["a", "b"], "rate": [0.5, None], "rank": [8, 16]}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.abort()", "the Parquet file is damaged"),
        ("import sys; sys.exit('thrift error')", "can't be read: thrift error"),
        ("raise SystemExit('thread panicked at x')", "the Parquet file is damaged"),
        ("import time; time.sleep(60)", "reasonable time"),
    ],
)
def test_a_decoder_that_dies_is_an_input_error(monkeypatch: pytest.MonkeyPatch, code: str, message: str) -> None:
    """Whether the decoder aborts, fails, panics or hangs, the user gets one message and we live on."""
    monkeypatch.setattr(parquet, "_DECODE", code)
    monkeypatch.setattr(parquet, "TIME_LIMIT_S", 2.0)
    with pytest.raises(FileFormatError, match=message):
        parquet.read_parquet(content())


def test_damage_in_the_footer_is_contained() -> None:
    """A wrong footer, which the decoder can't survive or parse, is refused."""
    data = bytearray(content())
    data[-40:-8] = b"\xff" * 32
    with pytest.raises(FileFormatError, match="Parquet file"):
        parquet.read_parquet(bytes(data))


@pytest.mark.parametrize("cell", [["a", "b"], b"a", {"x": 1}])
def test_a_name_is_text(cell: object) -> None:
    """A list or bytes must not become an adapter called after their notation."""
    frame = pl.DataFrame({"adapter": [cell], "rank": [8]})
    with pytest.raises(FileFormatError, match="column 'adapter': expected text"):
        parquet.check_plain(frame)


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few bytes may describe a table that fills the memory."""
    monkeypatch.setattr(parquet, "MAX_CELLS", 5)
    with pytest.raises(FileFormatError, match="more than 5 cells"):
        parquet.read_parquet(content())
    monkeypatch.setattr(parquet, "MAX_CELLS", 6)
    monkeypatch.setattr(parquet, "MAX_TABLE_BYTES", 10)
    with pytest.raises(FileFormatError, match="more than 10 bytes"):
        parquet.read_parquet(content())


def test_formulas_are_quoted_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spreadsheet would calculate a text that begins like a formula; numbers are left as they are."""
    frame = pl.DataFrame({"adapter": ["=cmd()", "+1", "-1", "@x", "a=b", "", None], "n": [-1, 2, 3, 4, 5, 6, 7]})
    rows = list(frame.iter_rows())
    parquet.write_frame(frame, tmp_path / "plain.csv")
    assert (tmp_path / "plain.csv").read_text().splitlines()[1] == "=cmd(),-1" == csv_text([], rows).splitlines()[1]
    monkeypatch.setenv("PACKER_QUOTE_FORMULAS", "1")
    parquet.write_frame(frame, tmp_path / "quoted.csv")
    lines = (tmp_path / "quoted.csv").read_text().splitlines()[1:]
    assert lines[:5] == ["'=cmd(),-1", "'+1,2", "'-1,3", "'@x,4", "a=b,5"] == csv_text([], rows).splitlines()[1:6]
