"""A Hugging Face folder as data: its config, its files, and the place of each tensor.

No weight is read. Weights are safetensors. The one pickle that is accepted as weights is a
low-precision checkpoint, as IPEX takes it, through a restricted reader (torch_file.py). Its linears
have the names of IPEX 2.1, of GPTQ or AWQ (IPEX 2.3 and later), or those that the folder's
quantization config tells with IPEX's own keys (`KEYS`).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantflow.errors import InputError
from quantflow.files.canonical import read_json
from quantflow.files.folder import Listing, list_files, refuse_small_pointer
from quantflow.files.renamed_config import in_todays_words
from quantflow.files.safetensors_header import SplitTensor, TensorInfo, read_header
from quantflow.files.sealed import SealedFolder
from quantflow.files.side_file_kinds import PICKLES, has_known_name
from quantflow.files.torch_file import read_torch_header

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
# quant_method, ending of the file
LOW_PRECISION = ("ipex-low-precision", ".pt")
# keys of IPEX's checkpoint config -> what a linear's tensors are called without one
KEYS = {
    "weight_key": "packed_weight",
    "scale_key": "scale",
    "zero_point_key": "packed_zp",
    "bias_key": "bias",
}
_OPTIONAL = frozenset({"zero_point_key", "bias_key"})
_GPTQ_WEIGHT = ".qweight"  # of GPTQ and AWQ alike
# a tensor of neural-compressor 3 beside each weight, for Gaudi alone -> what it is
_SCALE_ON_GAUDI = (".scale_bf16_to_fp8", "the scale of inputs that Gaudi rounds to FP8 (W4A8)")
LOW_PRECISION_NAME = "gptq_checkpoint_g"  # beginning of the name that other programs give the file
# Numbers of config.json that decide how much is allocated before a tensor is read. None may be
# larger than the number of tensors (_COUNTS) or of bytes (_SIZES).
_COUNTS = frozenset(
    {
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "n_layers",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
    }
)
_SIZES = frozenset(
    {
        "hidden_size",
        "n_embd",
        "d_model",
        "intermediate_size",
        "moe_intermediate_size",
        "ffn_dim",
        "n_inner",
        "vocab_size",
    }
    | {
        "num_attention_heads",
        "num_key_value_heads",
        "n_head",
        "num_heads",
        "head_dim",
        "rotary_dim",
    }
)
_SLACK = 100  # a few layers without tensors pass here: a later check names the missing tensor
_CONVERT = (
    'convert it to safetensors: python -c "from transformers import AutoModelForCausalLM as M, '
    "AutoTokenizer as T; [X.from_pretrained('{folder}').save_pretrained('{folder}-safetensors') "
    'for X in (M, T)]"'
)
_ORIGINAL = (
    "give the model in its original precision, or what `quantflow export {folder} -o DIR --format "
    "dequantized` makes"
)
_OF_MODELOPT = "hf_quant_config.json"
# What no program packs weights into. Old checkpoints store masks and positions as integers.
_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})
_MASKS = frozenset({"bias", "masked_bias"})
# what stands beside quantized weights, or beside float ones that are rounded already
_BESIDE_WEIGHTS = re.compile(
    r"(weight|input|output|q|k|v)_(global_)?(scale(_inv|_2)?|zero_point)|scales|qweight|qzeros"
    r"|weight_(packed|shape|g_idx|format)|g_idx|(nested_)?(absmax|quant_map)|SCB"
)
QUANTIZATION = "quantization_config"
_OLDER = "compression_config"  # key of older compressed-tensors
_NESTED = "text_config"  # config of the language model in a model that reads images or sound
# files of old AutoGPTQ and AutoAWQ -> quant_method
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True, kw_only=True)
class UnusedTensor:
    """A tensor that no module of the model has.

    Attributes:
        file: name of its file.
        info: its place there.
        reason: a phrase that says what it is.
    """

    file: str
    info: TensorInfo
    reason: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder in Hugging Face's layout whose headers were all read and checked.

    Attributes:
        folder: path of the folder.
        config: content of config.json, in transformers' words.
        tensors: tensor name -> (file name, place in that file).
        files: every regular file of the folder, sorted, with `/` between sub-folders.
        quantized_by: place of the folder's quantization config (see `quantization_in`), which
            `config` then has as `quantization_config`; empty where there is none.
        left_over: place of a quantization config beside weights that are not quantized, which
            `config` then lacks; empty where there is none.
        index: the index that says which shard holds a tensor; empty where one file holds all.
        rewritten: config.json itself has other words; see `quantflow.files.renamed_config`.
        notes: what the folder holds and nobody reads, a sentence each, where a reader may have
            expected otherwise.
        whole: tensors of the files that are read in parts: name -> (file name, place, names of the
            parts among `tensors`).
        unused: tensors of the files that no module has, by name; they are not among `tensors`.
            Artifacts get a copy, and nothing else reads them.
        stored_names: name among `tensors` or `whole` -> name in the file, where the two differ.
        sealed: what `folder` is the private copy of, where bytes are compared with hashes; the copy
            is there as long as this is.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, tuple[str, TensorInfo]]
    files: tuple[str, ...]
    quantized_by: str = ""
    left_over: str = ""
    index: str = ""
    rewritten: bool = False
    notes: tuple[str, ...] = ()
    whole: dict[str, tuple[str, TensorInfo, tuple[str, ...]]] = field(default_factory=dict)
    unused: dict[str, UnusedTensor] = field(default_factory=dict)
    stored_names: dict[str, str] = field(default_factory=dict)
    sealed: SealedFolder | None = field(default=None, compare=False, repr=False)

    def renamed(self, spelled: Mapping[str, str]) -> "Checkpoint":
        """The checkpoint with other names of some tensors.

        Args:
            spelled: name -> the other name.

        Raises:
            InputError: two tensors would have one name.
        """
        tensors: dict[str, tuple[str, TensorInfo]] = {}
        stored_names: dict[str, str] = {}
        for name, (file, info) in self.tensors.items():
            own = spelled.get(name, name)
            if own in tensors:
                raise InputError(
                    f"{name}: is {own}, as {stored_names.get(own, own)} is", "remove one of the two"
                )
            tensors[own] = (file, replace(info, name=own))
            if own != (stored := self.stored_names.get(name, name)):
                stored_names[own] = stored
        return replace(self, tensors=tensors, stored_names=stored_names)

    def without(self, reasons: Mapping[str, str]) -> "Checkpoint":
        """The checkpoint with some of its tensors apart, as `unused`.

        Args:
            reasons: name of a tensor -> what it is.
        """
        unused = {
            name: UnusedTensor(file=file, info=info, reason=reasons[name])
            for name, (file, info) in self.tensors.items()
            if name in reasons
        }
        kept = {name: place for name, place in self.tensors.items() if name not in reasons}
        return replace(self, tensors=kept, unused={**self.unused, **unused})

    def in_parts(self, split: Mapping[str, SplitTensor]) -> "Checkpoint":
        """The checkpoint with the parts of some tensors in the place of these.

        Args:
            split: tensor name -> its split; a name that is not there is ignored.

        Raises:
            InputError: a tensor has another shape.
        """
        tensors = {}
        whole = dict(self.whole)
        for name, (file, info) in self.tensors.items():
            if name not in split:
                tensors[name] = (file, info)
                continue
            if (own := split[name].of(info.shape)) is None:
                shapes = f"{list(info.shape)} in {file}, {list(split[name].shape)} by {CONFIG}"
                raise InputError(
                    f"{name}: {shapes}", "check that config.json belongs to these weights"
                )
            parts = [part.of(info) for part in own.parts]
            tensors |= {part.name: (file, part) for part in parts}
            whole[name] = (file, info, tuple(part.name for part in parts))
        return replace(self, tensors=tensors, whole=whole)

    def with_seal(self, sealed: SealedFolder) -> "Checkpoint":
        """The checkpoint of a private copy, whose tensors are read from the files themselves."""
        tensors = {
            name: (file, replace(info, sealed=sealed.files.get(file)))
            for name, (file, info) in self.tensors.items()
        }
        return replace(self, tensors=tensors, sealed=sealed)

    @property
    def located(self) -> dict[str, tuple[str, TensorInfo]]:
        """Tensor name -> (file name, place in it), as the files have it: none in parts."""
        inside = {part for *_, names in self.whole.values() for part in names}
        kept = {name: place for name, place in self.tensors.items() if name not in inside}
        kept |= {name: (file, info) for name, (file, info, _) in self.whole.items()}
        return kept | {name: (one.file, one.info) for name, one in self.unused.items()}

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Tensor name -> place, without the file name."""
        return {name: info for name, (_, info) in self.tensors.items()}

    @property
    def infos_with_unused(self) -> dict[str, TensorInfo]:
        """`infos`, and the places of the unused tensors."""
        return self.infos | {name: one.info for name, one in self.unused.items()}

    @property
    def shards(self) -> tuple[str, ...]:
        """The files that hold the tensors, sorted."""
        return tuple(sorted({file for file, _ in self.located.values()}))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a model folder: config.json, and model.safetensors or an index with its shards.

    Links to files are followed, since a hub snapshot consists of them. A quantized model is opened
    too; `refuse_quantized` refuses it. The weights are those that transformers takes:
    model.safetensors, else the index with its shards. A file that nobody reads decides nothing,
    whatever is wrong with it.

    Raises:
        InputError: the folder is missing or empty, has no config.json, only pickled weights, a
            damaged or missing shard, or an index that contradicts its shards or leads out of the
            folder; a file that is read is a git-LFS pointer or no regular file.
    """
    listing = list_files(folder, follow_links=True)
    if not listing.files and not listing.others:
        raise InputError(
            f"{folder}: the folder is empty", "give the folder of a Hugging Face model"
        )
    _refuse_special(folder, listing, CONFIG)
    if CONFIG not in listing.files:
        raise InputError(f"{folder}: no {CONFIG}", "give the folder of a Hugging Face model")
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise InputError(
            f"{folder / CONFIG}: not a table", "restore the file from where it came from"
        )
    today = in_todays_words(config, place=str(folder / CONFIG))
    config = config if today is None else today
    for name in (*listing.others, *listing.files):
        if has_known_name(name):
            _refuse_special(folder, listing, name)
            refuse_small_pointer(folder / name)
    table, where = quantization_in(folder, config)
    index, notes, spelled = "", list[str](), dict[str, str]()
    single = low_precision_file(folder, listing.files, config=config)
    if single is not None:
        infos = read_torch_header(folder / single)
        tensors = {name: (single, info) for name, info in infos.items()}
        if _has_keys(table) or not any(name.endswith(_GPTQ_WEIGHT) for name in infos):
            keys = _stated_keys(table, place=f"{folder}/{where}") if _has_keys(table) else KEYS
            spelled = names_by_keys(infos, keys, place=f"{folder / single}")
            # the file itself does not name its quant_method
            table, where = {"quant_method": LOW_PRECISION[0]}, single
    elif _has_index(folder, listing):
        index = INDEX
        tensors, notes = _read_shards(folder, listing)
    else:
        tensors = _read_single(folder, listing)
        if INDEX in listing.files:
            notes = [f"{SINGLE} holds the weights; {INDEX} does not name it and is not read"]
    if not tensors:
        raise InputError(f"{folder}: its safetensors hold no tensor", "download the model again")
    used = {file for file, _ in tensors.values()}
    stray = [name for name in listing.files if _SHARD.fullmatch(name) and name not in used]
    if stray:
        more = f" and {len(stray) - 1} more" if stray[1:] else ""
        notes.append(f"{stray[0]}{more}: no index names such a shard, it is not read")
    says = where or (_OF_MODELOPT if _OF_MODELOPT in listing.files else "")
    left_over = says if says and single is None and _is_plain(tensors) else ""
    if left_over:
        notes.append(
            f"{left_over} says that the model is quantized, every weight is stored in floating "
            "point: left over, it is neither read nor copied"
        )
        config, where = _plain_config(config), ""
    elif where:
        config = _without(config, table)
    _check_numbers(config, tensors, str(folder / CONFIG))
    found = Checkpoint(
        folder=folder,
        config=config,
        tensors=tensors,
        files=listing.files,
        quantized_by=where,
        left_over=left_over,
        index=index,
        rewritten=today is not None,
        notes=tuple(notes),
    )
    found = found.renamed(spelled) if spelled else found
    ending, what = _SCALE_ON_GAUDI
    apart = {name: what for name in tensors if name.endswith(ending)}
    return found.without(apart) if apart else found


def _refuse_special(folder: Path, listing: Listing, name: str) -> None:
    """Refuse a broken link, a FIFO or the like in the place of a file that is read.

    Raises:
        InputError: it is no regular file.
    """
    if name in listing.others:
        raise InputError(
            f"{folder / name}: not a regular file", "remove it or put the file itself there"
        )


def is_quantized(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder's weights are quantized; what says so beside plain floats is left over.

    Args:
        folder: folder of a model.
        config: content of its config.json.

    Raises:
        InputError: as `open_checkpoint`, of a folder whose configuration says so.
    """
    if quantization_in(folder, config)[1]:
        return bool(open_checkpoint(folder).quantized_by)
    return low_precision_file(folder, config=config) is not None


