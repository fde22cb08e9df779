"""`packer profiles estimate`."""

from __future__ import annotations

from typing import Any

import click

from packer.cli.declare import Readers, bundle, command, option, pairs, values
from packer.cli.options import NO_LAW, Writing, common

SETTINGS: Readers = {
    "tensor-parallel-size": click.IntRange(min=1, max=64),
    "quantization": str,
    **dict.fromkeys(("max-model-len", "max-num-seqs", "max-num-batched-tokens"), click.IntRange(min=1)),
    "gpu-memory-utilization": click.FloatRange(0.0, 1.0, min_open=True),
    "kv-cache-dtype": str,
    "lora-target-modules": lambda text: tuple(filter(None, text.split(","))),
    "vllm-version": str,
    "engine": click.Choice(("vllm", "sglang")),
}


@bundle
class EstimateOptions:
    """The model, the GPU and the server's settings.

    model: A Hugging Face repository known to packer or in this machine's cache, or the model's config.json.
    gpu: h100-80gb, h200, b200, a100-80gb, l40s, l4, rtx4090, mi300x, …
    name: What the profile is called. [default: GPU/model]
    settings: A setting of the server: tensor-parallel-size (its GPUs, 1), quantization (fp8, int8, awq, gptq, nvfp4; as
        the model's config says), and by default as vLLM has it for the GPU max-model-len, max-num-seqs,
        max-num-batched-tokens, gpu-memory-utilization, kv-cache-dtype (auto, bfloat16, fp8), lora-target-modules (of
        qkv_proj, o_proj, gate_up_proj and down_proj, with commas: what slots hold), vllm-version (whose rules and
        defaults hold; the newest that is known), engine (vllm or sglang: its memory for slots and its eviction; the
        step law is vLLM's); --max-model-len 8192 is the same; repeatable.
    price_per_hour: Price of the server's GPUs per hour, US dollars. [default: the data sheet's]
    """

    model: str = common("model", required=True)
    gpu: str = common("gpu", required=True)
    name: str | None = option()
    settings: dict[str, Any] = pairs("--set", names=SETTINGS, refused=NO_LAW)
    price_per_hour: float | None = option("--price", type=float)
    output: str = common("output", help="Where to write the profile (.toml).", required=True)


@command
def estimate(given: EstimateOptions, out: Writing) -> None:
    """Estimate a profile from a model's config and a GPU's data sheet, without a measurement.

    Memory follows vLLM's rules, the base model's step law a roofline whose shares were fitted to public
    measurements, the terms of adapters a calibrated H100. The profile carries its errors by what it extrapolates
    from, and is marked "estimated, not calibrated" wherever it is used.

    \b
    Example:
      packer profiles estimate --model meta-llama/Llama-3.1-8B-Instruct --gpu l40s --max-model-len 8192 -o l40s.toml
      packer profiles estimate --model Qwen/Qwen3-32B --gpu h200 --tensor-parallel-size 2 --quantization fp8 -o q.toml
      packer solve fleet.csv --profile l40s.toml
    """
    from packer.cli.profiles.list import summary_of
    from packer.errors import IncompatibleError
    from packer.fit.estimate import estimate_profile
    from packer.io.profiles import write_profile
    from packer.twin.memory.policy import kv_cache_tokens

    output = given.output
    if not output.endswith(".toml"):
        raise IncompatibleError(f"Expected the output's name to end in .toml, got {output[:80]!r}.")
    out.check(output)
    settings = values(given, "model", "gpu", "output", "settings") | given.settings
    named = {"vllm_version": "version", "engine": "engine_name"}
    settings = {named.get(name, name): value for name, value in settings.items()}
    profile = estimate_profile(given.model, given.gpu, **settings)
    write_profile(profile, output, force=out.force)
    tokens = kv_cache_tokens(profile, profile.settings(1, 8))
    said = {"output": output, "kv_cache_tokens_with_one_slot_of_rank_8": tokens}
    out.result(lambda: {**summary_of(profile), **said}, list)
    out.note(f"{output}: {tokens:,} tokens of KV cache with one slot of rank 8")
    if tokens < profile.memory.min_kv_tokens:
        length = profile.engine.max_model_len
        out.note(f"the server would not start with max_model_len {length}: set --max-model-len")
    out.note_profiles(profile)
