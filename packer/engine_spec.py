"""The engine of a profile and its settings, by vLLM's names."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from packer import checks
from packer.errors import ValidationError, shown
from packer.public import checked
from packer.speculation import SpeculationSpec

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
"""Values that vLLM's `--block-size` accepts (vllm/config/cache.py, `BlockSize`). The twin simulates any size."""
V1_RELEASE = (0, 8)  # First version whose default is V1, which mixes chunked prefills and decodes in a step.


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine and its settings, by vLLM's names.

    `max_num_seqs` and `max_num_batched_tokens` apply to one data-parallel rank, which has `tensor_parallel_size` GPUs.
    `max_cpu_loras` None: host memory holds every adapter. `prefix_caching` (`--enable-prefix-caching`) and
    `async_scheduling` None: the default of the version (`packer.twin.engine_rules`). `quantization` and
    `kv_cache_dtype` None: taken from the checkpoint. `lora_target_modules`: modules that slots hold, by vLLM's names;
    empty: all. `max_num_queued_reqs`: waiting + running requests from which the server refuses new ones (HTTP 503;
    from vLLM 0.29 on); None: no limit. `scheduling_policy` "priority": requests with smaller values run first and
    preempt the others (`--scheduling-policy`, `Adapter.priority`). `speculation` None: no speculative decoding.
    `warm_start`: whether servers answer a request to each adapter before they take traffic: host memory and the front
    end have the last ones that they keep; False: all adapters are on disk then; None: as `LoadingSpec.cold_start` says.
    """

    name: str
    version: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    max_cpu_loras: int | None = None
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    lora_target_modules: tuple[str, ...] = ()
    max_num_queued_reqs: int | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    speculation: SpeculationSpec | None = None
    warm_start: bool | None = None

    @checked
    def __post_init__(self) -> None:
        sizes = ("tensor_parallel_size", "data_parallel_size")
        for key in ("max_model_len", "max_num_seqs", "block_size", *sizes):
            checks.keep_integer(self, f"engine.{key}", low=1)
        checks.keep_integer(self, "engine.max_num_batched_tokens", low=self.max_num_seqs)
        checks.keep_real(self, "engine.gpu_memory_utilization", low=0, high=1, open_low=True)
        if self.speculation is not None:  # a request with its drafts must fit into a step
            drafts, most = self.speculation.num_speculative_tokens, self.max_num_batched_tokens - 2
            checks.integer("num_speculative_tokens", drafts, low=1, high=most)
        checks.choice("engine.scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        for key in ("max_cpu_loras", "max_num_queued_reqs"):
            if getattr(self, key) is not None:
                checks.keep_integer(self, f"engine.{key}", low=1)
        for key in ("quantization", "kv_cache_dtype", "lora_target_modules"):
            given = getattr(self, key)
            for word in given if isinstance(given, tuple | list) else () if given is None else (given,):
                if not isinstance(word, str) or not re.fullmatch(r"[A-Za-z0-9_.]{1,64}", word):
                    raise ValidationError(f"Expected engine.{key} as vLLM's names, got {shown(given)}.")
        for key in ("prefix_caching", "async_scheduling", "warm_start"):
            if (on := getattr(self, key)) not in (None, True, False):
                raise ValidationError(f"Expected engine.{key} to be true or false, got {shown(on)}.")

    def check_block_size(self) -> None:
        """Raise `ValidationError` if vLLM does not start with this `block_size`."""
        if self.name == "vllm":
            checks.choice("engine.block_size", self.block_size, BLOCK_SIZES)

    @property
    def gpus(self) -> int:
        """Number of GPUs of a server: GPUs of a data-parallel rank × number of ranks."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def server_seqs(self) -> int:
        """Largest number of running requests on all ranks together."""
        return self.max_num_seqs * self.data_parallel_size

    @property
    def server_tokens(self) -> int:
        """Largest number of tokens of a step on all ranks together."""
        return self.max_num_batched_tokens * self.data_parallel_size

    @property
    def arguments(self) -> dict[str, object]:
        """Flags with values that make vLLM run as simulated, where its defaults and the checkpoint would not."""
        given = {
            "max-num-queued-reqs": self.max_num_queued_reqs,
            "speculative-config": self.speculation and json.dumps(self.speculation.config),
            "scheduling-policy": None if self.scheduling_policy == "fcfs" else self.scheduling_policy,
            "quantization": self.quantization,
            "kv-cache-dtype": self.kv_cache_dtype,
            "lora-target-modules": list(self.lora_target_modules),
        }
        return {name: value for name, value in given.items() if value} if self.name == "vllm" else {}

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version of vLLM; `V1_RELEASE` for another engine or a version without numbers."""
        numbers = re.match(r"v?(\d+)\.(\d+)", self.version)
        return (int(numbers[1]), int(numbers[2])) if numbers and self.name == "vllm" else V1_RELEASE

    @property
    def switches(self) -> dict[str, bool]:
        """Boolean flags that make vLLM run as simulated: name → on or off. Settings left to the default have no flag.
        vLLM 0.8 caches prefixes by default, but its profiles are simulated without (`packer.twin.engine_rules`)."""
        if self.name != "vllm":
            return {}
        caching = self.prefix_caching
        if caching is None and V1_RELEASE <= self.release < (0, 9):
            caching = False
        given = {"enable-prefix-caching": caching}
        if self.data_parallel_size > 1:  # without this flag, vLLM shards each expert over all ranks
            given["enable-expert-parallel"] = True
        if self.release >= (0, 10):
            given["async-scheduling"] = self.async_scheduling
        return {name: value for name, value in given.items() if value is not None}
