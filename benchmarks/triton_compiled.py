"""Triton's kernels compiled for cards that are not here: shared memory, registers, instructions.

    python benchmarks/triton_compiled.py           # the table of docs/gpu.md
    python benchmarks/triton_compiled.py --json

Needs the package triton, and no GPU. Of the code of one program, `instructions` counts all of the
machine's, `matrix` those of tensor cores (mma, wgmma, tcgen05, mfma); `spilled` is bytes of
registers that went to memory.

The package triton-xpu, which has the same module, compiles for Intel's cards alone:

    pip install --no-deps --target artifacts/peers/triton-xpu triton-xpu==3.3.0b1
    PYTHONPATH=artifacts/peers/triton-xpu python benchmarks/triton_compiled.py

Its code is SPIR-V, which the card's driver translates: instructions are those of SPIR-V, matrix
instructions are calls of the driver's matrix product, and nobody knows yet what is spilled.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quantflow.backends.triton import gate, layout, norm, rope, w4a16, w8a16  # noqa: E402
from quantflow.core import rounding_kernel  # noqa: E402
from quantflow.core.scheme import preset  # noqa: E402
from quantflow.numerics import columns_kernel  # noqa: E402

# What a driver says of Intel's Data Center GPU Max, as far as the compiler asks.
MAX = {
    "name": "Intel Data Center GPU Max 1550",
    "sub_group_sizes": [16, 32],
    "has_fp64": True,
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
    "has_subgroup_2d_block_io": True,
    "has_bfloat16_conversions": True,
}
OF_INTEL = "intel" in backends
CARDS = (
    {"max1550": GPUTarget("xpu", MAX, 32)}
    if OF_INTEL
    else {
        "sm_80": GPUTarget("cuda", 80, 32),
        "sm_90a": GPUTarget("cuda", 90, 32),
        "sm_100a": GPUTarget("cuda", 100, 32),
        "gfx942": GPUTarget("hip", "gfx942", 64),
    }
)
MATRIX = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma\w*|\w+_matrix_mad_k\d+)"
COLUMNS, ROWS, WIDTH = 4096, 14336, 128
POINTERS = {
    "x": "*bf16",
    "packed": "*u8",
    "qvalue": "*i8",
    "scale": "*fp32",
    "zero": "*u8",
    "y": "*fp32",
    "work": "*fp32",
    "aims": "*fp32",
    "lower": "*fp32",
    "order": "*i64",
    "scales": "*fp32",
    "zeros": "*fp32",
    "codes": "*i8",
    "weight": "*bf16",
    "eps": "fp32",
    **dict.fromkeys(("q", "k", "cos", "sin", "new_q", "new_k", "gate", "up"), "*bf16"),
}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    if OF_INTEL:
        _know_no_architecture()
    rows = [row for card in CARDS for row in compiled(card)]
    if parser.parse_args().json:
        print(json.dumps(rows))
        return 0
    print(
        "| kernel | of | card | shared memory, bytes | spilled, bytes | instructions | matrix "
        "instructions |"
    )
    print("|---|---|---|---:|---:|---:|---:|")
    for row in sorted(rows, key=lambda row: row["kernel"]):
        print(
            "| {kernel} | {of} | {card} | {shared:,} | {spilled} | {instructions:,} | {matrix} |"
            "".format(**row | ({"spilled": "-"} if row["spilled"] is None else {}))
        )
    return 0


def compiled(card: str) -> list[dict[str, Any]]:
    """What the kernels became for a card: products of few and many tokens, columns of gptq."""
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
            options = {"num_warps": layout.WARPS, "num_stages": 2 if card == "gfx942" else 3}
            made = compile_for(card, kernel, chosen, options)
            of = "1 token" if tokens == 1 else f"{tokens} tokens"
            rows.append({"kernel": name, "of": of, "card": card, **counted(made)})
    for zeroed in (False, True):
        chosen = {
            "qmin": -8.0,
            "qmax": 7.0,
            "zeroed": zeroed,
            "block": 128,
            "rows": columns_kernel.ROWS,
        }
        options = {"num_warps": columns_kernel.WARPS, "enable_fp_fusion": False}
        made = compile_for(card, columns_kernel.kernel, chosen, options)
        of = "128 columns, zero points" if zeroed else "128 columns"
        rows.append({"kernel": "gptq", "of": of, "card": card, **counted(made)})
    for name in ("FP8_DYNAMIC", "W8A8"):
        scheme = preset(name).input
        assert scheme is not None  # both quantize inputs
        chosen = rounding_kernel.constants(scheme, width=COLUMNS, stored=False, zeroed=False)
        options = {"num_warps": rounding_kernel.WARPS, "enable_fp_fusion": False}
        made = compile_for(card, rounding_kernel.kernel, chosen, options)
        rows.append({"kernel": "rounding", "of": f"{name} inputs", "card": card, **counted(made)})
    # y is the norm's output, in bfloat16; that of products is float32
    chosen = norm.constants(COLUMNS, offset=0.0, early=True) | {"by_bits": False}
    made = compile_for(card, norm.kernel, chosen, {"num_warps": norm.WARPS}, y="*bf16")
    rows.append({"kernel": "norm", "of": "root mean square", "card": card, **counted(made)})
    chosen = rope.constants(WIDTH) | {"by_bits": False}
    options = {"num_warps": rope.WARPS, "enable_fp_fusion": False}
    made = compile_for(card, rope.kernel, chosen, options)
    rows.append({"kernel": "rope", "of": "queries and keys", "card": card, **counted(made)})
    for name, gelu in (("SiLU", False), ("GELU", True)):
        chosen = {"gelu": gelu, "block": gate.BLOCK, "by_bits": False}
        made = compile_for(card, gate.kernel, chosen, {"num_warps": gate.WARPS}, y="*bf16")
        rows.append({"kernel": "gate", "of": name, "card": card, **counted(made)})
    return rows


def compile_for(
    card: str,
    kernel: Any,
    chosen: dict[str, Any],
    options: dict[str, Any],
    **other: str,
) -> Any:
    """A kernel compiled for a card, with its constants chosen; other types than POINTERS has."""
    names = list(enumerate(kernel.arg_names))
    # a constant may have the name of another kernel's pointer
    types = {
        name: "constexpr" if name in chosen else (POINTERS | other).get(name, "i32")
        for _, name in names
    }
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(index,): chosen[name] for index, name in names if name in chosen},
        # as torch's memory is, which lets loads be wide and copied ahead
        attrs={(index,): [["tt.divisibility", 16]] for index, name in names if "*" in types[name]},
    )
    return triton.compile(source, target=CARDS[card], options=options)


def _know_no_architecture() -> None:
    """Let Intel's compiler ask nothing of SYCL, which would say what an architecture can do."""
    of_intel: Any = backends["intel"].compiler
    of_intel.__init__.__globals__["compile_module_from_src"] = lambda source, name: SimpleNamespace(
        parse_device_arch=lambda architecture: ""
    )


