"""The tensors of a GGUF file, and the parts of the checkpoint that each is made of.

A dense model's tensors have one part. The experts of a layer are one tensor of as many parts, each
a linear of the checkpoint. Attention with compressed keys keeps keys and values of a head together
in `kv_b_proj`, where llama.cpp wants two tensors: `attn_k_b` [G, C, N], the keys transposed, for it
multiplies queries by them first, and `attn_v_b` [G, V, C].
Source: github.com/ggml-org/llama.cpp, `conversion/deepseek.py`, `qwen.py` and `gpt_oss.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantflow.errors import InputError, UnsupportedError
from quantflow.formats.llama_cpp.mixture_designs import MIXTURE_DESIGNS, MixtureDesign
from quantflow.formats.llama_cpp.tensors import Place, places

_REPAIR = "check that config.json belongs to these weights"
_RUN = "run this model with transformers"
_LAYERS = "model.layers"
_OUTSIDE = {
    "model.embed_tokens": ("token_embd", "vh"),
    "model.norm": ("output_norm", "h"),
    "lm_head": ("output", "vh"),
}
# routers decide in float32, as llama.cpp's converter and quantizer keep them
_FLOAT32 = ("ffn_gate_inp", "ffn_gate_inp_shexp")


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor of the file.

    Attributes:
        name: llama.cpp's name.
        shape: shape in the file, slowest dimension first.
        parts: parts of it, one after the other; the shape of a part is that of its rows in the
            file.
        float32: whether it has float32 in every file; vectors always have.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Place, ...]
    float32: bool = False

    @property
    def rows(self) -> int:
        """Rows of all parts; a vector's are its elements."""
        return sum(part.shape[0] for part in self.parts)

    @property
    def transposed(self) -> bool:
        """Whether rows of the file are columns of the checkpoint."""
        return self.parts[0].order == "keys"


