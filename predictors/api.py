"""Predictors by name or path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from packer import checks, registry
from packer.bin import Bin
from packer.errors import PluginError, path_of, plugged, shown
from packer.evaluation import FIGURES, FLAGS, Evaluation, Evaluations
from packer.gpu import check_one_server
from packer.profile import Profile
from packer.public import public
from packer.strategies import Predictor, TwinBased
from packer.workload import Workload

SHARES = ("starvation_probability", "slo_attainment")  # Figures that lie in [0, 1].


@public
def load_predictor(name: str | os.PathLike[str], profile: Profile, *, seed: int = 0) -> Predictor:
    """Load a predictor for a profile, by its name ("twin", "forest", …) or from a file.

    `name`: a registered predictor, or the path of a file written by `packer predictor train` (it ends in `.packer`,
    or contains a directory).
    `profile`: the profile of the servers to evaluate; a file that was trained for another profile is refused.
    `seed`: seed of the predictor's random draws.

    Raises `UnknownNameError`: no predictor has this name; `FileFormatError`: there is no such file; `ModelError`: the
    file is damaged, or belongs to another profile; `PluginError`: a predictor of another package raised an error.
    """
    checks.integer("seed", seed, low=0)
    text = path_of(name, "the name of a predictor")
    if text.endswith(".packer") or "/" in text or os.sep in text:  # a file
        from packer.predictors.learned import LearnedPredictor

        return LearnedPredictor.read(Path(text), profile)
    kind = registry.load("predictor", text)
    has_factory = hasattr(kind, "for_profile")
    with registry.blaming_plugins():
        predictor: Predictor = kind.for_profile(profile, seed=seed) if has_factory else kind()
    return predictor


def evaluated(predictor: Predictor, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
    """Figures of each bin by a predictor that may come from another package; one row per bin, in order. Raises
    `PluginError`: the predictor is not one of packer's, and raised, or returned another number of rows or a figure that
    no server has."""
    if isinstance(predictor, TwinBased):
        return predictor.evaluate(workload, bins)
    with plugged(f"The predictor {predictor.name!r}"):
        found = predictor.evaluate(workload, bins)
        got = len(found)
        wrong = next((name for name in (*FLAGS, *FIGURES) if not _possible(name, found)), "")
    if got != len(bins):
        raise PluginError(f"Expected {len(bins)} rows from the predictor {predictor.name!r}, got {got}.")
    if wrong:
        rule = "true or false" if wrong in FLAGS else "a share in [0, 1]" if wrong in SHARES else "a number >= 0"
        values = shown(getattr(found, wrong).tolist())
        raise PluginError(f"Expected {wrong} from the predictor {predictor.name!r} to be {rule}, got {values}.")
    return found


def _possible(name: str, found: Evaluations) -> bool:
    """Whether servers that start may have these values of a figure; only a throughput can't be NaN, for unknown."""
    values = getattr(found, name)
    if name in FLAGS:
        return bool(values.dtype == np.bool_)
    ok = (values >= 0.0) & (values <= (1.0 if name in SHARES else np.inf))
    if name != "total_token_throughput":
        ok |= np.isnan(values)
    return bool(ok[~found.memory_error].all())


@public
def evaluate_server(
    workload: Workload, server: Profile, *, max_loras: int, max_lora_rank: int | None = None,
    predictor: str | os.PathLike[str] | Predictor = "auto", seed: int = 0,
) -> Evaluation:  # fmt: skip
    """Evaluate one server that serves the whole fleet.

    Where the predictor is the twin, or leaves the server to it, the latencies are those of `packer.simulate` for an
    hour with the same seed, and the throughput is the offered load times the share of the tokens that is served. Fewer
    than 1,500 requests an hour take longer, more than 300,000 less, and a server at the edge of starvation gets the
    means of three hours. Plans are searched with shorter runs, in which the first uses of adapters weigh more.

    `workload`: the fleet.
    `server`: the server's profile.
    `max_loras`: adapters on the GPU at once.
    `max_lora_rank`: rank of every slot, one of vLLM's values; None: the smallest that holds every adapter.
    `predictor`: a registered name, the path of a trained predictor, or an object.
    `seed`: seed of the predictor's random draws.

    Raises `ValidationError`: an adapter's rank exceeds `max_lora_rank`, the adapters name several base models, or
    another value is out of range; `IncompatibleError`: the server has another base model; `UnknownNameError`,
    `ModelError`: as from `load_predictor`; `PluginError`: the predictor raised another, or returned no row.
    """
    check_one_server(workload, server)
    checks.integer("seed", seed, low=0)
    checks.integer("max_loras", max_loras, low=0)
    if isinstance(predictor, str | os.PathLike):
        predictor = load_predictor(predictor, server, seed=seed)
    for_one = getattr(predictor, "for_one", None)  # of those that simulate
    settings = server.settings(max_loras, workload.slot_rank(max_lora_rank))
    item = Bin(tuple(range(len(workload))), settings, server)
    return evaluated(for_one() if for_one else predictor, workload, [item])[0].to_show()
