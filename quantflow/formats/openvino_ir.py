"""OpenVINO's IR: a graph in `openvino_model.xml`, and its constants in `openvino_model.bin`.

The weight of a quantized linear, [O, I] in G groups of g inputs or one scale per row, is a constant
of codes and the operations that make float32 of them. NNCF writes it so, and OpenVINO's plugins
fuse it into the product:

    codes [O, G, g] -> Convert -> Subtract(zero points [O, G, 1] -> Convert)
                    -> Multiply(scales [O, G, 1]) -> Reshape [O, I] -> Convert

| part        | element type                                | content                          |
|-------------|---------------------------------------------|----------------------------------|
| codes       | i4, i8                                      | qvalue                           |
|             | u4, u8 beside zero points                   | qvalue + 2 ** (num_bits - 1)     |
| zero points | u4, u8; symmetric weights have none         | zero_point + 2 ** (num_bits - 1) |
| scales      | f16, or f32, which all operations then have | scale                            |

1. Weights with a scale per row have codes [O, I], scales and zero points [O, 1], and no Reshape.
2. The last Convert is to f32. It is missing where scales have f32.
3. Two codes of 4 bits are a byte, the first in its lower half.
4. The constant of codes has the name that the float weight had: `self.model.` and the module's
   parameter.
5. On a CPU, OpenVINO computes scale * (code - zero point) in float32, whatever the element type of
   the operations is. So no value of the artifact changes.
6. The graph takes `input_ids`, `attention_mask` and `position_ids` [B, S], and `beam_idx` [B], and
   returns `logits` [B, S, V]. Keys and values are its state, which OpenVINO GenAI needs.

Sources: NNCF 3.4 `openvino_backend.py`, optimum-intel 2.2 `stateful.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantflow.core.qtensor import QTensor
from quantflow.core.scheme import LinearScheme
from quantflow.errors import IntegrityError, UnsupportedError, extra
from quantflow.formats.weight_layout import stored_scales, why_not_integers

NAME = "openvino"
PACKAGES = ("openvino", "openvino_tokenizers")
MODEL, TOKENIZER, DETOKENIZER = (
    "openvino_model.xml",
    "openvino_tokenizer.xml",
    "openvino_detokenizer.xml",
)
SCALE_DTYPES = {"f16": torch.float16, "f32": torch.float32}
EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
_BITS = (4, 8)
# elements of a float32 constant that is stored in 16 bits where these hold its values
_NARROWED = 1 << 14
_AGAIN = "export again, and check the disk"


def require_packages() -> None:
    """Raise unless OpenVINO and its tokenizers are installed.

    Raises:
        UnsupportedError: with the command that installs them.
    """
    for name in PACKAGES:
        if find_spec(name) is None:
            raise UnsupportedError(
                f"format {NAME}: the package {name} is not installed", extra("openvino")
            )


def why_not(scheme: LinearScheme) -> str | None:
    """Reason why the IR cannot hold a linear of a scheme; None when it can."""
    held = "the IR holds integers of 4 or 8 bits per group or row"
    return why_not_integers(scheme, _BITS, held)


def traced(module: nn.Module, example: Mapping[str, Tensor], *, outputs: Sequence[str]) -> Any:
    """A module's graph: an `openvino.Model` whose constants share the parameters' memory.

    OpenVINO's `convert_model` would do the same, and report to its makers over the network that it
    did.

    Args:
        module: module that is called with the tensors of `example` one by one; returns a tuple of
            as many tensors as `outputs` has names.
        example: name of each input -> a tensor that stands for it; its sizes may be others later.
        outputs: names of the outputs.

    Raises:
        UnsupportedError: the graph has other inputs or outputs than these.
    """
    from openvino import PartialShape
    from openvino._offline_transformations import apply_moc_transformations
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    decoder = TorchScriptPythonDecoder(
        module, example_input=list(example.values()), trace_kwargs={"check_trace": False}
    )
    frontend = FrontEndManager().load_by_framework("pytorch")
    model: Any = frontend.convert(frontend.load(decoder, True))
    for kind, ports, names in (
        ("inputs", model.inputs, list(example)),
        ("outputs", model.outputs, list(outputs)),
    ):
        if len(ports) != len(names):
            cause = (
                f"format {NAME}: the traced model has {len(ports)} {kind}, {len(names)} are needed"
            )
            raise UnsupportedError(cause, "export it in another format")
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
            port.get_node().set_friendly_name(name)
    for port, tensor in zip(model.inputs, example.values(), strict=True):
        shape = (
            [-1] * tensor.ndim if tensor.ndim != 4 else [-1, tensor.shape[1], -1, tensor.shape[3]]
        )
        port.get_node().set_partial_shape(PartialShape(shape))
    model.validate_nodes_and_infer_types()
    apply_moc_transformations(model, cf=False, smart_reshape=True)
    return model


def make_stateful_(model: Any, pairs: Mapping[str, str]) -> None:
    """Turn inputs and outputs into state that is empty at first.

    The new input `beam_idx` names the row whose state each row continues.

    Args:
        model: model with an input `input_ids`, [B, S].
        pairs: name of an input [B, heads, past, width] -> the output that it becomes.
    """
    import openvino as ov
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation

    beam = opset13.parameter(ov.PartialShape([-1]), ov.Type.i32, name="beam_idx")
    beam.output(0).get_tensor().add_names({"beam_idx"})
    model.add_parameters([beam])
    for name in pairs:
        port = model.input(name)
        readers = port.get_target_inputs()
        chosen = opset13.gather(port, beam, opset13.constant(0))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, dict(pairs))
    sizes = opset13.shape_of(model.input("input_ids"), output_type="i64")
    rows = opset13.gather(sizes, opset13.constant([0]), opset13.constant(0))
    for operation in model.get_ops():
        if operation.get_type_name() == "ReadValue":
            lengths = [size.min_length for size in operation.get_output_partial_shape(0)]
            parts = [
                rows,
                *(opset13.constant(np.array([length], dtype=np.int64)) for length in lengths[1:]),
            ]
            zero = opset13.constant(0.0, dtype=operation.get_output_element_type(0))
            operation.set_arguments([opset13.broadcast(zero, opset13.concat(parts, axis=0))])
    model.validate_nodes_and_infer_types()


def constants(model: Any) -> dict[str, Any]:
    """Constants of a graph by their names."""
    return {
        each.get_friendly_name(): each
        for each in model.get_ops()
        if each.get_type_name() == "Constant"
    }


def put_weight_(constant: Any, name: str, weight: QTensor, *, scale_dtype: torch.dtype) -> None:
    """Put codes, zero points and scales in the place of a float32 constant that has their values.

    Args:
        constant: the weight's constant, [O, I].
        name: name of the linear, for messages.
        weight: weight of a scheme that `why_not` has no reason against.
        scale_dtype: a value of SCALE_DTYPES.

    Raises:
        UnsupportedError: a scale that the dtype does not hold; or the graph's constant is another
            weight's.
    """
    import openvino as ov
    from openvino import opset13

    scale = stored_scales(name, weight.scale, scale_dtype)
    if not np.array_equal(constant.data, weight.dequantize().numpy()):
        cause = f"{name}: its weight is not a constant of the traced graph as it is"
        raise UnsupportedError(cause, "export it in another format")
    bits, friendly_name = weight.scheme.num_bits, constant.get_friendly_name()
    (rows, columns), groups = weight.qvalue.shape, weight.scale.shape[1]
    whole = weight.scheme.granularity == "per_channel"
    shape, small = (
        ((rows, columns), (rows, 1))
        if whole
        else ((rows, groups, columns // groups), (rows, groups, 1))
    )
    offset = 0 if weight.zero_point is None else 1 << (bits - 1)
    kinds = {
        (4, False): ov.Type.i4,
        (8, False): ov.Type.i8,
        (4, True): ov.Type.u4,
        (8, True): ov.Type.u8,
    }
    kind = kinds[bits, offset > 0]
    real = ov.Type.f16 if scale_dtype == torch.float16 else ov.Type.f32

    def integers(values: Tensor, form: tuple[int, ...], called: str) -> Any:
        stored = ov.Tensor(_bytes(values, bits, offset).numpy(), ov.Shape(form), kind)
        codes = opset13.constant(stored, shared_memory=False)
        codes.set_friendly_name(called)
        return opset13.convert(codes, real)

    node = integers(weight.qvalue, shape, friendly_name)
    constant.set_friendly_name(f"{friendly_name}/float")
    if weight.zero_point is not None:
        points = integers(weight.zero_point, small, f"{friendly_name}/zero_point")
        node = opset13.subtract(node, points, name=f"{friendly_name}/zero_point/subtract")
    scales = opset13.constant(scale.reshape(small).numpy(), name=f"{friendly_name}/scale")
    node = opset13.multiply(node, scales, name=f"{friendly_name}/fq_weights_1")
    if not whole:
        node = opset13.reshape(
            node, opset13.constant(np.array([rows, columns], dtype=np.int64)), special_zero=False
        )
    if real != ov.Type.f32:
        node = opset13.convert(node, ov.Type.f32)
    for reader in constant.output(0).get_target_inputs():
        reader.replace_source_output(node.output(0))


def narrow_(model: Any) -> None:
    """Store float32 constants in 16 bits where these hold every value.

    float16 is tried first, then bfloat16.
    """
    import openvino as ov
    from openvino import opset13

    for constant in constants(model).values():
        if constant.get_element_type() != ov.Type.f32 or constant.data.size < _NARROWED:
            continue
        values, name = torch.from_numpy(constant.data), constant.get_friendly_name()
        exact = (
            dtype
            for dtype in (torch.float16, torch.bfloat16)
            if torch.equal(values.to(dtype).float(), values)
        )
        if (dtype := next(exact, None)) is None:
            continue
        kind = ov.Type.f16 if dtype == torch.float16 else ov.Type.bf16
        stored = ov.Tensor(
            values.to(dtype).view(torch.float16).numpy(), ov.Shape(values.shape), kind
        )
        constant.set_friendly_name(f"{name}/float")
        short = opset13.constant(stored, shared_memory=False)
        short.set_friendly_name(name)
        node = opset13.convert(short, ov.Type.f32)
        for reader in constant.output(0).get_target_inputs():
            reader.replace_source_output(node.output(0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
    """A quantized weight in a graph.

    Attributes:
        codes: int16 [O, I], zero points not subtracted.
        zero_point: int16 [O, G]; None where there is none.
        scale: float32 [O, G].
    """

    codes: Tensor
    zero_point: Tensor | None
    scale: Tensor

    def dequantize(self) -> Tensor:
        """The weight, float32 [O, I]: scale * (code - zero point)."""
        (rows, columns), groups = self.codes.shape, self.scale.shape[1]
        split = self.codes.float().reshape(rows, groups, columns // groups)
        if self.zero_point is not None:
            split = split - self.zero_point[..., None]
        return (split * self.scale[..., None]).reshape(rows, columns)


def weights(model: Any) -> dict[str, Weight]:
    """Quantized weights of a graph by the names of their codes."""
    by_name = {}
    for multiply in model.get_ops():
        if multiply.get_type_name() != "Multiply":
            continue
        node, zero = multiply.input_value(0).get_node(), None
        if node.get_type_name() == "Subtract":
            zero = _converted(node.input_value(1).get_node())
            node = node.input_value(0).get_node()
        codes, scale = _converted(node), multiply.input_value(1).get_node()
        if codes is None or scale.get_type_name() != "Constant":
            continue
        rows = codes.get_output_shape(0)[0]
        point = None if zero is None else _integers(zero).reshape(rows, -1)
        real = torch.from_numpy(scale.data.astype(np.float32)).reshape(rows, -1)
        weight = Weight(codes=_integers(codes).reshape(rows, -1), zero_point=point, scale=real)
        by_name[codes.get_friendly_name()] = weight
    return by_name


def read(folder: Path) -> Any:
    """The graph of a folder.

    Raises:
        IntegrityError: OpenVINO does not read it.
    """
    import openvino as ov

    try:
        return ov.Core().read_model(str(folder / MODEL))
    except RuntimeError as error:
        raise IntegrityError(
            f"{folder / MODEL}: OpenVINO does not read it: {error}", _AGAIN
        ) from error


def logits(model: Any, pieces: Sequence[Tensor]) -> Tensor:
    """Logits of a text, float32 [1, S, V], from OpenVINO on the CPU in float32.

    One piece of the text follows the other; the model's state carries over.

    Args:
        model: stateful graph.
        pieces: int64 [1, n], together S tokens.
    """
    import openvino as ov

    request = ov.Core().compile_model(model, "CPU", EXACT).create_infer_request()
    request.reset_state()
    outputs, length = [], 0
    for ids in pieces:
        start, length = length, length + ids.shape[1]
        inputs = {"input_ids": ids.numpy(), "attention_mask": np.ones((1, length), dtype=np.int64)}
        inputs |= {
            "position_ids": np.arange(start, length)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        request.infer({name: value for name, value in inputs.items() if _has_input(model, name)})
        outputs.append(torch.from_numpy(request.get_tensor("logits").data.copy()))
    return torch.cat(outputs, dim=1)


def _has_input(model: Any, name: str) -> bool:
    return any(name in port.get_names() for port in model.inputs)


def _bytes(values: Tensor, bits: int, offset: int) -> Tensor:
    """Integers in OpenVINO's packing, uint8, one after the other."""
    # two's complement where there is no offset
    plain = (values.reshape(-1).to(torch.int16) + offset).to(torch.uint8)
    if bits == 8:
        return plain
    if len(plain) % 2:
        plain = torch.cat([plain, plain.new_zeros(1)])
    low, high = plain[0::2] & 15, plain[1::2] & 15
    return low | (high << 4)


def _integers(constant: Any) -> Tensor:
    """Integers of a constant, int16, one after the other."""
    kind = constant.get_element_type().get_type_name()
    count = int(np.prod(constant.get_output_shape(0)))
    stored = torch.from_numpy(
        np.ascontiguousarray(constant.data).reshape(-1).view(np.uint8).copy()
    ).to(torch.int16)
    if kind.endswith("4"):
        stored = torch.stack([stored & 15, stored >> 4], dim=1).reshape(-1)[:count]
    half = 1 << (int(kind[1:]) - 1)
    return (stored ^ half) - half if kind.startswith("i") else stored


def _converted(node: Any) -> Any:
    """Constant of integers that a Convert reads; None for anything else."""
    if node.get_type_name() != "Convert":
        return None
    source = node.input_value(0).get_node()
    integers = (
        source.get_type_name() == "Constant"
        and source.get_element_type().get_type_name() in ("i4", "u4", "i8", "u8")
    )
    return source if integers else None
