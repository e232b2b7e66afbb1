"""The state that all routes share: models, service, metrics, and the content of /info."""

import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from quantflow import __version__
from quantflow.plain_text import plain
from quantflow.server.generation import Answer, Service
from quantflow.server.metrics import Metrics
from quantflow.server.models import Models
from quantflow.server.request_log import current_request
from quantflow.server.settings import ServeJob


@dataclass(frozen=True, kw_only=True)
class Site:
    """A server's state.

    Attributes:
        job: settings of the server.
        models: models by name.
        service: service that answers prompts.
        metrics: counts and times of all requests.
        started: time of the start, in seconds since 1970.
    """

    job: ServeJob
    models: Models
    service: Service
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))

    @asynccontextmanager
    async def answering(self, begin: Callable[[], Awaitable[Answer]]) -> AsyncIterator[Answer]:
        """Yield an answer whose rows end with the block; count the answer or its refusal.

        Args:
            begin: function that submits the rows.

        Raises:
            Refused: see `Service.answer` and `Answer.pieces`.
        """
        with self.metrics.asked() as counted:
            answer = await begin()
            answer.counted = counted
        with answer:
            yield answer
            counted.answered(answer)

    def info(self) -> dict[str, Any]:
        """The content of /info, under TGI's keys."""
        model, limits = self.models.first, self.models.first.engine.limits
        source = model.manifest.get("source", {})
        counters = model.engine.counters()
        return {
            "model_id": model.name,
            "model_sha": model.manifest.get("digest"),
            "model_dtype": self.job.dtype,
            "model_device_type": model.loaded.decoder.device.type,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": limits.max_concurrent_requests,
            "max_best_of": limits.max_best_of,
            "max_stop_sequences": self.job.limits.max_stop_sequences,
            "max_top_n_tokens": self.job.limits.max_top_n_tokens,
            "max_input_length": limits.max_input_tokens,
            "max_input_tokens": limits.max_input_tokens,
            "max_total_tokens": limits.max_total_tokens,
            "waiting_served_ratio": limits.waiting_served_ratio,
            "max_batch_total_tokens": limits.max_batch_total_tokens,
            "max_batch_prefill_tokens": limits.max_batch_prefill_tokens,
            "max_waiting_tokens": limits.max_waiting_tokens,
            "max_batch_size": limits.max_batch_size,
            "validation_workers": self.job.limits.validation_workers,
            "max_client_batch_size": limits.max_client_batch_size,
            "router": "quantflow",
            "version": __version__,
            "sha": None,
            "docker_label": None,
            "model_source": source.get("name"),
            "decoder": model.loaded.name,
            "ranks": self.job.ranks,
            "generation_config": self.job.generation_config,
            "generation_defaults": model.defaults.values(),
            "speculation": None
            if model.speculation is None
            else {
                "method": model.speculation,
                "proposed": counters.proposed_tokens,
                "taken": counters.taken_tokens,
                "acceptance": counters.taken_tokens / counters.proposed_tokens
                if counters.proposed_tokens
                else None,
            },
        }

    def log_exception(self, error: BaseException) -> None:
        """Print an unexpected error for the server's operator; no client sees it."""
        request = current_request()
        before = "" if request is None else f"request {request.id}:\n"
        told = before + "".join(traceback.format_exception(error))
        print(plain(told), end="", file=sys.stderr, flush=True)
