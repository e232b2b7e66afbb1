"""The verb `unify`, stage 3.

Reads    the rank folders of a measurement or of `quantize --ranks`, or the files of Gaudi's toolkit
Writes   <o>/rank-RRR-of-GGG/, one per group; shards of one group become <o> itself; and <o>.log
Resumes  a finished result of the same ranks and groups is left alone
Fails    2 groups that no card would hold; 3 missing, duplicate, foreign or damaged ranks; 5 the
         folder is held
"""

from pathlib import Path
from typing import Any

import click

from quantflow.planning.recipe import recipe_from
from quantflow.stages.cli.options import FOLDER, common, recipe_data, recipe_flags, recipe_settings
from quantflow.stages.cli.other_programs import UNIFY
from quantflow.stages.cli.output import reporting, show, show_job, table, then
from quantflow.stages.cli.spelling import spelled
from quantflow.unifying.job import UnifyJob


@click.command("unify", cls=spelled(UNIFY))
@recipe_settings("unify")
@click.option(
    "--ranks", type=int, metavar="R", help="R groups of neighbouring ranks, instead of -g."
)
@click.option(
    "--expand",
    type=int,
    metavar="N",
    help="Make N ranks of one, instead of merging.",
)
@click.option(
    "-m",
    "--measurement",
    "--measurements",
    "measurement",
    metavar="DIR",
    required=True,
    help="Folder of `measure --ranks N` or `quantize --ranks N`, or Gaudi's own files.",
)
@click.option(
    "-o",
    "--output",
    "--out",
    "output",
    metavar="DIR",
    type=FOLDER,
    required=True,
    help="Folder of the merged ranks.",
)
@click.option(
    "--model",
    metavar="DIR",
    help="Source of quantized shards (default: where quantize read it).",
)
@click.option(
    "--allow-missing",
    is_flag=True,
    help="Go on without missing replicas, which the result names.",
)
@click.option(
    "--expert-parallel/--no-expert-parallel",
    "-u/ ",
    "--use-expert-paral/ ",
    "expert_parallel",
    default=None,
    help="Cards of a mixture hold some experts each, or a part of each: Gaudi's, and of --expand.",
)
@click.argument("more_groups", metavar="[RANKS]...", nargs=-1)
@common
def command(
    groups: tuple[str, ...],
    more_groups: tuple[str, ...],
    measurement: str,
    output: Path,
    settings: tuple[str, ...],
    recipe: str | None,
    **shared: Any,
) -> None:
    """Stage 3: merge ranks of a measurement, or quantized shards.

    Measurements are merged before quantize, shards of `quantize --ranks` after it. Prints the rule
    of each statistic or tensor.

    \b
    Example: quantflow unify -g 0123 4567 -m work/1-measure -o work/3-unify     eight ranks into two
             quantflow unify --ranks 2 -m work/1-measure -o work/3-unify         the same
             quantflow unify --expand 4 -m work/1-measure -o work/3-unify        one rank into four
             quantflow unify -u --expand 4 -m work/1-measure -o work/3-unify     four with experts
             quantflow unify -m work/shards -o work/2-quantize                   shards of quantize
             quantflow unify -g 0123 4567 -m hqt_output -o work/3-unify          Gaudi's files
             quantflow unify -u --ranks 1 -m DIR/g2 -o work/3-unify              some experts each
    """
    flags, _ = recipe_flags("unify", {**shared, "groups": (*groups, *more_groups)})
    values = recipe_from(recipe_data(recipe, settings, {"model": "unused", **flags}))
    # flags win over what the recipe says
    counted = shared["ranks"] is not None or shared["expand"] is not None
    job = UnifyJob(
        measurement=Path(measurement),
        output=output,
        groups=(*groups, *more_groups) if counted else tuple(values.unify.groups or ()),
        ranks=shared["ranks"],
        expand=shared["expand"],
        allow_missing=shared["allow_missing"],
        expert_parallel=shared["expert_parallel"],
        model=None if not shared["model"] else Path(shared["model"]),
        force=shared["force"],
    )
    if shared["dry_run"]:
        show_job(job, as_json=shared["as_json"])
        return
    with reporting(shared, output) as progress:
        result = job.run(progress)
    text = f"{table(*result.table())}\n{result.summary['folder']}"
    show(result.summary, as_json=shared["as_json"], text=text)
    if (result.folder / "quantize.json").is_file():
        then("export", result.folder, "-o", "DIR", shared=shared)
    elif result.summary.get("mesh", {}).get("world") == 1:
        words = ("--scheme", "W4A16", "--measurement", result.folder)
        then("quantize", "MODEL", "-o", "DIR", *words, shared=shared)
