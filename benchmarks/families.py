"""Every language model of transformers as a tiny random model.

It goes through all stages, and through the programs that run the artifact.

    python benchmarks/families.py            # all types, some seconds each; resumed
    python benchmarks/families.py --only phi gemma2 --schemes W4A16 --debug
    python benchmarks/families.py --table    # run nothing, print the table
    python benchmarks/families.py --page     # run nothing, write docs/families.md's table

For each model type of transformers' causal language models, and of those that read images too, that
a small configuration can be made of: a random model with a tokenizer is measured; W4A16 (gptq),
W8A8 and FP8_DYNAMIC are quantized, exported with a proof, verified and generated from; W4A16 is
validated too. Then the artifact is exported dequantized, stock transformers loads that, and its
logits are compared with our runtime's. Inputs of stock linears are rounded as the artifact says.
FP8's static scales are one per expert, which transformers' stacked experts cannot take, so that
with `--schemes FP8` a mixture's logits are not compared.

Stock transformers also loads artifacts as they are, with compressed-tensors: of W4A16 and
FP8_DYNAMIC, by rounding to nearest. Its logits are compared with those of the dequantized export. A
type is right, refused by an error, or silently wrong.

A type that is refused (exit code 6) has its matrices rounded by name, as `--algorithm rtn --linears
PATTERN` does: those are counted by themselves, and do not pass.

One process imports torch and transformers; every type runs in a fork of it, and so does every
proof: it reads files alone, as the process that `quantflow export` starts, but shares that one's
imports. `--results` (benchmarks/families.json) holds what was run: what is in it is not run again,
`--again` drops what failed.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _forks import ForkError, first_line, in_fork
from _tiny_models import KINDS, READS_IMAGES, VOCABULARY, auto_class, tiny_config, write_model
from transformers import AutoConfig
from transformers.utils import logging

import quantflow
from quantflow.core.parallel import Workers
from quantflow.errors import QuantflowError, SchemeError, UnsupportedError
from quantflow.exporting import canary, proof_process
from quantflow.exporting.proof import Prover
from quantflow.models.experts import is_stacked
from quantflow.models.names import NameMap
from quantflow.models.skeleton import skeleton
from quantflow.planning import stock_transformers
from quantflow.planning.recipe import Calibration, Export, Quantize, Validate
from quantflow.runtime.artifact import open_artifact

HERE = Path(__file__).resolve().parent
PAGE, BEGIN, END = (
    HERE.parent / "docs" / "families.md",
    "<!-- table: begin -->",
    "<!-- table: end -->",
)
SCHEMES = ("W4A16", "W8A8", "FP8_DYNAMIC")
MODEL, MEASURE, BY_NAME = "model", "measure", "by name"  # stages beside the schemes
WEIGHTS_ALONE = 1e-4  # of the logits' norm: the same sums in another order
ROUNDED_INPUTS = 2e-2  # an input between two codes may fall to either, and takes others with it
SECONDS = 300  # that a type may take
WORDS = (
    "value",
    "scale",
    "round",
    "group",
    "layer",
    "token",
    "model",
    "range",
    "shift",
    "pack",
    "zero",
    "point",
)
# of the calibration text, more where every expert needs enough of it
SAMPLES, OF_MIXTURES, LENGTH = 16, 80, 32
HELD_OUT = 8  # sequences that are validated
REFUSED = "refused: "  # what the reason of a refusal begins with
# the artifact itself in stock transformers: stage -> scheme; what the reasons begin with
STOCK = {"stock W4A16": "W4A16", "stock FP8_DYNAMIC": "FP8_DYNAMIC"}
LOUDLY, SILENTLY = "does not load: ", "computes something else: "
GROUP = 32  # divides all inputs of these models, as 128 does those of larger ones
# of the logits' norm: weights are made in the dtype of the scales; an input between two codes may
# fall to either, and a router then choose other experts. A wrong weight is off by about 1.
DECOMPRESSED, ROUNDED_IN_STOCK = 2e-2, 0.3

Stages = dict[str, str | None]  # stage -> None where it passed, or the reason why it did not


def main(words: Sequence[str]) -> int:
    """Run the types that were named, or all; return 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types (default: all)")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--results", type=Path, metavar="FILE", default=HERE / "families.json")
    parser.add_argument("--again", action="store_true", help="run again what failed")
    parser.add_argument("--table", action="store_true", help="run nothing, print what FILE holds")
    parser.add_argument(
        "--page",
        action="store_true",
        help="run nothing, write what FILE holds into docs/families.md",
    )
    parser.add_argument("--debug", action="store_true", help="show what the forks print")
    given = parser.parse_args(words)
    rows: dict[str, Stages] = (
        json.loads(given.results.read_text()) if given.results.is_file() else {}
    )
    if not (given.table or given.page):
        _run_all(rows, given)
    if given.page:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")
    else:
        print(table(rows))
    return 0


