"""Released repositories as tiny random models under the names that they really have.

An entry (released/NAME.json) holds facts of one repository on the hub; `write_repository` makes a
folder of them. transformers builds the model of `config` with the sizes of `scaled`, and its
tensors get the released names:

    names      the patterns of all released tensor names, with {} for each number: what is made
               must have exactly these, or `Untrue` is raised
    renames    pairs of regular expression and replacement, from what transformers writes today
    extra      tensors that transformers does not write, in one of these forms:
               {"copy": [pattern, replacement]}   every tensor whose name matches, once more
               {"name": N, "like": OTHER}         the shape of another tensor
               {"name": N, "same": OTHER}         the values of another tensor
               {"name": N, "shape": [...]}        with "value": random, tril or a number
               and "layers": K where {} of the name stands for 0 to K - 1
    absent     patterns of what transformers writes and the repository does not hold
    dtype      of all tensors; `dtypes` has pattern -> dtype where some differ
    quantized  {"layout": ..., "linears": PATTERN, "but": PATTERN}: see _released_layouts
    built_as   the type of transformers that has these modules, where it does not know the
               repository's own; `none` where no type has them, and all tensors are in `extra`
    written    `modules` where the repository holds the names of transformers' modules, which merge
               what other repositories of the type hold one by one
    layout     safetensors, shards (with an index), bin, or bin shards
    files      side files: a name, or [name, content]
    tokenizer  `none` where no tokenizer.json is released, `sentencepiece` where tokenizer.model
               stands alone; else the example's is put there
    refused    {"says": PATTERN, "by": [commands]} where it has to be refused
    needs      the same with "module", where it is refused only if that is not installed
"""

import base64
import json
import re
import shutil
import string
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from _released_layouts import LAYOUTS
from _synthetic import TOKENIZER_FILES
from _tiny_models import EXAMPLE, auto_class, randomize_
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

ENTRIES = Path(__file__).resolve().parent / "released"
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}
SHARDS = 2
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 123456789\n"
# names of Mistral's own files, from those of transformers
CONSOLIDATED = (
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"^model\.", ""),
    (r"self_attn\.([qkvo])_proj", r"attention.w\1"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.down_proj", "feed_forward.w2"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
)

Entry = dict[str, Any]
Tensors = dict[str, torch.Tensor]


class Untrue(Exception):
    """An entry whose tensors are not called as the released ones are."""


def entries(only: list[str] | None = None) -> dict[str, Entry]:
    """File name -> entry, of those whose repository or file contains one of the texts."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(ENTRIES.glob("*.json"))}
    return {
        name: entry
        for name, entry in found.items()
        if not only or any(text.lower() in f"{name} {entry['repository']}".lower() for text in only)
    }


def tiny_config(entry: Entry) -> dict[str, Any]:
    """The released config.json with the small sizes in it."""
    return _merged(entry["config"], entry["scaled"])


def write_repository(entry: Entry, folder: Path, *, plain: Path | None = None) -> None:
    """Write the folder of an entry.

    Args:
        entry: the facts.
        folder: becomes the repository.
        plain: becomes the same model as transformers writes it, not quantized.

    Raises:
        Untrue: its tensors are not called as the released ones are.
    """
    folder.mkdir(parents=True)
    config = tiny_config(entry)
    with tempfile.TemporaryDirectory() as build:
        tensors = _built(entry, Path(build), plain=plain)
    tensors = _released(tensors, entry)
    quantized = entry.get("quantized")
    if quantized:
        tensors = LAYOUTS[quantized["layout"]](tensors, quantized)
    _check_names(tensors, entry)
    _write_weights(tensors, entry.get("layout", "safetensors"), folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if entry.get("tokenizer") == "sentencepiece":
        _write_sentencepiece(folder)
    elif entry.get("tokenizer") != "none":
        for name in TOKENIZER_FILES:
            shutil.copyfile(EXAMPLE / name, folder / name)
    for item in entry.get("files", ()):
        _write_side_file(item, folder, tensors, config)


def normal(name: str) -> str:
    """A tensor's name with {} for each number that stands between dots."""
    return re.sub(r"(?:(?<=\.)|^)\d+(?=\.|$)", "{}", name)


