"""Training, saving, evaluating, explaining."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import IncompatibleError, ModelError, UnknownNameError, ValidationError
from packer.lengths import Lengths
from packer.operate.predict import influences
from packer.predictors.api import load_predictor
from packer.predictors.auto import AutoPredictor
from packer.predictors.dataset import Dataset
from packer.predictors.ensemble import Ensemble
from packer.predictors.families import family_of
from packer.predictors.features import COLUMN
from packer.predictors.learned import LearnedPredictor
from packer.predictors.rules import fired, rules_of, trees_of
from packer.predictors.store import Model, to_bytes, write_model
from packer.predictors.targets import OUTPUTS, STABLE, STARVED, TARGETS
from packer.predictors.train import train
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.settings import Settings
from packer.testing.contracts import PredictorContract
from packer.workload import Workload

KINDS = ("forest", "boosting", "tree", "svm", "knn")


def _fleet(rate: float = 0.1, n: int = 24) -> Workload:
    return Workload([Adapter(f"a{i}", 8 if i % 2 else 16, rate * (1 + i % 3)) for i in range(n)])


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_learn(models: dict[str, Model], kind: str) -> None:
    """Even a few hundred scenarios teach every kind more than guessing: scores are of rows held out."""
    card = models[kind].header["scores"]["all"]
    assert card["starvation_macro_f1"] > 0.8
    assert card["throughput_smape"] < 15.0
    assert card["rows"] > 20
    assert models[kind].header["scores"]["regime served"]["starvation_macro_f1"] is None  # none of them starves


@pytest.mark.parametrize("kind", ["boosting", "tree"])
def test_same_seed_same_bytes(models: dict[str, Model], data: Dataset, kind: str) -> None:
    """Training twice gives the same file."""
    assert to_bytes(train(kind, data, seed=1)) == to_bytes(models[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_files_keep_answers(models: dict[str, Model], data: Dataset, small: Profile, tmp_path: Path, kind: str) -> None:
    """A predictor read from its file answers as the one that was written."""
    path = tmp_path / f"{kind}.packer"
    write_model(models[kind], path)
    predictor = load_predictor(str(path), small)
    assert isinstance(predictor, LearnedPredictor)
    before, after = family_of(models[kind]), family_of(predictor.model)
    x = data.features[:40].astype(np.float32)
    for k in range(len(OUTPUTS)):
        np.testing.assert_array_equal(before.rows(x, k), after.rows(x, k))


def test_packed_models_agree_with_their_libraries(data: Dataset) -> None:
    """What scikit-learn predicts and what the kernels compute from its arrays is the same."""
    from packer.predictors.kinds import kind_of

    x = data.features.astype(np.float32)
    target = TARGETS[0]
    y = target.encode(data.labels[target.name], data.features)
    z = np.log1p(np.maximum(x, 0))
    center, scale = z.mean(0), np.maximum(z.std(0), np.float32(1e-3))
    for name in KINDS:
        kind = kind_of(name)
        seen = x if kind.family == "trees" else ((z - center) / scale).astype(np.float32)
        fitted = kind.estimator(False, 0, kind.defaults[False]).fit(seen, y)
        arrays = {**kind.pack({target.name: fitted}, seen), "center": center, "scale": scale}
        model = Model({"family": kind.family, "features": list(COLUMN)}, arrays)
        told = family_of(model).rows(x, OUTPUTS.index(target.name))
        np.testing.assert_allclose(told, fitted.predict(seen), rtol=2e-3, atol=2e-3, err_msg=name)


def test_another_profile_is_refused(models: dict[str, Model], small: Profile, tmp_path: Path) -> None:
    """A predictor evaluates the profile that it was trained for, in the state that it had then."""
    path = tmp_path / "m.packer"
    write_model(models["tree"], path)
    with pytest.raises(ModelError, match="trained for the profile"):
        load_predictor(str(path), small.with_coefficients(base_ms=7.0))
    mine = LearnedPredictor(models["tree"], small)
    other = Bin((0,), Settings(1, 16), small.with_coefficients(base_ms=7.0))
    with pytest.raises(ModelError, match="trained for"):
        mine.evaluate(_fleet(), [Bin((0,), Settings(1, 16), small), other])


def test_a_profile_without_predictor_says_how_to_get_one(small: Profile) -> None:
    """Asking for a shipped predictor of a profile that has none names the commands that make one."""
    with pytest.raises(ModelError, match="packer predictor train --kind forest"):
        load_predictor("forest", small)


def test_unknown_kinds_are_named(data: Dataset) -> None:
    """A misspelt kind gets the nearest one."""
    with pytest.raises(UnknownNameError, match="'forest'"):
        train("forrest", data)


def test_small_and_one_sided_datasets_are_refused(data: Dataset) -> None:
    """Too few scenarios, or only starved ones, teach nothing."""
    few = replace(
        data,
        spec=replace(data.spec, rows=50),
        features=data.features[:50],
        labels={name: column[:50] for name, column in data.labels.items()},
        family=data.family[:50],
        group=data.group[:50],
    )
    with pytest.raises(ValidationError, match="at least"):
        train("tree", few)
    labels = {**data.labels, "served_share": np.full(len(data), 0.5)}
    with pytest.raises(ValidationError, match="both starved and served"):
        train("tree", replace(data, labels=labels))


def test_splits_keep_groups_together(data: Dataset) -> None:
    """No configuration stands on both sides of the held-out split."""
    from packer.predictors.train import _split

    learn, held = _split(data, 0)
    assert not set(data.group[learn]) & set(data.group[held])


def test_search_follows_the_papers_procedure(data: Dataset) -> None:
    """Successive halving picks parameters from the grid, and the model says that it was searched."""
    model = train("knn", data, seed=1, search=True)
    assert model.header["search"]
    assert model.header["params"][STARVED]["n_neighbors"] in (1, 3, 5, 7, 9, 13, 17)


@pytest.mark.usefixtures("few_candidates")
def test_refined_trees_are_small_and_readable(data: Dataset, small: Profile) -> None:
    """Refined trees keep their limits on rules, and every question fires one rule."""
    model = train("tree", data, seed=1, refine=True)
    trees = trees_of(model)
    assert trees[STARVED].leaves <= 16
    assert all(tree.leaves <= 32 for tree in trees.values())
    rules = [str(rule) for rule in rules_of(model, STARVED)]
    assert len(rules) == trees[STARVED].leaves
    predictor = LearnedPredictor(model, small)
    features = predictor.features(_fleet(), [Bin(tuple(range(24)), Settings(8, 16), small)])[0]
    told = {name: fired(model, name, features) for name in OUTPUTS}
    assert str(told[STARVED]) in rules
    evaluation = predictor.evaluate(_fleet(), [Bin(tuple(range(24)), Settings(8, 16), small)])[0]
    assert told[STARVED].result.startswith("starves" if evaluation.starved else "does not starve")
    stable = predictor.evaluate_features(data.features, data.features[:, COLUMN["kv_cache"]], np.ones(len(data))).stable
    assert (stable == (data.labels[STABLE] > 0.5)).mean() > 0.9
    assert told[STABLE].result.endswith("does not grow" if evaluation.stable else "queue grows")


def test_ensembles_have_no_rules(models: dict[str, Model]) -> None:
    """A forest is not printed as rules."""
    with pytest.raises(IncompatibleError, match="not a single tree"):
        rules_of(models["forest"], STARVED)


def test_starvation_never_becomes_unlikelier_with_the_rate(models: dict[str, Model], small: Profile) -> None:
    """The boosted trees are monotone when all rates rise."""
    predictor = LearnedPredictor(models["boosting"], small)
    server = [Bin(tuple(range(24)), Settings(24, 16), small)]
    chances = [
        predictor.evaluate(_fleet().scaled(float(factor)), server).starvation_probability[0]
        for factor in np.geomspace(0.05, 20, 25)
    ]
    assert np.all(np.diff(chances) >= -0.02)
    assert chances[0] < 0.1
    assert chances[-1] > 0.9


def test_influences_name_what_mattered(models: dict[str, Model], small: Profile) -> None:
    """On an overloaded server the strongest feature changes the result a lot; every feature is listed."""
    predictor = LearnedPredictor(models["boosting"], small)
    features = predictor.features(_fleet(2.0), [Bin(tuple(range(24)), Settings(24, 16), small)])[0]
    rows = influences(predictor, features, 1e5)
    assert len(rows) == len(COLUMN)
    first, last = (max(abs(row["probability_change"]), abs(row["share_change"])) for row in (rows[0], rows[-1]))
    assert first >= last
    assert first > 0.01


def test_auto_leaves_only_uncertain_bins_to_the_twin(models: dict[str, Model], small: Profile) -> None:
    """Clear bins never reach the twin, doubtful ones do and get its answer, and it is counted."""
    learned = LearnedPredictor(models["boosting"], small)
    fleet = _fleet()
    bins = [Bin(tuple(range(24)), Settings(k, 16), small) for k in (1, 2, 4, 8, 24)]
    chance = learned.evaluate(fleet, bins).starvation_probability
    never = AutoPredictor(learned, TwinPredictor(), low=0.5, high=0.5)
    assert never.evaluate(fleet, bins).starvation_probability.tolist() == chance.tolist()
    assert never.left_to_twin == 0
    always = AutoPredictor(learned, TwinPredictor(), low=-1.0, high=2.0)
    expected = TwinPredictor().evaluate(fleet, bins)
    found = always.evaluate(fleet, bins)
    np.testing.assert_array_equal(found.total_token_throughput, expected.total_token_throughput)
    assert (always.requested, always.left_to_twin) == (5, 5)
    assert "5 of 5 servers" in always.summary()


def test_what_was_never_learned_is_known_and_goes_to_the_twin(models: dict[str, Model], small: Profile) -> None:
    """No row of the dataset is outside its range; a server with far longer prompts is, and `auto` takes the twin."""
    learned = LearnedPredictor(models["boosting"], small)
    low, high = np.array(learned.model.header["ranges"])
    assert not learned.outside(np.stack([low, high])).any()
    strange = Workload([Adapter("a", 8, 0.01)], Lengths.constant(30_000), Lengths.constant(5))
    server = [Bin((0,), Settings(1, 8), small)]
    beyond = learned.outside(learned.features(strange, server))[0]
    assert beyond[COLUMN["input_mean"]]
    assert learned.evaluate_checked(strange, server)[1].tolist() == [True]
    predictor = AutoPredictor(learned, TwinPredictor(), low=0.5, high=0.5)
    predictor.evaluate(strange, server)
    assert predictor.left_to_twin == 1


@pytest.mark.parametrize("kind", KINDS)
def test_latencies_do_not_contradict_each_other(
    models: dict[str, Model], data: Dataset, small: Profile, kind: str
) -> None:
    """The 99th percentile is at least the mean and the median, on every scenario."""
    ones = np.ones(len(data))
    found = LearnedPredictor(models[kind], small).evaluate_features(data.features, 1e5 * ones, ones)
    assert np.all(found.p99_ttft_ms >= found.mean_ttft_ms)
    assert np.all(found.p99_ttft_ms >= found.median_ttft_ms)
    assert np.all(found.p99_itl_ms >= found.mean_itl_ms)


class _LearnedContract(PredictorContract):
    kind = ""

    @pytest.fixture
    def predictor(self, models: dict[str, Model], small: Profile) -> LearnedPredictor:
        """The trained one."""
        return LearnedPredictor(models[self.kind], small)


class TestForestKeepsTheContract(_LearnedContract):
    """A forest as any other predictor."""

    kind = "forest"


class TestBoostingKeepsTheContract(_LearnedContract):
    """Boosted trees as any other predictor."""

    kind = "boosting"


class TestTreeKeepsTheContract(_LearnedContract):
    """A tree as any other predictor."""

    kind = "tree"


def test_tree_kinds_are_walked_as_trees(models: dict[str, Model]) -> None:
    """Forest, boosting and tree are flattened; the single walk agrees with the batch."""
    for kind in ("forest", "boosting", "tree"):
        assert isinstance(family_of(models[kind]), Ensemble)
