"""A third-party package: found by its entry points, held to the contracts, used like a built-in."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from packer import registry
from packer.cli import run
from packer.errors import IncompatibleError, PluginError, ValidationError
from packer.io.workloads import read_workload
from packer.objectives.base import Objective, load_objective
from packer.plan import Status
from packer.planning.solve import solve
from packer.predictors.api import load_predictor
from packer.profile import Profile
from packer.solvers.base import Solver
from packer.strategies import Predictor
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.testing.contracts import (
    CachePolicyContract,
    ObjectiveContract,
    PredictorContract,
    RouterContract,
    SolverContract,
)
from packer.twin.cluster.caching import CachePolicy
from packer.twin.cluster.routers.base import Router

PACKAGE = Path(__file__).parent.parent / "plugin_package"


def install(into: Path, name: str = "fleet-extras") -> None:
    """What pip leaves behind: the modules, and a dist-info with the entry points of pyproject.toml."""
    shutil.copytree(PACKAGE / "fleet_extras", into / "fleet_extras", dirs_exist_ok=True)
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = into / f"{name.replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package, installed for one test."""
    site = tmp_path / "site"
    site.mkdir()
    install(site)
    monkeypatch.syspath_prepend(site)
    registry._entries.cache_clear()
    yield site
    registry._entries.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "fleet_extras"]:
        del sys.modules[name]


class TestNextFit(SolverContract):
    """The plug-in's solver keeps the contract."""

    @pytest.fixture
    def solver(self, plugin: Path) -> Solver:
        """The solver under test."""
        made: Solver = registry.load("solver", "next-fit")()
        return made


class TestQuiet(ObjectiveContract):
    """The plug-in's objective keeps the contract."""

    @pytest.fixture
    def objective(self, plugin: Path) -> Objective:
        """The objective under test."""
        return load_objective("quiet:itl_ms=25")


class TestSticky(RouterContract):
    """The plug-in's routers keep the contract, in Python and with a compiled score."""

    @pytest.fixture(params=["sticky:slack=4", "shortest:weight=10"])
    def router(self, plugin: Path, request: pytest.FixtureRequest) -> Router:
        """The router under test."""
        made: Router = registry.make("router", request.param)
        return made


class TestRecent(CachePolicyContract):
    """The plug-in's cache policy keeps the contract."""

    @pytest.fixture
    def policy(self, plugin: Path) -> CachePolicy:
        """The policy under test."""
        made: CachePolicy = registry.make("cache", "recent:requests=1,period_s=20")
        return made


class TestRuleOfThumb(PredictorContract):
    """The plug-in's predictor keeps the contract."""

    @pytest.fixture
    def predictor(self, plugin: Path, profile: Profile) -> Predictor:
        """The predictor under test."""
        return load_predictor("rule-of-thumb", profile)


def fleet(folder: Path) -> Path:
    """A small workload file."""
    path = folder / "fleet.csv"
    path.write_text("adapter,rank,rate\n" + "".join(f"a{i},8,0.2\n" for i in range(40)))
    return path


def test_solve_takes_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`packer solve` runs the plug-in's objective, solver and predictor by their names."""
    names = ["--objective", "quiet:itl_ms=35", "--solver", "next-fit", "--predictor", "rule-of-thumb"]
    code = run(["solve", str(fleet(tmp_path)), *names, "--margin", "0", "--no-verify", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (plan["objective"], plan["solver"], plan["predictor"]) == ("quiet", "next-fit", "rule-of-thumb")
    assert sum(len(gpu["adapters"]) for gpu in plan["gpus"]) == 40


COUNTS = ("auto", "bounds", "exact", "greedy", "greedy-paper", "maxbase", "next-fit")
"""Solvers that choose the number of GPUs."""


@pytest.mark.parametrize("solver", COUNTS)
def test_every_solver_that_counts_gpus_takes_the_objective(solver: str, tmp_path: Path) -> None:
    """An objective that says that it minimises GPUs works with each of them, and its limit is kept."""
    settings = {"predictor": AnalyticPredictor(), "margin": 0.0, "verify": False, "time_limit_s": 5.0}
    goal = load_objective("quiet:itl_ms=18")
    plan = solve(read_workload(fleet(tmp_path)), small_profile(), goal, solver=solver, **settings)
    assert (plan.objective, plan.objective_value[0]) == ("quiet", plan.n_gpus)
    if solver not in ("maxbase", "greedy-paper"):  # blind to what a server serves, or gives up
        assert plan.status is not Status.INFEASIBLE
        assert plan.evaluations.mean_itl_ms.max() <= 18.0


@pytest.mark.parametrize("solver", ["bounds", "exact"])
def test_solvers_that_count_gpus_refuse_what_minimises_something_else(solver: str, tmp_path: Path) -> None:
    """The reason names what the objective minimises."""

    class Watts(Objective):
        name = "watts"
        minimises = "power"

    with pytest.raises(IncompatibleError, match="'watts' minimises power"):
        solve(read_workload(fleet(tmp_path)), small_profile(), Watts(), solver=solver)


@pytest.mark.parametrize("key", [(), (float("nan"),)])
def test_an_objective_without_a_key_is_named(key: tuple[float, ...], tmp_path: Path) -> None:
    """Plans can't be compared by an empty key or NaN: the objective that gives one is named."""

    class Vague(Objective):
        name = "vague"

        def key(self, *_: object) -> tuple[float, ...]:
            return key

    with pytest.raises(PluginError, match="a key of numbers of the objective 'vague', got"):
        solve(read_workload(fleet(tmp_path)), small_profile(), Vague(), predictor=AnalyticPredictor(), verify=False)


def test_an_objective_that_does_not_inherit_is_refused(tmp_path: Path) -> None:
    """An object with the right methods alone is refused; the message says what to inherit from."""
    with pytest.raises(ValidationError, match=r"packer\.objectives\.base\.Objective"):
        solve(read_workload(fleet(tmp_path)), small_profile(), object())  # type: ignore[arg-type]


def test_compare_takes_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`packer compare` puts the plug-in beside the built-ins."""
    names = ["--solvers", "greedy,next-fit", "--objectives", "gpus,quiet:itl_ms=35"]
    chosen = ["--predictors", "rule-of-thumb", "--margin", "0"]
    code = run(["compare", str(fleet(tmp_path)), *names, *chosen, "--json", "-q"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert code == 0
    assert [(row["solver"], row["objective"]) for row in rows] == [
        ("greedy", "gpus"),
        ("next-fit", "gpus"),
        ("greedy", "quiet:itl_ms=35"),
        ("next-fit", "quiet:itl_ms=35"),
    ]
    assert all(row["gpus"] for row in rows)


def test_two_packages_with_the_same_name_are_refused(plugin: Path) -> None:
    """If another package registers the same name for something else, none is chosen silently."""
    other = plugin / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[packer.solvers]\nnext-fit = other:NextFit\n")
    registry._entries.cache_clear()
    with pytest.raises(IncompatibleError, match="next-fit"):
        registry.load("solver", "next-fit")


@pytest.mark.parametrize("name", ["quiet", "rule_of_thumb", "next_fit", "recent", "shortest", "sticky"])
def test_the_guide_shows_the_tested_code(name: str, root: Path) -> None:
    """The page "write your own" holds the very files that the tests above run."""
    page = (root / "docs" / "write-your-own.md").read_text()
    assert (PACKAGE / "fleet_extras" / f"{name}.py").read_text().strip() in page
    assert (PACKAGE / "pyproject.toml").read_text().partition("[project.entry-points")[2].strip() in page
