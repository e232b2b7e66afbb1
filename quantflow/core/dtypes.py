"""Dtypes by the names that safetensors files give them."""

import torch

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Dtypes of layers that run, by their names in `--dtype`.
RUNNING: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
