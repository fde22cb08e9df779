"""`packer memory`: what slots cost in KV cache, and where the server no longer starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.checks import SLOT_RANKS
from packer.cli.declare import bundle, command, option
from packer.cli.options import OneProfile, Writing, plot_option
from packer.cli.output import number, table

if TYPE_CHECKING:
    from rich.table import Table

    from packer.operate.memory import MemoryTable

SLOT_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
"""Rows of a range of max_loras."""


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


@bundle
class Slots:
    """Which slots to show."""

    max_loras: tuple[int, ...] = option(
        type=Span(SLOT_COUNTS, 100_000),
        default="1..384",
        metavar="N..N",
        help="Slots: a number, a list with commas, or a range.",
    )
    max_lora_rank: tuple[int, ...] = option(
        type=Span(SLOT_RANKS, SLOT_RANKS[-1], only_grid=True),
        default="8..64",
        metavar="R..R",
        help="Slot ranks: a number, a list with commas, or a range.",
    )
    rank_needed: int | None = option(
        type=click.IntRange(1, SLOT_RANKS[-1]),
        metavar="R",
        help="Largest rank of your adapters: shows what larger slots waste.  [default: the smallest shown]",
    )
    plot: str | None = plot_option("Draw the curves")


@command
def memory(kind: OneProfile, slots: Slots, out: Writing) -> None:
    """How many adapters fit on the GPU, and what max_loras and max_lora_rank cost in KV cache.

    vLLM reserves max_loras slots of max_lora_rank at its start, whatever the adapters are; the KV cache
    gets the rest. Where that is less than the server needs, it does not start.

    \b
    Examples:
      packer memory --max-loras 1..64 --max-lora-rank 8..128
      packer memory --profile h100-64gb/qwen-2.5-7b-instruct --rank-needed 8 --plot memory.html
    """
    from packer.operate.memory import memory_table

    out.check_pictures(slots.plot)
    found = memory_table(kind.profile(out), slots.max_loras, slots.max_lora_rank)
    if slots.plot is not None:
        from packer.report.figures import write_figure
        from packer.report.memory import memory_figure

        write_figure(memory_figure(found.profile, found.largest), slots.plot, force=out.force)
        out.note(f"wrote {slots.plot}")
    out.result(found.to_dict, lambda: _tables(found, slots))


def _tables(found: MemoryTable, slots: Slots) -> list[Table]:
    ranks = slots.max_lora_rank
    rows = []
    for count in slots.max_loras:
        cells = (found.tokens[count, rank] for rank in ranks)
        rows.append((count, *("no start" if tokens is None else f"{tokens:,}" for tokens in cells)))
    columns = ("max_loras", *(f"rank {rank}" for rank in ranks))
    return [
        table(f"{found.profile.label}: KV cache left, tokens", columns, rows, left=()),
        _costs(found, slots),
    ]


def _costs(found: MemoryTable, slots: Slots) -> Table:
    from packer.checks import slot_rank_for
    from packer.operate.memory import MOST_SLOTS, slot_cost_tokens

    ranks = slots.max_lora_rank
    needed = slot_rank_for(slots.rank_needed) if slots.rank_needed else ranks[0]
    rows = []
    for rank in ranks:
        cost = slot_cost_tokens(found.profile, rank)
        extra = cost - slot_cost_tokens(found.profile, needed)
        limit = f"> {MOST_SLOTS:,}" if found.largest[rank] >= MOST_SLOTS else f"{found.largest[rank]:,}"
        rows.append((rank, limit, number(cost, 0), f"+{extra:,.0f} each" if extra > 0 else "–"))
    columns = ("slot rank", "most slots", "KV tokens a slot", f"beyond rank {needed}")
    return table("Slots", columns, rows, left=())
