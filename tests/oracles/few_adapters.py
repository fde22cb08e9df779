"""Predictors trained on smaller servers than the shipped ones, as a user's may be."""

from __future__ import annotations

from packer.predictors.auto import AutoPredictor
from packer.predictors.features import COLUMN
from packer.predictors.learned import BoostingPredictor
from packer.predictors.store import Model, shipped_model
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile


def trained_up_to(adapters: int, profile: Profile) -> AutoPredictor:
    """`auto` with the shipped boosted trees, whose header has at most so many adapters on a server."""
    model, _ = shipped_model("boosting", profile)
    low, high = (list(edge) for edge in model.header["ranges"])
    high[COLUMN["adapters"]] = float(adapters)
    trees = BoostingPredictor(Model({**model.header, "ranges": [low, high]}, model.arrays), profile)
    return AutoPredictor(trees, TwinPredictor())
