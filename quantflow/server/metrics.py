"""The content of /metrics: TGI's names with TGI's meaning, and the engine's own counters.

Counters have TGI's names, without `_total` behind them. The client library knows no such counters,
so their lines are written here.
"""

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType, TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from quantflow.runtime.batching import EngineCounters
from quantflow.server.errors import Refused

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = tuple(0.0001 * 1.5**power for power in range(40))  # TGI's buckets: 0.1 ms to 12 min
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # TGI's buckets of a batch
_TOKENS = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
    2048,
    4096,
    8192,
    16384,
    32768,
    65536,
    131072,
)
# Counts of an engine that grow, and those of one moment.
ENGINE_COUNTERS = MappingProxyType(
    {
        "submitted": "Rows that were submitted; each ends as finished, cancelled or failed.",
        "finished": "Rows that ended as they should.",
        "cancelled": "Rows that were cancelled, such as those of clients that left.",
        "failed": "Rows that the engine failed.",
        "steps": "Steps.",
        "busy_seconds": "Seconds of all steps.",
        "prompt_tokens": "Prompt tokens that were computed; those from shared blocks are not.",
        "generated_tokens": "Tokens that were generated.",
        "proposed_tokens": "Tokens that speculation proposed.",
        "taken_tokens": "Proposed tokens that the model chose too.",
        "pool_hit_tokens": "Prompt tokens that were taken from shared blocks.",
        "pool_asked_tokens": "Prompt tokens that shared blocks were looked up for.",
    }
)
ENGINE_GAUGES = MappingProxyType(
    {
        "waiting": "Rows of a model that wait.",
        "running": "Rows of a model that run.",
        "prefill_tokens": "Prompt tokens of running rows; max-batch-prefill-tokens bounds them.",
        "reserved_tokens": "Tokens that running rows may have; max-batch-total-tokens bounds them.",
        "step_seconds": "Seconds of the last step.",
        "last_batch_size": "Rows of the last step.",
        "pool_block_tokens": "Tokens of a block of the KV cache.",
        "pool_blocks": "Blocks of the KV cache.",
        "pool_used": "Blocks of running rows.",
        "pool_cached": "Blocks kept for prompts that begin alike; they are free for others.",
    }
)
REQUEST_COUNTERS = MappingProxyType(
    {
        "tgi_request_count": "Requests for text; each ends as success, failure or left.",
        "tgi_request_success": "Requests that were answered.",
        "tgi_request_failure": "Requests that were refused or failed, by kind of error.",
        "quantflow_request_left": "Requests whose client went away before the end of the answer.",
    }
)


class Metrics:
    """Counts and times of a server."""

    def __init__(self, counters: Callable[[], Sequence[tuple[str, EngineCounters]]]) -> None:
        """Begin at zero.

        Args:
            counters: function that returns name and counters of each loaded model.
        """
        self._registry = CollectorRegistry()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._first_token, self._between_tokens = Times(), Times()
        self._counters = counters
        self._registry.register(self)
        self._seconds = {
            name: Histogram(f"tgi_request_{name}", help, registry=self._registry, buckets=_SECONDS)
            for name, help in (
                ("duration", "Seconds from a request to the end of its answer."),
                ("validation_duration", "Seconds until a request was checked."),
                ("queue_duration", "Seconds that a request waited."),
                ("inference_duration", "Seconds that a request ran."),
                ("mean_time_per_token_duration", "Seconds of running per generated token."),
            )
        }
        self._tokens = {
            name: Histogram(f"tgi_request_{name}", help, registry=self._registry, buckets=_TOKENS)
            for name, help in (
                ("generated_tokens", "Tokens of an answer."),
                ("input_length", "Tokens of a prompt."),
                ("max_new_tokens", "Tokens that a request allowed."),
                ("skipped_tokens", "Prompt tokens taken from shared blocks."),
            )
        }

    def asked(self) -> "CountedRequest":
        """Count a request for text; the result counts how it ends."""
        self._counts["tgi_request_count", ""] += 1
        return CountedRequest(self)

    def refused(self, kind: str) -> None:
        """Count a request that was not answered."""
        self._counts["tgi_request_failure", kind] += 1

    def left(self) -> None:
        """Count a request whose client went away."""
        self._counts["quantflow_request_left", ""] += 1

    def answered(self, answer: Any) -> None:
        """Count an answer (`quantflow.server.generation.Answer`) with its times and tokens."""
        self._counts["tgi_request_success", ""] += 1
        timings = answer.timings
        generated = [len(row.pieces) for row in answer.rows]
        self._seconds["duration"].observe(timings.total)
        self._seconds["validation_duration"].observe(timings.validation)
        self._seconds["queue_duration"].observe(timings.queue)
        self._seconds["inference_duration"].observe(timings.inference)
        self._seconds["mean_time_per_token_duration"].observe(
            timings.inference / max(1, *generated)
        )
        self._tokens["input_length"].observe(len(answer.prompt))
        self._tokens["max_new_tokens"].observe(answer.new_tokens)
        self._tokens["skipped_tokens"].observe(answer.rows[0].stream.cached_tokens)
        for count in generated:
            self._tokens["generated_tokens"].observe(count)

    def read(self, answer: Any) -> None:
        """Count the times at which an answer's tokens came, also where it did not end."""
        for row in answer.rows:
            times = row.times
            if times:
                self._first_token.add(times[0] - answer.timings.begin)
            for before, after in pairwise(times):
                self._between_tokens.add(after - before)

    def text(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self._registry) + "".join(self._counter_lines()).encode()

    def collect(self) -> Iterator[Metric]:
        """Yield what is no counter, and is kept here or by the engines."""
        yield self._first_token.metric(
            "quantflow_time_to_first_token_seconds",
            "Seconds from a request to the first token of each of its texts.",
        )
        yield self._between_tokens.metric(
            "quantflow_inter_token_latency_seconds",
            "Seconds between one token of a text and the next, as they are sent.",
        )
        models = self._counters()
        yield _gauge(
            "tgi_queue_size", "Rows that wait.", sum(counters.waiting for _, counters in models)
        )
        yield _gauge(
            "tgi_batch_current_size",
            "Rows that run.",
            sum(counters.running for _, counters in models),
        )
        yield _batch_sizes(counters for _, counters in models)
        for name, help in ENGINE_GAUGES.items():
            family = GaugeMetricFamily(f"quantflow_engine_{name}", help, labels=["model"])
            for model, counters in models:
                family.add_metric([model], dict(_flat(counters))[name])
            yield family

    def _counter_lines(self) -> Iterator[str]:
        """Yield the lines of all counters."""
        for name, help in REQUEST_COUNTERS.items():
            kinds = sorted(kind for counted, kind in self._counts if counted == name)
            if name != "tgi_request_failure":
                kinds = [""]
            samples = [({"err": kind} if kind else {}, self._counts[name, kind]) for kind in kinds]
            yield from _counter(name, help, samples)
        models = [(model, dict(_flat(counters))) for model, counters in self._counters()]
        for name, help in ENGINE_COUNTERS.items():
            values = [({"model": model}, counters[name]) for model, counters in models]
            yield from _counter(f"quantflow_engine_{name}", help, values)


