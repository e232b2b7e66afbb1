"""Limits of the requests that a server takes on at once, with TGI's names and arithmetic."""

from dataclasses import dataclass, replace

from quantflow.runtime.generate_job import require
from quantflow.runtime.request_limits import check_limits

_POSITIONS = 4096  # positions of a model that has no bound of its own
_ROWS = 64  # running rows
_MORE = 50  # prompt tokens in prefill at once beyond the longest prompt: TGI's number


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Limits of an engine, and of the server before it. None leaves a number to `resolved`.

    Attributes:
        max_input_tokens: tokens of a prompt. None: max_total_tokens - 1, or
            max_batch_prefill_tokens.
        max_total_tokens: tokens of a prompt and its continuation. None: the positions of the model,
            and the room of the pool.
        max_batch_prefill_tokens: prompt tokens of all rows that are still in prefill. None:
            max_batch_size x max_input_tokens where a batch size is given, else max_input_tokens +
            50; at most the batch's tokens.
        max_batch_total_tokens: prompt + max_new_tokens of all running rows, reserved when a row
            joins, so that a row that runs can always end. None: the room of the pool.
        max_batch_size: running rows. None: 64.
        max_concurrent_requests: waiting and running ones; one more is refused at once.
        waiting_served_ratio: a running batch is joined when waiting >= ratio * running. 0, the
            default, joins at once: prompts are computed beside decoding here and do not stop it.
            TGI has 1.2, later 0.3.
        max_waiting_tokens: steps since rows last joined after which others join all the same.
        queue_threshold_ms: None, the default: rows of a class join in the order in which they came.
            Otherwise the shortest prompt first, and rows that have waited for so long before all
            others, among them the shortest first too.
        prefill_chunk: prompt tokens that one step computes beside the decoding rows.
        max_best_of, max_stop_sequences, max_client_batch_size: limits of one request; the engine
            checks the stop strings.
    """

    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    max_batch_size: int | None = None
    max_concurrent_requests: int = 128
    waiting_served_ratio: float = 0.0
    max_waiting_tokens: int = 20
    queue_threshold_ms: int | None = None
    prefill_chunk: int = 256
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_client_batch_size: int = 4

    def __post_init__(self) -> None:
        """Refuse numbers that contradict each other, as TGI's launcher does.

        Raises:
            UsageError: naming them.
        """
        check_limits(vars(self))

    @property
    def rows(self) -> int:
        """Rows that run at once."""
        return _ROWS if self.max_batch_size is None else self.max_batch_size

    def resolved(self, *, positions: int | None, pool_tokens: int) -> "BatchLimits":
        """Limits without None.

        Args:
            positions: positions of the model; None: unbounded.
            pool_tokens: tokens whose keys and values there is room for.

        Raises:
            UsageError: more tokens than the model has positions or the pool room.
        """
        total = (
            self.max_batch_total_tokens if self.max_batch_total_tokens is not None else pool_tokens
        )
        require(
            total <= pool_tokens,
            f"max_batch_total_tokens={total}: the pool holds {pool_tokens}",
            "give it more memory",
        )
        most = min(total, positions if positions is not None else _POSITIONS)
        whole = self.max_total_tokens if self.max_total_tokens is not None else most
        bound = (
            f"max_total_tokens={whole}: the model has {positions} positions, the batch {total} "
            "tokens"
        )
        require(whole <= (positions or whole) and whole <= total, bound, "use fewer")
        prefill = self.max_batch_prefill_tokens
        room = max(1, whole - 1) if prefill is None else min(prefill, max(1, whole - 1))
        longest = self.max_input_tokens if self.max_input_tokens is not None else room
        together = longest + _MORE if self.max_batch_size is None else self.max_batch_size * longest
        return replace(
            self,
            max_batch_size=self.rows,
            max_input_tokens=longest,
            max_total_tokens=whole,
            max_batch_prefill_tokens=min(total, together) if prefill is None else prefill,
            max_batch_total_tokens=total,
        )
