"""What a comparison with a paper consists of: constants, rows, remarks; as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from packer.twin.uncertainty import interval

MARKS = {
    "T": "stated in the paper",
    "D": "derived from stated numbers",
    "P": "from public code or summaries",
    "F": "fitted to a published result, which is named",
    "A": "assumed: the paper is silent",
}
"""Where a constant comes from."""

T = TypeVar("T")


@dataclass(frozen=True)
class Constant:
    """A number that a comparison needs; `mark`: a key of `MARKS`."""

    name: str
    value: str
    mark: str
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A published result beside ours.

    `kept`: whether `rule` holds; None: the row is shown, nothing is compared. `basis`: "claim", "fitted" (a constant
    was fitted to this result, or it is true by construction: whether it is kept says nothing), or "untestable" (the
    text gives no figure, or it depends on something that is not simulated).
    """

    what: str
    published: str
    ours: str
    rule: str = ""
    kept: bool | None = None
    note: str = ""
    basis: str = "claim"

    @property
    def counted(self) -> bool:
        """Whether the rule could have failed, so that it counts."""
        return self.basis == "claim" and self.kept is not None


@dataclass(frozen=True)
class Section:
    """The comparison with one paper.

    `tables`: further ones, in Markdown, that no single row can show. `presets`: shipped systems that its rows ran, by
    `run.py`.
    """

    name: str
    title: str
    source: str
    constants: Sequence[Constant]
    rows: Sequence[Row]
    remarks: Sequence[str] = ()
    presets: Sequence[str] = ()
    tables: Sequence[str] = ()
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For results.json."""
        return asdict(self)


def of_seeds(function: Callable[[int], T], seeds: int) -> list[T]:
    """The function at seeds 0, 1, …, in two threads."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, range(seeds)))


def shown(values: Sequence[float], digits: int = 2) -> str:
    """Mean of several seeds and half the width of its 95 % interval."""
    found = interval(np.array(values))
    text = f"{found.mean:,.{digits}f}"
    if found.low is None or len(values) < 2:
        return text
    return f"{text} ± {(found.high - found.low) / 2:,.{digits}f}"


def mean(values: Sequence[float]) -> float:
    """Mean of several seeds."""
    return float(np.mean(values))


def near(ours: float, published: float, share: float) -> bool:
    """Whether a figure lies within this share of the published one."""
    return abs(ours / published - 1.0) <= share


def below(smaller: Sequence[float], larger: Sequence[float]) -> bool:
    """Whether the first are smaller in the mean of the seeds, by more than the 95 % interval of the differences."""
    low = interval(np.array(larger) - np.array(smaller)).low
    return mean(smaller) < mean(larger) and (len(smaller) < 2 or (low is not None and low > 0.0))


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown below its title."""
    lines = [f"**{title}**", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def markdown(section: Section) -> str:
    """The section as tables."""
    lines = [f"## {section.title}", "", f"Source: {section.source}.", ""]
    if section.presets:
        lines += ["Systems of `packer systems`: " + ", ".join(f"`{name}`" for name in section.presets) + ".", ""]
    lines += ["| result | published | simulated | rule | kept |", "|---|---|---|---|---|"]
    words = {True: "yes", False: "**no**", None: "–"}
    for row in section.rows:
        ours = row.ours + (f" ({row.note})" if row.note else "")
        kept = words[row.kept] if row.basis == "claim" else row.basis
        lines.append(f"| {row.what} | {row.published} | {ours} | {row.rule or '–'} | {kept} |")
    for table in section.tables:
        lines += ["", table.rstrip("\n")]
    lines += ["", "| constant | value | from | remark |", "|---|---|---|---|"]
    lines += [f"| {c.name} | {c.value} | {MARKS[c.mark]} | {c.note or '–'} |" for c in section.constants]
    if section.remarks:
        lines += ["", *(f"- {remark}" for remark in section.remarks)]
    return "\n".join(lines) + "\n"
