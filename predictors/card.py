"""How good a trained predictor is on rows that it has not seen: the model card."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packer.evaluation import STARVATION_THRESHOLD
from packer.predictors.dataset import Dataset
from packer.predictors.families import family_of
from packer.predictors.store import Model
from packer.predictors.targets import OUTPUTS, STABLE, STARVED, decoded, probability
from packer.twin.scores import macro_f1, smape

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
LATENCIES = ("mean_itl_ms", "mean_ttft_ms", "median_ttft_ms")


def scores(model: Model, data: Dataset, rows: npt.NDArray[np.intp]) -> dict[str, Any]:
    """Scores on some rows of a dataset: of all, by family of scenarios, and by regime.

    Regimes by the served share: "served" >= 0.97, "edge" in [0.8, 0.97[, "overloaded" below.
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
    for name, part in parts.items():
        if not part.any():
            continue
        card[name] = {
            "rows": int(part.sum()),
            "throughput_smape": smape(np.column_stack((predicted["served_share"][part], share[part]))),
            "starvation_macro_f1": macro_f1(np.column_stack((chance[part] >= 0.5, starved[part]))),
            "stability_macro_f1": macro_f1(
                np.column_stack((outputs[STABLE][part] > 0, actual[STABLE][part] > 0.5))
            ),
            "starvation_brier": float(np.mean((chance[part] - starved[part]) ** 2)),
        }
        for latency in LATENCIES:
            known = part & np.isfinite(actual[latency])
            card[name][f"{latency}_smape"] = smape(
                np.column_stack((predicted[latency][known], actual[latency][known]))
            )
    return {
        name: {k: round(v, 4) if np.isfinite(v) else None for k, v in part.items()}
        for name, part in card.items()
    }
