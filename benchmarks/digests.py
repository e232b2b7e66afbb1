r"""The digests of everything that quantflow writes.

They show that a change of its code changed no byte.

Makes measurements, quantized layers, shards and artifacts of small models with the command line
alone, so that it runs unchanged against any version; hashes every file that was written; and
compares two such records, file by file.

    python benchmarks/digests.py --quantflow OLD/bin/quantflow \
        --work old --models models --output old.json
    python benchmarks/digests.py --quantflow NEW/bin/quantflow \
        --work new --models models --output new.json
    python benchmarks/digests.py --compare old.json new.json

Both runs have to see the same models and text, which the first makes in the folder of `--models`:
the example model, tiny models of other families with random weights, and the example's text. Their
digests are recorded too. So are the folders that quantflow writes: measurements, layers, shards,
artifacts, Gaudi's files. Of an artifact's `quantflow.json` the record has the `digest` and the hash
of each key beside that of the file, which says where two manifests differ. Model cards (README.md)
and what a failed command said are prose: differences are shown, and change no exit code.

Paths are relative to the work folder, in which every command runs, so no result depends on where
that is. Each step's folder in it is emptied first; afterwards it holds everything that was hashed,
to look at what differs. A step whose command fails is recorded with its exit code, and the others
go on. Other machines, instruction sets and versions of torch give other bytes: run both on one
machine. Takes about 26 minutes of processor time and 3 GB of disk.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

EXAMPLE, SMALL = "models/tiny-llama", "models/llama"
CALIBRATION, HELDOUT = "models/text/calibration.jsonl", "models/text/heldout.jsonl"
LENGTHS = ("--samples", "16", "--sequence-length", "128")
TIMEOUT = 900  # seconds of one command
MANIFEST = "quantflow.json"
PROSE = ("README.md",)
SKIPPED = {  # never compared, and why
    "*.log": "time stamps, peaks of memory and command lines",
    "*.lock": "an empty file that only a running command holds",
    ".hashes.json": "a cache: time stamps and inodes of the source's files",
}

STATISTICS = "amax,channel_amax,min_max,mean_abs,histogram,hessian,fisher,gradient,count"
PRESETS = (
    *(
        "FP8",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
        "W8A8",
        "W8A8_STATIC",
        "W8A16",
        "W6A16",
        "W6A16_ASYM",
        "W5A16",
        "W5A16_ASYM",
    ),
    *("W4A16", "W4A16_ASYM", "W4A8", "W3A16", "W3A16_ASYM", "W2A16", "W2A16_ASYM"),
)
GATE = json.dumps(
    {"thresholds": {"ppl_ratio": 9e9, "mean_kld": 9e9, "kld_p999": 9e9, "top1_agreement": 0.0}}
)

VOCABULARY = 320
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2}
# folder -> class of the configuration, its values
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "gpt_neox": ("GPTNeoXConfig", SHAPE),
    "mistral": ("MistralConfig", GROUPED),
    "qwen2": ("Qwen2Config", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**GROUPED, **EXPERTS, "num_local_experts": 4}),
    "olmoe": ("OlmoeConfig", {**GROUPED, **EXPERTS, "num_experts": 4, "pad_token_id": 1}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **GROUPED,
            **EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 96,
            "shared_expert_intermediate_size": 160,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**GROUPED, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 96, "head_dim": 16},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """Commands that run one after the other and write into a folder of their own.

    Its contents afterwards are hashed.

    Attributes:
        name: the folder, relative to the work folder.
        commands: what stands after `quantflow`. A path into another step's folder makes that step
            come first.
        files: written into the folder beforehand, name -> text.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    files: Mapping[str, str] = field(default_factory=dict)

    def reads(self, other: "Step") -> bool:
        """Return whether a command reads what the other step writes."""
        return other.name != self.name and any(
            word.startswith(f"{other.name}/") for words in self.commands for word in words
        )


def measured(name: str, *words: str, model: str = EXAMPLE) -> Step:
    """Return stage 1, into `<name>/measured`."""
    command = (
        "measure",
        model,
        "-o",
        f"{name}/measured",
        "--calibration",
        CALIBRATION,
        *LENGTHS,
        *words,
    )
    return Step(name=name, commands=(command,))


def unified(name: str, *words: str, measurement: str) -> Step:
    """Return stage 3, into `<name>/unified`."""
    return Step(
        name=name, commands=(("unify", *words, "-m", measurement, "-o", f"{name}/unified"),)
    )


def quantized(
    name: str, *words: str, model: str = EXAMPLE, measurement: str | None, together: bool = True
) -> Step:
    """Stages 2 and 4, into `<name>/quantized` and `<name>/artifact`.

    `together` runs them in one process.
    """
    stage = ("quantize", model, "-o", f"{name}/quantized", *words)
    stage += () if measurement is None else ("--measurement", measurement)
    if together:
        return Step(name=name, commands=((*stage, "--export", f"{name}/artifact"),))
    return Step(
        name=name,
        commands=(
            (*stage, "--no-export"),
            ("export", f"{name}/quantized", "-o", f"{name}/artifact"),
        ),
    )


