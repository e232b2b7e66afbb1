"""Seconds of GPTQ for the experts of a layer, one by one and together.

    python benchmarks/expert_seconds.py
    python benchmarks/expert_seconds.py --peers artifacts/peers       beside llm-compressor

A layer shaped as a released model's, with random weights and random rows in the place of the tokens
that the router sends to an expert: 262,144 tokens (128 sequences of 2048), each to the chosen ones.
Printed are a core's seconds for one expert, by part, and for all experts of a layer; then those of
rounding eight equal experts one after the other and together, a column of all eight at a time, with
the same bits. Needs about two minutes on one core.

With --peers the experts of such a layer, an eighth of them, each with as many tokens, are quantized
by both programs, from import to the saved folder: W4A16 by gptq, all else left as it is. Attention
and the router run too. llm-compressor shows every expert every token unless it is told otherwise,
which is then another calibration; it runs with `moe_calibrate_all_experts=False`, so that both read
what the router chose. Its layers run in bfloat16; `--dtype bfloat16` lets quantflow's do so too.
A CPU without AVX-512 multiplies bfloat16 at a tenth of float32's speed; `--peer-dtype float32`
loads llm-compressor's model in float32.
"""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _alone import alone
from _quantflow import QUANTFLOW
from _report import Bar, bars, machine, table
from _synthetic import TOKENIZER_FILES, make_calibration
from _watch import Run, run
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from quantflow.algorithms import ALGORITHMS
from quantflow.core import affine
from quantflow.core.qtensor import qvalue_dtype
from quantflow.core.scheme import TensorScheme, preset, with_group_size
from quantflow.numerics import feedback
from quantflow.observers.hessian import HessianObserver

TOKENS, TOGETHER, GROUP = 262_144, 8, 128
# experts, chosen ones, features of the hidden state, features between an expert's linears
SHAPES = {"OLMoE-1B-7B": (64, 8, 2048, 1024), "Qwen3-30B-A3B": (128, 8, 2048, 768)}
SCHEME = with_group_size(preset("W4A16"), GROUP)
ROOT = Path(__file__).resolve().parents[1]
SEQUENCE, VOCABULARY, SEED = 2048, 4096, 0
SLICE = 8  # of the experts of a layer one in so many is quantized beside llm-compressor
# what transformers calls the shapes' sizes, and their attention
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "OLMoE-1B-7B": ("olmoe", {"num_attention_heads": 16, "num_key_value_heads": 16}),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    ),
}
TIME_BAR = 0.3


def main(arguments: Sequence[str]) -> int:
    """Print both tables, or the one beside llm-compressor; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="a folder with the environment llmcompressor")
    parser.add_argument("--work", type=Path, default=ROOT / "artifacts" / "expert-seconds")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="of the calibration beside llm-compressor"
    )
    parser.add_argument("--runs", type=int, default=1, help="in turns; medians are reported")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of quantflow's calibration text",
    )
    parser.add_argument(
        "--peer-dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="of the model that llm-compressor loads, and so of its calibration text",
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    given = parser.parse_args(arguments)
    return alone(beside, given) if given.peers is not None else by_part()


def beside(given: argparse.Namespace) -> int:
    """Quantize each shape's experts by both programs, print, and judge; the exit code."""
    work, found = given.work.resolve(), list[Bar]()
    work.mkdir(parents=True, exist_ok=True)
    print(
        f"{machine(work)['processor']}, {given.tokens} tokens, quantflow's in {given.dtype}, "
        f"llm-compressor's in {given.peer_dtype}\n"
    )
    rows = []
    for name in given.shapes:
        model, calibration = work / name, work / f"{given.tokens}.jsonl"
        make_layer(model, name)
        samples = given.tokens // SEQUENCE
        make_calibration(calibration, samples=samples, tokens=SEQUENCE, seed=SEED)
        programs = {
            "quantflow": partial(quantflow, model, calibration, work, given.dtype),
            "llm-compressor": partial(
                llm_compressor, model, calibration, work, given.peers, given.peer_dtype
            ),
        }
        turns = [
            {which: program() for which, program in programs.items()} for _ in range(given.runs)
        ]
        seconds = {
            which: statistics.median(turn[which].seconds for turn in turns) for which in programs
        }
        for which in programs:
            cpu = statistics.median(turn[which].cpu for turn in turns)
            memory = max(turn[which].rss for turn in turns)
            rows.append(
                (name, which, f"{seconds[which]:.1f}", f"{cpu:.0f}", f"{memory / 1e9:.2f} GB")
            )
        ratio = seconds["quantflow"] / seconds["llm-compressor"]
        found.append(
            Bar(
                what=f"{name}: time",
                promised=f"<= {TIME_BAR}x llm-compressor",
                found=f"{ratio:.2f}x",
                met=ratio <= TIME_BAR,
            )
        )
    print(table(("experts of", "program", "seconds", "CPU seconds", "peak RSS"), rows))
    print("\n" + bars(found))
    return int(not all(bar.met for bar in found))


