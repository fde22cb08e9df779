"""Saved predictors: a header in JSON and plain arrays, with a hash. Nothing in a file is executed.

Layout: the line `packer predictor 1`, a line with the SHA-256 of all that follows, a line of JSON, and the
arrays one after another, compressed with LZMA.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from packer.errors import FileFormatError, ModelError, reading
from packer.io.documents import parse_json
from packer.io.files import decode, read_bytes, write_bytes
from packer.io.schema import FileTable, parse
from packer.io.tables import first_line
from packer.predictors.arrays import check_arrays
from packer.predictors.features import NAMES
from packer.predictors.kinds import kind_of
from packer.predictors.targets import OUTPUTS
from packer.profile import Profile

MAGIC = b"packer predictor 1"
MAX_ARRAY_BYTES = 2**28  # Maximum total bytes of the arrays of a model; shipped models have less than 2 MB.
_LZMA_MEMORY_BYTES = 2**26


class _Array(FileTable):
    """Type and shape of an array."""

    name: str
    dtype: Literal["<f4", "<f8", "<i4", "<i8"]
    shape: list[Annotated[int, Field(ge=0, le=2**31)]] = Field(max_length=2)


class _Header(FileTable):
    """The line of JSON."""

    kind: str
    family: Literal["trees", "machine", "neighbours"]
    profile: str
    fingerprint: str
    dataset: str
    rows: int
    rows_used: int
    features: list[str]
    outputs: list[str]
    ranges: list[list[float]] = Field(min_length=2, max_length=2)
    medians: list[float]
    calibration: list[float] = Field(min_length=2, max_length=2)
    params: dict[str, Any] | str
    search: bool
    seed: int
    versions: dict[str, str]
    scores: dict[str, dict[str, int | float | None]]
    arrays: list[_Array]


@dataclass(frozen=True, eq=False)
class Model:
    """A trained predictor: its header (JSON-able), and its arrays by name."""

    header: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]

    @property
    def kind(self) -> str:
        """ "forest", "boosting", …"""
        return str(self.header["kind"])

    def check_profile(self, profile: Profile, where: str) -> None:
        """Raise `ModelError` if the model was not trained for this profile."""
        if self.header["fingerprint"] != profile.fingerprint:
            raise ModelError(
                f"{where}: trained for the profile {self.header['profile']} "
                f"({self.header['fingerprint']}), not for {profile.name} ({profile.fingerprint}). "
                "Train one: packer predictor build, then packer predictor train."
            )


def to_bytes(model: Model) -> bytes:
    """Return the content of a model's file; equal models give equal bytes."""
    entries, chunks = [], []
    for name in sorted(model.arrays):
        array = np.ascontiguousarray(model.arrays[name])
        array = array.astype(array.dtype.newbyteorder("<"))
        entries.append({"name": name, "dtype": array.dtype.str, "shape": list(array.shape)})
        chunks.append(array.tobytes())
    header = json.dumps({**model.header, "arrays": entries}, sort_keys=True).encode()
    body = header + b"\n" + lzma.compress(b"".join(chunks), preset=6)
    return b"\n".join([MAGIC, hashlib.sha256(body).hexdigest().encode(), body])


def write_model(model: Model, path: str | os.PathLike[str], *, force: bool = True) -> None:
    """Write a predictor, atomically."""
    write_bytes(path, to_bytes(model), force=force)


def read_model(path: str | os.PathLike[str]) -> Model:
    """Read a predictor; raises `FileFormatError`: no such file; `ModelError`: it is damaged or does not fit."""
    return from_bytes(read_bytes(path), os.fspath(path))