def sharded(
    name: str, ranks: int, *words: str, model: str = EXAMPLE, measurement: str | None = None
) -> Step:
    """Stage 2 with several ranks, then 3 and 4.

    They write `<name>/shards`, `<name>/unified` and `<name>/artifact`.
    """
    stage = ("quantize", model, "-o", f"{name}/shards", *words, "--ranks", str(ranks))
    stage += () if measurement is None else ("--measurement", measurement)
    union = ("unify", "-m", f"{name}/shards", "-o", f"{name}/unified")
    return Step(
        name=name, commands=(stage, union, ("export", f"{name}/unified", "-o", f"{name}/artifact"))
    )


def setting(key: str, value: str) -> tuple[str, str]:
    """Return the words that set a value of what is quantized."""
    return "--set", f"quantize.0.{key}={value}"


def steps() -> list[Step]:
    """Return all steps, each after those that it reads."""
    return [
        *measurements(),
        *schemes(),
        *algorithms(),
        *transforms(),
        *details(),
        *mixtures_of_schemes(),
        *without_measurement(),
        *ranks(),
        *experts(),
        *families(),
        *gaudi(),
        *other_verbs(),
    ]


def measurements() -> list[Step]:
    """Return stages 1 and 3."""
    return [
        measured("measure/default"),
        measured("measure/gradient", "--stats", "gradient"),
        measured("measure/fisher", "--stats", "fisher"),
        measured("measure/hessian", "--stats", "hessian"),
        measured("measure/histogram", "--stats", "histogram"),
        measured("measure/all", "--stats", STATISTICS),
        measured("measure/packed", "--pack", "--seed", "3"),
        measured("measure/for", "--for", "W4A16:best,W8A8_STATIC"),
        measured("measure/ranks-2", "--ranks", "2"),
        measured("measure/ranks-2-all", "--ranks", "2", "--stats", STATISTICS),
        measured("measure/ranks-2-tp-2", "--ranks", "2", "--tp", "2"),
        measured("measure/ranks-4-tp-2", "--ranks", "4", "--tp", "2"),
        unified("unify/ranks-2", measurement="measure/ranks-2/measured"),
        unified("unify/ranks-2-all", measurement="measure/ranks-2-all/measured"),
        unified("unify/ranks-2-tp-2", measurement="measure/ranks-2-tp-2/measured"),
        unified("unify/ranks-4-tp-2", measurement="measure/ranks-4-tp-2/measured"),
        unified("unify/groups", "-g", "01", "23", measurement="measure/ranks-4-tp-2/measured"),
        unified("unify/replicas", "-g", "02", "13", measurement="measure/ranks-4-tp-2/measured"),
        unified("unify/expand-2", "--expand", "2", measurement="measure/default/measured"),
        unified("unify/expand-4", "--expand", "4", measurement="unify/ranks-2/unified"),
    ]


def schemes() -> list[Step]:
    """Return every preset with its own algorithm, and other sizes of groups."""
    default = "measure/default/measured"
    return [
        *(quantized(f"scheme/{name}", "--scheme", name, measurement=default) for name in PRESETS),
        quantized(
            "scheme/W4A16-64", "--scheme", "W4A16", "--group-size", "64", measurement=default
        ),
        quantized(
            "scheme/W3A16_ASYM-32",
            "--scheme",
            "W3A16_ASYM",
            "--group-size",
            "32",
            measurement=default,
        ),
        quantized(
            "scheme/FP8_BLOCK-64",
            "--scheme",
            "FP8_BLOCK",
            "--group-size",
            "64",
            measurement=default,
        ),
        quantized(
            "scheme/unified-FP8",
            "--scheme",
            "FP8",
            measurement="unify/ranks-2-tp-2/unified",
            together=False,
        ),
        quantized(
            "scheme/unified-W4A16",
            "--scheme",
            "W4A16",
            measurement="unify/ranks-2/unified",
            together=False,
        ),
    ]


