"""Everything that packer raises on purpose; `exit_code`: that of a command that ends with the error."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from numbers import Number
from typing import Any, Concatenate, ParamSpec, TypeVar

from packer.words import listed

A = TypeVar("A", bound="str | os.PathLike[str]")
P = ParamSpec("P")
T = TypeVar("T")


class PackerError(Exception):
    """Root of every error that packer raises on purpose."""

    exit_code = 1


class InputError(PackerError, ValueError):
    """An input of the user, or something that it names, is wrong."""

    exit_code = 2


class ValidationError(InputError):
    """A value breaks a rule; the message says the rule and the value."""


class InfeasibleError(ValidationError):
    """No plan serves every period of a schedule, or no server is left; the message says why."""

    exit_code = 3


class FileFormatError(InputError):
    """A file can't be read as what it should be.

    `message`: the rule that is broken, and the value received.
    `path`: the file; `reading` adds it to errors raised without a path.
    `row`: line number of a text file, counted from 1 with the header as row 1.
    `column`: column of a table.
    `key`: key of a structured file, such as `engine.max_num_seqs`.
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


MOST_LISTED, LISTED = 40, 8  # An error lists all known names up to the first number, else as many as the second.


class UnknownNameError(InputError, LookupError):
    """Nothing of this kind has this name; the message lists the known names and the nearest match."""

    def __init__(self, kind: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = (f" Did you mean {near[0]!r}?" if near else "") + (f" {otherwise}" if otherwise else "")
        named = listed(self.known, LISTED if len(self.known) > MOST_LISTED else MOST_LISTED)
        super().__init__(f"Unknown {kind} {shown(name)}.{hint} Known: {named or 'none'}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return UnknownNameError.__new__, (UnknownNameError, *self.args), vars(self)


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
    """A real server, of vLLM or Prometheus, can't be reached, failed, hung or refused; the input may be valid."""

    exit_code = 3


class VerificationError(PackerError):
    """A solver returned a plan that breaks its own rules, a defect of the solver."""


class KernelsNotKeptWarning(RuntimeWarning):
    """Compiled code can't be cached, so each process compiles it again. A command prints the warning as one line."""


def shown(value: object) -> str:
    """`repr` of a value for a message, cut to 80 characters; of a number of NumPy without its type."""
    text = repr(value.item() if isinstance(value, Number) and hasattr(value, "item") else value)
    return text if len(text) <= 80 else f"{text[:80]}… ({len(text)} characters)"


LONGEST_WORD, LONGEST_PATH, LONGEST_TEXT = 200, 1000, 10_000
"""Largest number of characters that are shown of a word, of a path and of a whole message."""


def brief(text: str) -> str:
    """A message with overlong words, and the whole, cut to readable lengths."""

    def cut(word: re.Match[str]) -> str:
        longest = LONGEST_PATH if "/" in word[0][:LONGEST_WORD] else LONGEST_WORD
        return word[0] if len(word[0]) <= longest else f"{word[0][:longest]}…"

    text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", cut, text[: 2 * LONGEST_TEXT])
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


@contextmanager
def plugged(who: str) -> Iterator[None]:
    """Turn errors that the block raises, other than packer's own, into a `PluginError` of the strategy `who`."""
    try:
        yield
    except PackerError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"{who} {raised(error)}.") from error


def raised(error: BaseException) -> str:
    """The message of an error of other code, and the file and line that raised it."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = "" if where is None else f" ({where.tb_frame.f_code.co_filename}, line {where.tb_lineno})"
    what = f"raised {type(error).__name__}: {error}"
    return f"{'ended the program by sys.exit' if isinstance(error, SystemExit) else what}{place}"


def path_of(path: object, what: str = "a path") -> str:
    """The text of a path; raises `ValidationError` unless `path` is text or an object that stands for a path."""
    if isinstance(path, str | os.PathLike):
        return os.fspath(path)
    raise ValidationError(f"Expected {what} to be text or a path, got {shown(path)}.")


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add `path` to each `FileFormatError` of the block that names no file."""
    try:
        yield
    except FileFormatError as error:
        error.path = error.path or os.fspath(path)
        raise


def reader(read: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[A, P], T]:
    """Decorate a function that reads the file `path`: its errors name the file, and say what else the file may be. The
    function also raises `ValidationError`: `path` is neither text nor a path."""

    @wraps(read)
    def named(path: A, *args: P.args, **kwargs: P.kwargs) -> T:
        path_of(path, "the name of a file")
        try:
            with reading(path):
                return read(path, *args, **kwargs)
        except FileFormatError as error:
            from packer.io.recognise import hint

            expected, found, foreign = hint(path, read.__name__)
            if found and (foreign or error.row in (None, 1)):
                # For a file of another kind, the rule of the expected format that it breaks says nothing useful.
                error.args = (f"{expected} {found}",)
                error.row = error.column = error.key = None
            elif found:
                error.args = (f"{error.args[0]} {found}",)
            raise

    return named  # type: ignore[return-value]  # the path may be given by its name, too


@contextmanager
def located(
    key: str | None = None, *, path: str | os.PathLike[str] | None = None, row: int | None = None,
    column: str | None = None,
) -> Iterator[None]:  # fmt: skip
    """Turn an `InputError` of the block, unless it is a `FileFormatError`, into one at this place in a file."""
    try:
        yield
    except FileFormatError:
        raise
    except InputError as error:
        raise FileFormatError(str(error), path=path, row=row, column=column, key=key) from None
