"""Transformers' modules over a cache with a slot for each row: rows run together, in few shapes.

A slot holds the keys and values of a row from column 0 on, however long the others are. Prompts
are padded on the left; attention reads the prompt alone, and what it makes goes into the slots. A
step reads the first slots, each up to its own row's token. One more slot takes what padding makes.

Tensors of a step stay where they are, since a captured graph reads them there.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from quantflow.core.kv import KVScales
from quantflow.models.graph import text_config
from quantflow.runtime import static_shapes
from quantflow.runtime.artifact import Artifact

PROMPT, STEP = "prompt", "step"
Shape = tuple[str, int, int]  # kind, rows, columns of the ids
Step = Callable[[], Tensor]


def why_not(artifact: Artifact) -> str | None:
    """Why rows of an artifact cannot run together, in a sentence; None when they can."""
    config: Any = artifact.config
    if config.model_type == "bloom" or getattr(config, "alibi", False):
        return "ALiBi is made from a mask of columns, and each row has columns of its own"
    return static_shapes.why_not(artifact)


class _Layer(StaticLayer):  # type: ignore[misc]
    """Keys and values of all slots in a layer.

    Attributes:
        prompt: attention reads what was written alone; else the first slots.
        slots, places: slot and column of each token, [B, T].
        scales: measured scales that keys and values are rounded with.
    """

    prompt = True
    slots: Tensor
    places: Tensor
    scales: KVScales | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, kv heads, T, D]; those that are attended to."""
        if self.scales is not None:
            key_states = self.scales.round_keys(key_states)
            value_states = self.scales.round_values(value_states)
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            held.transpose(1, 2)[self.slots, self.places] = states.transpose(1, 2)
        if self.prompt:
            return key_states, value_states
        rows = len(key_states)
        return self.keys[:rows], self.values[:rows]

    def get_seq_length(self) -> int:
        """Zero: positions and mask are given."""
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Inputs:
    """The tensors of a shape.

    Attributes:
        ids, slots, places, positions: [B, T] int64.
        mask: what is added to the scores, [B, 1, T, columns].
    """

    ids: Tensor
    slots: Tensor
    places: Tensor
    positions: Tensor
    mask: Tensor


