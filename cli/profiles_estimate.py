"""`packer profiles estimate`."""

from __future__ import annotations

import click

from packer.cli.options import force_option, json_option, output_option, quiet_option


def _complete_gpu(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from packer.twin.datasheets import GPUS

    return [name for name in GPUS if name.startswith(incomplete)]


@click.command()
@click.option(
    "--model",
    "config_path",
    required=True,
    metavar="CONFIG.json",
    help="The model's Hugging Face config.json.",
)
@click.option(
    "--gpu",
    required=True,
    metavar="NAME",
    shell_complete=_complete_gpu,
    help="h100-80gb, h200-141gb, a100-80gb, l40s, l4, a10, rtx4090, b200, mi300x, …",
)
@click.option("--name", default=None, help="What the profile is called.  [default: GPU/model]")
@click.option(
    "--max-model-len",
    type=click.IntRange(min=1),
    default=None,
    help="As given to vLLM.  [default: the model's]",
)
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=256, show_default=True, help="As vLLM's.")
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="As given to vLLM.",
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    default=0.9,
    show_default=True,
    help="As given to vLLM.",
)
@click.option("--price", "price_per_hour", type=float, default=None, help="Price of the GPU per hour.")
@output_option("Where to write the profile (.toml).", required=True)
@force_option
@json_option
@quiet_option
def estimate(
    config_path: str,
    gpu: str,
    name: str | None,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    gpu_memory_utilization: float,
    price_per_hour: float | None,
    output: str,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Estimate a profile from a model's config and a GPU's data sheet, without a measurement.

    Memory is computed from the model's dimensions, the step law scaled from a calibrated H100. The profile is
    marked "estimated, not calibrated" wherever it is used.

    \b
    Example:
      packer profiles estimate --model config.json --gpu l40s --max-model-len 8192 -o l40s.toml
      packer solve fleet.csv --profile l40s.toml
    """
    from packer.cli.output import check_output, note, note_estimated, print_json
    from packer.cli.profiles import summarise
    from packer.errors import IncompatibleError
    from packer.io.profiles import write_profile
    from packer.twin.estimate import estimate_profile
    from packer.twin.memory.policy import kv_cache_tokens
    from packer.twin.model_config import read_model_config

    if not output.endswith(".toml"):
        raise IncompatibleError(f"Expected the output's name to end in .toml, got {output[:80]!r}.")
    check_output(output, force=force)
    profile = estimate_profile(
        read_model_config(config_path),
        gpu,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        price_per_hour=price_per_hour,
        name=name,
    )
    write_profile(profile, output, force=force)
    tokens = kv_cache_tokens(profile, profile.settings(1, 8))
    if as_json:
        print_json(
            {**summarise(profile), "output": output, "kv_cache_tokens_with_one_slot_of_rank_8": tokens}
        )
        return
    note(f"{output}: {tokens:,} tokens of KV cache with one slot of rank 8", quiet=quiet)
    if tokens < profile.memory.min_kv_tokens:
        note(
            f"the server would not start with max_model_len {profile.engine.max_model_len}: "
            "set --max-model-len",
            quiet=quiet,
        )
    note_estimated(profile, quiet=quiet)
