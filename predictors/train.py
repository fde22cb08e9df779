"""Train a predictor on a dataset: the paper's procedure, with no configuration on both sides of a split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.arrays import BoolArray, Float32Array, FloatArray
from packer.errors import ValidationError
from packer.evaluation import STARVATION_THRESHOLD
from packer.predictors.dataset import Dataset
from packer.predictors.families import family_of, squash
from packer.predictors.features import NAMES
from packer.predictors.kinds import Arrays, ModelKind, kind_of, refined
from packer.predictors.store import Model
from packer.predictors.targets import OUTPUTS, STABLE, STARVED, TARGETS, decoded, probability
from packer.progress import Progress, silent
from packer.twin.scores import macro_f1, smape

HELD_OUT = 0.2
FOLDS = 5
LEAST_ROWS = 200
MOST_CANDIDATES = 27
SEARCH_ROWS = 3000
LATENCIES = ("mean_itl_ms", "mean_ttft_ms", "median_ttft_ms")


@dataclass(frozen=True, eq=False)
class TrainingTable:
    """Training rows: features float32 (n, F), targets by output (NaN: unknown), groups."""

    x: Float32Array
    y: Mapping[str, FloatArray]
    groups: npt.NDArray[np.str_]

    @classmethod
    def of(cls, data: Dataset) -> TrainingTable:
        """Encode all rows of a dataset."""
        y: dict[str, FloatArray] = {STARVED: data.starved.astype(np.float64)}
        y |= {t.name: t.encode(data.labels[t.name], data.features) for t in TARGETS}
        y[STABLE] = np.where(data.labels[STABLE] > 0.5, 1.0, -1.0)
        return cls(data.features.astype(np.float32), y, data.group)

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: npt.NDArray[Any]) -> TrainingTable:
        """Return some of the rows."""
        return TrainingTable(self.x[rows], {name: y[rows] for name, y in self.y.items()}, self.groups[rows])

    def at_most(self, rows: int | None, seed: int) -> TrainingTable:
        """Return at most `rows` randomly chosen rows, in order; None: all."""
        if rows is None or len(self) <= rows:
            return self
        return self.take(np.sort(np.random.default_rng(seed).choice(len(self), rows, replace=False)))


def train(
    kind_name: str, data: Dataset, *, seed: int = 0, search: bool = False, refine: bool = False,
    progress: Progress = silent,
) -> Model:  # fmt: skip
    """Train a predictor, with a model card (`header["scores"]`, on rows held out by groups).

    `kind_name`: "forest", "boosting", "svm", "knn" or "tree".
    `data`: the training data.
    `seed`: seed of the splits and of the model; the same seed gives the same bytes.
    `search`: choose hyperparameters by successive halving with five grouped folds, instead of the defaults. It tries up
    to `MOST_CANDIDATES` random points of the kind's grid on at most `SEARCH_ROWS` rows.
    `refine`: trees only: search for the smallest trees that keep the accuracy (`packer.predictors.kinds.refined`).
    Raises `ValidationError`: the dataset is too small, or holds only starved (or only served) servers.
    """
    kind = kind_of(kind_name)
    _check(data)
    table = TrainingTable.of(data)
    learn, held = _split(data, seed)
    steps = 3 + len(OUTPUTS)
    progress("hyperparameters", 0, steps)
    params = {
        name: _search(kind, table.take(learn), name, seed) if search else kind.defaults[name == STARVED]
        for name in OUTPUTS
    }
    trial = _fit(kind, table.take(learn), params, seed, refine=refine)
    progress("calibration", 1, steps)
    calibration = _calibration(kind, table.take(learn), params, seed, refine=refine)
    header = _header(kind, data, params, seed, calibration, refine=refine, search=search)
    card = scores(Model(header, trial), data, held)
    progress("all rows", 2, steps)
    arrays = _fit(kind, table, params, seed, refine=refine)
    progress("all rows", steps, steps)
    return Model({**header, "scores": card}, arrays)


def _check(data: Dataset) -> None:
    if len(data) < LEAST_ROWS:
        raise ValidationError(f"Expected a dataset of at least {LEAST_ROWS} scenarios, got {len(data)}.")
    if not 0.0 < data.starved.mean() < 1.0:
        raise ValidationError("Expected a dataset with both starved and served servers, got only one of them.")


def _split(data: Dataset, seed: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    from sklearn.model_selection import GroupShuffleSplit

    split = GroupShuffleSplit(n_splits=1, test_size=HELD_OUT, random_state=seed)
    learn, held = next(split.split(data.features, groups=data.group))
    return learn, held


def _scaled(kind: ModelKind, x: Float32Array) -> tuple[Float32Array, dict[str, Float32Array]]:
    """Return the features as the family uses them, and their scaling."""
    if kind.family == "trees":
        return x, {}
    logs = np.log1p(np.maximum(x, 0.0))
    scaling = {"center": logs.mean(0), "scale": np.maximum(logs.std(0), np.float32(1e-3))}
    return squash(x, **scaling), scaling


def _fit(
    kind: ModelKind, table: TrainingTable, params: Mapping[str, Mapping[str, Any]], seed: int, *, refine: bool = False,
    outputs: tuple[str, ...] = OUTPUTS,
) -> Arrays:  # fmt: skip
    """Fit a model to the table, to at most `kind.max_rows` rows of it; return its arrays."""
    part = table.at_most(kind.max_rows, seed)
    x, scaling = _scaled(kind, part.x)
    fitted = {}
    for name in outputs:
        known = np.isfinite(part.y[name])
        y = part.y[name][known]
        classify = name == STARVED
        estimator = kind.estimator(classify, seed, params[name])
        if refine:
            estimator = refined(kind, x[known], y, part.groups[known], name, seed)
        else:
            estimator.fit(x[known], y.astype(np.int64) if classify else y)
        fitted[name] = estimator
    return {**kind.pack(fitted, x), **scaling}


def _search(kind: ModelKind, table: TrainingTable, name: str, seed: int) -> dict[str, Any]:
    """Choose hyperparameters by successive halving over the kind's grid, with five folds by groups."""
    from sklearn.experimental import enable_halving_search_cv  # noqa: F401
    from sklearn.model_selection import GroupKFold, HalvingRandomSearchCV

    if kind.family == "neighbours" and name != STARVED:
        return dict(kind.defaults[False])  # one search serves all outputs: one number of neighbours
    part = table.at_most(min(kind.max_rows or SEARCH_ROWS, SEARCH_ROWS), seed)
    known = np.isfinite(part.y[name])
    x, y, classify = _scaled(kind, part.x[known])[0], part.y[name][known], name == STARVED
    grid = kind.grids[classify]
    search = HalvingRandomSearchCV(
        kind.estimator(classify, seed, {}), grid, cv=GroupKFold(FOLDS), factor=3,
        n_candidates=min(MOST_CANDIDATES, math.prod(map(len, grid.values()))),
        scoring="f1_macro" if classify else "neg_mean_absolute_error",
        min_resources=min(len(x), max(200, len(x) // 27)), random_state=seed, refit=False,
    )  # fmt: skip
    search.fit(x, y.astype(np.int64) if classify else y, groups=part.groups[known])
    return dict(search.best_params_)


def _calibration(
    kind: ModelKind, table: TrainingTable, params: Mapping[str, Mapping[str, Any]], seed: int, *, refine: bool
) -> tuple[float, float]:
    """Fit slope and offset that turn the model's output into a probability (Platt), on folds by groups."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold

    predicted = np.full(len(table), np.nan)
    for learn, held in GroupKFold(3).split(table.x, groups=table.groups):
        arrays = _fit(kind, table.take(learn), params, seed, refine=refine, outputs=(STARVED,))
        model = Model({"family": kind.family, "features": NAMES}, arrays)
        predicted[held] = family_of(model).rows(table.x[held], OUTPUTS.index(STARVED))
    fit = LogisticRegression(C=1e3, max_iter=1000).fit(predicted[:, None], table.y[STARVED].astype(np.int64))
    return float(fit.coef_[0, 0]), float(fit.intercept_[0])


def _header(
    kind: ModelKind, data: Dataset, params: Mapping[str, Mapping[str, Any]], seed: int,
    calibration: tuple[float, float], *, refine: bool, search: bool,
) -> dict[str, Any]:  # fmt: skip
    from importlib.metadata import version

    return {
        "kind": kind.name,
        "family": kind.family,
        **{name: getattr(data.spec, name) for name in ("profile", "fingerprint")},
        "dataset": data.digest,
        "rows": len(data),
        "rows_used": min(len(data), kind.max_rows or len(data)),
        "features": list(NAMES),
        "outputs": list(OUTPUTS),
        "ranges": [[float(x) for x in edge] for edge in (data.features.min(0), data.features.max(0))],
        "medians": [float(x) for x in np.median(data.features, axis=0)],
        "calibration": list(calibration),
        "params": {name: dict(value) for name, value in params.items()} if not refine else "refined",
        "search": search,
        "seed": seed,
        "versions": {name: version(name) for name in ("adapter-packer", "numpy", "scikit-learn", "lightgbm")},
    }


def scores(model: Model, data: Dataset, rows: npt.NDArray[np.intp]) -> dict[str, Any]:
    """Score a model on some rows of a dataset: on all of them, by family of scenarios, and by regime.

    Regimes by the served share: "served" >= 0.97, "edge" in [0.8, 0.97[, "overloaded" below. An F1 is None where all
    rows are of one class: a single error would make it a half.
    """
    features = data.features[rows]
    x = np.ascontiguousarray(features, dtype=np.float32)
    family = family_of(model)
    outputs = {name: family.rows(x, k) for k, name in enumerate(OUTPUTS)}
    predicted = decoded(outputs, features)
    chance = probability(outputs[STARVED], *model.header["calibration"])
    actual = {name: label[rows] for name, label in data.labels.items()}
    share = actual["served_share"]
    starved = share < STARVATION_THRESHOLD
    parts: dict[str, BoolArray] = {"all": np.ones(len(rows), dtype=bool)}
    parts |= {f"family {name}": data.family[rows] == name for name in sorted(set(data.family.tolist()))}
    parts |= {
        "regime served": share >= 0.97,
        "regime edge": (share >= 0.8) & (share < 0.97),
        "regime overloaded": share < 0.8,
    }
    card: dict[str, Any] = {}
    for name, part in ((name, part) for name, part in parts.items() if part.any()):
        share_pairs = np.column_stack((predicted["served_share"], share))[part]
        stable_pairs = np.column_stack((outputs[STABLE] > 0, actual[STABLE] > 0.5))[part]
        own = {
            "rows": int(part.sum()),
            "throughput_smape": smape(share_pairs),
            "starvation_macro_f1": _f1(np.column_stack((chance >= 0.5, starved))[part]),
            "stability_macro_f1": _f1(stable_pairs),
            "starvation_brier": float(np.mean((chance[part] - starved[part]) ** 2)),
        }
        for latency in LATENCIES:
            known = part & np.isfinite(actual[latency])
            own[f"{latency}_smape"] = smape(np.column_stack((predicted[latency], actual[latency]))[known])
        card[name] = {k: round(v, 4) if np.isfinite(v) else None for k, v in own.items()}
    return card


def _f1(pairs: BoolArray) -> float:
    """Macro F1 of (predicted, actual), bool (n, 2); NaN if only one class is present."""
    return macro_f1(pairs) if pairs[:, 1].any() and not pairs[:, 1].all() else math.nan