def algorithms() -> list[Step]:
    """Every algorithm on some schemes.

    Slow ones run on the tiny random Llama, but for one of each.
    """
    default, gradient, small = (
        "measure/default/measured",
        "measure/gradient/measured",
        "measure/small/measured",
    )
    on_example = {
        "rtn": ("W4A16", "W2A16_ASYM", "W8A8"),
        "rtn_mse": ("W4A16", "W3A16_ASYM", "FP8_DYNAMIC", "FP8_BLOCK"),
        "hqq": ("W4A16", "W2A16_ASYM", "W8A16"),
        "gptq": ("FP8", "FP8_BLOCK", "W8A8", "W8A16"),
    }
    in_groups = ("--group-size", "32")
    # start, scheme, iterations, other words
    learned: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
        ("rtn", "W2A16", 40, in_groups),
        ("rtn_mse", "W3A16_ASYM", 40, in_groups),
        ("gptq", "W3A16", 40, (*in_groups, "--tune", "4")),
        ("hqq", "W2A16_ASYM", 20, (*in_groups, *setting("signround.sequences", "4"))),
        ("rtn", "W8A8", 40, ()),
    )
    on_small: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("yaqa", "W2A16_ASYM", in_groups),
        ("yaqa", "W4A8", in_groups),
        ("yaqa", "W8A16", ()),
        ("best", "W3A16_ASYM", (*in_groups, "--tune", "0")),
        ("best", "W2A16", (*in_groups, "--tune", "4", *setting("tune.sequences", "4"))),
        ("best", "W4A8", in_groups),
        ("best", "W8A8", ()),
        ("best", "W8A8_STATIC", ()),
        ("best", "FP8_DYNAMIC", ()),
    )
    return [
        *(
            quantized(
                f"algorithm/{name}-{scheme}",
                "--scheme",
                scheme,
                "--algorithm",
                name,
                measurement=default,
            )
            for name, chosen in on_example.items()
            for scheme in chosen
        ),
        quantized(
            "algorithm/yaqa-W4A16", "--scheme", "W4A16", "--algorithm", "yaqa", measurement=gradient
        ),
        quantized(
            "algorithm/best-W4A16",
            "--scheme",
            "W4A16",
            "--algorithm",
            "best",
            "--tune",
            "2",
            measurement=gradient,
        ),
        quantized(
            "algorithm/signround-W2A16",
            *("--scheme", "W2A16", "--algorithm", "signround"),
            *(*setting("signround.iterations", "5"), *setting("signround.start", "gptq")),
            measurement=default,
        ),
        quantized(
            "algorithm/gptq-tuned", "--scheme", "W4A16_ASYM", "--tune", "2", measurement=default
        ),
        quantized(
            "algorithm/gptq-original-inputs",
            "--scheme",
            "W4A16",
            "--original-inputs",
            measurement=default,
        ),
        quantized(
            "algorithm/gptq-quantized-inputs",
            "--scheme",
            "W4A16",
            "--quantized-inputs",
            measurement=default,
        ),
        measured("measure/small", "--stats", STATISTICS, model=SMALL),
        *(
            quantized(
                f"algorithm/small-{name}-{scheme}",
                *("--scheme", scheme, "--algorithm", name, *words),
                model=SMALL,
                measurement=small,
            )
            for name, scheme, words in on_small
        ),
        *(
            quantized(
                f"algorithm/small-signround-{start}-{scheme}",
                *(
                    "--scheme",
                    scheme,
                    "--algorithm",
                    "signround",
                    *setting("signround.start", start),
                ),
                *(*setting("signround.iterations", str(iterations)), *words),
                model=SMALL,
                measurement=small,
            )
            for start, scheme, iterations, words in learned
        ),
    ]


def transforms() -> list[Step]:
    """Return every transform; searches on the tiny random Llama, but for one."""
    on_example = {
        "smoothquant-W4A16": ("W4A16", "gptq", "[{smoothquant: {alpha: 0.7}}]"),
        "smoothquant-auto-W8A8_STATIC": ("W8A8_STATIC", "rtn", "[{smoothquant: {alpha: auto}}]"),
        "awq-W4A16": ("W4A16", "rtn", "[{awq: {}}]"),
        "hadamard-W4A16": ("W4A16", "rtn", "[{hadamard: {}}]"),
        "hadamard-gptq-W3A16": ("W3A16", "gptq", "[{hadamard: {seed: 4, heads: false}}]"),
        "hadamard-smoothquant-W8A8": ("W8A8", "rtn", "[hadamard, {smoothquant: {alpha: 0.5}}]"),
        "hadamard-down-W8A8_STATIC": ("W8A8_STATIC", "rtn", "[{hadamard: {down: true}}]"),
        "hadamard-down-W4A8": ("W4A8", "gptq", "[{hadamard: {down: true}}]"),
        "none-W8A8_STATIC": ("W8A8_STATIC", "gptq", "[]"),
    }
    on_small = {
        "small-smoothquant-linears-W8A8": (
            "W8A8",
            "rtn",
            "[{smoothquant: {alpha: auto, linears: true}}]",
        ),
        "small-smoothquant-folds-W8A8": (
            "W8A8",
            "gptq",
            "[{smoothquant: {alpha: auto, linears: false}}]",
        ),
        "small-smoothquant-auto-FP8_DYNAMIC": (
            "FP8_DYNAMIC",
            "rtn",
            "[{smoothquant: {alpha: auto}}]",
        ),
        "small-awq-W8A16": ("W8A16", "gptq", "[{awq: {linears: false}}]"),
        "small-hadamard-W8A8": (
            "W8A8",
            "rtn_mse",
            "[{hadamard: {}}, {smoothquant: {alpha: auto}}]",
        ),
    }
    return [
        *(
            quantized(
                f"transform/{name}",
                *("--scheme", scheme, "--algorithm", algorithm, *setting("transforms", words)),
                model=model,
                measurement=measurement,
            )
            for model, measurement, chosen in (
                (EXAMPLE, "measure/default/measured", on_example),
                (SMALL, "measure/small/measured", on_small),
            )
            for name, (scheme, algorithm, words) in chosen.items()
        ),
        quantized(
            "transform/flag-W8A8",
            "--scheme",
            "W8A8",
            "--smoothquant",
            "0.8",
            measurement="measure/default/measured",
        ),
    ]


