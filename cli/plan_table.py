"""A plan as people read it: one row per GPU, then totals, status and reasons."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from packer.cli.output import number, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from packer.bin import Bin
    from packer.evaluation import Evaluation
    from packer.plan import Plan

VERIFIED = {True: "yes", False: "no", None: "no simulation"}


def plan_lines(plan: Plan) -> list[Table | str]:
    """The plan: servers, totals, reasons."""
    gpus = [_gpus(plan)] if plan.bins else []
    return [*gpus, *_totals(plan), *(f"- {reason}" for reason in plan.reasons)]


def changes_lines(old: Plan, plan: Plan) -> list[Table | str]:
    """What an operator has to do to get from a running plan to the one that follows it."""
    before, now = set(old.workload.names), set(plan.workload.names)
    moved = [plan.workload.names[i] for i in plan.moves.adapters] if plan.moves else []
    numbers = plan.moves.servers if plan.moves else ()
    kept = [number for number in numbers if number is not None]
    lines: list[Table | str] = [
        f"Changes     {len(moved)} adapters move, {len(now - before)} are new, {len(before - now)} are gone; "
        f"servers: {len(kept)} stay, {len(numbers) - len(kept)} start, {old.n_gpus - len(kept)} stop"
    ]
    if moved:
        more = f" and {len(moved) - 10} more" if len(moved) > 10 else ""
        lines.append(f"Moving      {', '.join(moved[:10])}{more}")
    renumbered = [f"{number} → {k}" for k, number in enumerate(numbers) if number not in (None, k)]
    if renumbered:
        lines.append(f"Renumbered  {', '.join(renumbered)}")
    return lines


def _gpus(plan: Plan) -> Table:
    several = len({item.profile for item in plan.bins}) > 1
    columns = ["GPU", *(["server"] if several else []), "adapters by rank", "max_loras", "max_lora_rank"]
    columns += ["offered tok/s", "throughput", "TTFT ms", "ITL ms", "headroom"]
    columns += ["problem"] if not plan.evaluations.feasible.all() else []
    rows = []
    for k, item in enumerate(plan.bins):
        row = plan.evaluations[k]
        rows.append(
            [
                k,
                *([item.profile.name] if several else []),
                by_rank(plan, item),
                item.max_loras,
                item.max_lora_rank,
                number(row.offered_tok_s, 0),
                number(row.total_token_throughput, 0),
                number(row.mean_ttft_ms, 0),
                number(row.mean_itl_ms, 1),
                growth(plan.headroom[k] if plan.headroom else None),
            ]
        )
        if columns[-1] == "problem":
            rows[-1].append("" if row.feasible else result_of(row))
    title = f"Plan for {plan.workload.name!r}: {_adapters(plan)}, {_count(plan)}"
    return table(title, columns, rows, left=(1, 2) if several else (1,))


def servers(bins: Iterable[Bin]) -> str:
    """The profiles for people, each once: "toy (estimated, not calibrated)"."""
    return ", ".join(sorted({item.profile.label for item in bins}))


def result_of(row: Evaluation) -> str:
    """What is wrong with a server, or "holds"."""
    return "memory error" if row.memory_error else "starved" if row.starved else "holds"


def by_rank(plan: Plan, item: Bin) -> str:
    """Adapters of a GPU counted by rank, the largest rank first: "12 × r32, 84 × r8"."""
    counts = Counter(plan.workload.ranks[list(item.adapters)].tolist())
    split = sum(share < 1.0 for share in item.shares)
    text = ", ".join(f"{counts[rank]} × r{rank}" for rank in sorted(counts, reverse=True))
    return f"{text} ({split} shared)" if split else text


def growth(factor: float | None) -> str:
    """How much rates may grow: "+23 %"."""
    from packer.solvers.headroom import LARGEST

    if factor is None:
        return "–"
    more = f"+{factor - 1.0:.0%}"
    return f"> {more}" if factor >= LARGEST else more


def _adapters(plan: Plan) -> str:
    n = len(plan.workload)
    return "1 adapter" if n == 1 else f"{n:,} adapters"


def _count(plan: Plan) -> str:
    return "1 GPU" if plan.n_gpus == 1 else f"{plan.n_gpus} GPUs"


def _totals(plan: Plan) -> list[str]:
    offered = float(plan.evaluations.offered_tok_s.sum())
    served = float(plan.evaluations.total_token_throughput.sum())
    bound = "none"
    if plan.lower_bound is not None:
        gap = f", gap {plan.gap:.1%}" if plan.gap is not None else ""
        bound = f"{plan.lower_bound:g}{gap}" + (f" ({plan.bound_source})" if plan.bound_source else "")
    placed = len(plan.workload) - len(set(plan.unplaced))
    lines = [
        f"Total       {placed:,} of {_adapters(plan)} on {_count(plan)}; "
        f"offered {number(offered, 0)} tok/s, predicted throughput {number(served, 0)} tok/s",
        f"Status      {plan.status.value}; lower bound {bound}; verified by the twin: "
        f"{VERIFIED[plan.verified]}",
        f"Found by    {plan.solver} for {plan.objective}, judged by {plan.predictor}{_margin(plan)}, "
        f"in {plan.runtime_s:.2f} s, seed {plan.seed}",
    ]
    if plan.bins:
        lines.append(f"Server      {servers(plan.bins)}")
    return lines


def _margin(plan: Plan) -> str:
    return f" with rates raised by {plan.margin:.1%}" if plan.margin else ""
