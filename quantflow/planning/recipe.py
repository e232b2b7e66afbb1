"""A recipe: the YAML that describes a run, read strictly into frozen records.

    model: folder                       revision: null         seed: 0
    calibration: {source, samples, sequence_length, pack}
    measure:     {ranks, tp, dp, stats, experts}
    quantize:    [{name, scheme, algorithm, imatrix, group_size, float8, scale_rounding,
                   scale_method, scale_arithmetic, input_observer, transforms, ignore, overrides,
                   linears, signround: {iterations, sequences, start}, tune: {steps, sequences},
                   kv_cache: {scheme, granularity}, head: {scheme, algorithm, group_size},
                   mtp: {scheme, algorithm, group_size},
                   quantized_inputs, experts, expert_tokens, target_bpw, target_size,
                   max_kld, bits_of, expect}, ...]
    unify:       {groups}
    export:      {format, shard_size, measure_inputs, device, scale_method, dtype}
    validate:    {text, tokens, sequence_length, gate, tasks, limit, shots, chat_template, ranks,
                  mtp, diagnose, base, allow_inconclusive, exact, rounded_inputs}
    resources:   {max_memory, max_disk, max_device_memory, disk_offload}
    compute:     {device, dtype}

Unknown keys, wrong types and repeated keys are refused with the nearest name that exists. Flags are
applied over `--set`, `--set` over the file, the file over QUANT_CONFIG
(quantflow/formats/gaudi/quant_config.py), that over these defaults.

A field is the one declaration of a setting (quantflow/settings.py): the key of a recipe and of
`--set`, the keyword of `quantflow.api`, and the option of the command line, with its help.
"""

import dataclasses
import functools
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
from quantflow.core.scale_rules import ARITHMETIC_NAMES, SCALE_METHODS
from quantflow.core.scheme import FLOAT8_FLAVOURS, INPUT_OBSERVERS, SCALE_ROUNDINGS, SCHEME_NAMES
from quantflow.errors import InputError, UsageError, nearest
from quantflow.files.folder import reading
from quantflow.files.rank_folders import MOST_RANKS
from quantflow.settings import check_numbers, device_flag, setting
from quantflow.shipped import TEXTS, shipped_texts
from quantflow.units import parse_size

FED = ("routed", "all")  # tokens that measure shows to an expert
ACTIVE = "active"
BITS_OF = ("stored", ACTIVE)  # what a choice of schemes counts
BOUNDS = ("target_bpw", "target_size", "max_kld")  # by which schemes are chosen
CHOICE = "target_bpw, target_size or max_kld"
# what to do with experts that calibration reached too seldom; quantflow/planning/experts.py
POLICIES = ("error", "all", "damp", "rtn", "share_max")
RUN_DTYPES = ("float32", "bfloat16")  # dtypes of weights and activations while the model runs
# verbs that take a device and a dtype
COMPUTING = ("plan", "measure", "quantize", "validate", "compare")
# verbs that keep to limits
BOUNDED = ("run", "plan", "measure", "quantize", "export", "validate", "compare")

# settings that are options of these verbs
_for_measure = functools.partial(setting, verbs=("measure",))
_for_quantize = functools.partial(setting, verbs=("quantize",))
_for_export = functools.partial(setting, verbs=("export",))
_for_validate = functools.partial(setting, verbs=("validate",))
_computing = functools.partial(setting, verbs=COMPUTING)
_bounded = functools.partial(setting, verbs=BOUNDED)


def kv_cache_flag(text: str | None) -> dict[str, str] | None:
    """The recipe's value for `FP8` or `FP8:per_head`; None without a flag."""
    if text is None:
        return None
    scheme, colon, granularity = text.partition(":")
    return {"scheme": scheme, **({"granularity": granularity} if colon else {})}


def _scheme_flag(flag: str, text: str) -> dict[str, Any]:
    """The recipe's value of an option for `W4A16:hqq:64`.

    Raises:
        UsageError: it has more than three parts, or a group size that is no number.
    """
    scheme, *rest = text.split(":")
    size = rest.pop() if rest and rest[-1].isdecimal() else None
    if len(rest) > 1:
        raise UsageError(
            f"{flag} {text}: {len(rest)} words after the scheme",
            "write SCHEME:ALGORITHM:GROUP, such as W4A16:hqq:64",
        )
    settings = {
        "scheme": scheme,
        "algorithm": rest[0] if rest else None,
        "group_size": None if size is None else int(size),
    }
    return {key: value for key, value in settings.items() if value is not None}


head_flag = functools.partial(_scheme_flag, "--head")
mtp_flag = functools.partial(_scheme_flag, "--mtp")


