"""The comparison's rows: every program with every scheme it has.

A row is commands that run one after another in processes of their own.

Settings are equal where a program lets them be: symmetric or with zero points, 128 weights to a
scale at 4 bits, 64 below, and a scale per output at 8. Everything else is the program's default, or
what its own examples use.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from _quantflow import QUANTFLOW, Commands

from quantflow.algorithms import ALGORITHMS, BLOCK_ALGORITHMS, COMBINATIONS
from quantflow.core.scheme import preset
from quantflow.planning.requirements import entries_of, learned_of, needs_of

SCRIPTS = Path(__file__).resolve().parents[1] / "peers"
OURS = "quantflow"
Command = tuple[str | Path, ...]
Settings = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """Integers for weights alone.

    Attributes:
        name: as the table shows it.
        preset: quantflow's.
        group: weights to a scale; -1, as the peers have it, where each output has one.
    """

    name: str
    preset: str
    bits: int
    group: int
    symmetric: bool

    @property
    def settings(self) -> Settings:
        """What the peers' programs are told."""
        return {"bits": self.bits, "group_size": self.group, "symmetric": self.symmetric}


def _weight_scheme(bits: int, group: int, symmetric: bool) -> WeightScheme:
    name = f"W{bits}A16" + ("" if symmetric else "_ASYM")
    return WeightScheme(
        name=f"{name} g{group}", preset=name, bits=bits, group=group, symmetric=symmetric
    )