def details() -> list[Step]:
    """Return caches, heads, float8, ranges of inputs, overrides, limits and sizes of files."""
    overrides = (
        '[{match: "re:.*down_proj", scheme: W8A16}, '
        "{match: model.layers.1.self_attn.o_proj, scheme: W6A16, group_size: 64}]"
    )
    chosen: dict[str, tuple[str, ...]] = {
        "cache/FP8-of-FP8": ("FP8", "--kv-cache", "FP8"),
        "cache/INT8-per-head-of-FP8": ("FP8", "--kv-cache", "INT8:per_head"),
        "cache/INT8-of-W8A8": ("W8A8", "--kv-cache", "INT8"),
        "cache/FP8-per-head-of-W4A16": ("W4A16", "--kv-cache", "FP8:per_head"),
        "head/W8A16": ("W4A16", "--head", "W8A16"),
        "head/W4A16-hqq-64": ("W4A16", "--algorithm", "rtn", "--head", "W4A16:hqq:64"),
        "head/FP8_DYNAMIC": ("FP8", "--head", "FP8_DYNAMIC"),
        "float8/gaudi2-FP8": ("FP8", *setting("float8", "gaudi2")),
        "float8/gaudi2-gptq-FP8_DYNAMIC": (
            "FP8_DYNAMIC",
            "--algorithm",
            "gptq",
            *setting("float8", "gaudi2"),
        ),
        "float8/pow2-FP8": ("FP8", *setting("scale_rounding", "pow2")),
        "float8/pow2-FP8_BLOCK": ("FP8_BLOCK", *setting("scale_rounding", "pow2")),
        "float8/pow2-gaudi2-FP8": (
            "FP8",
            *setting("scale_rounding", "pow2"),
            *setting("float8", "gaudi2"),
        ),
        "inputs/mse-FP8": ("FP8", *setting("input_observer", "mse")),
        "inputs/percentile-W8A8_STATIC": (
            "W8A8_STATIC",
            *setting("input_observer", "percentile"),
            "--smoothquant",
            "none",
        ),
        "plan/overrides": ("W4A16", *setting("overrides", overrides)),
        "plan/ignore": (
            "W8A8",
            "--ignore",
            "re:.*layers[.]0[.].*",
            "--ignore",
            "model.layers.3.mlp.down_proj",
        ),
        "plan/disk-offload": ("W4A16", "--disk-offload"),
        "plan/seed": ("FP8", "--seed", "7", "--name", "seeded"),
    }
    found = [
        quantized(name, "--scheme", *words, measurement="measure/default/measured")
        for name, words in chosen.items()
    ]
    shards = (
        "export",
        "scheme/W8A8/quantized",
        "-o",
        "plan/shard-size/artifact",
        "--shard-size",
        "4MB",
    )
    first: tuple[str, ...] = (
        "quantize",
        EXAMPLE,
        "-o",
        "plan/measure-first/quantized",
        "--scheme",
        "W4A16",
        "--calibration",
        CALIBRATION,
    )
    first += ("--set", "calibration.samples=8", "--set", "calibration.sequence_length=64")
    first += (
        "--measurement",
        "plan/measure-first/measured",
        "--export",
        "plan/measure-first/artifact",
    )
    return [
        *found,
        Step(name="plan/shard-size", commands=(shards,)),
        Step(name="plan/measure-first", commands=(first,)),
    ]


def mixtures_of_schemes() -> list[Step]:
    """Return schemes chosen by sensitivities, and a choice that is repeated."""
    fisher = "measure/fisher/measured"
    candidates = (
        "[{scheme: W4A16, group_size: 64}, {scheme: W8A16}, {scheme: W3A16, group_size: 32}]"
    )
    return [
        quantized("mixed/bits-4.25", "--target-bpw", "4.25", measurement=fisher),
        quantized(
            "mixed/bits-3.5-asym-rtn",
            "--scheme",
            "W4A16_ASYM",
            "--algorithm",
            "rtn",
            "--target-bpw",
            "3.5",
            measurement=fisher,
        ),
        quantized(
            "mixed/candidates",
            *("--scheme", "W4A16", *setting("target_bpw", "5"), *setting("candidates", candidates)),
            measurement=fisher,
        ),
        quantized("mixed/divergence", "--max-kld", "0.05", measurement=fisher),
        quantized(
            "mixed/divergence-head",
            "--max-kld",
            "0.05",
            "--head",
            "W8A16",
            "--scheme",
            "W4A16",
            measurement="measure/all/measured",
        ),
        quantized(
            "mixed/again", "--recipe", "mixed/bits-4.25/quantized/recipe.yaml", measurement=fisher
        ),
    ]


