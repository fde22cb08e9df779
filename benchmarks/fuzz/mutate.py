"""Changes to a valid file: in its bytes, words and structure, and behind a hash that is right again."""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import lzma
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

Rng = np.random.Generator

WORDS = (
    b"", b"0", b"-1", b"1e-320", b"1e308", b"1e999", b"NaN", b"-Infinity", b"4611686018427387904", b"9" * 400,
    b"1180591620717411303424", b"0.30000000000000004", b"1:30", b"010", b"0x10", b"1_000", b"true", b"null",
    b"~", b'""', b"[]", b"{}", b"[" * 3000, b'{"a":' * 200, b"&a", b"*a", b"!!python/object:x", b"<<: 1",
    b"\\u0000", b"\x00", b"\xff", b"\xed\xa0\x80", b"\r", b"\n", b",", b'"', b"#", b"\t", b" ", b":", b"=",
    b"2023-02-30", b"2024-05-01T10:00:00Z", b"9999-12-31 23:59:59", b"../../x", b"\xe2\x80\xae", b"$(x)",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**62, 2**70, -(2**63), 1e-320, 1e-300, 5e-9, 1e30, 1e308, 0.5, "", "a", "\0",
    "x" * 300, "1e3", "../x", [], [[]], [1, 2], ["a", "a"], {}, {"a": 1}, [None], [1e308, -1],
)  # fmt: skip
_TOKEN = re.compile(rb"[A-Za-z0-9_.+-]+")
_NUMBER = re.compile(rb"-?[0-9]{1,15}(\.[0-9]{1,15})?(e[+-]?[0-9]{1,2})?")


FACTORS = (0.0, -1.0, 0.5, 2.0, 10.0, 1e-3, 1e3, 1e-6, 1e6)
GENTLE = 0.4
"""Share of the changes to texts and documents that change one number alone: the file is often read, and then used."""


def near(number: float, rng: Rng) -> float:
    """Another number of the same kind, which the rules may allow."""
    factor = FACTORS[rng.integers(len(FACTORS))]
    other = number * factor if number else factor
    return int(other) if isinstance(number, int) and abs(other) < 1e18 else other


