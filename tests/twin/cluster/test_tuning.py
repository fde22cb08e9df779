"""Servers of a cluster train as a single server does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.errors import IncompatibleError
from packer.io.clusters import read_cluster
from packer.io.profiles import load_profile
from packer.job import FineTuning
from packer.lengths import Lengths
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.system import load_system
from packer.twin.simulate import simulate
from packer.workload import Workload

NAME = "h100-64gb/llama-3.1-8b-instruct"
PROFILE = load_profile(NAME)
FLEET = Workload([Adapter(f"a{i}", 8, 0.5) for i in range(6)])
SYSTEMS = ("llmstation", "fineinfer", "mps-split", "chunked-training")


@pytest.mark.parametrize("system", SYSTEMS)
def test_one_server_is_the_twin(system: str) -> None:
    """A cluster of one gives the same bytes as `simulate` with the system's policy."""
    policy = load_system(system).tuning
    one = simulate(FLEET, PROFILE, max_loras=6, duration_s=100.0, tuning=policy)
    run = simulate_cluster(FLEET, Cluster.of(PROFILE, 1, max_loras=6), system, duration_s=100.0)
    assert run.raw.finish_s.tobytes() == one.raw.finish_s.tobytes()
    assert one.tuning is not None
    assert run.tuning is not None
    assert run.tuning.to_dict() == one.tuning.to_dict()
    assert run.kv_cache_tokens == one.kv_cache_tokens


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("router", ["most-idle", "round-robin"])
def test_what_servers_train_adds_up(system: str, router: str) -> None:
    """The cluster's training is the sum of its servers', each of which is that of the requests that it got."""
    run = simulate_cluster(FLEET, Cluster.of(PROFILE, 3, max_loras=6), system, router, duration_s=100.0)
    assert run.tuning is not None
    assert run.tuning.samples == sum(server.tuning.samples for server in run.servers if server.tuning)
    for server in run.servers:
        again = simulate(server.workload, PROFILE, max_loras=6, duration_s=100.0, tuning=load_system(system).tuning)
        np.testing.assert_array_equal(server.raw.finish_s, again.raw.finish_s)
        assert server.tuning_tok_s == again.tuning_tok_s


def test_job_of_a_cluster_file(tmp_path: Path) -> None:
    """`[fine_tuning]` is what the servers train unless the workload says otherwise."""
    path = tmp_path / "cluster.toml"
    path.write_text(
        f'schema = 1\n[[kinds]]\nname = "h"\nprofile = "{NAME}"\nmax_loras = 6\n'
        '[[nodes]]\nservers = ["h"]\n[fine_tuning]\nsample_tokens = 300\npolicy = "chunked"\n'
    )
    cluster = read_cluster(path)
    assert cluster.fine_tuning == FineTuning(sample_tokens=Lengths.constant(300), policy="chunked")
    run = simulate_cluster(FLEET, cluster, "vllm", duration_s=60.0)
    assert run.tuning is not None
    assert run.tuning.policy == "chunked"
    own = replace(FLEET, fine_tuning=FineTuning(policy="temporal"))
    other = simulate_cluster(own, cluster, "vllm", duration_s=60.0)
    assert other.tuning is not None
    assert other.tuning.policy == "temporal"


def test_other_engines_do_not_train() -> None:
    """LightLLM has no model of training, and says so."""
    with pytest.raises(IncompatibleError, match="lightllm"):
        simulate_cluster(FLEET.tuned_by("chunked"), Cluster.of(PROFILE, 1, max_loras=6), "s-lora", duration_s=60.0)
