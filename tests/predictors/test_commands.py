"""`packer predictor build`, `packer predictor train` and `packer simulate` from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from packer.cli import run
from packer.io.profiles import write_profile
from packer.predictors.build import build_dataset
from packer.predictors.store import Model, write_model
from packer.profile import Profile


@pytest.fixture(scope="module")
def place(small: Profile, models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a profile, a fleet, a few trained predictors and a small dataset."""
    folder = tmp_path_factory.mktemp("place")
    write_profile(small, folder / "profile.toml")
    lines = ["adapter,rank,rate", *(f"a{i},{8 if i % 2 else 16},0.05" for i in range(24))]
    (folder / "fleet.csv").write_text("\n".join(lines) + "\n")
    for kind in ("tree", "boosting"):
        write_model(models[kind], folder / f"{kind}.packer")
    build_dataset(small, folder / "d.parquet", rows=3, jobs=1)
    return folder


def _predict(place: Path, predictor: str, *more: str) -> list[str]:
    profile = str(place / "profile.toml")
    fleet = str(place / "fleet.csv")
    return ["simulate", fleet, "--max-loras", "8", "--profile", profile, "--predictor", predictor, *more]


def test_predict_speaks_json(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result and its probability come as JSON."""
    assert run(_predict(place, str(place / "boosting.packer"), "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predictor"] == "boosting"
    assert found["starved"] is (found["starvation_probability"] >= 0.5)


def test_predict_explains_trees_by_rules(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tree says which rules fired."""
    assert run(_predict(place, str(place / "tree.packer"), "--explain")) == 0
    assert "Rules that fired" in capsys.readouterr().out


def test_predict_explains_others_by_features(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Boosted trees say which features mattered."""
    assert run(_predict(place, str(place / "boosting.packer"), "--explain", "--json")) == 0
    assert len(json.loads(capsys.readouterr().out)["explanation"]["features"]) == 8


def test_the_twin_has_nothing_to_explain(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation has no rules: that is said before one, with exit code 2, also beside options that the twin takes."""
    monkeypatch.setattr("packer.operate.predict.evaluate_server", None)
    for more in ((), ("--seeds", "3")):
        assert run(_predict(place, "twin", "--explain", *more)) == 2
        assert "no rules or features" in capsys.readouterr().err


def test_a_predictor_refuses_other_base_models(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server has one base model: a fleet of another one, or of several, is refused as by the twin."""
    fleet = place / "models.csv"
    words = ["simulate", str(fleet), *_predict(place, str(place / "boosting.packer"))[2:]]
    for models in (["org/other"], ["org/one", "org/other"]):
        rows = [f"{model.replace('/', '-')},8,0.05,{model}" for model in models]
        fleet.write_text("\n".join(["adapter,rank,rate,model", *rows]) + "\n")
        assert run(words) == 2
        assert "base model" in capsys.readouterr().err


def test_a_damaged_predictor_is_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that was changed gives one sentence and no traceback."""
    path = place / "changed.packer"
    path.write_bytes((place / "tree.packer").read_bytes()[:-5])
    assert run(_predict(place, str(path), "-q")) == 2
    error = capsys.readouterr().err
    assert "does not match its hash" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--slo", "--duration"])
def test_what_a_predictor_does_not_use_is_refused(place: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A goal or a time changes no figure of a predictor, so that the option is named."""
    value = "p95_ttft_ms=5" if option == "--slo" else "60"
    assert run(_predict(place, "tree", option, value)) == 2
    assert f"{option} has no effect with --predictor tree" in capsys.readouterr().err


def test_a_missing_predictor_file_is_an_input_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that leads nowhere names the path."""
    assert run(_predict(place, str(place / "none.packer"))) == 2
    assert "none.packer" in capsys.readouterr().err


def test_predict_marks_estimates(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result for an estimated profile says so in each form of output; quiet says nothing."""
    words = _predict(place, str(place / "tree.packer"))
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert "estimated, not calibrated" in out
    assert "estimated, not calibrated" in err
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibrated"] is False
    assert run([*words, "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_train_is_quiet_when_asked(
    place: Path,
    models: dict[str, Model],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quiet training prints nothing and writes the predictor; JSON is printed."""
    monkeypatch.setattr("packer.predictors.train.train", lambda *_args, **_options: models["tree"])
    words = [
        "predictor",
        "train",
        str(place / "d.parquet"),
        "--kind",
        "tree",
        "-o",
        str(place / "q.packer"),
        "-q",
    ]
    assert run(words) == 0
    assert capsys.readouterr() == ("", "")
    assert (place / "q.packer").exists()
    assert run([*words, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "tree"


def test_dataset_builds_from_the_command_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes the same bytes as the library, tells scripts what, and overwrites no file."""
    command = [
        "predictor",
        "build",
        "--profile",
        str(place / "profile.toml"),
        "--rows",
        "3",
        "--jobs",
        "1",
        "-q",
        "--json",
    ]
    assert run([*command, "-o", str(place / "again.parquet")]) == 0
    assert json.loads(capsys.readouterr().out)["scenarios"] == 3
    assert (place / "again.parquet").read_bytes() == (place / "d.parquet").read_bytes()
    assert run([*command, "-o", str(place / "again.parquet")]) == 2


def test_training_needs_enough_rows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dataset of three scenarios is refused before anything is written."""
    output = place / "few.packer"
    assert run(["predictor", "train", str(place / "d.parquet"), "--kind", "forest", "-o", str(output), "-q"]) == 2
    assert "at least 200" in capsys.readouterr().err
    assert not output.exists()


def test_choices_that_do_not_fit_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rules are searched for trees only."""
    command = [
        "predictor",
        "train",
        str(place / "d.parquet"),
        "--kind",
        "forest",
        "--refine",
        "-o",
        str(place / "x.packer"),
    ]
    assert run(command) == 2
    assert "--kind tree" in capsys.readouterr().err


def test_a_cut_dataset_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dataset that lost its end gives one clear line."""
    path = place / "cut.parquet"
    shutil.copy(place / "d.parquet", path)
    path.write_bytes(path.read_bytes()[:-100])
    assert run(["predictor", "train", str(path), "--kind", "tree", "-o", str(place / "y.packer"), "-q"]) == 2
    assert "cut short" in capsys.readouterr().err
