"""llm-compressor without a model definition: MODEL SCHEME OUTPUT [--workers N].

It runs with its environment's Python.
"""

import argparse

from llmcompressor import model_free_ptq


def main() -> None:
    """Quantize every linear of the decoder layers with a preset scheme, file by file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("scheme", help="FP8_DYNAMIC or W4A16")
    parser.add_argument("output")
    parser.add_argument("--workers", type=int, default=1, help="Files at a time; 1 is its default.")
    given = parser.parse_args()
    model_free_ptq(
        model_stub=given.model,
        save_directory=given.output,
        scheme=given.scheme,
        ignore=["lm_head", "re:.*embed_tokens$"],
        max_workers=given.workers,
        device="cpu",
    )


if __name__ == "__main__":
    main()
