"""Guards for constructors: each raises `ValidationError` with the rule and the value received."""

from __future__ import annotations

import math
import numbers
import unicodedata
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.errors import ValidationError, shown

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # What vLLM accepts as `max_lora_rank` (vllm/config/lora.py).


LONGEST_NAME = 256
MOST_COUNT = 10**8  # Largest accepted count in a profile.


def name(what: str, value: object) -> str:
    """`value`, if it is text of 1 to 256 characters without control characters and surrogates."""
    if not isinstance(value, str) or not 1 <= len(value) <= LONGEST_NAME:
        raise ValidationError(f"Expected {what} to be text of 1 to {LONGEST_NAME} characters, got {shown(value)}.")
    if not value.isprintable() and any(unicodedata.category(c) in ("Cc", "Cs") for c in value):
        raise ValidationError(f"Expected {what} without control characters and surrogates, got {shown(value)}.")
    return value


def instance(what: str, value: object, kind: type, made_by: str) -> None:
    """Raise unless `value` is an instance of `kind`; `made_by`: an expression that makes one."""
    if not isinstance(value, kind):
        named = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        raise ValidationError(f"Expected {what} to be {named}, as {made_by} gives, got {shown(value)}.")


def decimal(text: str) -> float:
    """The number in a text; unlike float(), raises `ValueError` for "1_000" and digits of other scripts, too."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


def integer(name: str, value: object, *, low: int, high: int | None = None) -> int:
    """`value` as int, if it is a whole number in [low, high]."""
    whole = isinstance(value, int | numbers.Integral) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        span = f"in [{low}, {high}]" if high is not None else f">= {low}"
        raise ValidationError(f"Expected {name} to be a whole number {span}, got {shown(value)}.")
    return int(value)  # type: ignore[call-overload, no-any-return]


def real(name: str, value: object, *, low: float, high: float = math.inf, open_low: bool = False) -> float:
    """`value` as float, if it is a finite number in [low, high] (or ]low, high])."""
    number = _finite(value)
    if not ((number > low if open_low else number >= low) and number <= high):
        span = f"{'>' if open_low else '>='} {low:g}" + (f" and <= {high:g}" if math.isfinite(high) else "")
        raise ValidationError(f"Expected {name} to be a finite number {span}, got {shown(value)}.")
    return number


def row(name: str, values: object, *, whole: bool = False) -> npt.NDArray[Any]:
    """`values`, a list or array of finite numbers, as float64 (n,); `whole`: of whole numbers, as int64 (n,)."""
    try:
        found = np.asarray(values)
    except ValueError:  # rows of different lengths
        found = np.array(None)
    kind = np.int64 if whole else np.float64
    if found.ndim == 1 and not found.size:
        return found.astype(kind)
    rule = f"Expected {name} to be a row of {'whole' if whole else 'finite'} numbers"
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        raise ValidationError(f"{rule}, got {shown(values)}.")
    if found.dtype.kind in "uf":  # an int64 always fits
        fit = np.isfinite(found) & ((np.rint(found) == found) & (np.abs(found) < 2.0**63) if whole else True)
        if not fit.all():
            k = int(fit.argmin())
            large = " below 2**63" if whole and abs(found[k]) >= 2.0**63 else ""
            raise ValidationError(f"{rule}{large}, got {found[k]} in place {k:,}.")
    return found.astype(kind, copy=False)


def time_limit(value: float | None) -> float:
    """`value` as a time limit, s, if it is > 0; infinity for None."""
    return math.inf if value is None else real("the time limit (s)", value, low=0, open_low=True)


def _finite(value: object) -> float:
    """`value` as float if it is a finite number, else NaN."""
    # To ask a float for the abstract class takes ten times as long.
    if not isinstance(value, float | numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        number = float(value)
    except OverflowError:  # an int too large for a float
        return math.nan
    return number if math.isfinite(number) else math.nan


def choice(name: str, value: object, known: Iterable[object]) -> None:
    """Raise unless `value` is one of `known`."""
    if value not in (listed := list(known)):
        raise ValidationError(f"Expected {name} to be one of {', '.join(map(str, listed))}, got {shown(value)}.")


def slot_rank(name: str, value: object) -> int:
    """`value`, if vLLM accepts it as `max_lora_rank`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) not in SLOT_RANKS:
        listed = ", ".join(map(str, SLOT_RANKS))
        raise ValidationError(f"Expected {name} to be one of {listed}, got {shown(value)}.")
    return int(value)


def slot_rank_for(rank: int) -> int:
    """Smallest `max_lora_rank` that holds an adapter of this rank."""
    for slot in SLOT_RANKS:
        if rank <= slot:
            return slot
    raise ValidationError(f"Expected a rank <= {SLOT_RANKS[-1]} (vLLM's largest max_lora_rank), got {rank}.")


def keep_real(
    spec: object, key: str, what: str = "", *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    """Check a field of a frozen dataclass and store it as float, so that equal numbers give equal fingerprints. `what`:
    name of the field in messages; "": its key."""
    name = key.rpartition(".")[2]
    value = getattr(spec, name)
    if type(value) is not float or not (low < value < math.inf and value <= high):
        value = real(what or key, value, low=low, high=high, open_low=open_low)
        object.__setattr__(spec, name, value)


def keep_name(spec: object, key: str, what: str) -> None:
    """Check a field of a frozen dataclass and store it as str, which all formats of files have."""
    value = name(what, getattr(spec, key))
    if type(value) is not str:
        object.__setattr__(spec, key, str(value))


def keep_tuple(spec: object, *keys: str) -> None:
    """Store fields of a frozen dataclass, sequences or arrays, as tuples, so that equal ones are equal."""
    for key in keys:
        value = getattr(spec, key)
        if type(value) is not tuple:
            object.__setattr__(spec, key, tuple(value.tolist() if isinstance(value, np.ndarray) else value))


def keep_integer(spec: object, key: str, what: str = "", *, low: int, high: int = MOST_COUNT) -> None:
    """Check a field of a frozen dataclass and store it as int."""
    name = key.rpartition(".")[2]
    value = getattr(spec, name)
    if type(value) is not int or not low <= value <= high:
        object.__setattr__(spec, name, integer(what or key, value, low=low, high=high))
