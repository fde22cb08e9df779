"""Saved predictors: a header in JSON and plain arrays, hashed. Nothing in a file is ever executed.

Layout: the line `packer predictor 1`, a line with the SHA-256 of all that follows, a line of JSON, and the
arrays one after another, compressed with LZMA.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.errors import ModelError
from packer.io.files import read_bytes, write_bytes
from packer.predictors.features import NAMES
from packer.profile import Profile

MAGIC = b"packer predictor 1"
NEEDED = ("kind", "profile", "fingerprint", "calibration", "ranges", "medians")
"""Entries of the header without which a predictor can't be used."""

_TYPES = ("<f4", "<f8", "<i4", "<i8")


@dataclass(frozen=True, eq=False)
class Model:
    """A trained predictor: what it is (JSON-able), and its arrays by name."""

    header: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]

    @property
    def kind(self) -> str:
        """ "forest", "boosting", …"""
        return str(self.header["kind"])

    def check_profile(self, profile: Profile, where: str) -> None:
        """Raise `ModelError` if it was not trained for this profile."""
        if self.header["fingerprint"] != profile.fingerprint:
            raise ModelError(
                f"{where}: trained for the profile {self.header['profile']} "
                f"({self.header['fingerprint']}), not for {profile.name} ({profile.fingerprint}). "
                "Train one: packer dataset build, then packer train."
            )


def to_bytes(model: Model) -> bytes:
    """The file's content: the same for equal models."""
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
    """Read a predictor.

    Raises
    ------
    FileFormatError
        There is no such file.
    ModelError
        It is no predictor, was tampered with or cut short, or needs other features than this version has.
    """
    return from_bytes(read_bytes(path), os.fspath(path))


def from_bytes(data: bytes, where: str) -> Model:
    """The model in a file's content; `where` names the file in messages."""
    magic, _, rest = data.partition(b"\n")
    digest, _, body = rest.partition(b"\n")
    if magic != MAGIC:
        raise ModelError(
            f"{where}: it is no predictor of this version of packer (expected {MAGIC.decode()!r})."
        )
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ModelError(f"{where}: the content does not match its hash: it was changed or cut short.")
    text, _, packed = body.partition(b"\n")
    try:
        header = json.loads(text)
        arrays = _arrays(header.pop("arrays"), lzma.decompress(packed))
        features = tuple(header["features"])
        known = set(NEEDED) <= header.keys()
    except (ValueError, KeyError, TypeError, AttributeError, lzma.LZMAError) as error:
        raise ModelError(f"{where}: the predictor can't be read: {error}.") from None
    if not known:
        raise ModelError(f"{where}: the header lacks one of {', '.join(NEEDED)}: train it again.")
    if features != NAMES:
        unknown = sorted(set(features) - set(NAMES)) or "none"
        missing = sorted(set(NAMES) - set(features)) or "none"
        raise ModelError(
            f"{where}: it was trained on other features (unknown here: {unknown}; missing there: {missing}): "
            "train it again."
        )
    return Model(header, arrays)


def _arrays(entries: list[dict[str, Any]], data: bytes) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    at = 0
    for entry in entries:
        if entry["dtype"] not in _TYPES:
            raise ValueError(f"array type {entry['dtype']!r}")
        dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        arrays[entry["name"]] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    if at != len(data):
        raise ValueError("the arrays don't fill the file")
    return arrays
