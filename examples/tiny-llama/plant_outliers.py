"""Plant activation outliers in the example model without changing the function it computes.

Real LLMs have a few channels whose activations are tens to hundreds of times larger than the rest;
a model this small has none, and without them SmoothQuant and per-channel scales have nothing to
show. Here some channels of every norm are multiplied by a power of two from 32 to 256 and the
columns that read them are divided by it. Powers of two are exact in bf16, so the planted model is
the same function; what changes is how hard it is to quantize.

Example: python examples/tiny-llama/plant_outliers.py --output artifacts/tiny-llama-outliers
"""

import argparse
import random
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
CHANNELS = 6  # of each norm
FACTORS = (32.0, 64.0, 128.0, 256.0)
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def plant_outliers_(tensors: dict[str, Tensor], *, seed: int = 0) -> None:
    """Scale channels of every decoder layer's norms up, and the columns that read them down.

    Both change in place.
    """
    generator = random.Random(seed)
    for name in sorted(tensors):
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in READERS:
            continue
        for channel in generator.sample(range(tensors[name].shape[0]), CHANNELS):
            factor = generator.choice(FACTORS)
            tensors[name][channel] *= factor
            for linear in READERS[norm]:
                tensors[f"{layer}.{linear}.weight"][:, channel] /= factor


def main() -> None:
    """Write the planted model and its side files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=HERE)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tensors = load_file(arguments.model / "model.safetensors")
    plant_outliers_(tensors, seed=arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, arguments.output / "model.safetensors", metadata={"format": "pt"})
    for name in (
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
    ):
        shutil.copyfile(arguments.model / name, arguments.output / name)
    print(arguments.output)


if __name__ == "__main__":
    main()
