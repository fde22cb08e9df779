"""The smallest trees, to be read as rules, that keep the accuracy."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.arrays import Float32Array, FloatArray
from packer.predictors.kinds import ModelKind
from packer.predictors.targets import STARVED

PENALTY = 0.003
"""What a rule must be worth: the error may grow by so much (relative) for each rule that is saved."""
FOLDS = 3
MIN_LEAVES = (5, 20)
TEACHERS = 40
MOST_ROWS = 3000  # of the search; the chosen tree is fitted to all


def refined(
    kind: ModelKind, x: Float32Array, y: FloatArray, groups: npt.NDArray[np.str_], name: str, seed: int
) -> Any:
    """The fitted scikit-learn tree with the least (error in grouped folds) · (1 + PENALTY · rules).

    Trees are grown best first (`max_leaf_nodes`) on the figures themselves or on the predictions of a forest,
    which is smoother. Ties go to fewer rules.
    """
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
    """Predictions of a forest for each row, by the trees that did not have it in their samples."""
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
