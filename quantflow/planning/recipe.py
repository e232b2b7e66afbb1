"""A recipe: the YAML that says what a run does, read strictly into frozen records.

    model: folder                       revision: null         seed: 0
    calibration: {source, samples, sequence_length, pack}
    measure:     {ranks, tp, dp, stats, experts}
    quantize:    [{name, scheme, algorithm, group_size, float8, scale_rounding, input_observer, transforms, ignore, overrides,
                   signround: {iterations, sequences, start}, tune: {steps, sequences}, kv_cache: {scheme, granularity}, head,
                   experts, expert_tokens, target_bpw, max_kld, candidates, expect}, ...]
    unify:       {groups}               export: {format, shard_size, device, scale_method, dtype}
    validate:    {text, tokens, sequence_length, gate, allow_inconclusive}
    resources:   {max_memory, max_disk, disk_offload}

Unknown keys, wrong types and repeated keys are refused with the nearest name that exists. Flags are applied over `--set`,
`--set` over the file, the file over QUANT_CONFIG (quantflow/formats/gaudi/quant_config.py), that over these defaults. The
environment is read here and nowhere else. Longer than 300 lines because every key of a recipe stands here, once.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quantflow.core.kv_scheme import GRANULARITIES, NAMES
from quantflow.core.scheme import ALIASES, FLOAT8_FLAVOURS, INPUT_OBSERVERS, PRESETS, SCALE_ROUNDINGS
from quantflow.errors import InputError, UsageError, nearest

FED = ("routed", "all")  # tokens that measure shows to an expert
POLICIES = (
    "error",
    "all",
    "damp",
    "rtn",
    "share_max",
)  # for experts that calibration reached too seldom; quantflow/planning/experts.py
UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The text that measure runs: `source` is a file, `sequence_length` null means min(2048, the model's)."""

    source: str | None = None
    samples: int = 128
    sequence_length: int | None = None
    pack: bool = False


@dataclass(frozen=True, kw_only=True)
class Measure:
    """`tp` of the ranks share a model, null is what the others leave of ranks = tp x dp; `stats` null: what artifacts need.

    `experts` of a mixture are shown the tokens that are `routed` to them, or `all`; null: all where an artifact asks for it.
    """

    ranks: int = 1
    tp: int | None = None
    dp: int | None = None
    stats: tuple[str, ...] | None = None
    experts: str | None = None

    def __post_init__(self) -> None:
        """Refuse a word that means nothing."""
        if self.experts not in (None, *FED):
            raise UsageError(f"measure: experts={self.experts!r}", nearest(str(self.experts), FED))


