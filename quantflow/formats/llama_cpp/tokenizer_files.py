"""A GGUF file's tokenizer as Hugging Face's files: the way back from `tokenizer` and `pieces`.

llama.cpp names the rule that splits a text before the merges. A name whose expression is not known
here is refused, since another would give other tokens. Of sentence pieces a GGUF has scores and no
merges: every way to make a token of two others becomes a merge, the best scores first.
transformers' own conversion from SentencePiece does the same.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from quantflow.errors import InputError, UnsupportedError
from quantflow.files import disk
from quantflow.formats.llama_cpp.gguf import Metadata
from quantflow.formats.llama_cpp.pieces import SPACE
from quantflow.formats.llama_cpp.tokenizer import DIGITS, PRE_TOKENIZERS
from quantflow.formats.llama_cpp.tokens import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_GIVEN = "tokenizer.ggml"
_CONVERT = "give the model's Hugging Face folder"
_DAMAGED = "download the file again"
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_TURNS_END = ("eot", "eom")  # tokens beside eos that end an answer
# Whether llama.cpp puts BOS before a text where the file does not say it.
_BOS_UNLESS_TOLD = {"llama": True, "llama-bpe": True}


def write_tokenizer(metadata: Metadata, folder: Path, path: Path, *, context: int) -> None:
    """Write a tokenizer's files into a folder.

    These are tokenizer.json, tokenizer_config.json, the chat template and generation_config.json.

    Args:
        metadata: metadata of the file.
        folder: folder that gets the files.
        path: the GGUF file, for messages.
        context: positions of the model.

    Raises:
        InputError: a field is missing, or no token has an id.
        UnsupportedError: a tokenizer that is not read.
    """
    texts, types = _field(metadata, "tokens", path), _field(metadata, "token_type", path)
    if len(texts) != len(types):
        raise InputError(f"{path}: {len(texts)} tokens and {len(types)} types of tokens", _DAMAGED)
    kind = _field(metadata, "model", path)
    if kind == "gpt2":
        pre = _field(metadata, "pre", path, "default")
        tokenizer = _byte_level(texts, types, _field(metadata, "merges", path), pre, path)
    elif kind == "llama":
        pre = kind
        scores = _field(metadata, "scores", path)
        prefix = _field(metadata, "add_space_prefix", path, True)
        tokenizer = _pieces(texts, types, scores, prefix=bool(prefix), path=path)
    else:
        cause = (
            f"{path}: tokenizer.ggml.model {kind!r}, read from GGUF are gpt2 (byte-level BPE) and "
            "llama (sentence pieces)"
        )
        raise UnsupportedError(cause, _CONVERT)
    ids = {name: _id(metadata, name, texts, path) for name in (*_SPECIAL, *_TURNS_END)}
    before = (
        ids["bos"]
        if _field(metadata, "add_bos_token", path, _BOS_UNLESS_TOLD.get(pre, False))
        else None
    )
    after = ids["eos"] if _field(metadata, "add_eos_token", path, False) else None
    tokenizer.post_processor = _around(texts, before, after, byte_level=kind == "gpt2")
    special_tokens = {
        word: texts[ids[name]] for name, word in _SPECIAL.items() if ids[name] is not None
    }
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        fast_tokenizer.chat_template = template[1]
    fast_tokenizer.save_pretrained(folder)
    ends = [ids[name] for name in ("eos", *_TURNS_END) if ids[name] is not None]
    generation = {"bos_token_id": ids["bos"], "eos_token_id": ends if len(ends) > 1 else ids["eos"]}
    generation["pad_token_id"] = ids["padding"]
    named = {key: value for key, value in generation.items() if value is not None}
    disk.write_file(folder / "generation_config.json", json.dumps(named, indent=1).encode())


def special_ids(metadata: Metadata, path: Path) -> dict[str, int]:
    """Ids of config.json that the file names: bos_token_id, eos_token_id, pad_token_id."""
    texts = _field(metadata, "tokens", path)
    ids = {f"{name}_token_id": _id(metadata, name, texts, path) for name in ("bos", "eos")}
    ids["pad_token_id"] = _id(metadata, "padding", texts, path)
    return {key: value for key, value in ids.items() if value is not None}


def _byte_level(
    texts: list[str], types: list[int], merges: list[str], pre: str, path: Path
) -> Tokenizer:
    """A byte-level BPE that splits text by the rule that llama.cpp calls `pre`.

    Raises:
        UnsupportedError: the name's expression is not known here.
    """
    keys = {name: key for key, name in PRE_TOKENIZERS.items()}
    if pre not in keys:
        raise UnsupportedError(
            f"{path}: tokenizer.ggml.pre {pre!r}, known are {', '.join(keys)}", _CONVERT
        )
    splits, own, whole = keys[pre]
    steps: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if expression == DIGITS
        else pre_tokenizers.Split(Regex(expression), behavior="isolated")
        for expression in splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    if any(merge.count(" ") != 1 for merge in merges):
        raise InputError(f"{path}: a merge is not two tokens with a space between", _DAMAGED)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    model = models.BPE(vocab=_vocabulary(texts, types, path), merges=pairs, ignore_merges=whole)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    _add(tokenizer, texts, types)
    return tokenizer


def _pieces(
    texts: list[str], types: list[int], scores: list[float], *, prefix: bool, path: Path
) -> Tokenizer:
    """A BPE over characters, with bytes for what the vocabulary lacks."""
    if len(scores) != len(texts):
        raise InputError(f"{path}: {len(texts)} tokens and {len(scores)} scores", _DAMAGED)
    vocabulary = _vocabulary(texts, types, path)
    normal = {
        text: index
        for index, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind == NORMAL
    }
    ways = []
    for text, index in normal.items():
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs = sorted(
            (pair for pair in cuts if pair[0] in normal and pair[1] in normal),
            key=lambda p: (normal[p[0]], p[1]),
        )
        ways += [(-scores[index], index, pair) for pair in pairs]
    # stable: the ways of a token stay together
    merges = [pair for _, _, pair in sorted(ways, key=lambda way: way[:2])]
    unknown = next((text for text, kind in zip(texts, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    marks: list[Any] = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), *marks] if prefix else marks
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    _add(tokenizer, texts, types)
    return tokenizer


def _vocabulary(texts: list[str], types: list[int], path: Path) -> dict[str, int]:
    """Id of each token, without the ids that only fill the embedding up.

    Raises:
        InputError: two ids have one text, or a type is unknown.
    """
    ids: dict[str, int] = {}
    for index, (text, kind) in enumerate(zip(texts, types, strict=True)):
        if kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE):
            raise InputError(f"{path}: token {index} has the unknown type {kind}", _DAMAGED)
        if kind == UNUSED:
            continue
        if text in ids:
            raise InputError(f"{path}: tokens {ids[text]} and {index} are both {text!r}", _DAMAGED)
        ids[text] = index
    return ids


def _add(tokenizer: Tokenizer, texts: list[str], types: list[int]) -> None:
    """Let a text be searched for tokens that are not made by merges."""
    for text, kind in zip(texts, types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(text, special=False, normalized=False)])


def _around(texts: list[str], before: int | None, after: int | None, *, byte_level: bool) -> Any:
    """The step that puts BOS and EOS around a text."""
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if byte_level else []
    if before is not None or after is not None:
        head, tail = ([] if index is None else [texts[index]] for index in (before, after))
        single = [*head, "$A", *tail]
        pair = [*single, *(f"{text}:1" for text in head), "$B:1", *(f"{text}:1" for text in tail)]
        named = [
            (texts[index], index) for index in dict.fromkeys((before, after)) if index is not None
        ]
        steps.append(processors.TemplateProcessing(single=single, pair=pair, special_tokens=named))
    return processors.Sequence(steps)


def _id(metadata: Metadata, name: str, texts: list[str], path: Path) -> int | None:
    value = metadata.get(f"{_GIVEN}.{name}_token_id", ("u32", None))[1]
    if value is not None and not (isinstance(value, int) and 0 <= value < len(texts)):
        raise InputError(
            f"{path}: {_GIVEN}.{name}_token_id is {value}, there are {len(texts)} tokens", _DAMAGED
        )
    return value


_NO = object()


def _field(metadata: Metadata, name: str, path: Path, default: Any = _NO) -> Any:
    if (field := metadata.get(f"{_GIVEN}.{name}")) is not None:
        return field[1]
    if default is _NO:
        raise InputError(
            f"{path}: no field {_GIVEN}.{name}",
            "give a file with a tokenizer, or the model's Hugging Face folder",
        )
    return default
