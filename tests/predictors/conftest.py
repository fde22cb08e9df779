"""A small server, its dataset, and predictors trained on it: built once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from packer.predictors.build import build_dataset
from packer.predictors.dataset import Dataset, read_dataset
from packer.predictors.kinds import Forest
from packer.predictors.store import Model
from packer.predictors.train import train
from packer.profile import Profile
from packer.testing.analytic import small_profile

ROWS = 220


@pytest.fixture(scope="session")
def small() -> Profile:
    """A made-up server."""
    return small_profile()


@pytest.fixture(scope="session")
def data(
    small: Profile,
    tmp_path_factory: pytest.TempPathFactory,
    short_runs: Callable[[float], AbstractContextManager[None]],
) -> Dataset:
    """A small dataset of it."""
    path = tmp_path_factory.mktemp("data") / "small.parquet"
    with short_runs(1 / 24):
        build_dataset(small, path, rows=ROWS, seed=3, jobs=1)
    return read_dataset(path)


@pytest.fixture(scope="session")
def models(data: Dataset) -> dict[str, Model]:
    """One model of each kind; forests are of few trees."""
    few = [{**each, "n_estimators": 8} for each in Forest().defaults]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forest, "defaults", few)
        return {kind: train(kind, data, seed=1) for kind in ("forest", "boosting", "tree", "svm", "knn")}
