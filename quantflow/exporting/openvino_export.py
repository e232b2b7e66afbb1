"""Stage 4 for OpenVINO: a model's graph in its IR, with the artifact's qvalues and scales.

Reads    an artifact, or another program's folder in a layout of integers
Writes   <o>: openvino_model.xml and .bin, tokenizer and detokenizer as graphs, config.json, side
         files and DONE.json; the whole folder appears at once
Resumes  a finished result of the same inputs is left alone
Fails    2 a folder that is neither, an unknown dtype, 3 unusable input, 5 memory, disk, or the
         folder is held, 6 OpenVINO is not installed, a scheme, family or scale that the IR does not
         hold, 7 what was written reads back as other values

The graph is traced from transformers' own module with dequantized weights. Then each quantized
linear's constant is replaced by the qvalues, zero points and scales of the artifact, so nothing is
rounded again. What was written is read again. Every quantized weight is compared bit for bit. The
logits that OpenVINO computes in float32 are compared with those of transformers, over a prompt and
single tokens after it. The whole model is in memory in float32.
"""

import warnings
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache

from quantflow.errors import IntegrityError, UnsupportedError, UsageError, first_line, nearest
from quantflow.exporting.job import ExportJob
from quantflow.exporting.plain_files import write_beside
from quantflow.exporting.quantized_source import identity_of, require_quantized
from quantflow.files import stage_folder
from quantflow.files.side_file_kinds import TOKENIZER_FILES
from quantflow.formats import openvino_ir
from quantflow.models.graph import moving_rotation, text_config
from quantflow.models.names import NameMap
from quantflow.models.open import graph_for
from quantflow.models.parameters import materialize_
from quantflow.models.skeleton import skeleton
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning.cost import BUFFERS, LIBRARIES, MemoryNeed
from quantflow.planning.resources import grant
from quantflow.progress import Progress
from quantflow.runtime.artifact import Artifact, open_folder

VERSION = 1
# of the logits of a token, by their norms: half of float32's digits, as for the lean decoder
BOUND = 2.0**-12
_DEFAULT = "f16"
_PROMPT, _MORE = 40, 8  # tokens that are compared: together, and one by one after these
_ELSEWHERE = "export it in another format"


def run(job: ExportJob, progress: Progress) -> Path:
    """Write the folder and return it; one that is up to date is left alone."""
    if job.model is not None:
        cause = f"export: --model {job.model} beside format {job.options.format}"
        raise UsageError(cause, "leave --model out, the quantized folder is all that is read")
    dtype = job.options.dtype or _DEFAULT
    if dtype not in openvino_ir.SCALE_DTYPES:
        cause = f"export: dtype {dtype!r} of format {openvino_ir.NAME} is unknown"
        raise UsageError(cause, nearest(dtype, list(openvino_ir.SCALE_DTYPES)))
    require_quantized(job.source, job.output, product=f"format {openvino_ir.NAME}")
    openvino_ir.require_packages()
    with stage_folder.locked(job.output):
        artifact = open_folder(job.source, backend="reference")
        identity = identity_of(artifact)
        made_from = {
            "source": identity,
            "format": openvino_ir.NAME,
            "dtype": dtype,
            "version": VERSION,
        }
        if stage_folder.is_up_to_date(job.output, made_from):
            progress.say(f"export {job.output.name}: up to date")
            return job.output
        stage_folder.refuse_other_result(job.output, made_from, force=job.force)
        _refuse(artifact)
        floats = 4 * sum(_elements(artifact).values())
        # the model, and what OpenVINO makes of it when it runs
        moment = (LIBRARIES + BUFFERS + 2 * floats, 0)
        result = sum(info.nbytes for info in artifact.checkpoint.infos.values())
        grant(
            MemoryNeed(stage="export", peaks=(moment,), result=result),
            job.resources,
            folder=job.output,
        )
        with (
            stage_folder.publish(job.output, stage="export", inputs=made_from) as folder,
            warnings.catch_warnings(),
        ):
            # torch says of every size that a trace takes it as it is; the proof shows it
            warnings.simplefilter("ignore")
            config = {
                key: value
                for key, value in artifact.checkpoint.config.items()
                if key != "quantization_config"
            }
            stage = f"export {job.output.name}"
            write_beside(folder, artifact.checkpoint, config, stage=stage, progress=progress)
            _write_tokenizer(folder)
            expected = _write_model(
                folder, artifact, openvino_ir.SCALE_DTYPES[dtype], progress=progress
            )
            progress.say(f"export {job.output.name}: proving it")
            _prove(folder, artifact, expected)
    progress.say(
        f"export {job.output.name}: {len(artifact.linears)} linears, every value as it was"
    )
    return job.output


