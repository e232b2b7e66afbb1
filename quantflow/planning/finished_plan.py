"""The plan of a finished quantize folder, as its quantize.json spells it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from quantflow.algorithms import REFIT, TUNE
from quantflow.core.float8 import FLAVOURS
from quantflow.core.kv import kv_words
from quantflow.core.scale_rules import Rule
from quantflow.core.scheme import FLOAT8_FLAVOURS, LinearScheme, TensorScheme, scheme_words
from quantflow.errors import InputError
from quantflow.files.canonical import read_json
from quantflow.files.schema import check
from quantflow.planning.head import HeadPlan
from quantflow.planning.mtp import MtpPlan
from quantflow.planning.plan import Plan
from quantflow.planning.recipe import SignRound, Tune

SUMMARY = "quantize.json"
_AGAIN = "quantize the model again"


class _Source(TypedDict):
    folder: str
    name: str
    revision: str | None


class _Recipe(TypedDict):
    name: str
    scheme: str


class _Tensor(TypedDict):
    kind: str
    num_bits: int
    granularity: str
    group_size: NotRequired[int | None]
    symmetric: NotRequired[bool]
    dynamic: NotRequired[bool]
    float8: NotRequired[str]
    scale_format: NotRequired[str]
    scale_rounding: NotRequired[str]
    observer: NotRequired[str]
    block_type: NotRequired[str | None]


class _Linear(TypedDict):
    name: str
    weights: _Tensor
    input: _Tensor | None
    layout: str
    algorithm: NotRequired[str]
    transforms: list[str]
    rotation: NotRequired[int | None]


class _Head(TypedDict):
    linear: str
    scheme: _Linear
    tensor: str
    algorithm: str


class _Mtp(TypedDict):
    schemes: dict[str, _Linear]
    algorithm: str


class _Plan(TypedDict):
    schemes: dict[str, _Linear | None]
    head: NotRequired[_Head | None]
    mtp: NotRequired[_Mtp | None]
    kv_cache: NotRequired[_Tensor | None]
    algorithm: str
    transforms: list[dict[str, Any]]


class _Summary(TypedDict):
    source: _Source
    recipe: _Recipe
    plan: _Plan
    measurement: dict[str, Any] | None
    proof: Literal["canary", "tensors"]


def read_summary(folder: Path) -> dict[str, Any]:
    """Content of quantize.json in a finished quantize folder, its schemes in full.

    `plan_from` takes it.

    Raises:
        InputError: the file cannot be read, or holds no plan.
    """
    path = folder / SUMMARY
    summary: dict[str, Any] = read_json(path)
    check(summary, _Summary, where=str(path), remedy=_AGAIN)
    try:
        plan = plan_from(summary)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: plan: {type(error).__name__}: {error}", _AGAIN) from error
    schemes = {
        name: None if scheme is None else scheme_words(scheme)
        for name, scheme in plan.schemes.items()
    }
    head = {} if plan.head is None else {"head": plan.head.as_json()}
    mtp = {} if plan.mtp is None else {"mtp": plan.mtp.as_json()}
    return {**summary, "plan": {**summary["plan"], "schemes": schemes, **head, **mtp}}


def plan_from(summary: Mapping[str, Any]) -> Plan:
    """The plan that a finished quantize folder followed, without its needs of a measurement.

    Args:
        summary: content of quantize.json.
    """
    plan = summary["plan"]
    return Plan(
        name=summary["recipe"]["name"],
        schemes={
            name: None if data is None else scheme_from(data)
            for name, data in plan["schemes"].items()
        },
        algorithm=plan["learned"]["start"] if "learned" in plan else plan["algorithm"],
        learned=SignRound(**plan["learned"]) if "learned" in plan else None,
        tune=Tune(**plan[TUNE]) if TUNE in plan else None,
        refit=plan.get(REFIT, False),
        transforms=(),
        needs=frozenset(),
        file_to_file=summary["proof"] == "tensors",
        head=head_from(plan),
        mtp=mtp_from(plan),
        kv_cache=kv_scheme_from(plan),
    )


def kv_scheme_from(plan: Mapping[str, Any]) -> TensorScheme | None:
    """Scheme of keys and values, from the plan in quantize.json; None leaves them as they are."""
    data = plan.get("kv_cache")
    return None if data is None else tensor_scheme_from(data)


def kv_words_of(plan: Mapping[str, Any]) -> str | None:
    """Scheme of keys and values in words, `FP8 per_head`; None where they stay as they are."""
    scheme = kv_scheme_from(plan)
    return None if scheme is None else kv_words(scheme)


def float8_of(plan: Plan) -> dict[str, Any] | None:
    """Float8 flavour of weights, inputs and caches and its largest value; None without float8."""
    parts = [plan.kv_cache]
    for scheme in plan.quantized.values():
        parts += [scheme.weights, scheme.input]
    flavours = sorted(
        {
            part.float8
            for part in parts
            if part is not None and part.kind == "float" and part.float8 in FLOAT8_FLAVOURS
        }
    )
    return {"flavour": flavours[0], "largest": FLAVOURS[flavours[0]].largest} if flavours else None


def head_from(plan: Mapping[str, Any]) -> HeadPlan | None:
    """Plan of the head, from a plan in quantize.json or a manifest; None leaves it as it is."""
    head = plan.get("head")
    return None if head is None else HeadPlan(**{**head, "scheme": scheme_from(head["scheme"])})


def mtp_from(plan: Mapping[str, Any]) -> MtpPlan | None:
    """Plan of MTP layers, from a plan in quantize.json; None leaves them as they are."""
    mtp = plan.get("mtp")
    if mtp is None:
        return None
    schemes = {name: scheme_from(data) for name, data in mtp["schemes"].items()}
    return MtpPlan(schemes=schemes, algorithm=mtp["algorithm"])


def scheme_from(data: Mapping[str, Any]) -> LinearScheme:
    """The scheme of a linear that quantize.json spells."""
    inputs = data["input"]
    return LinearScheme(
        **{
            **data,
            "weights": tensor_scheme_from(data["weights"]),
            "input": None if inputs is None else tensor_scheme_from(inputs),
            "transforms": tuple(data["transforms"]),
        }
    )


def tensor_scheme_from(data: Mapping[str, Any]) -> TensorScheme:
    """The scheme of one tensor that quantize.json spells."""
    rule = data.get("scale_rule")
    if rule is None:
        return TensorScheme(**data)
    exponents = rule["exponents"]
    scale_rule = Rule(**{**rule, "exponents": None if exponents is None else tuple(exponents)})
    return TensorScheme(**{**data, "scale_rule": scale_rule})
