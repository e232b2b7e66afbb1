"""The verb `generate`: verify, load, and continue prompts.

Reads    the artifact; files of prompts, an adapter, a draft model or Medusa heads that are named
Writes   the texts, with --output
Resumes  nothing
Fails    2 unknown backend or options that do not go together, 3 no tokenizer or prompts that cannot
         be read, 4 a text differs from the reference, 6 a package that a source of prompts needs,
         7 the artifact is damaged
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from quantflow.errors import GateError, UsageError
from quantflow.files.required_signature import RequiredSignature
from quantflow.reporting.progress_line import ProgressLine
from quantflow.reporting.streams import NobodyReads
from quantflow.runtime.generate_job import (
    Beams,
    Contrastive,
    GenerateJob,
    Lookup,
    Rules,
    Sampling,
    Shapes,
    echoed,
)
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.options import QUIET, THREADS, given, job_settings, offline, origins
from quantflow.stages.cli.other_programs import GENERATE
from quantflow.stages.cli.output import show, write_piece
from quantflow.stages.cli.spelling import spelled


@click.command("generate", cls=spelled(GENERATE, texts="--prompt"))
@click.argument("artifact")
@job_settings("generate", GenerateJob)
@THREADS
@QUIET
@offline
def command(artifact: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Continue prompts with ARTIFACT, or with a model that is not quantized.

    ARTIFACT is a folder, a name on the hub (org/name), or a GGUF file; an artifact is verified
    first. docs/generate.md has every way to generate.

    \b
    Example: quantflow generate work/4-export --prompt "def main():" --max-new-tokens 32
             quantflow generate work/4-export --prompts questions.jsonl --column question --chat
             quantflow generate org/name --revision v1 --prompt "def main():"
             quantflow generate work/4-export --prompt "def main():" "class " --num-beams 4
             quantflow generate ./gpt-oss-20b --prompt "def main():" --rounded-inputs
    """
    pieces: list[str] = []
    # the comparison still counts where nobody reads
    judged = (NobodyReads,) if options["reference"] is not None else ()

    def stream(text: str) -> None:
        pieces.append(text)
        if not as_json:
            with suppress(*judged):
                write_piece(text)

    if {"max_length", "max_new_tokens"} <= origins(
        "generate", GenerateJob, click.get_current_context()
    ).keys():
        raise UsageError("generate: --max-length beside --max-new-tokens", "give one of them")
    progress = ProgressLine(quiet=quiet, bars=bars_wanted())
    result = job_from(artifact, options).run(progress, stream=stream)
    if result is None:  # rank 0 has it
        return
    texts = "" if pieces else "\n\n".join(_printed(output, result) for output in result["outputs"])
    show(result, as_json=as_json, text=texts)
    _raise_for_difference(result)


def _printed(output: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    before = echoed(output["prompt"], chat=result["chat"]) if result["echo"] else ""
    return f"{before}{output['text']}"


def job_from(artifact: str, options: Mapping[str, Any]) -> GenerateJob:
    """The job of a command line.

    Raises:
        UsageError: values outside their ranges, or options that do not go together.
    """
    kinds = (GenerateJob, Sampling, Rules, Beams, Contrastive, Lookup, RequiredSignature, Shapes)
    records: dict[type, dict[str, Any]] = {kind: {} for kind in kinds}
    for item, value in given("generate", GenerateJob, options):
        records[item.record][item.path[-1]] = value
    job, sampling = records[GenerateJob], records[Sampling]
    beams, contrastive, lookup = records[Beams], records[Contrastive], records[Lookup]
    if (
        sum(
            (
                "count" in beams,
                "alpha" in contrastive,
                "tokens" in lookup,
                "draft" in job,
                "medusa" in job,
                "mtp" in job,
            )
        )
        > 1
    ):
        raise UsageError(
            "generate: several ways together",
            "choose one of beams, contrastive, assistant, lookup, medusa and mtp",
        )
    if beams and "count" not in beams:
        raise UsageError(
            "generate: options of beams without --num-beams", "give --num-beams, such as 4"
        )
    method: Beams | Contrastive | Lookup | None = None
    if beams:
        method = Beams(**beams)
    elif contrastive:
        method = Contrastive(
            **contrastive, **({"top_k": sampling.pop("top_k")} if "top_k" in sampling else {})
        )
    elif lookup:
        method = Lookup(**lookup)
    job |= {
        "signature": RequiredSignature(**records[RequiredSignature]),
        "shapes": Shapes(**records[Shapes]),
    }
    drawn = (
        Sampling(**sampling)
        if sampling.keys() - {"seed"} and sampling.get("temperature") != 0
        else None
    )  # 0: the likeliest
    return GenerateJob(
        artifact=Path(artifact), method=method, sampling=drawn, rules=Rules(**records[Rules]), **job
    )


def _raise_for_difference(result: Mapping[str, Any]) -> None:
    """Fail where a text is not the reference's.

    Raises:
        GateError: naming how many, and the first prompt.
    """
    differing = result["differing"]
    if differing:
        cause = (
            f"reference: {len(differing)} of {len(result['outputs'])} texts differ, the first "
            f"after {differing[0]!r}"
        )
        raise GateError(cause, "compare the texts, or write a new reference if they are right")
