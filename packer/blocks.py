"""Content of requests as blocks of tokens, which tells which requests share prefixes, as prefix caching sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from packer import checks
from packer.arrays import BoolArray, IntArray, own
from packer.errors import ValidationError
from packer.public import checked

FIRST_BLOCK = -1  # Stands for the predecessor of a request's first block.
COMPACT = 4  # Ids are checked with a table if all are below `COMPACT` × the number of ids; otherwise they are sorted.


def apart(parts: Sequence[IntArray]) -> list[IntArray]:
    """Rows of numbers >= 0, with an offset added to each row so that no two rows share a number."""
    ends = np.cumsum([int(part.max(initial=-1)) + 1 for part in parts])
    return [part + end - (int(part.max(initial=-1)) + 1) for part, end in zip(parts, ends.tolist(), strict=True)]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Ids of the full blocks of each request: first the prompt's, then the output's.

    Ids are chained, like the `hash_ids` of Mooncake's traces: an id stands for the content of its block and of all
    blocks before it. Two requests with equal ids at one position share the prefix up to there. vLLM shares cached
    blocks only among requests of the same adapter (vllm/v1/core/kv_cache_utils.py, `_gen_lora_extra_hash_keys`).

    `starts`: int64 (n + 1,): request `i` has `ids[starts[i]:starts[i + 1]]`.
    `ids`: int64, >= 0.
    `tokens`: tokens of a block, >= 1; may differ from the `block_size` of the server.

    Raises `ValidationError`: a value breaks a rule, or an id has two predecessors; names the request, counted from 0.
    """

    starts: IntArray
    ids: IntArray
    tokens: int

    @checked
    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", checks.integer("tokens of a block", self.tokens, low=1))
        for key in ("starts", "ids"):
            object.__setattr__(self, key, own(checks.row(f"{key} of blocks", getattr(self, key), whole=True)))
        starts = self.starts
        if not len(starts) or starts[0] != 0 or starts[-1] != len(self.ids) or np.any(np.diff(starts) < 0):
            raise ValidationError(f"Expected starts of blocks to rise from 0 to the number of ids ({len(self.ids):,}).")
        if len(self.ids):
            self._check_chain()

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def counts(self) -> IntArray:
        """Number of ids of each request, int64 (n,)."""
        return np.diff(self.starts)

    def take(self, rows: slice | IntArray | BoolArray) -> Blocks:
        """The blocks of some of the requests."""
        number = np.arange(len(self))[rows]
        counts = self.counts[number]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        places = np.repeat(self.starts[number] - starts[:-1], counts) + np.arange(starts[-1])
        return self.unchecked(starts, self.ids[places], self.tokens)

    @classmethod
    def unchecked(cls, starts: IntArray, ids: IntArray, tokens: int) -> Blocks:
        """The blocks, without checks; the arrays become read-only."""
        made = object.__new__(cls)
        for key, value in {"starts": starts, "ids": ids, "tokens": tokens}.items():
            object.__setattr__(made, key, value)
        for column in (starts, ids):
            column.setflags(write=False)
        return made

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """The blocks of several traces with equal block sizes, concatenated; ids are offset so that none is shared."""
        counts = np.concatenate([part.counts for part in parts])
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return cls(starts, np.concatenate(apart([part.ids for part in parts])), parts[0].tokens)

    def cut(self, counts: IntArray) -> Blocks:
        """The first blocks of each request, at most `counts` of them, int64 (n,)."""
        place = np.arange(len(self.ids)) - np.repeat(self.starts[:-1], self.counts)
        kept = np.minimum(counts, self.counts)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
        return Blocks(starts, self.ids[place < np.repeat(kept, self.counts)], self.tokens)

    def _request_of(self, place: int) -> int:
        return int(np.searchsorted(self.starts, place, side="right")) - 1

    def _check_chain(self) -> None:
        """Check that each id has the same predecessor in all requests."""
        ids = self.ids
        if ids.min() < 0:
            place = int(np.argmax(ids < 0))
            rule = f"Expected ids of blocks to be >= 0, got {ids[place]} in request {self._request_of(place):,}."
            raise ValidationError(rule)
        before = np.empty_like(ids)
        before[1:] = ids[:-1]
        before[self.starts[:-1][self.counts > 0]] = FIRST_BLOCK
        if ids.max() < COMPACT * len(ids):
            known = np.empty(int(ids.max()) + 1, dtype=np.int64)
            known[ids] = before
            broken = bool(np.any(known[ids] != before))
        else:
            order = np.argsort(ids)
            same = ids[order[1:]] == ids[order[:-1]]
            broken = bool(np.any(same & (before[order[1:]] != before[order[:-1]])))
        if broken:
            _, first, number = np.unique(ids, return_index=True, return_inverse=True)
            place = int(np.argmax(before != before[first[number]]))
            raise ValidationError(
                f"Expected each id of a block to follow the same id wherever it stands, because it stands for all "
                f"that comes before it, got id {ids[place]} of request {self._request_of(place):,} behind several."
            )


def at_rows(requests: Any, rows: slice | IntArray | BoolArray) -> dict[str, Any]:
    """The fields of a dataclass of requests that have a value for each request, by name, for some of the requests."""
    columns = {each.name: getattr(requests, each.name) for each in fields(requests)}
    found = {name: column[rows] for name, column in columns.items() if isinstance(column, np.ndarray)}
    return found | {name: each.take(rows) for name, each in columns.items() if isinstance(each, Blocks)}
