"""What a GGUF file of a model or an artifact holds: the type of every tensor, and their places.

Linears that were quantized to llama.cpp's types have their blocks. The artifact's other matrices
get the types that llama.cpp's quantizer gives them: the head Q6_K, or Q5_K beside few bits, where
its rows fit, Q8_0 otherwise, the embedding the linears' usual type or one of more bits, or the
head's where the two are one. With a dtype, and for all other models, matrices have the chosen
dtype. Vectors (norms, biases) and routers have float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from quantflow.core.block_types import BLOCK_TYPES, SMALLER
from quantflow.core.scheme import MIXTURES
from quantflow.errors import UsageError
from quantflow.formats.llama_cpp import gguf
from quantflow.formats.llama_cpp.experts import FileTensor, file_tensors
from quantflow.formats.llama_cpp.metadata import ROPE_FACTORS, metadata, rope_factors
from quantflow.formats.llama_cpp.tokenizer import APPROXIMATE, vocabulary

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# by the linears' usual type, as llama.cpp's quantizer has it
_HEAD_USUALLY = "Q6_K"
_HEAD_TYPE = {
    "Q8_0": "Q8_0",
    **dict.fromkeys(("IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"), "Q5_K"),
}
# of a head whose rows are no whole blocks
_HEAD_SMALLER = "Q8_0"
# of the embedding, where it is not that of most linears
_EMBEDDING_TYPE = {
    "TQ1_0": "Q4_K",
    "TQ2_0": "Q4_K",
    "IQ3_XXS": "IQ3_S",
    "IQ2_S": "IQ3_S",
    "IQ2_XS": "Q2_K",
    "IQ2_XXS": "Q2_K",
}
# of keys that are transposed, which cannot stay in the blocks of their rows
_TRANSPOSED = "Q8_0"


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """The tensors that a file is made of, by their names in the source.

    Attributes:
        folder: folder with the tokenizer.
        config: transformers' configuration, without a quantization.
        shapes, dtypes: source name -> shape and dtype of the tensor as it is read; a dtype as
            safetensors names it.
        blocks: name of a weight -> llama.cpp's type that holds it as it was quantized, a key of
            gguf.BLOCKS.
    """

    folder: Path
    config: Any
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    blocks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GGUFPlan:
    """The content of the file.

    Attributes:
        layout: places in the file.
        tensors: name in the file -> its parts in the source.
        computed: name in the file -> float32 tensor that the source does not have.
        rounded: name in the file of tensors that are rounded as they are written.
        remark: sentence on what llama.cpp does otherwise; None where nothing is known.
    """

    layout: gguf.GGUFFilePlan
    tensors: dict[str, FileTensor]
    computed: dict[str, Tensor]
    rounded: tuple[str, ...] = ()
    remark: str | None = None


def planned(source: FileSource, kind: str) -> GGUFPlan:
    """The content of a file of a kind, a key of gguf.FILE_TYPES.

    Raises:
        InputError: a tensor is missing, superfluous or of another shape; no tokenizer, or one of
            another model.
        UsageError: the experts of a layer have several types.
        UnsupportedError: a family, tokenizer or rotary embedding that is not written.
    """
    config, dtype = source.config, MIXTURES.get(kind, kind)
    by_name = {tensor.name: tensor for tensor in file_tensors(config, source.shapes)}
    factors = rope_factors(config)
    computed = {} if factors is None else {ROPE_FACTORS: factors}
    specs = {name: ("F32", tuple(tensor.shape)) for name, tensor in computed.items()}
    specs |= {
        name: (_type_of(tensor, source, dtype, tied=HEAD not in by_name), tensor.shape)
        for name, tensor in by_name.items()
    }
    words = vocabulary(source.folder, config)
    values = {
        **metadata(config),
        "general.type": ("string", "model"),
        "general.file_type": ("u32", gguf.FILE_TYPES[kind]),
        **(
            {"general.quantization_version": ("u32", gguf.QUANTIZATION_VERSION)}
            if dtype in gguf.BLOCKS
            else {}
        ),
        **words,
    }
    return GGUFPlan(
        layout=gguf.layout(values, specs),
        tensors=by_name,
        computed=computed,
        rounded=tuple(
            name
            for name, tensor in by_name.items()
            if specs[name][0] in gguf.BLOCKS and not _stays(tensor, source)
        ),
        remark=APPROXIMATE.get(words.get("tokenizer.ggml.pre", ("string", ""))[1]),
    )


def _type_of(tensor: FileTensor, source: FileSource, dtype: str, *, tied: bool) -> str:
    """The type of a tensor of the file; linears have `dtype` where their rows fit it.

    Raises:
        UsageError: the experts of a layer have several types.
    """
    if len(tensor.shape) == 1 or tensor.float32:
        return "F32"
    if dtype not in gguf.BLOCKS:
        return dtype
    name = tensor.parts[0].source
    if tensor.transposed and name in source.blocks:
        fits = tensor.shape[-1] % BLOCK_TYPES[_TRANSPOSED].elements == 0
        return _TRANSPOSED if fits else "F32"
    types = {
        source.blocks.get(part.source, source.dtypes[part.source]): part.source
        for part in tensor.parts
    }
    if len(types) > 1:
        (first, one), (second, other) = list(types.items())[:2]
        raise UsageError(
            f"{tensor.name}: {one} is {first} and {other} is {second}; llama.cpp has one type for "
            "all experts of a layer",
            "quantize all experts of a layer to one scheme, or give --dtype",
        )
    if _stays(tensor, source):
        return source.blocks[name]
    # a linear that was left as it is, and beside MXFP4 all that is not in it
    if tensor.name not in (EMBEDDING, HEAD) or dtype not in BLOCK_TYPES:
        return source.dtypes[name]
    if tensor.name == EMBEDDING and not tied:
        wanted = _EMBEDDING_TYPE.get(dtype, dtype)
        choices = (wanted, SMALLER.get(wanted, wanted))
    else:
        choices = (_HEAD_TYPE.get(dtype, _HEAD_USUALLY), _HEAD_SMALLER)
    fitting = (kind for kind in choices if tensor.shape[1] % BLOCK_TYPES[kind].elements == 0)
    return next(fitting, source.dtypes[name])


def _stays(tensor: FileTensor, source: FileSource) -> bool:
    """Whether a tensor is written in the blocks that it was quantized to."""
    return tensor.parts[0].source in source.blocks and not tensor.transposed
