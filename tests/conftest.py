"""Fixtures for all tests: where the tree stands and what its modules are."""

from __future__ import annotations

import ast
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.engine_spec import EngineSpec
from packer.evaluation import Evaluation, Evaluations
from packer.io.profiles import load_profile
from packer.plan import Plan, Status
from packer.profile import GpuSpec, LatencySpec, MemorySpec, ModelSpec, Profile
from packer.settings import Settings
from packer.workload import Workload

# Bytecode is kept for the workers and the commands that tests start: compiling took 6 of the collection's 11 s of CPU.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers of pytest-xdist share the cores
gc.disable()  # modules and tests stay until the end: a fifth of the time went into looking through them
gc.set_threshold(20_000, 20, 20)
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "packer": "packer",
    "packer.cli": "cli",
    "packer.fit": "fit",
    "packer.live": "live",
    "packer.objectives": "objectives",
    "packer.operate": "operate",
    "packer.papers": "papers",
    "packer.planning": "planning",
    "packer.predictors": "predictors",
    "packer.report": "report",
    "packer.solvers": "solvers",
    "packer.twin": "twin",
}
"""Import name → folder at the top of the tree."""
SHORT = {"cli", "examples", "objectives", "operate", "planning", "report", "solvers", "test_docs.py"}
"""Folders and files of tests whose rules need no simulated hours, but for those that ask for `whole_hours`."""


@dataclass(frozen=True)
class Module:
    """A source file under its name in the import system."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether it is a folder's __init__.py."""
        return self.path.name == "__init__.py"


def _modules() -> list[Module]:
    found = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT / folder).with_suffix("").parts)
            if package == "packer" and parts and (ROOT / "packer" / parts[0]).is_symlink():
                continue
            if parts[-1] == "__init__":
                parts.pop()
            found.append(Module(".".join([package, *parts]), path, ast.parse(path.read_text("utf-8"))))
    return found


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One Ray cluster on this machine for all tests.

    Ray gives its own node 30 s to start, which no setting changes; a busy machine may need another attempt.
    """
    ray = pytest.importorskip("ray")
    for left in (2, 1, 0):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
            break
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error) or not left:
                raise
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def folders() -> dict[str, str]:
    """Import name of each folder at the top."""
    return FOLDERS


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    """Every module of the package, parsed once."""
    return _modules()


@pytest.fixture(scope="session")
def profile() -> Profile:
    """A shipped server."""
    return load_profile("h100-64gb/llama-3.1-8b-instruct")


@pytest.fixture(scope="session")
def server(profile: Profile) -> Profile:
    """That server with a price."""
    return replace(profile, gpu=replace(profile.gpu, price_per_hour=2.5))


@pytest.fixture(scope="session")
def fleet() -> Workload:
    """Forty adapters that fill two servers."""
    return Workload([Adapter(f"a{k}", 16 if k % 4 else 32, 0.9) for k in range(40)])


@contextmanager
def _short_runs(part: float = 1 / 12) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packer.twin.simulate.HOUR_S", 3600.0 * part)
        for name, whole in (("DURATION_S", 3600.0), ("SCREENING_S", 900.0), ("MIN_REQUESTS", 1500)):
            patch.setattr(f"packer.twin.until_clear.{name}", whole * part)
        yield


@pytest.fixture(scope="module", autouse=True)
def _short_hours(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of plans simulate servers for 450 s where neither they nor the commands say for how long."""
    with _short_runs(1 / 8) if request.path.parts[len(ROOT.parts) + 1] in SHORT else nullcontext():
        yield


@pytest.fixture
def quarter_hours() -> Iterator[None]:
    """Servers are simulated for 900 s in tests whose rule needs them."""
    with _short_runs(1 / 4):
        yield


@pytest.fixture
def whole_hours() -> Iterator[None]:
    """Servers are simulated for an hour in tests whose rule needs one."""
    with _short_runs(1.0):
        yield


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are refined with fewer candidates, forests and folds: the procedure is what is tested."""
    for name, value in (("TEACHERS", 20), ("MIN_LEAVES", (5,)), ("FOLDS", 2)):
        monkeypatch.setattr(f"packer.predictors.kinds.{name}", value)


@pytest.fixture(scope="session")
def short_runs() -> Callable[..., AbstractContextManager[None]]:
    """Makes a context in which servers are simulated for a part of their time, without an argument a twelfth."""
    return _short_runs


@pytest.fixture(scope="session")
def toy_profile() -> Profile:
    """A small uncalibrated server, made up of round numbers."""
    return Profile(
        name="toy",
        model=ModelSpec("acme/toy-7b", weights_bytes=16e9, kv_bytes_per_token=131_072, lora_bytes_per_rank=2.6e6),
        gpu=GpuSpec("toy-gpu", memory_bytes=64e9, price_per_hour=2.0),
        engine=EngineSpec("vllm", "0.10.0", 4096, 8192, 512),
        memory=MemorySpec(32e9, 1e6, 2.6e6, min_kv_tokens=4096),
        latency=LatencySpec("linear", {"base_ms": 8.0, "per_decode_ms": 0.02, "per_adapter_ms": 0.05}),
    )


@pytest.fixture(scope="session")
def toy_plan(toy_profile: Profile) -> Callable[..., Plan]:
    """Makes a feasible plan from adapter names, dealt out over `gpus` servers.

    With `replicated`, the first adapter is on every server, with shares 1 : 2 : 3 ….
    """

    def make(names: Sequence[str], gpus: int = 2, *, replicated: bool = False, rank: int = 8) -> Plan:
        workload = Workload([Adapter(name, rank, 0.1 + 0.01 * k) for k, name in enumerate(names)])
        total = gpus * (gpus + 1) / 2
        bins = []
        for gpu in range(gpus):
            own = tuple(i for i in range(len(names)) if i % gpus == gpu or (replicated and i == 0))
            shares = tuple((gpu + 1) / total if i == 0 else 1.0 for i in own) if replicated else ()
            bins.append(Bin(own, Settings(min(8, len(own)), max(8, rank)), toy_profile, shares))
        rows = []
        for each in bins:
            load = each.offered_tok_s(workload)
            kv = (32e9 - each.max_loras * (1e6 + each.max_lora_rank * 2.6e6)) / 131_072
            rows.append(Evaluation(load, 0.995 * load, False, False, 60.0, 40.0, 300.0, 11.0, 10.5, 30.0, kv, 0.0))
        return Plan(
            workload,
            tuple(bins),
            Evaluations.of(rows),
            Status.FEASIBLE,
            objective="gpus",
            solver="greedy",
            predictor="twin",
            objective_value=(float(gpus),),
            lower_bound=max(1.0, gpus - 1.0),
            bound_source="offered load",
            verified=True,
            runtime_s=0.5,
            versions={"packer": "0.1.0"},
        )

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the whole tree come first: some take as long as a folder of others."""
    items.sort(key=lambda item: len(item.path.parts) > len(ROOT.parts) + 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers have halves of the tests, in their order, and whoever is done takes of the other's: so tests that share
    what takes long are mostly on one."""
    from xdist.scheduler.worksteal import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish() -> None:
    """From here on what tests make is collected, and nothing looks through what was there before."""
    gc.freeze()
    gc.enable()