def without_measurement() -> list[Step]:
    """Return what goes from file to file."""
    chosen = (
        *(
            ("FP8_DYNAMIC", "rtn"),
            ("FP8_DYNAMIC", "rtn_mse"),
            ("FP8_BLOCK", "rtn"),
            ("W8A16", "rtn"),
            ("W4A16", "rtn"),
        ),
        *(("W4A16_ASYM", "hqq"), ("W3A16", "rtn_mse"), ("W5A16_ASYM", "rtn")),
    )
    return [
        quantized(
            f"files/{scheme}-{algorithm}",
            "--scheme",
            scheme,
            "--algorithm",
            algorithm,
            measurement=None,
        )
        for scheme, algorithm in chosen
    ] + [
        quantized(
            "files/head", "--scheme", "W8A16", "--head", "W8A16", measurement=None, together=False
        ),
    ]


def ranks() -> list[Step]:
    """Return shards of several cards, joined and exported."""
    default = "measure/default/measured"
    return [
        sharded("ranks/2-FP8_DYNAMIC", 2, "--scheme", "FP8_DYNAMIC"),
        sharded("ranks/4-FP8_DYNAMIC", 4, "--scheme", "FP8_DYNAMIC"),
        sharded("ranks/2-W4A16_ASYM-rtn", 2, "--scheme", "W4A16_ASYM", "--algorithm", "rtn"),
        sharded("ranks/2-W8A16", 2, "--scheme", "W8A16"),
        sharded("ranks/4-FP8", 4, "--scheme", "FP8", measurement=default),
        sharded("ranks/2-W4A16", 2, "--scheme", "W4A16", measurement=default),
        sharded("ranks/4-W4A16", 4, "--scheme", "W4A16", measurement=default),
        sharded("ranks/2-W8A8", 2, "--scheme", "W8A8", measurement=default),
        sharded(
            "ranks/small-2-awq",
            2,
            *("--scheme", "W4A16", "--group-size", "32", *setting("transforms", "[{awq: {}}]")),
            model=SMALL,
            measurement="measure/small/measured",
        ),
        sharded(
            "ranks/2-W4A16-rtn_mse",
            2,
            "--scheme",
            "W4A16",
            "--algorithm",
            "rtn_mse",
            measurement=default,
        ),
    ]


def experts() -> list[Step]:
    """Mixtures of experts, with every policy for experts that are short of tokens.

    `few` have less than 200.
    """
    model, default, all_tokens = (
        "models/mixtral",
        "experts/measured/measured",
        "experts/measured-all/measured",
    )
    four, static = ("--scheme", "W4A16", "--group-size", "32"), ("--scheme", "FP8")
    few, none = ("--expert-tokens", "200"), ("--expert-tokens", "20")
    other, others = "models/qwen2_moe", "experts/qwen2_moe-measured/measured"
    chosen: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("gptq", default, (*four, *none)),
        ("gptq-damp", default, (*four, *few, "--experts", "damp")),
        ("gptq-rtn", default, (*four, *few, "--experts", "rtn")),
        ("gptq-all", all_tokens, (*four, *few, "--experts", "all")),
        ("FP8", "experts/unified/unified", (*static, *none)),
        ("FP8-share_max", default, (*static, *few, "--experts", "share_max")),
        ("FP8-damp", default, (*static, *few, "--experts", "damp")),
        ("W8A8", default, ("--scheme", "W8A8")),
        (
            "awq",
            default,
            (*four, *none, "--algorithm", "rtn", *setting("transforms", "[{awq: {}}]")),
        ),
    )
    return [
        measured("experts/measured", model=model),
        measured("experts/measured-all", "--experts", "all", model=model),
        measured("experts/measured-ranks-2", "--ranks", "2", "--dp", "2", model=model),
        unified("experts/unified", measurement="experts/measured-ranks-2/measured"),
        *(
            quantized(f"experts/{name}", *words, model=model, measurement=source)
            for name, source, words in chosen
        ),
        quantized("experts/FP8_DYNAMIC", "--scheme", "FP8_DYNAMIC", model=model, measurement=None),
        sharded("experts/ranks-2", 2, "--scheme", "FP8_DYNAMIC", model=model),
        measured("experts/qwen2_moe-measured", model=other),
        quantized("experts/qwen2_moe-gptq", *four, *none, model=other, measurement=others),
        quantized("experts/qwen2_moe-W8A8", "--scheme", "W8A8", model=other, measurement=others),
        quantized(
            "experts/qwen3_moe-W4A16",
            *four,
            "--algorithm",
            "hqq",
            model="models/qwen3_moe",
            measurement=None,
        ),
        quantized(
            "experts/olmoe-W8A16", "--scheme", "W8A16", model="models/olmoe", measurement=None
        ),
    ]


