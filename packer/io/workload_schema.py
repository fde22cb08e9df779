"""The shape of a workload in JSON and YAML, and in the plans that embed one."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, Literal

from pydantic import AliasChoices, ConfigDict, Field

from packer.adapter import Adapter
from packer.errors import ValidationError, located
from packer.goal import Goal, Limits
from packer.io.arrivals_schema import ArrivalsTable, arrivals_to_dict
from packer.io.schema import FileTable, parse
from packer.job import FineTuning
from packer.lengths import Kind, Lengths
from packer.sessions import Sessions
from packer.workload import SHAREGPT_CORRELATION, SHAREGPT_INPUT, SHAREGPT_OUTPUT, Workload

SCHEMA = 1  # Version of the file format.


class LengthsTable(FileTable):
    """A length distribution; kind "empirical" requires `values`, the other kinds require `mean`."""

    kind: Kind
    mean: float | None = None
    cv: float | None = None
    low: int = 1
    high: int | None = None
    values: list[float] | None = None

    def lengths(self) -> Lengths:
        """The distribution as `Lengths`."""
        if self.kind == "empirical":
            if self.values is None or self.mean is not None or self.cv is not None:
                raise ValidationError("Expected empirical lengths to have values, and neither mean nor cv.")
            return Lengths.empirical(self.values, low=self.low, high=self.high)
        if self.mean is None or self.values is not None:
            raise ValidationError(f"Expected {self.kind} lengths to have a mean, and no values.")
        if self.kind != "constant" and self.cv is None:
            raise ValidationError(f"Expected {self.kind} lengths to have a cv.")
        return Lengths(self.kind, self.mean, self.cv or 0.0, self.low, self.high)


class AdapterTable(FileTable):
    """An adapter. A number as a length is a mean; the distribution then has the shape of the workload's."""

    name: str = Field(validation_alias=AliasChoices("name", "adapter"))
    rank: int
    rate: float
    input_tokens: LengthsTable | float | None = None
    output_tokens: LengthsTable | float | None = None
    model: str | None = None
    slo_class: str | None = None
    shared_prefix_tokens: int = 0
    sessions: dict[str, Any] | None = None
    priority: int = 0
    acceptance: float | None = None


Given = dict[str, float | Literal["none"] | None]
"""Latency limits, ms, by the keys of a goal; "none": no limit; None: as if the key were left out."""


class SloTable(FileTable):
    """The goal: limits of adapters without a class, limits of each class, and the shares that must keep them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: Given = Field(init=False)
    adapter_share: float = 1.0
    request_share: float = 0.99
    classes: dict[str, Given] = Field(default_factory=dict)

    def slo(self) -> Goal:
        """The goal; limits that are left out are the default ones, and those of a class the ones without a class."""
        limits = _changed(Limits(), self.__pydantic_extra__)
        classes = tuple((name, _changed(limits, each)) for name, each in self.classes.items())
        return Goal(limits, classes, self.adapter_share, self.request_share)


def _changed(limits: Limits, given: Given) -> Limits:
    known = {key: value for key, value in given.items() if value is not None}
    return limits.changed({key: math.inf if value == "none" else value for key, value in known.items()})


class FineTuningTable(FileTable):
    """A fine-tuning job; a number as `sample_tokens` is the length of every sample."""

    samples: int | None = None
    sample_tokens: LengthsTable | float = 512.0
    rank: int = 16
    batch: int = 1
    backward_ratio: float = 1.0
    layers: int = 32
    weights_ms: float | None = None
    policy: str = "llmstation"

    def job(self) -> FineTuning:
        """The job as `FineTuning`."""
        tokens = self.sample_tokens
        lengths = tokens.lengths() if isinstance(tokens, LengthsTable) else Lengths.constant(tokens)
        return FineTuning(**{**dict(self), "sample_tokens": lengths})


class WorkloadFile(FileTable):
    """The whole file."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str | None = None
    input_tokens: LengthsTable | float | None = None
    output_tokens: LengthsTable | float | None = None
    length_correlation: float = SHAREGPT_CORRELATION
    arrivals: ArrivalsTable = ArrivalsTable()
    slo: SloTable = SloTable()
    fine_tuning: FineTuningTable | None = None
    sessions: dict[str, Any] | None = None
    adapters: list[AdapterTable]