def _is_plain(tensors: Mapping[str, tuple[str, TensorInfo]]) -> bool:
    """Whether no tensor is a quantized weight, or stands beside one.

    Fake quantized weights are floats as well; their scales say what they are.
    """
    for name, (_, info) in tensors.items():
        leaf = name.rpartition(".")[2]
        if _BESIDE_WEIGHTS.fullmatch(leaf) or (info.dtype not in _PLAIN and leaf not in _MASKS):
            return False
    return True


def _plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json without any quantization config."""
    cleaned = _without(config, None)
    del cleaned[QUANTIZATION]
    return cleaned


def quantization_in(folder: Path, config: Mapping[str, Any]) -> tuple[Any, str]:
    """The quantization config of a folder and its place; (None, "") without one.

    The first of these that exists counts:

    1. config.json: `quantization_config`
    2. config.json: `compression_config` (older compressed-tensors)
    3. config.json: `text_config.quantization_config`
    4. quantize_config.json (AutoGPTQ)
    5. quant_config.json (AutoAWQ)

    Args:
        folder: folder of a model.
        config: content of its config.json.

    Raises:
        InputError: such a file is no table.
    """
    nested = config.get(_NESTED)
    tables = {
        QUANTIZATION: config.get(QUANTIZATION),
        _OLDER: config.get(_OLDER),
        f"{_NESTED}.{QUANTIZATION}": nested.get(QUANTIZATION) if isinstance(nested, dict) else None,
    }
    for key, table in tables.items():
        if table is not None:
            older = key == _OLDER and isinstance(table, dict)
            return {
                "quant_method": "compressed-tensors",
                **table,
            } if older else table, f"{CONFIG}: {key}"
    for name, method in _BESIDE.items():
        if not (folder / name).is_file():
            continue
        table = read_json(folder / name)
        if not isinstance(table, dict):
            raise InputError(f"{folder / name}: not a table", "download the folder again")
        # an old AutoGPTQ key for the marlin layout
        packing = {"checkpoint_format": "marlin"} if table.get("is_marlin_format") else {}
        return {"quant_method": method, **table, **packing}, name
    return None, ""


def is_of_text(checkpoint: Checkpoint) -> bool:
    """Whether a folder's quantization config concerns its language model alone."""
    return checkpoint.quantized_by.startswith(f"{CONFIG}: {_NESTED}.")


