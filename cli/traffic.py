"""Sources of observed traffic: options of the commands that measure a fleet, and functions that read them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import click

from packer.cli.declare import Readers, bundle, option, pairs, typed
from packer.cli.options import common
from packer.errors import IncompatibleError, ValidationError, reading

if TYPE_CHECKING:
    from packer.io.web import Address
    from packer.operate.view import Named, View
    from packer.traces.access_log import Fields
    from packer.traces.assign import Ranks
    from packer.traces.prometheus import CounterNames, Metrics

UNUSED_WITH_INPUT = ("url", "window_s", "span_s", "api_key_env", "end")
"""Query parameters that have no effect with --input: the saved file has its own."""


def ranks_or_file(text: str) -> str | tuple[int, ...]:
    """Type of an option: comma-separated ranks, or the file of a table."""
    parts = text.split(",")
    if all(part.strip().isdecimal() for part in parts):
        return tuple(map(int, parts))
    if not text.lower().endswith((".csv", ".tsv", ".gz")) and not os.path.exists(text):
        raise click.BadParameter(f"expected ranks, which are whole numbers, or a table of them, got {text[:80]!r}.")
    return text


@bundle
class RankOptions:
    """Ranks of the adapters, with the same meaning in every command.

    ranks: A table with the columns adapter,rank, or a rank for every other adapter, drawn from several; repeatable.
    base: A model of the traffic that is the base model itself (rank 0); repeatable.
    """

    ranks: tuple[str | tuple[int, ...], ...] = option(
        "--rank", "--ranks", type=ranks_or_file, multiple=True, metavar="FILE.csv|R,R,…"
    )
    base: tuple[str, ...] = option(multiple=True, metavar="MODEL")

    def read(self) -> Ranks:
        """Return the ranks of the options; read tables from their files."""
        from packer.traces.assign import Ranks, read_ranks

        table: dict[str, int] = {}
        others: list[int] = []
        for each in self.ranks:
            if isinstance(each, str):
                table |= read_ranks(each)
            else:
                others += each
        return Ranks({**table, **dict.fromkeys(self.base, 0)}, tuple(others), self.base)


PREFIX: Readers = {"strip-prefix": str}
ASSIGN: Readers = {"adapters": click.IntRange(1, 1_000_000), "exponent": click.FloatRange(0.0, 20.0)}


@bundle
class PlanLogOptions:
    """How a log of requests to the adapters of a plan is read.

    keys: Where a field stands, if not under a usual name: time=…, model=…, input=…, output=…, rank=…, session=…,
        cached=…, id=…; dots go into nested objects; repeatable.
    skip: A model that is no adapter, as the base model; repeatable.
    assign: What stands before adapters' names: strip-prefix=hosted_vllm/; --strip-prefix hosted_vllm/ is the same.
    """

    keys: tuple[str, ...] = option("--key", multiple=True, metavar="FIELD=NAME")
    skip: tuple[str, ...] = option(multiple=True, metavar="MODEL")
    assign: dict[str, Any] = pairs("--assign", names=PREFIX)

    def fields(self) -> Fields:
        """The fields, for `packer.traces.read.read_trace`."""
        from packer.traces.access_log import Fields
        from packer.traces.columns import KEYS

        keys = {}
        for pair in self.keys:
            name, _, key = pair.partition("=")
            if name not in KEYS or not key:
                raise ValidationError(f"Expected --key {'|'.join(KEYS)}=NAME, got {pair[:80]!r}.")
            keys[name] = key
        return Fields(keys, self.skip, self.assign.get("strip_prefix", ""))


@bundle
class LogOptions(PlanLogOptions):
    """How a log of requests is read.

    assign: Whose the requests are: strip-prefix (what stands before adapters' names), or another fleet than the log's,
        by default of ranks 8, 16 and 32: adapters (so many, 200), exponent (of the power law of their shares, 1.2).
        --adapters 200 is the same; repeatable.
    """

    assign: dict[str, Any] = pairs("--assign", names={**ASSIGN, **PREFIX})

    def named(self, seed: int) -> Named:
        """How requests are assigned to adapters that the log does not name."""
        from packer.operate.view import Named

        asked = any(typed(("exponent",)))  # a default in packer.toml acts where it applies
        return Named(self.assign.get("adapters"), self.assign.get("exponent", 1.2), seed, asked)


@bundle
class ViewOptions:
    """Which of the observed rates are used.

    window_s: Rates are counted in windows of this length.
    by_time_of_day: Average the days first: windows at the same time of day (UTC) become one.
    """

    window_s: float = common("window")
    at: str = common("at")
    by_time_of_day: bool = option(is_flag=True, default=False)

    def view(self) -> View:
        """The view, for the functions of `packer.operate.observe`."""
        from packer.operate.view import View

        return View(self.at, by_time_of_day=self.by_time_of_day)


METRIC_NAMES = ("requests-metric", "input-tokens-metric", "output-tokens-metric", "label")
SOURCE: Readers = {
    "gateway": click.Choice(("litellm", "envoy-ai-gateway", "vllm", "custom")),
    **dict.fromkeys(METRIC_NAMES, str),
    "end": click.FloatRange(min=0.0, max=1e11),
    "api-key-env": str,
}


@bundle
class PrometheusOptions:
    """The Prometheus server and its counters.

    url: Prometheus server, as http://prometheus:9090.
    export_path: A file that packer workload from-metrics --save wrote, instead.
    source_names: What is read: gateway (litellm, envoy-ai-gateway, vllm, custom), label (of the adapter's name), end
        (Unix time), api-key-env (environment variable with the key, or @FILE); with custom requests-metric,
        input-tokens-metric and output-tokens-metric. --gateway vllm is the same; repeatable.
    """

    url: str | None = option(metavar="URL")
    export_path: str | None = option("--input", metavar="FILE.json")
    source_names: dict[str, Any] = pairs("--source", names=SOURCE)

    @property
    def gateway(self) -> str:
        """The gateway whose counters are read."""
        return str(self.source_names.get("gateway", "litellm"))

    def check(self) -> None:
        """Check the options before the first query to the server."""
        if self.export_path is not None:
            refuse_unused("--input", UNUSED_WITH_INPUT)
        if (self.url is None) == (self.export_path is None):
            raise ValidationError("Expected exactly one of --url and --input.")
        self.address()
        self.source()

    def address(self) -> Address | None:
        """Address of the server, with its key; None without --url."""
        from packer.io.web import address_of, key_of

        key = self.source_names.get("api_key_env")
        return None if self.url is None else address_of(self.url, key_of(key))

    @property
    def place(self) -> str:
        """The file or URL that metrics are read from, for messages."""
        where = self.address()
        return self.export_path or ("" if where is None else where.url)

    def source(self) -> CounterNames:
        """Names of the counters."""
        from packer.traces.prometheus import source_named

        given = {
            name.removesuffix("_metric"): to
            for name, to in self.source_names.items()
            if name.replace("_", "-") in METRIC_NAMES
        }
        return source_named(self.gateway, **given)

    def read(
        self, *, span_s: float, window_s: float, save_path: str | None = None, skip: Collection[str] = (),
        by_clock: bool = False,
    ) -> Metrics:  # fmt: skip
        """Read metrics from the server or the saved file. `by_clock`: windows start at multiples of their length."""
        import json

        from packer.io.files import write_text
        from packer.traces.prometheus import fetch, parse, read_export

        source, where = self.source(), self.address()
        if where is None:
            answers = read_export(self.export_path or "")
        else:
            end_s = self.source_names.get("end", time.time())
            end_s -= end_s % window_s if by_clock else 0.0
            answers = fetch(where, source, end_s=end_s, span_s=max(span_s, window_s), window_s=window_s)
        if save_path is not None:
            write_text(save_path, json.dumps(answers) + "\n")
        with reading(self.place):
            return parse(answers, source, skip=skip)


def refuse_unused(given: str, unused: Collection[str]) -> None:
    """Raise `IncompatibleError` if one of `unused` (see `typed`) is on the command line with option `given`."""
    for each in typed(unused):
        raise IncompatibleError(f"{each} has no effect with {given}: expected one of them, got both.")
