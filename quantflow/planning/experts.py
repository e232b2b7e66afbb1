"""Policies of a recipe for experts that calibration reached with too few tokens.

    policy     weights, by an algorithm that reads statistics    static input
    error      refused                                           refused
    all        calibrated on every token                         needs a measurement of all tokens
    damp       a Hessian shrunk towards an even one              the layer's widest range
    rtn        rounded to nearest                                the layer's widest range
    share_max  not for such algorithms                           the layer's widest, for all experts

`all` takes static inputs from a measurement that showed every expert every token. The layer's
widest range is the widest among the layer's experts.

An expert has too few when the router sent it fewer than the recipe's `expert_tokens`, or without
that setting fewer than

    2 * in_features    for an algorithm that reads statistics: below that GPTQ's output can be worse
                       than that of round to nearest, unless it is damped
                       (benchmarks/expert_tokens.py)
    100                for a static input: of n tokens in random order the next one exceeds the
                       largest with probability 1 / n

Methods that read no statistics (rtn, hqq, dynamic inputs) need no policy; a transform that cuts
ranges for rtn reads some.
"""

from dataclasses import dataclass

from quantflow.errors import UsageError

PER_FEATURE = 2  # tokens per input feature where weights are rounded by statistics of the input
FOR_RANGE = 100  # tokens that a static input needs
REFUSING = "error"  # before the first layer
SHARE_MAX = "share_max"
ROUTED = "routed"
# Most input features of experts that are quantized side by side, each by one worker: a whole
# Hessian of so many, 64 MiB, is little beside the forward of a sequence, which a worker has too.
SIDE_BY_SIDE = 4096


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The treatment of experts that got too few tokens.

    Attributes:
        name: error, all, damp, rtn or share_max.
        tokens: tokens that an expert needs; None follows the rule in this module's header.
        weights: whether the algorithm reads statistics.
        inputs: whether some inputs are static.
    """

    name: str = "error"
    tokens: int | None = None
    weights: bool = False
    inputs: bool = False

    def needed(self, features: int) -> int:
        """Tokens that a linear of so many input features needs."""
        if self.tokens is not None:
            return self.tokens
        return max(PER_FEATURE * features if self.weights else 0, FOR_RANGE if self.inputs else 0)


def policy_for(
    name: str, *, policy: str, tokens: int | None, weights: bool, inputs: bool
) -> Policy | None:
    """The policy for the experts of an artifact; None where they are quantized without statistics.

    Args:
        name: name of the artifact, for the message.
        policy: the recipe's `experts`.
        tokens: the recipe's `expert_tokens`.
        weights: whether the algorithm reads statistics of experts' inputs.
        inputs: whether experts have static inputs.

    Raises:
        UsageError: the policy is share_max, which concerns inputs, and the algorithm reads
            statistics.
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


def fed_by(policy: Policy | None, *, ranges: bool = False) -> str:
    """Tokens that an expert sees while statistics are collected: those `routed` to it, or `all`.

    Args:
        policy: the policy of the artifact's experts.
        ranges: whether ranges of inputs are observed there too, and not taken from a measurement.
    """
    observed = policy is not None and (policy.weights or ranges)
    return "all" if observed and policy is not None and policy.name == "all" else ROUTED
