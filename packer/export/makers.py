"""What differs between makers of GPUs: Kubernetes' resource, the variable that selects GPUs, and vLLM's image."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from packer.errors import IncompatibleError


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