class RowModules:
    """A Hugging Face causal LM, quantized or not, that computes several rows at once.

    Attributes:
        vocab_size, positions, device: as in `quantflow.runtime.decoder.Decoder`.
        slot_tokens: tokens of a slot.
        shapes: shape -> forwards in it.
        compilations: how often the forward was compiled; None: it is not.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        kv_scales: Sequence[KVScales] = (),
        prompt_options: dict[str, Any] | None = None,
        compilations: Callable[[], int] | None = None,
        capture: Callable[[Step], Step] | None = None,
    ) -> None:
        """Take a model; it has no slots until `begin`.

        Args:
            model: model on the device, called as transformers' models are.
            device: device where it runs.
            kv_scales: scales of each layer.
            prompt_options: what its forward is told beside a prompt.
            compilations: how often it was compiled; None: it is not.
            capture: captures a step, as `quantflow.backends.cuda.capture` does; None: the model
                captures shapes itself, or nothing does.
        """
        config: Any = text_config(model.config)
        self.vocab_size: int = config.vocab_size
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        self.device, self.compilations = device, compilations
        self.shapes = Counter[Shape]()
        self.slot_tokens = 0
        self._model, self._scales, self._capture = model, kv_scales, capture
        self._prompt_options = prompt_options or {}
        self._dtype = next(model.parameters()).dtype
        self._steps: dict[int, _Inputs] = {}  # by their rows
        self._captured: dict[int, Step] = {}
        self._sizes: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token, found by running one."""
        if not self._sizes:
            cache = DynamicCache(config=self._model.config)
            ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            # the class' own forward: what is compiled or captured has no such shape
            run = cast(Any, type(self._model)).forward
            run(self._model, input_ids=ids, past_key_values=cache, use_cache=True)
            self._sizes = [(layer.keys, layer.values) for layer in cache.layers]
        return sum(part.nbytes for pair in self._sizes for part in pair)

    @torch.inference_mode()
    def begin(self, *, slots: int, tokens: int) -> None:
        """Take memory for `slots` rows of `tokens` tokens, and for what padding makes."""
        self.token_bytes()
        self.slot_tokens, self._padding_slot = tokens, slots
        self._cache = StaticCache(config=self._model.config, max_cache_len=tokens)
        self._cache.layers = [_Layer(max_cache_len=tokens) for _ in self._cache.layers]
        scales: Sequence[KVScales | None] = self._scales or [None] * len(self._sizes)
        for layer, sizes, of_layer in zip(self._cache.layers, self._sizes, scales, strict=True):
            layer.keys, layer.values = (
                part.new_zeros(slots + 1, part.shape[1], tokens, part.shape[3]) for part in sizes
            )
            layer.is_initialized, layer.scales = True, of_layer

    @torch.inference_mode()
    def prompts(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        *,
        rows: int,
        columns: int,
        every: bool = False,
    ) -> Tensor:
        """Compute prompts, padded to `rows` and `columns`, into empty slots.

        Args:
            prompts: tokens of each prompt.
            slots: slot of each.
            rows: rows of the batch.
            columns: columns of the batch.
            every: logits of all positions are wanted, not of the last alone.

        Returns:
            [rows, 1 or columns, V] float32, on the CPU; a prompt's last token is the last column.
        """
        inputs = self._of_shape(PROMPT, rows, columns)
        ids = torch.zeros(rows, columns, dtype=torch.int64)
        padding = torch.full((rows, 1), columns - 1)  # rows without a prompt have one token
        held = torch.full((rows, 1), self._padding_slot)
        for row, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
            ids[row, columns - len(prompt) :] = torch.tensor(prompt)
            padding[row], held[row] = columns - len(prompt), slot
        every_column = torch.arange(columns)
        places = every_column - padding  # [rows, columns]
        seen = (every_column <= every_column[:, None]) & (every_column >= padding[:, :, None])
        inputs.ids.copy_(ids)
        inputs.slots.copy_(held.where(places >= 0, torch.tensor(self._padding_slot)))
        inputs.places.copy_(places.clamp(min=0))
        inputs.positions.copy_(places.clamp(min=0))
        inputs.mask.copy_(self._added(seen[:, None]))
        self.shapes[PROMPT, rows, columns] += 1
        options = {"logits_to_keep": 0 if every else 1, **self._prompt_options}
        logits: Tensor = self._run(inputs, prompt=True, **options)
        return logits.float().cpu()

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], places: Sequence[int], *, rows: int) -> Tensor:
        """Compute a token of each of the first `rows` slots.

        Args:
            tokens: token of each slot; any one where a slot is empty.
            places: its position; 0 where a slot is empty.
            rows: rows of the batch, at least as many as there are tokens.

        Returns:
            [rows, V] float32, on the CPU.
        """
        inputs = self._of_shape(STEP, rows, 1)
        more = [0] * (rows - len(tokens))
        at = torch.tensor([*places, *more])[:, None]
        inputs.ids.copy_(torch.tensor([*tokens, *more])[:, None])
        inputs.slots.copy_(torch.arange(rows)[:, None])
        inputs.places.copy_(at)
        inputs.positions.copy_(at)
        seen = torch.arange(self.slot_tokens) <= at
        inputs.mask.copy_(self._added(seen[:, None, None]))
        self.shapes[STEP, rows, 1] += 1

        def run() -> Tensor:
            return self._run(inputs, prompt=False, logits_to_keep=1)

        if self._capture is None:
            return run()[:, -1].float().cpu()
        if rows not in self._captured:
            self._captured[rows] = self._capture(run)
        return self._captured[rows]()[:, -1].float().cpu()

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Copy a slot's keys and values into another."""
        for layer in self._cache.layers:
            for held in (layer.keys, layer.values):
                held[target].copy_(held[source])

    def _run(self, inputs: _Inputs, *, prompt: bool, **options: Any) -> Tensor:
        for layer in self._cache.layers:
            layer.prompt, layer.slots, layer.places = prompt, inputs.slots, inputs.places
        logits: Tensor = self._model(
            input_ids=inputs.ids,
            attention_mask=inputs.mask,
            position_ids=inputs.positions,
            past_key_values=self._cache,
            use_cache=True,
            **options,
        ).logits
        return logits

    def _of_shape(self, kind: str, rows: int, columns: int) -> _Inputs:
        """The tensors of a shape.

        Those of a step are made once. Those of a prompt are not kept: there are as many lengths as
        clients send, and a mask has the square of one.
        """
        inputs = self._steps.get(rows) if kind == STEP else None
        if inputs is None:
            ids, slots, places, positions = torch.zeros(
                4, rows, columns, dtype=torch.int64, device=self.device
            )
            read = columns if kind == PROMPT else self.slot_tokens
            mask = torch.zeros(rows, 1, columns, read, dtype=self._dtype, device=self.device)
            inputs = _Inputs(ids=ids, slots=slots, places=places, positions=positions, mask=mask)
            if kind == STEP:
                self._steps[rows] = inputs
        return inputs

    def _added(self, seen: Tensor) -> Tensor:
        """What a mask adds to scores: nothing where a column is seen, else the least number."""
        return torch.zeros(seen.shape, dtype=self._dtype).masked_fill(
            ~seen, torch.finfo(self._dtype).min
        )
