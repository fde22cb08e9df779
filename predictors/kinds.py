"""The kinds of model, behind one interface, so that one procedure trains all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from itertools import product
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from packer.arrays import Float32Array, FloatArray
from packer.errors import UnknownNameError
from packer.io.shipped import table
from packer.predictors.ensemble import from_lightgbm, from_sklearn, packed
from packer.predictors.features import FEATURES
from packer.predictors.targets import OUTPUTS, STARVED

Arrays = dict[str, npt.NDArray[Any]]
CERTAIN = 4.0  # log odds of a neighbour that starves, before calibration


class ModelKind:
    """A kind of model.

    `family`: the class of `packer.predictors.families` that evaluates the model. `max_rows`: maximum number of rows
    of the dataset that are used, because kernel machines and neighbours slow down with each row. `estimators`: module
    and names of the estimators for regression and for classification. `fixed`: their parameters that are not searched.
    `grids`, `defaults`: hyperparameters for regression and for classification: the halving search tries points of
    `grids`; without a search, `defaults` are used.
    """

    name: ClassVar[str]
    family: ClassVar[str] = "trees"
    max_rows: ClassVar[int | None] = None
    estimators: ClassVar[tuple[str, str, str]]
    fixed: ClassVar[dict[str, Any]] = {}

    _tables = cached_property(lambda self: table("packer.predictors", "hyperparameters.yaml")[self.name])
    grids = cached_property(lambda self: self._tables["grids"])
    defaults = cached_property(lambda self: self._tables["defaults"])

    def estimator(self, classify: bool, seed: int, params: Mapping[str, Any]) -> Any:
        """Return an unfitted scikit-learn estimator of features float32 (n, F)."""
        module, *names = self.estimators
        made = getattr(import_module(module), names[classify])(**self.fixed, **params)
        return made.set_params(random_state=seed) if "random_state" in made.get_params() else made

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """Return the arrays of the fitted estimators by output, empty for absent ones; x: the features in the fit. Here
        these are flattened trees of equal weight; a leaf's value for starvation is its share of starved rows."""
        outputs = []
        for name in OUTPUTS:
            trees = getattr(fitted[name], "estimators_", [fitted[name]]) if name in fitted else []
            column = 1 if name == STARVED and hasattr(fitted.get(name), "classes_") else 0
            outputs.append([from_sklearn(tree.tree_, 1.0 / len(trees), column) for tree in trees])
        return packed(outputs, x.shape[1])


class Forest(ModelKind):
    """Means over trees grown on bootstrap samples, as in arXiv 2602.24044."""

    name = "forest"
    estimators = ("sklearn.ensemble", "RandomForestRegressor", "RandomForestClassifier")
    fixed: ClassVar[dict[str, Any]] = {"n_jobs": 1}


class Tree(ModelKind):
    """One tree per figure, which can be read as rules: at most 32 leaves, 16 for starvation.
    `packer.predictors.kinds.refined` searches for the smallest trees."""

    name = "tree"
    estimators = ("sklearn.tree", "DecisionTreeRegressor", "DecisionTreeClassifier")


class Boosting(ModelKind):
    """LightGBM's sums of small trees, each fitted to the residuals of the earlier ones; not in the paper. The
    probability of starvation never falls when all rates rise."""

    name = "boosting"
    estimators = ("lightgbm", "LGBMRegressor", "LGBMClassifier")
    fixed: ClassVar[dict[str, Any]] = {
        "n_jobs": 1, "deterministic": True, "force_row_wise": True, "verbosity": -1, "reg_lambda": 1.0,
    }  # fmt: skip

    def estimator(self, classify: bool, seed: int, params: Mapping[str, Any]) -> Any:
        """Return an estimator with monotone constraints for classification, else one of the absolute error."""
        signs = {"monotone_constraints": [feature.trend for feature in FEATURES]}
        more: dict[str, Any] = signs if classify else {"objective": "regression_l1"}
        return super().estimator(classify, seed, {**more, **params})

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """Return the flattened trees."""
        outputs = [from_lightgbm(fitted[name].booster_) if name in fitted else [] for name in OUTPUTS]
        return packed(outputs, x.shape[1])


class Svm(ModelKind):
    """RBF kernels on squashed and scaled features, as in arXiv 2602.24044."""

    name = "svm"
    family = "machine"
    max_rows = 2500  # the time to fit grows with the square of the rows
    estimators = ("sklearn.svm", "SVR", "SVC")

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """Return the support vectors and their weights."""
        arrays: Arrays = {"constants": np.zeros((len(OUTPUTS), 2))}
        for k, name in enumerate(OUTPUTS):
            vectors, weights = np.zeros((0, x.shape[1])), np.zeros(0)
            if (machine := fitted.get(name)) is not None:
                vectors, weights = machine.support_vectors_, machine.dual_coef_[0]
                arrays["constants"][k] = machine.gamma, machine.intercept_[0]
            arrays[f"vectors_{k}"] = vectors.astype(np.float32)
            arrays[f"weights_{k}"] = weights.astype(np.float32)
        return arrays


