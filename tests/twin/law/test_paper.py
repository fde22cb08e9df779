"""The paper's step law."""

from __future__ import annotations

import numpy as np

from packer.twin.law.paper import paper_ms


def test_papers_law_by_hand() -> None:
    """Equation (1) of arXiv 2602.24044 with whole numbers."""
    c = np.arange(1.0, 8.0)
    # k1·B + k2·R_P + k3·R_P·A/A_all + (k4·B + k5)(k6·A + k7), B=2, R_P=10, A=4, A_all=8
    assert paper_ms(c, 2, 10, 4, 8) == 2 + 20 + 15 + (8 + 5) * (24 + 7)
