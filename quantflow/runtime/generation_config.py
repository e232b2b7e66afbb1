"""The model's own words on generation: the tokens that end a text, and how tokens are drawn.

Three files name end tokens, and a fine-tune often changes one of them: a model in ChatML has the
`<|im_end|>` of its tokenizer beside its base model's generation_config.json. So all three count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from transformers import PreTrainedTokenizerBase

from quantflow.errors import InputError, UsageError
from quantflow.files.canonical import read_json
from quantflow.files.checkpoint import CONFIG, Checkpoint
from quantflow.files.schema import Between, check
from quantflow.models.token_ids import special_ids
from quantflow.runtime.generate_job import Rules, Sampling

GENERATION = "generation_config.json"
TokenId = Annotated[int, Between(0, 2**31 - 1)]


class _Ends(TypedDict):
    """The keys of config.json and generation_config.json that name end tokens."""

    eos_token_id: NotRequired[TokenId | list[TokenId] | None]


class _Drawing(TypedDict):
    """The keys of generation_config.json that say how tokens are drawn."""

    do_sample: NotRequired[bool | None]
    temperature: NotRequired[float | None]
    top_k: NotRequired[int | None]
    top_p: NotRequired[float | None]
    min_p: NotRequired[float | None]
    typical_p: NotRequired[float | None]
    repetition_penalty: NotRequired[float | None]


def end_tokens(
    checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None, *, vocab_size: int
) -> tuple[int, ...]:
    """The tokens that end a text: those of generation_config.json, config.json and the tokenizer.

    A lone number of config.json that the tokenizer has as ordinary text is left out where another
    file names an end. It is a default that was never set: a Llama configuration says 2, which is
    `#` in GPT-2's vocabulary.

    Args:
        checkpoint: folder of the model.
        tokenizer: its tokenizer, or None.
        vocab_size: tokens that the model can choose; it never chooses larger ones.

    Raises:
        InputError: the values in a file are no numbers of tokens.
    """
    config, file = checkpoint.config, checkpoint.folder / CONFIG
    own = _ids(config, file)
    if not own and isinstance(inner := config.get("text_config"), dict):  # beside a vision model
        own = _ids(inner, file)
    maker = _ids(_table(checkpoint), checkpoint.folder / GENERATION)
    named = None if tokenizer is None else tokenizer.eos_token_id
    others = maker + ([] if named is None else [int(named)])
    if tokenizer is not None and others and len(own) == 1:
        added = {*special_ids(tokenizer), *getattr(tokenizer, "added_tokens_decoder", ()), *others}
        own = [token for token in own if token in added]
    ids = dict.fromkeys([*maker, *own, *others])
    return tuple(token for token in ids if token < vocab_size)


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """The maker's settings of sampling, which count where a request says nothing.

    Attributes:
        temperature, top_k, top_p, min_p, typical_p: as in `Sampling`; temperature 0 is greedy. None
            where the maker says nothing, or "all tokens".
        repetition_penalty: as in `Rules`, or None.
        samples: whether the maker says that tokens are drawn.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    samples: bool = False

    def values(self) -> dict[str, float]:
        """The numbers that the maker gives, by name."""
        names = [field.name for field in fields(self) if field.name != "samples"]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def filters(self) -> dict[str, Any]:
        """The numbers of `Sampling`."""
        return {n: value for n, value in self.values().items() if n != "repetition_penalty"}


NO_DEFAULTS = SamplingDefaults()


def sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """The settings of sampling in generation_config.json.

    Where it says `do_sample: false`, its temperature and filters are remains that transformers does
    not read either.

    Raises:
        InputError: a value is outside its range.
    """
    table, where = _table(checkpoint), checkpoint.folder / GENERATION
    check(table, _Drawing, where=str(where))
    drawn = {
        name: value
        for name, off in _OFF.items()
        if (value := table.get(name)) is not None and value not in off
    }
    if table.get("do_sample") is False:
        drawn = {name: value for name, value in drawn.items() if name == "repetition_penalty"}
    defaults = SamplingDefaults(**drawn, samples=table.get("do_sample") is True)
    try:
        Sampling(**{n: v for n, v in defaults.filters().items() if (n, v) != ("temperature", 0)})
        Rules(repetition_penalty=defaults.repetition_penalty or 1.0)
    except UsageError as error:
        raise InputError(
            f"{where}: {error.cause}", "mend the file, or give --generation-config none"
        ) from error
    return defaults


# the values of each setting with which nothing is filtered
_OFF: Mapping[str, Sequence[float]] = {
    "temperature": (),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "repetition_penalty": (1,),
}


def _table(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """generation_config.json; empty where the model has none."""
    if GENERATION not in checkpoint.files:
        return {}
    content: Mapping[str, Any] = read_json(checkpoint.folder / GENERATION)
    return content


def _ids(table: Any, where: Path) -> list[int]:
    check(table, _Ends, where=str(where))
    ids = table.get("eos_token_id")
    return list(ids) if isinstance(ids, list) else [] if ids is None else [ids]