def make_layer(folder: Path, name: str) -> None:
    """Write a model of one layer with a slice of a shape's experts, unless it is there.

    The router sends a token to the same slice of those that it chooses.
    """
    if folder.exists():
        return
    experts, chosen, hidden, width = SHAPES[name]
    family, attention = CONFIGS[name]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "moe_intermediate_size": width,
        "num_hidden_layers": 1,
        "num_experts": experts // SLICE,
        "num_experts_per_tok": chosen // SLICE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": SEQUENCE,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**sizes, **attention), dtype=torch.bfloat16
    )
    partial_folder = folder.with_suffix(".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    model.save_pretrained(partial_folder)
    for file in TOKENIZER_FILES:
        shutil.copyfile(ROOT / "examples" / "tiny-llama" / file, partial_folder / file)
    partial_folder.rename(folder)


def quantflow(model: Path, calibration: Path, work: Path, dtype: str) -> Run:
    """Run quantflow, its proof of the artifact included."""
    output = work / "quantflow"
    for path in (output, output.with_name("quantflow.work")):
        shutil.rmtree(path, ignore_errors=True)
    words = ("quantize", model, "-o", output, "--scheme", "W4A16", "--algorithm", "gptq", "-q")
    tokens = ("--calibration", calibration, "--samples", "100000", "--experts", "damp")
    lengths = ("--sequence-length", str(SEQUENCE), "--dtype", dtype)
    command = (*QUANTFLOW, *words, *tokens, *lengths)
    return run((*command, "--ignore", "re:.*self_attn.*"), log=work / "quantflow.log")


def llm_compressor(model: Path, calibration: Path, work: Path, peers: Path, dtype: str) -> Run:
    """Run llm-compressor's sequential pipeline on the same tokens."""
    output = work / "llm-compressor"
    shutil.rmtree(output, ignore_errors=True)
    command = (
        peers.absolute() / "llmcompressor/bin/python",
        Path(__file__).parent / "peers/llmcompressor_gptq.py",
        *(model, calibration, output, "--routed", "--dtype", dtype),
        *("--ignore", "re:.*self_attn.*"),
    )
    offline = {"HF_HUB_OFFLINE": "1"}
    return run(command, log=work / "llm-compressor.log", environment=offline, where=work)


def by_part() -> int:
    """Print the seconds of Hessians and of rounding, then those of experts taken together."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("layer            part         one expert    all experts")
    for name, (experts, chosen, hidden, width) in SHAPES.items():
        parts = {"Hessians": 0.0, "gptq": 0.0}
        for features, outputs in ((hidden, (width, width)), (width, (hidden,))):
            rows = torch.randn(TOKENS * chosen // experts, features)
            observer = HessianObserver(features=features)
            parts["Hessians"] += seconds(partial(observer.update, rows))[0]
            state = observer.state()
            weights = {
                str(number): torch.randn(count, features) * 0.02
                for number, count in enumerate(outputs)
            }
            told: dict[str, Any] = {"statistics": state, "scale_dtype": torch.bfloat16}
            rounding = partial(ALGORITHMS["gptq"].quantize_group, weights, SCHEME, **told)
            parts["gptq"] += seconds(rounding)[0]
        for part, spent in parts.items():
            print(f"{name:16} {part:10} {spent:10.2f} s {experts * spent:12.0f} s")
    print("\ncolumns x rows    one by one    together   same bits")
    for features, rows_of_one in ((2048, 2048), (1024, 2048), (768, 2048), (256, 512)):
        compare(features, rows_of_one)
    return 0


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """A core's seconds for some work, and its result."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def compare(features: int, rows: int) -> None:
    """Print the seconds of rounding equal experts in both ways, whether the qvalues are equal."""
    factors, scales, weights = [], [], []
    for _ in range(TOGETHER):
        x = torch.randn(2 * features, features)
        factors.append(feedback.feedback_of(x.T @ x, name="random"))
        weights.append(torch.randn(rows, features) * 0.02)
        groups = weights[-1].view(rows, features // GROUP, GROUP)
        scales.append((groups.abs().amax(-1) / 7).T.contiguous())

    def one_by_one() -> list[Tensor]:
        return [
            feedback.round_columns_(
                feedback.gathered([weight], order=factor.order),
                scale,
                None,
                scheme=SCHEME.weights,
                feedback=factor,
            )
            for weight, scale, factor in zip(weights, scales, factors, strict=True)
        ]

    def together() -> list[Tensor]:
        works = [
            feedback.gathered([weight], order=factor.order)
            for weight, factor in zip(weights, factors, strict=True)
        ]
        return round_together_(torch.stack(works), torch.stack(scales), SCHEME.weights, factors)

    one_by_one()
    (alone, expected), (joined, found) = seconds(one_by_one), seconds(together)
    same = all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    print(f"{features:7} x {rows:5} {alone:10.2f} s {joined:10.2f} s   {same}")


def round_together_(
    work: Tensor, scales: Tensor, scheme: TensorScheme, factors: Sequence[feedback.Feedback]
) -> list[Tensor]:
    """The qvalues [I, R] of each expert, as `round_columns_` makes them of one.

    Products are those of one expert at a time, so that their sums have one order; everything else
    is done for all experts at once.

    Args:
        work: [E, I, R], modified.
        scales: [E, G, R].
        scheme: symmetric integers.
        factors: of each expert's Hessian.
    """
    experts, columns, rows = work.shape
    flat = scales.flatten(0, 1)
    first = torch.arange(experts)[:, None] * scales.shape[1]
    group_size = columns // scales.shape[1]
    places = torch.stack([factor.order for factor in factors])  # [E, I]
    of_column = (places // group_size + first).T.contiguous()  # [I, E], rows of `flat`
    qvalue = torch.empty(columns, experts, rows, dtype=qvalue_dtype(scheme))
    rounded = torch.empty(experts, rows)
    for stop in range(columns, 0, -feedback.BLOCK):
        start = max(0, stop - feedback.BLOCK)
        target = torch.empty(experts, stop - start, rows)
        within = []
        for own, errors, factor in zip(target, work, factors, strict=True):
            lower = factor.lower
            torch.addmm(errors[start:stop], lower[stop:, start:stop].T, errors[stop:], out=own)
            within.append(lower[start:stop, start:stop].T.contiguous())
        for end in range(stop - start, 0, -feedback._SUB_BLOCK):
            begin = max(0, end - feedback._SUB_BLOCK)
            for own, errors, inner in zip(target, work, within, strict=True):
                own[begin:end].addmm_(inner[begin:end, end:], errors[start + end : stop])
            for i in range(end - 1, begin - 1, -1):
                for own, errors, inner in zip(target, work, within, strict=True):
                    if i + 1 < end:
                        known = errors[start + i + 1 : start + end]
                        own[i].addmv_(known.T, inner[i, i + 1 : end])
                scale = flat.index_select(0, of_column[start + i])
                torch.div(target[:, i], scale, out=rounded)
                qvalue[start + i] = affine.round_(rounded, None, scheme)
                work[:, start + i] -= rounded.mul_(scale)
    found = torch.empty(experts, columns, rows, dtype=qvalue.dtype)
    for number, factor in enumerate(factors):
        found[number, factor.order] = qvalue[:, number]
    return list(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
