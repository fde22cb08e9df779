"""The prediction for one server that gets a whole fleet, and its explanation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from packer.arrays import FloatArray
from packer.bin import Bin
from packer.errors import IncompatibleError
from packer.evaluation import Evaluation
from packer.predictors.api import evaluate_server, load_predictor
from packer.predictors.auto import AutoPredictor
from packer.predictors.features import FEATURES
from packer.predictors.learned import LearnedPredictor
from packer.predictors.rules import fired
from packer.predictors.targets import OUTPUTS
from packer.profile import Profile
from packer.strategies import Predictor
from packer.workload import Workload

MOST_INFLUENCES = 8


@dataclass(frozen=True, eq=False)
class Prediction:
    """The predicted figures of one server, and what determined them.

    `outside`: features beyond the range that a learned predictor was trained on, in words; `explanation`: the
    "rules" that fired, by output (tree), or the most influential "features" (others), rows of `influences`.
    """

    predictor: str
    server: Bin
    figures: Evaluation
    outside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    explanation: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        profile = self.server.profile
        found = {"predictor": self.predictor, "profile": profile.name, "calibrated": profile.calibrated}
        found |= {**asdict(self.server.settings), **asdict(self.figures), "outside": self.outside}
        return found if self.explanation is None else {**found, "explanation": self.explanation}


def predict(
    fleet: Workload, profile: Profile, predictor: str | Predictor, *, max_loras: int,
    max_lora_rank: int | None = None, seed: int = 0, explain: bool = False,
) -> Prediction:  # fmt: skip
    """Evaluate one server that gets the whole fleet.

    `explain`: add which rules fired, or which features had the most influence. The others: as for
    `packer.evaluate_server`.

    Raises `IncompatibleError`: the predictor has nothing to explain; others as `packer.evaluate_server`.
    """
    model = load_predictor(predictor, profile, seed=seed) if isinstance(predictor, str) else predictor
    if isinstance(model, AutoPredictor):
        model = model.for_one()
    learned = model.learned if isinstance(model, AutoPredictor) else model
    if explain and not isinstance(learned, LearnedPredictor):
        raise IncompatibleError(f"The predictor {model.name!r} simulates: it has no rules or features to explain.")
    slots: dict[str, Any] = {"max_loras": max_loras, "max_lora_rank": max_lora_rank}
    figures = evaluate_server(fleet, profile, **slots, predictor=model)
    server = Bin(tuple(range(len(fleet))), profile.settings(max_loras, fleet.slot_rank(max_lora_rank)), profile)
    notes = (model.summary(),) if isinstance(model, AutoPredictor) else ()
    if not isinstance(learned, LearnedPredictor):
        return Prediction(model.name, server, figures, notes=notes)
    features = learned.features(fleet, [server])
    outside = tuple(
        f"{each.text} {value:.4g}{' ' + each.unit if each.unit else ''}"
        for each, value, beyond in zip(FEATURES, features[0], learned.outside(features)[0], strict=True)
        if beyond
    )
    found: dict[str, Any] | None = None
    if explain and learned.model.kind == "tree":
        found = {"rules": {name: str(fired(learned.model, name, features[0])) for name in OUTPUTS}}
    elif explain:
        found = {"features": influences(learned, features[0], figures.kv_cache_tokens)[:MOST_INFLUENCES]}
    return Prediction(model.name, server, figures, outside, notes, found)


def influences(predictor: LearnedPredictor, features: FloatArray, kv_tokens: float) -> list[dict[str, Any]]:
    """How each of `features`, float64 (F,), changes the prediction against a typical server's, strongest first."""
    typical = np.array(predictor.model.header["medians"])
    points = np.repeat(features[None, :], len(features) + 1, axis=0)
    diagonal = np.arange(len(features))
    points[diagonal + 1, diagonal] = typical
    found = predictor.evaluate_features(points, np.full(len(points), kv_tokens), np.ones(len(points)))
    changes = {
        "probability_change": found.starvation_probability[0] - found.starvation_probability[1:],
        "share_change": found.total_token_throughput[0] - found.total_token_throughput[1:],
    }
    rows: list[dict[str, Any]] = [
        {
            "feature": each.name, "text": each.text, "unit": each.unit,
            "value": float(features[k]), "typical": float(typical[k]),
            **{name: float(change[k]) for name, change in changes.items()},
        }
        for k, each in enumerate(FEATURES)
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -max(abs(row[name]) for name in changes))
