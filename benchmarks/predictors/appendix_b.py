"""The main paper's kinds of model and its small trees on our data set: `python benchmarks/predictors/appendix_b.py`.

arXiv 2602.24044 trains forests, support vector machines and neighbours with `HalvingGridSearchCV` over the grids of its
Appendix B (Table 3), and refines the forest to trees of at most 32 rules (Table 4). Here the same is done by
`packer predictor train --search` and `--refine`, on a part of the data set of each shipped profile
(build/datasets, see train_shipped.py), for the two figures that the paper predicts. Both are scored on the measured
runs that started. Writes benchmarks/predictors/appendix_b.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from real_runs import questions
from train_shipped import PROFILES, ROOT, ROWS, dataset_for

from packer.io.files import write_text
from packer.io.profiles import load_profile
from packer.predictors.families import family_of
from packer.predictors.features import COLUMN, NAMES
from packer.predictors.kinds import kind_of
from packer.predictors.learned import LearnedPredictor
from packer.predictors.store import Model, shipped_model
from packer.predictors.targets import OUTPUTS, STARVED, TARGETS
from packer.predictors.train import TrainingTable, _fit, _search
from packer.testing.records import record_text
from packer.twin.scores import macro_f1, smape

HERE = Path(__file__).parent
SHARE = TARGETS[0]
KINDS = ("knn", "forest", "svm", "tree")
PART = 4000
SEED = 0


def main() -> None:
    """Train, score, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS, help="Rows of the data sets.")
    parser.add_argument("--profile", action="append", dest="profiles", help="Of these; the others' figures stay.")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "h100")
    given = parser.parse_args()
    path = HERE / "appendix_b.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) | {"rows": PART}
    for name in given.profiles or PROFILES:
        profile = load_profile(name)
        table = TrainingTable.of(dataset_for(profile, ROOT / "build" / "datasets", given.rows, SEED)).at_most(
            PART, SEED
        )
        reader = LearnedPredictor(shipped_model("tree", profile)[0], profile)
        servers = questions(profile, given.data)
        x = np.concatenate([reader.features(fleet, [item]) for fleet, item, _ in servers])
        starved = np.array([run["starved"] == "1" for _, _, run in servers])
        measured = np.array([float(run["total_tok_s"]) for _, _, run in servers])
        found[name] = {"runs": len(servers)}
        for kind_name in KINDS:
            kind, refine = kind_of(kind_name), kind_name == "tree"
            outputs = (STARVED, SHARE.name)
            params = {
                each: kind.defaults[each == STARVED] if refine else _search(kind, table, each, SEED) for each in outputs
            }
            arrays = _fit(kind, table, params, SEED, refine=refine, outputs=outputs)
            family = family_of(Model({"family": kind.family, "features": NAMES}, arrays))
            rows = np.ascontiguousarray(x, dtype=np.float32)
            limit = 0.5 if kind.family == "trees" else 0.0  # a share of rows, or a distance from the border
            share = SHARE.decode(family.rows(rows, OUTPUTS.index(SHARE.name)), x)
            throughput = np.clip(share, 0.0, 1.0) * x[:, COLUMN["offered"]]
            found[name][kind_name] = {
                "params": "refined" if refine else params,
                "throughput_smape": round(smape(zip(throughput, measured, strict=True)), 2),
                "starvation_macro_f1": round(macro_f1(zip(family.rows(rows, 0) > limit, starved, strict=True)), 3),
            }
            print(name, kind_name, json.dumps(found[name][kind_name]), flush=True)
    write_text(path, record_text(found) + "\n", force=True)


if __name__ == "__main__":
    main()