@dataclass(frozen=True, kw_only=True)
class Override:
    """Another scheme for the linears that `match` names; `ignore` is the way to leave one unquantized."""

    match: str
    scheme: str
    group_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """The scheme of the head; `algorithm` null is the scheme's own."""

    scheme: str
    algorithm: str | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse a word that means nothing."""
        if self.scheme not in (*PRESETS, *ALIASES):
            raise UsageError(f"head: scheme {self.scheme!r} is unknown", nearest(self.scheme, [*PRESETS, *ALIASES]))


@dataclass(frozen=True, kw_only=True)
class SignRound:
    """Algorithm signround: so many `iterations` of so many `sequences` of the text, from what the algorithm `start` makes."""

    iterations: int = 200
    sequences: int = 8
    start: str = "rtn"

    def __post_init__(self) -> None:
        """Refuse counts that are none."""
        for key, value in (("iterations", self.iterations), ("sequences", self.sequences)):
            if value < 1:
                raise UsageError(f"signround: {key}={value}", "give 1 or more")


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Scales tuned end to end: so many `steps`, 0 is none, on so many `sequences` of the text each."""

    steps: int = 32
    sequences: int = 8

    def __post_init__(self) -> None:
        """Refuse counts that are none."""
        if self.steps < 0 or self.sequences < 1:
            raise UsageError(
                f"tune: steps={self.steps}, sequences={self.sequences}", "give steps from 0 and sequences from 1 on"
            )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A scheme that may be chosen for a linear."""

    scheme: str
    group_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class KVCacheSettings:
    """How keys and values are kept: `scheme` FP8 or INT8, one measured scale `per_tensor` or `per_head`."""

    scheme: str
    granularity: str = "per_tensor"

    def __post_init__(self) -> None:
        """Refuse words that mean nothing."""
        for key, word, known in (("scheme", self.scheme, tuple(NAMES)), ("granularity", self.granularity, GRANULARITIES)):
            if word not in known:
                raise UsageError(f"kv_cache: {key}={word!r}", nearest(word, known))


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """One artifact: null means what the scheme's preset says, or what measured better (`quantized_inputs`).

    `float8` is another flavour for FP8 schemes: `gaudi2` keeps to the 240 that Gaudi2 holds. `scale_rounding` pow2 makes their
    stored scales powers of two. `input_observer` chooses the range of static inputs from the measured histogram: `mse` by the
    squared error, `percentile` up to 99.99 %. `experts` is what becomes of
    experts that calibration reached with fewer than `expert_tokens`; null is two per input feature for algorithms that read
    statistics, and 100 for static inputs. `head` null leaves the head as it is. With `target_bpw` (bits per quantized weight
    of the layers) or `max_kld` (mean KL divergence, nats per token) every linear of a layer that `overrides` does not name
    gets the one of `candidates` that measured sensitivities speak for; null is integers of 2 to 8 bits. `kv_cache` null
    keeps keys and values as they are. `signround` is how the algorithm of that name learns. `tune` is how scales are tuned end
    to end after that; null is not, but where `algorithm` is best and weights alone are quantized below 8 bits.
    """

    name: str
    scheme: str
    algorithm: str | None = None
    group_size: int | None = None
    float8: str | None = None
    scale_rounding: str | None = None
    input_observer: str | None = None
    transforms: tuple[dict[str, Any], ...] | None = None
    ignore: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    signround: SignRound | None = None
    tune: Tune | None = None
    kv_cache: KVCacheSettings | None = None
    head: HeadSettings | None = None
    quantized_inputs: bool | None = None
    experts: str = "error"
    expert_tokens: int | None = None
    target_bpw: float | None = None
    max_kld: float | None = None
    candidates: tuple[Candidate, ...] | None = None
    expect: str = "pass"

    @property
    def mixed(self) -> bool:
        """Whether schemes are to be chosen."""
        return self.target_bpw is not None or self.max_kld is not None

    def __post_init__(self) -> None:
        """Refuse values that no stage could use."""
        self._check_choice()
        if self.expect not in ("pass", "fail"):
            raise UsageError(f"quantize {self.name!r}: expect={self.expect!r}", "use pass or fail")
        if self.experts not in POLICIES:
            raise UsageError(f"quantize {self.name!r}: experts={self.experts!r}", nearest(self.experts, POLICIES))
        if self.expert_tokens is not None and self.expert_tokens < 0:
            raise UsageError(f"quantize {self.name!r}: expert_tokens={self.expert_tokens}", "give 0 or more")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise UsageError(f"quantize: name {self.name!r}", "use letters, digits, '.', '_' and '-': it names a folder")
        if self.scheme not in (*PRESETS, *ALIASES):
            raise UsageError(
                f"quantize {self.name!r}: scheme {self.scheme!r} is unknown", nearest(self.scheme, [*PRESETS, *ALIASES])
            )
        if self.float8 not in (None, *FLOAT8_FLAVOURS):
            raise UsageError(f"quantize {self.name!r}: float8={self.float8!r}", nearest(str(self.float8), FLOAT8_FLAVOURS))
        if self.input_observer not in (None, *INPUT_OBSERVERS):
            words = nearest(str(self.input_observer), INPUT_OBSERVERS)
            raise UsageError(f"quantize {self.name!r}: input_observer={self.input_observer!r}", words)
        if self.scale_rounding not in (None, *SCALE_ROUNDINGS):
            words = nearest(str(self.scale_rounding), SCALE_ROUNDINGS)
            raise UsageError(f"quantize {self.name!r}: scale_rounding={self.scale_rounding!r}", words)

    def _check_choice(self) -> None:
        """Refuse what schemes cannot be chosen by."""
        if self.target_bpw is not None and self.max_kld is not None:
            raise UsageError(
                f"quantize {self.name!r}: target_bpw={self.target_bpw} beside max_kld={self.max_kld}", "give one of them"
            )
        for key, value in (("target_bpw", self.target_bpw), ("max_kld", self.max_kld)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"quantize {self.name!r}: {key}={value}", "give a positive number")
        if self.candidates is not None and not (self.mixed and self.candidates):
            raise UsageError(
                f"quantize {self.name!r}: {len(self.candidates)} candidates, target_bpw={self.target_bpw}",
                "name at least one, and give target_bpw or max_kld; or leave candidates out",
            )


@dataclass(frozen=True, kw_only=True)
class Unify:
    """Which ranks become one, as `quantflow unify -g` takes them; null means all of them."""

    groups: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Export:
    """The layout on disk and the largest size of one weight file.

    `device` and `scale_method` are Gaudi's, of format inc; `dtype` is that of matrices in format gguf.
    """

    format: str = "compressed-tensors"
    shard_size: str = "4GiB"
    device: str | None = None
    scale_method: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Refuse a dtype where the format's own is the only one."""
        if self.dtype is not None and self.format != "gguf":
            raise UsageError(f"export: dtype {self.dtype} beside format {self.format}", "leave it out, or choose format gguf")


