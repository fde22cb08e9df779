"""Options that several commands share, so that they are called, explained and checked alike.

Each is a decorator. The value arrives under the name in the comment of its definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class NumberList(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since click 8.4
    """Numbers with commas between them, as a tuple: `8,16,32`."""

    name = "list"

    def __init__(self, number: type[int] | type[float]) -> None:
        self.number = number

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """The numbers in a text; what is a tuple already stays as it is."""
        if isinstance(value, (tuple, list)):
            return tuple(value)
        kind = "whole numbers" if self.number is int else "numbers"
        try:
            return tuple(self.number(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"Expected {kind} with commas between them, got {str(value)[:80]!r}.", param, ctx)


DEFAULT_PROFILE = "h100-64gb/llama-3.1-8b-instruct"


def _complete_profile(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    from packer.io.profiles import profile_names

    return [name for name in profile_names() if name.startswith(incomplete)]


def complete_registered(
    kind: str,
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completion of the names registered for a kind of strategy."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
        from packer.registry import names

        return [name for name in names(kind) if name.startswith(incomplete)]

    return complete


# workload_path: str
workload_argument = click.argument("workload_path", metavar="WORKLOAD")

# plan_path: str
plan_argument = click.argument("plan_path", metavar="PLAN")

# profile_name: str
profile_option = click.option(
    "--profile",
    "profile_name",
    default=DEFAULT_PROFILE,
    show_default=True,
    metavar="NAME|FILE.toml",
    shell_complete=_complete_profile,
    help="The server: a shipped profile (packer profiles list) or a profile file.",
)

# profile_names: tuple[str, ...]; empty means the default
profiles_option = click.option(
    "--profile",
    "profile_names",
    multiple=True,
    metavar="NAME|FILE.toml",
    shell_complete=_complete_profile,
    help=f"The server: a shipped profile or a profile file; repeatable.  [default: {DEFAULT_PROFILE}]",
)

# seed: int
seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**32 - 1),
    default=0,
    show_default=True,
    help="Seed of everything random: the same seed gives the same output.",
)

# as_json: bool
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")

# quiet: bool
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors; no progress bar.")

# force: bool
force_option = click.option("--force", is_flag=True, help="Overwrite the output file if it exists.")

# predictor: str
predictor_option = click.option(
    "--predictor",
    default="twin",
    show_default=True,
    metavar="NAME|PATH",
    shell_complete=complete_registered("predictor"),
    help="Who judges a server: the twin, a learned predictor, or the path of a saved one.",
)

# objective: str
objective_option = click.option(
    "--objective",
    default="gpus",
    show_default=True,
    metavar="NAME",
    shell_complete=complete_registered("objective"),
    help="What a good plan is: fewest GPUs, lowest latency, …",
)

# solver: str | None
solver_option = click.option(
    "--solver",
    default=None,
    metavar="NAME",
    shell_complete=complete_registered("solver"),
    help="How the plan is searched.  [default: greedy; on a given number of GPUs spread-refined]",
)

# gpus: int | None
gpus_option = click.option(
    "--gpus",
    type=click.IntRange(min=1, max=1_000_000),
    default=None,
    metavar="N",
    help="GPUs at hand: a limit, or with a spreading objective their exact number.",
)

# rate_factor: float
rate_factor_option = click.option(
    "--rate-factor",
    type=float,
    default=1.0,
    show_default=True,
    metavar="X",
    help="Multiply every request rate by this.",
)

# duration_s: float
duration_option = click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=1.0, max=1e7),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Simulated time.",
)

# max_loras: int
max_loras_option = click.option(
    "--max-loras",
    type=click.IntRange(min=1, max=100_000),
    required=True,
    metavar="N",
    help="Adapter slots of the server (vLLM's --max-loras).",
)

# max_lora_rank: int | None
max_lora_rank_option = click.option(
    "--max-lora-rank",
    type=int,
    default=None,
    metavar="RANK",
    help="Rank of every slot (vLLM's --max-lora-rank).  [default: that of the largest adapter]",
)

# time_limit_s: float | None
time_limit_option = click.option(
    "--time-limit",
    "time_limit_s",
    type=click.FloatRange(min=0.0, min_open=True),
    default=None,
    metavar="SECONDS",
    help="Stop searching after this long and return the best plan so far.",
)


def output_option(text: str, *, default: str | None = None, required: bool = False) -> Callable[[F], F]:
    """`-o/--output`, arriving as `output: str` (or `str | None` without a default), explained by `text`."""
    # A default of None would count as a value and defeat `required`.
    given: dict[str, Any] = {} if required else {"default": default, "show_default": default is not None}
    return click.option("-o", "--output", required=required, metavar="FILE", help=text, **given)