def _run_all(rows: dict[str, Stages], given: argparse.Namespace) -> None:
    """Run what is missing in `rows`, and keep it in the file after each type."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # threads do not come along into a fork
    for kind in given.only or KINDS:
        known = rows.get(kind, {})
        if given.again and any(known.values()):
            known = {stage: None for stage, reason in known.items() if reason is None}
        wanted = [*given.schemes, *(key for key, one in STOCK.items() if one in given.schemes)]
        left = [stage for stage in wanted if stage not in known]
        if not left or known.get(MODEL) or known.get(MEASURE):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                stages = in_fork(
                    partial(_stages, kind, Path(folder), left), seconds=SECONDS, debug=given.debug
                )
            except ForkError as error:
                stages = {MEASURE: str(error)}
        failed = [f"{stage}: {reason}" for stage, reason in stages.items() if reason]
        print(
            f"{kind:26} {time.monotonic() - began:5.1f} s  {failed or 'passes'}",
            file=sys.stderr,
            flush=True,
        )
        rows[kind] = known | stages
        if given.results.is_file():  # another process may have added rows meanwhile
            rows |= json.loads(given.results.read_text()) | {kind: rows[kind]}
        beside = given.results.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
        beside.replace(given.results)


def passes(stages: Stages) -> bool:
    """Return whether a type passes everything that was run."""
    return MEASURE in stages and not any(
        reason for stage, reason in stages.items() if stage not in STOCK
    )


def table(rows: Mapping[str, Stages], peer: Mapping[str, str | None] | None = None) -> str:
    """The results as Markdown.

    It has type x scheme, the shares, the reasons of failures, and the types that cannot be made.
    """
    peer = peer if peer is not None else _peer()
    made = {kind: row for kind, row in sorted(rows.items()) if not row.get(MODEL)}
    schemes = [scheme for scheme in SCHEMES if any(scheme in row for row in made.values())]
    stock = [stage for stage in STOCK if any(stage in row for row in made.values())]
    columns = [*schemes, *stock, *(["llm-compressor"] if peer else [])]
    lines = [f"| type | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    notes: list[str] = []
    for kind, row in made.items():
        cells = [_cell(row.get(MEASURE) or row.get(scheme, ""), notes, kind) for scheme in schemes]
        cells += [_cell(row.get(stage, ""), notes, f"{stage}, {kind}") for stage in stock]
        cells += [_cell(peer.get(kind, ""), notes, f"llm-compressor, {kind}")] if peer else []
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    groups = {
        "Causal language models": [kind for kind in made if kind not in READS_IMAGES],
        "Models that read images too": [kind for kind in made if kind in READS_IMAGES],
    }
    shares = []
    for group, kinds in groups.items():
        lines_of = [
            _share(
                scheme, [made[kind].get(MEASURE) or made[kind].get(scheme, "") for kind in kinds]
            )
            for scheme in schemes
        ]
        lines_of += [_stock_share(stage, [made[kind] for kind in kinds]) for stage in stock]
        lines_of += (
            [_share("llm-compressor (W4A16, GPTQ)", [peer.get(kind, "") for kind in kinds])]
            if peer
            else []
        )
        shares += [f"{group}:\n", *lines_of, ""] if kinds else []
    named = [kind for kind, row in made.items() if BY_NAME in row and row.get(MEASURE)]
    rounded = [kind for kind in named if made[kind][BY_NAME] is None]
    both = (
        f"{len(named)} types are refused with the reason; "
        f"the weights of {len(rounded)} of them go through by name."
    )
    unmade = [f"- {kind}: {row[MODEL]}" for kind, row in sorted(rows.items()) if row.get(MODEL)]
    parts = [
        "\n".join(shares).strip(),
        both,
        "\n".join(lines),
        "\n".join(f"{n}. {note}" for n, note in enumerate(notes, 1)),
    ]
    parts += [f"No tiny model of {len(unmade)} types:", "\n".join(unmade)]
    return "\n\n".join(parts)


def _share(name: str, reasons: Sequence[str | None]) -> str:
    run = [reason for reason in reasons if reason != ""]
    passed = sum(reason is None for reason in run)
    return f"- {name}: {passed} of {len(run)} types pass, {passed / max(1, len(run)):.1%}"


def _stock_share(stage: str, rows: Sequence[Stages]) -> str:
    reasons = [row[stage] for row in rows if stage in row]
    counted = {
        "right": sum(reason is None for reason in reasons),
        "refused with an error": sum((reason or "").startswith(LOUDLY) for reason in reasons),
        "silently wrong": sum((reason or "").startswith(SILENTLY) for reason in reasons),
    }
    told = ", ".join(f"{count} {word}" for word, count in counted.items())
    return f"- {STOCK[stage]}, the artifact in stock transformers: {told}"


def _cell(reason: str | None, notes: list[str], kind: str) -> str:
    """Return yes, no with the number of a note, or nothing where it was not run."""
    if not reason:
        return "yes" if reason is None else ""
    note = f"{kind}: {reason}"
    if note not in notes:
        notes.append(note)
    return f"no ({notes.index(note) + 1})"


def _peer() -> dict[str, str | None]:
    """The findings of peers/families_llmcompressor.py: type -> None if it passed, or the reason."""
    file = HERE / "families_llmcompressor.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def _stages(kind: str, folder: Path, stages: Sequence[str]) -> Stages:
    """Return what became of a type: a reason or None for every stage that was reached."""
    try:
        write_model(tiny_config(kind), folder / "model")
    except Exception as error:
        return {MODEL: first_line(error)}
    measured = any(stage not in STOCK for stage in stages)  # rounding to nearest reads no text
    found: Stages = {MEASURE: _reason(partial(_measure, folder)) if measured else None}
    if found[MEASURE] is None:
        found |= {
            stage: _reason(partial(_in_stock, folder, STOCK[stage]))
            if stage in STOCK
            else _reason(partial(_through, folder, stage))
            for stage in stages
        }
    if (found[MEASURE] or "").startswith(REFUSED):
        found[BY_NAME] = _reason(partial(_by_name, folder))
    return found


def _reason(run: Callable[[], None]) -> str | None:
    try:
        run()
    except _StockError as error:
        return str(error)
    except QuantflowError as error:
        return f"{REFUSED if isinstance(error, UnsupportedError) else ''}{error.cause}"
    except Exception as error:
        return first_line(error)
    return None


def _measure(folder: Path) -> None:
    samples = OF_MIXTURES if "expert" in (folder / "model" / "config.json").read_text() else SAMPLES
    _write_text(folder / "text.jsonl", samples, seed=1)
    calibration = Calibration(
        source=str(folder / "text.jsonl"), samples=samples, sequence_length=LENGTH
    )
    quantflow.measure(folder / "model", folder / "1", calibration=calibration)


def _write_text(path: Path, documents: int, *, seed: int) -> None:
    rows = torch.randint(
        len(WORDS), (documents, LENGTH - 4), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    path.write_text(
        "".join(json.dumps({"text": " ".join(WORDS[i] for i in row)}) + "\n" for row in rows)
    )


def _by_name(folder: Path) -> None:
    """Round every matrix of the layers by its name, file to file.

    Raises:
        QuantflowError: it cannot be.
    """
    entry = Quantize(name="x", scheme="W4A16", algorithm="rtn", linears=("re:.*[.][0-9]+[.].*",))
    quantflow.quantize(folder / "model", folder / "named", entry=entry)
    _exported(folder / "named", folder / "named-artifact", model=folder / "model")


def _exported(quantized: Path, artifact: Path, *, model: Path | None = None) -> None:
    quantflow.export(quantized, artifact, model=model, options=Export(), prover=_ForkedProver())
    quantflow.verify(artifact)


class _ForkedProver(Prover):
    """What proves an artifact in a fork, as `quantflow export` does in a process that it starts."""

    def __init__(self) -> None:
        """Start nothing yet."""

    def expect(self, kind: str) -> None:
        """Do nothing: all is imported already."""
        assert canary  # once, for all forks

    def prove(
        self, artifact: Path, quantized: Path, source: Path, *, workers: int, measures: bool
    ) -> dict[str, Any]:
        """Return what the manifest has to say more; see `Prover.prove`.

        Raises:
            ForkError: the proof does not hold.
        """
        places = [path.resolve() for path in (artifact, quantized, source)]

        def proved() -> dict[str, Any]:
            with Workers(workers) as pool, torch.no_grad():
                return proof_process.prove(*places, workers=pool, measures=measures)

        notes: dict[str, Any] = in_fork(proved, seconds=SECONDS)
        return notes


def _through(folder: Path, scheme: str) -> None:
    """Take a measured model through the other stages, and compare what runs it.

    Raises:
        ValueError: our runtime's logits are not those of stock transformers.
    """
    quantized, artifact, plain = (
        folder / f"2-{scheme}",
        folder / f"4-{scheme}",
        folder / f"plain-{scheme}",
    )
    entry = Quantize(name="x", scheme=scheme)
    quantflow.quantize(folder / "model", quantized, entry=entry, measurement=folder / "1")
    _exported(quantized, artifact, model=folder / "model")
    if scheme.endswith("A16"):  # once for a type
        _write_text(folder / "heldout.jsonl", HELD_OUT, seed=2)
        options = Validate(
            text=str(folder / "heldout.jsonl"),
            tokens=HELD_OUT * (LENGTH - 4),
            sequence_length=LENGTH,
        )
        # whatever its gate says of random weights
        quantflow.validate(artifact, folder / "model", options=options)
    ours = quantflow.load(artifact, decoder="auto", exact=True)  # as stock transformers
    ids = torch.randint(2, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(3))
    ours.decoder.begin(rows=1, capacity=24)
    found = ours.decoder.forward(ids, last_only=False)
    for _ in range(4):  # one token after the other, as generate does
        ours.decoder.forward(
            found[:, -1:].argmax(-1) if found.ndim == 3 else found.argmax(-1)[:, None]
        )
    quantflow.export(artifact, plain, options=Export(format="dequantized", dtype="f32"))
    stock = (
        auto_class(AutoConfig.from_pretrained(plain))
        .from_pretrained(plain, dtype=torch.float32)
        .eval()
    )
    stacks = [part for part in stock.modules() if is_stacked(part)]
    # where nothing of transformers lies between an expert's products, nothing can round there
    closed = any(not hasattr(part, "_apply_gate") for part in stacks)
    if stacks and (scheme == "FP8" or (closed and not scheme.endswith("A16"))):
        return
    _round_inputs_(stock, ours.artifact)
    with torch.no_grad():
        expected = stock(input_ids=ids).logits
    error = float((found - expected).norm() / expected.norm())
    if not math.isfinite(error) or error > (
        WEIGHTS_ALONE if scheme.endswith("A16") else ROUNDED_INPUTS
    ):
        raise ValueError(f"the logits differ from transformers' by {error:.2g} of their norm")


class _StockError(Exception):
    """An artifact that stock transformers does not load, or computes something else of."""


def _in_stock(folder: Path, scheme: str) -> None:
    """Load an artifact in stock transformers, and compare with its dequantized export there.

    Raises:
        _StockError: it does not load, or computes something else.
    """
    quantized, artifact, plain = (folder / f"{name}-rtn-{scheme}" for name in ("2", "4", "plain"))
    entry = Quantize(name="x", scheme=scheme, algorithm="rtn")
    uniform = replace(entry, group_size=GROUP) if scheme.endswith("A16") else entry
    try:
        quantflow.quantize(folder / "model", quantized, entry=uniform)
    except SchemeError:  # fewer inputs: groups of several sizes, as the scheme's default makes them
        quantflow.quantize(folder / "model", quantized, entry=entry)
    _exported(quantized, artifact, model=folder / "model")
    quantflow.export(artifact, plain, options=Export(format="dequantized", dtype="f32"))
    reader = auto_class(AutoConfig.from_pretrained(plain))
    stock = reader.from_pretrained(plain, dtype=torch.float32).eval()
    # stacked experts are dequantized, and their inputs stay as they are
    _round_inputs_(stock, open_artifact(artifact), experts=False)
    ids = torch.randint(2, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = stock(input_ids=ids).logits
        try:
            found = reader.from_pretrained(artifact, dtype=torch.float32).eval()(ids).logits
        except Exception as error:
            table = json.loads((artifact / "config.json").read_text())["quantization_config"]
            sentence = table[stock_transformers.REFUSED]  # None where nothing is wrong with it
            ours = sentence is not None and sentence in str(error)
            told = f"`{sentence}`" if ours else first_line(error)
            raise _StockError(f"{LOUDLY}{told}") from error
    error = float((found - expected).norm() / expected.norm())
    allowed = DECOMPRESSED if scheme.endswith("A16") else ROUNDED_IN_STOCK
    if not math.isfinite(error) or error > allowed:
        raise _StockError(f"{SILENTLY}the logits differ by {error:.2g} of their norm")


def _round_inputs_(model: Any, artifact: Any, *, experts: bool = True) -> None:
    """Let the linears of transformers' model round what they read as the artifact says."""
    modules = dict(model.named_modules())
    names = NameMap(skeleton(artifact.config)).bind(artifact.names)
    for parameter, source in names.to_source.items():
        name, (owner, _, part) = (
            source.removesuffix(".weight"),
            parameter.removesuffix(".weight").partition(".parts."),
        )
        if part not in ("", "0"):  # of a joined linear, which reads one input
            continue
        if (
            name not in artifact.linears
            or name == source
            or artifact.linears[name].scheme.input is None
        ):
            continue
        linear = artifact.decode(name)
        if owner in modules:
            modules[owner].register_forward_pre_hook(
                lambda _, args, linear=linear: (linear.fake_quantize_input(args[0]), *args[1:])
            )
        elif experts:  # whose inputs are rounded token by token: all by one rule
            stack = modules[owner.partition(".experts.")[0] + ".experts"]
            if not hasattr(stack, "_own_gate"):
                stack._own_gate = stack._apply_gate
                stack._apply_gate = lambda x, stack=stack, linear=linear: (
                    linear.fake_quantize_input(stack._own_gate(x))
                )
                stack.register_forward_pre_hook(
                    lambda _, args, linear=linear: (linear.fake_quantize_input(args[0]), *args[1:])
                )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
