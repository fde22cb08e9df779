"""Tables of text, whose errors name file, row and column."""

from __future__ import annotations

import csv
import difflib
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from packer import checks
from packer.errors import FileFormatError, ValidationError, located, shown
from packer.io.frames import pl

COMMENT = "#"


@dataclass(slots=True)  # a frozen one takes three times as long to make, and a log has one for each line
class Row:
    """One row: its number in the file (the header of a CSV file without comments is row 1) and its cells. `path`: path
    of the file, for a row that is checked after reading."""

    number: int
    cells: Mapping[str, Any]
    path: str | os.PathLike[str] | None = None

    def fail(self, column: str, message: str) -> NoReturn:
        """Raise `FileFormatError` with this row and column."""
        raise FileFormatError(message, path=self.path, row=self.number, column=column)

    def located(self, column: str) -> AbstractContextManager[None]:
        """Turn an `InputError` of the block into a `FileFormatError` with this row and column."""
        return located(path=self.path, row=self.number, column=column)

    def is_blank(self, column: str) -> bool:
        """Whether the column is missing or the cell is empty."""
        cell = self.cells.get(column)
        return cell is None or (isinstance(cell, str) and not cell.strip())

    def text(self, column: str) -> str:
        """The cell as text, without surrounding whitespace; numbers are converted to text."""
        if self.is_blank(column):
            self.fail(column, "expected text, got an empty cell.")
        cell = self.cells[column]
        if not isinstance(cell, (str, int, float)) or isinstance(cell, bool):
            self.fail(column, f"expected text, got {shown(cell)}.")
        return str(cell).strip()

    def name(self, column: str) -> str:
        """The cell as the name of an adapter."""
        text = self.text(column)
        try:
            return checks.name("a name", text)
        except ValidationError as error:
            self.fail(column, str(error))

    def real(self, column: str, *, low: float, high: float, open_low: bool = False) -> float:
        """The cell as a finite number in [low, high] or ]low, high]."""
        value = self._number(column)
        try:
            return checks.real("this", value, low=low, high=high, open_low=open_low)
        except ValidationError:
            span = f"{'>' if open_low else '>='} {low:g} and <= {high:g}"
            self.fail(column, f"expected a finite number {span}, got {shown(self.cells[column])}.")

    def integer(self, column: str, *, low: int, high: int) -> int:
        """The cell as a whole number in [low, high]; 8.0 is accepted, 7.5 is not."""
        cell = self.cells.get(column)
        if type(cell) is int and low <= cell <= high:
            return cell
        value = self._number(column)
        if not (low <= value <= high and value.is_integer()):
            self.fail(column, f"expected a whole number from {low} to {high}, got {shown(self.cells[column])}.")
        return int(value)

    def _number(self, column: str) -> float:
        cell = self.cells.get(column)
        if self.is_blank(column):
            self.fail(column, "expected a number, got an empty cell.")
        try:
            if isinstance(cell, bool):
                raise ValueError
            return checks.decimal(cell) if isinstance(cell, str) else float(cell)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            rule = "a number without commas" if "," in str(cell) else "a number"
            self.fail(column, f"expected {rule}, got {shown(cell)}.")


def separator_of(text: str) -> str:
    """The sign between the cells of a CSV text: a comma or, if its header has none, a semicolon, tab or bar."""
    lines = (line for line in io.StringIO(text) if line.strip() and not line.startswith(COMMENT))
    header = next(lines, "")
    return next((sign for sign in ",;\t|" if sign in header), ",")


def csv_lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Row number and cells of each line of a CSV text, without blank lines and lines that start with #."""
    at = 0
    inside = False  # whether the line continues a row, as in a quoted cell with line breaks

    def lines() -> Iterator[str]:
        nonlocal at, inside
        for line in io.StringIO(text, newline=""):
            at += 1
            if inside or not line.startswith(COMMENT):
                inside = True
                yield line

    reader = csv.reader(lines(), strict=True, delimiter=separator_of(text))
    try:
        for cells in reader:
            inside = False
            if any(cell.strip() for cell in cells):
                yield at, cells
    except csv.Error as error:
        raise FileFormatError(f"expected CSV: {error}.", row=at) from None


