"""Calibration text that the model writes itself, beside the text that it is given.

    <o>/text/calibration.safetensors   token ids: the sequences of the given text, then the model's
    <o>/.text.work/00003.safetensors   a batch of the model's sequences, while it writes

Statistics of few tokens have the noise of these tokens, and scales tuned on them fit them: at two
bits the tuned example model has half of the divergence on the calibration text that it has on other
text (docs/accuracy.md). The model has more text in itself. Each of its sequences begins with the
first BEGUN tokens of a calibration sequence and goes on to that one's length, every token drawn
from the distribution that the model predicts. Its calibration sequences are taken in turns.

Where the CPU multiplies bfloat16 faster than float32, and on a GPU, the model writes in bfloat16.
It is in memory as a whole, so a model that waits on disk does not write. Source: Liu et al. 2023,
"LLM-QAT", arXiv:2305.17888, section 2.1 (there from a random first token, for quantization-aware
training).

Reads    the model, the calibration text
Writes   <o>/text
Resumes  at the batch where it stopped
Fails    2 under torchrun, 5 the model does not fit into memory
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from quantflow import process_memory
from quantflow.core import determinism
from quantflow.core.device import open_device
from quantflow.files import disk, stage_folder
from quantflow.files.canonical import digest_of
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.record import CALIBRATION_NAME
from quantflow.measuring.stored import as_tensors
from quantflow.models import layer_store
from quantflow.models.load import Source
from quantflow.models.open import graph_for
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.cost import BEGUN, WRITTEN_AT_ONCE, need_synthetic
from quantflow.planning.resources import grant
from quantflow.planning.sizes import model_size
from quantflow.progress import Progress
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding import Rules, Sampling, generate
from quantflow.runtime.load import load

VERSION = 1
NAME = "text"  # the folder, below that of the ranks


def with_written(
    job: MeasureJob,
    source: Source,
    sequences: Sequence[Tensor],
    *,
    inputs: Mapping[str, Any],
    progress: Progress,
) -> MeasureJob:
    """The job whose text is the given one and the model's own; both are in its folder.

    Args:
        job: its text is a file, of which it wants `synthetic` sequences more.
        source: the model.
        sequences: the calibration sequences of the given text, token ids [S] each.
        inputs: everything that these, the model and the draws depend on.
        progress: is told of batches.

    Raises:
        UsageError: the folder holds the text of other inputs.
        ResourceError: the model does not fit into memory, or the text onto the disk.
        QuantflowError: the model cannot generate.
    """
    folder = job.output / NAME
    total = len(sequences) + job.calibration.synthetic
    longest = max(map(len, sequences))
    device = open_device(job.compute.device)
    dtype = determinism.products(device)
    inputs = {**inputs, "dtype": str(dtype).removeprefix("torch."), "version": VERSION}
    with stage_folder.locked(folder):
        if not stage_folder.is_up_to_date(folder, inputs):
            stage_folder.refuse_other_result(folder, inputs, force=job.force)
            size = model_size(source.checkpoint.infos, source.config, graph_for(source.config))
            grant(
                need_synthetic(size, length=longest, dtype=dtype, sequences=total),
                job.resources,
                folder=folder,
            )
            own = _own_text(job, sequences, dtype=dtype, key=digest_of(inputs), progress=progress)
            process_memory.give_back_holes()
            every = [*sequences, *own]
            with stage_folder.publish(folder, stage=NAME, inputs=inputs) as temporary:
                disk.write_file(temporary / CALIBRATION_NAME, save(as_tensors(every)))
        disk.remove_tree(_work(folder))
    calibration = replace(
        job.calibration,
        source=str(folder / CALIBRATION_NAME),
        samples=total,
        sequence_length=longest,
    )
    return replace(job, calibration=calibration)


def _own_text(
    job: MeasureJob,
    sequences: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    key: str,
    progress: Progress,
) -> list[Tensor]:
    """The sequences that the model writes, token ids [S] each."""
    begun = [sequences[i % len(sequences)] for i in range(job.calibration.synthetic)]
    batches = [begun[i : i + WRITTEN_AT_ONCE] for i in range(0, len(begun), WRITTEN_AT_ONCE)]
    paths = [layer_store.layer_path(_work(job.output / NAME), i) for i in range(len(batches))]
    keys = [digest_of([key, i]) for i in range(len(batches))]
    left = [i for i, path in enumerate(paths) if layer_store.finished(path, keys[i]) is None]
    if left:
        disk.make_folder(paths[0].parent)
        opened = load(job.model, decoder="auto", dtype=dtype, device=job.compute.device)
        tokenizer = load_tokenizer(job.model)
        known = opened.decoder.vocab_size if tokenizer is None else len(tokenizer)
        for i in progress.steps(
            left, stage="measure: the model writes", unit="batch", before=len(batches) - len(left)
        ):
            tokens = _continued(opened.decoder, batches[i], known=known, seed=_seed(job.seed, i))
            layer_store.write_layer(paths[i], {"tokens": tokens}, {"key": keys[i]})
    return [
        row[: len(start)]
        for path, batch in zip(paths, batches, strict=True)
        for start, row in zip(batch, load_file(path)["tokens"], strict=True)
    ]


def _continued(decoder: Decoder, batch: Sequence[Tensor], *, known: int, seed: int) -> Tensor:
    """The beginnings of some sequences, continued to the longest one's length, [B, S] int64.

    Args:
        decoder: the model.
        batch: the sequences that begin them.
        known: number of the tokenizer's tokens; a head often has more rows, which stand for none.
        seed: seed of the draws.
    """
    shortest, longest = min(map(len, batch)), max(map(len, batch))
    begun = max(1, min(BEGUN, shortest // 2))
    ids = torch.stack([sequence[:begun] for sequence in batch]).to(decoder.device)
    # a token that is none would end a text, and no text ends before it is as long as it will be
    return generate(
        decoder,
        ids,
        max_new_tokens=longest - begun,
        sampling=Sampling(temperature=1.0, seed=seed),
        rules=Rules(min_new_tokens=longest - begun),
        eos_token_id=range(known, decoder.vocab_size),
    ).cpu()


def _seed(seed: int, batch: int) -> int:
    """The seed of a batch's draws."""
    return int.from_bytes(hashlib.sha256(f"text:{seed}:{batch}".encode()).digest()[:7])


def _work(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.work"
