"""Two folders tensor by tensor, by the values of their weights, and their divergence on a text.

What was measured of inputs, keys and values, their scales and zero points, is compared too: each
that differs has a row. Both may be artifacts, folders in one of `quantflow.formats.LAYOUTS`, or
models. One linear of each is in memory at a time.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantflow import cpu_threads
from quantflow.core.determinism import single_threaded
from quantflow.core.kv import kv_words
from quantflow.core.qtensor import QTensor, QuantizedLinear
from quantflow.exporting.canary import rounder
from quantflow.formats.compressed_tensors import kv_tensor_names
from quantflow.measuring.text import read_text
from quantflow.measuring.text_sources import text_path
from quantflow.models.capture import LayerStream
from quantflow.models.graph import text_config
from quantflow.models.open import graph_for
from quantflow.models.token_ids import refuse_beyond
from quantflow.models.tokenizer import load_tokenizer
from quantflow.progress import SILENT, Progress
from quantflow.runtime.artifact import Artifact, is_model, open_folder
from quantflow.sources.models import model_folder
from quantflow.validating.layerwise import BASELINE, Comparing
from quantflow.validating.windows import evaluation_sequences

EQUAL, SCALE, VALUES, SHAPE = "equal", "scale differs", "values differ", "shape differs"
ONLY_LEFT, ONLY_RIGHT = "only in the first", "only in the second"
_OTHER = "the second"


@dataclass(frozen=True, kw_only=True)
class FolderDiffJob:
    """Two folders to compare.

    Attributes:
        text: text that both run on, for the divergence; None compares values alone.
        tokens: largest number of tokens of the text.
        sequence_length: largest number of tokens of a window; the first model's limit holds too.
    """

    left: Path
    right: Path
    text: Path | None = None
    tokens: int = 4096
    sequence_length: int = 512

    def run(self, progress: Progress = SILENT) -> dict[str, Any]:
        """Compare the folders tensor by tensor, in whatever layouts; see `run`."""
        return run(self, progress)


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor of two folders.

    Attributes:
        name: source name of the tensor.
        verdict: EQUAL; SCALE: the same qvalues, zero points and groups, with other scales; VALUES;
            SHAPE; or the side that alone has it.
        left, right: storage on either side: a scheme's name, or a dtype; for the scales of a
            cache what the cache keeps; None where the tensor is absent.
        largest: largest absolute difference; None where there is nothing to subtract.
        relative: norm of the difference over that of the first.
        changed: share of elements that differ.
    """

    name: str
    verdict: str
    left: str | None
    right: str | None
    largest: float | None = None
    relative: float | None = None
    changed: float | None = None


def run(job: FolderDiffJob, progress: Progress) -> dict[str, Any]:
    """The comparison as plain data.

    `tensors` are as `TensorDifference` has them, `counts` go by verdict, and `divergence` is there
    where a text was given.

    Raises:
        QuantflowError: as `open_folder`, and for a text that cannot be read or a model without a
            tokenizer.
    """
    job = replace(
        job,
        left=model_folder(job.left, progress=progress),
        right=model_folder(job.right, progress=progress),
        text=None if job.text is None else text_path(str(job.text), progress),
    )
    left, right = (
        open_folder(each, backend="auto" if is_model(each) else "reference")
        for each in (job.left, job.right)
    )
    names = [*left.names, *(name for name in right.names if name not in set(left.names))]
    rows = [
        row
        for name in progress.steps(names, stage="diff", unit="tensor")
        for row in _compare_tensor(left, right, name)
    ]
    rows += _compared_caches(left, right)
    result: dict[str, Any] = {"tensors": [asdict(row) for row in rows], "counts": {}}
    for row in rows:
        result["counts"][row.verdict] = result["counts"].get(row.verdict, 0) + 1
    if job.text is not None:
        result["divergence"] = _divergence(job, left, right, job.text, progress)
    return result


def _compare_tensor(left: Artifact, right: Artifact, name: str) -> list[TensorDifference]:
    """The row of a tensor, and one for each number of a linear's input that differs."""
    difference = TensorDifference(
        name=name, verdict=EQUAL, left=_stored(left, name), right=_stored(right, name)
    )
    if difference.left is None or difference.right is None:
        return [replace(difference, verdict=ONLY_LEFT if difference.right is None else ONLY_RIGHT)]
    one, other = left.quantized(name), right.quantized(name)
    scales_alone = one is not None and other is not None and _same_codes(one, other)
    row = _subtracted(
        difference, _real(left, one, name), _real(right, other, name), scales_alone=scales_alone
    )
    return [row, *_compared_inputs(name.removesuffix(".weight"), difference, one, other)]


def _subtracted(
    pair: TensorDifference, first: Tensor, second: Tensor, *, scales_alone: bool
) -> TensorDifference:
    """A row with its verdict and numbers.

    Args:
        pair: row without verdict and numbers.
        first: values in the first folder, any shape.
        second: values in the second folder.
        scales_alone: whether a difference is one of scales.
    """
    if first.shape != second.shape:
        return replace(pair, verdict=SHAPE)
    first, second = first.float(), second.float()
    if torch.equal(first, second):
        return replace(pair, largest=0.0, relative=0.0, changed=0.0)
    difference, norm = second - first, float(first.norm())
    return replace(
        pair,
        verdict=SCALE if scales_alone else VALUES,
        largest=float(difference.abs().max()),
        relative=float(difference.norm()) / norm if norm else None,
        changed=float((difference != 0).float().mean()),
    )


