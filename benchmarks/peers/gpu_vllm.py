"""vLLM for gpu.py: ARTIFACT OUTPUT TOKENS. Run with its environment's Python; OUTPUT gets JSON."""

import json
import statistics
import sys
import time
from pathlib import Path

import vllm

RUNS = 3


def main() -> None:
    """Load an artifact, continue one prompt several times, write tokens per second."""
    artifact, output, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    model = vllm.LLM(model=artifact, max_model_len=512, gpu_memory_utilization=0.5)
    wanted = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    taken = []
    for _ in range(RUNS + 1):
        begin = time.perf_counter()
        model.generate(["def main():"], wanted, use_tqdm=False)
        taken.append(time.perf_counter() - begin)
    speed = count / statistics.median(taken[1:])  # the first is not counted
    output.write_text(json.dumps({"version": vllm.__version__, "tokens_per_second": speed}) + "\n")


if __name__ == "__main__":
    main()
