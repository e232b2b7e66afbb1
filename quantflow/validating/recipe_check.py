"""A recipe whose every mistake that can be seen is seen before the first stage."""

from dataclasses import replace
from pathlib import Path

from quantflow.measuring.merging.grouping import parse_groups
from quantflow.measuring.text import read_documents
from quantflow.measuring.text_sources import text_digest, with_calibration_text
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.models.tokenizer import load_tokenizer
from quantflow.planning import plan
from quantflow.planning.recipe import Recipe
from quantflow.planning.requirements import statistics_for
from quantflow.progress import Progress
from quantflow.sources.models import model_folder
from quantflow.validating.gate import check_gate
from quantflow.validating.validate import check_compute, with_evaluation_text
from quantflow.validating.windows import evaluation_sequences


def resolved(recipe: Recipe, progress: Progress) -> Recipe:
    """A recipe with what its model decides filled in.

    `model` becomes its folder, texts become files. `measure.experts` null becomes `all` where the
    model has experts, an artifact asks for all tokens and statistics are read.

    Raises:
        QuantflowError: an entry does not fit the model, a text is missing.
    """
    folder = model_folder(Path(recipe.model), revision=recipe.revision, progress=progress)
    source = open_source(str(folder))
    graph = graph_for(source.config)
    shapes = {name: info.shape for name, info in source.checkpoint.infos.items()}
    unused = {name: one.info.shape for name, one in source.checkpoint.unused.items()}
    for entry in recipe.quantize:
        plan.resolve(entry, graph, shapes, unused=unused)
    calibration = with_calibration_text(recipe.calibration, progress)
    validate = with_evaluation_text(recipe.validate, progress)
    for path in (calibration.source, validate.text):
        text_digest(Path(str(path)))
    check_gate(validate.gate)
    check_compute(validate, recipe.compute)
    documents = read_documents(str(validate.text), load_tokenizer(str(folder)))
    evaluation_sequences(
        documents, tokens=validate.tokens, sequence_length=validate.sequence_length
    )
    ranks = recipe.measure.ranks
    parse_groups(recipe.unify.groups or [",".join(map(str, range(ranks)))], world=ranks)
    recipe = replace(recipe, model=str(folder), calibration=calibration, validate=validate)
    stats = recipe.measure.stats
    if stats is None:
        stats = statistics_for(recipe.quantize)
    wants_all = any(entry.experts == "all" for entry in recipe.quantize)
    if recipe.measure.experts is not None or not (stats and graph.sparse and wants_all):
        return recipe
    return replace(recipe, measure=replace(recipe.measure, experts="all"))
