"""Everything that packer raises on purpose, with the exit code of a command that ends with it.

PackerError                             exit code 1 unless said otherwise
├── InputError (ValueError)            something the user gave is wrong; exit code 2
│   ├── ValidationError                a value breaks a rule
│   │   └── InfeasibleError            no plan serves what a whole schedule asks for; exit code 3
│   ├── FileFormatError                a file can't be read as what it should be (file, row, column)
│   ├── SourceError                    a service that data are read from (Prometheus) is unreachable or refused
│   ├── UnknownNameError (LookupError) no profile, solver, … of that name
│   ├── IncompatibleError              two choices don't fit together
│   ├── ModelError                     a saved model or profile is damaged or doesn't match
│   ├── MissingDependencyError (ImportError)  an optional package is absent; the message has the install line
│   ├── PluginError                    a strategy of another package can't be loaded, or breaks a rule
│   └── OutputError (OSError)          a result can't be written there
├── LiveError                          a real server is unreachable, failed, hung or refused; exit code 3
└── VerificationError                  a solver returned a plan that breaks its own rules (a defect of the solver)
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from packer.words import listed

A = TypeVar("A", bound="str | os.PathLike[str]")
P = ParamSpec("P")
T = TypeVar("T")


class PackerError(Exception):
    """Root of every error that packer raises on purpose."""

    exit_code = 1


class InputError(PackerError, ValueError):
    """Something that the user gave, or named for packer to use, is wrong."""

    exit_code = 2


class ValidationError(InputError):
    """A value breaks a rule; the message says the rule and the value."""


class InfeasibleError(ValidationError):
    """No plan serves what a whole schedule asks for; its message says what would."""

    exit_code = 3


class FileFormatError(InputError):
    """A file can't be read as what it should be.

    `message`: the rule that is broken, and the value received.
    `path`: the file; where the place of the error does not know it, `reading` adds it.
    `row`: line number of a text file, counted from 1 with the header as row 1.
    `column`: column of a table.
    `key`: key of a structured file, as in `engine.max_num_seqs`.
    """

    def __init__(
        self, message: str, *, path: str | os.PathLike[str] | None = None, row: int | None = None,
        column: str | None = None, key: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.path, self.row, self.column, self.key = path and os.fspath(path), row, column, key

    def __str__(self) -> str:
        places = {"row": self.row, "column": self.column, "key": self.key}
        known = [f"{name} {place!r}" for name, place in places.items() if place is not None]
        where = ", ".join([self.path, *known] if self.path else known)
        return f"{where}: {self.args[0]}" if where else str(self.args[0])


class SourceError(InputError):
    """A service that data are read from, as a file would be, is unreachable or refused."""


MOST_LISTED, LISTED = 40, 8
"""Names that are listed all, and how many where there are more."""


class UnknownNameError(InputError, LookupError):
    """No thing of that kind has that name; lists the known ones and the nearest match."""

    def __init__(self, kind: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = (f" Did you mean {near[0]!r}?" if near else "") + (f" {otherwise}" if otherwise else "")
        named = listed(self.known, LISTED if len(self.known) > MOST_LISTED else MOST_LISTED)
        super().__init__(f"Unknown {kind} {shown(name)}.{hint} Known: {named or 'none'}.")


class IncompatibleError(InputError):
    """Two choices don't fit together; the message names what is missing."""


class OutputError(InputError, OSError):
    """A result can't be written where it should be."""


class ModelError(InputError):
    """A saved model or profile is damaged, or belongs to something else."""


class MissingDependencyError(InputError, ImportError):
    """An optional package is absent; the message has the install line."""


class PluginError(InputError):
    """A strategy of another package can't be loaded, or breaks a rule; its own error is the cause."""


class LiveError(PackerError):
    """A real server failed, hung or refused: the input may be right, but the work could not be done."""

    exit_code = 3


class VerificationError(PackerError):
    """A solver returned a plan that breaks its own rules."""


class KernelsNotKeptWarning(RuntimeWarning):
    """Compiled code can't be kept: each process compiles it again. A command prints it as one line."""


def shown(value: object) -> str:
    """`repr` of a value for a message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}… ({len(text)} characters)"


LONGEST_WORD, LONGEST_PATH, LONGEST_TEXT = 200, 1000, 10_000
"""Characters of a value, of a path and of a message that are shown."""


def brief(text: str) -> str:
    """A message in which no word, and not the whole, is too long to be read."""

    def cut(word: re.Match[str]) -> str:
        longest = LONGEST_PATH if "/" in word[0][:LONGEST_WORD] else LONGEST_WORD
        return word[0] if len(word[0]) <= longest else f"{word[0][:longest]}…"

    text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", cut, text[: 2 * LONGEST_TEXT])
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


@contextmanager
def plugged(who: str) -> Iterator[None]:
    """What a strategy of another package raises in the block is a `PluginError`, unless it is an error of packer's."""
    try:
        yield
    except PackerError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{who} {raised(error)}.") from error


def raised(error: BaseException) -> str:
    """What an error of other code says, and where it was raised."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = "" if where is None else f" ({where.tb_frame.f_code.co_filename}, line {where.tb_lineno})"
    what = f"raised {type(error).__name__}: {error}"
    return f"{'ended the program by sys.exit' if isinstance(error, SystemExit) else what}{place}"


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the block that name no file are errors of this one."""
    try:
        yield
    except FileFormatError as error:
        error.path = error.path or os.fspath(path)
        raise


def reader(read: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[A, P], T]:
    """A function whose first parameter is the path of the file that its errors are about."""

    @wraps(read)
    def named(path: A, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with reading(path):
                return read(path, *args, **kwargs)
        except FileFormatError as error:
            from packer.io.recognise import hint

            expected, found, foreign = hint(path, read.__name__)
            if found and (foreign or error.row == 1 or (error.row is None and (error.key or error.column))):
                # Which rule of its own format a file of another kind breaks is no news.
                error.args = (f"{expected} {found}",)
                error.row = error.column = error.key = None
            elif found:
                error.args = (f"{error.args[0]} {found}",)
            raise

    return named  # type: ignore[return-value]  # the path may be given by its name, too


@contextmanager
def located(key: str | None = None) -> Iterator[None]:
    """A rule that is broken in the block is an error of the file that is read, at this key."""
    try:
        yield
    except ValidationError as error:
        raise FileFormatError(str(error), key=key) from None
