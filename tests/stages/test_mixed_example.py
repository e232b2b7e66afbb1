"""The reason to mix schemes: less loss at equal bits.

The example model loses less than between uniform schemes.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.text import read_documents
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.finished_plan import plan_from
from quantflow.planning.recipe import Calibration, Candidate, Measure, Quantize, Resources
from quantflow.quantizing import quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.mixed_precision.measured_divergence import divergence
from quantflow.reporting.progress_line import ProgressLine
from quantflow.validating.windows import evaluation_sequences

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama"
QUIET = ProgressLine(quiet=True)
# all of them take longer
FEW = tuple(Candidate(scheme=f"W{bits}A16", group_size=128) for bits in (3, 4, 5, 6))


def text():
    spec = importlib.util.spec_from_file_location("tiny_llama_text", EXAMPLE / "stdlib_text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path, documents):
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


@pytest.mark.slow
@pytest.mark.skipif(
    not (EXAMPLE / "model.safetensors").is_file(),
    reason="the example model is part of the repository",
)
def test_a_mixture_is_below_the_straight_line_between_uniform_4_and_5_bits(tmp_path):
    source = text()
    calibration = write(tmp_path / "calibration.jsonl", source.excerpts(8))
    heldout = write(tmp_path / "heldout.jsonl", source.documents(heldout=True)[:8])
    original = open_source(EXAMPLE)
    graph = graph_for(original.config)
    documents = read_documents(heldout, load_tokenizer(EXAMPLE))
    sequences = evaluation_sequences(documents, tokens=768, sequence_length=256)
    given = Calibration(source=str(calibration), samples=8, sequence_length=128)
    measure.run(
        MeasureJob(
            model=EXAMPLE,
            output=tmp_path / "1",
            calibration=given,
            options=Measure(stats=("fisher",)),
        ),
        QUIET,
    )
    found = {}
    for name, words in {"4": {}, "5": {}, "mixed": {"target_bpw": 4.25, "candidates": FEW}}.items():
        scheme = f"W{name}A16" if name in "45" else "W4A16"
        entry = Quantize(name=name, scheme=scheme, algorithm="rtn_mse", **words)
        job = QuantizeJob(
            model=EXAMPLE, output=tmp_path / name, entry=entry, measurement=tmp_path / "1"
        )
        folder = quantize.run(job, QUIET)
        plan = plan_from(json.loads((folder / "quantize.json").read_text()))
        found[name] = divergence(
            folder,
            plan,
            source=original,
            graph=graph,
            sequences=sequences,
            key=name,
            resources=Resources(),
            progress=QUIET,
        )
    bits = json.loads((tmp_path / "mixed" / "choice.json").read_text())["bits_per_weight"]
    # uniform: a scale of 16 bits per 128 weights
    line = found["4"] + (bits - 4.125) * (found["5"] - found["4"])
    print(f"\nmean KLD: 4.125 bits {found['4']:.5f}, 5.125 bits {found['5']:.5f}; {bits:.4f} "
          f"bits mixed {found['mixed']:.5f}, "
          f"on the line {line:.5f}")  # fmt: skip
    assert bits <= 4.25
    assert found["mixed"] < 0.9 * line
