"""HTTP over the batching engine: an artifact behind TGI's routes and OpenAI's.

    settings.py     the settings of `quantflow serve`: limits with TGI's names, addresses, keys
    process.py      the process: model, port, signals, the end
    app.py          the application: routes behind the key, the Host header and CORS
    http.py         a route: body in, JSON or events out, clients that go away or are slow
    bodies.py       the fields of requests; fields.py: those of other servers, and their fate
    asked.py        a body as one request, whatever server's names it has
    json_text.py    JSON in steps that let other threads run; threads.py: the threads
    characters.py   how long a text of N tokens can be, so that longer ones are refused first
    validation.py   refusals of their values, in TGI's order and words; errors.py: their statuses
    tgi.py          TGI's routes; openai.py: OpenAI's, with openai_answers.py and tools.py
    parsers/        calls of tools and reasoning in answers, a module for each family of models
    generation.py   one prompt answered: checked, submitted, its tokens with their text (text.py)
    grammar.py      grammars of texts, as masks; schemas.py: JSON schemas as people write them
    medusa_model.py heads that are named in a model's place
    vllm.py         vLLM's own server in place of ours
    models.py       models by name, each with an engine, loaded on demand
    request_log.py  ids of requests, and their lines in the log
    metrics.py      /metrics; openapi.py: /openapi.json; site.py: the state that routes share

Starlette and uvicorn carry it. FastAPI would add 0.2 s of imports to a start that may take 3, and
its description of routes is 70 lines here. h11 parses HTTP: it bounds headers, which httptools does
not. uvicorn takes uvloop's event loop where it is installed: the loop runs on the cores that
compute, and uvloop's needs them less.
"""

from dataclasses import replace
from pathlib import Path

from quantflow.errors import UnsupportedError, extra
from quantflow.progress import SILENT, Progress
from quantflow.server import vllm
from quantflow.server.medusa_model import with_base
from quantflow.server.settings import ServeJob
from quantflow.sources.models import model_folder

__all__ = ["ServeJob", "serve", "vllm_command"]


def vllm_command(job: ServeJob, *, progress: Progress = SILENT) -> list[str]:
    """The command that `engine="vllm"` would start.

    Raises:
        QuantflowError: the artifact or an option does not suit vLLM.
    """
    return vllm.command_of(in_folders(job, progress))


def in_folders(job: ServeJob, progress: Progress) -> ServeJob:
    """The job with folders as models: those on the hub are downloaded, GGUF files imported.

    Medusa heads in a model's place are served with the model that they are for.

    Raises:
        QuantflowError: there is no such model, or it cannot be used.
    """
    artifact = model_folder(job.artifact, revision=job.revision, progress=progress)
    job = with_base(job, artifact)
    if job.medusa == artifact:
        artifact = model_folder(job.artifact, progress=progress)
    pairs = [pair.partition("=")[::2] for pair in job.models]
    models = tuple(
        f"{name}={model_folder(Path(model), progress=progress)}" for name, model in pairs
    )
    return replace(job, artifact=artifact, models=models)


def serve(job: ServeJob, *, progress: Progress = SILENT) -> None:
    """Serve an artifact until a signal comes.

    Args:
        job: settings of the server.
        progress: receiver of the lines about what is served and where.

    Raises:
        UnsupportedError: the packages of the extra `serve` are not installed.
        QuantflowError: the artifact cannot be served, the port is taken, or the engine died.
    """
    job = in_folders(job, progress)
    if job.engine == "vllm":
        vllm.start(job)
        return
    try:
        from quantflow.server.process import run
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"serve: {error.name} is not installed", extra("serve")) from error
    run(job, progress)