class Knn(ModelKind):
    """Means over the nearest points of the training set, weighted by 1 / distance, as in arXiv 2602.24044."""

    name = "knn"
    family = "neighbours"
    max_rows = 4000  # each evaluation reads every row
    estimators = ("sklearn.neighbors", "KNeighborsRegressor", "KNeighborsClassifier")
    fixed: ClassVar[dict[str, Any]] = {"weights": "distance"}

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """Return the points with their values; a point without a value has the prediction from its neighbours."""
        values = np.zeros((len(x), len(OUTPUTS)), dtype=np.float32)
        k = self.defaults[True]["n_neighbors"]
        for column, name in enumerate(OUTPUTS):
            if name in fitted:
                predicted = fitted[name].predict(x)  # a point that was fitted on is its own nearest neighbour
                values[:, column] = CERTAIN * (2.0 * predicted - 1.0) if name == STARVED else predicted
                k = fitted[name].n_neighbors
        return {"points": x, "values": values, "k": np.array([k], dtype=np.int64)}


KINDS: dict[str, type[ModelKind]] = {kind.name: kind for kind in (Forest, Boosting, Tree, Svm, Knn)}  # By name.


def kind_of(name: str) -> ModelKind:
    """Return the kind with this name; raises `UnknownNameError` if there is none."""
    if name not in KINDS:
        raise UnknownNameError("kind of predictor", name, KINDS)
    return KINDS[name]()


PENALTY = 0.003  # Relative growth of the error that is accepted for each rule less.
FOLDS = 3
MIN_LEAVES = (5, 20)
TEACHERS = 40
MOST_ROWS = 3000  # of the search; the chosen tree is fitted to all


def refined(kind: ModelKind, x: Float32Array, y: FloatArray, groups: npt.NDArray[np.str_], name: str, seed: int) -> Any:
    """Return the fitted scikit-learn tree with the least (error in grouped folds) · (1 + PENALTY · rules). Trees are
    grown best first (`max_leaf_nodes`) on the figures themselves or on the predictions of a forest, which are smoother.
    Ties go to fewer rules."""
    from sklearn.model_selection import GroupKFold

    classify = name == STARVED
    most = kind.defaults[classify]["max_leaf_nodes"]
    sizes = [n for n in (2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32) if n <= most]
    some = np.sort(np.random.default_rng(seed).permutation(len(x))[:MOST_ROWS])
    part, figures = x[some], y[some]
    folds = list(GroupKFold(FOLDS).split(part, groups=groups[some]))
    smooth = [_teacher(part[learn], figures[learn], seed) for learn, _ in folds]

    def penalised(least: int, taught: bool, rules: int) -> float:
        errors = []
        for (learn, held), teacher in zip(folds, smooth, strict=True):
            tree = _grown(part[learn], teacher if taught else figures[learn], rules, least, seed)
            errors.append(_error(tree.predict(part[held]), figures[held], classify))
        return float(np.mean(errors)) * (1.0 + PENALTY * rules)

    tried = product(MIN_LEAVES, (False, True), sizes)
    _, rules, least, taught = min((penalised(*each), each[2], each[0], each[1]) for each in tried)
    return _grown(x, _teacher(x, y, seed) if taught else y, rules, least, seed)


def _grown(x: Float32Array, y: FloatArray, rules: int, least: int, seed: int) -> Any:
    from sklearn.tree import DecisionTreeRegressor

    return DecisionTreeRegressor(max_leaf_nodes=rules, min_samples_leaf=least, random_state=seed).fit(x, y)


def _teacher(x: Float32Array, y: FloatArray, seed: int) -> FloatArray:
    """Return the out-of-bag predictions of a forest for each row."""
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(
        TEACHERS, min_samples_leaf=2, max_features=0.5, oob_score=True, random_state=seed, n_jobs=1
    ).fit(x, y)
    predicted: FloatArray = forest.oob_prediction_
    return predicted


def _error(predicted: FloatArray, y: FloatArray, classify: bool) -> float:
    """Wrong classes (share, plus a tenth of the squared error), or the mean absolute error."""
    if classify:
        return float(np.mean((predicted >= 0.5) != (y >= 0.5)) + 0.1 * np.mean((predicted - y) ** 2))
    return float(np.mean(np.abs(predicted - y)))
