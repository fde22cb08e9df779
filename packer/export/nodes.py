"""GPUs of nodes: what differs between their makers, and the labels that select nodes if a plan has several kinds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packer.errors import IncompatibleError, ValidationError, shown
from packer.io.shipped import table


@dataclass(frozen=True, slots=True)
class Maker:
    """A maker of GPUs, or a family of one maker's devices.

    `resource`: the resource of the maker's Kubernetes device plug-in. `variable`: the environment variable from which
    vLLM's platform takes the numbers of its GPUs (vllm/platforms, `device_control_env_var`; vLLM on ROCm reads CUDA's).
    `words`: regular expression that finds the maker in the name of a GPU.
    """

    name: str
    resource: str
    variable: str
    words: str = ""


NVIDIA = Maker("NVIDIA", "nvidia.com/gpu", "CUDA_VISIBLE_DEVICES")
AMD = Maker("AMD", "amd.com/gpu", "CUDA_VISIBLE_DEVICES", r"\bamd\b|instinct|radeon|\bmi\d{2}")
GAUDI = Maker("Gaudi", "habana.ai/gaudi", "HABANA_VISIBLE_MODULES", r"gaudi|habana|\bhl-?\d")
INTEL = Maker("Intel", "gpu.intel.com/xe", "ZE_AFFINITY_MASK", r"\bintel\b|\barc\b")


def maker(gpu: str) -> Maker:
    """The maker of a GPU by the GPU's name, as in profiles or from a driver; NVIDIA if that names no other maker."""
    others = (each for each in (GAUDI, AMD, INTEL) if re.search(each.words, gpu, re.IGNORECASE))
    return next(others, NVIDIA)


def check_image(gpus: Iterable[str], image: str | None) -> None:
    """Check that one container image fits these GPUs. packer knows vLLM's images for NVIDIA's only. Raises
    `IncompatibleError`: the GPUs are of several makers, or of another maker and `image` is None."""
    makers = {maker(gpu): gpu for gpu in gpus}
    if len(makers) > 1:
        named = ", ".join(sorted(makers.values()))
        rule = f"Expected the GPUs of one maker, because all servers have one container image, got {named}:"
        raise IncompatibleError(f"{rule} export a plan for each maker.")
    other = next((gpu for each, gpu in makers.items() if each is not NVIDIA), None)
    if other is not None and image is None:
        rule = f"Expected a container image of vLLM for {other}, got none, and vllm/vllm-openai is for NVIDIA's GPUs:"
        raise IncompatibleError(f"{rule} give --image.")


_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_MOST_CHARACTERS = 63
KINDS = table("packer.export", "nodes.toml")  # Name of a GPU → key and values of its node label, and its name in Ray.


def short_name(gpu: str) -> str:
    """A short name for a GPU: a100-80gb for "NVIDIA A100 80GB", rtx4090 for "NVIDIA GeForce RTX 4090"."""
    text = re.sub(r"^(nvidia|amd|intel)[ -]|geforce[ -]|[ -]sxm(?=[ -])", "", gpu.lower().strip())
    return re.sub(r"(rtx)-(?=\d)", r"\1", re.sub(r"[ _]+", "-", text))


def parse_labels(texts: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Labels from texts `[GPU:]KEY=VALUE`: short name of a GPU, or "" for every GPU → key and value. Raises
    `ValidationError`: a text is not a label, or a kind of GPU has two labels."""
    found: dict[str, tuple[str, str]] = {}
    for text in texts:
        label, _, value = text.partition("=")
        kind, colon, key = label.partition(":")
        kind, key = (kind, key) if colon else ("", label)
        short = all(len(part) <= _MOST_CHARACTERS for part in (key.rpartition("/")[2], value))
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or not short:
            rule = "Expected --node-label [GPU:]KEY=VALUE with a key and a value of Kubernetes labels,"
            raise ValidationError(f"{rule} got {shown(text)}.")
        kind = short_name(kind)
        if kind in found:
            raise ValidationError(f"Expected one --node-label for {kind or 'every kind of GPU'}, got two.")
        found[kind] = (key, value)
    return found


def node_labels(gpu: str, kinds: int, given: Mapping[str, tuple[str, str]]) -> dict[str, list[str]]:
    """Key of a label → values, of which a node must have one to run a server on this kind of GPU. Empty: any node.

    `kinds`: number of kinds of GPU in the plan; a plan with one kind needs no label.
    `given`: labels from the user (`parse_labels`), which replace the known label.
    Raises `IncompatibleError`: the plan has several kinds, and no label is known for this kind.
    """
    if own := given.get(short_name(gpu)) or given.get(""):
        return {own[0]: [own[1]]}
    if kinds < 2:
        return {}
    if gpu not in KINDS:
        rule = f"The plan has {kinds} kinds of GPU, and no node label is known for {shown(gpu)}:"
        raise IncompatibleError(f"{rule} give --node-label {short_name(gpu)}:KEY=VALUE.")
    return {KINDS[gpu]["key"]: list(KINDS[gpu]["values"])}


def ray_accelerator(gpu: str) -> str:
    """Ray's accelerator type of a GPU; raises `IncompatibleError` if Ray has none."""
    name: str | None = KINDS.get(gpu, {}).get("ray")
    if name is None:
        rule = f"Ray Serve selects nodes by an accelerator type, and has none for {shown(gpu)}: use another format,"
        raise IncompatibleError(f"{rule} or plan with one kind of GPU.")
    return name
