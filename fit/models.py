"""Dimensions of base models by name: shipped ones, a `config.json`, or Hugging Face's cache on this machine."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from packer.errors import UnknownNameError
from packer.fit.dimensions import ModelDimensions
from packer.fit.model_config import read_model_config
from packer.fit.quantization import quantized
from packer.io.shipped import table

MODELS = {
    repository: ModelDimensions(repository.rpartition("/")[2].lower(), repository=repository, **sizes)
    for repository, sizes in table("packer.fit", "models.toml").items()
}

_SUFFIX = re.compile(
    r"-(?P<name>fp8|nvfp4|fp4|awq|gptq|w4a16|w8a8|int8)(-dynamic|-int4|-int8|-fp8)?$", re.IGNORECASE
)
"""How repositories of quantised weights end: nvidia/Llama-3.1-70B-Instruct-FP8."""


def model_named(name: str) -> ModelDimensions:
    """A model by the path of its config.json or of the folder that holds it, or by its repository.

    The owner of a repository may be left out and its case does not matter. Repositories that packer does not know
    are looked for in Hugging Face's cache on this machine; quantised weights follow the model before the
    suffix.

    Raises `UnknownNameError`: a name that is none of these; otherwise as `read_model_config`.
    """
    path = Path(name)
    if name.endswith(".json") or path.is_file():
        return read_model_config(name)
    if (path / "config.json").is_file():
        return read_model_config(path / "config.json")
    if (known := _shipped(name)) is not None:
        return known
    if (cached := cached_config(name)) is not None:
        found = read_model_config(cached)
        return replace(found, name=name.rpartition("/")[2].lower()[:80], repository=name)
    suffix = _SUFFIX.search(name)
    base = _shipped(name[: suffix.start()]) if suffix else None
    if suffix and base is not None:
        own = replace(base, name=name.rpartition("/")[2].lower(), repository=name if "/" in name else None)
        return quantized(own, suffix["name"])
    raise UnknownNameError("model", name, MODELS)


def _shipped(name: str) -> ModelDimensions | None:
    """The model of the table with that name; one of another owner, if the rest is the same."""
    wanted = name.lower().rstrip("/")
    for repository, model in MODELS.items():
        if wanted in (repository.lower(), model.name):
            return model
    last = wanted.rpartition("/")[2]
    return next((model for model in MODELS.values() if model.name == last), None)


def cached_config(repository: str) -> Path | None:
    """The `config.json` of a repository in Hugging Face's cache on this machine, of its main branch if that is there.

    Source: huggingface_hub, constants.py (HF_HUB_CACHE, HF_HOME) and the layout "models--OWNER--NAME/snapshots/COMMIT".
    """
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = hub / f"models--{repository.replace('/', '--')}"
    if repository.count("/") != 1 or ".." in repository or not folder.is_dir():
        return None
    reference = folder / "refs" / "main"
    if reference.is_file():
        found = folder / "snapshots" / reference.read_text("utf-8").strip() / "config.json"
        if found.is_file():
            return found
    return next(iter(sorted(folder.glob("snapshots/*/config.json"))), None)
