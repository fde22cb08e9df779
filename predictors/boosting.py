"""Gradient-boosted trees by LightGBM, beyond the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packer.arrays import Float32Array
from packer.predictors.ensemble import from_lightgbm, packed
from packer.predictors.features import FEATURES
from packer.predictors.kinds import Arrays, ModelKind
from packer.predictors.targets import OUTPUTS


class Boosting(ModelKind):
    """Sums over small trees, each fitted to what the ones before it left."""

    name = "boosting"

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
        signs = [feature.trend for feature in FEATURES]
        return LGBMClassifier(monotone_constraints=signs, **common, **params)

    def pack(self, fitted: Mapping[str, Any], x: Float32Array) -> Arrays:
        """Flattened trees."""
        outputs = [from_lightgbm(fitted[name].booster_) if name in fitted else [] for name in OUTPUTS]
        return packed(outputs, x.shape[1])