def families() -> list[Step]:
    """Return the dense families beside the example's, each from a measurement of its own."""
    found = [
        measured(f"family/{name}-measured", model=f"models/{name}")
        for name in ("gpt_neox", "mistral", "qwen2", "qwen3")
    ]
    found.append(
        measured("family/gpt_neox-tp-2", "--ranks", "2", "--tp", "2", model="models/gpt_neox")
    )
    four = ("--scheme", "W4A16", "--group-size", "32")
    chosen: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("gpt_neox", "W4A16", four),
        ("gpt_neox", "FP8", ("--scheme", "FP8")),
        ("gpt_neox", "W8A8", ("--scheme", "W8A8")),
        ("gpt_neox", "FP8_DYNAMIC-gptq", ("--scheme", "FP8_DYNAMIC", "--algorithm", "gptq")),
        ("mistral", "awq", (*four, *setting("transforms", "[{awq: {}}]"))),
        ("qwen2", "W8A8", ("--scheme", "W8A8", "--smoothquant", "auto")),
        ("qwen2", "head", (*four, "--head", "W8A16")),
        ("qwen3", "hadamard", (*four, *setting("transforms", "[hadamard]"))),
        ("qwen3", "FP8-cache", ("--scheme", "FP8", "--kv-cache", "FP8")),
    )
    return [
        *found,
        *(
            quantized(
                f"family/{model}-{name}",
                *words,
                model=f"models/{model}",
                measurement=f"family/{model}-measured/measured",
            )
            for model, name, words in chosen
        ),
    ]


def gaudi() -> list[Step]:
    """Return the files of Gaudi's toolkit, there and back, and its QUANT_CONFIG."""
    default = "measure/default/measured"
    exports: dict[str, tuple[str, ...]] = {
        "gaudi2": (default, "--device", "gaudi2"),
        "gaudi3": (default, "--device", "gaudi3"),
        "pow2-weights": (
            default,
            "--device",
            "gaudi2",
            "--scale-method",
            "maxabs_pow2_opt_weight",
            "--model",
            EXAMPLE,
        ),
        "channels": (
            *(
                default,
                "--device",
                "gaudi2",
                "--scale-method",
                "act_maxabs_pow2_weights_pcs_opt_pow2",
                "--model",
                EXAMPLE,
            ),
        ),
        "scalar": (
            default,
            "--device",
            "gaudi2",
            "--quant-config",
            "maxabs_quant_scalar_scales.json",
        ),
        "cards": ("measure/ranks-2-tp-2/measured", "--device", "gaudi2"),
        "expanded": ("unify/expand-4/unified", "--device", "gaudi2"),
    }
    found = [
        Step(
            name=f"gaudi/{name}",
            commands=(("export", *words, "-o", f"gaudi/{name}/exported", "--format", "inc"),),
        )
        for name, words in exports.items()
    ]
    one = "gaudi/one/unified"
    postprocessed = (
        "export",
        one,
        "-o",
        "gaudi/postprocessed/exported",
        "--format",
        "inc",
        "--device",
        "gaudi2",
        "--keep-orig",
    )
    folder = "gaudi/configured"
    dumped = {"dump_stats_path": f"./{folder}/hqt_output/measure"}
    configs = {
        "measure.json": json.dumps({"mode": "MEASURE", "observer": "maxabs", **dumped}),
        "quantize.json": json.dumps({"mode": "QUANTIZE", "device_for_scales": "GAUDI2", **dumped}),
    }
    measure = (
        "measure",
        EXAMPLE,
        "--calibration",
        CALIBRATION,
        *LENGTHS,
        "--quant-config",
        f"{folder}/measure.json",
    )
    quantize = (
        "quantize",
        EXAMPLE,
        "-o",
        f"{folder}/quantized",
        "--quant-config",
        f"{folder}/quantize.json",
    )
    return [
        *found,
        unified("gaudi/one", "-g", "0123", measurement="gaudi/expanded/exported/hqt_output"),
        unified("gaudi/two", "-g", "01", "23", measurement="gaudi/expanded/exported/hqt_output"),
        Step(
            name="gaudi/postprocessed",
            commands=((*postprocessed, "--quant-config", "maxabs_quant"),),
        ),
        quantized("gaudi/FP8", "--scheme", "FP8", *setting("float8", "gaudi2"), measurement=one),
        Step(
            name=folder,
            commands=(measure, (*quantize, "--export", f"{folder}/artifact")),
            files=configs,
        ),
    ]


def other_verbs() -> list[Step]:
    """Steps beside the formats: llama.cpp's files, a recipe, a validation, and text.

    The recipe runs through all stages. The text is generated from artifacts.
    """
    sources = {
        "bf16": (EXAMPLE, "bf16"),
        "f16": (EXAMPLE, "f16"),
        "f32": (EXAMPLE, "f32"),
        "W4A16": ("scheme/W4A16/artifact", "f16"),
        "FP8": ("scheme/FP8/artifact", "f32"),
        "gpt_neox": ("models/gpt_neox", "f32"),
        "qwen2": ("models/qwen2", "bf16"),
    }
    recipe = {
        "model": EXAMPLE,
        "calibration": {"source": CALIBRATION, "samples": 16, "sequence_length": 128},
        "measure": {"ranks": 2},
        "unify": {"groups": ["01"]},
        "quantize": [
            {"name": "fp8-cache", "scheme": "FP8", "kv_cache": {"scheme": "FP8"}},
            {"name": "w4a16", "scheme": "W4A16", "group_size": 64, "head": {"scheme": "W8A16"}},
        ],
        "validate": {
            "text": HELDOUT,
            "tokens": 1024,
            "sequence_length": 128,
            "gate": "verb/run/gate.json",
        },
    }
    checked: tuple[str, ...] = (
        "validate",
        "scheme/W8A8/artifact",
        "--baseline",
        EXAMPLE,
        "--text",
        HELDOUT,
        "--tokens",
        "1024",
    )
    checked += (
        "--sequence-length",
        "128",
        "--gate",
        "verb/validate/gate.json",
        "--report",
        "verb/validate/report",
    )
    return [
        *(
            Step(
                name=f"gguf/{name}",
                commands=(
                    (
                        "export",
                        source,
                        "-o",
                        f"gguf/{name}/gguf",
                        "--format",
                        "gguf",
                        "--dtype",
                        dtype,
                    ),
                ),
            )
            for name, (source, dtype) in sources.items()
        ),
        Step(
            name="verb/run",
            commands=(("run", "verb/run/recipe.json", "-o", "verb/run/all"),),
            files={"recipe.json": json.dumps(recipe, indent=1), "gate.json": GATE},
        ),
        Step(name="verb/validate", commands=(checked,), files={"gate.json": GATE}),
    ]


