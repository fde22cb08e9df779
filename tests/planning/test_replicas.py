"""Split adapters have as many parts as the GPUs they are spread over are of use for."""

from __future__ import annotations

import pytest

from packer.adapter import Adapter
from packer.planning.replicas import Replicas
from packer.workload import Workload


@pytest.mark.parametrize("rates", [(60.0, 0.1), (1.0, 1.0, 1.0), (500.0,), (3.0, 2.0, 1.0)])
@pytest.mark.parametrize("parts", [{}, {0: 3}, {0: None}])
@pytest.mark.parametrize("allowed", [None, 8])
def test_every_gpu_has_a_part(
    rates: tuple[float, ...], parts: dict[int, int | None], allowed: int | None
) -> None:
    """Up to the most GPUs of use there is a part for each, beyond it there is not."""
    fleet = Workload([Adapter(f"a{k}", 8, rate) for k, rate in enumerate(rates)])
    replicas = Replicas(fleet, parts)
    most = replicas.most_gpus(allowed)
    assert len(fleet) <= most
    for n in range(1, most + 1):
        assert len(replicas.spread_over(n, allowed).fleet) >= min(n, len(fleet))
    assert len(replicas.spread_over(most, allowed).fleet) == most
    assert len(replicas.spread_over(most + 1, allowed).fleet) < most + 1


def test_parts_of_adapters_with_long_names_have_names() -> None:
    """Two names that begin alike for 200 characters get parts of different names."""
    adapters = [Adapter("x" * 250 + end, 8, 1.0) for end in "ab"]
    found = Replicas(Workload(adapters), {0: 3, 1: 3}).fleet.names
    assert len(set(found)) == 6