def workload_from_dict(data: Any, *, name: str = "workload") -> Workload:
    """The workload in nested dicts, or in a bare list of adapters."""
    file = parse(WorkloadFile, {"adapters": data} if isinstance(data, list) else data)
    with located("input_tokens"):
        inputs = _lengths(file.input_tokens, SHAREGPT_INPUT) or SHAREGPT_INPUT
    with located("output_tokens"):
        outputs = _lengths(file.output_tokens, SHAREGPT_OUTPUT) or SHAREGPT_OUTPUT
    with located("arrivals"):
        arrivals = file.arrivals.arrivals()
    adapters = []
    for k, row in enumerate(file.adapters):
        with located(f"adapters.{k}"):
            own: dict[str, Any] = {"input_tokens": _lengths(row.input_tokens, inputs)}
            own["output_tokens"] = _lengths(row.output_tokens, outputs)
            if row.sessions is not None:
                own["sessions"] = parse(Sessions, row.sessions, f"adapters.{k}.sessions")
            adapters.append(Adapter(**{**dict(row), **own}))
    with located("slo"):
        slo = file.slo.slo()
    with located("fine_tuning"):
        job = None if file.fine_tuning is None else file.fine_tuning.job()
    sessions = None if file.sessions is None else parse(Sessions, file.sessions, "sessions")
    with located():
        correlation, name = file.length_correlation, file.name or name
        return Workload(adapters, inputs, outputs, correlation, arrivals, name, slo, job, sessions)


def workload_to_dict(workload: Workload) -> dict[str, Any]:
    """Nested dicts in the shape of the file; `workload_from_dict` gives the same workload back."""
    return {
        "schema": SCHEMA,
        "name": workload.name,
        "input_tokens": lengths_to_dict(workload.input_tokens),
        "output_tokens": lengths_to_dict(workload.output_tokens),
        "length_correlation": workload.length_correlation,
        "arrivals": arrivals_to_dict(workload.arrivals),
        **({} if workload.slo == Goal() else {"slo": _goal_to_dict(workload.slo)}),
        **({} if workload.fine_tuning is None else {"fine_tuning": _given(workload.fine_tuning)}),
        **({} if workload.sessions is None else {"sessions": _given(workload.sessions)}),
        "adapters": [
            {**_given(adapter), "rate": rate}
            for adapter, rate in zip(workload.adapters, workload.given_rates.tolist(), strict=True)
        ],
    }


def _goal_to_dict(goal: Goal) -> dict[str, Any]:
    def table(limits: Limits) -> dict[str, Any]:
        return {"p95_ttft_ms": "none", "mean_itl_ms": "none"} | limits.to_dict()

    shares = {"adapter_share": goal.adapter_share}
    if goal.request_share != Goal().request_share:
        shares["request_share"] = goal.request_share
    return {**table(goal.limits), **shares, "classes": {name: table(each) for name, each in goal.classes}}


def lengths_to_dict(lengths: Lengths) -> dict[str, Any]:
    """A length distribution in the shape of the file."""
    found: dict[str, Any] = {"mean": lengths.mean, "cv": lengths.cv}
    if lengths.kind == "empirical":
        found = {"values": list(lengths.values)}
    elif lengths.kind == "constant" and not lengths.cv:
        del found["cv"]
    bounds = {"low": None if lengths.low == 1 else lengths.low, "high": lengths.high}
    return {"kind": lengths.kind, **found, **{key: each for key, each in bounds.items() if each is not None}}


def _given(item: Adapter | FineTuning | Sessions) -> dict[str, Any]:
    """An adapter, a job or sessions in the shape of the file; keys without a value are left out."""
    values = {each.name: getattr(item, each.name) for each in fields(item)}

    def written(value: object) -> object:
        if isinstance(value, Lengths):
            return lengths_to_dict(value)
        return _given(value) if isinstance(value, Sessions) else value

    return {
        name: written(value)
        for name, value in values.items()
        if value is not None and (value or name not in ("shared_prefix_tokens", "priority"))
    }


def _lengths(value: LengthsTable | float | None, shape: Lengths) -> Lengths | None:
    if value is None:
        return None
    return value.lengths() if isinstance(value, LengthsTable) else shape.scaled(value)
