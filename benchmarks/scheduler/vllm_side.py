"""What vLLM's own scheduler and KV cache manager do with `cases.py`, without a model, with a simulated clock.

    PYTHON-WITH-VLLM benchmarks/scheduler/vllm_side.py MODEL_FOLDER CASES.json OUT.json

Other versions of vLLM run in the same environment with their wheel's folder first on PYTHONPATH. MODEL_FOLDER: a
config.json with max_position_embeddings of at least 2048. A step is scheduled while the one before it is executed
where scheduling is asynchronous (`EngineCore.step_with_batch_queue`). OUT has, per request, first token and finish, s,
and tokens found in the cache at its first admission; preemptions and steps of the case.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections import deque
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
import torch
import vllm
from vllm.config import CacheConfig, LoRAConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

OUTPUT = 2 * 10**8
"""Requests say this and their number, so that no two of them say the same."""
DRAFTS = {"draft_model": "draft_model", "eagle": "eagle3"}


def known(target: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values that this version has a parameter for."""
    names = getattr(target, "__dataclass_fields__", None) or inspect.signature(target.__init__).parameters
    return {name: value for name, value in values.items() if name in names}


def speculation(engine: dict[str, Any]) -> Any:
    """vLLM's configuration of speculative decoding, without a draft model to load."""
    config = object.__new__(SpeculativeConfig)
    for name, field in SpeculativeConfig.__dataclass_fields__.items():
        default = field.default if not callable(getattr(field.default, "default_factory", None)) else None
        value = getattr(default, "default", default)
        config.__dict__[name] = value if isinstance(value, (int, float, str, bool)) else None
    config.__dict__.update(
        method=DRAFTS[engine["method"]],
        num_speculative_tokens=engine["num_speculative_tokens"],
        parallel_drafting=False,
        disable_eagle_block_drop=False,
    )
    return config