EIGHT = WeightScheme(name="W8A16", preset="W8A16", bits=8, group=-1, symmetric=True)
WEIGHTS = tuple(
    _weight_scheme(bits, group, sym)
    for bits, group in ((4, 128), (3, 64), (2, 64))
    for sym in (True, False)
)
WEIGHTS += (_weight_scheme(2, 128, symmetric=True), EIGHT)
# Schemes chosen per linear for so many bits per weight; 4.65 is less than llama.cpp's Q4_K_M takes
# of any of the models. And uniform ones with more bits, which no peer but llama.cpp has: mixtures
# are compared with the line from LOWER to UPPER.
MIXED = {"W4A16@4.25": 4.25, "W4A16@4.65": 4.65}
# The same of models with experts, with the bits counted that a token reads.
ACTIVE = {"W4A16@4.25 active": 4.25}
# The one that a peer chooses schemes for too.
SEARCHED = "W4A16@4.25"
# Where 128 does not divide the inputs of a linear: the same 4 bits in groups of 64. With experts
# the symmetric one stands beside 128 too: the uniform scheme of 4.25 bits.
NARROWER = tuple(_weight_scheme(4, 64, symmetric) for symmetric in (True, False))
FINER = tuple(_weight_scheme(bits, 128, symmetric=True) for bits in (5, 6))
LOWER, UPPER = WEIGHTS[0], FINER[0]
MIXED_BY = ("gptq", "best")  # also of FINER
# Schemes with quantized inputs -> quantflow's algorithms, of those that there are.
INPUTS = {
    "W8A8": ("rtn", "gptq", "best"),
    "W4A8 g128": ("rtn", "gptq", "best"),
    "FP8": ("rtn", "gptq", "best"),
    "FP8_DYNAMIC": ("rtn", "rtn_mse", "gptq", "best"),
}
# The formats of 4 bits that hardware multiplies, weights alone and inputs too.
FLOAT4 = {
    **{name: ("rtn", "gptq", "best") for name in ("NVFP4A16", "MXFP4A16")},
    **{name: ("rtn", "gptq", "good", "best") for name in ("NVFP4", "MXFP4")},
}
# Transforms in the place of those that `best` takes by itself -> its schemes with such a row.
TRANSFORMED = {"hadamard": ("NVFP4", "MXFP4", "W2A16 g64")}
# `best` with as much calibration text again, which the model writes; where it tunes, twice the
# steps, each of twice the sequences.
SYNTHETIC = ("--synthetic", "64")
TUNED_ON_IT = ("--tune", "64", "--set", "quantize.0.tune.sequences=8")
LLAMA_CPP = (
    "Q8_0",
    "Q6_K",
    "Q5_K_M",
    "Q5_K_S",
    "Q4_K_M",
    "Q4_K_S",
    "Q4_1",
    "Q4_0",
    "IQ4_NL",
    "IQ4_XS",
)
# smaller ones want an importance matrix
LLAMA_CPP += ("Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "Q2_K")
# llama.cpp's types that quantflow rounds onto -> its algorithms. Rows of whole files, which
# llama.cpp runs: `Q4_0.gguf`.
FILE_TYPES = ("Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", "IQ4_NL", "IQ4_XS", "Q8_0")
FILE_TYPES += ("IQ3_S", "IQ3_XXS", "IQ2_M", "IQ2_XS", "IQ2_XXS")  # with a codebook
FILES = {f"{name}.gguf": ("gptq", "yaqa", "good", "best") for name in FILE_TYPES}
# AutoRound's programs -> what they are told; the first is its default. `extended` is its newest
# algorithm.
AUTOROUND: Mapping[str, Settings] = {
    "AutoRound": {"iterations": 200},
    "AutoRound extended": {"iterations": 200, "extended": True},
    "AutoRound 50 iterations": {"iterations": 50},
    "AutoRound 0 iterations": {"iterations": 0},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        commands: timed, from import to the saved files.
        after: reads the files back, or runs the file; not timed. None for quantflow, whose files
            the benchmark reads itself.
        environment: variables beside this process's own.
        runs: llama.cpp runs the file that is left, embedding and head included, and `after` writes
            its logits.
    """

    program: str
    scheme: str
    commands: tuple[Command, ...]
    after: Command | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    runs: bool = False

    @property
    def text(self) -> str:
        """What `--only` looks into."""
        return f"{self.program}: {self.scheme}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the rows of one model find and put their files.

    Attributes:
        output: a folder that each row has for itself; the last command leaves `artifact`
            (quantflow) or `report.json` in it.
        gguf, names: as `export_gguf` returns them; None of a mixture of experts.
        windows: as `Text` has them.
        peers: an environment per peer.
        narrow: 128 does not divide the inputs of a linear; groups of 64 stand for it.
        sparse: the model is a mixture of experts. The script of llama.cpp reads no tensor of
            several experts.
    """

    model: Path
    calibration: Path
    output: Path
    gguf: Path | None
    names: Path | None
    windows: Path
    peers: Path
    narrow: bool = False
    sparse: bool = False

    @property
    def weights(self) -> tuple[WeightScheme, ...]:
        """The schemes of weights alone whose groups divide what they group."""
        if self.narrow:
            return (*NARROWER, *(scheme for scheme in WEIGHTS if scheme.group != 128))
        return (*WEIGHTS, NARROWER[0]) if self.sparse else WEIGHTS

    @property
    def mixed(self) -> Mapping[str, tuple[str, ...]]:
        """The rows whose schemes are chosen, and the options that choose them.

        There are none where 128 does not divide: they stand between schemes in groups of 128.
        """
        if self.narrow:
            return {}
        stored = {name: ("--target-bpw", str(bits)) for name, bits in MIXED.items()}
        active = {
            name: ("--target-bpw", str(bits), "--bits-of", "active")
            for name, bits in ACTIVE.items()
        }
        return {**stored, **active} if self.sparse else stored

    @property
    def inputs(self) -> Mapping[str, tuple[str, ...]]:
        """The schemes with quantized inputs whose groups divide what they group."""
        return {
            name: algorithms
            for name, algorithms in INPUTS.items()
            if not (self.narrow and "g128" in name)
        }


def all_rows(place: Place) -> list[Row]:
    """Return every row of one model."""
    return [
        *_ours(place),
        *_llm_compressor(place),
        *_gptqmodel(place),
        *_autoround(place),
        *_others(place),
        *(() if place.sparse else _files(place)),
    ]


def wanted(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """The rows that `--only` asks for.

    Without a text these are all. A row whose `text` is equal to one stands alone, else all that
    contain it.
    """
    whole = {row.text for row in rows}.intersection(only)
    parts = [text for text in only if text not in whole]
    return [
        row
        for row in rows
        if not only or row.text in whole or any(part in row.text for part in parts)
    ]


def _ours(place: Place) -> Iterator[Row]:
    # for weights alone best is yaqa
    named = [name for name in (*ALGORITHMS, *BLOCK_ALGORITHMS) if name != "yaqa"]
    for algorithm in (*named, *COMBINATIONS):
        mixed = place.mixed if algorithm in MIXED_BY else {}
        for scheme in (*place.weights, *(FINER if mixed else ())):
            options = ("--group-size", str(scheme.group)) if scheme.group > 0 else ()
            yield _our_row(
                place, algorithm, name=scheme.name, scheme=scheme.preset, options=options
            )
        for name, options in mixed.items():
            yield _our_row(
                place, algorithm, name=name, scheme=LOWER.preset, options=options, chosen=True
            )
        for name, algorithms in {**place.inputs, **FLOAT4}.items():
            if algorithm in algorithms:
                yield _our_row(place, algorithm, name=name, scheme=name.split()[0])
    for transform, names in TRANSFORMED.items():
        for row in [_our_row(place, "best", name=name, scheme=name.split()[0]) for name in names]:
            (command,) = row.commands
            options = ("--set", f'quantize.0.transforms=["{transform}"]')
            if " g" in row.scheme:
                options = (*options, "--group-size", row.scheme.partition(" g")[2])
            yield replace(
                row, program=f"{row.program} {transform}", commands=((*command, *options),)
            )
    for scheme in place.weights:
        if scheme.symmetric and scheme.bits < 8:
            group = ("--group-size", str(scheme.group))
            tuned = TUNED_ON_IT if scheme.bits == 2 else ()
            more = {
                "best synthetic": (*group, *SYNTHETIC, *tuned),
                "gptq refit": (*group, "--refit"),
            }
            for program, options in more.items():
                row = _our_row(
                    place,
                    program.split()[0],
                    name=scheme.name,
                    scheme=scheme.preset,
                    options=options,
                )
                yield replace(row, program=f"{OURS} {program}")
    for name in FLOAT4:
        row = _our_row(place, "best", name=name, scheme=name, options=SYNTHETIC)
        yield replace(row, program=f"{row.program} synthetic")


def _our_row(
    place: Place,
    algorithm: str,
    *,
    name: str,
    scheme: str,
    options: tuple[str, ...] = (),
    chosen: bool = False,
) -> Row:
    """A row of quantflow's, measured where it must be.

    What it needs to be measured does not depend on the bits for which schemes are chosen.
    """
    needs = f"{scheme}:{algorithm}@4.25" if chosen else f"{scheme}:{algorithm}"
    ours, (entry,) = Commands(model=place.model), entries_of(needs)
    measured, quantized, artifact = (
        place.output / part for part in ("measured", "quantized", "artifact")
    )
    quantize = (
        *ours.quantize(quantized, scheme=scheme, algorithm=algorithm, artifact=artifact),
        *options,
    )
    if place.sparse:  # some experts see few tokens, and are to be rounded all the same
        quantize = (*quantize, "--experts", "damp")
    if needs_of(entry, [preset(scheme)]) or learned_of(entry) is not None:
        quantize = (*quantize, "--measurement", measured, "--calibration", place.calibration)
    return Row(program=f"{OURS} {algorithm}", scheme=name, commands=(quantize,))


def _peer(
    place: Place,
    peer: str,
    program: str,
    scheme: str,
    settings: Settings,
    *,
    environment: Mapping[str, str] | None = None,
) -> Row:
    """Return the row of a peer whose script is accuracy_PEER.py and whose environment is PEER."""
    call: Command = (place.peers / peer / "bin" / "python", SCRIPTS / f"accuracy_{peer}.py")
    told = ("quantize", place.model, place.calibration, place.output, json.dumps(settings))
    return Row(
        program=program,
        scheme=scheme,
        commands=((*call, *told),),
        after=(*call, "dequantize", place.model, place.output),
        environment={"HF_HUB_OFFLINE": "1", **(environment or {})},
    )


def _llm_compressor(place: Place) -> Iterator[Row]:
    def row(program: str, name: str, /, **settings: object) -> Row:
        return _peer(place, "llmcompressor", f"llm-compressor {program}", name, settings)

    for scheme in place.weights:
        for program in ("RTN", "GPTQ", "AWQ"):
            yield row(program, scheme.name, algorithm=program.lower(), **scheme.settings)
    for alpha in (0.5, 0.8):
        yield row(
            f"SmoothQuant {alpha} GPTQ", "W8A8", algorithm="gptq", scheme="W8A8", smoothing=alpha
        )
    for program in ("RTN", "GPTQ"):
        yield row(program, "W8A8", algorithm=program.lower(), scheme="W8A8")
        if "W4A8 g128" in place.inputs:
            yield row(program, "W4A8 g128", algorithm=program.lower(), scheme="W4A8")
        for name in FLOAT4:
            yield row(program, name, algorithm=program.lower(), scheme=name)
    yield row("RTN", "FP8", algorithm="rtn", scheme="FP8")
    yield row("RTN", "FP8_DYNAMIC", algorithm="rtn", scheme="FP8_DYNAMIC")


def _gptqmodel(place: Place) -> Iterator[Row]:
    workers = {"GPTQMODEL_CPU_WORKERS": "2"}  # on two cores it refuses to start without
    for scheme in place.weights:
        yield _peer(
            place, "gptqmodel", "GPTQModel", scheme.name, scheme.settings, environment=workers
        )


def _autoround(place: Place) -> Iterator[Row]:
    for program, told in AUTOROUND.items():
        for scheme in place.weights:
            yield _peer(place, "autoround", program, scheme.name, {**scheme.settings, **told})
        for name in FLOAT4:
            settings = {
                "scheme": name.removesuffix("A16"),
                "act_bits": 16 if name.endswith("A16") else 4,
            }
            yield _peer(place, "autoround", program, name, {**settings, **told})
        if SEARCHED in place.mixed:
            settings = {"average_bits": MIXED[SEARCHED], **told}
            yield _peer(place, "autoround", program, SEARCHED, settings)


def _others(place: Place) -> Iterator[Row]:
    for kind in () if place.sparse else LLAMA_CPP:
        yield _llama_cpp(place, kind, kind, importance=False)
    for scheme in place.weights:
        yield _peer(place, "inc", "neural-compressor RTN", scheme.name, scheme.settings)
    for bits, group in ((8, 64), *(() if place.narrow else ((4, 128),)), (4, 64), (3, 64), (2, 64)):
        # Its zero points are float16 numbers, so that it has more bits at equal groups.
        yield _peer(
            place, "hqq", "HQQ", f"{bits} bits g{group}", {"bits": bits, "group_size": group}
        )


def _llama_cpp(place: Place, scheme: str, kind: str, *, importance: bool) -> Row:
    settings = {
        "type": kind,
        "importance": importance,
        "gguf": str(place.gguf),
        "names": str(place.names),
    }
    return _peer(
        place, "llamacpp", "llama.cpp imatrix" if importance else "llama.cpp", scheme, settings
    )


def _files(place: Place) -> Iterator[Row]:
    """Yield the rows of whole files.

    They are quantflow's and those of llama.cpp's quantizer with and without an importance matrix.
    """
    python = place.peers / "llamacpp" / "bin" / "python"

    def run_by_llama_cpp(row: Row, file: Path) -> Row:
        after = (python, SCRIPTS / "accuracy_llamacpp.py", "run", file, place.windows, place.output)
        return replace(row, after=after, runs=True)

    for scheme, algorithms in FILES.items():
        kind = scheme.removesuffix(".gguf")
        folder = place.output / "gguf"
        write = (*QUANTFLOW, "export", place.output / "artifact", "-o", folder, "--format", "gguf")
        for algorithm in algorithms:
            row = _our_row(place, algorithm, name=scheme, scheme=kind)
            row = replace(row, commands=(*row.commands, write))
            yield run_by_llama_cpp(row, folder / f"model-{kind.lower()}.gguf")
        for importance in (False, True):
            row = _llama_cpp(place, scheme, kind, importance=importance)
            yield run_by_llama_cpp(row, place.output / "model" / "model.gguf")


def installed(row: Row) -> bool:
    """Return whether the programs that quantize, and read or run what they leave, are there."""
    commands = row.commands if row.after is None else (*row.commands, row.after)
    return all(Path(command[0]).exists() for command in commands)