def _elements(artifact: Artifact) -> dict[str, int]:
    """The number of elements of each parameter, by its source name."""
    counts = {}
    for name in artifact.names:
        linear = artifact.linears.get(name.removesuffix(".weight"))
        counts[name] = torch.Size(
            linear.shape if linear else artifact.checkpoint.infos[name].shape
        ).numel()
    return counts


def _refuse(artifact: Artifact) -> None:
    """Refuse a scheme that the IR does not hold, and a family whose graph depends on values.

    A trace holds for other sizes alone.

    Raises:
        UnsupportedError: naming the linear, or the model's type.
    """
    folder, config = artifact.checkpoint.folder, artifact.config
    if artifact.kv_cache is not None:
        cause = (
            f"{folder}: keys and values are quantized, format {openvino_ir.NAME} has no words "
            "for it"
        )
        raise UnsupportedError(cause, "quantize without kv_cache")
    for name, placement in artifact.linears.items():
        if (reason := openvino_ir.why_not(placement.scheme)) is not None:
            raise UnsupportedError(
                f"{name}: {openvino_ir.NAME}: {reason}", "quantize to W4A16, W4A16_ASYM or W8A16"
            )
    reason = None
    if graph_for(config).sparse:
        reason = "its experts depend on the text"
    elif any(StaticCache(config=config, max_cache_len=1).is_sliding):
        reason = "its attention is in windows, the IR has full attention"
    elif rotation := moving_rotation(config):
        reason = f"rotations of type {rotation} depend on the length of the text"
    if reason is not None:
        raise UnsupportedError(
            f"{folder}: {config.model_type}: {openvino_ir.NAME}: {reason}", _ELSEWHERE
        )


def _plain_model(artifact: Artifact) -> tuple[Any, dict[str, str]]:
    """The dequantized float32 model of transformers, and each source name's parameter in it."""
    model = skeleton(artifact.config)
    names = NameMap(model).bind(artifact.names).to_module
    for source, name in names.items():
        linear = artifact.quantized(source)
        if linear is not None and linear.order is not None:
            cause = (
                f"{source}: its groups are of inputs that do not stand together, the IR has no "
                "words for it"
            )
            raise UnsupportedError(cause, "keep it in a layout with g_idx and desc_act")
        weight = artifact.read([source])[source] if linear is None else linear.weight.dequantize()
        materialize_(model, {name: weight}, dtype=torch.float32)
    return model, names


class _StatefulModel(nn.Module):
    """A causal LM as a function of tensors alone.

    Its inputs are ids, mask, positions, and each layer's keys and values before these.
    """

    def __init__(self, model: Any, *, positions: bool) -> None:
        super().__init__()
        self.model, self._positions = model, positions

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits [B, S, V], and keys and values [B, heads, past + S, width] of each layer.

        Keys and values stand in turns.

        Args:
            input_ids: token ids, int64 [B, S].
            attention_mask: mask, int64 [B, past + S], 0 at columns that are no text.
            position_ids: positions, int64 [B, S].
            past: keys and values [B, heads, past, width] of each layer, in turns.
        """
        columns = torch.arange(attention_mask.shape[1])
        rows = columns[attention_mask.shape[1] - input_ids.shape[1] :]
        # [B, 1, S, past + S]
        seen = (columns[None, :] <= rows[:, None])[None, None] & (
            attention_mask[:, None, None, :] > 0
        )
        mask = torch.where(seen, torch.tensor(0.0), torch.tensor(torch.finfo(torch.float16).min))
        cache = _cache(past)
        positions = {"position_ids": position_ids} if self._positions else {}
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **positions,
        )
        return (
            output.logits,
            *(part for layer in cache.layers for part in (layer.keys, layer.values)),
        )


def _cache(past: tuple[Tensor, ...]) -> Any:
    """The cache of transformers with keys and values as they are.

    Its `update` would join them to empty ones.

    Its `update` would join them to empty ones.
    """
    cache = DynamicCache()
    for keys, values in zip(past[0::2], past[1::2], strict=True):
        layer = DynamicLayer()
        layer.keys, layer.values, layer.dtype, layer.device = keys, values, keys.dtype, keys.device
        layer.is_initialized = True
        cache.layers.append(layer)
    return cache


def _text(artifact: Artifact) -> Tensor:
    """The tokens that are compared, int64 [1, S]: drawn at random."""
    size = text_config(artifact.config).vocab_size
    return torch.randint(size, (1, _PROMPT + _MORE), generator=torch.Generator().manual_seed(0))


def _write_model(
    folder: Path, artifact: Artifact, dtype: torch.dtype, *, progress: Progress
) -> Tensor:
    """Write the graph; return the logits that transformers computes of `_text`, [1, S, V].

    Raises:
        UnsupportedError: the family's code cannot be traced, or a scale does not fit.
    """
    import openvino as ov

    model, names = _plain_model(artifact)
    ids = _text(artifact)
    with torch.inference_mode():
        output = model(input_ids=ids[:, :3], use_cache=True)
        expected: Tensor = model(input_ids=ids, use_cache=False).logits
    past, inputs, outputs = {}, [], []
    for index, layer in enumerate(output.past_key_values.layers):
        for kind in ("key", "value"):
            inputs.append(f"past_key_values.{index}.{kind}")
            outputs.append(f"present.{index}.{kind}")
            past[inputs[-1]] = getattr(layer, f"{kind}s").clone().expand(2, -1, -1, -1)
    example = {
        "input_ids": ids[:, 3:7].expand(2, -1).contiguous(),
        "attention_mask": torch.ones(2, 7, dtype=torch.int64),
        "position_ids": torch.arange(3, 7).expand(2, -1).contiguous(),
        **{name: tensor.contiguous() for name, tensor in past.items()},
    }
    # torch asks every module for every property, and transformers warns of a loss without a type
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.loss_type = "ForCausalLM"
    step = _StatefulModel(model, positions="position_ids" in signature(model.forward).parameters)
    try:
        with torch.no_grad():
            graph = openvino_ir.traced(step, example, outputs=["logits", *outputs])
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
        KeyError,
        NotImplementedError,
    ) as error:
        cause = (
            f"{artifact.checkpoint.folder}: {artifact.config.model_type} cannot be traced: "
            f"{first_line(error)}"
        )
        raise UnsupportedError(cause, _ELSEWHERE) from error
    openvino_ir.make_stateful_(graph, dict(zip(inputs, outputs, strict=True)))
    constants = openvino_ir.constants(graph)
    for name in progress.steps(
        list(artifact.linears), stage=f"export {openvino_ir.NAME}", unit="linear"
    ):
        key = _constant_name(names, name)
        if key not in constants:
            raise UnsupportedError(
                f"{name}: its weight is no constant of the traced graph", _ELSEWHERE
            )
        openvino_ir.put_weight_(
            constants[key], name, artifact.decode(name).weight, scale_dtype=dtype
        )
    openvino_ir.narrow_(graph)
    if "digest" in artifact.manifest:
        graph.set_rt_info(artifact.manifest["digest"], ["quantflow", "artifact"])
    ov.save_model(graph, str(folder / openvino_ir.MODEL), compress_to_fp16=False)
    return expected


def _constant_name(names: Mapping[str, str], linear: str) -> str:
    """The name of a linear's weight in the graph; `names` maps source names to parameters."""
    return f"self.model.{names[f'{linear}.weight']}"


