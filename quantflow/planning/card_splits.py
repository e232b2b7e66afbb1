"""Whether a quantized model can be cut over 2, 4 or 8 cards, and the dimensions that do not divide.

A linear behind a norm, or one of several that runtimes fuse, is cut by its rows: each card computes
some outputs. Any other is cut by its columns: each card takes some inputs. Heads go whole. Fewer kv
heads than cards are copied where the cards are a multiple of them. Megatron and the runtimes after
it cut the same way. Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from collections.abc import Mapping, Sequence

from quantflow.core.packing import elements_of_whole_words
from quantflow.core.scheme import LinearScheme
from quantflow.distributed.head_cut import units_of
from quantflow.models.graph import Graph
from quantflow.planning.sizes import ModelSize

SIZES = (1, 2, 4, 8)


def obstacles(
    model: ModelSize, graph: Graph, schemes: Mapping[str, LinearScheme | None], size: int
) -> list[tuple[str, str]]:
    """Obstacles to a cut of the model over `size` cards: (name, the numbers that do not divide)."""
    shapes = {
        name: model.infos[f"{name}.weight"].shape
        for layer in graph.layers
        for group in layer.groups
        for name in group.linears
    }
    return obstacles_of(
        shapes, graph, schemes, heads=model.heads, kv_heads=model.kv_heads, size=size
    )


def obstacles_of(
    shapes: Mapping[str, Sequence[int]],
    graph: Graph,
    schemes: Mapping[str, LinearScheme | None],
    *,
    heads: int,
    kv_heads: int,
    size: int,
) -> list[tuple[str, str]]:
    """The same from what a quantized folder says of itself.

    Args:
        shapes: linear -> [out_features, in_features] of the model's linear.
        graph: linears of the model.
        schemes: linear -> scheme; None, or no entry, is not quantized.
        heads: number of attention heads.
        kv_heads: number of heads of keys and values.
        size: number of cards.
    """
    listed = []
    if units_of(heads, cards=size, card=0) is None:
        listed.append(("config.json: num_attention_heads", f"{heads} heads over {size}"))
    if units_of(kv_heads, cards=size, card=0, copies=True) is None:
        listed.append(("config.json: num_key_value_heads", f"{kv_heads} heads over {size}"))
    for layer in graph.layers:
        for group in layer.groups:
            for name in group.linears:
                rows, columns = shapes[name]
                scheme = schemes.get(name)
                by_rows = group.norm is not None or group.fused
                why = (
                    _cut_rows(rows, size, scheme) if by_rows else cut_columns(columns, size, scheme)
                )
                if why is not None:
                    listed.append((name, why))
    return listed


def folded(listed: Sequence[tuple[str, str]]) -> list[str]:
    """Obstacles as lines, those of all layers under one pattern with `*` for the index."""
    lines: dict[str, None] = {}
    for name, why in listed:
        pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        lines[f"{pattern}: {why}"] = None
    return list(lines)


def _cut_rows(rows: int, size: int, scheme: LinearScheme | None) -> str | None:
    held = units_of(rows, cards=size, card=0)
    if held is None:
        return f"{rows} rows over {size}"
    if scheme is not None and held[1] % scheme.weights.block_rows and size > 1:
        return f"{rows} rows over {size} are {held[1]}, blocks have {scheme.weights.block_rows}"
    return None


def cut_columns(columns: int, size: int, scheme: LinearScheme | None) -> str | None:
    """The reason why a weight's columns cannot be cut over `size` cards; None where they can.

    Groups and words of packed values stay whole.
    """
    held = units_of(columns, cards=size, card=0)
    if held is None:
        return f"{columns} columns over {size}"
    share = held[1]
    if scheme is None:
        return None
    group_size = scheme.weights.group_size
    if group_size is not None and share % group_size:
        return f"{columns} columns over {size} are {share}, groups have {group_size}"
    num_bits = scheme.weights.num_bits
    count = elements_of_whole_words(num_bits)  # pack-quantized values are packed along the columns
    if scheme.layout == "pack-quantized" and share % count:
        words = count * num_bits // 32
        holders = "a word holds" if words == 1 else f"{words} words hold"
        return f"{columns} columns over {size} are {share}, {holders} {count}"
    return None
