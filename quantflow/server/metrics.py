"""The content of /metrics: TGI's names with TGI's meaning, and the engine's own counters.

TGI's counters have no `_total` behind their names, so they are collected by hand; Prometheus reads
them as untyped, and `rate()` works on them as it does on TGI's.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily, Metric

from quantflow.runtime.batching import EngineCounters

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


class Metrics:
    """Counts and times of a server."""

    def __init__(self, counters: Callable[[], Sequence[tuple[str, EngineCounters]]]) -> None:
        """Begin at zero.

        Args:
            counters: function that returns name and counters of each loaded model.
        """
        self._registry = CollectorRegistry()
        self._counts: Counter[tuple[str, str]] = Counter()
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

    def asked(self) -> None:
        """Count a request that came."""
        self._counts["tgi_request_count", ""] += 1

    def refused(self, kind: str) -> None:
        """Count a request that was not answered."""
        self._counts["tgi_request_failure", kind] += 1

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

    def text(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the counts that are kept by hand and the engines' counters."""
        for name, help in (
            ("tgi_request_count", "Requests that came."),
            ("tgi_request_success", "Requests that were answered."),
            ("tgi_request_failure", "Requests that were not, by kind of error."),
        ):
            metric = Metric(name, help, "unknown")
            kinds = sorted(kind for counted, kind in self._counts if counted == name)
            for kind in kinds or ([""] if name != "tgi_request_failure" else []):
                metric.add_sample(name, {"err": kind} if kind else {}, self._counts[name, kind])
            yield metric
        models = self._counters()
        yield _gauge(
            "tgi_queue_size", "Requests that wait.", sum(counters.waiting for _, counters in models)
        )
        yield _gauge(
            "tgi_batch_current_size",
            "Requests that run.",
            sum(counters.running for _, counters in models),
        )
        yield _batch_sizes(counters for _, counters in models)
        for name in sorted({name for _, counters in models for name, _ in _flat(counters)}):
            family = GaugeMetricFamily(
                f"quantflow_engine_{name}", "As quantflow.runtime.batching says.", labels=["model"]
            )
            for model, counters in models:
                family.add_metric([model], dict(_flat(counters))[name])
            yield family


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
        "tgi_batch_next_size", "Requests of a step.", buckets=buckets, sum_value=rows
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
