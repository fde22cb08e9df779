"""Ranks of adapters: traffic does not record them, so that they are given, and never assumed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from packer.adapter import MAX_RANK
from packer.errors import ValidationError, reader, shown
from packer.traces.assign import draw_ranks


@dataclass(frozen=True)
class Ranks:
    """What is known of the ranks of a fleet.

    `table`: adapter → rank; 0 for the base model.
    `others`: ranks of adapters that the table does not name, drawn uniformly; empty where they are unknown.
    """

    table: Mapping[str, int] = field(default_factory=dict)
    others: tuple[int, ...] = ()

    def of(self, names: Sequence[str], *, seed: int = 0) -> tuple[int, ...]:
        """The rank of each adapter.

        Raises `ValidationError`: an adapter is not in the table, and no rank was given for the others.
        """
        missing = [name for name in names if name not in self.table]
        if missing and not self.others:
            raise ValidationError(
                f"Expected the rank of every adapter: {len(missing)} of {len(names)} have none, the first is "
                f"{shown(missing[0])}. --ranks FILE.csv (columns adapter,rank) gives them, --rank R is one "
                "for all others."
            )
        drawn = draw_ranks(len(missing), self.others, np.random.default_rng(seed)) if missing else ()
        table = {**self.table, **dict(zip(missing, drawn, strict=True))}
        return tuple(table[name] for name in names)


@reader
def read_ranks(path: str | os.PathLike[str]) -> dict[str, int]:
    """Adapter → rank from a CSV file with the columns adapter,rank."""
    from packer.io.files import read_text
    from packer.io.tables import by_adapter, check_columns, csv_rows

    names, rows = csv_rows(read_text(path))
    check_columns(names, ("adapter", "rank"), ())
    return {name: row.integer("rank", low=0, high=MAX_RANK) for name, row in by_adapter(rows)}
