"""From the values of `generate`'s options to its job."""

from pathlib import Path
from typing import Any

from quantflow.errors import UsageError
from quantflow.runtime.decoding import Beams, Contrastive, Lookup, Rules, Sampling
from quantflow.runtime.generation import GenerateJob

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_RULES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size", "min_length", "min_new_tokens")
_BEAMS: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": "false"}
_PATHS = ("draft", "medusa", "adapter", "reference")


def job_from(artifact: str, values: dict[str, Any]) -> GenerateJob:
    """Return the job of a command line.

    Raises:
        UsageError: values outside their ranges, or options that do not go together.
    """
    given = dict(values)
    beams, alpha, lookup = (given.pop(name) for name in ("num_beams", "penalty_alpha", "prompt_lookup"))
    options = {name: given.pop(name) for name in _BEAMS}
    filters, seed = {name: given.pop(name) for name in _SAMPLING}, given.pop("seed")
    if sum(value is not None for value in (beams, alpha, lookup, given["draft"], given["medusa"])) > 1:
        raise UsageError("generate: several ways together", "choose one of beams, contrastive, assistant, lookup and medusa")
    if beams is None and any(value is not None for value in options.values()):
        raise UsageError("generate: options of beams without --num-beams", "give --num-beams, such as 4")
    method: Beams | Contrastive | Lookup | None = None
    if beams is not None:
        chosen = {name: usual if options[name] is None else options[name] for name, usual in _BEAMS.items()}
        early = {"true": True, "false": False}.get(str(chosen["early_stopping"]), "never")
        method = Beams(count=beams, length_penalty=chosen["length_penalty"], early_stopping=early)
    elif alpha is not None:
        method = Contrastive(alpha=alpha, top_k=4 if filters["top_k"] is None else filters.pop("top_k"))
    elif lookup is not None:
        method = Lookup(tokens=lookup)
    wanted = {name: value for name, value in filters.items() if value is not None}
    rules = Rules(**{name: given.pop(name) for name in _RULES})
    paths: dict[str, Any] = {name: Path(given.pop(name)) for name in _PATHS if given[name] is not None}
    rest = {name: value for name, value in given.items() if name not in _PATHS}
    sampling = Sampling(seed=seed, **wanted) if wanted else None
    return GenerateJob(artifact=Path(artifact), method=method, sampling=sampling, rules=rules, **paths, **rest)
