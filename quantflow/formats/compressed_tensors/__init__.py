"""The compressed-tensors layout: what stock transformers and vLLM load.

`tensors` has the tensors of a linear and of a KV cache, `config` has the `quantization_config`.
`layout` is the layout as one of `quantflow.formats.LAYOUTS`; it also reads what other programs
write. A linear called NAME is stored as

| layout          | tensors                                                                    |
|-----------------|----------------------------------------------------------------------------|
| float-quantized | NAME.weight e4m3fn [O, I], NAME.weight_scale                               |
| int-quantized   | NAME.weight int8 [O, I], NAME.weight_scale                                 |
|                 | asymmetric: NAME.weight_zero_point                                         |
| pack-quantized  | NAME.weight_packed int32 [O, W], NAME.weight_scale                         |
|                 | NAME.weight_shape int64 [2] = (O, I)                                       |
|                 | asymmetric: NAME.weight_zero_point int32 [ceil(O * num_bits / 32), G],     |
|                 | packed down the columns                                                    |
|                 | with minima: NAME.weight_zero_point float32 [O, G], minimum / scale;       |
|                 | qvalues are then stored less 2^(num_bits - 1)                              |
| mxfp8           | NAME.weight e4m3fn [O, I], NAME.weight_scale uint8 [O, G] (e8m0)           |
| mxfp4-pack      | NAME.weight_packed uint8 [O, I / 2] (e2m1),                                |
|                 | NAME.weight_scale uint8 [O, G] (e8m0)                                      |
| nvfp4-pack      | NAME.weight_packed uint8 [O, I / 2] (e2m1),                                |
|                 | NAME.weight_scale e4m3fn [O, G], NAME.weight_global_scale float32 [1]      |
|                 | quantized inputs: NAME.input_global_scale float32 [1]                      |
| a static input  | NAME.input_scale float32 [1]; asymmetric: NAME.input_zero_point int8 [1]   |
| a KV cache      | ATTENTION.k_scale, ATTENTION.v_scale float32                               |
|                 | [1] per tensor, [kv_heads, 1, 1] per head                                  |

| weight_scale                        | shape               | dtype                             |
|-------------------------------------|---------------------|-----------------------------------|
| per_tensor                          | [1]; [] is read too | float32                           |
| per_channel                         | [O, 1]              | the model's if packed, or float32 |
| per_group                           | [O, G]              | the model's if packed, or float32 |
| per_block of g x g                  | [ceil(O / g), G]    | float32                           |
| a weight that a block type can hold | [O, G]              | the block type's                  |

1. A block type is one of llama.cpp's. `scale_dtype` of a group of the configuration says the dtype
   of its scales. IQ4_NL has the shape of Q8_0, so `block_type` in `observer_kwargs` names it, and
   IQ4_XS likewise.
2. Scales in e4m3 are divided by the global scale beside them.
3. Scales of symmetric integers may be negative (docs/backends.md, "Negative scales").
4. `transform_config` names the linears whose inputs are mixed by a Hadamard matrix, and the block
   that is mixed (`head_dim`).
5. compressed-tensors 0.20 loads its own pack-quantized files with zero points only with
   `dequantize=True`.

Source: github.com/vllm-project/compressed-tensors, release 0.20.0, `compressors/` and
`quantization/quant_args.py`.
"""

from quantflow.formats.compressed_tensors.config import (
    groups_of_linears,
    kv_scheme_from_config,
    quantization_config,
    schemes_from_config,
)
from quantflow.formats.compressed_tensors.tensors import (
    LAYOUT_VERSION,
    NAME,
    ROW_MULTIPLE,
    decode,
    decode_kv,
    encode,
    encode_kv,
    kv_tensor_names,
    kv_tensor_specs,
    packed,
    row_multiple,
    row_spans,
    scale_dtype,
    tensor_names,
    tensor_specs,
)

__all__ = [
    "LAYOUT_VERSION",
    "NAME",
    "ROW_MULTIPLE",
    "decode",
    "decode_kv",
    "encode",
    "encode_kv",
    "groups_of_linears",
    "kv_scheme_from_config",
    "kv_tensor_names",
    "kv_tensor_specs",
    "packed",
    "quantization_config",
    "row_multiple",
    "row_spans",
    "scale_dtype",
    "schemes_from_config",
    "tensor_names",
    "tensor_specs",
]
