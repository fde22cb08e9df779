"""`packer memory`: what slots cost in KV cache, and where the server no longer starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.checks import SLOT_RANKS, slot_rank_for
from packer.cli.declare import bundle, command, option
from packer.cli.options import Writing, common, numbers
from packer.cli.output import Table
from packer.cli.settings import OneProfile
from packer.cli.traffic import refuse_unused
from packer.settings import MAX_LORAS
from packer.words import number

if TYPE_CHECKING:
    from packer.operate.memory import MemoryTable

SLOT_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
"""Values of max_loras that a range LOW..HIGH includes between its ends."""
COUNTS, RANKS = (numbers(int, distinct=True, grid=grid) for grid in (SLOT_COUNTS, SLOT_RANKS))


@bundle
class SlotArguments:
    """Which slots to show.

    max_loras: Slots: a number, a list with commas, or a range.
    max_lora_rank: Slot ranks: a number, a list with commas, or a range.
    rank_needed: Largest rank of your adapters: shows which slots are too small, and what larger ones waste.
        [default: the smallest shown]
    """

    max_loras: tuple[int, ...] = option(type=COUNTS, default="1..384", metavar="N..N")
    max_lora_rank: tuple[int, ...] = option(type=RANKS, default="8..64", metavar="R..R")
    rank_needed: int | None = option(type=click.IntRange(1, SLOT_RANKS[-1]), metavar="R")
    plot: str | None = common("plot", help="Draw the curves (.html, .png or .svg).")


@command
def memory(kind: OneProfile, slots: SlotArguments, out: Writing) -> None:
    """How many adapters fit on the GPU, and what max_loras and max_lora_rank cost in KV cache.

    vLLM reserves max_loras slots of max_lora_rank at its start, whatever the adapters are; the KV cache
    gets the rest. Where that is less than the server needs, it does not start.

    \b
    Examples:
      packer memory --max-loras 1..64 --max-lora-rank 8..128
      packer memory --profile h100-64gb/qwen-2.5-7b-instruct --rank-needed 8 --plot memory.html
    """
    from packer.operate.memory import memory_table

    out.check(slots.plot, what="picture")
    if out.as_json:
        refuse_unused("--json", ["rank_needed"])
    found = memory_table(kind.profile(out), slots.max_loras, slots.max_lora_rank)
    if found.profile.engine.name == "sglang":
        out.note("SGLang takes one slot more than max_loras on servers that get requests to the base model, too")
    if slots.plot is not None:
        from packer.report.figures import write_figure
        from packer.report.pictures import memory_figure

        write_figure(memory_figure(found.profile, found.largest), slots.plot, force=out.force)
        out.note(f"wrote {slots.plot}")
    out.result(found.to_dict, lambda: [capacity(found), _costs(found, slots)])


def capacity(found: MemoryTable) -> Table:
    """Table of KV cache, tokens, by max_loras and max_lora_rank."""
    ranks, rows = list(found.largest), []
    for count in dict.fromkeys(slots for slots, _ in found.tokens):
        cells = (found.tokens[count, rank] for rank in ranks)
        rows.append((count, *("no start" if tokens is None else f"{tokens:,}" for tokens in cells)))
    columns = ("max_loras", *(f"rank {rank}" for rank in ranks))
    kept = " that all layers keep" if found.profile.model.kv_shape else ""
    return Table(f"{found.profile.label}: KV cache left, tokens{kept}", columns, rows, left=())


def _costs(found: MemoryTable, slots: SlotArguments) -> Table:
    from packer.operate.memory import slot_cost_tokens

    ranks = list(found.largest)
    needed = slot_rank_for(slots.rank_needed) if slots.rank_needed else ranks[0]
    rows = []
    for rank in ranks:
        cost = slot_cost_tokens(found.profile, rank)
        extra = cost - slot_cost_tokens(found.profile, needed)
        limit = f"> {MAX_LORAS:,}" if found.largest[rank] >= MAX_LORAS else f"{found.largest[rank]:,}"
        beyond = f"+{extra:,.0f} each" if extra > 0 else "–"
        rows.append((rank, limit, number(cost, 0), "too small" if rank < needed else beyond))
    columns = ("slot rank", "most slots", "KV tokens a slot", f"beyond rank {needed}")
    return Table("Slots", columns, rows, left=())
