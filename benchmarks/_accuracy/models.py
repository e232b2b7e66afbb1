"""The models that are quantized, and the text: token ids for calibration and for the evaluation, the same for every program."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from _quantflow import QUANTFLOW
from _watch import Failed, run
from torch import Tensor

from quantflow.calibration.text import hash_sequences, read_documents, select
from quantflow.evaluation.windows import evaluation_sequences
from quantflow.formats.llama_cpp.tensors import places, row_order
from quantflow.models.load import load_tokenizer, open_source

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tiny-llama"
TRAIN = Path(__file__).with_name("train_model.py")
SAMPLES, LENGTH = 64, 512  # calibration sequences and tokens of each, also the evaluation's windows
TRAINED = ("gpt-neox", "wide-llama")
MODELS = ("tiny-llama", "tiny-llama-outliers", *TRAINED)


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """What every program is given and judged by.

    Attributes:
        calibration: .jsonl, a line with `input_ids` for each of SAMPLES sequences of LENGTH tokens.
        windows: held-out token ids, int64 [S] each.
    """

    calibration: Path
    windows: list[Tensor]


def make_model(name: str, work: Path, *, minutes: float) -> Path:
    """Return the folder of a model, made below `work` unless it is there.

    Args:
        name: one of MODELS.
        work: where models stay.
        minutes: of training, for TRAINED; models that are there are taken as they are.

    Raises:
        Failed: the program that makes it failed.
    """
    if name == "tiny-llama":
        return EXAMPLE
    folder = work / name
    if (folder / "model.safetensors").exists():
        return folder
    partial = work / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    command: tuple[str | Path, ...] = (sys.executable, EXAMPLE / "plant_outliers.py", "--output", partial)
    if name in TRAINED:
        print(f"{name}: training for {minutes:g} minutes", flush=True)
        command = (sys.executable, TRAIN, name, "--minutes", str(minutes), "--output", partial)
    done = run(command, log=work / f"{name}.log", environment={"PYTHONPATH": str(EXAMPLE)} if name in TRAINED else None)
    print(f"{name}: {done.output.splitlines()[-1]}", flush=True)
    partial.rename(folder)
    return folder


def make_text(work: Path, *, tokens: int) -> Text:
    """Write the calibration file, the same each time, and return it with the evaluation's windows.

    Args:
        work: where the text goes.
        tokens: held-out token ids at most.

    Raises:
        Failed: the text is too short, or the two overlap.
    """
    run((sys.executable, EXAMPLE / "stdlib_text.py", "--output", work, "--samples", str(4 * SAMPLES)), log=work / "text.log")
    tokenizer = load_tokenizer(EXAMPLE)
    documents = [ids for ids in read_documents(work / "calibration.jsonl", tokenizer) if len(ids) >= LENGTH]
    sequences = select(documents, SAMPLES, sequence_length=LENGTH, seed=0)
    if len(sequences) < SAMPLES:
        raise Failed(f"{work}: {len(sequences)} excerpts of {LENGTH} tokens, {SAMPLES} are needed")
    calibration = work / "calibration-ids.jsonl"
    calibration.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in sequences))
    heldout = read_documents(work / "heldout.jsonl", tokenizer)
    windows = evaluation_sequences(heldout, tokens=tokens, sequence_length=LENGTH)
    known = {hash_sequences([sequence]) for sequence in sequences}
    if shared := [number for number, window in enumerate(windows) if hash_sequences([window]) in known]:
        raise Failed(f"{work}: window {shared[0]} is a calibration sequence")
    return Text(calibration=calibration, windows=windows)


def export_gguf(model: Path, folder: Path) -> tuple[Path, Path]:
    """Write a model in bf16 for llama.cpp, and beside it which rows of the checkpoint each linear's rows are.

    Args:
        model: the folder of the model.
        folder: is made anew.

    Returns:
        The file, and .json: name in the file -> [name in the checkpoint, its rows in the order of the file].

    Raises:
        Failed: the export failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    run((*QUANTFLOW, "export", model, "-o", folder, "--format", "gguf", "--dtype", "bf16"), log=folder.with_suffix(".log"))
    source = open_source(model)
    found = places(source.config, {name: tuple(info.shape) for name, info in source.checkpoint.infos.items()})
    weights = [place for place in found if place.name.startswith("blk.") and len(place.shape) == 2]
    names = folder / "names.json"
    names.write_text(json.dumps({place.name: [place.source, row_order(place).tolist()] for place in weights}))
    return folder / "model-bf16.gguf", names
