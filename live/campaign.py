"""A planned set of measurements on real servers: resumable, within a time budget, servers always stopped."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from packer.errors import FileFormatError, ValidationError, reading
from packer.io.documents import parse_json
from packer.io.files import read_text, write_text
from packer.io.schema import parse
from packer.live.launch import Launch
from packer.live.load import LoadJob, run_job
from packer.live.metrics import summarise
from packer.live.results import read_result
from packer.live.server import Failure, LiveServer, ServerOptions
from packer.live.step_log import read_steps
from packer.live.task import Endpoint, Outcome, Session, Task
from packer.progress import Progress, silent
from packer.words import listed

STEP_LOG_FLUSH_S = 0.7
MEASURED_WITH = (
    "model", "adapter_path", "engine", "python", "command", "arguments", "environment", "emulation", "step_log",
    "server_cores", "api_cores", "token_ids",
)  # fmt: skip
"""Keys of a launch file on which results depend."""
METRICS_SAMPLES = 60  # Scrapes of /metrics in a run of a minute or more: each stops the server's output.


@dataclass(frozen=True)
class _Origin:
    """Of which server a session's results are, and a digest of its settings and adapters."""

    server: Mapping[str, str]
    loaded: str


class Campaign:
    """Runs sessions one after another and keeps every result on disk.

    `folder`: of the results; a campaign with the same folder and servers continues where the last one stopped.
    `budget_s`: no new task begins after this many seconds; None means no limit.
    `cores`: CPU cores of the servers, instead of the launch file's.
    `progress`: called with (what, tasks done, total tasks).
    `stop`: called several times a second; it returns True to end the load and the campaign from another thread.
    `endpoint`: a running server to measure instead of starting any.
    """

    def __init__(
        self, launch: Launch, folder: Path, *, budget_s: float | None = None, cores: Sequence[int] = (),
        progress: Progress = silent, stop: Callable[[], bool] = lambda: False,
        endpoint: Endpoint | None = None,
    ) -> None:  # fmt: skip
        self.stop, self.endpoint = stop, endpoint
        self.launch, self.folder, self.cores = launch, folder, tuple(cores)
        self.progress = progress
        self.deadline = time.monotonic() + budget_s if budget_s is not None else float("inf")
        self.out_of_time = False

    def run(self, sessions: Sequence[Session]) -> list[Outcome]:
        """Return outcomes in order; if the budget ends, the rest is absent and `out_of_time` is True. Raises
        `ValidationError`: a session's folder has results of another server."""
        for session in sessions:
            self._check_server(session)
        outcomes: list[Outcome] = []
        total = sum(len(session.tasks) for session in sessions)
        for session in sessions:
            for outcome in self._session(session):
                outcomes.append(outcome)
                self.progress(f"{session.key} {outcome.task.key}", len(outcomes), total)
        return outcomes

    def _session(self, session: Session) -> Iterable[Outcome]:
        """Yield the outcomes of a session: first those on disk, then the missing ones, which are measured."""
        missing: list[Task] = []
        for task in session.tasks:
            if (known := self.load(session, task)) is not None:
                yield replace(known, reused=True)
            else:
                missing.append(task)
        while missing and not self._late():
            done = 0
            for outcome in self._serve(session, missing):
                done += 1
                yield outcome
            if not done:
                return
            # The task that killed its server counts as done: the next server begins after it.
            missing = missing[done:]

    def _check_server(self, session: Session) -> None:
        """Note of which server the session's results are; those for other settings or adapters are not used again."""
        place, server = self.folder / session.key, self._server()
        names = dict.fromkeys(name for task in session.tasks for name in task.workload.names)
        origin = _Origin(server, _digest([asdict(session.options), list(names)]))
        path = place / "server.json"
        with reading(path):
            was = parse(_Origin, parse_json(read_text(path))) if path.exists() else None
        results = [each for name in ("done.json", "failure.json") for each in place.glob(f"*/{name}")]
        if was is None and results:
            rule = f"{place}: Expected {path.name}, which says of which server these results are, got none;"
            raise ValidationError(f"{rule} give another folder, or delete this one.")
        if was is not None and was.server != server:
            changed = [key for key in {**was.server, **server} if was.server.get(key) != server.get(key)]
            rule = f"{place}: Expected the server that these results are of, got one with other values of"
            raise ValidationError(f"{rule} {listed(changed)}; give another folder, or delete this one.")
        if was != origin:
            for result in results:
                result.unlink()
            place.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(asdict(origin), indent=2))

    def _server(self) -> dict[str, str]:
        """What tells a server from others; the launch file's values as digests, since some are secret."""
        if self.endpoint is not None:
            return {"url": self.endpoint.url}
        given = asdict(self.launch)
        # which of several equal GPUs runs a server does not matter
        given["environment"] = {k: v for k, v in given["environment"].items() if k != "CUDA_VISIBLE_DEVICES"}
        return {key: _digest(given[key]) for key in MEASURED_WITH}

    def _late(self) -> bool:
        self.out_of_time = self.out_of_time or time.monotonic() > self.deadline
        return self.out_of_time or self.stop()

    def _serve(self, session: Session, tasks: Sequence[Task]) -> Iterable[Outcome]:
        """Start a server and run tasks until one kills it; `_session` starts a server again for the rest."""
        if self.endpoint is not None:
            yield from self._measure_all(self.endpoint, session, tasks)
            return
        place = self.folder / session.key
        budget = session.options.kv_cache_bytes
        if budget is not None and budget <= 0:
            message = f"emulated slot memory leaves {budget} bytes for the KV cache"
            yield from self._failed(session, tasks, Failure("memory_error", message))
            return
        check_adapters(session.options)
        with LiveServer(self.launch, session.options, place, cores=self.cores) as server:
            self.progress(f"{session.key}: starting the server", 0, 0)
            failure = server.start(self.stop)
            if failure is not None:
                yield from self._failed(session, tasks, failure)
                return
            yield from self._measure_all(Endpoint(server.url, server=server), session, tasks)

    def _measure_all(self, endpoint: Endpoint, session: Session, tasks: Sequence[Task]) -> Iterable[Outcome]:
        for task in tasks:
            if self._late():
                return
            yield self._measure(endpoint, session, task)
            if not endpoint.alive:
                return

    def _failed(self, session: Session, tasks: Sequence[Task], failure: Failure) -> Iterable[Outcome]:
        for task in tasks:
            if failure.kind == "memory_error":  # is a result; other failures are retried on resuming
                place = self._place(session, task)
                place.mkdir(parents=True, exist_ok=True)
                write_text(place / "failure.json", json.dumps(asdict(failure), indent=2))
            yield Outcome(session, task, failure)

    def _place(self, session: Session, task: Task) -> Path:
        """Folder of a task's results."""
        return self.folder / session.key / task.key

    def job(self, endpoint: Endpoint, task: Task) -> LoadJob:
        """Return the load generator's job for a task."""
        launch = self.launch
        return LoadJob(
            url=endpoint.url,
            models=tuple(each.name if each.rank else endpoint.base for each in task.workload.adapters),
            requests=task.requests(launch.engine.max_model_len),
            duration_s=task.duration_s,
            drain_s=task.drain_s,
            token_ids=launch.token_ids,
            # Prompts of different tasks must not share prefixes: a server with prefix caching would reuse them.
            seed=zlib.crc32(f"{task.key} {task.seed}".encode()),
            stall_s=launch.stall_timeout_s,
            metrics_interval_s=max(1.0, task.duration_s / METRICS_SAMPLES),
            cores=launch.client_cores,
        )

    def _measure(self, endpoint: Endpoint, session: Session, task: Task) -> Outcome:
        place = self._place(session, task)
        place.mkdir(parents=True, exist_ok=True)
        result = run_job(
            self.job(endpoint, task), place, alive=lambda: endpoint.alive, stop=self.stop,
            progress=lambda s: self.progress(f"{session.key} {task.key} {s:.0f} s", 0, 0),
            authorization=endpoint.authorization,
        )  # fmt: skip
        server = endpoint.server
        log = None if server is None else server.step_log
        if log is not None and log.exists():
            time.sleep(STEP_LOG_FLUSH_S)
            start = result.started_monotonic_s
            _copy_rows(log, place / "steps.csv", start, start + result.duration_s)
        failure = None if server is None or server.alive else server.failure()
        if failure is None and result.fault is None:
            write_text(place / "done.json", json.dumps(result.summary(), indent=2))
        return replace(self._read(session, task), failure=failure, load=result)

    def load(self, session: Session, task: Task) -> Outcome | None:
        """Return an earlier outcome: a failure for lack of memory, or a complete run of the same requests."""
        place = self._place(session, task)
        failure = place / "failure.json"
        if failure.exists():
            with reading(failure):
                return Outcome(session, task, parse(Failure, parse_json(read_text(failure))))
        if not (place / "done.json").exists():
            return None
        outcome = self._read(session, task)
        wanted = task.requests(self.launch.engine.max_model_len)
        if (sent := outcome.load) is None:
            return None
        pairs = (
            (sent.scheduled_s, wanted.time_s), (sent.adapter, wanted.adapter),
            (sent.input_tokens, wanted.input_tokens), (sent.output_tokens, wanted.output_tokens),
        )  # fmt: skip
        return outcome if all(np.array_equal(*each) for each in pairs) else None

    def _read(self, session: Session, task: Task) -> Outcome:
        place = self._place(session, task)
        load = read_result(place / "load.npz")
        metrics = summarise(load.metrics)
        try:
            steps = read_steps(place / "steps.csv") if (place / "steps.csv").exists() else None
        except FileFormatError:
            steps = None  # the worker cannot record steps of this vLLM version; the other results are valid
        cache = metrics.kv_cache
        shape, length = self.launch.model_spec.kv_shape, self.launch.engine.max_model_len
        tokens = None if cache is None else cache.capacity(shape, length)
        return Outcome(session, task, None, load, metrics, steps, tokens)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def check_adapters(options: ServerOptions) -> None:
    """Raise ValidationError if an adapter's folder is missing; vLLM would report that only after a minute."""
    absent = [(name, path) for name, path in options.adapters if "/" in path and not Path(path).exists()]
    if absent:
        name, path = absent[0]
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        rule = f"Expected adapter {name!r} at {path}{more}, got nothing there;"
        raise ValidationError(f"{rule} see adapter_path in the launch file.")


def _copy_rows(source: Path, target: Path, start_s: float, end_s: float) -> None:
    """Copy the rows of a step log that start between `start_s` and `end_s`."""
    head, *lines = source.read_text().splitlines()
    starts = [float(line.partition(",")[0] or "nan") for line in lines]
    kept = [line for line, start in zip(lines, starts, strict=True) if start_s <= start < end_s]
    write_text(target, "\n".join([head, *kept]) + "\n")