def make_models(folder: Path, example: Path) -> None:
    """Write the models and texts that are not there yet; those that are there stay as they are."""

    def copy(room: Path) -> None:
        for name in (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ):
            shutil.copyfile(example / name, room / name)

    def write_text(room: Path) -> None:
        command = (sys.executable, str(example / "stdlib_text.py"), "--output", str(room))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    makers: dict[str, Callable[[Path], None]] = {
        "tiny-llama": copy,
        "text": write_text,
        **{name: partial(write_random_model, name) for name in FAMILIES},
    }
    for name, make in makers.items():
        if not (folder / name).is_dir():
            room = folder / f".{name}.making"  # renamed when it is complete
            shutil.rmtree(room, ignore_errors=True)
            room.mkdir(parents=True)
            make(room)
            room.rename(folder / name)


def write_random_model(name: str, folder: Path) -> None:
    """Write a model of FAMILIES with random weights and a byte-level BPE.

    The weights are large enough that layers matter.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    kind, values = FAMILIES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**values, initializer_range=0.1)
    )
    with torch.no_grad():
        for parameter, tensor in model.named_parameters():
            if parameter.endswith("bias"):
                tensor.normal_(0, 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["def value(self): return self.scale * (token - zero)"] * 4, trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)


def run_step(step: Step, quantflow: Sequence[str], work: Path) -> dict[str, Any]:
    """Run a step's commands up to the first that fails, and hash what they wrote.

    Args:
        step: what to run.
        quantflow: the words that start the command line.
        work: the folder in which commands run.

    Returns:
        The step's row of the record: `exit`, `error`, `seconds`, `commands`, `files` and
        `manifests`.
    """
    folder = work / step.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in step.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "QUANT_CONFIG"}
    begin, code, error = time.monotonic(), 0, ""
    for words in step.commands:
        command = (*quantflow, *words, "--quiet")
        try:
            done = subprocess.run(
                command, cwd=work, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            code, error = 124, f"ran for more than {TIMEOUT} s"
            break
        if done.returncode:
            code, error = (
                done.returncode,
                " ".join(line.strip() for line in done.stderr.strip().splitlines()[-2:]),
            )
            break
    return {
        "exit": code,
        "error": error,
        "seconds": round(time.monotonic() - begin, 1),
        "commands": [shlex.join(words) for words in step.commands],
        **digests_of(folder),
    }


def digests_of(folder: Path) -> dict[str, Any]:
    """`files`, path -> sha256, and `manifests`.

    A manifest's path leads to the digest that it states and the sha256 of each key.
    """
    files = {str(path.relative_to(folder)): file_digest(path) for path in compared(folder)}
    manifests = {}
    for name in files:
        if Path(name).name == MANIFEST:
            content = json.loads((folder / name).read_bytes())
            keys = {key: value_digest(value) for key, value in content.items() if key != "digest"}
            manifests[name] = {"digest": content["digest"], "keys": keys}
    return {"files": files, "manifests": manifests}


def compared(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, sorted, without SKIPPED."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in SKIPPED):
            yield path


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def value_digest(value: Any) -> str:
    """Return the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def run_steps(
    chosen: Sequence[Step], quantflow: Sequence[str], work: Path, *, jobs: int
) -> dict[str, Any]:
    """Run steps, `jobs` at a time and each after those that it reads; their rows by name."""
    begin = time.monotonic()
    futures: dict[str, Future[dict[str, Any]]] = {}

    def run(step: Step, before: Sequence[Future[dict[str, Any]]]) -> dict[str, Any]:
        for future in before:  # begun earlier, since steps come after those that they read
            future.result()
        row = run_step(step, quantflow, work)
        told = (
            f"exit {row['exit']}: {row['error']}" if row["exit"] else f"{len(row['files'])} files"
        )
        print(
            f"{time.monotonic() - begin:6.0f} s  {step.name}: {row['seconds']} s, {told}",
            flush=True,
        )
        return row

    with ThreadPoolExecutor(jobs) as pool:
        for step in chosen:
            before = [futures[other.name] for other in chosen if step.reads(other)]
            futures[step.name] = pool.submit(run, step, before)
        return {name: future.result() for name, future in futures.items()}


