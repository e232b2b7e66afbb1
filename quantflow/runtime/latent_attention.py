"""Multi-head latent attention, computed on the latents that the KV cache holds.

A token leaves a latent c and a key r, rotated by its position, that all heads share. Keys and
values of a head h are linear in c, by the two parts of one linear's weight:

    k[h] = [r, K[h] c]        v[h] = V[h] c

A query is [its rotated part, its plain part n]. Since n . (K[h] c) = (K[h]' n) . c, a score is the
product of [rotated part, K[h]' n] and [r, c], and the sum of values is V[h] applied to the sum of
latents. So attention runs with one kv head of keys [r, c] and values c, and no key or value of a
head is ever made: the cache holds r and c alone. decode.c has this attention (`latent`).

The two products by head take the weight as it is dequantized, since a group of its scales lies
along the other axis than the sums of K[h]' n. Where that linear rounds its inputs, the latent is
rounded once, before it is kept: the linear reads nothing else. Source: DeepSeek-AI 2024,
arXiv:2405.04434, section 2.1.2 and appendix C.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import affine
from quantflow.core.scheme import TensorScheme
from quantflow.errors import IntegrityError
from quantflow.models.architecture import Blueprint, Latent
from quantflow.runtime.artifact import Artifact
from quantflow.runtime.operations import Norm, Projection, normalized, product_of_heads
from quantflow.runtime.packed import Pack, PackedTensors
from quantflow.runtime.projection import plain_weight, projection


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounding:
    """The rounding of a linear's inputs.

    Attributes:
        scheme: scheme of the inputs; None leaves them as they are.
        scale, zero_point: those that were measured; else None.
        order: int64 [features], input that each column of the weight multiplies; None: its own.
    """

    scheme: TensorScheme | None
    scale: Tensor | None
    zero_point: Tensor | None
    order: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """The inputs [N, features] as the linear sees them."""
        x = x if self.order is None else x[:, self.order]
        x = affine.fake_quantize_input(x, self.scheme, self.scale, self.zero_point)
        return x if self.order is None else x[:, torch.argsort(self.order)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ByHead:
    """A product of each head with a weight of its own.

    Attributes:
        weight: [heads, O, I] float32 or bfloat16.
        dtype: dtype of the inputs; they are rounded to bfloat16 where the weight is in it too.
    """

    weight: Tensor
    dtype: torch.dtype

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write out[:, h] = x[:, h] @ weight[h].T.

        Args:
            x: [N, heads, I] float32, its last axis contiguous.
            out: [N, heads, O] float32, its last axis contiguous.
        """
        narrow = self.dtype == self.weight.dtype == torch.bfloat16
        product_of_heads(x.contiguous().to(self.dtype) if narrow else x, self.weight, out)


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentQueries:
    """From hidden states to queries, and to the keys that the cache holds.

    Attributes:
        sizes: sizes of the attention.
        down: from a hidden state to queries, of all heads or compressed, the key that all heads
            share, and the latent.
        query_up: from compressed queries to those of all heads; None where they are not compressed.
        query_norm, latent_norm: norms of compressed queries and of the latent.
        keys: from the plain part of a query into the space of latents.
        rounding: rounding of the latent.
    """

    sizes: Latent
    down: Projection
    query_up: Projection | None
    query_norm: Norm
    latent_norm: Norm
    keys: ByHead
    rounding: Rounding

    def __call__(self, x: Tensor) -> Tensor:
        """Queries of all heads and the key, [N, (heads + 1) * (rotated + features)] float32.

        Nothing is rotated yet.

        Args:
            x: [N, H] float32.
        """
        return self.of_compressed(*self.compressed(x))

    def compressed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed queries behind their norm, or queries where they are not compressed; the rest.

        Args:
            x: [N, H] float32.

        Returns:
            [N, compressed or heads * (rotated + plain)] float32, and the key with the latent
            [N, rotated + features] float32.
        """
        both, key_width = self.down(x), self.sizes.rotated + self.sizes.features
        queries, rest = both[:, :-key_width], both[:, -key_width:]
        if self.query_up is not None:
            queries = normalized(queries, self.query_norm, self.sizes.eps)
        return queries, rest

    def of_compressed(self, queries: Tensor, rest: Tensor) -> Tensor:
        """What `__call__` returns, of what `compressed` does."""
        sizes, rotated, rows = self.sizes, self.sizes.rotated, len(queries)
        if self.query_up is not None:
            queries = self.query_up(queries)
        queries = queries.view(rows, -1, rotated + sizes.plain)  # [N, heads, ..]
        out = torch.empty(rows, queries.shape[1] + 1, rotated + sizes.features)
        out[:, :-1, :rotated] = queries[..., :rotated]
        self.keys(queries[..., rotated:], out[:, :-1, rotated:])
        out[:, -1, :rotated] = rest[:, :rotated]
        latent = normalized(rest[:, rotated:], self.latent_norm, sizes.eps)
        out[:, -1, rotated:] = self.rounding(latent)
        return out.view(rows, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentOutput:
    """From the heads' sums of latents to what attention adds.

    Attributes:
        values: from the space of latents to a head's value.
        output: attention's last linear.
    """

    values: ByHead
    output: Projection

    def __call__(self, attended: Tensor) -> Tensor:
        """What attention adds, [N, H] float32.

        Args:
            attended: [N, heads * features] float32.
        """
        heads, width, features = self.values.weight.shape
        out = torch.empty(len(attended), heads, width)
        self.values(attended.view(-1, heads, features), out)
        return self.output(out.view(len(attended), -1))


def latent_products(
    artifact: Artifact,
    blueprint: Blueprint,
    prefix: str,
    norms: Mapping[str, Norm],
    pack: Pack | None,
) -> tuple[LatentQueries, LatentOutput]:
    """Read the attention of a layer.

    Args:
        artifact: artifact of the model.
        blueprint: the model, with latent attention.
        prefix: name of the layer.
        norms: the norms of compressed queries and latents by their names inside the layer; without
            the former where queries are not compressed.
        pack: file where weights are looked for first, and kept.

    Raises:
        InputError: a tensor that holds what it must not.
    """
    sizes, heads, names = blueprint.latent, blueprint.heads.num_heads, blueprint.names
    assert sizes is not None
    parts = sizes.names
    of_heads = _rotated_first(sizes.plain, sizes, heads)
    ups = None
    first = of_heads
    if sizes.compressed is not None:
        first = torch.arange(sizes.compressed)
        ups = projection(artifact, [f"{prefix}.{parts.query_up}"], pack, order=of_heads)
    order = torch.cat([first, len(first) + _rotated_first(sizes.features, sizes, 1)])
    down = projection(artifact, [f"{prefix}.{name}" for name in names.qkv], pack, order=order)
    kept = _by_head(artifact, f"{prefix}.{parts.up}", sizes, heads, pack)
    linear = artifact.linears.get(f"{prefix}.{parts.up}")
    rounding = Rounding(
        scheme=None if linear is None else linear.scheme.input,
        scale=kept.get("scale"),
        zero_point=kept.get("zero_point"),
        order=kept.get("order"),
    )
    queries = LatentQueries(
        sizes=sizes,
        down=down,
        query_up=ups,
        query_norm=norms.get(parts.query_norm, Norm()),
        latent_norm=norms[parts.norm],
        keys=ByHead(weight=kept["keys"], dtype=artifact.dtype),
        rounding=rounding,
    )
    return queries, LatentOutput(
        values=ByHead(weight=kept["values"], dtype=artifact.dtype),
        output=projection(artifact, [f"{prefix}.{names.output}"], pack),
    )


def _rotated_first(others: int, sizes: Latent, heads: int) -> Tensor:
    """The rows of heads that have `others` features and then those that are rotated, in our order.

    The rotated ones come first, and the two of a pair half of them apart, as decode.c rotates them.
    Queries and keys are put in the same order, so no score changes.
    """
    rotated = torch.arange(sizes.rotated)
    if sizes.pairs:
        rotated = torch.cat([rotated[0::2], rotated[1::2]])
    head = torch.cat([others + rotated, torch.arange(others)])
    return (torch.arange(heads)[:, None] * len(head) + head).flatten()


def _by_head(
    artifact: Artifact, name: str, sizes: Latent, heads: int, pack: Pack | None
) -> PackedTensors:
    """The two weights by head of the linear from latents to keys and values, and its rounding.

    They are held in the artifact's dtype, or as they are stored in bfloat16.
    """
    shapes = {
        "keys": (heads, sizes.features, sizes.plain),
        "values": (heads, sizes.value, sizes.features),
    }

    def make() -> PackedTensors:
        rest: PackedTensors = {}
        if name in artifact.linears:
            linear = artifact.decode(name)
            weight = linear.dequantize().to(artifact.dtype)
            numbers = {
                "scale": linear.input_scale,
                "zero_point": linear.input_zero_point,
                "order": linear.order,
            }
            rest = {key: number for key, number in numbers.items() if number is not None}
        else:
            weight = plain_weight(artifact, f"{name}.weight", None)
        # [heads, plain + value, features]
        weight = weight.view(heads, sizes.plain + sizes.value, sizes.features)
        keys = weight[:, : sizes.plain].transpose(1, 2).contiguous()
        return {"keys": keys, "values": weight[:, sizes.plain :].contiguous(), **rest}

    kept = make() if pack is None else pack.get(f"{name} by head", make)
    for key, shape in shapes.items():
        tensor = kept.get(key)
        if tensor is None or tensor.shape != shape:
            found = "nothing" if tensor is None else list(tensor.shape)
            raise IntegrityError(
                f"{name}: {found} where {list(shape)} belongs in the pack",
                "remove the pack; it is made again",
            )
    return kept
