"""The verb `compare`: any models beside one source, in one table, one page and one plot.

Reads    the source, or llama.cpp's base of its log-probabilities; candidates of any program; text
Writes   <output>/compare.json, compare.html and compare.svg, and <output>.log; llama.cpp's base
Resumes  a comparison of the same inputs is left alone; one that was stopped goes on with its layer
Fails    3 a text, a base or a candidate that cannot be used; 5 too little memory or disk
"""

from pathlib import Path
from typing import Any

import click

from quantflow.stages.cli.environment import server_key
from quantflow.stages.cli.options import (
    FOLDER,
    QUIET,
    THREADS,
    job_settings,
    job_values,
    offline,
)
from quantflow.stages.cli.output import reporting, show, table
from quantflow.validating.compare_job import CompareJob, is_address


@click.command("compare")
@click.argument("source")
@click.argument("candidates", nargs=-1)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=FOLDER,
    help="Folder of the page (default: <source>-compare).",
)
@click.option(
    "--write-base",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write SOURCE's log-probabilities as llama.cpp's base of a KL divergence, and compare "
    "with that file.",
)
@job_settings("compare", CompareJob)
@click.option(
    "--force", is_flag=True, help="Replace a finished result that was made from other inputs."
)
@THREADS
@QUIET
@click.option("-v", "--verbose", is_flag=True, help="Progress from the first step on.")
@offline
def command(
    source: str,
    candidates: tuple[str, ...],
    output: Path | None,
    write_base: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare CANDIDATES with SOURCE by the divergence of their predictions over one text.

    A candidate is an artifact, a folder that another program quantized, a model or a GGUF file; all
    run through the same code, over the same windows. SOURCE is a model, or a file of
    log-probabilities that `llama-perplexity --save-all-logits` or --write-base wrote: then the
    figures are those of `llama-perplexity --kl-divergence`. A candidate may also be the address of
    a server that has OpenAI's /v1/completions, such as vLLM's or `quantflow serve`; it tells of the
    likeliest tokens alone, so its divergence is a bound from below. Each further candidate is also
    compared with the first one, pair by pair. Nothing is judged: `validate` has a gate.

    \b
    Example: quantflow compare ./llama work/4-export ./llama-awq llama.Q4_K_M.gguf
             quantflow compare ./llama work/4-export --write-base llama.kld --text heldout.txt
             quantflow compare llama.kld llama.Q4_K_M.gguf llama.IQ4_NL.gguf
             quantflow compare ./llama work/4-export http://localhost:8000#name
             quantflow compare ./gpt-oss-20b ./gpt-oss-20b --rounded-inputs
    """
    from quantflow.validating import compare_page  # here: it imports the plots

    job = CompareJob(
        source=Path(source),
        candidates=tuple(Path(each) for each in candidates if not is_address(each)),
        servers=tuple(each for each in candidates if is_address(each)),
        server_key=server_key(),
        output=output,
        write_base=write_base,
        force=force,
        **job_values("compare", CompareJob, options),
    )
    with reporting(options, job.folder) as progress:
        result = job.run(progress)
    parts = []
    if result.values["candidates"]:
        parts.append(table(compare_page.COLUMNS, compare_page.cells(result.values)))
    if result.values["pairs"]:
        parts.append(table(compare_page.PAIRS, compare_page.pair_cells(result.values)))
    parts.append(f"page: {result.folder / 'compare.html'}")
    if write_base is not None:
        parts.append(
            f"base: {write_base}\n"
            f"next: llama-perplexity --kl-divergence --kl-divergence-base {write_base} -m FILE.gguf"
        )
    show(result.values, as_json=as_json, text="\n\n".join(parts))
