"""`packer memory`: what slots cost in KV cache, and where the server stops starting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.checks import SLOT_RANKS
from packer.cli import options
from packer.cli.output import check_output, note, note_estimated, number, print_json, show, table

if TYPE_CHECKING:
    from packer.profile import Profile
    from packer.report.figures import Figure

SLOT_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
"""Rows of a range of max_loras."""

_MAX_LORAS = 100_000


class Span(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since click 8.4
    """`8`, `8,16,32` or `8..128`: of a range, the given grid and its two ends."""

    name = "span"

    def __init__(self, grid: tuple[int, ...], high: int, *, only_grid: bool = False) -> None:
        self.grid, self.high, self.only_grid = grid, high, only_grid

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The numbers, sorted, each once."""
        if isinstance(value, tuple):
            return value
        low, dots, high = str(value).partition("..")
        try:
            if dots:
                first, last = int(low), int(high)
                inside = {n for n in self.grid if first <= n <= last}
                found = inside if self.only_grid else inside | {first, last}
            else:
                found = {int(part) for part in str(value).split(",")}
        except ValueError:
            self.fail(f"expected 8, 8,16,32 or 8..128, got {str(value)[:80]!r}.", param, ctx)
        if not found or min(found) < 1 or max(found) > self.high or (dots and first > last):
            self.fail(f"expected numbers from 1 to {self.high}, got {str(value)[:80]!r}.", param, ctx)
        if self.only_grid and not found <= set(self.grid):
            self.fail(
                f"expected some of {', '.join(map(str, self.grid))}, got {str(value)[:80]!r}.", param, ctx
            )
        return tuple(sorted(found))


@click.command()
@options.profile_option
@click.option(
    "--max-loras",
    type=Span(SLOT_COUNTS, _MAX_LORAS),
    default="1..384",
    show_default=True,
    metavar="N..N",
    help="Slots: a number, a list with commas, or a range.",
)
@click.option(
    "--max-lora-rank",
    type=Span(SLOT_RANKS, SLOT_RANKS[-1], only_grid=True),
    default="8..64",
    show_default=True,
    metavar="R..R",
    help="Slot ranks: a number, a list with commas, or a range.",
)
@click.option(
    "--rank-needed",
    type=click.IntRange(1, SLOT_RANKS[-1]),
    default=None,
    metavar="R",
    help="Largest rank of your adapters: shows what larger slots waste.  [default: the smallest shown]",
)
@click.option(
    "--plot", "plot_path", default=None, metavar="FILE", help="Draw the curves (.html, .png or .svg)."
)
@options.force_option
@options.json_option
@options.quiet_option
def memory(
    profile_name: str,
    max_loras: tuple[int, ...],
    max_lora_rank: tuple[int, ...],
    rank_needed: int | None,
    plot_path: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """How many adapters fit on the GPU, and what max_loras and max_lora_rank cost in KV cache.

    vLLM reserves max_loras slots of max_lora_rank at its start, whatever the adapters are; the KV cache
    gets the rest. Where that is less than the server needs, it does not start.

    \b
    Examples:
      packer memory --max-loras 1..64 --max-lora-rank 8..128
      packer memory --profile h100-64gb/qwen-2.5-7b-instruct --rank-needed 8 --plot memory.html
    """
    from packer.checks import slot_rank_for
    from packer.io.profiles import load_profile
    from packer.twin.memory.policy import kv_cache_tokens, memory_error

    if plot_path is not None:
        from packer.report.figures import check_suffix

        check_suffix(plot_path)
    check_output(plot_path, force=force)
    profile = load_profile(profile_name)
    note_estimated(profile, quiet=quiet)
    grid = {
        (slots, rank): (kv_cache_tokens(profile, settings), memory_error(profile, settings))
        for slots in max_loras
        for rank in max_lora_rank
        for settings in (profile.settings(slots, rank),)
    }
    most = {rank: largest_max_loras(profile, rank) for rank in max_lora_rank}
    needed = slot_rank_for(rank_needed) if rank_needed else max_lora_rank[0]
    if plot_path is not None:
        from packer.report.figures import write_figure

        write_figure(figure(profile, max_lora_rank, most), plot_path, force=force)
        note(f"wrote {plot_path}", quiet=quiet)
    if as_json:
        rows = [
            {
                "max_loras": slots,
                "max_lora_rank": rank,
                "kv_cache_tokens": max(0, tokens),
                "memory_error": error,
            }
            for (slots, rank), (tokens, error) in grid.items()
        ]
        print_json(
            {
                "profile": profile.name,
                "calibrated": profile.calibrated,
                "rows": rows,
                "largest_max_loras": most,
            }
        )
    elif not quiet:
        head = ("max_loras", *(f"rank {rank}" for rank in max_lora_rank))
        body = [
            (
                slots,
                *(
                    "no start" if grid[slots, rank][1] else f"{grid[slots, rank][0]:,}"
                    for rank in max_lora_rank
                ),
            )
            for slots in max_loras
        ]
        show(
            table(f"{profile.label}: KV cache left, tokens", head, body, left=()),
            table(
                "Slots",
                ("slot rank", "most slots", "KV tokens a slot", f"beyond rank {needed}"),
                _costs(profile, max_lora_rank, most, needed),
                left=(),
            ),
        )
    return 0


def largest_max_loras(profile: Profile, rank: int) -> int:
    """Largest max_loras with which the server starts (at most 100,000); 0 if it never does."""
    from packer.twin.memory.policy import memory_error

    low, high = 0, _MAX_LORAS + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if memory_error(profile, profile.settings(middle, rank)) is None else (low, middle)
        )
    return low


def _costs(
    profile: Profile, ranks: tuple[int, ...], most: dict[int, int], needed: int
) -> list[tuple[object, ...]]:
    from packer.twin.memory.policy import memory_policy

    def per_slot(rank: int) -> float:
        reserved = memory_policy(profile).reserved_bytes(profile, profile.settings(1, rank))
        return reserved / profile.model.kv_bytes_per_token

    rows: list[tuple[object, ...]] = []
    for rank in ranks:
        cost = per_slot(rank)
        extra = cost - per_slot(needed)
        limit = f"> {_MAX_LORAS:,}" if most[rank] >= _MAX_LORAS else f"{most[rank]:,}"
        rows.append((rank, limit, number(cost, 0), f"+{extra:,.0f} each" if extra > 0 else "–"))
    return rows


def figure(profile: Profile, ranks: tuple[int, ...], most: dict[int, int]) -> Figure:
    """KV tokens over the number of slots, a curve for each slot rank, to where the server stops starting."""
    from packer.report.figures import Figure, Line, Mark, Panel
    from packer.twin.memory.policy import kv_cache_tokens

    end = min(1024, max(1, *most.values()))
    series = []
    for rank in ranks:
        last = min(end, most[rank])
        slots = sorted({1 + round(k * (last - 1) / 96) for k in range(97)}) if last else []
        series.append(
            Line(
                slots,
                [kv_cache_tokens(profile, profile.settings(n, rank)) for n in slots],
                f"slot rank {rank}",
            )
        )
    limit = profile.memory.min_kv_tokens
    panel = Panel(
        series,
        title=profile.label,
        x_label="max_loras",
        y_label="KV cache, tokens",
        marks=(Mark(limit, "least to start", axis="y"),),
    )
    return Figure([panel], title="What adapter slots cost", columns=1, panel_size=(8.0, 4.5))
