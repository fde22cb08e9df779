"""What the load generator recorded of one run: arrays per request, the gaps between tokens, and their summary.

The summary has the keys and the definitions of `vllm bench serve` (vllm/benchmarks/serve.py), so that tools
made for its result files can read these.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.arrays import FloatArray, IntArray
from packer.arrival import RequestTrace
from packer.errors import FileFormatError, reader
from packer.io.files import MAX_BYTES, atomic_path, read_bytes
from packer.io.tables import first_line
from packer.twin.stability import due_share

NOT_SENT, UNFINISHED, COMPLETED, FAILED = range(4)  # States of a request.
FAULTY_SHARE = 0.05  # A server that fails a larger share of the requests sent is not evaluated.


@dataclass(frozen=True, eq=False)
class LoadResult:
    """One run of the load generator, n requests.

    `scheduled_s`, `adapter`, `input_tokens`, `output_tokens`: (n,) as scheduled; seconds from the start of the run.
    `sent_s`, `first_s`, `finish_s`: float64 (n,), seconds from the start; NaN if the event did not happen.
    `received_tokens`: int64 (n,), output tokens that came.
    `state`: int64 (n,), see the constants of this module.
    `gaps_s`, `gap_owner`: gaps between the chunks of a stream, and the request of each gap, in order of arrival.
    `duration_s`: seconds that the run lasted; requests that are not finished by then count as unfinished.
    `started_monotonic_s`, `started_unix_s`: clocks at the start; the step log uses the first one.
    `errors`: message → number of requests.
    `ended`: "complete", or why the run was cut short.
    `metrics`: (seconds from the start, text of /metrics) in order; text "" if the page could not be read.
    """

    scheduled_s: FloatArray
    adapter: IntArray
    input_tokens: IntArray
    output_tokens: IntArray
    sent_s: FloatArray
    first_s: FloatArray
    finish_s: FloatArray
    received_tokens: IntArray
    state: IntArray
    gaps_s: FloatArray
    gap_owner: IntArray
    duration_s: float
    started_monotonic_s: float = 0.0
    started_unix_s: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)
    ended: str = "complete"
    metrics: tuple[tuple[float, str], ...] = ()

    @property
    def complete(self) -> bool:
        """Whether the run went to its planned end."""
        return self.ended == "complete"

    @property
    def fault(self) -> str | None:
        """Why the figures do not measure the server's capacity (cut short, or too many failures), else None."""
        sent, failed = int(np.isfinite(self.sent_s).sum()), int((self.state == FAILED).sum())
        if not self.complete:
            return self.ended
        if failed <= FAULTY_SHARE * sent:
            return None
        most = max(self.errors, key=lambda message: self.errors[message], default="no message")
        return f"{failed} of {sent} requests failed, mostly: {most}"

    @property
    def served_share(self) -> float:
        """Tokens completed / tokens due, as in `Run.served_share` of the same trace, without failed requests."""
        kept = self.state != FAILED
        columns = (self.scheduled_s, self.adapter, self.input_tokens, self.output_tokens)
        tpot_ms = float(self.tpot_ms.mean()) if len(self.tpot_ms) else float("nan")
        finished = (self.state == COMPLETED)[kept]
        return due_share(RequestTrace(*(c[kept] for c in columns)), finished, self.duration_s, tpot_ms)

    @cached_property
    def done(self) -> npt.NDArray[np.intp]:
        """Indices of the completed requests."""
        return np.flatnonzero(self.state == COMPLETED)

    @cached_property
    def lateness_ms(self) -> FloatArray:
        """How late each sent request left, ms."""
        return (self.sent_s - self.scheduled_s)[np.isfinite(self.sent_s)] * 1e3

    @property
    def offered_tok_s(self) -> float:
        """Tokens of all requests scheduled in the run / duration, tok/s."""
        due = self.scheduled_s < self.duration_s
        return float((self.input_tokens[due] + self.output_tokens[due]).sum() / self.duration_s)

    @property
    def total_token_throughput(self) -> float:
        """Input and output tokens of the completed requests / duration, tok/s."""
        return float((self.input_tokens[self.done] + self.received_tokens[self.done]).sum() / self.duration_s)

    @cached_property
    def ttft_ms(self) -> FloatArray:
        """From sending to the first token, ms, (completed,)."""
        return (self.first_s - self.sent_s)[self.done] * 1e3

    @cached_property
    def tpot_ms(self) -> FloatArray:
        """Time per output token after the first, ms, of completed requests with at least two."""
        many = self.done[self.received_tokens[self.done] > 1]
        return (self.finish_s - self.first_s)[many] * 1e3 / (self.received_tokens[many] - 1)

    @cached_property
    def itl_ms(self) -> FloatArray:
        """Gaps between the chunks of completed requests, ms."""
        out: FloatArray = self.gaps_s[self.state[self.gap_owner] == COMPLETED] * 1e3
        return out

    @property
    def mean_gap_ms(self) -> float:
        """Mean time between tokens of completed requests: a chunk of several tokens counts as several."""
        many, gaps = self.done[self.received_tokens[self.done] > 1], self.gaps
        return float((self.finish_s - self.first_s)[many].sum() * 1e3 / gaps) if gaps else float("nan")

    @property
    def gaps(self) -> int:
        """Gaps between the tokens of completed requests."""
        return int((self.received_tokens[self.done] - 1).clip(0).sum())

    def summary(self) -> dict[str, Any]:
        """Return the keys of `vllm bench serve` and further ones: unfinished, lateness, how the run ended."""
        done, span = self.done, self.duration_s
        states = {"completed": COMPLETED, "failed": FAILED, "unfinished": UNFINISHED}
        counts = {name: int((self.state == state).sum()) for name, state in states.items()}
        tokens_in, tokens_out = self.input_tokens[done].sum(), self.received_tokens[done].sum()
        summary: dict[str, Any] = {"duration": span, **counts}
        summary |= {"total_input_tokens": int(tokens_in), "total_output_tokens": int(tokens_out)}
        summary |= {"request_throughput": len(done) / span, "output_throughput": float(tokens_out / span)}
        summary |= {name: getattr(self, name) for name in ("total_token_throughput", "offered_tok_s")}
        for name, values in (("ttft", self.ttft_ms), ("tpot", self.tpot_ms), ("itl", self.itl_ms)):
            summary |= _statistics(name, values)
        late = self.lateness_ms
        summary["send_lateness_p99_ms"] = float(np.quantile(late, 0.99)) if len(late) else None
        summary["send_lateness_max_ms"] = float(late.max()) if len(late) else None
        summary["error_counts"] = dict(self.errors)
        summary["ended"] = self.ended
        return summary

    def to_bench(self, **extra: Any) -> dict[str, Any]:
        """The result file of `vllm bench serve --save-result`."""
        date = datetime.fromtimestamp(self.started_unix_s).strftime("%Y%m%d-%H%M%S")
        return {"date": date, "backend": "vllm", "num_prompts": len(self.scheduled_s)} | extra | self.summary()