def _write_tokenizer(folder: Path) -> None:
    """Write the tokenizer of a folder as OpenVINO's graphs; nothing where it has none.

    Raises:
        UnsupportedError: one that OpenVINO has no graph for.
    """
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return
    try:
        graphs = convert_tokenizer(load_tokenizer(folder), with_detokenizer=True)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        NotImplementedError,
        OSError,
    ) as error:
        cause = (
            f"{folder.name}: openvino_tokenizers does not convert this tokenizer: "
            f"{first_line(error)}"
        )
        raise UnsupportedError(cause, _ELSEWHERE) from error
    for graph, name in zip(graphs, (openvino_ir.TOKENIZER, openvino_ir.DETOKENIZER), strict=True):
        ov.save_model(graph, str(folder / name), compress_to_fp16=False)


def _prove(folder: Path, artifact: Artifact, expected: Tensor) -> None:
    """Compare what OpenVINO reads with the artifact: every quantized weight, and the logits.

    Raises:
        IntegrityError: a weight has other values, or is missing.
        UnsupportedError: OpenVINO computes something else than transformers.
    """
    graph = openvino_ir.read(folder)
    stored_weights, names = (
        openvino_ir.weights(graph),
        NameMap(skeleton(artifact.config)).bind(artifact.names).to_module,
    )
    for name in artifact.linears:
        weight = stored_weights.get(_constant_name(names, name))
        if weight is None or not torch.equal(
            weight.dequantize(), artifact.decode(name).weight.dequantize()
        ):
            raise IntegrityError(
                f"{name}: what was written has other values", "export again, and check the disk"
            )
    ids = _text(artifact)
    computed = openvino_ir.logits(
        graph, torch.tensor_split(ids, tuple(range(_PROMPT, _PROMPT + _MORE)), dim=1)
    )
    error, size = (computed - expected)[0].norm(dim=-1), expected[0].norm(dim=-1)
    worst = int((error / size).nan_to_num(nan=torch.inf).argmax())
    if not error[worst] <= BOUND * size[worst]:
        share = float(error[worst] / size[worst])
        cause = (
            f"{artifact.config.model_type}: OpenVINO's logits of token {worst} differ by "
            f"{share:.2g}, {BOUND:.2g} are rounding"
        )
        raise UnsupportedError(cause, _ELSEWHERE)
