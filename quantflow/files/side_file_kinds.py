"""The files of a source beside config.json and weights: those that come along, and the others.

Tokenizers, processors and templates have files of many names, so a file is copied unless it is of a
kind that no runtime reads:

| stays behind                  | examples                                                         |
|-------------------------------|------------------------------------------------------------------|
| weights in another form       | pytorch_model.bin, consolidated.safetensors with its params.json |
| a sub-folder with weights     | original/, onnx/, checkpoint-500/                                |
| a description of quantization | hf_quant_config.json, recipe.yaml                                |
| text and pictures for people  | README.md, since an artifact has a card of its own               |
| records of a training, data   | trainer_state.json, events.out.tfevents.*, train.parquet         |
| code that nothing names       | train.py, where no configuration has an `auto_map`               |
| a file that is too large      | over 64 MB, unless it has a tokenizer's name                     |
| a link out of the folder      | notes.json -> /home/somebody/secrets.json                        |
| a name that is not portable   | with control characters or a backslash                           |
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from quantflow.units import size

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LARGEST = 64_000_000  # bytes of a file whose name says nothing; a tokenizer.json may have more
TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"}
    | {"tekken.json", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model"}
)
UNREAD = "not part of what a runtime loads"
_TOO_LARGE = f"over {size(LARGEST)}"
_ODD = "a name that is not portable"
_SHOWN = 5  # names of one reason in a line
_KNOWN = re.compile(
    r"(tokenizer.*\.(json|model)|vocab\.(json|txt)|merges\.txt|special_tokens_map\.json"
    r"|added_tokens\.json|chat_template.*|generation_config\.json|.*processor_config\.json"
    r"|LICEN[CS]E.*|NOTICE.*|USE_POLICY.*|tekken\.json|tiktoken\.model|spiece\.model"
    r"|sentencepiece\.bpe\.model)"
)
_WEIGHTS = (
    *PICKLES,
    *(".safetensors", ".gguf", ".onnx", ".onnx_data", ".msgpack", ".h5", ".ot", ".npz", ".npy"),
    *(".pdparams", ".tflite", ".mlmodel"),
)
_UNREAD = re.compile(
    # another form of the weights
    r"consolidated.*|params\.json|.*\.index(\.\w+)?\.json|openvino_.*"
    # quantization, and what is written here
    r"|hf_quant_config\.json|quantize_config\.json|quant_config\.json|recipe\.yaml"
    r"|quantflow\.json|DONE\.json|README(\..*)?"
    # text, pictures
    r"|.*\.(md|rst|txt|html|pdf|ipynb|png|jpe?g|gif|webp|svg|mp4)"
    # training, data
    r"|(train|trainer|training|eval|all)(_\w+)?\.json|events\.out\.tfevents\..*"
    r"|.*\.(parquet|arrow|jsonl|csv|tsv|log|sh|zip|tar|gz|tgz|7z)"
)
_WORDS = re.compile(r".*(vocab|merges).*\.txt")  # a tokenizer's, though it is text
_CODE = re.compile(  # the names by which transformers keeps code
    r"(configuration|modeling|tokenization|feature_extraction|((image|video|audio)_)?processing)"
    r"_\w+\.py"
)


@dataclass(frozen=True, kw_only=True)
class SideFiles:
    """What becomes of files beside config.json and weights.

    Attributes:
        copied: names, sorted.
        left: name -> reason why it stays behind, sorted.
    """

    copied: tuple[str, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        """What stays behind in a line; what git and the source's own card need is not in it."""
        names = defaultdict(list)
        for name, why in self.left.items():
            first, inside, _ = name.partition("/")
            if not first.startswith((".git", "README")):
                names[why].append(first + inside)
        shown = []
        for why, found in names.items():
            unique = list(dict.fromkeys(found))
            more = f" and {len(unique) - _SHOWN} more" if len(unique) > _SHOWN else ""
            shown.append(f"{', '.join(unique[:_SHOWN])}{more} ({why})")
        return "; ".join(shown)


def has_known_name(name: str) -> bool:
    """Whether a file has the name of a tokenizer's file, a template, a licence or the like."""
    return _KNOWN.fullmatch(name) is not None


def side_files(files: Mapping[str, int], *, code: bool) -> SideFiles:
    """Files sorted by their names and sizes alone.

    Args:
        files: name -> bytes, with `/` between sub-folders.
        code: whether a configuration among them names code, so that every Python file may be read.
    """
    foreign = {name.partition("/")[0] for name in files if "/" in name and _is_weights(name)}
    reasons = {
        name: _why_left(name, nbytes, foreign=foreign, code=code)
        for name, nbytes in sorted(files.items())
    }
    return SideFiles(
        copied=tuple(name for name, why in reasons.items() if why is None),
        left={name: why for name, why in reasons.items() if why is not None},
    )


def _why_left(name: str, nbytes: int, *, foreign: set[str], code: bool) -> str | None:
    """The reason why a file stays behind; None where it is copied."""
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or {"", "..", "."} & set(parts):
        return _ODD
    if _KNOWN.fullmatch(name):
        return None
    last = parts[-1]
    unread = (
        any(part.startswith(".") for part in parts)
        or (len(parts) > 1 and parts[0] in {*foreign, "original"})
        or _is_weights(name)
        or (_UNREAD.fullmatch(last) is not None and _WORDS.fullmatch(last) is None)
        or (last.endswith(".py") and not code and _CODE.fullmatch(last) is None)
    )
    if unread:
        return UNREAD
    return _TOO_LARGE if nbytes > LARGEST else None


def _is_weights(name: str) -> bool:
    return PurePosixPath(name).suffix in _WEIGHTS
