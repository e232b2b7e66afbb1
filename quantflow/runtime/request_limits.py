"""The order that the limits of requests keep, for an engine and for settings before it.

Nothing here imports torch, so that a command line refuses a contradiction before a model is loaded.
"""

from collections.abc import Mapping

from quantflow.errors import UsageError

_LEAST = dict.fromkeys(
    ("waiting_served_ratio", "max_waiting_tokens", "queue_threshold_ms", "max_top_n_tokens"), 0
)
# the smaller, the larger, whether they must differ
_ORDER = (
    ("max_input_tokens", "max_total_tokens", True),
    ("max_input_tokens", "max_batch_prefill_tokens", False),
    ("max_batch_prefill_tokens", "max_batch_total_tokens", False),
    ("max_total_tokens", "max_batch_total_tokens", False),
)


def check_limits(limits: Mapping[str, float | None]) -> None:
    """Refuse limits that let nothing through, or contradict each other, as TGI's launcher does.

    Args:
        limits: name of a limit -> its value; None is not decided yet.

    Raises:
        UsageError: naming them.
    """
    shown = {name: value for name, value in limits.items() if value is not None}
    for name, value in shown.items():
        if not value >= (least := _LEAST.get(name, 1)):  # NaN too
            raise UsageError(f"{name}={value}", f"use {least} or more")
    for small, large, strict in _ORDER:
        if small in shown and large in shown and shown[small] > shown[large] - strict:
            sign = "<" if strict else "<="
            raise UsageError(
                f"{small}={shown[small]}, {large}={shown[large]}",
                f"keep {small} {sign} {large}",
            )
