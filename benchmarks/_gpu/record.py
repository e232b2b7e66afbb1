"""The place of a check, its size, and its findings, line by line.

A check that is ended leaves the lines it had.

| kind   | what a line tells                                             |
|--------|---------------------------------------------------------------|
| figure | a number that was measured                                    |
| claim  | what must hold on every device: statistics, tokens, bits      |
| bar    | a speed that is promised of a GPU; never judged on the CPU    |
| absent | what was not run, and why                                     |
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from _synthetic import SHAPES, Shape

KINDS = ("figure", "claim", "bar", "absent")
ON_A_GPU_ALONE = "judged on a GPU alone"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much the checks do.

    Attributes:
        samples, tokens: calibration sequences of the example model, and their length.
        evaluated: tokens of a validation.
        new: tokens of a generated text.
        shapes: the name of a random model -> its shape; the last is the one that bars are promised
            for.
        layers: how many of a shape's layers are there.
        prompt, steps: tokens of a prompt, and decode steps after it, of a random model.
        runs: prompts whose times are counted, of a random model.
        rounds: timed calls of a linear; medians are told.
        products: (out_features, in_features) of the linears that are timed alone.
        large: the shape of the checkpoint that is measured and rounded by gptq from files.
        depths: of how many layers it is; two of them, so that the seconds of one more layer are
            known.
        large_samples, large_tokens: its calibration.
    """

    samples: int
    tokens: int
    evaluated: int
    new: int
    shapes: Mapping[str, Shape]
    layers: Mapping[str, int]
    prompt: int
    steps: int
    runs: int
    rounds: int
    products: tuple[tuple[int, int], ...]
    large: Shape
    depths: tuple[int, int]
    large_samples: int
    large_tokens: int


_TINY = Shape(hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, vocab=4096)
_NAMED = {"1.1 B": SHAPES["2GB"], "7 B": SHAPES["14GB"]}
SIZES = {
    "full": Size(
        samples=32,
        tokens=512,
        evaluated=8192,
        new=64,
        shapes=_NAMED,
        layers={name: shape.layers for name, shape in _NAMED.items()},
        prompt=2048,
        steps=64,
        runs=3,
        rounds=20,
        products=((4096, 4096), (11008, 4096), (4096, 11008)),
        large=SHAPES["14GB"],
        depths=(1, 3),
        large_samples=32,
        large_tokens=2048,
    ),
    "cpu": Size(
        samples=8,
        tokens=256,
        evaluated=2048,
        new=32,
        shapes=_NAMED,
        layers={"1.1 B": 2, "7 B": 1},
        prompt=32,
        steps=4,
        runs=1,
        rounds=3,
        products=((2048, 2048), (5632, 2048)),
        large=SHAPES["500MB"],
        depths=(1, 2),
        large_samples=4,
        large_tokens=256,
    ),
    "smallest": Size(
        samples=2,
        tokens=32,
        evaluated=256,
        new=8,
        shapes={"tiny": _TINY},
        layers={"tiny": 2},
        prompt=16,
        steps=4,
        runs=1,
        rounds=2,
        products=((256, 128),),
        large=_TINY,
        depths=(1, 2),
        large_samples=2,
        large_tokens=32,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a check runs.

    Attributes:
        device: as torch names it, `cuda:0` or `cpu`.
        size: a key of SIZES.
        model: the example model.
        work: a folder of the check's own, empty when it begins.
        shared: a folder of all checks; what is there was finished, or is made again by the command
            that makes it.
        peers: a folder of environments of other programs.
    """

    device: str
    size: str
    model: Path
    work: Path
    shared: Path
    peers: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the device is not the CPU in its place."""
        return self.kind != "cpu"

    @property
    def kind(self) -> str:
        """The device without its number, as `generate` takes it."""
        return self.device.partition(":")[0]

    @property
    def amounts(self) -> Size:
        """How much to do."""
        return SIZES[self.size]

    def write(self, path: Path) -> None:
        """Keep the place in a file, for the process that runs the check."""
        path.write_text(json.dumps({name: str(value) for name, value in asdict(self).items()}))


def read_place(path: Path) -> Place:
    """Return the place in a file."""
    values = json.loads(path.read_text())
    paths = {item.name for item in fields(Place) if item.type is Path}
    return Place(
        **{name: Path(value) if name in paths else value for name, value in values.items()}
    )


class Found:
    """What a check finds; each line is in the file when the call that tells it returns."""

    def __init__(self, path: Path, *, on_gpu: bool) -> None:
        """Begin with an empty file.

        Args:
            path: gets a JSON object a line.
            on_gpu: whether bars are judged.
        """
        self._path, self._on_gpu = path, on_gpu
        path.write_bytes(b"")

    def figure(self, what: str, value: float | str, unit: str = "") -> None:
        """Tell a number, or a word such as a version."""
        self._tell("figure", what=what, value=value, unit=unit)

    def claim(self, what: str, *, promised: str, found: str, met: bool) -> None:
        """Tell whether what must hold on every device does."""
        self._tell("claim", what=what, promised=promised, found=found, met=bool(met))

    def bar(self, what: str, *, promised: str, found: str, met: bool) -> None:
        """Tell whether a speed is what was promised; without a GPU that it was not judged."""
        if self._on_gpu:
            self._tell("bar", what=what, promised=promised, found=found, met=bool(met))
        else:
            self.absent(f"{what}: {promised}", ON_A_GPU_ALONE)

    def absent(self, what: str, why: str) -> None:
        """Tell what was not run."""
        self._tell("absent", what=what, why=why)

    def _tell(self, kind: str, **values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")


def read_found(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what a check told, by kind; a last line that was cut off is left out."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[values.pop("kind")].append(values)
    return found


@dataclass(kw_only=True)
class Outcome:
    """What became of a check.

    Attributes:
        name, asks: of the check.
        state: `done`, `failed`, `ended` (it was past its limit) or `not run`.
        seconds: that its process took; None where there was none.
        reason: why it is not done.
        found: what it told, by kind.
    """

    name: str
    asks: str
    state: str
    seconds: float | None = None
    reason: str = ""
    found: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )

    @property
    def missed(self) -> list[str]:
        """Its claims and bars that do not hold, and itself where it failed or was ended."""
        judged = [*self.found["claim"], *self.found["bar"]]
        itself = [f"{self.name}: {self.reason}"] if self.state in ("failed", "ended") else []
        return itself + [f"{self.name}: {line['what']}" for line in judged if not line["met"]]


def write_whole(path: Path, text: str) -> None:
    """Write a file that is the old one or the new one at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