def _without(config: Mapping[str, Any], table: Any) -> dict[str, Any]:
    """The config.json with its quantization config in the usual place, and nowhere else."""
    cleaned = {key: value for key, value in config.items() if key != _OLDER} | {QUANTIZATION: table}
    nested = config.get(_NESTED)
    if isinstance(nested, dict):
        cleaned[_NESTED] = {key: value for key, value in nested.items() if key != QUANTIZATION}
    return cleaned


def low_precision_file(
    folder: Path, files: Sequence[str] | None = None, *, config: Mapping[str, Any]
) -> str | None:
    """The low-precision checkpoint that holds a folder's weights; None without one.

    Args:
        folder: folder of a model.
        files: its files, where they were listed before.
        config: content of its config.json.

    Raises:
        InputError: a file with such a name is damaged, or its pickle asks for more than tensors.
    """
    names = [path.name for path in folder.iterdir()] if files is None else files
    candidates = [name for name in names if name.endswith(LOW_PRECISION[1]) and "/" not in name]
    if {SINGLE, INDEX} & set(names) or len(candidates) != 1:
        return None
    try:
        infos = read_torch_header(folder / candidates[0])
    except InputError:
        if candidates[0].startswith(LOW_PRECISION_NAME):
            raise
        return None
    table, where = quantization_in(folder, config)
    if _has_keys(table):
        return candidates[0]
    endings = (f".{KEYS['weight_key']}", *([_GPTQ_WEIGHT] if where else []))
    return candidates[0] if any(name.endswith(endings) for name in infos) else None


