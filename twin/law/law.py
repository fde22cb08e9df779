"""The step law of a profile in the form that the engine reads."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import NamedTuple

import numpy as np

from packer.arrays import FloatArray, Record, record
from packer.profile import LatencySpec, Profile
from packer.terms import LINEAR_TERMS, PAPER_TERMS
from packer.twin.engine_rules import rules_of

(IS_PAPER, GRAPH_MAX, RIDGE, EXPERT_SHARE, ONE_GRAPH) = range(5)  # columns of the settings

FRONTEND = record(
    ("interval_s", "f8"),  # pause between scrapes, infinite without any
    ("per_scrape_s", "f8"),
    ("per_series_s", "f8"),  # per time series of a scrape
    ("per_name_s", "f8"),  # per name in its labels
    ("per_request_s", "f8"),
    ("per_first_use_s", "f8"),  # an adapter's first request
    ("per_output_s", "f8"),  # an output of a step
)
"""Costs of the front end, s."""


class Law(NamedTuple):
    """What steps and loads cost.

    coefficients float64 (terms,): see `coefficient_vector`. settings float64 (5,): 1 if the form is the paper's,
    largest number of tokens with a CUDA graph, number of tokens above which a step is bound by compute, share of the
    experts that a token is sent to, 1 if all CUDA graphs include LoRA kernels. loading float64 (4,): ms to load an
    adapter from host memory (base, per rank) and from disk (base, per rank). frontend: a record of `FRONTEND`.
    """

    coefficients: FloatArray
    settings: FloatArray
    loading: FloatArray
    frontend: Record


def coefficient_vector(latency: LatencySpec) -> FloatArray:
    """Coefficients of a step law, float64 (terms of its form,), in the order of `packer.terms`; missing ones are 0."""
    terms = LINEAR_TERMS if latency.form == "linear" else PAPER_TERMS
    return np.array([latency.coefficients.get(term, 0.0) for term in terms])


def law_settings(profile: Profile) -> FloatArray:
    """`Law.settings` of a profile."""
    latency, paper = profile.latency, float(profile.latency.form == "paper")
    one_graph = float(not rules_of(profile.engine).graphs_without_lora)
    return np.array([paper, latency.graph_max_tokens, latency.ridge_tokens, latency.expert_share, one_graph])


def law_of(profile: Profile) -> Law:
    """The law of a profile."""
    latency, loading, frontend = profile.latency, profile.loading, profile.frontend
    if not rules_of(profile.engine).tokenizer_per_adapter:
        frontend = replace(frontend, first_use_ms=0.0)
    interval_s, *costs_ms = astuple(frontend)
    costs = (interval_s or np.inf, *(ms * 1e-3 for ms in costs_ms))
    loads = (loading.host_base_ms, loading.host_per_rank_ms, loading.disk_base_ms, loading.disk_per_rank_ms)
    front_end = np.array([costs], dtype=FRONTEND)[0]
    return Law(coefficient_vector(latency), law_settings(profile), np.array(loads), front_end)