def file_tensors(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[FileTensor, ...]:
    """The tensors of the file that are the checkpoint's, in the order of the file.

    Args:
        config: transformers' configuration.
        shapes: source name -> shape, of every tensor of the checkpoint.

    Raises:
        InputError: a tensor that is missing, that belongs nowhere, or that has another shape than
            config.json says.
        UnsupportedError: the family, or what its architecture in llama.cpp does not compute.
    """
    design = MIXTURE_DESIGNS.get(config.model_type)
    if design is None:
        return tuple(
            FileTensor(name=place.name, shape=place.shape, parts=(place,))
            for place in places(config, shapes)
        )
    require_computed(config, design)
    return _of_mixture(config, design, shapes)


def require_computed(config: Any, design: MixtureDesign) -> None:
    """Refuse a configuration that llama.cpp would not compute.

    Raises:
        UnsupportedError: naming the key of config.json.
    """
    for key, value in {"hidden_act": "silu", **design.required}.items():
        found = getattr(config, key, value)
        if found != value and not (value == [] and found is None):
            raise UnsupportedError(
                f"config.json: {key} {found!r}, llama.cpp's {design.architecture} computes "
                f"{value!r}",
                _RUN,
            )
    sizes = sizes_of_mixture(config, design)
    if design.architecture in ("qwen2moe", "olmoe") and sizes["q"] != sizes["h"]:
        raise UnsupportedError(
            f"config.json: heads of {sizes['q']} features in all, llama.cpp's "
            f"{design.architecture} has those of the hidden state, {sizes['h']}",
            _RUN,
        )
    if design.architecture == "olmoe" and sizes["k"] != sizes["h"]:
        raise UnsupportedError(
            f"config.json: num_key_value_heads {config.num_key_value_heads}, llama.cpp's olmoe has "
            f"as many as queries, {config.num_attention_heads}",
            _RUN,
        )
    if design.architecture == "gpt-oss":
        expected = ["sliding_attention", "full_attention"] * config.num_hidden_layers
        if config.layer_types != expected[: config.num_hidden_layers]:
            raise UnsupportedError(
                "config.json: layer_types does not begin with a window and alternate, as "
                "llama.cpp's gpt-oss does",
                _RUN,
            )


def sizes_of_mixture(config: Any, design: MixtureDesign) -> dict[str, int]:
    """The numbers that letters stand for, in the table of `mixture_designs`."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    latent = design.heads_of is not None
    size = (
        config.qk_nope_head_dim + config.qk_rope_head_dim
        if latent
        else getattr(config, "head_dim", None) or hidden // heads
    )
    width = getattr(config, design.width)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    sizes = {
        "1": 1,
        "h": hidden,
        "v": config.vocab_size,
        "d": size,
        "g": heads,
        "q": heads * size,
        "k": (getattr(config, "num_key_value_heads", None) or heads) * size,
        "f": config.intermediate_size,
        "n": getattr(config, design.count),
        "e": width,
        "s": shared or width * (getattr(config, "n_shared_experts", None) or 0),
    }
    if latent:
        sizes |= {
            "a": config.q_lora_rank or 0,
            "c": config.kv_lora_rank,
            "r": config.kv_lora_rank + config.qk_rope_head_dim,
            "b": heads * (config.qk_nope_head_dim + config.v_head_dim),
            "o": heads * config.v_head_dim,
        }
    return sizes


def _of_mixture(
    config: Any, design: MixtureDesign, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[FileTensor, ...]:
    sizes, dropped = sizes_of_mixture(config, design), set[str]()
    tied = bool(config.tie_word_embeddings) and design.tied
    tensors, stored = list[FileTensor](), dict[str, tuple[int, ...]]()
    for module, (name, letters) in _OUTSIDE.items():
        if name == "output" and tied:
            dropped.add(f"{module}.weight")
            continue
        tensors.append(_plain(f"{name}.weight", f"{module}.weight", letters, sizes))
    for layer in range(config.num_hidden_layers):
        source, file = f"{_LAYERS}.{layer}", f"blk.{layer}"
        sparse = design.is_sparse(config, layer)
        modules = {**design.attention, **(design.sparse if sparse else design.dense)}
        for module, (name, letters) in modules.items():
            # queries are compressed, or they are not
            if 0 in (sizes[letter] for letter in letters) or (
                design.heads_of and module.endswith(".q_proj") and sizes["a"]
            ):
                continue
            weight = f"{source}.{module}.weight"
            if module == design.heads_of:
                stored[weight] = tuple(sizes[letter] for letter in letters)
                tensors += _keys_and_values(config, file, weight)
                continue
            optional = module.endswith(("q_norm", "k_norm")) and design.architecture == "glm4moe"
            if optional and weight not in shapes:
                continue
            tensor = _plain(f"{file}.{name}.weight", weight, letters, sizes)
            pairs = module in design.rotary_pairs
            if letters.startswith("1"):  # one row, which the file has as a vector
                stored[weight] = tensor.shape
                tensor = FileTensor(name=tensor.name, shape=tensor.shape[1:], parts=tensor.parts)
            tensors.append(_in_pairs(tensor, sizes) if pairs else tensor)
            bias = f"{source}.{module}.bias"
            if module in design.biased and bias in shapes:
                tensors.append(_plain(f"{file}.{name}.bias", bias, letters[0], sizes))
        if sparse:
            tensors += _experts(design, file, f"{source}.{design.block}.experts", sizes)
        named = {**design.tensors, **(design.sparse_tensors if sparse else {})}
        for tensor_name, (name, letters) in named.items():
            tensors.append(_plain(f"{file}.{name}", f"{source}.{tensor_name}", letters, sizes))
    _check(tensors, shapes, architecture=design.architecture, dropped=dropped, stored=stored)
    return tuple(tensors)


def _plain(name: str, source: str, letters: str, sizes: Mapping[str, int]) -> FileTensor:
    """A tensor that is the checkpoint's as it stands."""
    shape = tuple(sizes[letter] for letter in letters)
    return FileTensor(
        name=name,
        shape=shape,
        parts=(Place(name=name, source=source, shape=shape),),
        float32=name.rpartition(".")[0].rpartition(".")[2] in _FLOAT32,
    )


def _in_pairs(tensor: FileTensor, sizes: Mapping[str, int]) -> FileTensor:
    """The same tensor with neighbouring rows of a head that are rotated together."""
    (part,) = tensor.parts
    place = Place(
        name=part.name,
        source=part.source,
        shape=part.shape,
        order="rotary",
        heads=part.shape[0] // sizes["d"],
    )
    return FileTensor(name=tensor.name, shape=tensor.shape, parts=(place,))


def _keys_and_values(config: Any, file: str, source: str) -> Iterator[FileTensor]:
    """Yield the two tensors of a linear that makes keys and values of every head."""
    heads, keys, values = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    rank = config.kv_lora_rank
    for name, order, rows, columns in (
        (f"{file}.attn_k_b.weight", "keys", rank, keys),
        (f"{file}.attn_v_b.weight", "values", values, rank),
    ):
        part = Place(
            name=name,
            source=source,
            shape=(heads * rows, columns),
            order="keys" if order == "keys" else "values",
            heads=heads,
            other_rows=values if order == "keys" else keys,
        )
        yield FileTensor(name=name, shape=(heads, rows, columns), parts=(part,))


def _experts(
    design: MixtureDesign, file: str, experts: str, sizes: Mapping[str, int]
) -> Iterator[FileTensor]:
    """Yield the stacks of a layer: a tensor per linear, and one of its biases."""
    count = sizes["n"]
    for linear, (name, letters) in design.experts.items():
        kinds = [("weight", letters), *([("bias", letters[0])] if design.expert_biases else [])]
        for kind, of in kinds:
            shape = tuple(sizes[letter] for letter in of)
            parts = tuple(
                Place(name=f"{file}.{name}.{kind}", source=f"{experts}.{i}.{linear}.{kind}",
                      shape=shape)
                for i in range(count)
            )  # fmt: skip
            yield FileTensor(
                name=f"{file}.{name}.{kind}",
                shape=(count, *shape),
                parts=parts,
                float32=kind == "bias",
            )


def _check(
    tensors: list[FileTensor],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    architecture: str,
    dropped: set[str],
    stored: Mapping[str, tuple[int, ...]],
) -> None:
    """Refuse a checkpoint that holds more, less or something else than the file will say."""
    named = {part.source: part.shape for tensor in tensors for part in tensor.parts}
    for source, shape in {**named, **stored}.items():
        if source not in shapes:
            raise InputError(f"{source}: not in the checkpoint, {architecture} needs it", _REPAIR)
        if tuple(shapes[source]) != shape:
            raise InputError(
                f"{source}: {list(shapes[source])} in the checkpoint, config.json says "
                f"{list(shape)}",
                _REPAIR,
            )
    for name in sorted(shapes.keys() - named.keys() - dropped):
        if name.endswith(".bias"):
            raise UnsupportedError(
                f"{name}: llama.cpp's {architecture} has no such bias", "run it with transformers"
            )
        raise InputError(f"{name}: in the checkpoint, {architecture} has no place for it", _REPAIR)
