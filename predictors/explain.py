"""Explanations of a prediction: rules that fired, or features with the largest influence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.predictors.features import FEATURES
from packer.predictors.learned import LearnedPredictor
from packer.predictors.rules import Rule, fired
from packer.predictors.targets import OUTPUTS

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Influence:
    """Influence of one feature: its value, that of a typical server, and the changes that this would make."""

    feature: str
    text: str
    unit: str
    value: float
    typical: float
    probability_change: float
    share_change: float

    @property
    def weight(self) -> float:
        """Size of the larger of both changes."""
        return max(abs(self.probability_change), abs(self.share_change))


def influences(predictor: LearnedPredictor, features: FloatArray, kv_tokens: float) -> list[Influence]:
    """How the prediction would change if one feature at a time were that of a typical server (the training
    median), strongest first. `features` float64 (F,).
    """
    typical = np.array(predictor.model.header["medians"])
    points = np.repeat(features[None, :], len(features) + 1, axis=0)
    diagonal = np.arange(len(features))
    points[diagonal + 1, diagonal] = typical
    found = predictor.evaluate_features(points, np.full(len(points), kv_tokens), np.ones(len(points)))
    chance, share = found.starvation_probability, found.total_token_throughput
    rows = [
        Influence(
            feature.name,
            feature.text,
            feature.unit,
            float(features[k]),
            float(typical[k]),
            float(chance[0] - chance[k + 1]),
            float(share[0] - share[k + 1]),
        )
        for k, feature in enumerate(FEATURES)
    ]
    return sorted(rows, key=lambda row: -row.weight)


def rules_fired(predictor: LearnedPredictor, features: FloatArray) -> dict[str, Rule]:
    """The rule behind each figure of a tree; raises `IncompatibleError` for other kinds."""
    return {name: fired(predictor.model, name, features) for name in OUTPUTS}