@dataclass(frozen=True, kw_only=True)
class Validate:
    """The evaluation text and the gate: `auto` chooses by scheme, a name or a file chooses itself."""

    text: str | None = None
    tokens: int = 32768
    sequence_length: int = 512
    gate: str = "auto"
    allow_inconclusive: bool = False


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What each process may hold in memory and a stage may write (`4GiB`; null: what the machine has).

    `disk_offload` is a tenth of the memory where max_memory is null; the rest waits on disk beside -o.
    """

    max_memory: str | None = None
    max_disk: str | None = None
    disk_offload: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that are none."""
        for text in filter(None, (self.max_memory, self.max_disk)):
            parse_size(text)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that `quantflow run` needs to know."""

    model: str
    revision: str | None = None
    seed: int = 0
    calibration: Calibration = field(default_factory=Calibration)
    measure: Measure = field(default_factory=Measure)
    quantize: tuple[Quantize, ...] = ()
    unify: Unify = field(default_factory=Unify)
    export: Export = field(default_factory=Export)
    validate: Validate = field(default_factory=Validate)
    resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        """Refuse two artifacts of one name."""
        names = [entry.name for entry in self.quantize]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"quantize: {names.count(name)} entries are named {name!r}", "give each its own name")


class _StrictLoader(yaml.SafeLoader):
    """YAML without silent duplicates."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice in one mapping."""
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise UsageError(f"recipe line {line}: key {key!r} stands twice", "keep one of them")
        return super().construct_mapping(node, deep)


def kv_cache_flag(text: str | None) -> dict[str, str] | None:
    """Return what `FP8` or `FP8:per_head` means, as a recipe spells it; None for no flag."""
    if text is None:
        return None
    scheme, colon, granularity = text.partition(":")
    return {"scheme": scheme, **({"granularity": granularity} if colon else {})}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        InputError: it is unreadable or not UTF-8.
        UsageError: it is not YAML, not a mapping, or repeats a key.
    """
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}", "give a readable UTF-8 file") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}", "mend the syntax") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: holds {type(value).__name__}, a mapping is needed", "write `key: value` lines")
    return value


def apply_settings(data: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply `--set key.sub.0=value` items over a recipe's mapping, in place, and return it.

    Raises:
        UsageError: an item has no `=`, its value is not YAML, or its path runs through something that is not a mapping or list.
    """
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: no '='", "write --set key.sub=value")
        *parents, last = path.split(".")
        target: Any = data
        try:
            for part in parents:
                target = target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
            target[int(last) if isinstance(target, list) else last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {setting}: {text!r} is not YAML", "quote the value, or mend its syntax") from error
        except (ValueError, IndexError, TypeError, AttributeError) as error:
            raise UsageError(f"--set {setting}: {path} does not lead to a key", "use names and list positions") from error
    return data


def recipe_from(data: Mapping[str, Any]) -> Recipe:
    """Return the recipe that a mapping spells.

    Raises:
        UsageError: a key is unknown or a value has the wrong type.
    """
    return typing.cast(Recipe, _build(Recipe, data, "recipe"))


def _build(kind: Any, data: Any, where: str) -> Any:
    """Return an instance of the dataclass `kind` made from a mapping, checking every key and type."""
    if not isinstance(data, Mapping):
        raise UsageError(f"{where}: {data!r} is not a mapping", "write `key: value` lines below it")
    fields = {item.name: item for item in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in data:
        if key not in fields:
            raise UsageError(f"{where}: unknown key {key!r}", nearest(str(key), list(fields)))
    for name, item in fields.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise UsageError(f"{where}: key {name!r} is missing", f"add `{name}: ...`")
    return kind(**{key: _convert(hints[key], value, f"{where}.{key}") for key, value in data.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Return `value` as the type that `hint` names, or refuse it."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{where}: {value!r} is not a list", "write it as a YAML list")
        return tuple(_convert(typing.get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if typing.get_origin(hint) is dict:
        if isinstance(value, str):
            return {value: {}}
        if not isinstance(value, dict):
            raise UsageError(f"{where}: {value!r} is not a mapping", "write {name: {option: value}}")
        return value
    if hint is float and type(value) is int:
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UsageError(f"{where}: {value!r} is {type(value).__name__}, not {hint.__name__}", f"give a {hint.__name__}")
    return value


def parse_size(text: str) -> int:
    """Return the bytes that `4GiB`, `500MB` or `1000` stand for.

    Raises:
        UsageError: the text is not a number with a known unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise UsageError(f"size {text!r}", "write a positive number with B, KB, MB, GB, KiB, MiB or GiB, such as 4GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])
