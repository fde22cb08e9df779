"""Quantisation of weights, by a name that `--quantization` takes or from a model's config."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from packer.errors import IncompatibleError, UnknownNameError, shown
from packer.fit.dimensions import EXPERTS_ONLY, QUANTIZATIONS, ModelDimensions

GROUP = 128  # Weights that share a scale in `QUANTIZATIONS`, and in a config of quantised weights without a group size.
WEIGHT_BITS = {name: row["bits"] for name, row in QUANTIZATIONS.items() if "bits" in row}
"""Bits of a weight of the linear layers with its share of the scales, by name."""

_SAME = {other: name for name, row in QUANTIZATIONS.items() for other in row.get("same", ())}
"""Other names of these quantisations."""


def quantized(model: ModelDimensions, name: str | None) -> ModelDimensions:
    """The model in this quantisation, None: its config's; raises `UnknownNameError`, `IncompatibleError`."""
    if name is None:
        return model
    said = name.lower().replace("-", "_")
    said = _SAME.get(said, said)
    if said not in WEIGHT_BITS:
        raise UnknownNameError("quantization", name, WEIGHT_BITS)
    if model.quantization in EXPERTS_ONLY:
        plain = model.quantization.partition("-")[0]
        if said == plain or (said, plain) in (("gptq", "int4"), ("nvfp4", "mxfp4")):
            return model  # data sheets use one name for 4-bit floats of any block size
        if plain == "mxfp4":
            rule = f"Expected mxfp4 for {model.name}, whose experts are published so"
            raise IncompatibleError(f"{rule}, got {shown(name)}.")
        if said == "nvfp4":  # NVIDIA's checkpoints, too, leave all but the experts in bf16
            return replace(model, weight_bits=WEIGHT_BITS[said], quantization="nvfp4-experts")
    own = [each for each in (*WEIGHT_BITS, *_SAME) if re.search(rf"\b{each}\b", model.name)]
    if own and model.quantization and said != model.quantization:
        rule = f"Expected {model.quantization} for {model.name}, whose weights are published so"
        raise IncompatibleError(f"{rule}, got {shown(name)}.")
    if said in EXPERTS_ONLY and not model.experts:
        raise IncompatibleError(f"vLLM stores experts as {said}, and {model.name} has none.")
    return replace(model, weight_bits=WEIGHT_BITS[said], quantization=None if said == "bf16" else said)


def weights_of_config(given: Any, path: str | os.PathLike[str]) -> tuple[float, str | None]:
    """Bits and method of a config's `quantization_config`; raises `IncompatibleError` for unknown ones."""
    if not given:
        return WEIGHT_BITS["bf16"], None
    said: dict[str, Any] = given if isinstance(given, dict) else {}
    method, bits = str(said.get("quant_method", "")), said.get("bits")
    name: str | None = method
    if method == "bitsandbytes":
        bits = 4 if said.get("load_in_4bit") else 8 if said.get("load_in_8bit") else None
        name = "gptq"
    elif method == "modelopt":
        name = {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(said.get("quant_algo", "")))
    elif method == "compressed-tensors":
        bits, name = _of_groups(said)
    whole = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "modelopt": name}.get(method)
    if method == "compressed-tensors" and (bits, name) == (4, "nvfp4"):
        whole = name
    if whole:
        return WEIGHT_BITS[whole], whole
    if bits not in (4, 8) or method not in ("gptq", "awq", "bitsandbytes", "compressed-tensors"):
        rule = "expected quantization_config of fp8, mxfp4, gptq, awq, bitsandbytes, modelopt or compressed-tensors"
        near = "a copy of the file without it and --quantization awq (4 bits) or fp8 (8 bits) estimate the nearest"
        raise IncompatibleError(f"{os.fspath(path)}: {rule} with 4 or 8 bits, got {shown(given)}; {near}.")
    size = said.get("group_size", _first_group(said).get("group_size", GROUP))
    if bits == 8:
        return 8.0, "int8" if name == "gptq" else name
    groups = GROUP / (size if isinstance(size, int) and size > 0 else GROUP)
    return bits + groups * (WEIGHT_BITS[str(name)] - bits), name


def of_experts(given: Any, quantization: str | None) -> str | None:
    """Return the quantisation of a mixture of experts: one for experts only if the config excludes attention."""
    said: dict[str, Any] = given if isinstance(given, dict) else {}
    skipped = said.get("ignore") or said.get("exclude_modules") or said.get("modules_to_not_convert")
    alone = {"gptq": "int4-experts", "nvfp4": "nvfp4-experts"}.get(quantization or "")
    whole = not isinstance(skipped, list) or not any("self_attn" in str(each) for each in skipped)
    return quantization if alone is None or whole else alone


def _first_group(given: dict[str, Any]) -> dict[str, Any]:
    """Return the entry `weights` of the first group of a config of compressed-tensors."""
    groups = given.get("config_groups")
    weights = [each.get("weights") or {} for each in (groups or {}).values() if isinstance(each, dict)]
    return weights[0] if weights and isinstance(weights[0], dict) else {}


def _of_groups(given: dict[str, Any]) -> tuple[Any, str]:
    """Return bits and name of the first group of a config of compressed-tensors."""
    first = _first_group(given)
    bits, floats = first.get("num_bits"), first.get("type") == "float"
    if bits == 4:
        return bits, "nvfp4" if floats else "gptq"
    return bits, "fp8" if floats or first.get("type") is None else "int8"