def counted(made: Any) -> dict[str, int | None]:
    """The figures of a program."""
    if "spv" in made.asm:
        return {
            "shared": made.metadata.shared,
            "spilled": None,
            "instructions": len(list(_words(made.asm["spv"]))),
            "matrix": len(re.findall(r"call[^@\n]*@" + MATRIX[2:], made.asm["llir"])),
        }
    on_amd = "amdgcn" in made.asm
    code = made.asm["amdgcn"] if on_amd else inspected(made, "-sass")
    text = code if on_amd else made.asm["ptx"]
    # a line of either begins with its mnemonic, that of a cubin behind its address
    pattern = r"^\t[a-z]\w+ " if on_amd else r"^\s+/\*[0-9a-f]{4,}\*/\s+\S"
    return {
        "shared": made.metadata.shared,
        "spilled": spilled(made),
        "instructions": len(re.findall(pattern, code, re.MULTILINE)),
        "matrix": len(re.findall(MATRIX, text)),
    }


def _words(binary: bytes) -> Iterator[int]:
    """The places of SPIR-V's instructions; the upper half of an instruction is its length."""
    words = memoryview(binary).cast("I")
    place = 5  # behind the header
    while place < len(words):
        yield place
        place += words[place] >> 16


def inspected(made: Any, option: str) -> str:
    """What NVIDIA's cuobjdump, which Triton brings, says of a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump"))
        return subprocess.run(
            [tool, option, file.name], capture_output=True, text=True, check=True
        ).stdout


def spilled(made: Any) -> int:
    """The bytes of a program's registers that went to memory."""
    if "amdgcn" in made.asm:
        return sum(map(int, re.findall(r"\.vgpr_spill_count:\s*(\d+)", made.asm["amdgcn"]))) * 4
    used = inspected(made, "-res-usage")
    (local,) = re.findall(r"LOCAL:(\d+)", used)
    (stack,) = re.findall(r"STACK:(\d+)", used)
    return max(int(local), int(stack))


if __name__ == "__main__":
    sys.exit(main())
