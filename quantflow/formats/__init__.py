"""On-disk layouts, by the name used in recipes. One file each; these tables are the only registry.

`FORMATS` are those in which `quantize` itself writes. `LAYOUTS` are all that a linear is converted
to and from; a folder of any of them runs.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from quantflow.core.scheme import LinearScheme, TensorScheme
from quantflow.errors import UnsupportedError
from quantflow.files.safetensors_header import SplitTensor
from quantflow.formats import awq, compressed_tensors, fp8, ipex, modelopt, mxfp4
from quantflow.formats.compressed_tensors import layout as compressed_tensors_layout
from quantflow.formats.gptq import auto_round
from quantflow.formats.gptq import layout as gptq
from quantflow.formats.weight_layout import Infos, WeightLayout

FORMATS: dict[str, ModuleType] = {compressed_tensors.NAME: compressed_tensors}
DEFAULT: str = compressed_tensors.NAME  # what artifacts are written in
LAYOUTS: Mapping[str, WeightLayout] = MappingProxyType(
    {
        compressed_tensors.NAME: compressed_tensors_layout.CompressedTensorsLayout(),
        gptq.NAME: gptq.GPTQLayout(stored_less=1),
        gptq.NAME_V2: gptq.GPTQLayout(stored_less=0),
        auto_round.NAME: auto_round.AutoRoundLayout(),
        awq.NAME: awq.AWQLayout(),
        fp8.NAME: fp8.FP8Layout(),
        modelopt.NAME: modelopt.ModelOptLayout(),
        ipex.NAME: ipex.IPEXLayout(),
        mxfp4.NAME: mxfp4.MXFP4Layout(),
    }
)
# Layouts with a second configuration file -> its name, and its content from the configuration in
# config.json.
BESIDE: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = MappingProxyType(
    {modelopt.NAME: (modelopt.CONFIG_BESIDE, modelopt.config_beside)}
)
# Layouts whose weights are one file of torch.save -> its name, from the schemes of the linears.
PICKLED: Mapping[str, Callable[[Mapping[str, LinearScheme]], str]] = MappingProxyType(
    {ipex.NAME: ipex.file_name}
)
# Layouts that describe a KV cache -> its scheme from the configuration, and the names of an
# attention's two scales.
CACHES: Mapping[
    str, tuple[Callable[[Mapping[str, Any]], TensorScheme | None], Callable[[str], tuple[str, str]]]
]
CACHES = MappingProxyType(
    {
        compressed_tensors.NAME: (
            compressed_tensors.kv_scheme_from_config,
            compressed_tensors.kv_tensor_names,
        ),
        modelopt.NAME: (modelopt.kv_scheme_from_config, modelopt.kv_tensor_names),
    }
)
# Layouts that some programs of the same method do not read -> a sentence on them, from the schemes
# of the linears.
WHO_READS: Mapping[str, Callable[[Mapping[str, LinearScheme]], str | None]] = MappingProxyType(
    {fp8.NAME: fp8.who_reads}
)
# Layouts with tensors that hold several linears -> these tensors, from the shapes of the linears.
STACKED: Mapping[str, Callable[[Mapping[str, tuple[int, int]]], dict[str, SplitTensor]]] = (
    MappingProxyType({mxfp4.NAME: mxfp4.stacks})
)


def split_of(config: Mapping[str, Any], infos: Infos) -> dict[str, SplitTensor]:
    """Tensors of a folder that hold several linears, and the tensors that they are read as.

    Raises:
        InputError: a tensor has a shape that its linears cannot have.
    """
    return mxfp4.split(infos) if config.get("quant_method") == mxfp4.METHOD else {}


def layout_of(config: Mapping[str, Any], infos: Infos) -> WeightLayout:
    """The layout of a folder.

    Args:
        config: the `quantization_config` of its config.json.
        infos: headers of its tensors.

    Raises:
        UnsupportedError: a layout that this version does not read.
    """
    readers: tuple[Callable[[Mapping[str, Any], Infos], WeightLayout | None], ...] = (
        compressed_tensors_layout.layout_of,
        gptq.layout_of,
        auto_round.layout_of,
        awq.layout_of,
        fp8.layout_of,
        modelopt.layout_of,
        ipex.layout_of,
        mxfp4.layout_of,
    )
    for reader in readers:
        layout = reader(config, infos)
        if layout is not None:
            return layout
    method = config.get("quant_method")
    packing = (
        f" with packing_format {config['packing_format']!r}" if "packing_format" in config else ""
    )
    raise UnsupportedError(
        f"config.json: quant_method {method!r}{packing} is not read here",
        f"use a folder of {', '.join(LAYOUTS)}",
    )