def _has_keys(table: Any) -> bool:
    """Whether a quantization config tells names of tensors in the words of IPEX."""
    return isinstance(table, dict) and not KEYS.keys().isdisjoint(table)


def _stated_keys(table: Mapping[str, Any], *, place: str) -> dict[str, str]:
    """IPEX's checkpoint config in a quantization config: what the tensors of a linear are called.

    Raises:
        InputError: a key is missing, no name, or names what another one names.
    """
    keys = {key: table.get(key, KEYS[key] if key in _OPTIONAL else None) for key in KEYS}
    for key, name in keys.items():
        if not isinstance(name, str) or not name:
            raise InputError(
                f"{place}: {key} is {name!r}, the name of a linear's tensor is needed",
                f"write {', '.join(KEYS)}; the last two may be left out",
            )
    if len(set(keys.values())) < len(keys):
        raise InputError(
            f"{place}: {', '.join(keys)} are {', '.join(keys.values())}, four names are needed",
            "give each tensor a name of its own",
        )
    return keys


def names_by_keys(names: Collection[str], keys: Mapping[str, str], *, place: str) -> dict[str, str]:
    """Names of a low-precision checkpoint's tensors -> their names with `KEYS`, of each linear.

    A linear is what has a weight and a scale by `keys`, and zero points where these have another
    name than in `KEYS`. Other tensors keep their names, so that quantized weights may be called
    `weight` as those of norms are.

    Args:
        names: every tensor of the file.
        keys: key of `KEYS` -> what the tensor is called in the file.
        place: the file, for messages.

    Raises:
        InputError: nothing has such names.
    """
    weight = f".{keys['weight_key']}"
    beside = [keys["scale_key"]]
    if keys["zero_point_key"] != KEYS["zero_point_key"]:
        beside.append(keys["zero_point_key"])
    known = frozenset(names)
    linears = [
        linear
        for linear in (name.removesuffix(weight) for name in names if name.endswith(weight))
        if all(f"{linear}.{leaf}" in known for leaf in beside)
    ]
    if not linears:
        raise InputError(
            f"{place}: no linear has tensors {', '.join([weight[1:], *beside])}, the names of its "
            "checkpoint and of its config do not match",
            f"put the names into quant_config.json: {', '.join(KEYS)}",
        )
    return {
        f"{linear}.{keys[key]}": f"{linear}.{leaf}"
        for linear in linears
        for key, leaf in KEYS.items()
    }


