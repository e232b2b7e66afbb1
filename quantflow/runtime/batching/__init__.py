"""Requests that run together on one model; `engine.py` says how."""

from quantflow.runtime.batching.engine import Engine, EngineCounters
from quantflow.runtime.batching.limits import BatchLimits
from quantflow.runtime.batching.request import (
    BatchRequest,
    FinishReason,
    PromptToken,
    TokenEvent,
    TokenLogprob,
    TokenMask,
)
from quantflow.runtime.batching.stream import RequestTimes, Stream

__all__ = [
    "BatchLimits",
    "BatchRequest",
    "Engine",
    "EngineCounters",
    "FinishReason",
    "PromptToken",
    "RequestTimes",
    "Stream",
    "TokenEvent",
    "TokenLogprob",
    "TokenMask",
]
