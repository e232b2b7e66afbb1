"""GPTQModel: MODEL CALIBRATION OUTPUT.

It runs with its environment's Python, GPTQMODEL_CPU_WORKERS=2 on two cores.

4 bits, symmetric groups of 128, no act order, lm_head left alone; finished layers go to disk, which
is its default.
"""

import argparse
import json
from pathlib import Path

from gptqmodel import GPTQModel, QuantizeConfig


def main() -> None:
    """Load, quantize with the given token ids, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("calibration", help=".jsonl with `input_ids`")
    parser.add_argument("output")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    given = parser.parse_args()
    rows = [
        json.loads(line)["input_ids"] for line in Path(given.calibration).read_text().splitlines()
    ]
    model = GPTQModel.load(
        given.model,
        QuantizeConfig(bits=4, group_size=128, sym=True, desc_act=False),
        device=given.device,
    )
    model.quantize(
        [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1
    )
    model.save(given.output)


if __name__ == "__main__":
    main()
