"""Dimensions of common base models, from the config.json of their Hugging Face repositories."""

from __future__ import annotations

import os

from packer.errors import UnknownNameError
from packer.io.shipped import table
from packer.twin.model_config import ModelDimensions, read_model_config

MODELS = {
    repository: ModelDimensions(repository.rpartition("/")[2].lower(), repository=repository, **sizes)
    for repository, sizes in table("packer.twin", "models.toml").items()
}


def model_named(name: str) -> ModelDimensions:
    """The model of that repository, with or without its owner, whatever the case, or of a config.json.

    Raises `UnknownNameError`: a name that is neither; otherwise as `read_model_config`.
    """
    if name.endswith(".json") or os.path.isfile(name):
        return read_model_config(name)
    wanted = name.lower().rstrip("/")
    for repository, model in MODELS.items():
        if wanted in (repository.lower(), model.name):
            return model
    raise UnknownNameError("model", name, MODELS)
