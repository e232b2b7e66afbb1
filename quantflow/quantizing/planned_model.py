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
    """A model and its plan.

    Attributes:
        entry: the recipe's words.
        source: the model's files; headers alone were read.
        graph: its linears.
        plan: what becomes of each.
        mixture: where the plan's schemes were chosen by their divergence, what they were chosen
            from.
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
    plan = resolve(job.entry, graph, shapes, measured=measured, ranks=job.ranks)
    return PlannedModel(entry=job.entry, source=source, graph=graph, plan=plan)
