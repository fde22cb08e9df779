"""Kinds of server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.cluster import Cluster, ServerKind
from packer.errors import IncompatibleError, ValidationError
from packer.failover import placed
from packer.fit.estimate import estimate_profile
from packer.gpu import GpuKind, base_model, kinds_of, serving, stock_of
from packer.io.profiles import load_profile
from packer.placement import check_placement
from packer.predictors.api import evaluate_server
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.simulate import simulate
from packer.workload import Workload

LLAMA = small_profile()
QWEN = replace(LLAMA, name="test-gpu/qwen", model=replace(LLAMA.model, name="Qwen"))
FLEET = Workload([Adapter("a", 8, 1.0, model="org/Test-Model"), Adapter("b", 8, 1.0, model="qwen")])


def test_a_price_replaces_that_of_the_profile() -> None:
    """The price of a kind is that of its profile, with its source, unless another one is given."""
    assert GpuKind(LLAMA).profile is LLAMA
    listed = replace(LLAMA, provenance={"price": "a list of 2026-05"})
    assert GpuKind(listed).profile.provenance == listed.provenance
    given = GpuKind(listed, price_per_hour=2.5).profile
    assert (given.gpu.price_per_hour, given.provenance) == (2.5, {})
    with pytest.raises(ValidationError, match="price of test-gpu/test-model"):
        GpuKind(LLAMA, price_per_hour=-1.0)


def test_kinds_on_equal_gpus_share_them() -> None:
    """GPUs at hand belong to the GPU, whatever model runs on it, and are one number."""
    assert stock_of([GpuKind(LLAMA, available=4), GpuKind(QWEN)]) == {LLAMA.gpu.name: 4}
    with pytest.raises(ValidationError, match="one number of GPUs at hand for test-gpu, got 4 and 5"):
        stock_of([GpuKind(LLAMA, available=4), GpuKind(QWEN, available=5)])
    assert [kind.profile for kind in kinds_of([LLAMA, GpuKind(LLAMA), QWEN])] == [LLAMA, QWEN]
    with pytest.raises(ValidationError, match=r"one number .* got 4 and None"):
        kinds_of([GpuKind(LLAMA, available=4), LLAMA])
    with pytest.raises(ValidationError, match="at least one profile"):
        kinds_of([])


def test_models_are_matched_without_owner_and_case() -> None:
    """Adapters name models as hubs do, profiles in short."""
    assert base_model("meta-llama/Llama-3.1-8B-Instruct") == "llama-3.1-8b-instruct"
    assert serving(FLEET, [LLAMA, QWEN]) == {"org/Test-Model": (LLAMA,), "qwen": (QWEN,)}
    with pytest.raises(IncompatibleError, match="serves the base model 'qwen', got profiles of test-model"):
        serving(FLEET, [LLAMA])
    with pytest.raises(IncompatibleError, match="every adapter names its own"):
        serving(Workload([Adapter("a", 8, 1.0)]), [LLAMA, QWEN])


def test_an_adapter_is_not_placed_on_another_model() -> None:
    """A server of another base model can't serve an adapter, whoever made the plan."""
    right = [Bin((0,), LLAMA.settings(1, 8), LLAMA), Bin((1,), QWEN.settings(1, 8), QWEN)]
    check_placement(FLEET, right, ())
    with pytest.raises(ValidationError, match="server 0 serves 'Qwen', and its adapter 'a' is for 'org/Test-Model'"):
        check_placement(FLEET, [Bin((0, 1), QWEN.settings(2, 8), QWEN)], ())


def test_models_are_matched_by_their_repository_too() -> None:
    """A fleet may call the model as its repository does where the profile's own name is written otherwise."""
    qwen = load_profile("h100-64gb/qwen-2.5-7b-instruct")
    for name in ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct", "qwen-2.5-7b-instruct"):
        fleet = Workload([Adapter("a", 8, 0.5, model=name)])
        assert serving(fleet, [qwen]) == {name: (qwen,)}


def test_a_measured_and_an_estimated_profile_of_a_model_are_kinds_of_it() -> None:
    """Their names are spelled differently, and their repository is the same."""
    kinds = (load_profile("h100-64gb/qwen-2.5-7b-instruct"), estimate_profile("Qwen/Qwen2.5-7B-Instruct", "l40s"))
    assert kinds[0].model.name != kinds[1].model.name
    assert serving(Workload([Adapter("a", 8, 0.5)]), kinds) == {None: kinds}


def test_an_adapter_that_comes_goes_to_its_model() -> None:
    """Of two servers with room only that of its base model takes it; without one it has no place."""
    bins = [Bin((0,), LLAMA.settings(1, 8), LLAMA), Bin((1,), QWEN.settings(1, 8), QWEN)]
    more = Workload([*FLEET.adapters, Adapter("c", 8, 1.0, model="qwen"), Adapter("d", 8, 1.0, model="third")])
    found, unplaced = placed(more, bins, [2, 3])
    assert [item.adapters for item in found] == [(0,), (1, 2)]
    assert unplaced == (3,)


def test_every_entry_point_refuses_the_adapters_of_another_model() -> None:
    """A server, or a cluster's server that may get the requests, has the base model of its adapters, by either name."""
    others = FLEET.subset([1])
    cluster = Cluster.of(LLAMA, 2, max_loras=2)
    calls: list[Callable[[Workload], object]] = [
        lambda fleet: simulate(fleet, LLAMA, max_loras=2, duration_s=10.0),
        lambda fleet: evaluate_server(fleet, LLAMA, max_loras=2, predictor=AnalyticPredictor()),
        lambda fleet: simulate_cluster(fleet, cluster, router="round-robin", duration_s=10.0),
        lambda fleet: simulate_cluster(
            fleet, replace(cluster, placement=({}, {fleet.names[0]: 1.0})), router="plan", duration_s=10.0
        ),
    ]
    for call in calls:
        call(FLEET.subset([0]))
        with pytest.raises(IncompatibleError, match="serves the base model 'qwen', got profiles of test-model"):
            call(others)
    with pytest.raises(ValidationError, match="one base model for one server, got org/Test-Model, qwen"):
        evaluate_server(FLEET, LLAMA, max_loras=2, predictor=AnalyticPredictor())
    kinds = (ServerKind("llama", LLAMA, 2), ServerKind("qwen", QWEN, 2))
    mixed = Cluster(kinds, ("qwen", "llama"), ({"b": 1.0}, {"a": 1.0}))
    assert simulate_cluster(FLEET, mixed, router="plan", duration_s=10.0).status == "ok"
    with pytest.raises(IncompatibleError, match="serves the base model"):
        simulate_cluster(FLEET, replace(mixed, servers=("llama", "qwen")), router="plan", duration_s=10.0)


def test_a_server_has_one_base_model() -> None:
    """Adapters of two models can't be simulated on one server, nor on a cluster that may mix them."""
    with pytest.raises(ValidationError, match="one base model for one server, got org/Test-Model, qwen"):
        simulate(FLEET, LLAMA, max_loras=2)
    with pytest.raises(ValidationError, match="Expected a placement for adapters of several base models"):
        simulate_cluster(FLEET, Cluster.of(LLAMA, 2, max_loras=2), router="round-robin", duration_s=10.0)
