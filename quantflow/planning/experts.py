"""What becomes of experts that calibration reached too seldom: the policies of a recipe.

    policy     weights, by an algorithm that reads statistics    static input
    error      refused                                           refused
    all        calibrated on every token                         of a measurement that showed every expert every token
    damp       by a Hessian shrunk towards an even one           the widest range among the layer's experts
    rtn        rounded to nearest                                the widest range among the layer's experts
    share_max  not for such algorithms                           the widest range among them, for all experts of the layer

Too seldom is fewer tokens from the router than the recipe's `expert_tokens`, or where it names none

    2 * in_features    for an algorithm that reads statistics: below that GPTQ's output can be worse than that of round to
                       nearest, unless it is damped (benchmarks/expert_tokens.py)
    100                for a static input: of n tokens in random order the next one exceeds the largest with probability 1 / n

What reads no statistics (rtn, hqq, dynamic inputs) has no use for a policy; a transform that cuts
ranges for rtn reads some.
"""

from dataclasses import dataclass

from quantflow.errors import UnsupportedError, UsageError
from quantflow.models.graph import Graph

PER_FEATURE = 2  # tokens that a linear needs whose weights are chosen by statistics of its input


FOR_RANGE = 100  # tokens that a static input needs


_DAMP, SHARE_MAX = "damp", "share_max"


ROUTED = "routed"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What becomes of experts that got too few tokens.

    Attributes:
        name: error, all, damp, rtn or share_max.
        tokens: how many an expert needs; None is what is said above.
        weights: the algorithm reads statistics.
        inputs: some inputs are static.
    """

    name: str = "error"
    tokens: int | None = None
    weights: bool = False
    inputs: bool = False

    def needed(self, features: int) -> int:
        """Return how many tokens a linear of so many input features needs."""
        if self.tokens is not None:
            return self.tokens
        return max(PER_FEATURE * features if self.weights else 0, FOR_RANGE if self.inputs else 0)


def policy_for(
    name: str, *, policy: str, tokens: int | None, weights: bool, inputs: bool
) -> Policy | None:
    """Return the policy of an artifact of a mixture, None where its experts are quantized without statistics.

    Args:
        name: of the artifact.
        policy: the recipe's `experts`.
        tokens: its `expert_tokens`.
        weights: the algorithm reads statistics of experts' inputs.
        inputs: experts have static inputs.

    Raises:
        UsageError: share_max, which is about inputs, with an algorithm that reads statistics.
    """
    if policy == SHARE_MAX and weights:
        raise UsageError(
            f"{name}: experts share_max with an algorithm that reads statistics of each expert's "
            "inputs",
            "share_max is about static inputs alone; use error, all, damp or rtn",
        )
    return (
        Policy(name=policy, tokens=tokens, weights=weights, inputs=inputs)
        if weights or inputs
        else None
    )


def refuse_team(name: str, graph: Graph, *, ranks: int) -> None:
    """Refuse several ranks that would run the layers of a mixture together.

    Raises:
        UnsupportedError: they would have to tell each other which tokens reached which expert.
    """
    if graph.sparse:
        raise UnsupportedError(
            f"{name}: a {graph.family.model_type} on {ranks} ranks; its experts are calibrated "
            "by one process",
            "use --ranks 1",
        )


def fed_by(policy: Policy | None) -> str:
    """Return which tokens an expert is shown while an algorithm's statistics are collected: `routed` to it, or `all`."""
    return "all" if policy is not None and policy.weights and policy.name == "all" else ROUTED
