"""Triton's kernels compiled for cards that are not here: shared memory, registers, instructions.

    python benchmarks/triton_compiled.py           # the table of docs/gpu.md
    python benchmarks/triton_compiled.py --json

Needs the package triton, and no GPU. `matrix` counts instructions of tensor cores (mma, wgmma,
tcgen05, mfma) in the code of one program, `spilled` bytes of registers that went to memory.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quantflow.backends.triton import layout, w4a16, w8a16  # noqa: E402

CARDS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90a": GPUTarget("cuda", 90, 32),
    "sm_100a": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MATRIX = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma\w*)"
COLUMNS, ROWS = 4096, 14336
POINTERS = {
    "x": "*bf16",
    "packed": "*u8",
    "qvalue": "*i8",
    "scale": "*fp32",
    "zero": "*u8",
    "y": "*fp32",
}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    rows = [row for card in CARDS for row in compiled(card)]
    if parser.parse_args().json:
        print(json.dumps(rows))
        return 0
    print(
        "| kernel | tokens | card | shared memory, bytes | spilled, bytes | matrix instructions |"
    )
    print("|---|---:|---|---:|---:|---:|")
    for row in sorted(rows, key=lambda row: (row["kernel"], row["tokens"])):
        print("| {kernel} | {tokens} | {card} | {shared:,} | {spilled} | {matrix} |".format(**row))
    return 0


def compiled(card: str) -> list[dict[str, Any]]:
    """What the kernels became for a card, for few and many tokens."""
    rows = []
    for name, kernel in (("w4a16", w4a16.kernel), ("w8a16", w8a16.kernel)):
        for tokens in (1, 64):
            block_m, block_n, shares = layout.sizes(tokens, ROWS, COLUMNS // 128)
            chosen = {
                "columns": COLUMNS,
                "group": 128 if name == "w4a16" else COLUMNS,
                "zeros": True,
                "shares": shares,
                "block_m": block_m,
                "block_n": block_n,
                "block_k": 128,
                "dot": tl.bfloat16,
            }
            signature = {
                name: POINTERS.get(name, "constexpr" if name in chosen else "i32")
                for name in kernel.arg_names
            }
            constants = {
                (index,): chosen[name]
                for index, name in enumerate(kernel.arg_names)
                if name in chosen
            }
            # as torch's memory is, which lets loads be wide and copied ahead
            aligned = {
                (index,): [["tt.divisibility", 16]]
                for index, name in enumerate(kernel.arg_names)
                if name in POINTERS
            }
            made = triton.compile(
                ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
                target=CARDS[card],
                options={"num_warps": layout.WARPS, "num_stages": 2 if card == "gfx942" else 3},
            )
            text = made.asm["amdgcn" if card == "gfx942" else "ptx"]
            rows.append(
                {
                    "kernel": name,
                    "tokens": tokens,
                    "card": card,
                    "shared": made.metadata.shared,
                    "spilled": spilled(made),
                    "matrix": len(re.findall(MATRIX, text)),
                }
            )
    return rows


def spilled(made: Any) -> int:
    """The bytes of a program's registers that went to memory."""
    if "amdgcn" in made.asm:
        return sum(map(int, re.findall(r"\.vgpr_spill_count:\s*(\d+)", made.asm["amdgcn"]))) * 4
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
        used = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    (local,) = re.findall(r"LOCAL:(\d+)", used)
    (stack,) = re.findall(r"STACK:(\d+)", used)
    return max(int(local), int(stack))


if __name__ == "__main__":
    sys.exit(main())