def header_of(cells: Sequence[str], row: int) -> list[str]:
    """Column names of a header, in lower case and stripped. Raises `FileFormatError`: a name is repeated."""
    names = [cell.strip().lower() for cell in cells]
    for k, name in enumerate(names):
        if name and name in names[:k]:
            raise FileFormatError("this column appears twice.", row=row, column=cells[k][:80])
    return names


def csv_rows(text: str) -> tuple[list[str], Iterator[Row]]:
    """Column names and rows of a CSV text; empty columns at the end, which spreadsheets may add, are dropped, and so is
    a header that is repeated between joined files."""
    lines = csv_lines(text)
    number, header = next(lines, (1, []))
    names = header_of(header, number)
    while names and not names[-1]:
        names.pop()

    def rows() -> Iterator[Row]:
        for number, cells in lines:
            if cells == header:
                continue
            if len(cells) < len(names) or any(map(str.strip, cells[len(names) :])):
                raise FileFormatError(f"expected {len(names)} cells as in the header, got {len(cells)}.", row=number)
            yield Row(number, dict(zip(names, cells, strict=False)))

    return names, rows()


QUOTE_FORMULAS = "PACKER_QUOTE_FORMULAS"
"""Environment variable: if set, texts that a spreadsheet would run as formulas are written after an apostrophe."""


def unformulated(cell: object) -> object:
    """The cell, with an apostrophe before text that a spreadsheet would run as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def csv_text(columns: Iterable[str], rows: Iterable[Iterable[object]], *, quoted: bool = False) -> str:
    """A table as CSV; `quoted`: put texts in quotes, so that # starts no comment and line breaks are kept."""
    if os.environ.get(QUOTE_FORMULAS):
        rows = ([unformulated(cell) for cell in row] for row in rows)
    text = io.StringIO()
    quoting: Any = csv.QUOTE_NONNUMERIC if quoted else csv.QUOTE_MINIMAL
    csv.writer(text, lineterminator="\n", quoting=quoting).writerows([columns, *rows])
    return text.getvalue()


def by_adapter(rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    """Each row with the name in its column `adapter`; raises if a name appears twice."""
    first: dict[str, int] = {}
    for row in rows:
        name = row.name("adapter")
        if name in first:
            row.fail("adapter", f"expected unique names, got {shown(name)} as in row {first[name]}.")
        first[name] = row.number
        yield name, row


def frame_rows(frame: pl.DataFrame) -> tuple[list[str], Iterator[Row]]:
    """Column names of a frame and its rows, counted from 1."""
    names = header_of(frame.columns, 0)
    return names, (Row(n, dict(zip(names, cells, strict=True))) for n, cells in enumerate(frame.iter_rows(), start=1))


def first_line(error: BaseException) -> str:
    """First line of an exception's text, cut to 200 characters, without the final full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")


def check_columns(names: Sequence[str], required: Sequence[str], optional: Sequence[str]) -> None:
    """Raise if a required column is missing or a column is unknown; the error lists the columns found and expected."""
    expected = ", ".join(required) + (f" and perhaps {', '.join(optional)}" if optional else "")
    found = ", ".join(name[:40] or "(no name)" for name in names[:30]) or "none"
    tail = f"Expected the columns {expected}; found: {found}."
    known = (*required, *optional)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name[:80], known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            hint = " (is the header missing?)" if any(map(_is_number, names)) else hint
            raise FileFormatError(f"unknown column{hint}. {tail}", column=name[:80])
    for name in required:
        if name not in names:
            raise FileFormatError(f"this column is missing. {tail}", column=name)


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False
