"""Calibration text that a model continues itself, as the token ids that generation runs.

Reads    an artifact or a model, prompts
Writes   <o>, a safetensors file: `tokens` [T] and `lengths` [n], int64
Resumes  nothing
Fails    2 numbers that cannot be decoded; 3 prompts that cannot be read, no tokenizer;
         and whatever generating raises

A decoder is causal: a forward over a prompt and its continuation computes at each position what the
prompt's forward and the decode steps computed there. So `measure` of these tokens sees what
generation computes. The last token of each text is put out and never run, so it is left out.
"""

from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save

from quantflow.files import disk
from quantflow.measuring.continue_job import ContinueJob
from quantflow.measuring.stored import as_tensors
from quantflow.models.tokenizer import load_tokenizer
from quantflow.progress import Progress
from quantflow.runtime import generation
from quantflow.runtime.generate_job import GenerateJob, Sampling
from quantflow.runtime.prompt_files import encode, read_prompts
from quantflow.sources.models import model_folder


def run(job: ContinueJob, progress: Progress) -> dict[str, Any]:
    """Continue the prompts and write the file.

    Returns:
        `file`, `sequences`, `prompt_tokens` and `new_tokens`, the number of tokens that were run.
    """
    job = replace(job, model=model_folder(job.model, progress=progress))
    prompts = read_prompts(job.prompts, column=job.column, limit=job.samples)
    rows = encode(prompts, load_tokenizer(job.model), limit=job.max_input_tokens, chat=job.chat)
    drawn = (
        None if job.temperature is None else Sampling(temperature=job.temperature, seed=job.seed)
    )
    continuing = GenerateJob(
        artifact=job.model,
        source=job.prompts,
        column=job.column,
        limit=job.samples,
        max_input_tokens=job.max_input_tokens,
        max_new_tokens=job.new_tokens,
        chat=job.chat,
        sampling=drawn,
        batch_size=job.batch_size,
        dtype=job.dtype,
    )
    said = generation.run(continuing, lambda _: None, progress)
    assert said is not None  # this process is no rank
    sequences = [
        row + output["tokens"][:-1] for row, output in zip(rows, said["outputs"], strict=True)
    ]
    disk.make_folder(job.output.parent)
    disk.write_atomic(job.output, save(as_tensors([torch.tensor(each) for each in sequences])))
    prompt_tokens = sum(map(len, rows))
    return {
        "file": str(job.output),
        "sequences": len(sequences),
        "prompt_tokens": prompt_tokens,
        "new_tokens": sum(map(len, sequences)) - prompt_tokens,
    }
