"""quantflow for runtime.py; see _serve.py.

SETTINGS: artifact, dtype, exact, rounded: whether inputs are rounded whoever wrote the folder,
kv_cache, threads, share: of a mixture's experts, those that a token is sent to.
"""

import time
from pathlib import Path
from typing import Any

import torch
from _serve import Program, Timed, clocked, serve

from quantflow import __version__
from quantflow.benching import kernel_speed
from quantflow.files.checkpoint import open_checkpoint
from quantflow.runtime import load as runtime

CACHE_BYTES = 128 << 20  # read first, so that what is timed comes from memory
REPEATS = 5


def load(settings: dict[str, Any]) -> Program:
    """Load an artifact as `quantflow generate` does, without hashing its files first."""
    torch.set_num_threads(settings["threads"])
    loaded = runtime.load(
        settings["artifact"],
        decoder="auto",
        exact=settings["exact"],
        rounded_inputs=settings.get("rounded", False),
        kv_cache=settings["kv_cache"],
        dtype=getattr(torch, settings["dtype"]),
        verify=False,
    )
    if loaded.reasons:
        raise SystemExit(f"{settings['artifact']}: {'; '.join(loaded.reasons)}")
    infos = open_checkpoint(Path(settings["artifact"])).infos
    tied = "lm_head.weight" not in infos and "lm_head.weight_packed" not in infos
    weights = sum(
        info.nbytes * (settings.get("share", 1.0) if ".experts." in name else 1.0)
        for name, info in infos.items()
        if tied or name != "model.embed_tokens.weight"
    )
    decoder = loaded.decoder

    def run(rows: list[list[int]], new: int) -> Timed:
        decoder.begin(rows=len(rows), capacity=len(rows[0]) + new)
        with torch.inference_mode():
            return clocked(
                lambda ids: decoder.forward(ids).argmax(dim=-1, keepdim=True),
                torch.tensor(rows),
                new,
            )

    return Program(version=__version__, weight_bytes=round(weights), run=run, read=read)


def read(size: int) -> float:
    """Return the fewest seconds that a plain read of so many bytes took, with torch's threads."""
    other, data = torch.zeros(CACHE_BYTES, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    taken = []
    for _ in range(REPEATS):
        kernel_speed.read(other)
        begin = time.perf_counter()
        kernel_speed.read(data)
        taken.append(time.perf_counter() - begin)
    return min(taken)


if __name__ == "__main__":
    serve(load)
