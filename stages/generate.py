"""The thin runtime as a verb: verify, load, and continue one prompt.

Reads    the artifact
Writes   nothing
Resumes  nothing
Fails    2 unknown backend or option, 3 no tokenizer, 7 the artifact is damaged
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantflow.errors import UsageError
from quantflow.models.load import load_tokenizer
from quantflow.runtime.decoding import Sampling, generate
from quantflow.runtime.load import load
from quantflow.runtime.offload import load_offloaded


@dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt; without temperature, top_k and top_p the most likely token is taken each time.

    Attributes:
        disk_offload: leave the weights on disk and read them for every token; the same tokens with little memory.
        device: where the model runs.
    """

    artifact: Path
    prompt: str
    max_new_tokens: int = 64
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    backend: str = "auto"
    dtype: str = "float32"
    disk_offload: bool = False
    device: str = "cpu"


def run(job: Job, stream: Callable[[str], None]) -> dict[str, Any]:
    """Generate, handing the text to `stream` piece by piece, and return prompt, text and token ids."""
    if job.disk_offload and job.device != "cpu":
        raise UsageError(f"generate: disk_offload on device {job.device}", "leave one of them out")
    options: Any = {} if job.disk_offload else {"device": job.device}
    opened = load_offloaded if job.disk_offload else load
    runtime = opened(job.artifact, backend=job.backend, dtype=getattr(torch, job.dtype), **options)
    tokenizer = runtime.tokenizer or load_tokenizer(job.artifact)
    prompt = tokenizer(job.prompt, return_tensors="pt")["input_ids"].to(job.device)  # [1, S]
    shown: list[int] = []
    told = ""

    def on_token(token: int) -> None:
        nonlocal told
        shown.append(token)
        text = job.prompt + tokenizer.decode(shown, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half of a character: its next token completes it
            stream(text[len(told) :])
            told = text

    sampling = None
    if any(value is not None for value in (job.temperature, job.top_k, job.top_p)):
        sampling = Sampling(
            temperature=1.0 if job.temperature is None else job.temperature,
            top_k=job.top_k,
            top_p=job.top_p,
            seed=job.seed,
        )
    tokens = generate(
        runtime.model,
        prompt,
        max_new_tokens=job.max_new_tokens,
        sampling=sampling,
        eos_token_id=runtime.eos_token_ids,
        stream=on_token,
    )
    text = tokenizer.decode(shown, skip_special_tokens=True)
    stream((job.prompt + text)[len(told) :])
    return {
        "prompt": job.prompt,
        "text": text,
        "tokens": shown,
        "total_tokens": int(torch.as_tensor(tokens).numel()),
    }
