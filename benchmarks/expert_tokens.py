"""Calibration tokens that GPTQ needs to be no worse than round to nearest.

They are two per feature (quantflow/planning/experts.py).

    python examples/tiny-llama/stdlib_text.py --output artifacts/tiny-llama-text
    python benchmarks/expert_tokens.py

The linears of the example model stand for those of an expert that the router sends n tokens to:
their Hessian comes from n calibration tokens, picked anywhere in the text, and the error of their
output is measured on other text. Printed are, over all linears, the median and the largest ratio of
GPTQ's error to that of round to nearest, and how many linears are worse; then the same with the
Hessian damped as `--experts damp` does. Takes five minutes on one core.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantflow.algorithms import ALGORITHMS
from quantflow.core.scheme import preset, with_group_size
from quantflow.measuring.text import read_documents, select
from quantflow.models.capture import LayerStream
from quantflow.models.hooks import watch
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.models.tokenizer import load_tokenizer
from quantflow.observers.hessian import HessianObserver, shrink_

ROOT = Path(__file__).resolve().parents[1]
SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # tokens per input feature: n / K
SEQUENCES, LENGTH, HELD_OUT = 64, 512, 16


def main() -> int:
    """Print the table."""
    torch.set_num_threads(1)
    model = ROOT / "examples" / "tiny-llama"
    tokenizer = load_tokenizer(model)
    sequences = []
    for name, samples in (("calibration", SEQUENCES), ("heldout", HELD_OUT)):
        documents = read_documents(
            ROOT / "artifacts" / "tiny-llama-text" / f"{name}.jsonl", tokenizer
        )
        sequences += select(documents, samples=samples, sequence_length=LENGTH, seed=0, pack=True)
    ratios: dict[float, list[tuple[float, float]]] = {share: [] for share in SHARES}
    for weight, seen, unseen in linears(model, sequences):
        for share in SHARES:
            ratios[share].append(compare(weight, seen, unseen, tokens=int(weight.shape[1] * share)))
    print(
        "tokens per feature   median   largest   worse than rtn   damped: median   largest   "
        "worse than rtn"
    )
    for share, found in ratios.items():
        plain, damped = ("   ".join(_cells(values)) for values in torch.tensor(found).T)
        print(f"{share:18.6g}   {plain}           {damped}")
    return 0


@torch.no_grad()
def linears(model: Path, sequences: list[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (weight, calibration rows, held-out rows) of the first linear of each group."""
    source = open_source(model)
    stream = LayerStream(source, graph := graph_for(source.config))
    states = stream.begin(sequences)
    for layer in graph.layers:
        inputs: dict[str, list[Tensor]] = {group.linears[0]: [] for group in layer.groups}
        with stream.layer(layer.index) as module:
            keep = {
                layer.relative(name): partial(lambda rows, x, _y: rows.append(x[0]), rows)
                for name, rows in inputs.items()
            }
            with watch(module, keep):
                stream.advance(module, states)
            for name, rows in inputs.items():
                weight = module.get_submodule(layer.relative(name)).weight
                yield weight.clone(), torch.cat(rows[:SEQUENCES]), torch.cat(rows[SEQUENCES:])


def _cells(ratios: Tensor) -> tuple[str, str, str]:
    worse = f"{int((ratios > 1).sum())} of {len(ratios)}"
    return f"{ratios.median():6.3f}", f"{ratios.max():7.3f}", f"{worse:>14}"


def compare(weight: Tensor, seen: Tensor, unseen: Tensor, *, tokens: int) -> tuple[float, float]:
    """GPTQ's squared output error on unseen rows over that of round to nearest, in W4A16.

    The ratio stands as it is and damped.
    """
    scheme = with_group_size(preset("W4A16"), 128)
    generator = torch.Generator().manual_seed(tokens)
    observer = HessianObserver(features=weight.shape[1])
    observer.update(seen[torch.randperm(len(seen), generator=generator)[:tokens]])
    as_seen, damped = observer.state(), observer.state()
    shrink_(damped["hessian_sum"])
    errors = []
    for name, statistics in (("gptq", as_seen), ("gptq", damped), ("rtn", {})):
        result = ALGORITHMS[name].quantize_group(
            {"w": weight}, scheme, statistics=statistics, scale_dtype=torch.bfloat16
        )
        errors.append(
            float((unseen @ (weight - result["w"].weight.dequantize()).T).double().square().sum())
        )
    return errors[0] / errors[2], errors[1] / errors[2]


if __name__ == "__main__":
    sys.exit(main())