class CountedRequest:
    """A request among the counts, whose end is counted once.

    As a context manager it counts the end where the block ends with an error.
    """

    def __init__(self, metrics: Metrics) -> None:
        """Begin without an end."""
        self._metrics, self._ended = metrics, False

    def __enter__(self) -> Self:
        """The request."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Count the end, if the block ends with an error."""
        if error is not None:
            self.end(error)

    def answered(self, answer: Any) -> None:
        """Count an answer."""
        if not self._ended:
            self._ended = True
            self._metrics.read(answer)
            self._metrics.answered(answer)

    def end(self, error: BaseException | None, answer: Any = None) -> None:
        """Count the end of a request that was not answered whole.

        Args:
            error: why it ended; None, and what no `Exception` is, stand for a client that left.
            answer: answer so far.
        """
        if self._ended:
            return
        self._ended = True
        if answer is not None:
            self._metrics.read(answer)
        if isinstance(error, Refused):
            self._metrics.refused(error.kind)
        elif isinstance(error, Exception):
            self._metrics.refused("internal")
        else:
            self._metrics.left()


class Times:
    """A histogram of seconds, for counts of every token: an entry takes 0.2 us."""

    def __init__(self) -> None:
        """Begin without entries."""
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Add an entry."""
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def metric(self, name: str, help: str) -> Metric:
        """The histogram as Prometheus reads it."""
        names = [*map(floatToGoString, _SECONDS), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(name, help, buckets=buckets, sum_value=self._sum)


def _counter(
    name: str, help: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> Iterator[str]:
    """Yield the lines of a counter."""
    yield f"# HELP {name} {help}\n# TYPE {name} counter\n"
    for labels, value in samples:
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{shown}}} {float(value)}\n" if shown else f"{name} {float(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _batch_sizes(models: Iterable[EngineCounters]) -> Metric:
    """The histogram of requests per step, over all steps since the models were loaded."""
    steps: Counter[int] = Counter()
    for counters in models:
        steps.update(counters.batch_sizes)
    buckets = [
        (str(float(most)), float(sum(count for size, count in steps.items() if size <= most)))
        for most in _ROWS
    ]
    buckets.append(("+Inf", float(steps.total())))
    rows = float(sum(size * count for size, count in steps.items()))
    return HistogramMetricFamily(
        "tgi_batch_next_size", "Rows of a step.", buckets=buckets, sum_value=rows
    )


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=value)


def _flat(record: Any, before: str = "") -> Iterable[tuple[str, float]]:
    """Numbers of a record and of the records inside it, by name."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from _flat(value, f"{before}{field.name}_")
        elif isinstance(value, int | float):
            yield f"{before}{field.name}", value