def _merged(config: Mapping[str, Any], scaled: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `scaled` in place of those of `config`, in nested mappings too."""
    found = dict(config)
    for key, value in scaled.items():
        old = found.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        found[key] = _merged(old, value) if both and old is not None else value
    return found


def read_config(config: dict[str, Any], folder: Path) -> PreTrainedConfig:
    """What transformers makes of a config.json that is not quantized."""
    written = {key: value for key, value in config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(written))
    found: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    return found


def _class_of(config: dict[str, Any], own: PreTrainedConfig) -> Any:
    """The class that a config.json names, or the one that its type stands for."""
    for name in config.get("architectures", ()):
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return auto_class(own)._model_mapping[type(own)]


def _built(entry: Entry, build: Path, *, plain: Path | None) -> Tensors:
    """The tensors that transformers writes of a random model."""
    config, kind = tiny_config(entry), entry.get("built_as")
    if kind == "none":
        return {}
    if kind:
        config = {**config, "model_type": kind, "architectures": [], "auto_map": {}}
    own = read_config(config, build)
    torch.manual_seed(0)
    model = _class_of(config, own)._from_config(own, dtype=torch.float32)
    randomize_(model)
    saved = plain or build / "saved"
    model.save_pretrained(saved, save_original_format=entry.get("written") != "modules")
    if plain:
        for name in TOKENIZER_FILES:
            shutil.copyfile(EXAMPLE / name, plain / name)
    files = sorted(saved.glob("*.safetensors"))
    return {name: value for path in files for name, value in load_file(path).items()}


def _released(tensors: Tensors, entry: Entry) -> Tensors:
    """Tensors under their released names, with those that no module has."""
    found: Tensors = {}
    for name, value in tensors.items():
        for pattern, text in entry.get("renames", ()):
            name = re.sub(pattern, text, name)
        found[name] = value
    for extra in entry.get("extra", ()):
        found |= _extra(extra, found)
    absent = entry.get("absent", ())
    found = {
        name: value
        for name, value in found.items()
        if not any(re.search(pattern, name) for pattern in absent)
    }
    return {name: value.to(_dtype_of(name, value, entry)) for name, value in found.items()}


def _dtype_of(name: str, value: torch.Tensor, entry: Entry) -> torch.dtype:
    if not value.is_floating_point():
        return value.dtype
    for pattern, dtype in entry.get("dtypes", {}).items():
        if re.search(pattern, name):
            return DTYPES[dtype]
    return DTYPES[entry["dtype"]]


def _extra(extra: dict[str, Any], tensors: Tensors) -> Tensors:
    if "copy" in extra:
        pattern, text = extra["copy"]
        return {
            re.sub(pattern, text, name): value.clone()
            for name, value in tensors.items()
            if re.search(pattern, name)
        }
    if "same" in extra:
        return {extra["name"]: tensors[extra["same"]].clone()}
    shape = extra["shape"] if "shape" in extra else tensors[extra["like"]].shape
    value = _value(shape, extra.get("value"))
    if extra.get("dtype"):
        value = value.to(DTYPES[extra["dtype"]])
    names = [extra["name"].replace("{}", str(i), 1) for i in range(extra.get("layers", 1))]
    return {name: value.clone() for name in names}


def _value(shape: Any, value: str | float | None) -> torch.Tensor:
    if value == "tril":
        return torch.ones(*shape).tril()
    if isinstance(value, int | float):
        return torch.full(tuple(shape), float(value))
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 0.1


def _check_names(tensors: Tensors, entry: Entry) -> None:
    found, told = {normal(name) for name in tensors}, set(entry["names"])
    if found != told:
        raise Untrue(
            f"{entry['repository']}: made but not released: {sorted(found - told)}; "
            f"released but not made: {sorted(told - found)}"
        )


def _write_weights(tensors: Tensors, layout: str, folder: Path) -> None:
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    kind, _, shards = layout.partition(" ")
    binary = kind == "bin"
    stem, suffix = ("pytorch_model", "bin") if binary else ("model", "safetensors")
    names, count = sorted(tensors), SHARDS if "shards" in (kind, shards) else 1
    parts = [names[i * len(names) // count : (i + 1) * len(names) // count] for i in range(count)]
    places: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        file = f"{stem}.{suffix}" if count == 1 else f"{stem}-{i:05}-of-{count:05}.{suffix}"
        own = {name: tensors[name] for name in part}
        if binary:
            torch.save(own, folder / file)
        else:
            save_file(own, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    if count > 1:
        size = sum(value.numel() * value.element_size() for value in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_side_file(
    item: str | list[Any], folder: Path, tensors: Tensors, config: dict[str, Any]
) -> None:
    """Write a file beside the weights; one without a content gets one that suits its name."""
    name, content = (item, None) if isinstance(item, str) else item
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
    elif name == "consolidated.safetensors":
        save_file(_consolidated(tensors), path, metadata={"format": "pt"})
    elif name == "pytorch_model.bin":
        torch.save(tensors, path)
    elif path.suffix in (".onnx", ".pth", ".gguf", ".h5", ".msgpack", ".ot"):
        path.write_text(POINTER.format("0" * 64))  # as a clone without its large files has it
    elif name == "tekken.json":
        path.write_text(json.dumps(_tekken()))
    elif name == "params.json":
        path.write_text(json.dumps({"dim": config.get("hidden_size"), "vocab_size": 4096}))
    elif path.suffix == ".json":
        path.write_text("{}\n")
    elif path.suffix == ".jinja":
        path.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    else:
        path.write_text(f"{name}\n")


def _write_sentencepiece(folder: Path) -> None:
    """A SentencePiece model of bytes and letters, and no tokenizer.json beside it."""
    model = sentencepiece.ModelProto()
    specials = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
    letters = [(letter, 1) for letter in "\u2581" + string.printable[:94]]
    for piece, kind in (*specials, *((f"<0x{i:02X}>", 6) for i in range(256)), *letters):
        model.pieces.add(piece=piece, score=-float(len(model.pieces)), type=kind)
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id = 0, 1, 2
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    told = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    told |= {"unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=2) + "\n")


def _tekken() -> dict[str, Any]:
    """Mistral's own tokenizer file, with all bytes and no merges."""
    specials = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    marks = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(specials)
    ]
    vocabulary = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None}
        for i in range(256)
    ]
    config = {
        "pattern": r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(vocabulary),
        "default_vocab_size": len(vocabulary) + len(marks),
        "default_num_special_tokens": len(marks),
        "version": "v11",
    }
    return {"config": config, "vocab": vocabulary, "special_tokens": marks}


def _consolidated(tensors: Tensors) -> Tensors:
    found = {}
    for name, value in tensors.items():
        for pattern, text in CONSOLIDATED:
            name = re.sub(pattern, text, name)
        found[name] = value.clone()
    return found