def smoothquant_flag(alpha: str) -> list[dict[str, Any]]:
    """The recipe's transforms for `0.5`, `auto` or `none`."""
    if alpha == "none":
        return []
    try:
        value: float | str = float(alpha)
    except ValueError:
        value = alpha
    return [{"smoothquant": {"alpha": value}}]


def names_flag(text: str) -> list[str]:
    """The names in `amax,min_max`."""
    return [name for name in text.split(",") if name]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The text that measure runs."""

    source: str | None = setting(
        None,
        "--calibration",
        metavar="TEXT",
        help={
            "measure": "A .txt, .jsonl or .safetensors file, a folder of .txt, a hub data set "
            "(default: the shipped text).",
            "quantize": "Measure first, as stage 1 with this text (default: the shipped one), "
            "into --measurement.",
        },
    )
    samples: int = setting(
        128,
        "--samples",
        least=1,
        help={
            "measure": "Sequences at most (default 128).",
            "quantize": "Sequences at most where it measures (default 128).",
            "plan": "Calibration sequences (default 128).",
        },
    )
    sequence_length: int | None = setting(
        None,
        "--sequence-length",
        least=2,
        help={
            "measure": "Tokens per sequence at most (default 2048, of the shipped text 512; the "
            "model's at most).",
            "quantize": "Tokens per sequence at most where it measures.",
            "plan": "Tokens of each (default 2048, of the shipped text 512; the model's at most).",
        },
    )
    pack: bool | None = _for_measure(
        None,
        "--pack/--no-pack",
        help="Join documents into full sequences (default: those of .txt).",
    )
    synthetic: int = setting(
        0,
        "--synthetic",
        least=0,
        help={
            "measure": "Sequences that MODEL itself writes, added to the text; the model is then "
            "in memory (default 0).",
            "quantize": "Sequences that MODEL itself writes where it measures (default 0).",
            "plan": "Sequences that the model itself writes (default 0).",
        },
    )

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        check_numbers(self)

    @property
    def packs(self) -> bool:
        """Whether documents are joined: those of plain text are, the lines of a .jsonl are not."""
        if self.pack is not None:
            return self.pack
        return self.shipped or str(self.source).endswith(".txt") or Path(str(self.source)).is_dir()

    @property
    def shipped(self) -> bool:
        """Whether the text comes with the package."""
        return (
            self.source is None
            or Path(self.source).parent == TEXTS
            or self.source in shipped_texts()
        )

    @property
    def usual_length(self) -> int:
        """Tokens per sequence where `sequence_length` is null; a model may have fewer positions."""
        return 512 if self.shipped else 2048


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The ranks that measure, and the statistics that they collect.

    `tp` ranks share a model, and `dp` replicas share the sequences: ranks = tp x dp. `ep` ranks
    share a mixture, each with some of the experts and all the rest: ranks = ep x dp. With `stats`
    null the statistics are those that the entries of `quantize` need. `experts` null shows an
    expert all tokens where an entry asks for it.
    """

    ranks: int = _for_measure(
        1, "--ranks", least=1, most=MOST_RANKS, help="Processes (default 1), or torchrun's."
    )
    tp: int | None = _for_measure(
        None,
        "--tp",
        least=1,
        help="Ranks that share a model, each with a slice of every linear (default 1).",
    )
    dp: int | None = _for_measure(
        None,
        "--dp",
        least=1,
        help="Replicas of the model, which share the sequences (default: ranks / tp).",
    )
    ep: int | None = _for_measure(
        None,
        "--ep",
        least=1,
        help="Ranks that share a mixture, each with some of the experts (default 1).",
    )
    stats: tuple[str, ...] | None = _for_measure(
        None,
        "--stats",
        metavar="NAMES",
        parse=names_flag,
        help="Observers that run, comma-separated (default: those that --for needs).",
    )
    experts: str | None = _for_measure(
        None,
        "--experts",
        metavar="FED",
        help="Tokens that each expert of a mixture is shown: routed to it (default), or all.",
    )

    def __post_init__(self) -> None:
        """Refuse a word or a number that means nothing."""
        check_numbers(self)
        if self.experts not in (None, *FED):
            raise UsageError(f"measure: experts={self.experts!r}", nearest(str(self.experts), FED))


@dataclass(frozen=True, kw_only=True)
class Override:
    """Another scheme for some linears; `ignore` is the way to leave one unquantized."""

    match: str = setting(help="Names of linears: one, or re: and a pattern.")
    scheme: str = setting(help="Their scheme.")
    group_size: int | None = setting(None, help="Input features per scale; null is the scheme's.")


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """The scheme of the head."""

    scheme: str = setting(help="A preset, or another name of one.")
    algorithm: str | None = setting(None, help="Algorithm that rounds it; null is the scheme's.")
    group_size: int | None = setting(None, help="Input features per scale; null is the scheme's.")

    def __post_init__(self) -> None:
        """Refuse a word that means nothing."""
        _check_scheme("head", self.scheme)


