"""QUANT_CONFIG: the JSON that says how Gaudi's toolkit measures and quantizes.

1. Every key has its default here. Words are matched in any case, and booleans may be the texts
   "True" and "False".
2. `whitelist` and `blacklist` are the old names of the lists.
3. Unknown keys are kept and reported.
4. A mistake is reported in the toolkit's own words, so that it can be looked up.
5. `USED` says which keys mean something to a verb. The others are reported in one line.

Source: neural_compressor.torch.algorithms.fp8_quant._quant_common.quant_config, release 3.10.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quantflow.core.device_scales import ARITHMETICS
from quantflow.errors import InputError, UnsupportedError, UsageError, nearest
from quantflow.files.canonical import read_json
from quantflow.formats.gaudi.file_names import OBSERVERS
from quantflow.formats.gaudi.module_patterns import ModuleList, module_list
from quantflow.formats.gaudi.scale_methods import (
    DEFAULT_METHOD,
    MethodConfig,
    method_config,
    spelled,
)
from quantflow.shipped import SHIPPED

WORDS: Mapping[str, tuple[str, ...]] = {
    "mode": ("NONE", "QUANTIZE", "MEASURE", "SHAPE", "LOAD", "AUTO"),
    "observer": OBSERVERS,
    "measure_exclude": ("NONE", "INPUT", "OUTPUT", "PARAMS", "ALL"),
    "fp8_config": ("E4M3", "E5M2"),
    "hp_dtype": ("BF16", "FP16", "FP32"),
    "scale_format": ("SCALAR", "CONST"),
    "device_for_scales": ("GAUDI2", "GAUDI3"),
}
LEGACY = {"whitelist": "allowlist", "blacklist": "blocklist"}
FILLED_IN = ("world_size", "local_rank", "global_rank", "device_type")
# in the toolkit's own files, and read by nothing
STORED = ("method", "dump_stats_xlsx_path", "quantize_weight")
VERBS = {"measure": "MEASURE", "quantize": "QUANTIZE", "export": "QUANTIZE"}
USED = {  # keys that mean something to a verb; every other one that is not its default is reported
    "measure": ("mode", "observer", "measure_exclude", "dump_stats_path"),
    "quantize": (
        "mode", "fp8_config", "allowlist", "blocklist", "scale_method", "hp_dtype",
        "device_for_scales", "dump_stats_path", "ignore_modules_wo_measures",
    ),
    "export": (
        "mode", "observer", "measure_exclude", "allowlist", "blocklist", "scale_method",
        "fp8_config", "hp_dtype", "device_for_scales", "dump_stats_path", "recalc_scales",
        "scale_format", "use_qdq", "fake_quant", "dynamic_quantization",
        "ignore_modules_wo_measures", "seperate_measure_files",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """A QUANT_CONFIG with its defaults.

    Names and meanings are the toolkit's, its spelling of `seperate` among them.

    Attributes:
        given: keys that the file names, under their present names.
        unknown: keys that the toolkit stores and does not read.
    """

    mode: str = "QUANTIZE"
    observer: str = "maxabs"
    dump_stats_path: str = "stats"
    measure_exclude: str = "OUTPUT"
    allowlist: ModuleList = ModuleList()
    blocklist: ModuleList = ModuleList()
    scale_method: MethodConfig = field(default_factory=lambda: method_config(DEFAULT_METHOD))
    scale_params: Mapping[str, Any] = field(default_factory=dict)
    fp8_config: str = "E4M3"
    hp_dtype: str = "BF16"
    scale_format: str = "SCALAR"
    device_for_scales: str | None = None
    recalc_scales: bool = False
    ignore_modules_wo_measures: bool = False
    seperate_measure_files: bool = True
    fake_quant: bool = False
    use_qdq: bool = False
    measure_on_hpu: bool = True
    dynamic_quantization: bool = False
    row_parallel_linear_allreduce_quantization: bool = False
    calibration_sample_interval: int = 0
    mod_dict: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    unknown: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse keys that contradict each other.

        Raises:
            UsageError: two keys contradict each other; they are named.
        """
        if self.mod_dict:
            raise UsageError(
                "mod_dict: is not empty", "leave it out; the toolkit asserts that it stays empty"
            )
        measured = any(
            method.needs_measurement and not method.dynamic for method in self.scale_method.methods
        )
        if not self.dump_stats_path and (measured or self.mode == "MEASURE"):
            raise UsageError("Invalid 'dump_stats_path' value in custom config ('')", "give a path")
        if self.hp_dtype not in ARITHMETICS:
            raise UsageError(f"hp_dtype {self.hp_dtype!r} is unknown", "use BF16, FP16 or FP32")
        dynamic = [method.name for method in self.scale_method.methods if method.dynamic]
        if self.dynamic_quantization:
            static = [method.name for method in self.scale_method.methods if not method.dynamic]
            if self.mode not in ("QUANTIZE", "LOAD", "AUTO"):
                raise UsageError(
                    f"dynamic_quantization with mode {self.mode}", "use it with QUANTIZE or LOAD"
                )
            if self.use_qdq or self.fake_quant:
                raise UsageError(
                    "dynamic_quantization with use_qdq or fake_quant", "use one of them"
                )
            if self.row_parallel_linear_allreduce_quantization:
                raise UsageError(
                    "dynamic_quantization with row_parallel_linear_allreduce_quantization",
                    "use one of them",
                )
            if static:
                raise UsageError(
                    f"dynamic_quantization with scale method {static[0]}",
                    "use act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw or maxabs_pcs_pow2",
                )
        elif dynamic:
            raise UsageError(
                f"scale method {dynamic[0]} without dynamic_quantization",
                'add "dynamic_quantization": true',
            )

    @property
    def effective_scale_format(self) -> str:
        """SCALAR or CONST; scales per channel, fake_quant and dynamic quantization force CONST."""
        per_channel = any(
            method.weight.granularity == "PCS" for method in self.scale_method.methods
        )
        return (
            "CONST"
            if per_channel or self.fake_quant or self.dynamic_quantization
            else self.scale_format
        )

    @property
    def spelled_scale_method(self) -> Any:
        """The method in QUANT_CONFIG's words: its name, or the dictionary form."""
        return spelled(self.scale_method)

    @property
    def effective_recalc_scales(self) -> bool:
        """Whether the toolkit derives scales even where a file has them.

        The dictionary form of scale_method forces it.
        """
        return self.recalc_scales or not self.scale_method.plain

    def scale_device(self, device: str) -> str:
        """Device whose scales are derived for a device that runs them.

        Raises:
            UsageError: another device than GAUDI2 on gaudi3 with maxabs_hw.
        """
        wanted = device if self.device_for_scales is None else self.device_for_scales.lower()
        if wanted == device:
            return device
        hardware = self.scale_method.plain and self.scale_method.default.name == "maxabs_hw"
        if (wanted, device) != ("gaudi2", "gaudi3") or not hardware:
            raise UsageError(
                f"device_for_scales {self.device_for_scales} on {device} with "
                f"{self.scale_method.default.name}",
                "only GAUDI2 on gaudi3 with maxabs_hw can differ; leave it out",
            )
        return wanted


