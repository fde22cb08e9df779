"""Dimensions of common base models, from the config.json of their Hugging Face repositories."""

from __future__ import annotations

from packer.errors import UnknownNameError
from packer.io.shipped import table
from packer.twin.model_config import ModelDimensions

MODELS = {
    repository: ModelDimensions(repository.rpartition("/")[2].lower(), repository=repository, **sizes)
    for repository, sizes in table("packer.twin", "models.toml").items()
}


def model_named(name: str) -> ModelDimensions:
    """The model of that repository, with or without its owner, whatever the case; raises `UnknownNameError`."""
    wanted = name.lower().rstrip("/")
    for repository, model in MODELS.items():
        if wanted in (repository.lower(), model.name):
            return model
    raise UnknownNameError("model", name, MODELS)