def select(patterns: Sequence[str]) -> list[Step]:
    """The steps that match one of the patterns, and those that they read.

    Without patterns these are all.
    """
    every = steps()
    wanted = {
        step.name
        for step in every
        if not patterns or any(fnmatch.fnmatch(step.name, each) for each in patterns)
    }
    for step in reversed(every):
        if step.name in wanted:
            wanted |= {other.name for other in every if step.reads(other)}
    return [step for step in every if step.name in wanted]


def record(arguments: argparse.Namespace) -> int:
    """Make everything, write the record and return how many steps failed, at most 1."""
    work, models = (
        arguments.work.resolve(),
        (arguments.models or arguments.work / "models").resolve(),
    )
    make_models(models, arguments.example.resolve())
    work.mkdir(parents=True, exist_ok=True)
    if models != work / "models":
        (work / "models").unlink(missing_ok=True)
        (work / "models").symlink_to(models)
    inputs = {str(path.relative_to(models)): file_digest(path) for path in compared(models)}
    begin = time.monotonic()
    rows = run_steps(
        select(arguments.only), shlex.split(arguments.quantflow), work, jobs=arguments.jobs
    )
    content = {"inputs": inputs, "steps": rows}
    arguments.output.write_text(
        json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    failed = [name for name, row in rows.items() if row["exit"]]
    files = sum(len(row["files"]) for row in rows.values())
    manifests = sum(len(row["manifests"]) for row in rows.values())
    print(
        f"{len(rows)} steps, {files} files, {manifests} artifacts, "
        f"{time.monotonic() - begin:.0f} s: {arguments.output}"
    )
    print(f"{len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


def compare(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return what differs between two records, and what differs in prose alone; a line each."""
    differences = [f"input {line}" for line in unlike(one["inputs"], two["inputs"])]
    prose = []
    for name in sorted({*one["steps"], *two["steps"]}):
        if name not in one["steps"] or name not in two["steps"]:
            differences.append(
                f"{name}: only in {'the first' if name in one['steps'] else 'the second'}"
            )
            continue
        first, second = one["steps"][name], two["steps"][name]
        if first["exit"] != second["exit"]:
            told = "; ".join(row["error"] for row in (first, second) if row["error"])
            differences.append(f"{name}: exit {first['exit']} and {second['exit']}: {told}")
        elif first["error"] != second["error"]:
            prose.append(f"{name}: {first['error']!r} and {second['error']!r}")
        for line in unlike(first["files"], second["files"]):
            (prose if Path(line.split(":")[0]).name in PROSE else differences).append(
                f"{name}/{line}"
            )
        for path in sorted({*first["manifests"]} & {*second["manifests"]}):
            keys = unlike(first["manifests"][path]["keys"], second["manifests"][path]["keys"])
            differences += [f"{name}/{path}, key {line}" for line in keys]
    return differences, prose


def unlike(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    """Return a line for each name whose digests differ, or that one side lacks."""
    lines = []
    for name in sorted({*one, *two}):
        if name not in one or name not in two:
            lines.append(f"{name}: only in {'the first' if name in one else 'the second'}")
        elif one[name] != two[name]:
            lines.append(f"{name}: {one[name][:12]} and {two[name][:12]}")
    return lines


def show_comparison(paths: Sequence[Path]) -> int:
    """Print what differs between two records; return 1 where more than prose does."""
    one, two = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    differences, prose = compare(one, two)
    for title, lines in (("differs", differences), ("differs in prose", prose)):
        for line in lines:
            print(f"{title}: {line}")
    files = sum(len(row["files"]) for row in one["steps"].values())
    print(
        f"{len(one['steps'])} steps, {files} files: {len(differences)} differences, {len(prose)} "
        "in prose"
    )
    return 1 if differences else 0


def main(words: Sequence[str]) -> int:
    """Record digests, or compare two records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar="FILE",
        help="compare two records, and make nothing",
    )
    parser.add_argument(
        "--quantflow",
        default="quantflow",
        metavar="COMMAND",
        help="the words that start quantflow's command line",
    )
    parser.add_argument(
        "--work", type=Path, default=Path("artifacts/digests"), help="folder of all that is made"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", default=Path("digests.json"), help="the record"
    )
    parser.add_argument(
        "--models",
        type=Path,
        metavar="DIR",
        help="folder of models and text (default: models below --work)",
    )
    example = Path(__file__).resolve().parents[1] / "examples" / "tiny-llama"
    parser.add_argument(
        "--example",
        type=Path,
        default=example,
        metavar="DIR",
        help="the example model (default: the repository's)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="steps such as 'ranks/*'; repeat it",
    )
    parser.add_argument("--jobs", type=int, default=2, help="steps at a time (default: 2)")
    arguments = parser.parse_args(words)
    return show_comparison(arguments.compare) if arguments.compare else record(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
