"""The loss that yaqa makes small, by the number of tokens whose gradients an expert has.

    python examples/tiny-llama/stdlib_text.py --output artifacts/tiny-llama-text
    python benchmarks/expert_gradients.py

Linears of the example model stand for those of an expert that the router sends n tokens to: their
Hessian and the sum of their gradients come from n tokens, picked anywhere in 16 sequences, and
tr(G E H E^T) is that of eight others. Printed are, over all linears, the median and the largest
ratio to round to nearest's in W4A16: of gptq, of yaqa with the sum as it is, with its mean diagonal
on top, and with O / n of it for O outputs. Takes two minutes on one core.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quantflow.algorithms import ALGORITHMS
from quantflow.core.scheme import preset, with_group_size
from quantflow.measuring.backward import backward, generator_for, sampled_gradient
from quantflow.measuring.text import read_documents, select
from quantflow.models.capture import LayerStream
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.models.tokenizer import load_tokenizer
from quantflow.numerics.output_blocks import shrink_

ROOT = Path(__file__).resolve().parents[1]
SHARES = (2, 4, 8, 16)  # tokens per input feature
SEQUENCES, HELD_OUT, LENGTH = 16, 8, 512
NAMES = tuple(f"model.layers.{layer}.self_attn.{kind}" for layer in (0, 2) for kind in "ko")
SCHEME = with_group_size(preset("W4A16"), 128)

Rows = dict[str, list[Tensor]]


def main() -> int:
    """Print the table."""
    torch.set_num_threads(1)
    weights, inputs, gradients = gathered()
    print("tokens per feature   gptq   yaqa   mean on top   O / n of it: median, largest")
    for share in SHARES:
        found = torch.tensor(
            [
                ratios(weights[name], torch.cat(inputs[name]), torch.cat(gradients[name]), share)
                for name in weights
            ]
        )
        cells = zip(found.median(0).values.tolist(), found.max(0).values.tolist(), strict=True)
        print(f"{share:18}   " + "   ".join(f"{mid:.3f}, {most:.3f}" for mid, most in cells))
    return 0


@torch.no_grad()
def gathered() -> tuple[dict[str, Tensor], Rows, Rows]:
    """Weights [O, I] by name; inputs [S, I] and gradients [S, O] of each sequence."""
    model = ROOT / "examples" / "tiny-llama"
    documents = read_documents(
        ROOT / "artifacts" / "tiny-llama-text" / "calibration.jsonl", load_tokenizer(model)
    )
    count = SEQUENCES + HELD_OUT
    sequences = select(documents, samples=count, sequence_length=LENGTH, seed=0, pack=True)
    source = open_source(model)
    stream = LayerStream(source, graph := graph_for(source.config))
    weights: dict[str, Tensor] = {}
    inputs, gradients = Rows(), Rows()

    def observe(name: str, x: Tensor, gradient: Tensor) -> None:
        if name.removesuffix("_proj") in NAMES:
            inputs.setdefault(name, []).append(x[0].clone())
            gradients.setdefault(name, []).append(gradient[0].clone())

    for index, sequence in enumerate(sequences):
        (state,) = stream.begin([sequence])
        entering = [state.hidden.clone()]
        for layer in graph.layers:
            with stream.layer(layer.index) as module:
                entering.append(stream.run(module, state))
            state.store.put(0, entering[-1])
        with stream.head():
            gradient = sampled_gradient(stream, entering[-1], generator=generator_for(0, index))
        for layer in reversed(graph.layers):
            state.store.put(0, entering[layer.index])
            with stream.layer(layer.index) as module, backward(stream, module, layer) as through:
                gradient = through(state, gradient, observe)
                for name in set(inputs) & set(layer.linears):
                    linear = module.get_submodule(layer.relative(name))
                    weights[name] = linear.get_parameter("weight").detach().clone()
    return weights, inputs, gradients


def loss(weight: Tensor, x: Tensor, gradient: Tensor, rounded: Tensor) -> float:
    """tr(G E H E^T) of E = weight - rounded [O, I], by tokens x [n, I] and gradient [n, O]."""
    error = (weight - rounded).double()
    inner = (gradient.T @ gradient).double() @ error @ (x.T @ x).double()
    return float((inner * error).sum())


def ratios(weight: Tensor, x: Tensor, gradient: Tensor, share: int) -> list[float]:
    """The losses of gptq and of yaqa in three ways over that of round to nearest."""
    known = SEQUENCES * LENGTH
    tokens = share * weight.shape[1]
    picked = torch.randperm(known, generator=torch.Generator().manual_seed(tokens))[:tokens]
    hessian, sums = x[picked].T @ x[picked], gradient[picked].T @ gradient[picked]
    judged = partial(loss, weight, x[known:], gradient[known:])

    def of(algorithm: str, by_output: Tensor) -> float:
        statistics = {
            "hessian_sum": hessian.clone(),
            "count": torch.tensor(tokens),
            "w|gradient_sum": by_output,
        }
        result = ALGORITHMS[algorithm].quantize_group(
            {"w": weight}, SCHEME, statistics=statistics, scale_dtype=torch.bfloat16
        )
        return judged(result["w"].weight.dequantize())

    nearest = of("rtn", sums)
    ways = (sums, shrink_(sums.clone()), shrink_(sums.clone(), share=min(1.0, len(sums) / tokens)))
    return [
        of("gptq", sums) / nearest,
        *(of("yaqa", by_output.clone()) / nearest for by_output in ways),
    ]


if __name__ == "__main__":
    sys.exit(main())
