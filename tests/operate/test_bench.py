"""Results of `vllm bench serve` beside their predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.bin import Bin
from packer.errors import FileFormatError, IncompatibleError, ValidationError
from packer.lengths import Lengths
from packer.operate.bench import FIGURES, beside_bench
from packer.profile import Profile
from packer.settings import Settings
from packer.twin.arrivals import draw_marks
from packer.twin.simulate import simulate
from packer.workload import Workload


def _written(tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(values))
    return path


def _of_the_twin(profile: Profile, concurrency: int | None) -> dict[str, Any]:
    """What the benchmark would write if the server were the twin: 60 requests to the base model, at once."""
    fleet = Workload([Adapter("base", 0, 1.0)], Lengths.gamma(80, 0.5), Lengths.gamma(30, 0.5))
    marks = draw_marks(fleet, None, 60, 3)
    trace = RequestTrace(0.0 * marks.adapter, marks.adapter, marks.input_tokens, marks.output_tokens)
    fleet = fleet.with_arrivals(Arrivals("trace", trace=trace))
    run = simulate(fleet, profile, max_loras=0, duration_s=500.0, concurrency=concurrency)
    lasted = float(run.raw.finish_s.max())
    written = {name: getattr(run, name) for name in FIGURES if not name.endswith("throughput")}
    return written | {
        "duration": lasted, "completed": 60, "request_rate": "inf", "max_concurrency": concurrency,
        "request_throughput": 60 / lasted,
        "input_lens": marks.input_tokens.tolist(), "output_lens": marks.output_tokens.tolist(),
        "total_input_tokens": int(marks.input_tokens.sum()), "total_output_tokens": int(marks.output_tokens.sum()),
        "output_throughput": float(marks.output_tokens.sum()) / lasted,
    }  # fmt: skip


@pytest.mark.parametrize("concurrency", [None, 8])
def test_a_benchmark_of_the_twin_is_predicted_exactly(
    tmp_path: Path, toy_profile: Profile, concurrency: int | None
) -> None:
    """From the lengths of its requests and its concurrency, every figure of a run comes back."""
    written = _of_the_twin(toy_profile, concurrency)
    (found,) = beside_bench(_written(tmp_path, **written), toy_profile)
    assert set(found.measured) == set(FIGURES) - {"total_token_throughput"}
    assert max(found.errors.values()) < 1e-6
    assert found.assumed == ()


def test_without_lengths_the_means_are_taken_and_said(tmp_path: Path, toy_profile: Profile) -> None:
    """A file without the lengths of its requests is predicted with their means, which the answer says."""
    written = _of_the_twin(toy_profile, 8)
    del written["input_lens"], written["output_lens"]
    (found,) = beside_bench(_written(tmp_path, **written), toy_profile)
    assert "mean lengths" in found.assumed[0]
    assert found.errors["output_throughput"] < 10.0


def test_adapters_of_a_server_share_the_requests(tmp_path: Path, toy_profile: Profile) -> None:
    """With a server of a plan the requests are for its adapters, as `--lora-modules` draws them, at their own rate."""
    fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(4)])
    written = _of_the_twin(toy_profile, 8) | {"request_rate": 5.0}
    server = Bin((1, 3), Settings(2, 8), toy_profile)
    (found,) = beside_bench(_written(tmp_path, **written), toy_profile, fleet=fleet, server=server)
    sim = found.simulation
    assert (sim.max_loras, sim.workload.names, sim.completed) == (2, ("a1", "a3"), 60)
    assert 6.0 < sim.raw.requests.time_s[-1] < 24.0
    assert len(found.assumed) == 2


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"benchmarks": []}, FileFormatError),
        ({"request_throughput": 1.0, "completed": 0}, FileFormatError),
        ({"request_throughput": 1.0, "input_lens": [5], "output_lens": [0]}, FileFormatError),
        (
            {"request_throughput": 1.0, "input_lens": [5], "output_lens": [5], "request_rate": "x"},
            FileFormatError,
        ),
        (
            {"request_throughput": 1.0, "input_lens": [5], "output_lens": [5], "max_concurrency": 0},
            ValidationError,
        ),
        ({"request_throughput": 1.0, "ramp_up_strategy": "linear"}, IncompatibleError),
    ],
)
def test_files_that_are_no_steady_run_are_refused(
    tmp_path: Path, toy_profile: Profile, values: dict[str, Any], error: type[Exception]
) -> None:
    """What no prediction can be made for is an error."""
    with pytest.raises(error):
        beside_bench(_written(tmp_path, **values), toy_profile)