def from_bytes(data: bytes, where: str) -> Model:
    """The model in a file's content; `where` names the file in messages. Raises `ModelError`."""
    magic, _, rest = data.partition(b"\n")
    digest, _, body = rest.partition(b"\n")
    if magic != MAGIC:
        rule = f"it is not a predictor of this version of packer (expected {MAGIC.decode()!r})"
        raise ModelError(f"{where}: {rule}.")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ModelError(f"{where}: the content does not match its hash: it was changed or cut short.")
    text, _, packed = body.partition(b"\n")
    try:
        with reading(where):
            header = parse(_Header, parse_json(decode(text)))
    except FileFormatError as error:
        raise ModelError(f"{error} The header of the predictor is damaged: train it again.") from None
    _check_features(header, where)
    try:
        if kind_of(header.kind).family != header.family:
            rule = f"a predictor of the kind {header.kind!r} is not of the family {header.family!r}"
            raise ValueError(rule)
        arrays = _arrays(header.arrays, packed)
        check_arrays(header.family, arrays, len(NAMES), len(OUTPUTS))
    except (ValueError, EOFError, lzma.LZMAError) as error:
        raise ModelError(f"{where}: the predictor can't be used: {first_line(error)}.") from None
    return Model(header.model_dump(exclude={"arrays"}), arrays)


def _check_features(header: _Header, where: str) -> None:
    """Raise `ModelError` unless the features and outputs are this version's, with ranges and medians."""
    for what, known, given in (("features", NAMES, header.features), ("outputs", OUTPUTS, header.outputs)):
        if tuple(given) != known:
            unknown = ", ".join(sorted(set(given) - set(known)))[:200] or "none"
            missing = ", ".join(sorted(set(known) - set(given))) or "none"
            rule = f"{where}: it was trained on other {what} (unknown here: {unknown}; missing there: {missing}):"
            raise ModelError(f"{rule} train it again.")
    low, high = header.ranges
    ordered = len(low) == len(high) == len(NAMES) and all(a <= b for a, b in zip(low, high, strict=True))
    if not ordered or len(header.medians) != len(NAMES):
        raise ModelError(f"{where}: expected a range and a median for each of {len(NAMES)} features.")


def _arrays(entries: Sequence[_Array], packed: bytes) -> dict[str, npt.NDArray[Any]]:
    """Unpack the arrays; raises `ValueError` unless they have exactly the size that their shapes give."""
    sizes = [math.prod(entry.shape) * np.dtype(entry.dtype).itemsize for entry in entries]
    if sum(sizes) > MAX_ARRAY_BYTES:
        raise ValueError(f"its arrays have more than {MAX_ARRAY_BYTES:,} bytes")
    unpack = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_LZMA_MEMORY_BYTES)
    data = unpack.decompress(packed, sum(sizes) + 1)
    if len(data) != sum(sizes) or unpack.unused_data:
        raise ValueError("the arrays don't fill the file")
    ends = np.cumsum([0, *sizes]).tolist()
    return {
        entry.name: np.frombuffer(data[start:end], entry.dtype).reshape(entry.shape)
        for entry, start, end in zip(entries, ends, ends[1:], strict=False)
    }


PACKAGE = "packer.predictors.models"
KINDS = ("forest", "boosting", "tree")  # Kinds that are shipped; "svm" and "knn" can be trained.


def file_name(kind: str, profile_name: str) -> str:
    """File of the shipped predictor of a kind for a profile."""
    return f"{profile_name.replace('/', '--')}.{kind}.packer"


def shipped_model(kind: str, profile: Profile) -> tuple[Model, str]:
    """A profile's shipped predictor of a kind, and its file; raises `ModelError` if there is none that fits."""
    name = file_name(kind, profile.name)
    if name not in {each.name for each in files(PACKAGE).iterdir()}:  # a name may be too long for a file
        rule = f"There is no trained {kind!r} predictor for the profile {profile.name}: train one with packer predictor"
        raise ModelError(f"{rule} build --profile … and packer predictor train --kind {kind}, or use --predictor twin.")
    model = from_bytes(files(PACKAGE).joinpath(name).read_bytes(), name)
    model.check_profile(profile, name)
    return model, name
