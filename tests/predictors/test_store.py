"""Whatever a model's file holds, it is refused in words or it can be evaluated: no index leaves its array."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.errors import ModelError
from packer.predictors.families import family_of
from packer.predictors.features import NAMES
from packer.predictors.store import MAGIC, Model, from_bytes, read_model, to_bytes, write_model
from packer.predictors.targets import OUTPUTS

KINDS = ("forest", "boosting", "tree", "svm", "knn")
QUESTIONS = np.linspace(0.0, 3e4, 4 * len(NAMES), dtype=np.float32).reshape(4, len(NAMES))


def outcome(model: Model) -> str:
    """Save a model with a valid hash and read it: why it was refused, or nothing if its outputs are finite."""
    try:
        again = from_bytes(to_bytes(model), "m.packer")
    except ModelError as error:
        return str(error)
    family = family_of(again)
    assert all(np.isfinite(family.rows(QUESTIONS, k)).all() for k in range(len(OUTPUTS)))
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_model_comes_back(models: dict[str, Model], kind: str) -> None:
    """What was written is read: the same header, arrays and bytes."""
    again = from_bytes(to_bytes(models[kind]), "m.packer")
    assert to_bytes(again) == to_bytes(models[kind])
    assert outcome(models[kind]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_random_arrays_with_a_valid_hash(models: dict[str, Model], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes, entries and shapes in any array neither crash the kernels nor give NaN."""
    fast = partial(lzma.compress, preset=0)  # hundreds of files, each read once
    monkeypatch.setattr("packer.predictors.store.lzma.compress", lambda data, **_: fast(data))
    rng = np.random.default_rng(0)
    model = models[kind]
    refused = 0
    for name, array in model.arrays.items():
        for attempt in range(6):
            if attempt < 2:
                changed = np.frombuffer(rng.bytes(array.nbytes), array.dtype).reshape(array.shape)
            elif attempt < 4:
                changed = array.copy()
                odd = [-1, 0, 1, 7, 2**31 - 1] + ([1e30, np.nan] if array.dtype.kind == "f" else [])
                places = rng.integers(0, max(1, array.size), 3)
                changed.reshape(-1)[places[places < array.size]] = rng.choice(odd)
            else:
                changed = array[: rng.integers(0, len(array) + 1)]
            refused += bool(outcome(replace(model, arrays={**model.arrays, name: changed})))
    assert refused > len(model.arrays)


def test_leaves_without_finite_figures_are_refused(models: dict[str, Model]) -> None:
    """A factor of e to the power of a million is no prediction; neither an evaluation nor its rules meet it."""
    huge = np.full_like(models["tree"].arrays["threshold"], 1e6)
    changed = replace(models["tree"], arrays={**models["tree"].arrays, "threshold": huge})
    assert outcome(changed) == (
        "m.packer: the predictor can't be used: expected the array 'threshold' to be within ±500 in leaves."
    )


ODD: dict[str, Callable[[Any], Any]] = {
    "kind": lambda _: "oracle",
    "family": lambda _: "neighbours",
    "calibration": lambda _: [1.0, float("nan")],
    "medians": lambda _: [],
    "ranges": lambda value: [value[1], value[0]],
    "profile": lambda _: None,
    "outputs": lambda value: value[::-1],
    "rows": lambda _: "many",
}


@pytest.mark.parametrize("key", ODD)
def test_odd_headers_are_refused(models: dict[str, Model], key: str) -> None:
    """Unknown kinds, NaN, missing and misshapen entries are errors, with a valid hash too."""
    header = dict(models["tree"].header)
    assert outcome(replace(models["tree"], header={**header, key: ODD[key](header[key])}))
    del header[key]
    assert outcome(replace(models["tree"], header=header))


def test_unpacking_is_bounded(models: dict[str, Model]) -> None:
    """A file of kilobytes that unpacks to gigabytes is refused before memory is spent."""
    packed = lzma.compress(bytes(2**26), preset=0)
    for claimed, message in ((2**20, "don't fill the file"), (2**31, "more than 268,435,456 bytes")):
        arrays = [{"name": "bias", "dtype": "<f8", "shape": [claimed]}]
        text = json.dumps({**models["tree"].header, "arrays": arrays}).encode()
        body = text + b"\n" + packed
        whole = b"\n".join([MAGIC, hashlib.sha256(body).hexdigest().encode(), body])
        with pytest.raises(ModelError, match=message):
            from_bytes(whole, "m.packer")


def test_damaged_files_are_refused(models: dict[str, Model], tmp_path: Path) -> None:
    """One changed byte, a lost end, or another kind of file: each is refused, none is executed."""
    path = tmp_path / "m.packer"
    whole = to_bytes(models["tree"])
    changed = bytearray(whole)
    changed[len(changed) // 2] ^= 1
    for content, message in (
        (bytes(changed), "hash"),
        (whole[:-10], "hash"),
        (b"PK\x03\x04 something else", "not a predictor"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            read_model(path)


def test_other_features_are_refused(models: dict[str, Model], tmp_path: Path) -> None:
    """A predictor of another version's features names those unknown here and those missing there."""
    path = tmp_path / "m.packer"
    names = [name if name != "capacity" else "horsepower" for name in models["tree"].header["features"]]
    write_model(replace(models["tree"], header={**models["tree"].header, "features": names}), path)
    with pytest.raises(ModelError, match="unknown here: horsepower; missing there: capacity"):
        read_model(path)
