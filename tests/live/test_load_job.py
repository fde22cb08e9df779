"""What the load generator sends."""

from __future__ import annotations

import json
import pickle

import numpy as np

from packer.arrival import RequestTrace
from packer.blocks import Blocks
from packer.live.load import LoadJob, Said
from packer.live.metrics import summarise


def test_prompts_of_equal_blocks_are_equal() -> None:
    """Blocks with one id have the same tokens in every prompt, all others differ, also in the client's process."""
    blocks = Blocks(np.array([0, 3, 5, 6]), np.array([7, 8, 9, 7, 10, 11]), 16)
    prompt = np.array([50, 33, 16])
    trace = RequestTrace(np.arange(3.0), np.zeros(3, np.int64), prompt, np.full(3, 4), blocks=blocks)
    job = LoadJob("http://127.0.0.1:1", ("a",), trace, 5.0, token_ids=(4, 1000), seed=2)
    for each in (job, pickle.loads(pickle.dumps(job))):
        first, second, third = (json.loads(Said(each).body(k))["prompt"] for k in range(3))
        assert [len(tokens) for tokens in (first, second, third)] == prompt.tolist()
        assert first[:16] == second[:16]
        assert first[16:32] != second[16:32]
        assert third != first[:16]


def test_a_turn_repeats_what_the_server_answered() -> None:
    """A later turn begins with the prompt and the answer before it; an answer cut short is not repeated."""
    blocks = Blocks(np.array([0, 2, 4, 5]), np.array([7, 8, 7, 8, 9]), 16)
    prompt = np.array([30, 46, 20])
    trace = RequestTrace(
        np.arange(3.0), np.zeros(3, np.int64), prompt, np.full(3, 4), blocks=blocks, sessions=np.array([5, 5, 6])
    )
    said = Said(LoadJob("http://127.0.0.1:1", ("a",), trace, 5.0, token_ids=(4, 1000)))
    first, made, other = (json.loads(said.body(k)) for k in range(3))
    assert first["return_token_ids"]
    assert made["prompt"][:30] == first["prompt"]
    for tokens in ([1, 2], [3]):
        said.hear(0, b"data: " + json.dumps({"choices": [{"token_ids": tokens}]}).encode())
    said.end(0)
    assert json.loads(said.body(1)) == made
    for tokens in ([1, 2, 3], [1]):
        said.hear(0, b"data: " + json.dumps({"choices": [{"token_ids": tokens}]}).encode())
    said.end(0)
    assert json.loads(said.body(1))["prompt"] == [*first["prompt"], 1, 2, 3, 1, *made["prompt"][34:]]
    assert json.loads(said.body(2)) == other


def test_hit_rate_is_found_over_looked_up_tokens() -> None:
    """The share of prompt tokens that were found in the cache during a run, also across a restart of the counters."""
    page = "vllm:prefix_cache_queries_total {}\nvllm:prefix_cache_hits_total {}\n"
    pages = [
        (float(t), page.format(queries, hits)) for t, (queries, hits) in enumerate([(100, 50), (300, 70), (100, 40)])
    ]
    assert summarise(pages).prefix_hit_rate == (20 + 40) / (200 + 100)
    assert summarise([(0.0, ""), (1.0, "vllm:num_requests_running 1\n")]).prefix_hit_rate is None
