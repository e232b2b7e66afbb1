"""Decoders that take turns, so that what else the machine does slows all of them."""

import statistics
from collections.abc import Mapping

from quantflow.benching.generation_speed import TimedRun, random_prompts, time_run
from quantflow.runtime.decoder import Decoder


def timed_in_turns(
    decoders: Mapping[str, Decoder], *, vocab_size: int, prompt: int, new: int, runs: int
) -> dict[str, tuple[float, float]]:
    """Return tokens per second and seconds of the first token of each decoder: medians over turns.

    Args:
        decoders: by name; in each turn all get the same random prompt.
        vocab_size: of all of them.
        prompt: its tokens.
        new: tokens that are decoded.
        runs: turns that count.
    """
    seen: dict[str, list[TimedRun]] = {name: [] for name in decoders}
    for turn in range(runs + 1):
        prompts = random_prompts(1, prompt, vocab_size=vocab_size, seed=turn)
        for name, decoder in decoders.items():
            once = time_run(decoder, prompts, new_tokens=new)
            seen[name] += [once] if turn else []
    return {
        name: (
            statistics.median(len(once.step_seconds) / sum(once.step_seconds) for once in times),
            statistics.median(once.first_seconds for once in times),
        )
        for name, times in seen.items()
    }