def scheduler_of(model: str, engine: dict[str, Any]) -> Scheduler:
    """vLLM's scheduler with these settings."""
    size, asynchronous = engine["block_size"], engine["async_scheduling"]
    make = lambda cls, **values: cls(**known(cls, values))  # noqa: E731
    models = make(
        ModelConfig, model=model, tokenizer=model, dtype="bfloat16", seed=0, skip_tokenizer_init=True,
        max_model_len=engine["max_model_len"],
    )  # fmt: skip
    cache = make(
        CacheConfig, block_size=size, enable_prefix_caching=engine["prefix_caching"], swap_space=0,
        gpu_memory_utilization=0.9, cache_dtype="auto",
    )  # fmt: skip
    groups = engine.get("groups", 1)
    cache.num_gpu_blocks = engine["blocks"] * groups + 1  # and the null block
    batch = make(
        SchedulerConfig, max_num_seqs=engine["max_num_seqs"], max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=engine["max_model_len"], enable_chunked_prefill=True, is_encoder_decoder=False,
        async_scheduling=asynchronous, policy=engine["scheduling_policy"],
    )  # fmt: skip
    loras = make(
        LoRAConfig, max_lora_rank=8, max_loras=engine["max_loras"], max_cpu_loras=engine["max_loras"] * 4,
        lora_dtype=torch.bfloat16,
    )  # fmt: skip
    config = VllmConfig(scheduler_config=batch, model_config=models, cache_config=cache, lora_config=loras)
    config.scheduler_config.async_scheduling = asynchronous  # a CPU's platform switches it off
    if "method" in engine:
        object.__setattr__(config, "speculative_config", speculation(engine))
    shape = {"block_size": size, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    windows = [make(SlidingWindowSpec, **shape, sliding_window=engine["window"]) for _ in range(groups - 1)]
    layers = enumerate([make(FullAttentionSpec, **shape), *windows])
    kv = make(
        KVCacheConfig, num_blocks=cache.num_gpu_blocks, kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer {k}"], each) for k, each in layers],
    )  # fmt: skip
    kind = AsyncScheduler if asynchronous else Scheduler
    values = {
        "vllm_config": config, "kv_cache_config": kv, "block_size": size, "log_stats": True,
        "structured_output_manager": StructuredOutputManager(config),
    }  # fmt: skip
    return kind(**known(Scheduler, values))


def uniform(request: int, outputs: int) -> float:
    """A number in (0, 1) that stands for the text of a request after so many outputs (`packer.twin.engine.drafts`)."""
    prime = 2**31 - 1
    x = ((request + 1) * 48271 + (outputs + 1) * 40692) % prime
    for factor in (1103515245, 69621, 48271):
        x ^= x >> 15
        x = (x + 1) * factor % prime
    return (x + 0.5) / prime


def accepted(chance: float, request: int, outputs: int, drafts: int) -> int:
    """Drafts that are kept: each, if those before it are, with this chance."""
    u, count, product = uniform(request, outputs), 0, chance
    while count < drafts and u < product:
        count, product = count + 1, product * chance
    return count


class Side:
    """One case on vLLM's scheduler."""

    def __init__(self, model: str, case: dict[str, Any]) -> None:
        self.case, self.engine, self.now, self.sent = case, case["engine"], 0.0, 0
        self.scheduler = scheduler_of(model, self.engine)
        self.live: dict[str, Request] = {}
        self.steps = self.preemptions = 0
        self.drafts = self.engine.get("num_speculative_tokens", 0)
        n = len(case["time"])
        self.first: list[float | None] = [None] * n
        self.finish: list[float | None] = [None] * n
        self.cached: list[int | None] = [None] * n
        from vllm.utils.hashing import sha256

        kv_cache_utils.init_none_hash(sha256)
        ahead = getattr(self.scheduler, "num_hash_lookahead_tokens", 0)
        more = {"num_hash_lookahead_tokens": ahead} if ahead else {}
        self.hasher = kv_cache_utils.get_request_block_hasher(self.engine["block_size"], sha256, **more)

    def request(self, i: int) -> Request:
        """A request, its prompt's full blocks by their ids."""
        case, size = self.case, self.engine["block_size"]
        ids = case["blocks"][i][: case["prompt"][i] // size]
        tokens = [1000 + each * 64 + j for each in ids for j in range(size)]
        tokens += [10**8 + i * 4096 + j for j in range(case["prompt"][i] - len(tokens))]
        adapter = case["adapter"][i]
        values = {
            "request_id": str(i), "prompt_token_ids": tokens, "pooling_params": None, "eos_token_id": None,
            "sampling_params": SamplingParams(max_tokens=case["output"][i], ignore_eos=True),
            "arrival_time": case["time"][i], "block_hasher": self.hasher, "priority": case["priority"][i],
            "lora_request": LoRARequest(f"a{adapter}", adapter + 1, "/none"), "mm_features": None,
        }  # fmt: skip
        return Request(**known(Request, values))

    def arrive(self) -> None:
        """Requests that were sent up to now join the queue."""
        while self.sent < len(self.first) and self.case["time"][self.sent] <= self.now:
            self.live[str(self.sent)] = self.request(self.sent)
            self.scheduler.add_request(self.live[str(self.sent)])
            self.sent += 1

    def schedule(self) -> tuple[Any, dict[str, tuple[bool, int]]] | None:
        """A step, and by request whether it samples and how many drafts may be kept; None: nothing to do."""
        runs = {request.request_id for request in self.scheduler.running}
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        if not output.num_scheduled_tokens:
            return None
        self.steps += 1
        rows = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.live[name]
            if self.cached[int(name)] is None:
                self.cached[int(name)] = request.num_computed_tokens - count
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            rows[name] = (not request.is_prefill_chunk, drafts if name in runs else 0)  # others hold padding
        return output, rows

    def deliver(self, output: Any, rows: dict[str, tuple[bool, int]]) -> None:
        """The tokens of a step come out."""
        sampled = []
        for name, (samples, drafts) in rows.items():
            request, i = self.live.get(name), int(name)
            count = 0
            if samples and request is not None:
                chance = self.case["acceptance"][self.case["adapter"][i]] if drafts else 0.0
                count = 1 + accepted(chance, i, request.num_output_tokens, drafts)
            sampled.append([OUTPUT + i] * count)
        names = list(rows)
        values = {
            "req_ids": names, "req_id_to_index": {name: k for k, name in enumerate(names)}, "logprobs": None,
            "sampled_token_ids": sampled, "prompt_logprobs_dict": {}, "pooler_output": [],
        }  # fmt: skip
        self.scheduler.update_from_output(output, ModelRunnerOutput(**known(ModelRunnerOutput, values)))
        if self.drafts and not self.engine["async_scheduling"]:  # `EngineCore.post_step`
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[1] * self.drafts for _ in names]))
        for name in names:
            request, i = self.live.get(name), int(name)
            if request is None:
                continue
            if request.num_output_tokens and self.first[i] is None:
                self.first[i] = self.now
            if request.is_finished():
                self.finish[i] = self.now
                del self.live[name]

    def run(self) -> dict[str, Any]:
        """All requests, to the end."""
        queue: deque[tuple[Any, dict[str, tuple[bool, int]]]] = deque()
        depth, law = 1 + self.engine["async_scheduling"], self.case["law"]
        while True:
            if not queue and not self.scheduler.has_unfinished_requests():
                if self.sent == len(self.first):
                    break
                self.now = max(self.now, self.case["time"][self.sent])
            self.arrive()
            while len(queue) < depth and self.scheduler.has_unfinished_requests():
                step = self.schedule()
                if step is None:
                    break
                queue.append(step)
            if not queue:  # the step had no tokens left, because a request preempted itself: it takes no time
                continue
            output, rows = queue.popleft()
            self.now += law["base"] + law["token"] * sum(output.num_scheduled_tokens.values())
            if depth == 1:
                self.arrive()
            self.deliver(output, rows)
        keys = ("first", "finish", "cached", "preemptions", "steps")
        return {"version": vllm.__version__.split("+")[0]} | {key: getattr(self, key) for key in keys}


if __name__ == "__main__":
    model, cases, out = sys.argv[1:]
    with open(cases) as file:
        done = [Side(model, case).run() for case in json.load(file)]
    with open(out, "w") as file:
        json.dump(done, file)
