"""The interface of a kind of model, so that one procedure trains all kinds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy.typing as npt

from packer.arrays import Float32Array
from packer.errors import UnknownNameError
from packer.io.shipped import table

Arrays = dict[str, npt.NDArray[Any]]


class ModelKind:
    """A kind of model.

    `family` names the class of `packer.predictors.families` that evaluates it; `max_rows`: no more than so
    many rows of the dataset are used (kernel machines and neighbours slow down with each). Hyperparameters, for
    regression and for classification: `grids`, of which the halving grid search tries some; `defaults` without it.
    """

    name: ClassVar[str]
    family: ClassVar[str] = "trees"
    max_rows: ClassVar[int | None] = None

    _tables = cached_property(lambda self: table("packer.predictors", "hyperparameters.yaml")[self.name])
    grids = cached_property(lambda self: self._tables["grids"])
    defaults = cached_property(lambda self: self._tables["defaults"])

    def estimator(self, classify: bool, seed: int, params: Mapping[str, Any]) -> Any:
        """An unfitted scikit-learn estimator of features float32 (n, F)."""
        raise NotImplementedError

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """Arrays of the fitted estimators by output, absent ones empty; x: what they were fitted on."""
        raise NotImplementedError


def kind_of(name: str) -> ModelKind:
    """The kind of that name: "forest", "boosting", "tree", "svm" or "knn"."""
    from packer.predictors.boosting import Boosting
    from packer.predictors.forest import Forest
    from packer.predictors.knn import Knn
    from packer.predictors.svm import Svm
    from packer.predictors.tree import Tree

    kinds = {kind.name: kind for kind in (Forest, Boosting, Tree, Svm, Knn)}
    if name not in kinds:
        raise UnknownNameError("kind of predictor", name, kinds)
    return kinds[name]()
