"""Dimensions of base models by name: shipped ones, a `config.json`, or Hugging Face's cache on this machine."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from packer.errors import IncompatibleError, UnknownNameError, shown
from packer.fit.dimensions import KINDS, ModelDimensions
from packer.fit.model_config import read_model_config
from packer.fit.quantization import quantized
from packer.io.shipped import table


def _models() -> dict[str, ModelDimensions]:
    """Return all models of the table; a row with `like` overrides dimensions of the row that it names."""
    rows = table("packer.fit", "models.toml")
    found = {}
    for repository, row in rows.items():
        sizes = rows.get(row.get("like"), {}) | {key: value for key, value in row.items() if key != "like"}
        name = repository.rpartition("/")[2].lower()
        found[repository] = ModelDimensions(name, repository=repository, **sizes)
    return found


MODELS = _models()

_SUFFIX = re.compile(
    r"-(quantized\.)?(?P<name>fp8|nvfp4|fp4|awq|gptq(?!-int8)|w4a16|w8a8|(gptq-)?int8)(-dynamic|-int4|-fp8)?$",
    re.IGNORECASE,
)
"""Suffix of repositories with quantised weights, such as nvidia/Llama-3.1-70B-Instruct-FP8."""


def model_named(name: str) -> ModelDimensions:
    """Return a model by the path of its config.json or of the folder that holds it, or by its repository.

    The owner of a repository may be left out; case and separators do not matter. Repositories that packer does not
    know are searched for in Hugging Face's cache on this machine. A repository with a suffix of quantised weights has
    the dimensions of the repository without the suffix.

    Raises `UnknownNameError`: the name matches none of these; `IncompatibleError`: the kind of model is not
    supported; also the errors of `read_model_config`.
    """
    path = Path(name)
    if name.endswith(".json") or path.is_file():
        return read_model_config(name)
    if (path / "config.json").is_file():
        return read_model_config(path / "config.json")
    if (known := _shipped(name)) is not None:
        return known
    if (cached := cached_config(name)) is not None:
        return replace(read_model_config(cached), name=name.rpartition("/")[2].lower()[:80], repository=name)
    suffix = _SUFFIX.search(name)
    base = _shipped(name[: suffix.start()]) if suffix else None
    if suffix and base is not None:
        own = replace(base, name=name.rpartition("/")[2].lower(), repository=name if "/" in name else None)
        return quantized(own, suffix["name"].lower().removeprefix("gptq-"))
    words = {_plain(name), *re.split(r"[^a-z0-9]+", name.lower())}
    for kind, reason in KINDS["refused"].items():
        if any(word.startswith(_plain(kind)) for word in words):
            raise IncompatibleError(f"{shown(name)} cannot be estimated: {reason}.")
    raise UnknownNameError("model", name, MODELS, "Any other: give the path of its config.json.")


def _shipped(name: str) -> ModelDimensions | None:
    """Return the table's model with this exact repository, else one with the same name under any owner."""
    wanted = name.lower().rstrip("/")
    if (exact := next((model for key, model in MODELS.items() if key.lower() == wanted), None)) is not None:
        return exact
    plain = _plain(wanted)
    return next((model for model in MODELS.values() if _plain(model.name) == plain), None)


def _plain(name: str) -> str:
    """A repository's name without owner, case and separators; Llama 3.1 was once called Meta-Llama-3.1."""
    last = name.lower().rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]", "", last).removeprefix("meta")


def cached_config(repository: str) -> Path | None:
    """Return a repository's `config.json` in Hugging Face's cache on this machine, of its main branch if cached.
    Source: huggingface_hub, constants.py (HF_HUB_CACHE, HF_HOME) and the layout
    "models--OWNER--NAME/snapshots/COMMIT"."""
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