def raw(data: bytes, rng: Rng) -> bytes:
    """Bytes flipped, cut out, doubled or put in, or the end lost."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(0, len(changed) + 1))
        match int(rng.integers(0, 5)):
            case 0 if at < len(changed):
                changed[at] ^= int(rng.integers(1, 256))
            case 1:
                del changed[at : at + int(rng.integers(1, 40))]
            case 2:
                changed[at:at] = changed[at : at + int(rng.integers(1, 200))]
            case 3:
                changed[at:at] = WORDS[rng.integers(len(WORDS))]
            case _:
                if rng.random() < 0.3:
                    del changed[at:]
    return bytes(changed)


def words(data: bytes, rng: Rng) -> bytes:
    """Some words of a text replaced by odd ones, or by each other."""
    found = list(_TOKEN.finditer(data))
    if not found:
        return raw(data, rng)
    numbers = [each for each in found if _NUMBER.fullmatch(each.group())]
    if numbers and rng.random() < GENTLE:
        old = numbers[rng.integers(len(numbers))]
        value = float(old.group()) if b"." in old.group() or b"e" in old.group() else int(old.group())
        return data[: old.start()] + str(near(value, rng)).encode() + data[old.end() :]
    for _ in range(int(rng.integers(1, 4))):
        old = found[rng.integers(len(found))].group()
        other = found[rng.integers(len(found))].group()
        new = other if rng.random() < 0.2 else WORDS[rng.integers(len(WORDS))]
        data = data.replace(old, new, 1 if rng.random() < 0.7 else -1)
    return data


def json_text(data: bytes, rng: Rng) -> bytes:
    """A JSON document with other values and keys, or another value in its place."""
    whole = rng.random() < 0.02
    return json.dumps(VALUES[rng.integers(len(VALUES))] if whole else _changed(json.loads(data), rng)).encode()


def toml_text(data: bytes, rng: Rng) -> bytes:
    """A TOML document with other values and keys."""
    import tomlkit

    document = _without_none(_changed(tomllib.loads(data.decode()), rng))
    return tomlkit.dumps(document if isinstance(document, dict) else {}).encode()


def _changed(document: Any, rng: Rng) -> Any:
    numbers = [(parent, key) for parent, key in _places(document) if type(parent[key]) in (int, float)]
    if numbers and rng.random() < GENTLE:
        parent, key = numbers[rng.integers(len(numbers))]
        parent[key] = near(parent[key], rng)
        return document
    for _ in range(int(rng.integers(1, 4))):
        places = list(_places(document))
        if not places:
            break
        parent, key = places[rng.integers(len(places))]
        match int(rng.integers(0, 6)):
            case 0 | 1 | 2:
                parent[key] = copy.deepcopy(VALUES[rng.integers(len(VALUES))])
            case 3:
                del parent[key]
            case 4:
                other, its = places[rng.integers(len(places))]
                with suppress(KeyError, IndexError):
                    parent[key] = json.loads(json.dumps(other[its], default=str))
            case _:
                if isinstance(parent, dict):
                    parent[f"{key}x"] = parent.pop(key)
                else:
                    parent.append(parent[key])
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside a document."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            yield each, key
            waiting.append(each[key])


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(v) for v in value if v is not None]
    return value


def packed(data: bytes, rng: Rng) -> bytes:
    """A gzip file, damaged inside or outside."""
    again = gzip.compress(words(gzip.decompress(data), rng), mtime=0)
    return raw(again, rng) if rng.random() < 0.3 else again


def model(data: bytes, rng: Rng) -> bytes:
    """A predictor with a changed header or changed arrays and the hash that is right for them."""
    if rng.random() < 0.15:
        return raw(data, rng)
    magic, _, body = data.split(b"\n", 2)
    text, _, content = body.partition(b"\n")
    arrays = bytearray(lzma.decompress(content))
    match int(rng.integers(0, 4)):
        case 0:
            text = json_text(text, rng)
        case 1:
            text = words(text, rng)
        case 2:
            for _ in range(int(rng.integers(1, 6))):
                at = int(rng.integers(0, len(arrays) // 4)) * 4
                arrays[at : at + 4] = rng.bytes(4)
        case _:
            at = int(rng.integers(0, len(arrays)))
            arrays[at : at + 400] = rng.bytes(min(400, len(arrays) - at))
    body = text.replace(b"\n", b" ") + b"\n" + lzma.compress(bytes(arrays), preset=0)
    return b"\n".join([magic, hashlib.sha256(body).hexdigest().encode(), body])


def parquet(data: bytes, rng: Rng) -> bytes:
    """A Parquet file with flipped bytes between its marks, or with other columns, cells and metadata."""
    import polars as pl

    if rng.random() < 0.5:
        return b"PAR1" + raw(data[4:-4], rng) + b"PAR1"
    frame = pl.read_parquet(io.BytesIO(data))
    notes = {k: v for k, v in pl.read_parquet_metadata(io.BytesIO(data)).items() if k != "ARROW:schema"}
    name = frame.columns[rng.integers(len(frame.columns))]
    value = VALUES[rng.integers(len(VALUES))]
    match int(rng.integers(0, 5)):
        case 0:
            with suppress(pl.exceptions.PolarsError, TypeError, OverflowError):
                frame = frame.with_columns(pl.Series(name, [value] * frame.height, strict=False))
        case 1:
            frame = frame.drop(name)
        case 2:
            frame = frame.head(int(rng.integers(0, frame.height + 1)))
        case 3:
            with suppress(pl.exceptions.PolarsError):
                frame = frame.rename({name: str(value)[:50] or "x"})
        case _:
            notes = {k: words(v.encode(), rng).decode("utf-8", "replace") for k, v in notes.items()}
    out = io.BytesIO()
    try:
        frame.write_parquet(out, metadata=notes)
    except pl.exceptions.PolarsError:  # a column of empty structures is in no Parquet file
        return data
    return out.getvalue()


Change = Callable[[bytes, Rng], bytes]
