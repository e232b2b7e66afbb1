"""A model that quantize opens once, with what becomes of each of its linears."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantflow.models.graph import Graph
from quantflow.models.open import ModelFiles, graph_for, open_files
from quantflow.planning.plan import Plan, resolve
from quantflow.planning.recipe import Quantize
from quantflow.quantizing.job import QuantizeJob
from quantflow.quantizing.mixed_precision.chosen_mixture import ChosenMixture


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model and its plan; both are opened and resolved once and then carried.

    Attributes:
        entry: the artifact's part of the recipe.
        source: the model's files; headers alone were read.
        graph: names of its linears.
        plan: scheme of each linear, transforms and algorithm.
        mixture: the candidates that the plan's schemes were chosen from, where they were chosen by
            their divergence.
    """

    entry: Quantize
    source: ModelFiles
    graph: Graph
    plan: Plan
    mixture: ChosenMixture | None = None

    @property
    def needs_measurement(self) -> bool:
        """Whether the entry cannot be made from the weights alone."""
        if self.entry.linears:  # only what reads nothing rounds named linears; the rest is refused
            return False
        return self.plan.needs_measurement or self.entry.mixed

    @property
    def unused(self) -> Mapping[str, Sequence[int]]:
        """Name -> shape of the source's tensors that no module of the model has."""
        return {name: one.info.shape for name, one in self.source.checkpoint.unused.items()}

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Source tensor name -> shape."""
        return {name: info.shape for name, info in self.source.checkpoint.infos.items()}


def planned(job: QuantizeJob) -> PlannedModel:
    """Open the model of a job, a folder, and resolve the plan of its entry.

    Raises:
        InputError: the model cannot be opened.
        UsageError: the entry does not fit the model.
        UnsupportedError: the family, or what the entry asks of it.
    """
    source = open_files(job.model, linears=job.entry.linears)
    graph = graph_for(source.config)
    shapes = {name: info.shape for name, info in source.checkpoint.infos.items()}
    measured = job.measurement is not None or job.entry.mixed
    unused = {name: one.info.shape for name, one in source.checkpoint.unused.items()}
    plan = resolve(job.entry, graph, shapes, unused=unused, measured=measured, ranks=job.ranks)
    return PlannedModel(entry=job.entry, source=source, graph=graph, plan=plan)