@dataclass(frozen=True, kw_only=True)
class MtpSettings:
    """The scheme of layers that predict further tokens (MTP)."""

    scheme: str = setting(help="A preset, or another name of one.")
    algorithm: str | None = setting(None, help="Algorithm that rounds them; null is the scheme's.")
    group_size: int | None = setting(None, help="Input features per scale; null is the scheme's.")

    def __post_init__(self) -> None:
        """Refuse a word that means nothing."""
        _check_scheme("mtp", self.scheme)


def _check_scheme(key: str, scheme: str) -> None:
    """Refuse a scheme that means nothing."""
    if scheme not in SCHEME_NAMES:
        raise UsageError(
            f"{key}: scheme {scheme!r} is unknown", nearest(scheme, list(SCHEME_NAMES))
        )


@dataclass(frozen=True, kw_only=True)
class SignRound:
    """Settings of the algorithm signround."""

    iterations: int = setting(200, help="Steps of each layer.")
    sequences: int = setting(8, help="Sequences of the text in each step.")
    start: str = setting("rtn", help="The algorithm whose result is the start.")

    def __post_init__(self) -> None:
        """Refuse counts that are none."""
        for key, value in (("iterations", self.iterations), ("sequences", self.sequences)):
            if value < 1:
                raise UsageError(f"signround: {key}={value}", "give 1 or more")


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Settings for tuning scales end to end; `sequences` null is 4 for best, 2 for good, else 8."""

    steps: int = _for_quantize(
        32,
        "--tune",
        metavar="STEPS",
        help="Then tune the scales of the whole model together (default: what good and best do, "
        "0 for others).",
    )
    sequences: int | None = setting(
        None, help="Sequences of the text in each step; null: as many as the algorithm takes."
    )

    def __post_init__(self) -> None:
        """Refuse counts that are none."""
        if self.steps < 0 or self.batch < 1:
            raise UsageError(
                f"tune: steps={self.steps}, sequences={self.sequences}",
                "give steps from 0 and sequences from 1 on",
            )

    @property
    def batch(self) -> int:
        """Sequences of each step; of a plan, which names them, those of its algorithm."""
        return 8 if self.sequences is None else self.sequences


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A scheme that may be chosen for a linear."""

    scheme: str = setting(help="A preset, or another name of one.")
    group_size: int | None = setting(None, help="Input features per scale; null is the scheme's.")