def read_quant_config(path: Path) -> QuantConfig:
    """Read a file.

    Raises:
        InputError: it cannot be read or is no JSON.
        UsageError: a key has a value that the toolkit would refuse, or keys contradict each other.
    """
    try:
        value = read_json(path)
    except InputError as error:
        raise InputError(f"QUANT_CONFIG: Can't load {path}! {error.cause}", error.remedy) from error
    if not isinstance(value, dict):
        raise UsageError(
            f"QUANT_CONFIG {path}: holds {type(value).__name__}, a table is needed", "write {...}"
        )
    try:
        return quant_config(value)
    except UsageError as error:
        raise UsageError(f"QUANT_CONFIG {path}: {error.cause}", error.remedy) from error


def find_quant_config(name: str) -> Path:
    """File of a path, or of a shipped preset by its name, with or without `.json`.

    Raises:
        UsageError: neither exists.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = {path.stem: path for path in sorted((SHIPPED / "gaudi").glob("*.json"))}
    preset = shipped.get(name.removesuffix(".json"))
    if preset is None:
        word = nearest(Path(name).stem, list(shipped))
        raise UsageError(
            f"QUANT_CONFIG: Can't open {name}! No such file, and no shipped preset of that name",
            word,
        )
    return preset


def quant_config(table: Mapping[str, Any]) -> QuantConfig:
    """Configuration of a table, over the defaults.

    Raises:
        UsageError: a key or a value is wrong; the message has both and what is valid.
    """
    names = {item.name for item in fields(QuantConfig)} - {"given", "unknown"}
    values: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    for old, key in LEGACY.items():
        if old in table and key in table:
            raise UsageError(f"{old} and {key} are the same key", f"keep {key}")
    for original, value in table.items():
        key = LEGACY.get(original, original)
        if key in names:
            values[key] = _value(key, value)
        elif key not in FILLED_IN:
            unknown[key] = value
    return QuantConfig(**values, given=frozenset(values), unknown=unknown)


def _value(key: str, value: Any) -> Any:
    """Checked value of a key."""
    if key in WORDS:
        return _word(key, value)
    if key in ("allowlist", "blocklist"):
        return module_list(key, value)
    if key == "scale_method":
        return method_config(value)
    kind = {item.name: item.type for item in fields(QuantConfig)}[key]
    if kind is bool:
        spelled = (
            {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
        )
        if not isinstance(spelled, bool):
            raise _invalid(key, value, ["TRUE", "FALSE"])
        return spelled
    if kind is int and (type(value) is not int or value < 0):
        raise UsageError(
            f"Invalid '{key}' value in custom config ('{value}')", "give a whole number, 0 or more"
        )
    if kind is str and not isinstance(value, str):
        raise UsageError(f"Invalid '{key}' value in custom config ('{value}')", "give a path")
    if kind not in (bool, int, str) and not isinstance(value, Mapping):
        raise UsageError(f"Invalid '{key}' value in custom config ('{value}')", "give a table")
    return value


def _word(key: str, value: Any) -> str | None:
    if value is None and key == "device_for_scales":
        return None
    for word in WORDS[key]:
        if str(value).upper() == word.upper():
            return word
    raise _invalid(key, value, WORDS[key])


def _invalid(key: str, value: Any, valid: "list[str] | tuple[str, ...]") -> UsageError:
    return UsageError(
        f"Invalid '{key}' value in custom config ('{value}'). Enter one of {list(valid)}",
        f"mend {key}",
    )


def require_mode(config: QuantConfig, verb: str) -> None:
    """Refuse a configuration that was written for another verb.

    The verb decides what is done, not the file.

    Raises:
        UsageError: the mode is another verb's.
        UnsupportedError: measure with an observer that keeps tensors or shapes instead of maxima.
    """
    if config.mode not in (VERBS[verb], "AUTO"):
        fitting = [name for name, mode in VERBS.items() if mode == config.mode]
        runs = " or ".join(f"`quantflow {name}`" for name in fitting)
        remedy = f"run {runs}" if fitting else "take QUANT_CONFIG out of the environment"
        raise UsageError(
            f"{verb}: QUANT_CONFIG has mode {config.mode}, {verb} needs {VERBS[verb]}",
            f"{remedy}, or give the other file",
        )
    if verb == "measure" and config.observer not in ("maxabs", "maxabs_per_channel"):
        raise UnsupportedError(
            f"QUANT_CONFIG: observer {config.observer} keeps "
            f"{'shapes' if config.observer == 'shape' else 'whole tensors'}",
            "use maxabs or maxabs_per_channel",
        )


def without_meaning(config: QuantConfig, verb: str) -> list[str]:
    """Keys of a file that `verb` does not use, and unknown ones.

    A key counts where its value is not the default.
    """
    defaults = QuantConfig()
    unused = [
        key
        for key in sorted(config.given)
        if key not in USED[verb] and getattr(config, key) != getattr(defaults, key)
    ]
    return [*unused, *sorted(set(config.unknown) - set(STORED))]


@dataclass(frozen=True, kw_only=True)
class GivenConfig:
    """The QUANT_CONFIG of a command line.

    Nothing is reported of a quiet one.
    """

    config: QuantConfig
    path: Path
    quiet: bool = False
