"""Gaudi's files where its runtimes look: folders, prefixes, names, and the QUANT_CONFIG."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quantflow.core.device_scales import Target
from quantflow.files import disk
from quantflow.files.canonical import readable_json
from quantflow.formats.gaudi import experts, gaudi_nodes
from quantflow.formats.gaudi.file_names import GENERATIONS, FileName
from quantflow.formats.gaudi.module_patterns import ModuleList, as_table, selected
from quantflow.formats.gaudi.quant_config import QuantConfig
from quantflow.formats.gaudi.row_parallel import ROW_PARALLEL
from quantflow.formats.gaudi.scales import scales_from
from quantflow.formats.gaudi.triple import SCALES, Node, Triple, write_triple

HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True, kw_only=True)
class GaudiFiles:
    """Contents that are written for every runtime.

    Attributes:
        name: name of the QUANT_CONFIG, without `.json`.
        device: device that runs the model.
        target: device whose scales are derived; another one with device_for_scales.
        read_weight: function from a node to its weight; None where no model is given.
    """

    config: QuantConfig
    name: str
    device: str
    target: Target
    read_weight: Callable[[str], Tensor] | None


@dataclass(frozen=True, kw_only=True)
class GaudiLayout:
    """Places where a runtime looks for the files.

    Attributes:
        base: folder in which the runtime runs.
        data: folder of the measurement, relative to base.
        prefix: prefix of the files in it.
        config: path of the QUANT_CONFIG, relative to base.
        numbered: whether even a single rank has its number in the names.
        unmeasured: modules that the runtime patches and that no measurement of ours has.
    """

    base: Path
    data: str
    prefix: str
    config: str
    numbered: bool
    unmeasured: tuple[str, ...] = ()


def write_ours(root: Path, ranks: Sequence[Triple], files: GaudiFiles, *, family: str) -> None:
    """Write our measurement for optimum-habana and TGI, and for vLLM.

    vLLM's row-parallel linears have outputs.

    Args:
        root: the folder.
        ranks: nodes of each rank in our names.
        files: what is written for every runtime.
        family: the model's type.
    """
    excluded = files.config.measure_exclude in ("OUTPUT", "ALL")

    def kept(nodes: Mapping[str, Node], *, but: Sequence[str] = ()) -> Mapping[str, Node]:
        return gaudi_nodes.without_outputs(nodes, but=but) if excluded else nodes

    counts = experts.totals(triple.nodes for triple in ranks)
    routers = (experts.ROUTERS,) if counts else ()
    patched = family in experts.PATCHED_FAMILIES
    plain = [
        kept(gaudi_nodes.for_optimum_habana(triple.nodes, patched=patched, counts=counts))
        for triple in ranks
    ]
    alone = (experts.LINEARS,) if counts and not patched else ()
    _write(
        [replace(triple, nodes=nodes) for triple, nodes in zip(ranks, plain, strict=True)],
        files,
        _optimum_habana(root, files, (gaudi_nodes.FUSED_ATTENTION, *routers, *alone)),
    )
    fused = [
        replace(
            triple,
            nodes=kept(gaudi_nodes.for_vllm(triple.nodes), but=ROW_PARALLEL),
        )
        for triple in ranks
    ]
    generation = GENERATIONS.get(files.device, files.device)
    layout = GaudiLayout(
        base=root / "vllm",
        data=generation,
        prefix="inc_output",
        config=f"{files.name}_{generation}.json",
        numbered=True,
        unmeasured=(
            gaudi_nodes.FUSED_ATTENTION,
            "softmax",
            "batch2block_matmul",
            "block2batch_matmul",
            *routers,
        ),
    )
    _write(fused, files, layout)


def write_theirs(
    root: Path, ranks: Sequence[Triple], files: GaudiFiles, *, observer: str, keep_originals: bool
) -> None:
    """Write a measurement of Gaudi's toolkit, with attention's inputs postprocessed and scales."""
    layout = replace(
        _optimum_habana(root, files, ()), numbered=gaudi_nodes.are_vllms(ranks[0].nodes)
    )
    _write(ranks, files, layout, observer=observer, keep_originals=keep_originals)


def _optimum_habana(root: Path, files: GaudiFiles, unmeasured: tuple[str, ...]) -> GaudiLayout:
    return GaudiLayout(
        base=root,
        data="hqt_output",
        prefix=Path(files.config.dump_stats_path).name or "measure",
        config=f"quantization_config/{files.name}.json",
        numbered=False,
        unmeasured=unmeasured,
    )


def _write(
    ranks: Sequence[Triple],
    files: GaudiFiles,
    layout: GaudiLayout,
    *,
    observer: str = "maxabs",
    keep_originals: bool = False,
) -> None:
    """Write maxima and scales of every rank, and the QUANT_CONFIG."""
    config, folder = files.config, layout.base / layout.data
    disk.make_folder(folder)
    block = _blocked(config, ranks[0].nodes, layout)
    scaled = has_scales(config, ranks=len(ranks))
    for rank, triple in enumerate(ranks):
        number = rank if layout.numbered or len(ranks) > 1 else None
        name = FileName(
            prefix=layout.prefix,
            observer=observer,
            rank=number,
            world=None if number is None else len(ranks),
        )
        modules = triple.modules or tuple(sorted(triple.nodes))
        whole = Triple(
            nodes=triple.nodes, local_rank=number, samples=triple.samples, modules=modules
        )
        if keep_originals:
            write_triple(folder, replace(name, prefix=f"orig_{name.prefix}"), whole)
        nodes = gaudi_nodes.postprocess(triple.nodes)
        write_triple(folder, name, replace(whole, nodes=nodes))
        if scaled:
            scales = scales_from(
                kept(nodes, config, block),
                config.scale_method,
                target=files.target,
                arithmetic=config.hp_dtype,
                read_weight=files.read_weight,
            )
            method = config.scale_method.default.name.upper()
            write_triple(
                folder,
                replace(name, method=method),
                Triple(nodes=scales, mode=SCALES, local_rank=number),
            )
    path = layout.base / layout.config
    disk.make_folder(path.parent)
    table = config_table(
        config, dump_stats_path=f"./{layout.data}/{layout.prefix}", block=block, observer=observer
    )
    disk.write_file(path, readable_json(table))


def has_scales(config: QuantConfig, *, ranks: int) -> bool:
    """Whether the toolkit reads scales from files that can be written here.

    It derives them itself with recalc_scales, and reads no file where all scales are fixed. Of
    several ranks each has a part of the channels.
    """
    measured = any(method.needs_measurement for method in config.scale_method.methods)
    return (
        measured
        and not config.effective_recalc_scales
        and (ranks == 1 or not needs_weights(config))
    )


def needs_weights(config: QuantConfig) -> bool:
    """Whether any scale method looks at weights, not at their maxima alone."""
    return any(method.needs_weights for method in config.scale_method.methods)


def kept(nodes: Mapping[str, Node], config: QuantConfig, block: ModuleList) -> dict[str, Node]:
    """The nodes that are quantized."""
    return {
        name: node
        for name, node in nodes.items()
        if selected(name, gaudi_nodes.layer_type(name, node), allow=config.allowlist, block=block)
    }


def config_table(
    config: QuantConfig, *, dump_stats_path: str, block: ModuleList, observer: str = "maxabs"
) -> dict[str, Any]:
    """The QUANT_CONFIG: the keys of the file, with the path and the blocklist of these files."""
    table = {
        key: getattr(config, key)
        for key in config.given - {"allowlist", "blocklist", "scale_method"}
    }
    if config.effective_scale_format != config.scale_format:
        # the toolkit changes it so itself, with a warning
        table["scale_format"] = config.effective_scale_format
    return {
        **config.unknown,
        **table,
        "method": "HOOKS",
        "mode": "QUANTIZE",
        "observer": observer,
        "scale_method": config.spelled_scale_method,
        "allowlist": as_table(config.allowlist),
        "blocklist": as_table(block),
        "dump_stats_path": dump_stats_path,
    }


def _blocked(config: QuantConfig, nodes: Mapping[str, Node], layout: GaudiLayout) -> ModuleList:
    """The blocklist, and on it every module that was not measured.

    The toolkit replaces such modules by ones that fail when called.
    """
    heads = tuple(head for head in HEADS if head not in nodes) if layout.unmeasured else ()
    missing = gaudi_nodes.unmeasured(nodes) if layout.unmeasured else ()
    names = dict.fromkeys((*config.blocklist.names, *heads, *missing, *layout.unmeasured))
    return ModuleList(names=tuple(names), types=config.blocklist.types)