@dataclass(frozen=True, kw_only=True)
class KVCacheSettings:
    """The scheme of keys and values in the KV cache."""

    scheme: str = setting(help="FP8 or INT8.")
    granularity: str = setting("per_tensor", help="One measured scale per_tensor or per_head.")

    def __post_init__(self) -> None:
        """Refuse words that mean nothing, and 4 bits, whose scales are not measured."""
        if self.scheme.upper() in ("INT4", "FP4"):
            raise UsageError(
                f"kv_cache: scheme={self.scheme!r}: one measured scale is too coarse for 4 bits; "
                "the runtime's int4 computes scales for each position",
                "leave kv_cache out, and give --kv-cache int4 to generate, chat, bench or serve",
            )
        for key, word, known in (
            ("scheme", self.scheme, tuple(NAMES)),
            ("granularity", self.granularity, GRANULARITIES),
        ):
            if word not in known:
                raise UsageError(f"kv_cache: {key}={word!r}", nearest(word, known))


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """One entry: the settings of one artifact.

    Null stands for the value of the scheme's preset; for `quantized_inputs`, for the one that
    measured better. With one of `BOUNDS` every linear of a layer that `overrides` does not name
    gets one of the `candidates`, by measured sensitivities. `refit` null refits only where
    `algorithm` is good or best and weights have less than 8 bits; `tune` null tunes only there
    and where inputs stay as they are: at 2 bits, without `refit` below 8.
    """

    name: str = setting(help="Name of the artifact and of its folder.")
    scheme: str = _for_quantize(
        flag="--scheme",
        help="FP8, FP8_DYNAMIC, FP8_BLOCK, W8A8, W8A8_STATIC, W8A16, W4A8, NVFP4, MXFP4, MXFP8, "
        "W6A16 to W2A16, these _ASYM.",
    )
    algorithm: str | None = _for_quantize(
        None,
        "--algorithm",
        help="rtn, rtn_mse, hqq, gptq, yaqa, signround, good or best (default: the scheme's).",
    )
    imatrix: str | None = _for_quantize(
        None,
        "--imatrix",
        metavar="FILE",
        help="llama.cpp's importance matrix in place of a measurement, for --algorithm rtn_mse, "
        "which is then the default.",
    )
    group_size: int | None = setting(
        None,
        "--group-size",
        verbs=("quantize", "plan"),
        help="Input features per scale (default: the scheme's).",
    )
    float8: str | None = setting(
        None, help="Another flavour for FP8 schemes: gaudi2 keeps to Gaudi2's largest value, 240."
    )
    scale_rounding: str | None = setting(
        None, help="pow2 makes the stored scales of FP8 schemes powers of two."
    )
    scale_method: str | None = setting(
        None,
        help="Scales of FP8 as Gaudi's toolkit derives them, such as maxabs_hw, with the hardware "
        "scales of gaudi2 or else of gaudi3.",
    )
    scale_arithmetic: str | None = setting(
        None, help="Arithmetic of scale_method: exact (default), BF16, FP16 or FP32."
    )
    input_observer: str | None = setting(
        None,
        help="Range of static inputs by their histogram: mse (least squared error) or percentile "
        "(99.99 %).",
    )
    transforms: tuple[dict[str, Any], ...] | None = _for_quantize(
        None,
        "--smoothquant",
        metavar="ALPHA",
        parse=smoothquant_flag,
        help="Smooth with this alpha, 0.5 is usual; auto searches one per input, as good and "
        "best do; none: not at all.",
    )
    ignore: tuple[str, ...] = _for_quantize(
        (), "--ignore", metavar="PATTERN", help="Leave these linears alone: a name, or re:..."
    )
    overrides: tuple[Override, ...] = setting((), help="Other schemes for some linears.")
    linears: tuple[str, ...] = _for_quantize(
        (),
        "--linears",
        metavar="PATTERN",
        help="Round the weights of these matrices, of any model: a name, or re:... Its code is "
        "not run.",
    )
    signround: SignRound | None = None
    tune: Tune | None = None
    kv_cache: KVCacheSettings | None = _for_quantize(
        None,
        "--kv-cache",
        metavar="SCHEME",
        parse=kv_cache_flag,
        help="Keys and values in FP8 or INT8, with a measured scale; FP8:per_head.",
    )
    head: HeadSettings | None = setting(
        None,
        "--head",
        metavar="SCHEME[:ALGORITHM[:GROUP]]",
        verbs=("quantize", "plan"),
        parse=head_flag,
        help="Quantize the head too: W8A16, W4A16:hqq, W4A16:hqq:64 (default: leave it as it "
        "is); a tied one is untied.",
    )
    mtp: MtpSettings | None = setting(
        None,
        "--mtp",
        metavar="SCHEME[:ALGORITHM[:GROUP]]",
        verbs=("quantize", "plan"),
        parse=mtp_flag,
        help="Quantize layers that predict further tokens (MTP) too: FP8_DYNAMIC, W8A16, "
        "W4A16:hqq:64 (default: leave them as they are).",
    )
    refit: bool | None = _for_quantize(
        None,
        "--refit/--no-refit",
        help="Fit weights to the inputs that the quantized layers before them hand on, so that "
        "they make up for these (default: what good and best do, below 8 bits).",
    )
    quantized_inputs: bool | None = _for_quantize(
        None,
        "--quantized-inputs/--original-inputs",
        help="Calibrate a layer on the outputs of the quantized layers before it, or of the "
        "original ones.",
    )
    experts: str = _for_quantize(
        "error",
        "--experts",
        metavar="POLICY",
        help="For experts short of tokens: error (default), all, damp, rtn or share_max.",
    )
    expert_tokens: int | None = _for_quantize(
        None,
        "--expert-tokens",
        help="Tokens that an expert needs (default: two per input feature; 100 for static inputs).",
    )
    target_bpw: float | None = _for_quantize(
        None,
        "--target-bpw",
        metavar="BITS",
        help="Choose schemes for so many bits per weight, such as 4.25.",
    )
    target_size: str | None = _for_quantize(
        None,
        "--target-size",
        metavar="SIZE",
        help="Choose schemes for so many bytes of the weights' files, such as 4GB: of GGUF with a "
        "type of llama.cpp.",
    )
    max_kld: float | None = _for_quantize(
        None,
        "--max-kld",
        metavar="NATS",
        help="Choose schemes for so much mean KL divergence, such as 0.02.",
    )
    bits_of: str | None = _for_quantize(
        None,
        "--bits-of",
        metavar="stored|active",
        help="Bits that a choice counts: of all weights as stored (default), or active, those "
        "that a token reads: experts by the share of them that it is sent to.",
    )
    candidates: tuple[Candidate, ...] | None = setting(
        None,
        help="Schemes to choose from; null is integers of 2 to 8 bits, or beside a type of "
        "llama.cpp its types.",
    )
    expect: str = setting("pass", help="Expected outcome of the gate: pass or fail.")

    @property
    def mixed(self) -> bool:
        """Whether schemes are to be chosen."""
        return bool(self.bounds)

    @property
    def bounds(self) -> dict[str, float | str]:
        """What bounds a choice of schemes: its setting and value; of several one is to be given."""
        given = {key: getattr(self, key) for key in BOUNDS}
        return {key: value for key, value in given.items() if value is not None}

    def __post_init__(self) -> None:
        """Refuse values that no stage could use."""
        self._check_choice()
        if self.expect not in ("pass", "fail"):
            raise UsageError(f"quantize {self.name!r}: expect={self.expect!r}", "use pass or fail")
        if self.experts not in POLICIES:
            raise UsageError(
                f"quantize {self.name!r}: experts={self.experts!r}", nearest(self.experts, POLICIES)
            )
        if self.expert_tokens is not None and self.expert_tokens < 0:
            raise UsageError(
                f"quantize {self.name!r}: expert_tokens={self.expert_tokens}", "give 0 or more"
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise UsageError(
                f"quantize: name {self.name!r}",
                "use letters, digits, '.', '_' and '-': it names a folder",
            )
        if self.scheme not in SCHEME_NAMES:
            raise UsageError(
                f"quantize {self.name!r}: scheme {self.scheme!r} is unknown",
                nearest(self.scheme, list(SCHEME_NAMES)),
            )
        if self.float8 not in (None, *FLOAT8_FLAVOURS):
            raise UsageError(
                f"quantize {self.name!r}: float8={self.float8!r}",
                nearest(str(self.float8), FLOAT8_FLAVOURS),
            )
        if self.input_observer not in (None, *INPUT_OBSERVERS):
            remedy = nearest(str(self.input_observer), INPUT_OBSERVERS)
            raise UsageError(
                f"quantize {self.name!r}: input_observer={self.input_observer!r}", remedy
            )
        if self.scale_rounding not in (None, *SCALE_ROUNDINGS):
            remedy = nearest(str(self.scale_rounding), SCALE_ROUNDINGS)
            raise UsageError(
                f"quantize {self.name!r}: scale_rounding={self.scale_rounding!r}", remedy
            )
        self._check_scale_method()

    def _check_scale_method(self) -> None:
        """Refuse an unknown method or arithmetic, or one beside a setting that contradicts it."""
        for key, word, choices in (
            ("scale_method", self.scale_method, tuple(SCALE_METHODS)),
            ("scale_arithmetic", self.scale_arithmetic, ARITHMETIC_NAMES),
        ):
            if word not in (None, *choices):
                raise UsageError(
                    f"quantize {self.name!r}: {key}={word!r}", nearest(str(word), choices)
                )
        if self.scale_method is not None and self.scale_rounding is not None:
            raise UsageError(
                f"quantize {self.name!r}: scale_method={self.scale_method} beside "
                f"scale_rounding={self.scale_rounding}",
                "give one of them: a method rounds as it says",
            )
        if self.scale_arithmetic is not None and self.scale_method is None:
            raise UsageError(
                f"quantize {self.name!r}: scale_arithmetic={self.scale_arithmetic} without "
                "scale_method",
                "give both, or neither",
            )

    def _check_choice(self) -> None:
        """Refuse settings by which schemes cannot be chosen."""
        if len(self.bounds) > 1:
            given = " beside ".join(f"{key}={value}" for key, value in self.bounds.items())
            raise UsageError(f"quantize {self.name!r}: {given}", "give one of them")
        for key, value in (("target_bpw", self.target_bpw), ("max_kld", self.max_kld)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"quantize {self.name!r}: {key}={value}", "give a positive number")
        if self.target_size is not None:
            parse_size(self.target_size)
        if self.target_size is not None and self.bits_of == ACTIVE:
            raise UsageError(
                f"quantize {self.name!r}: target_size={self.target_size} of {ACTIVE} bits; a file "
                "holds all",
                "leave bits_of out, or give target_bpw",
            )
        if self.bits_of not in (None, *BITS_OF):
            raise UsageError(
                f"quantize {self.name!r}: bits_of={self.bits_of!r}",
                nearest(str(self.bits_of), BITS_OF),
            )
        if self.bits_of is not None and not self.mixed:
            raise UsageError(
                f"quantize {self.name!r}: bits_of={self.bits_of} and nothing to choose",
                f"give {CHOICE}, or leave bits_of out",
            )
        if self.candidates is not None and not (self.mixed and self.candidates):
            asked = ", ".join(f"{key}={value}" for key, value in self.bounds.items())
            raise UsageError(
                f"quantize {self.name!r}: {len(self.candidates)} candidates, "
                f"{asked or 'and nothing to choose'}",
                f"name at least one, and give {CHOICE}; or leave candidates out",
            )


@dataclass(frozen=True, kw_only=True)
class Unify:
    """Ranks that become one; null stands for all of them."""

    groups: tuple[str, ...] | None = setting(
        None,
        "-g --groups",
        metavar="RANKS",
        verbs=("unify",),
        help="Ranks that become one: 0123, 0,1,2 or 0-7; repeat it.",
    )


@dataclass(frozen=True, kw_only=True)
class Export:
    """The format on disk and the largest size of one weight file."""

    format: str = _for_export(
        "compressed-tensors",
        "--format",
        help="compressed-tensors (default), gptq, gptq_v2, auto_round, awq, fp8, modelopt, "
        "mxfp4, ipex or openvino: for other programs, gguf: for llama.cpp, dequantized; of a "
        "measurement inc: Gaudi's files, or imatrix: llama.cpp's importance matrix.",
    )
    shard_size: str = _for_export(
        "4GiB", "--shard-size", metavar="SIZE", help="Largest weight file (default 4GiB)."
    )
    measure_inputs: bool = _for_export(
        False,
        "--measure-inputs",
        help="Measure what rounding inputs costs, so that runtimes may, where quantize ran no "
        "model (rtn) too.",
    )
    device: str | None = _for_export(
        None, "--device", help="Device of format inc: gaudi2, gaudi3, or cpu for its emulation."
    )
    scale_method: str | None = _for_export(
        None, "--scale-method", metavar="NAME", help="Scales of format inc (default maxabs_hw)."
    )
    dtype: str | None = _for_export(
        None,
        "--dtype",
        help="bf16, f16 or f32: matrices of gguf (default: the types of an artifact's linears, or "
        "the model's), dequantized weights (bf16), scales of gptq, awq and openvino (f16).",
    )

    def __post_init__(self) -> None:
        """Refuse a size that is none."""
        parse_size(self.shard_size)


@dataclass(frozen=True, kw_only=True)
class Validate:
    """The evaluation text, the tasks and the gate."""

    text: str | None = _for_validate(
        None,
        "--text",
        metavar="TEXT",
        help="Evaluation text, as --calibration takes it; not the calibration text (default: a "
        "shipped one).",
    )
    tokens: int = _for_validate(32768, "--tokens", least=2, help="Tokens of it (default 32768).")
    sequence_length: int = _for_validate(
        512, "--sequence-length", least=2, help="Tokens per window (default 512)."
    )
    gate: str = setting(
        "auto",
        "--gate",
        help={
            "validate": "auto (default), a shipped gate or a file.",
            "gate": "auto, a shipped gate or a file (default: what the validation recorded).",
        },
    )
    tasks: tuple[str, ...] = _for_validate(
        (),
        "--tasks",
        metavar="NAMES",
        parse=names_flag,
        help="Tasks of lm-eval, comma-separated, shipped ones (small_piqa) or YAML files: both "
        "models answer them.",
    )
    limit: int | None = _for_validate(
        None, "--limit", least=1, help="Documents of each task (default: all)."
    )
    shots: int | None = _for_validate(
        None, "--shots", least=0, help="Examples before each question (default: the task's)."
    )
    chat_template: bool = _for_validate(
        False, "--chat-template", help="Ask in the tokenizer's chat template."
    )
    ranks: int = _for_validate(
        1,
        "--ranks",
        metavar="N",
        least=1,
        help="Processes that share a model while it answers --tasks (default 1).",
    )
    mtp: int | None = _for_validate(
        None,
        "--mtp",
        metavar="TOKENS",
        least=2,
        help="Also count the guesses of MTP layers that are taken, of both models along so many "
        "tokens.",
    )
    diagnose: int | None = _for_validate(
        None,
        "--diagnose",
        metavar="PROBES",
        least=16,
        help="Also say where the loss is and what would mend it, by at most so many runs with "
        "some linear swapped.",
    )
    base: str | None = _for_validate(
        None,
        "--base",
        metavar="FILE",
        help="llama.cpp's base of a KL divergence, whose chunks and log-probabilities the artifact "
        "is judged by; where there is no such file, it is written from the source over --text.",
    )
    allow_inconclusive: bool = setting(
        False,
        "--allow-inconclusive",
        verbs=("validate", "gate"),
        help="Exit 0 when the gate cannot decide; recorded.",
    )
    exact: bool = _for_validate(
        False,
        "--exact",
        help="Judge it with inputs that the scheme leaves alone as they are, as `generate "
        "--exact` runs it.",
    )
    rounded_inputs: bool = _for_validate(
        False,
        "--rounded-inputs",
        help="Judge it with inputs of 4-bit weights rounded to int8 in groups, as `generate "
        "--rounded-inputs` runs it.",
    )

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing: one token predicts nothing."""
        check_numbers(self)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Limits of memory per process and of bytes that a stage writes; null takes what is free.

    With `disk_offload` and no `max_memory` the limit is a tenth of the machine's memory, and the
    rest waits on disk beside -o.
    """

    max_memory: str | None = _bounded(
        None,
        "--max-memory",
        metavar="SIZE",
        help="Memory of the process at most, such as 4GiB (default: what is free).",
    )
    max_disk: str | None = _bounded(
        None, "--max-disk", metavar="SIZE", help="Bytes written at most (default: what is free)."
    )
    max_device_memory: str | None = _computing(
        None,
        "--max-device-memory",
        metavar="SIZE",
        help="Tensors on --device at most, such as 20GiB (default: what is free there).",
    )
    disk_offload: bool = _bounded(
        False, "--disk-offload", help="Use a tenth of the memory; the rest waits on disk."
    )

    def __post_init__(self) -> None:
        """Refuse sizes that are none."""
        for text in filter(None, (self.max_memory, self.max_disk, self.max_device_memory)):
            parse_size(text)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The device and the dtype in which the model runs.

    Statistics are float32 and wider in every dtype.
    """

    device: str = _computing(
        "cpu",
        "--device",
        metavar="DEVICE",
        help="Where layers run: cpu (default), cuda, cuda:N, xpu or xpu:N.",
    )
    dtype: str | None = _computing(
        None,
        "--dtype",
        metavar="DTYPE",
        help={
            **dict.fromkeys(
                COMPUTING,
                "Weights and activations of layers that run: float32 (default) or bfloat16.",
            ),
            "quantize": "Activations of the calibration text: float32 (default) or bfloat16 "
            "(default on a GPU); weights are rounded in float32.",
        },
    )

    def __post_init__(self) -> None:
        """Refuse words that name no device and no dtype."""
        device_flag(self.device)
        if self.dtype is not None and self.dtype not in RUN_DTYPES:
            raise UsageError(f"compute: dtype={self.dtype!r}", nearest(self.dtype, RUN_DTYPES))

    @property
    def model_dtype(self) -> str:
        """The dtype of a model that is measured or compared."""
        return self.dtype or "float32"

    @property
    def text_dtype(self) -> str:
        """The dtype of calibration text where layers are quantized, where the plan allows it."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that `quantflow run` needs to know."""

    model: str = setting(help="A folder, a name on the hub (org/name), or a GGUF file.")
    revision: str | None = setting(
        None,
        "--revision",
        metavar="NAME",
        verbs=("plan", "measure", "quantize", "export", "validate"),
        help="Branch, tag or commit of a model on the hub; the manifest has the commit.",
    )
    seed: int = setting(
        0,
        "--seed",
        help={
            "measure": "Seed of the shuffle of documents (default 0).",
            "quantize": "Seed of the proof's tokens where no measurement is given (default 0).",
        },
    )
    calibration: Calibration = field(default_factory=Calibration)
    measure: Measure = field(default_factory=Measure)
    quantize: tuple[Quantize, ...] = ()
    unify: Unify = field(default_factory=Unify)
    export: Export = field(default_factory=Export)
    validate: Validate = field(default_factory=Validate)
    resources: Resources = field(default_factory=Resources)
    compute: Compute = field(default_factory=Compute)

    def __post_init__(self) -> None:
        """Refuse two entries of one name, and a seed that no generator takes."""
        check_numbers(self)
        names = [entry.name for entry in self.quantize]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(
                    f"quantize: {names.count(name)} entries are named {name!r}",
                    "give each its own name",
                )


MAX_YAML_BYTES = 1 << 20
MAX_YAML_DEPTH = 50
# impossible dates and numbers raise the last three
_YAML_ERRORS = (yaml.YAMLError, RecursionError, ValueError, OverflowError, TypeError)


class _StrictLoader(yaml.SafeLoader):
    """YAML without duplicate keys and without aliases.

    A few lines of aliases could stand for more values than memory holds.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse an alias, and values that are nested too deeply."""
        self.depth += 1
        if self.check_event(yaml.AliasEvent) or self.depth > MAX_YAML_DEPTH:
            raise yaml.YAMLError("an alias, or values too deep in each other; write them out")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice in one mapping, and a key that is a mapping or a list."""
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            line = node.start_mark.line + 1
            if not isinstance(key, str | int | float | None):
                raise yaml.YAMLError(f"the mapping of line {line} has a key that is no text")
            if key in keys:
                raise UsageError(
                    f"recipe line {line}: key {key!r} stands twice", "keep one of them"
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


def _whole_number(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    """The whole number of a node, of at most 1024 bits.

    A number in base 16 or 60 may have more digits than Python prints.
    """
    number: int = loader.construct_yaml_int(node)
    if number.bit_length() > 1024:  # the records say what is too large for them
        raise yaml.YAMLError(
            f"line {node.start_mark.line + 1} has a whole number of more than 1024 bits"
        )
    return number


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        InputError: the file is unreadable or not UTF-8.
        UsageError: the file is over 1 MiB, not YAML, not a mapping, has an alias, or repeats a key.
    """
    try:
        with reading(path) as file:
            text = file.read(MAX_YAML_BYTES + 1).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: {error}", "give a readable UTF-8 file") from error
    value = _parse_yaml(text, str(path))
    if not isinstance(value, dict):
        raise UsageError(
            f"{path}: holds {type(value).__name__}, a mapping is needed", "write `key: value` lines"
        )
    return value


def _parse_yaml(text: str, name: str) -> Any:
    """The value in a text of YAML.

    Raises:
        UsageError: the text is too long, or not YAML without aliases.
    """
    if len(text) > MAX_YAML_BYTES:
        raise UsageError(f"{name}: over {MAX_YAML_BYTES} characters", "give a recipe")
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except _YAML_ERRORS as error:
        message = " ".join(str(error).split())
        raise UsageError(
            f"{name}: not YAML: {message if len(message) <= 300 else message[:297] + '...'}",
            "mend the syntax",
        ) from error


def apply_settings(data: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply `--set key.sub.0=value` items over a recipe's mapping, in place, and return it.

    Raises:
        UsageError: an item has no `=`, its value is not YAML, or its path runs through something
            that is not a mapping or list.
    """
    for item in settings:
        path, equals, text = item.partition("=")
        if not equals:
            raise UsageError(f"--set {item}: no '='", "write --set key.sub=value")
        *parents, last = path.split(".")
        target: Any = data
        try:
            for part in parents:
                target = (
                    target[int(part)] if isinstance(target, list) else target.setdefault(part, {})
                )
            target[int(last) if isinstance(target, list) else last] = _parse_yaml(
                text, f"--set {path}: {text[:60]!r}"
            )
        except (ValueError, IndexError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--set {item}: {path} does not lead to a key", "use names and list positions"
            ) from error
    return data


def recipe_from(data: Mapping[str, Any]) -> Recipe:
    """The recipe that a mapping spells.

    Raises:
        UsageError: a key is unknown or a value has the wrong type.
    """
    return typing.cast(Recipe, _build(Recipe, data, "recipe"))


def _build(kind: Any, data: Any, where: str) -> Any:
    """An instance of the dataclass `kind` from a mapping whose keys and types are checked."""
    if not isinstance(data, Mapping):
        raise UsageError(f"{where}: {data!r} is not a mapping", "write `key: value` lines below it")
    fields = {item.name: item for item in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in data:
        if key not in fields:
            raise UsageError(f"{where}: unknown key {key!r}", nearest(str(key), list(fields)))
    for name, item in fields.items():
        required = (
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        )
        if required and name not in data:
            raise UsageError(f"{where}: key {name!r} is missing", f"add `{name}: ...`")
    return kind(
        **{key: _convert(hints[key], value, f"{where}.{key}") for key, value in data.items()}
    )


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type that `hint` names; a wrong type is refused."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{where}: {value!r} is not a list", "write it as a YAML list")
        return tuple(
            _convert(typing.get_args(hint)[0], item, f"{where}[{i}]")
            for i, item in enumerate(value)
        )
    if typing.get_origin(hint) is dict:
        if isinstance(value, str):
            return {value: {}}
        if not isinstance(value, dict):
            raise UsageError(
                f"{where}: {value!r} is not a mapping", "write {name: {option: value}}"
            )
        return value
    if hint is float and type(value) is int:
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UsageError(
            f"{where}: {value!r} is {type(value).__name__}, not {hint.__name__}",
            f"give a {hint.__name__}",
        )
    return value
