"""Gradient-boosted trees by LightGBM, beyond the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packer.predictors.ensemble import from_lightgbm, packed
from packer.predictors.features import NAMES
from packer.predictors.kinds import Arrays, Float32Array, Kind
from packer.predictors.targets import OUTPUTS

RISING = (
    "rate_sum", "rate_std", "offered", "load_factor", "load_factor_queued", "batch", "kv_use",
    "active_adapters", "slot_use", "step", "slot_wait", "residence", "backlog",
)  # fmt: skip
"""Features that grow when all rates grow by one factor: in each, starvation may only become likelier."""
FALLING = ("served_estimate",)
_GRID: dict[str, list[Any]] = {
    "n_estimators": [60, 120, 240],
    "num_leaves": [15, 31],
    "learning_rate": [0.05, 0.1, 0.2],
    "min_child_samples": [5, 20],
}
_SMALL = {"num_leaves": 16, "max_depth": 6, "learning_rate": 0.12, "min_child_samples": 10}


class Boosting(Kind):
    """Sums over small trees, each fitted to what the ones before it left."""

    name = "boosting"
    grids = (_GRID, _GRID)
    defaults = ({"n_estimators": 100, **_SMALL}, {"n_estimators": 80, **_SMALL})
    """Small enough for microseconds per evaluation."""

    def estimator(self, classify: bool, seed: int, params: Mapping[str, Any]) -> Any:
        """A LightGBM estimator; the probability of starvation never falls when all rates rise."""
        from lightgbm import LGBMClassifier, LGBMRegressor

        common: dict[str, Any] = {
            "random_state": seed,
            "n_jobs": 1,
            "deterministic": True,
            "force_row_wise": True,
            "verbosity": -1,
            "reg_lambda": 1.0,
        }
        if not classify:
            return LGBMRegressor(objective="regression_l1", **common, **params)
        signs = [1 if name in RISING else -1 if name in FALLING else 0 for name in NAMES]
        return LGBMClassifier(monotone_constraints=signs, **common, **params)

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """Flattened trees."""
        outputs = [from_lightgbm(fitted[name].booster_) if name in fitted else [] for name in OUTPUTS]
        return packed(outputs, x.shape[1])