def _check_numbers(
    table: dict[str, Any], tensors: dict[str, tuple[str, TensorInfo]], path: str
) -> None:
    """Refuse numbers of a config, and of the tables in it, that the weights cannot have.

    Raises:
        InputError: a number is impossible; the message names the key.
    """
    nbytes = sum(info.nbytes for _, info in tensors.values())
    for key, value in table.items():
        if isinstance(value, dict):
            _check_numbers(value, tensors, path)
        elif type(value) is int:
            limit, what = (
                (len(tensors) + _SLACK, "tensors at most")
                if key in _COUNTS
                else (nbytes, "bytes of weights")
            )
            if key in _COUNTS | _SIZES and not 0 <= value <= limit:
                raise InputError(
                    f"{path}: {key} is {str(value)[:40]}, 0 to {limit} are possible ({what})",
                    "restore the file from its source",
                )
            if not -(2**63) <= value < 2**63:
                raise InputError(
                    f"{path}: {key} has more than 64 bits", "restore the file from its source"
                )


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Refuse a source that is quantized already.

    Raises:
        InputError: the folder has a quantization config (the message names its place and
            quant_method), or ModelOpt's file, beside weights that are no plain floats.
    """
    quantization = checkpoint.config.get(QUANTIZATION)
    if quantization is not None:
        method = (
            quantization.get("quant_method", "unknown")
            if isinstance(quantization, dict)
            else "unknown"
        )
        raise InputError(
            f"{checkpoint.folder}/{checkpoint.quantized_by} says the model is quantized already, "
            f"with {method}",
            _ORIGINAL.format(folder=checkpoint.folder),
        )
    if _OF_MODELOPT in checkpoint.files and not _is_plain(checkpoint.tensors):
        raise InputError(
            f"{checkpoint.folder / _OF_MODELOPT}: the model is quantized already, and "
            "config.json does not say so",
            "to run it, put the file's content into config.json, as `quantization_config` with "
            "`quant_method` modelopt",
        )


def _read_single(folder: Path, listing: Listing) -> dict[str, tuple[str, TensorInfo]]:
    files = listing.files
    if SINGLE in files:
        return {name: (SINGLE, info) for name, info in read_header(folder / SINGLE)[0].items()}
    for name in (SINGLE, INDEX):
        _refuse_special(folder, listing, name)
    shards = [name for name in files if _SHARD.fullmatch(name)]
    if shards:
        raise InputError(
            f"{folder / shards[0]}: a shard without {INDEX}", f"download {INDEX} as well"
        )
    pickles = [name for name in files if name.endswith(PICKLES)]
    if pickles:
        refuse_small_pointer(folder / pickles[0])
        raise InputError(
            f"{folder / pickles[0]}: pickled weights and no safetensors",
            _CONVERT.format(folder=folder),
        )
    others = [name for name in files if name.endswith(".safetensors")]
    raise InputError(
        f"{folder}: no {SINGLE} and no {INDEX}" + (f", only {', '.join(others)}" if others else ""),
        "give a folder that holds the model's weights"
        + (" in the form that transformers reads" if others else ""),
    )


def _has_index(folder: Path, listing: Listing) -> bool:
    """Whether the weights are those of the index: alone, or with model.safetensors among them."""
    if INDEX not in listing.files:
        return False
    return SINGLE not in listing.files or SINGLE in _read_map(folder).values()


def _read_shards(
    folder: Path, listing: Listing
) -> tuple[dict[str, tuple[str, TensorInfo]], list[str]]:
    """The tensors of the shards, and notes on those that the index and the shards disagree about.

    The index says which of several copies counts. A loader reads all of a shard, so a tensor that
    the index leaves out is taken too.
    """
    weight_map = _read_index(folder, listing)
    index = folder / INDEX
    tensors: dict[str, tuple[str, TensorInfo]] = {}
    copies, unnamed = [], []
    for shard in sorted(set(weight_map.values())):
        for name, info in read_header(folder / shard)[0].items():
            if weight_map.get(name, shard) != shard:
                copies.append((name, shard))
                continue
            if name in tensors:
                raise InputError(
                    f"{folder}: tensor {name!r} in two shards, {tensors[name][0]} and {shard}, and "
                    f"{INDEX} names none of them",
                    "name one in the index, or remove the other",
                )
            if name not in weight_map:
                unnamed.append((name, shard))
            tensors[name] = (shard, info)
    for name, shard in weight_map.items():
        if name not in tensors:
            cause = f"{index}: names {name!r} in {shard}, which does not hold it"
            raise InputError(cause, "restore the index or the shard")
    notes = []
    if copies:
        name, shard = copies[0]
        more = f" and {len(copies) - 1} more" if copies[1:] else ""
        notes.append(f"{name}{more} of {shard}: not read, {INDEX} names {weight_map[name]} for it")
    if unnamed:
        name, shard = unnamed[0]
        more = f" and {len(unnamed) - 1} more" if unnamed[1:] else ""
        notes.append(f"{name}{more} of {shard}: {INDEX} does not name it, it is read all the same")
    return tensors, notes


def _read_map(folder: Path) -> dict[str, str]:
    """The index's weight_map."""
    path = folder / INDEX
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise InputError(f"{path}: weight_map is not a table of file names", "restore the index")
    return weight_map


def _read_index(folder: Path, listing: Listing) -> dict[str, str]:
    """The index's weight_map, each value of which names a file of this folder itself."""
    path, weight_map = folder / INDEX, _read_map(folder)
    for shard in sorted(set(weight_map.values())):
        if "/" in shard or "\\" in shard or "\0" in shard or shard in {"", ".", ".."}:
            raise InputError(
                f"{path}: {shard[:80]!r} leads out of the folder",
                "get the model from a source you trust",
            )
        if not shard.endswith(".safetensors"):
            raise InputError(
                f"{path}: {shard[:80]!r} is not a safetensors file", "restore the index"
            )
        _refuse_special(folder, listing, shard)
        if shard not in listing.files:
            raise InputError(
                f"{path}: names {shard[:80]!r}, which is missing", "download the missing shard"
            )
    return weight_map
