"""The edge of the Python API: errors that no check foresaw name the argument, or the plug-in, that caused them."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import signature
from numbers import Integral, Real
from traceback import walk_tb
from types import CodeType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from packer.errors import PackerError, ValidationError, shown

C = TypeVar("C", bound=Callable[..., Any])
WORDS: Mapping[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("True or False", "True or False"),
    os.PathLike: ("a path", "paths"),
    Callable: ("a function", "functions"),
    type(None): ("None", "None"),
}
"""One value, and several values, of a type in messages."""
MADE_BY = {
    "Cluster": "read_cluster(FILE)", "Goal": "Goal.parse(TEXT)", "Objective": "objectives.base.Objective",
    "Plan": "load_plan(FILE)", "Profile": "load_profile(NAME)", "Workload": "read_workload(FILE)",
}  # fmt: skip
"""What of `packer` makes objects of a class."""


def public(call: C) -> C:
    """Decorate a function of the Python API: wrong arguments and plug-ins are named, whatever they lead to. The
    function also raises `PluginError`: the code of a plug-in raised an error, or an argument that is a plug-in led to
    one; `ValidationError`: an argument is not of its declared type. Errors of functions among the arguments pass."""

    @wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(_plain, args)), {name: _plain(each) for name, each in kwargs.items()}
        given = _given(call, args, kwargs)
        check_types(call, given)
        try:
            return call(*args, **kwargs)
        except PackerError:
            raise
        except (Exception, SystemExit) as error:
            codes = [*filter(None, map(_code, given.values()))]
            if not any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__)):
                from packer.registry import blame

                kinds = [kind for each in given.values() for kind in getattr(each, "kinds", ())]
                blame(error, [*given.values(), *(getattr(kind, "engine", None) for kind in kinds)])
            raise

    return guarded  # type: ignore[return-value]


def _plain(value: Any) -> Any:
    """A number or text of NumPy as one of Python, which grows as needed, and what an iterator gives as a tuple, which
    can be read twice; other values as they are."""
    if isinstance(value, Iterator):
        return tuple(value)
    return value.item() if isinstance(value, np.generic) else value


def _code(value: Any) -> CodeType | None:
    """The code of a function, of a partial one or of the calls of an object; None for other objects."""
    value = getattr(value, "func", value)
    if not hasattr(value, "__code__") and callable(value):
        value = type(value).__call__
    return getattr(value, "__code__", None)


def _given(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return _signature(call).bind(*args, **kwargs).arguments
    except TypeError:  # arguments are missing, or have other names
        return {}


def checked(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorate `__post_init__` of a dataclass: other errors than packer's become a `ValidationError` that names the
    first field that is not of its declared type, if there is one."""

    @wraps(post_init)
    def guarded(item: Any) -> None:
        try:
            post_init(item)
        except PackerError:
            raise
        except Exception as error:
            check_fields(item, error)
            raise

    return guarded


def check_fields(item: Any, cause: BaseException | None = None) -> None:
    """Raise `ValidationError` if a field of a dataclass is not of its declared type."""
    kind = type(item)
    given = {name: getattr(item, name) for name in kind.__dataclass_fields__ if hasattr(item, name)}
    check_types(kind, given, cause, f" of {kind.__name__}")


def check_types(owner: Any, given: Mapping[str, object], cause: BaseException | None = None, of: str = "") -> None:
    """Raise `ValidationError` if a value is not of the type that the function or class `owner` declares for its name.
    `of`: text after the name in the message."""
    hints = _hints(owner)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            raise ValidationError(f"Expected {name}{of} to be {_words(hints[name])}, got {shown(value)}.") from cause


_signature = cache(signature)


class _Names(dict[str, Any]):
    """Names, of which those that are imported for type checkers alone stand for any type."""

    def __missing__(self, name: str) -> Any:
        return Any


@cache
def _hints(owner: Any) -> dict[str, Any]:
    return get_type_hints(owner, localns=_Names(vars(builtins) | vars(sys.modules[owner.__module__])))


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type of a hint, and the types of its parts: of a union, its alternatives."""
    kind = get_origin(hint) or hint
    if hasattr(kind, "__value__"):  # an alias by a `type` statement of Python 3.12, such as NumPy's NDArray
        return _parts(kind.__value__)
    return (Union if kind is UnionType else kind), get_args(hint)


def _fits(value: Any, hint: Any) -> bool:
    kind, parts = _parts(hint)
    if kind is Union:
        return any(_fits(value, each) for each in parts)
    if kind is Literal:
        return any(type(value) is type(each) and value == each for each in parts)
    if kind in (int, float):
        # To ask a float for the abstract class takes ten times as long.
        return isinstance(value, float | Real if kind is float else Integral) and not isinstance(value, bool)
    if kind is bool:
        return isinstance(value, Integral) and value in (0, 1)
    if not isinstance(kind, type) or kind is np.ndarray:
        return True
    try:
        own = isinstance(value, kind)
    except TypeError:  # a protocol for type checkers alone
        return True
    if not parts or not issubclass(kind, Iterable):
        return own
    if issubclass(kind, Mapping):
        return own and all(_fits(key, parts[0]) and _fits(each, parts[1]) for key, each in value.items())
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        return False
    if kind is tuple and parts[-1] is not ...:
        return len(value) == len(parts) and all(map(_fits, value, parts))
    return all(_fits(each, parts[0]) for each in value)


def _words(hint: Any, many: bool = False) -> str:
    """The values of a type in words."""
    kind, parts = _parts(hint)
    if kind in WORDS:
        return WORDS[kind][many]
    if kind is Union:
        return " or ".join(dict.fromkeys(_words(each, many) for each in parts))
    if kind is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if parts and issubclass(kind, Mapping):
        of = f"{_words(parts[0], True)} to {_words(parts[1], True)}"
        return f"mappings of {of}" if many else f"a mapping of {of}"
    if parts and kind is tuple and parts[-1] is not ...:
        of = ", ".join(map(_words, parts))
        return f"tuples ({of})" if many else f"a tuple ({of})"
    if parts and issubclass(kind, Iterable) and kind is not np.ndarray:
        return f"sequences of {_words(parts[0], True)}" if many else f"a sequence of {_words(parts[0], True)}"
    name = getattr(kind, "__name__", str(kind))
    if many:
        return f"{name} objects"
    made = f" (packer.{MADE_BY[name]})" if name in MADE_BY else ""
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}{made}"
