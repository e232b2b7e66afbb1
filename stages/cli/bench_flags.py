"""The options of `bench ARTIFACT`, and the job that their values make."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]


def timing(command: Command) -> Command:
    """Add the options that say what is timed of an artifact."""
    return functools.reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), command)


_OPTIONS = (
    click.option(
        "-b", "--batch-size", "batch_sizes", type=int, multiple=True, default=[1], show_default=True, help="Also several."
    ),
    click.option("--input-tokens", type=int, default=256, show_default=True, help="Of each prompt; prompts are random."),
    click.option("--new-tokens", type=int, default=32, show_default=True, help="Tokens added to each."),
    click.option("--runs", type=int, default=10, show_default=True, help="Timed batches of each size."),
    click.option("--warmups", type=int, default=1, show_default=True, help="Batches before them that are not counted."),
    click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Go on after end tokens."),
    click.option(
        "--unsorted-percentiles",
        is_flag=True,
        help="Take percentiles from times in the order of the runs, as text-generation-benchmark does.",
    ),
    click.option("--profile", metavar="FILE", help="Write a trace of one more run, for chrome://tracing."),
    click.option(
        "--backend", default="auto", show_default=True, help="auto, reference, a kernel by name, or several: a,b,auto."
    ),
    click.option("--decoder", default="auto", show_default=True, help="lean, transformers, or auto: lean where it can."),
    click.option(
        "--kv-cache",
        metavar="KIND",
        default="auto",
        help="float32, bfloat16, float8 or int8 (default: the artifact's, else --dtype).",
    ),
    click.option("--pack", is_flag=True, help="Keep the weights as kernels want them in ARTIFACT-packed, and load from there."),
    click.option("--device", type=click.Choice(["cpu", "cuda", "hpu"]), default="cpu", show_default=True),
    click.option(
        "--ranks", type=int, default=1, metavar="N", help="Processes that share the model (default 1), or torchrun's."
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts; each run has the next."),
)


def values(options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `quantflow.evaluation.latency.Job`, but for the artifact, from the options' values."""
    names = [option for option in _FIELDS if options.get(option) is not None]
    found = {name: options[name] for name in names} | {"ordered": not options["unsorted_percentiles"]}
    return found if options["profile"] is None else {**found, "profile": Path(options["profile"])}


_FIELDS: tuple[str, ...] = (
    "batch_sizes",
    "input_tokens",
    "new_tokens",
    "runs",
    "warmups",
    "ignore_eos",
    "backend",
    "dtype",
    "decoder",
)
_FIELDS += ("kv_cache", "pack", "device", "ranks", "seed")
