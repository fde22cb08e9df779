"""Assign adapters to the requests of traces, because no public production trace names them, and generate fleets.
Traffic does not record ranks, so ranks must be given; they are never assumed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np

from packer import checks
from packer.adapter import MAX_RANK, Adapter
from packer.arrays import FloatArray
from packer.errors import ValidationError, reader, shown
from packer.lengths import Lengths
from packer.sessions import Sessions
from packer.traces.prefixes import common_groups
from packer.traces.trace import Trace
from packer.words import none_called, prefixed
from packer.workload import SHAREGPT_CORRELATION, SHAREGPT_INPUT, SHAREGPT_OUTPUT, Workload

DEFAULT_EXPONENT = 1.2  # With 200 adapters, 20 % of them get about 80 % of the requests, as in measured fleets.


def popularity(n: int, exponent: float) -> FloatArray:
    """Share of the requests of each of n adapters, float64 (n,): proportional to k^−exponent, k = 1 … n."""
    weights = np.arange(1, n + 1, dtype=np.float64) ** -checks.real("exponent", exponent, low=0.0, high=20.0)
    share: FloatArray = weights / weights.sum()
    return share


def adapter_names(n: int) -> tuple[str, ...]:
    """Names of n adapters, "adapter-000" …, all of the same length."""
    width = max(3, len(str(n - 1)))
    return tuple(f"adapter-{k:0{width}d}" for k in range(n))


def draw_ranks(n: int, ranks: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
    """n ranks from a set, each equally likely."""
    if not ranks:
        raise ValidationError("Expected at least one rank, got none.")
    for rank in ranks:
        checks.integer("a rank", rank, low=1, high=MAX_RANK)
    return tuple(rng.choice(np.array(ranks, dtype=np.int64), size=n).tolist())


def assign_adapters(
    trace: Trace, n_adapters: int, *, ranks: Sequence[int] | None = None, exponent: float = DEFAULT_EXPONENT,
    seed: int = 0,
) -> Trace:  # fmt: skip
    """Assign each request of a trace at random to one of `n_adapters`, whose popularity follows a power law.

    Requests of one session go to one adapter. Without sessions, so do requests that share a longer prefix than most
    prompts do (`common_groups`). Adapters without requests are left out. Ranks are drawn uniformly from `ranks`; None:
    adapters have no ranks. Adapters that the trace already has are replaced.
    """
    checks.integer("the number of adapters", n_adapters, low=1, high=1_000_000)
    rng = np.random.default_rng(checks.integer("seed", seed, low=0))
    group = trace.sessions
    if group is None and trace.blocks is not None:
        group = common_groups(trace.blocks)
    number = np.arange(len(trace)) if group is None else np.unique(group, return_inverse=True)[1]
    drawn = rng.choice(n_adapters, size=int(number.max()) + 1, p=popularity(n_adapters, exponent))[number]
    of_adapter = None if ranks is None else draw_ranks(n_adapters, ranks, rng)
    used, adapter = np.unique(drawn, return_inverse=True)
    names = adapter_names(n_adapters)
    return replace(
        trace,
        adapter=adapter.astype(np.int64),
        names=tuple(names[k] for k in used),
        ranks=None if of_adapter is None else tuple(of_adapter[k] for k in used),
    )


@dataclass(frozen=True)
class Ranks:
    """Known ranks of a fleet.

    `table`: adapter → rank; 0 for the base model.
    `others`: ranks of adapters that the table does not name, drawn uniformly; empty: unknown.
    `base`: names under which the traffic is expected to request the base model.
    """

    table: Mapping[str, int] = field(default_factory=dict)
    others: tuple[int, ...] = ()
    base: tuple[str, ...] = ()

    def unseen(self, names: Sequence[str]) -> list[str]:
        """A warning if no request has a name in `base`; otherwise empty."""
        return none_called([name for name in self.base if name not in names], "--base", names)

    def of(self, names: Sequence[str], *, seed: int = 0) -> tuple[int, ...]:
        """Each adapter's rank; raises `ValidationError` if one is not in the table and no others were given."""
        missing = [name for name in names if name not in self.table]
        if missing and not self.others:
            raise ValidationError(
                f"Expected the rank of every adapter: {len(missing)} of {len(names)} have none, the first is "
                f"{shown(missing[0])}. --ranks FILE.csv (columns adapter,rank) gives them, --rank R is one "
                f"for all others.{prefixed(missing, self.table)}"
            )
        drawn = draw_ranks(len(missing), self.others, np.random.default_rng(seed)) if missing else ()
        table = {**self.table, **dict(zip(missing, drawn, strict=True))}
        return tuple(table[name] for name in names)


@reader
def read_ranks(path: str | os.PathLike[str]) -> dict[str, int]:
    """Adapter → rank from a CSV file with the columns adapter,rank, and perhaps others of a workload, unread."""
    from packer.io.files import read_text
    from packer.io.tables import by_adapter, check_columns, csv_rows
    from packer.io.workloads import OPTIONAL

    names, rows = csv_rows(read_text(path))
    check_columns(names, ("adapter", "rank"), ("rate", *OPTIONAL))
    return {name: row.integer("rank", low=0, high=MAX_RANK) for name, row in by_adapter(rows)}


_T = TypeVar("_T", int, float)


class PowerLaw(NamedTuple):
    """A total rate, req/s; the k-th adapter gets a share proportional to k^−`exponent`."""

    total_rate: float
    exponent: float = 1.0


def generate_workload(
    n_adapters: int, *, ranks: Sequence[int], rates: Sequence[float] | PowerLaw,
    input_tokens: Lengths = SHAREGPT_INPUT, output_tokens: Lengths = SHAREGPT_OUTPUT,
    shared_prefix_tokens: int = 0, sessions: Sessions | None = None, seed: int = 0,
) -> Workload:  # fmt: skip
    """Generate a workload of `n_adapters` adapters.

    `rates`: values that are used equally often (as in arXiv 2602.24044), or a power law. `ranks` are also used equally
    often. `seed` determines which adapter gets which value. All adapters have `shared_prefix_tokens` and `sessions`.
    """
    checks.integer("the number of adapters", n_adapters, low=1, high=1_000_000)
    rng = np.random.default_rng(checks.integer("seed", seed, low=0))
    if isinstance(rates, PowerLaw):
        checks.real("the total rate", rates.total_rate, low=0.0, open_low=True)
        of_adapter = (popularity(n_adapters, rates.exponent) * rates.total_rate).tolist()
    else:
        of_adapter = _evenly(rates, n_adapters, rng)
    rows = zip(adapter_names(n_adapters), _evenly(ranks, n_adapters, rng), of_adapter, strict=True)
    adapters = [Adapter(adapter, rank, rate, shared_prefix_tokens=shared_prefix_tokens) for adapter, rank, rate in rows]
    return Workload(adapters, input_tokens, output_tokens, SHAREGPT_CORRELATION, name="generated", sessions=sessions)


def _evenly(values: Sequence[_T], n: int, rng: np.random.Generator) -> list[_T]:
    """n values in random order, in which each of `values` appears equally often (± 1)."""
    if not values:
        raise ValidationError("Expected at least one value to choose from, got none.")
    return [values[k % len(values)] for k in rng.permutation(n).tolist()]
