"""Slow, obvious versions of what the predictors' kernels compute."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from packer.predictors.ensemble import TreeNode
from packer.predictors.features_kernel import CLIENT_CEILING, HORIZON_S
from packer.predictors.physics import GRID, LONGEST_WAIT_S
from packer.profile import Profile
from packer.twin.law.law import coefficient_vector
from packer.twin.law.linear import linear_features
from packer.twin.memory.policy import kv_cache_tokens
from packer.workload import Workload


def walk(node: TreeNode, x: Any) -> float:
    """Value of the leaf that x reaches, comparing as float32."""
    while node.left is not None and node.right is not None:
        node = node.right if np.float32(x[node.feature]) > node.threshold else node.left
    return node.value


class NaiveServer:
    """The equilibrium of one server with each adapter on its own instead of in groups (linear step law)."""

    def __init__(self, fleet: Workload, profile: Profile, max_loras: int, slot_rank: int) -> None:
        self.profile, self.slots, self.slot_rank = profile, max_loras, slot_rank
        sample = np.random.default_rng(0).standard_normal(1_000_000)
        prompts, outputs = fleet.input_tokens.at_normal(sample), fleet.output_tokens.at_normal(sample)
        self.prompt, self.output = float(prompts.mean()), float(outputs.mean())
        rho = fleet.length_correlation
        other = np.random.default_rng(1).standard_normal(1_000_000)
        paired = fleet.output_tokens.at_normal(rho * sample + math.sqrt(1 - rho**2) * other)
        product = float((prompts * paired).mean())
        square = float((outputs.astype(np.float64) ** 2).mean())
        self.held = (product + square / 2) / self.output + profile.engine.block_size / 2
        self.rates, self.ranks = fleet.rates, fleet.ranks
        self.demand = float(self.rates.sum() * self.output)
        self.law = coefficient_vector(profile.latency)
        self.kv = kv_cache_tokens(profile, profile.settings(max_loras, slot_rank))

    def law_ms(self, batch: float, prefill: float, adapters: float, ranks: float, waiting: float) -> float:
        """One step by the regression's features."""
        terms = linear_features(
            decodes=batch,
            prefill_tokens=prefill,
            adapters=adapters,
            sum_ranks=ranks,
            slots=self.slots,
            slot_rank=self.slot_rank,
            kv_tokens=batch * self.held,
            waiting=waiting,
            graph_max_tokens=self.profile.latency.graph_max_tokens,
            registered=min(len(self.rates), max(self.profile.engine.max_cpu_loras or math.inf, self.slots)),
            attended=0.5 * prefill * self.prompt,
            ridge_tokens=self.profile.latency.ridge_tokens,
            expert_share=self.profile.latency.expert_share,
        )
        return float(terms[0] @ self.law)

    def step(self, batch: float, waiting: float = 0.0) -> tuple[float, float]:
        """Mean step time, ms, and distinct adapters."""
        expected = self.rates * self.output * batch / self.demand
        present = 1 - np.exp(-np.minimum(expected, 60))
        adapters, ranks = float(present.sum()), float((present * self.ranks).sum())
        starts = float((self.rates * (1 - present)).sum())
        n = len(self.rates)
        missing = 0.0 if n <= self.slots else 1.0
        if n > self.slots > adapters:
            missing = 1 - (self.slots - adapters) / (n - adapters)
        if adapters > self.slots:
            ranks, adapters = ranks * self.slots / adapters, float(self.slots)
        admitted = batch / self.output
        some = 1 - math.exp(-admitted)
        ms = some * self.law_ms(batch, admitted * self.prompt / some, adapters, ranks, waiting)
        ms += (1 - some) * self.law_ms(batch, 0.0, adapters, ranks, waiting)
        loading = self.profile.loading
        load_s = (loading.host_base_ms + loading.host_per_rank_ms * float(self.ranks.mean())) / 1e3
        part = min(1.0, batch * 1e3 / (ms * self.demand))
        return ms / (1 - min(0.9, starts * part * missing * load_s)), adapters

    def distinct(self, batch: float) -> float:
        """Distinct adapters in a batch for which there are slots enough."""
        expected = self.rates * self.output * batch / self.demand
        return float((1 - np.exp(-np.minimum(expected, 60))).sum())

    def capacity(self) -> tuple[float, float]:
        """Largest output tok/s and its batch."""
        engine = self.profile.engine
        most = min(
            self.kv / self.held,
            engine.max_num_seqs,
            engine.max_num_batched_tokens * self.output / (self.prompt + self.output),
        )
        batches = [most * 0.6**k for k in range(GRID)]
        return max((batch * 1e3 / self.step(batch)[0], batch) for batch in batches)

    def operating_batch(self, upper: float) -> float:
        """Batch at which the demand is served, by bisection."""
        low, high = 0.0, upper
        for _ in range(60):
            middle = (low + high) / 2
            if middle * 1e3 / self.step(middle)[0] < self.demand:
                low = middle
            else:
                high = middle
        return high

    def slot_wait(self, step_ms: float) -> float:
        """Mean wait for a slot, s, by bisection."""
        running = np.minimum(self.rates * self.output * step_ms / 1e3, 60)

        def needed(wait: float) -> float:
            stay = (np.exp(running) - 1 + running * np.log(1 + self.rates * wait)) / self.rates
            return float((stay / (wait + stay + 1 / self.rates)).sum())

        if len(self.rates) <= self.slots or needed(0.0) <= self.slots:
            return 0.0
        if needed(LONGEST_WAIT_S) > self.slots:
            return LONGEST_WAIT_S
        low, high = 1e-3, LONGEST_WAIT_S
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if needed(middle) > self.slots else (low, middle)
        return high

    def features(self) -> dict[str, float]:
        """The features that come from the equilibrium."""
        best, best_batch = self.capacity()
        use = self.demand / best
        batch = self.operating_batch(best_batch) if use < 1 else best_batch
        step_ms, adapters = self.step(batch)
        wait = self.slot_wait(step_ms)
        lost = max(0.0, 1 - 1 / use) + min(wait, HORIZON_S) / HORIZON_S
        backlog = min(CLIENT_CEILING, float(self.rates.sum()) * 0.5 * HORIZON_S * min(1.0, lost))
        return {
            "kv_per_request": self.held,
            "batch_that_fits": self.kv / self.held,
            "capacity": best * (self.prompt + self.output) / self.output,
            "load_factor": use,
            "batch": batch,
            "active_adapters": adapters,
            "slot_use": self.distinct(batch) / self.slots,
            "step": step_ms,
            "slot_wait": wait,
            "residence": self.output * step_ms / 1e3,
            "backlog": backlog,
        }
