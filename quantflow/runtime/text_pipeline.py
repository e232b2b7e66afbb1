"""`quantflow.pipeline(ARTIFACT)`: a text-generation pipeline with the shapes of transformers' own.

    generator = pipeline("work/4-export")
    generator("def main(")                          [{"generated_text": "def main(self):..."}]
    generator(["def", "class"])                     [[{"generated_text": ...}], [{...}]]
    generator([{"role": "user", "content": "hi"}])  [{"generated_text": [..., {"role": ...}]}]

Prompts of a call run together on one engine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from quantflow.errors import InputError, UsageError
from quantflow.models.chat_form import goes_on
from quantflow.models.chat_template import chat_tokens
from quantflow.models.token_ids import tokens_of
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine, Stream
from quantflow.runtime.decoding.text import continuation
from quantflow.runtime.generate_job import GENERATION_CONFIGS, Rules, Sampling
from quantflow.runtime.generation_config import NO_DEFAULTS, sampling_defaults
from quantflow.runtime.load import load

Conversation = Sequence[Mapping[str, str]]
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_RULES = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
)


class TextGeneration:
    """An artifact that continues texts when it is called.

    `close`, or a `with` block, ends its engine.

    Attributes:
        tokenizer: tokenizer of the artifact.
    """

    def __init__(
        self,
        artifact: str | Path,
        *,
        backend: str = "auto",
        dtype: str = "float32",
        kv_cache: str = "auto",
        exact: bool = False,
        rounded_inputs: bool = False,
        kv_memory: int | None = None,
        generation_config: str = "auto",
    ) -> None:
        """Load an artifact.

        Args:
            artifact: folder of the artifact.
            backend: backend of its linears, as `quantflow.load` takes it.
            dtype: dtype of the tensors that are not quantized, float32 or bfloat16.
            kv_cache: kind of the KV cache, as `quantflow.load` takes it.
            exact: leave inputs as the schemes say, as for `quantflow.load`.
            rounded_inputs: round them, as for `quantflow.load`.
            kv_memory: bytes that keys and values may take; None: what is free.
            generation_config: `auto` draws as the model's generation_config.json says, where a call
                says nothing; `none` and `vllm` do not.

        Raises:
            QuantflowError: it cannot be loaded, or has no tokenizer.
        """
        if generation_config not in GENERATION_CONFIGS:
            raise UsageError(
                f"pipeline: generation_config {generation_config!r}",
                f"use one of {', '.join(GENERATION_CONFIGS)}",
            )
        weights: torch.dtype = getattr(torch, dtype)
        loaded = load(
            artifact,
            decoder="auto",
            backend=backend,
            dtype=weights,
            kv_cache=kv_cache,
            exact=exact,
            rounded_inputs=rounded_inputs,
        )
        if loaded.tokenizer is None:
            raise InputError(f"{artifact}: no tokenizer", "export it with its tokenizer's files")
        self.tokenizer = loaded.tokenizer
        self._ends = loaded.eos_token_ids
        self._defaults = (
            sampling_defaults(loaded.artifact.checkpoint)
            if generation_config == "auto"
            else NO_DEFAULTS
        )
        limits = BatchLimits(max_concurrent_requests=1 << 20, max_stop_sequences=1 << 10)
        self._engine = Engine(
            loaded.decoder, limits=limits, tokenizer=loaded.tokenizer, kv_memory=kv_memory
        )

    def __call__(
        self,
        inputs: str | Conversation | Sequence[str] | Sequence[Conversation],
        *,
        max_new_tokens: int = 256,
        do_sample: bool | None = None,
        num_return_sequences: int = 1,
        return_full_text: bool = True,
        stop_strings: str | Sequence[str] = (),
        continue_final_message: bool | None = None,
        seed: int = 0,
        **options: Any,
    ) -> list[Any]:
        """Continue one prompt or several.

        Args:
            inputs: a text, a conversation, or a list of these.
            max_new_tokens: tokens that are added at most.
            do_sample: draw tokens; None: where `options` say how, or the model's
                generation_config.json says that they are drawn.
            num_return_sequences: texts per prompt; above 1 they are drawn.
            return_full_text: a text begins with its prompt, a conversation with its messages.
            stop_strings: texts end with any of these.
            continue_final_message: whether the texts go on with a conversation's last message;
                None: where it is the assistant's.
            seed: seed of the first text; each further one counts on.
            options: `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`; `repetition_penalty`,
                `frequency_penalty`, `presence_penalty`, `no_repeat_ngram_size`, `min_new_tokens`;
                as in transformers.

        Returns:
            `[{"generated_text": ...}, ...]` of one prompt, a list of such lists of several.

        Raises:
            UsageError: an option that is unknown or outside its range, or a prompt that is too
                long.
            InputError: a conversation that the chat template refuses
                (quantflow.models.chat_template).
        """
        unknown = options.keys() - {*_SAMPLING, *_RULES}
        if unknown:
            raise UsageError(
                f"pipeline: {', '.join(sorted(unknown))}",
                f"options are {', '.join((*_SAMPLING, *_RULES))}",
            )
        drawn = {name: value for name in _SAMPLING if (value := options.get(name)) is not None}
        own = self._defaults
        samples = bool(drawn) or own.samples if do_sample is None else do_sample
        filters = own.filters()
        if filters.get("temperature") == 0:  # it takes the likeliest token
            samples, filters = bool(drawn) or bool(do_sample), {}
        if num_return_sequences < 1 or (num_return_sequences > 1 and not samples):
            raise UsageError(
                f"num_return_sequences={num_return_sequences}, do_sample={samples}",
                "sample, or ask for one",
            )
        asked = {name: options[name] for name in _RULES if name in options}
        rules = Rules(**{"repetition_penalty": own.repetition_penalty or 1.0, **asked})
        alone = isinstance(inputs, str) or bool(inputs and isinstance(inputs[0], Mapping))
        prompts: list[Any] = [inputs] if alone else list(inputs)
        continued = [
            not isinstance(prompt, str)
            and (goes_on(prompt) if continue_final_message is None else continue_final_message)
            for prompt in prompts
        ]
        rows = [self._ids(*pair) for pair in zip(prompts, continued, strict=True)]
        stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        streams: list[list[Stream]] = []
        try:
            for ids in rows:
                streams.append([])
                for _ in range(num_return_sequences):
                    sampling = Sampling(**{**filters, **drawn}, seed=seed) if samples else None
                    seed += 1
                    request = BatchRequest(
                        input_ids=ids,
                        max_new_tokens=max_new_tokens,
                        sampling=sampling,
                        rules=rules,
                        ends=self._ends,
                        stop=stops,
                    )
                    streams[-1].append(self._engine.submit(request))
            answers = [
                [
                    self._text(prompt, ids, one, full=return_full_text, continues=continues)
                    for one in several
                ]
                for prompt, ids, several, continues in zip(
                    prompts, rows, streams, continued, strict=True
                )
            ]
        finally:
            for several in streams:
                for one in several:
                    one.cancel()
        return answers[0] if alone else answers

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def __enter__(self) -> Self:
        """Begin a block that ends the engine."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _ids(self, prompt: str | Conversation, continues: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(tokens_of(self.tokenizer, prompt, where="pipeline"))
        if self.tokenizer.chat_template is None:
            raise UsageError(
                "pipeline: a conversation, but the tokenizer has no chat template", "give texts"
            )
        return tuple(
            chat_tokens(self.tokenizer, prompt, where="pipeline", answer=True, continues=continues)
        )

    def _text(
        self,
        prompt: str | Conversation,
        ids: tuple[int, ...],
        stream: Stream,
        *,
        full: bool,
        continues: bool,
    ) -> dict[str, Any]:
        tokens = []
        for event in stream:
            if event.error is not None:
                raise event.error
            if event.id is not None:
                tokens.append(event.id)
        text = continuation(self.tokenizer, ids, tokens, ends=self._ends)
        if isinstance(prompt, str):
            return {"generated_text": prompt + text if full else text}
        if not full:
            return {"generated_text": text}
        messages = [dict(message) for message in prompt]
        if continues:
            messages[-1]["content"] += text
        else:
            messages.append({"role": "assistant", "content": text})
        return {"generated_text": messages}


def pipeline(artifact: str | Path, **options: Any) -> TextGeneration:
    """A text-generation pipeline of an artifact; see `TextGeneration`."""
    return TextGeneration(artifact, **options)
