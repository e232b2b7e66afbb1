"""A Llama-shaped bf16 checkpoint of any size, and its calibration token ids.

The weights are random.

Every row of a weight has a scale of its own, a few input channels are outliers, and the branches
that add to the residual stream are scaled down with depth, so that activations stay finite through
all layers. The same size and seed give the same bytes. Memory is bounded by a few chunks of CHUNK
elements, whatever the size.
"""

import json
import math
import shutil
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 22  # elements that are drawn and written at once; part of what decides the bytes
OUTLIERS = 4  # input channels of every weight that are larger
OUTLIER_FACTOR = 6.0
SHARD_BYTES = 4_000_000_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
TOKENIZER_IDS = range(2, 4096)  # of examples/tiny-llama, without its two special tokens
Spec = tuple[str, tuple[int, ...]]
Bits = NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that decide a checkpoint; features, layers, heads and tokens."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def bytes(self) -> int:
        """Bytes of all weights in bf16."""
        return sum(2 * int(np.prod(shape)) for _, shape in self.specs())

    @property
    def layer_weights(self) -> int:
        """Elements of the linears of one decoder layer."""
        return sum(int(np.prod(shape)) for name, shape in self._layer(0) if len(shape) == 2)

    def specs(self) -> list[Spec]:
        """Return the name and shape of every tensor, in the order of the files."""
        middle = [spec for index in range(self.layers) for spec in self._layer(index)]
        table = (self.vocab, self.hidden)
        return [
            ("model.embed_tokens.weight", table),
            *middle,
            ("model.norm.weight", (self.hidden,)),
            ("lm_head.weight", table),
        ]

    def _layer(self, index: int) -> list[Spec]:
        hidden, wide, kv = self.hidden, self.intermediate, self.hidden // self.heads * self.kv_heads
        shapes = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }
        return [(f"model.layers.{index}.{name}.weight", shape) for name, shape in shapes.items()]


SHAPES = {
    "28GB": Shape(hidden=5120, intermediate=13824, layers=43, heads=40, kv_heads=40, vocab=32000),
    "14GB": Shape(hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocab=32000),
    "2GB": Shape(hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4, vocab=32000),
    "500MB": Shape(hidden=1024, intermediate=2816, layers=16, heads=16, kv_heads=4, vocab=32000),
    "50MB": Shape(hidden=512, intermediate=1408, layers=7, heads=8, kv_heads=4, vocab=4096),
}


def make_checkpoint(folder: Path, shape: Shape, *, seed: int, tokenizer: Path) -> None:
    """Write the checkpoint, or leave it alone where it was finished with the same shape and seed.

    Args:
        folder: where it goes; `<folder>.json` beside it says that it is finished.
        shape: its sizes.
        seed: of the weights.
        tokenizer: the folder whose tokenizer is copied.
    """
    if is_made(folder, shape, seed=seed):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    (folder / "config.json").write_text(
        json.dumps(llama_config(shape), indent=2, sort_keys=True) + "\n"
    )
    shards = _shards(shape)
    names = [
        f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)
    ]
    with ThreadPoolExecutor(2) as pool:
        for name, specs in zip(names, shards, strict=True):
            _write_shard(folder / name, specs, shape, seed, pool)
    weight_map = {
        spec[0]: name for name, specs in zip(names, shards, strict=True) for spec in specs
    }
    index = {"metadata": {"total_size": shape.bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=1, sort_keys=True) + "\n"
    )
    stamp(folder, shape, seed=seed)


def is_made(folder: Path, shape: Any, *, seed: int) -> bool:
    """Whether a checkpoint of this shape, a dataclass, and seed is finished there."""
    made = _stamp(folder)
    return (
        folder.is_dir()
        and made.is_file()
        and json.loads(made.read_text()) == {**asdict(shape), "seed": seed}
    )


def stamp(folder: Path, shape: Any, *, seed: int) -> None:
    """Say beside a folder that its checkpoint is finished, which `is_made` reads."""
    _stamp(folder).write_text(json.dumps({**asdict(shape), "seed": seed}) + "\n")


def make_calibration(path: Path, *, samples: int, tokens: int, seed: int) -> None:
    """Write `samples` lines of `tokens` random token ids that the copied tokenizer knows."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(TOKENIZER_IDS.start, TOKENIZER_IDS.stop, size=(samples, tokens)).tolist()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))


def llama_config(shape: Shape) -> dict[str, object]:
    """Return config.json of a shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def _stamp(folder: Path) -> Path:
    return folder.with_name(folder.name + ".json")


def _shards(shape: Shape) -> list[list[Spec]]:
    """Fill files in order up to SHARD_BYTES; a small checkpoint still gets three."""
    limit = min(SHARD_BYTES, shape.bytes // 3 + 1)
    shards: list[list[Spec]] = [[]]
    held = 0
    for spec in shape.specs():
        size = 2 * int(np.prod(spec[1]))
        if shards[-1] and held + size > limit:
            shards.append([])
            held = 0
        shards[-1].append(spec)
        held += size
    return shards


def _write_shard(
    path: Path, specs: list[Spec], shape: Shape, seed: int, pool: ThreadPoolExecutor
) -> None:
    """Write one safetensors file, chunk after chunk, while the next chunks are drawn."""
    with path.open("wb") as file:
        file.write(safetensors_header((name, "BF16", size) for name, size in specs))
        running: deque[Future[Bits]] = deque()
        for name, size, begin in _chunks(specs):
            if len(running) == 4:
                file.write(running.popleft().result().data)
            running.append(pool.submit(_draw, name, size, begin, shape, seed))
        for future in running:
            file.write(future.result().data)


def safetensors_header(specs: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The bytes of a safetensors file before its tensors.

    Args:
        specs: name, dtype (BF16 or U8) and shape of each tensor, in the order of the file.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, size in specs:
        begin, end = end, end + math.prod(size) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _chunks(specs: list[Spec]) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield (name, shape, first row) of every chunk."""
    for name, size in specs:
        rows = max(1, CHUNK // size[-1]) if len(size) == 2 else size[0]
        for begin in range(0, size[0], rows):
            yield name, size, begin


def _draw(name: str, size: tuple[int, ...], begin: int, shape: Shape, seed: int) -> Bits:
    """Return the bf16 bits [rows, columns] or [columns] of one chunk as uint16."""
    random = np.random.Generator(np.random.SFC64([seed, begin, *name.encode()]))
    if len(size) == 1:
        values = (1 + 0.1 * random.standard_normal(size, dtype=np.float32)).astype(np.float32)
        values[_outliers(shape.hidden, seed)] *= 2
        return bf16_bits(values)
    rows = min(max(1, CHUNK // size[1]), size[0] - begin)
    values = random.standard_normal((rows, size[1]), dtype=np.float32)
    gain = 1 / np.sqrt(size[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        gain /= np.sqrt(2 * shape.layers)
    elif name.startswith("model.embed_tokens"):
        gain = 0.05
    values *= (gain * np.exp(0.3 * random.standard_normal((rows, 1)))).astype(np.float32)
    if name.startswith("model.layers."):
        values[:, _outliers(size[1], seed)] *= OUTLIER_FACTOR
    return bf16_bits(values)


def _outliers(width: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, width]).choice(width, OUTLIERS, replace=False)


def bf16_bits(values: NDArray[np.float32]) -> Bits:
    """Round float32 to bf16 bits, ties away from zero."""
    bits = values.view(np.uint32)
    bits += 0x8000
    return np.ascontiguousarray(bits.view(np.uint16)[..., 1::2])
