"""Step laws of LoRA kernels other than vLLM's: Punica's BGMV, which pads to the largest rank, and S-LoRA's MBGMV.

Both are bound by memory bandwidth (CaraServe, arXiv 2401.11240, section 5). The time that BGMV adds to a step is
proportional to requests × largest rank; MBGMV's is proportional to the sum of the ranks of the requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from packer import checks, registry
from packer.errors import IncompatibleError
from packer.profile import Profile
from packer.terms import LINEAR
from packer.twin.datasheets import GPUS

SHARE_OF_PEAK = {"bgmv": 1.37, "mbgmv": 0.89}
"""Time per rank / time to read the weights of a rank at peak bandwidth: eight statements in CaraServe's Fig. 5."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """`per_rank_ms` None: the profile's, or from a rank's weights and bandwidth. `base_ms` None: the profile's."""

    per_rank_ms: float | None = None
    base_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("per_rank_ms", "base_ms"):
            if getattr(self, name) is not None:
                checks.real(name, getattr(self, name), low=0.0)


TERMS = {"bgmv": "per_padded_rank_ms", "mbgmv": "per_request_rank_ms"}  # Term of the linear law that each kernel uses.


def with_kernel(profile: Profile, spec: str) -> Profile:
    """Return the profile with the law of a kernel instead of the profile's own LoRA terms.

    `spec`: "bgmv" or "mbgmv", with parameters as in "bgmv:per_rank_ms=0.0036,base_ms=32".

    Raises `UnknownNameError`: there is no such kernel; `IncompatibleError`: the step law is the paper's, or the time
    per rank is neither given nor in the profile, and no data sheet of the GPU gives an estimate.
    """
    name = spec.partition(":")[0]
    kernel: Kernel = registry.make("LoRA kernel", spec, dict.fromkeys(TERMS, Kernel))
    if profile.latency.form != "linear":
        raise IncompatibleError(f"A kernel's law replaces terms of a linear step law, not those of {profile.name}.")
    own = {term.name for term in LINEAR if term.part == "lora"}
    kept = {key: value for key, value in profile.latency.coefficients.items() if key not in own}
    per_rank = kernel.per_rank_ms
    if per_rank is None:
        per_rank = profile.latency.coefficients.get(TERMS[name]) or _estimated(profile, name)
    if kernel.base_ms is not None:
        kept["base_ms"] = kernel.base_ms
    return replace(profile, latency=replace(profile.latency, coefficients={**kept, TERMS[name]: per_rank}))


def _estimated(profile: Profile, name: str) -> float:
    sheet = GPUS.get(profile.name.partition("/")[0])
    if sheet is None:
        sheet = next((each for each in GPUS.values() if each.title == profile.gpu.name), None)
    if sheet is None:
        raise IncompatibleError(f"No data sheet of {profile.gpu.name}: give the kernel's time, {name}:per_rank_ms=….")
    return SHARE_OF_PEAK[name] * profile.model.lora_bytes_per_rank / sheet.bandwidth_bytes_s * 1e3
