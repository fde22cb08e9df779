"""`packer predictor`: build a dataset, describe it, train."""

from __future__ import annotations

from packer.cli.declare import group

COMMANDS = {
    "build": "A dataset: servers simulated by the twin.",
    "describe": "What a dataset holds.",
    "train": "Train a predictor on a dataset; rules for people.",
}


@group(COMMANDS)
def predictor() -> None:
    """Learned predictors: fast stand-ins for the twin, trained on servers that the twin simulated.

    \b
    Example:
      packer predictor build --rows 20000 -o data.parquet
      packer predictor train data.parquet --kind boosting -o boosting.packer
    """
