"""A folder of Medusa heads that is named in a model's place: its config.json names the model.

medusa_num_heads         heads of the folder
base_model_name_or_path  the model that they were trained for: a folder, or a name on the hub
"""

from dataclasses import replace
from pathlib import Path

from quantflow.errors import InputError, UsageError
from quantflow.files.canonical import read_json
from quantflow.files.checkpoint import CONFIG
from quantflow.files.origin import origin_of
from quantflow.server.settings import ServeJob

HEADS, BASE = "medusa_num_heads", "base_model_name_or_path"


def with_base(job: ServeJob, folder: Path) -> ServeJob:
    """The job with the model that heads are for, where `folder` holds heads; else as it is.

    Args:
        job: settings of the server.
        folder: folder of what it names as its model.

    Raises:
        InputError: the heads' config.json names no model, or no number of heads.
        UsageError: more tokens are guessed than there are heads, or other guesses are asked for.
    """
    path = folder / CONFIG
    config = read_json(path) if path.is_file() else {}
    if not isinstance(config, dict) or HEADS not in config:
        return job
    heads, base = config[HEADS], config.get(BASE)
    if type(heads) is not int or heads < 1 or not isinstance(base, str) or not base:
        raise InputError(
            f"{path}: {HEADS}={heads!r}, {BASE}={base!r}",
            "name the model that the heads are for, and their number",
        )
    if job.medusa is not None:
        raise UsageError(f"medusa={job.medusa}: {folder} has heads itself", "give one of them")
    if isinstance(job.speculate, int) and job.speculate > heads:
        raise UsageError(
            f"speculate={job.speculate}: {folder} has {heads} heads", f"use {heads} or less"
        )
    name = job.name or origin_of(folder).name
    return replace(job, artifact=Path(base), medusa=folder, name=name, revision=None)