def _compared_inputs(
    linear: str,
    weight: TensorDifference,
    one: QuantizedLinear | None,
    other: QuantizedLinear | None,
) -> list[TensorDifference]:
    """A row for each number of a linear's input that differs; `weight` is the row of its weight."""
    rows = []
    for part, kind in (("input_scale", SCALE), ("input_zero_point", VALUES)):
        pair = [None if side is None else getattr(side, part) for side in (one, other)]
        sides = (
            weight.left if pair[0] is not None else None,
            weight.right if pair[1] is not None else None,
        )
        rows += _differing(f"{linear}.{part}", sides, pair, kind=kind)
    return rows


def _compared_caches(left: Artifact, right: Artifact) -> list[TensorDifference]:
    """A row for each scale of keys and values that differs, or is of another kind of cache."""
    # none where none are kept
    sides = [dict(zip(side.caches, side.kv_scales(), strict=False)) for side in (left, right)]
    rows = []
    for attention in dict.fromkeys((*sides[0], *sides[1])):
        caches = [side.get(attention) for side in sides]
        kinds = [None if cache is None else kv_words(cache.scheme) for cache in caches]
        for name, part in zip(kv_tensor_names(attention), ("keys", "values"), strict=True):
            pair = [None if cache is None else getattr(cache, part) for cache in caches]
            if None not in kinds and kinds[0] != kinds[1]:
                rows.append(
                    TensorDifference(name=name, verdict=VALUES, left=kinds[0], right=kinds[1])
                )
            else:
                rows += _differing(name, (kinds[0], kinds[1]), pair, kind=SCALE)
    return rows


def _differing(
    name: str, sides: tuple[str | None, str | None], pair: Sequence[Tensor | None], *, kind: str
) -> list[TensorDifference]:
    """The row of a tensor that differs or is in one folder; none of one that is equal or absent.

    Args:
        name: name of the tensor.
        sides: storage in each folder.
        pair: values in each folder.
        kind: verdict on different values.
    """
    first, second = pair
    row = TensorDifference(name=name, verdict=EQUAL, left=sides[0], right=sides[1])
    if first is None and second is None:
        return []
    if first is None or second is None:
        return [replace(row, verdict=ONLY_LEFT if second is None else ONLY_RIGHT)]
    difference = _subtracted(row, first, second, scales_alone=kind == SCALE)
    return [] if difference.verdict == EQUAL else [difference]


def _stored(side: Artifact, name: str) -> str | None:
    """A tensor's storage in short; None where the tensor is absent."""
    linear = name.removesuffix(".weight")
    if name not in side.names:
        return None
    if name != linear and linear in side.linears:
        return side.linears[linear].scheme.name
    return side.checkpoint.infos[name].dtype


def _real(side: Artifact, linear: QuantizedLinear | None, name: str) -> Tensor:
    """The values of a tensor, float32."""
    return side.read([name], torch.float32)[name].float() if linear is None else linear.dequantize()


def _same_codes(left: QuantizedLinear, right: QuantizedLinear) -> bool:
    """Whether two linears differ in their scales alone."""

    def equal(one: Tensor | None, other: Tensor | None) -> bool:
        return (one is None and other is None) or (
            one is not None and other is not None and torch.equal(one, other)
        )

    def comparable(weight: QTensor) -> tuple[Any, ...]:
        return weight.qvalue.dtype, weight.qvalue.shape, weight.scale.shape, weight.scheme.minima

    one, other = left.weight, right.weight
    codes = comparable(one) == comparable(other) and torch.equal(one.qvalue, other.qvalue)
    return codes and equal(one.zero_point, other.zero_point) and equal(left.order, right.order)


def _divergence(
    job: FolderDiffJob, left: Artifact, right: Artifact, text: Path, progress: Progress
) -> Mapping[str, Any]:
    """The second's divergence from the first: KL in nats, and the share of equal tokens."""
    read = read_text(text, load_tokenizer(job.left))
    if read.note is not None:
        progress.say(f"diff: {read.note}")
    config = text_config(left.config)
    length = min(
        job.sequence_length, getattr(config, "max_position_embeddings", job.sequence_length)
    )
    sequences: Sequence[Tensor] = evaluation_sequences(
        read.documents, tokens=job.tokens, sequence_length=length
    )
    refuse_beyond(sequences, config.vocab_size, where=str(text))
    with (
        single_threaded(),
        torch.no_grad(),
        tempfile.TemporaryDirectory(prefix="quantflow-diff-") as scratch,
    ):
        streams = {
            name: LayerStream(side, graph_for(side.config), cache=rounder(side))
            for name, side in ((BASELINE, left), (_OTHER, right))
        }
        compared = Comparing(
            streams=streams,
            sequences=sequences,
            folder=Path(scratch),
            keys=dict.fromkeys(streams, "diff"),
            stage="diff",
            progress=progress,
            workers=cpu_threads.usable_cores(),
        ).scores()[_OTHER]
    return {
        "windows": len(sequences),
        "tokens": int(compared.lengths.sum()),
        "mean_kld": float(compared.kld.mean()),
        "largest_kld": float(compared.kld.max()),
        "top1_agreement": float(compared.agreement.double().mean()),
    }
