"""The index of prompts that gateways keep, against one written out with dictionaries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from naive_index import PerServer, Shared

from packer.arrays import FloatArray, IntArray
from packer.blocks import Blocks
from packer.twin.cluster.prefixes import look_up, new_index, use
from packer.twin.engine.content import content_of_blocks


class Requests(NamedTuple):
    """The fields of `Servers` that the index reads."""

    prompt: IntArray
    sent_s: FloatArray
    wake_s: FloatArray


def _trees(rng: np.random.Generator, n: int, tokens: int) -> tuple[Blocks, IntArray]:
    """Prompts of a few trees, and their lengths: each goes on where an earlier one was, or begins anew."""
    parents: dict[tuple[int, int], int] = {}
    rows = []
    for r in range(n):
        row: list[int] = []
        for place in range(int(rng.integers(0, 8))):
            # a quarter of the blocks are like no others
            branch = r + 100 if rng.random() < 0.25 else int(rng.integers(2)) + 2 * (place == 0)
            row.append(parents.setdefault((row[-1] if row else -1, branch), len(parents)))
        rows.append(row)
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    lengths = np.array([len(row) * tokens + int(rng.integers(0, 3 * tokens)) for row in rows])
    return Blocks(starts, np.array([each for row in rows for each in row], dtype=np.int64), tokens), lengths


@pytest.mark.parametrize("tokens", [4, 8, 12])
@pytest.mark.parametrize("limit", [40, 10_000])
@pytest.mark.parametrize("shared", [False, True])
def test_the_index_is_that_of_the_source(tokens: int, limit: int, shared: bool) -> None:
    """Matches of each server are those of the gateways' own index, while it fills up and after that."""
    for seed in range(4):
        rng, count, n, size = np.random.default_rng(seed), (3, 70)[seed % 2], 300, 4
        blocks, prompt = _trees(rng, n, tokens)
        adapter = rng.integers(0, 2, n)
        requests = Requests(prompt, np.arange(n, dtype=np.float64), np.zeros(count))
        content = content_of_blocks(adapter, blocks)
        oracle = (Shared if shared else PerServer)(count, limit)
        index = new_index(requests, content, size, 6, np.full(1 if shared else count, limit))  # type: ignore[arg-type]
        for r in range(n):
            ids = blocks.ids[blocks.starts[r] : blocks.starts[r + 1]].tolist()
            hashes: list[object] = []
            for place in range(min(int(prompt[r]) // size, 6)):
                end = (place + 1) * size - 1
                known = end // tokens < len(ids)
                hashes.append((adapter[r], ids[end // tokens], end % tokens) if known else (r, place))
            look_up(index, requests, r, shared)
            assert index.match.tolist() == oracle.match(hashes)
            assert index.total[0] == len(hashes)
            s = int(rng.integers(count))
            use(index, requests, s, r)
            oracle.add(hashes, s)


def test_what_is_not_used_for_long_leaves_the_index() -> None:
    """With a time to keep blocks, a block that was used within it is found, and an older one is not."""
    blocks = Blocks(np.array([0, 1, 2, 3]), np.array([0, 0, 0]), 4)
    requests = Requests(np.full(3, 4), np.array([0.0, 9.0, 20.0]), np.zeros(2))
    content = content_of_blocks(np.zeros(3, dtype=np.int64), blocks)
    index = new_index(requests, content, 4, 6, np.array([100]), 10.0)  # type: ignore[arg-type]
    use(index, requests, 0, 0)
    look_up(index, requests, 1, True)
    assert index.match.tolist() == [1, 0]
    look_up(index, requests, 2, True)
    assert index.match.tolist() == [0, 0]