_NAMES = [each.name for each in fields(LoadResult)]
_ARRAYS, _INFO = _NAMES[:11], _NAMES[11:]


def _statistics(name: str, values: FloatArray) -> dict[str, float | None]:
    known = (values.mean(), np.median(values), values.std(), np.quantile(values, 0.99)) if len(values) else ()
    found = zip_longest(("mean", "median", "std", "p99"), map(float, known))
    return {f"{key}_{name}_ms": value for key, value in found}


def write_result(result: LoadResult, path: str | os.PathLike[str]) -> None:
    """Write a run as a compressed NumPy archive, atomically."""
    info = {name: getattr(result, name) for name in _INFO}
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        arrays = {name: getattr(result, name) for name in _ARRAYS}
        np.savez_compressed(file, info=np.array(json.dumps(info)), **arrays)


@reader
def read_result(path: str | os.PathLike[str]) -> LoadResult:
    """Read what `write_result` wrote; a damaged file is a FileFormatError."""
    import io
    import zipfile

    data = read_bytes(path)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            if sum(member.file_size for member in members.infolist()) > MAX_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_BYTES:,} bytes")
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            info = json.loads(str(archive["info"]))
            info["metrics"] = tuple((float(t), str(text)) for t, text in info["metrics"])
            return LoadResult(**{name: archive[name] for name in _ARRAYS}, **info)
    except Exception as error:  # zipfile and NumPy raise almost anything on damaged archives
        raise FileFormatError(f"expected a result of the load generator: {first_line(error)}.") from None
