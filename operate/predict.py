"""What a predictor says of one server that gets a whole fleet, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.errors import IncompatibleError
from packer.evaluation import Evaluation
from packer.predictors.api import load_predictor
from packer.predictors.auto import AutoPredictor
from packer.predictors.features import FEATURES
from packer.predictors.learned import LearnedPredictor
from packer.predictors.rules import Rule, fired
from packer.predictors.targets import OUTPUTS
from packer.profile import Profile
from packer.strategies import Predictor
from packer.workload import Workload

MOST_INFLUENCES = 8


@dataclass(frozen=True, eq=False)
class Prediction:
    """The figures of one server, and what decided them.

    `outside`: features beyond the range that a learned predictor was trained on, in words; `explanation`: the
    rules that fired (tree) or the most influential features (others), lines for people and the same as data.
    """

    predictor: str
    server: Bin
    figures: Evaluation
    outside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    explanation: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        profile = self.server.profile
        found = {
            "predictor": self.predictor,
            "profile": profile.name,
            "calibrated": profile.calibrated,
            "max_loras": self.server.max_loras,
            "max_lora_rank": self.server.max_lora_rank,
            **asdict(self.figures),
            "outside": self.outside,
        }
        return found if self.explanation is None else {**found, "explanation": self.explanation}


def predict(
    fleet: Workload,
    profile: Profile,
    predictor: str | Predictor,
    *,
    max_loras: int,
    max_lora_rank: int | None = None,
    seed: int = 0,
    explain: bool = False,
) -> Prediction:
    """Evaluate one server that gets the whole fleet.

    `fleet`, `profile`: the traffic and the server.
    `predictor`: a registered name, the path of a trained predictor, or an object.
    `max_loras`, `max_lora_rank`: the server's slots; without a rank, that of the largest adapter.
    `explain`: add which rules fired or which features mattered.
    Raises `IncompatibleError`: the slots are too small for an adapter, or the predictor has nothing to explain.
    """
    largest = int(fleet.ranks.max())
    slot_rank = max_lora_rank if max_lora_rank is not None else slot_rank_for(largest)
    if largest > slot_rank:
        raise IncompatibleError(f"--max-lora-rank {slot_rank} is smaller than the largest rank, {largest}.")
    model = load_predictor(predictor, profile, seed=seed) if isinstance(predictor, str) else predictor
    server = Bin(tuple(range(len(fleet))), profile.settings(max_loras, slot_rank), profile)
    figures = model.evaluate(fleet, [server])[0]
    learned = model.learned if isinstance(model, AutoPredictor) else model
    notes = (model.summary(),) if isinstance(model, AutoPredictor) else ()
    if not isinstance(learned, LearnedPredictor):
        if explain:
            raise IncompatibleError(
                f"The predictor {model.name!r} simulates: it has no rules or features to explain."
            )
        return Prediction(model.name, server, figures, notes=notes)
    lines, data = _explanation(learned, fleet, server, figures) if explain else ((), None)
    features = learned.features(fleet, [server])
    rows = zip(FEATURES, features[0], learned.outside(features)[0], strict=True)
    outside = tuple(
        f"{each.text} {value:.4g}{' ' + each.unit if each.unit else ''}"
        for each, value, beyond in rows
        if beyond
    )
    return Prediction(model.name, server, figures, outside, notes, lines, data)


def _explanation(
    learned: LearnedPredictor, fleet: Workload, server: Bin, figures: Evaluation
) -> tuple[tuple[str, ...], dict[str, Any]]:
    features = learned.features(fleet, [server])[0]
    if learned.model.kind == "tree":
        rules = {name: str(rule) for name, rule in rules_fired(learned, features).items()}
        return ("", "Rules that fired:", *(f"  {k}: {rule}" for k, rule in rules.items())), {"rules": rules}
    rows = influences(learned, features, figures.kv_cache_tokens)[:MOST_INFLUENCES]
    lines = ["", "Features that mattered (if each were that of a typical server):"]
    for row in rows:
        unit = f" {row.unit}" if row.unit else ""
        lines.append(
            f"  {row.text}: {row.value:.4g}{unit} instead of {row.typical:.4g} changes the probability of "
            f"starvation by {row.probability_change:+.1%}, the served share by {row.share_change:+.1%}"
        )
    return tuple(lines), {"features": [asdict(row) for row in rows]}


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


def influences(
    predictor: LearnedPredictor, features: npt.NDArray[np.float64], kv_tokens: float
) -> list[Influence]:
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


def rules_fired(predictor: LearnedPredictor, features: npt.NDArray[np.float64]) -> dict[str, Rule]:
    """The rule behind each figure of a tree; raises `IncompatibleError` for other kinds."""
    return {name: fired(predictor.model, name, features) for name in OUTPUTS}
