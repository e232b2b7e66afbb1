"""The meaning of a recipe's entry for any model: schemes, algorithm, transforms, statistics."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantflow.algorithms import (
    ALGORITHMS,
    BLOCK_ALGORITHMS,
    COMBINATIONS,
    LEARNING,
    REFIT,
    Combination,
    rtn_mse,
    supports_of,
)
from quantflow.core.scheme import (
    LinearScheme,
    preset,
    with_float8,
    with_group_size,
    with_input_observer,
    with_scale_method,
    with_scale_rounding,
)
from quantflow.errors import UsageError, nearest
from quantflow.numerics.statistics import COUNT
from quantflow.observers import observers_for
from quantflow.observers.amax import AMAX, AmaxObserver
from quantflow.observers.channel_amax import CHANNEL_AMAX
from quantflow.observers.fisher import FisherObserver
from quantflow.observers.gradient import GRADIENT_SUM as GRADIENTS
from quantflow.observers.hessian import HESSIAN_SUM
from quantflow.observers.histogram import COUNTS
from quantflow.observers.min_max import MAX_VAL, MIN_VAL
from quantflow.observers.rows import NAME as ROWS
from quantflow.planning.compatibility import KNOWN, check_transforms
from quantflow.planning.experts import REFUSING
from quantflow.planning.recipe import (
    CHOICE,
    HeadSettings,
    MtpSettings,
    Override,
    Quantize,
    SignRound,
    Tune,
)
from quantflow.transforms import ROTATIONS, smoothquant

GRADIENT_SUM = GRADIENTS.name  # the one statistic that algorithms read of a linear's output


def entries_of(text: str) -> tuple[Quantize, ...]:
    """The entries that `W4A16:gptq,W4A16@4.25,FP8` means.

    The algorithm stands after a colon; without one it is the scheme's usual algorithm. `@4.25`
    chooses schemes for so many bits per weight, with zero points where the named scheme has them.

    Raises:
        UsageError: a scheme is unknown, one stands twice, or no number follows @.
    """
    entries = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        rest, at, target = word.partition("@")
        scheme, _, algorithm = rest.partition(":")
        try:
            bits = float(target) if at else None
        except ValueError as error:
            raise UsageError(
                f"schemes {text!r}: {target!r} is no number of bits", "write W4A16@4.25"
            ) from error
        name = word.lower().replace(":", "-").replace("@", "-at-")
        entries.append(
            Quantize(name=name, scheme=scheme, algorithm=algorithm or None, target_bpw=bits)
        )
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names) or not names:
        raise UsageError(
            f"schemes {text!r}: {len(names)} of them, {len(set(names))} different",
            "name each scheme once",
        )
    return tuple(entries)


def statistics_for(entries: Sequence[Quantize]) -> tuple[str, ...]:
    """Observers that measure has to run for all of these entries, possibly none.

    Statistics that quantize collects itself are left out; they need the token ids alone.

    Raises:
        UsageError: a scheme, algorithm or transform is unknown.
    """
    each = [needs_of(entry, _schemes_named(entry)) for entry in entries]
    needs = frozenset().union(*(needs - seen_in_quantize(needs) for needs in each))
    # the amax of keys and values, which the caches' scales need, is measured wherever layers run
    if any(entry.kv_cache is not None for entry in entries):
        needs |= {AMAX.name}
    return observers_for(needs)


def counts_in_measure(entries: Sequence[Quantize]) -> bool:
    """Whether measure counts the tokens that a mixture's router sends to each expert.

    It does unless every entry counts them in quantize, in the pass that collects Hessians or
    gradients anyway, and has a policy that acts on one layer at a time. `error` does not: it
    refuses before the first layer. Without entries nobody knows who reads the measurement.

    Raises:
        UsageError: an algorithm or transform is unknown.
    """
    return not entries or not all(map(_counts_in_quantize, entries))


def _counts_in_quantize(entry: Quantize) -> bool:
    learns = learned_of(entry) is not None or tune_of(entry) is not None
    hessians = HESSIAN_SUM.name in needs_of(entry, _schemes_named(entry))
    return entry.experts != REFUSING and (hessians or learns)


def seen_in_quantize(needs: frozenset[str]) -> frozenset[str]:
    """The part of an entry's statistics that quantize collects itself from the calibration text.

    Hessians and rows live for one layer. Where both are collected, all of the text runs. The maxima
    of the channels, which a search reads beside its rows, are then collected on the way, so that a
    measurement for the same algorithm without a search is enough.
    """
    alone = {HESSIAN_SUM.name, ROWS}
    # ranges of static inputs come from a measurement, and then the channels' maxima do too
    ranges = {AMAX.name, MIN_VAL.name, MAX_VAL.name, COUNTS.name}
    return needs & (alone | {CHANNEL_AMAX.name} if alone <= needs and not needs & ranges else alone)


def _schemes_named(entry: Quantize) -> list[LinearScheme]:
    return [base_of(entry), *(override_of(entry, override) for override in entry.overrides)]


def scheme_of(name: str, group_size: int | None) -> LinearScheme:
    """The scheme that a recipe means by a name and a group size; None is the preset's.

    Raises:
        SchemeError: no preset has that name, or it has no groups.
    """
    return preset(name) if group_size is None else with_group_size(preset(name), group_size)


def base_of(entry: Quantize) -> LinearScheme:
    """Scheme of an entry's linears, with its settings of float8, scales and static inputs applied.

    Raises:
        SchemeError: see `scheme_of`; or a setting of float8 or of static inputs stands beside a
            scheme that has none.
    """
    scheme = scheme_of(entry.scheme, entry.group_size)
    if entry.float8 is not None:
        scheme = with_float8(scheme, entry.float8)
    if entry.scale_rounding is not None:
        scheme = with_scale_rounding(scheme, entry.scale_rounding)
    if entry.scale_method is not None:
        scheme = with_scale_method(
            scheme, entry.scale_method, arithmetic=entry.scale_arithmetic or "exact"
        )
    return (
        scheme
        if entry.input_observer is None
        else with_input_observer(scheme, entry.input_observer)
    )


def override_of(entry: Quantize, override: Override | HeadSettings | MtpSettings) -> LinearScheme:
    """The scheme of an override, the head or MTP layers.

    It has the entry's other settings as far as they fit.

    Raises:
        SchemeError: see `scheme_of`.
    """
    scheme = scheme_of(override.scheme, override.group_size)
    if scheme.layout == "float-quantized":
        scheme = scheme if entry.float8 is None else with_float8(scheme, entry.float8)
        scheme = (
            scheme
            if entry.scale_rounding is None
            else with_scale_rounding(scheme, entry.scale_rounding)
        )
    static = scheme.input is not None and scheme.input.measured
    if static and scheme.weights.granularity == "per_tensor" and entry.scale_method is not None:
        scheme = with_scale_method(
            scheme, entry.scale_method, arithmetic=entry.scale_arithmetic or "exact"
        )
    return (
        with_input_observer(scheme, entry.input_observer)
        if static and entry.input_observer is not None
        else scheme
    )


def algorithm_of(entry: Quantize) -> str:
    """The algorithm that quantizes linears that share an input, a key of ALGORITHMS.

    The entry names it, or its scheme has a usual one; beside an importance matrix the usual one is
    rtn_mse, which reads it. A combination chooses one of the others; an
    algorithm that learns starts from one.

    Raises:
        UsageError: the algorithm is unknown.
    """
    scheme = preset(entry.scheme)
    learned = learned_of(entry)
    usual = scheme.algorithm if entry.imatrix is None else rtn_mse.NAME
    algorithm = entry.algorithm or usual
    if learned is not None:
        if learned.start not in ALGORITHMS:
            remedy = nearest(learned.start, list(ALGORITHMS))
            raise UsageError(
                f"{entry.name}: {algorithm}: start={learned.start!r} is no algorithm to start from",
                remedy,
            )
        return learned.start
    if (combination := _combination_of(entry)) is not None:
        return combination.algorithm(scheme.weights)
    if algorithm not in ALGORITHMS:
        names = [*ALGORITHMS, *BLOCK_ALGORITHMS, *COMBINATIONS]
        raise UsageError(
            f"{entry.name}: algorithm {algorithm!r} is unknown", nearest(algorithm, names)
        )
    return algorithm


def learned_of(entry: Quantize) -> SignRound | None:
    """Settings of an entry's learned rounding; None where its algorithm does not learn.

    Raises:
        UsageError: the settings stand beside another algorithm, or beside what does not go with it.
    """
    if entry.algorithm not in BLOCK_ALGORITHMS:
        if entry.signround is not None:
            raise UsageError(
                f"{entry.name}: signround beside algorithm "
                f"{entry.algorithm or preset(entry.scheme).algorithm}",
                f"give `algorithm: {LEARNING}`, or leave {LEARNING} out",
            )
        return None
    supports = supports_of(entry.algorithm)
    if entry.quantized_inputs is not None and supports.layer_inputs is not None:
        raise supports.layer_inputs.error(
            f"{entry.name}: quantized_inputs={entry.quantized_inputs} with {entry.algorithm}"
        )
    if entry.mixed and supports.chosen_schemes is not None:
        raise supports.chosen_schemes.error(f"{entry.name}: {CHOICE} with {entry.algorithm}")
    return entry.signround or SignRound()


def tune_of(entry: Quantize) -> Tune | None:
    """Settings for tuning an entry's scales end to end; None where they are not tuned."""
    combination = _combination_of(entry)
    if (asked := entry.tune) is not None:
        batch = asked.batch if combination is None else combination.sequences
        named = replace(asked, sequences=batch) if asked.sequences is None else asked
        return named if asked.steps else None
    if combination is None or not combination.tunes(
        preset(entry.scheme), rotated=_rotated(entry), refits=refit_of(entry)
    ):
        return None
    return Tune(steps=combination.steps, sequences=combination.sequences)


def refit_of(entry: Quantize) -> bool:
    """Whether an entry's weights are fitted to the inputs of the quantized model.

    Raises:
        UsageError: they are to be, and the algorithm reads no Hessian or learns, or the recipe
            chooses the inputs that calibrate a layer.
    """
    algorithm, learned = algorithm_of(entry), learned_of(entry)
    if entry.refit is None:
        combination = _combination_of(entry)
        return (
            combination is not None
            and combination.refits(preset(entry.scheme))
            and entry.quantized_inputs is None
        )
    if not entry.refit:
        return False
    refusal = supports_of(REFIT).layer_inputs
    if entry.quantized_inputs is not None and refusal is not None:
        raise refusal.error(f"{entry.name}: quantized_inputs={entry.quantized_inputs} with {REFIT}")
    if learned is not None or HESSIAN_SUM.name not in ALGORITHMS[algorithm].NEEDS:
        reading = [name for name, of in ALGORITHMS.items() if HESSIAN_SUM.name in of.NEEDS]
        raise UsageError(
            f"{entry.name}: {REFIT} with algorithm {LEARNING if learned else algorithm}",
            f"choose {', '.join(reading)}, good or best, or leave refit out",
        )
    return True


def _combination_of(entry: Quantize) -> Combination | None:
    return COMBINATIONS.get(entry.algorithm or preset(entry.scheme).algorithm)


def _rotated(entry: Quantize) -> bool:
    return any(name in ROTATIONS for name, _ in transforms_of(entry))


def needs_of(entry: Quantize, schemes: Sequence[LinearScheme]) -> frozenset[str]:
    """Statistics that an entry needs.

    Args:
        entry: entry of the recipe.
        schemes: schemes of its linears.

    Raises:
        UsageError: the algorithm or a transform is unknown, or would change weights whose
            sensitivity was measured.
    """
    needs = set(ALGORITHMS[algorithm_of(entry)].NEEDS)
    transforms = transforms_of(entry)
    for name, options in transforms:
        needs |= set(KNOWN[name].needs(options))
    for scheme in schemes:
        if scheme.input is not None and scheme.input.measured:
            needs |= {COUNTS.name} if scheme.input.observer != AmaxObserver.NAME else set()
            needs |= {AMAX.name} if scheme.input.symmetric else {MIN_VAL.name, MAX_VAL.name}
    histograms = COUNTS.name in needs
    check_transforms(
        entry.name,
        transforms,
        observer=entry.input_observer,
        histograms=histograms,
        chosen=entry.mixed,
    )
    return frozenset(needs) | (
        frozenset(FisherObserver.STATISTICS) - {COUNT.name} if entry.mixed else frozenset()
    )


def transforms_of(entry: Quantize) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """(name, options) of each transform that an entry names, or of its scheme's usual ones.

    Raises:
        UsageError: a transform is unknown, lacks an option, or stands in the wrong place.
    """
    result = []
    for item in _usual_transforms(entry) if entry.transforms is None else entry.transforms:
        for name, options in item.items():
            if name not in KNOWN:
                raise UsageError(
                    f"{entry.name}: transform {name!r} is unknown", nearest(str(name), list(KNOWN))
                )
            transform = KNOWN[name]
            if not isinstance(options, Mapping | None):
                example = ", ".join(
                    f"{key}: {json.dumps(value)}" for key, value in transform.OPTIONS.items()
                )
                raise UsageError(
                    f"{entry.name}: {name}: {options!r} is not a mapping",
                    f"write {{{name}: {{{example}}}}}",
                )
            for key in options or ():
                if key not in transform.OPTIONS:
                    remedy = nearest(str(key), list(transform.OPTIONS))
                    raise UsageError(f"{entry.name}: {name} has no option {key!r}", remedy)
            try:
                result.append((name, transform.checked({**transform.OPTIONS, **(options or {})})))
            except UsageError as error:
                raise UsageError(f"{entry.name}: {error.cause}", error.remedy) from error
    if any(name in ROTATIONS for name, _ in result[1:]):
        names = ", ".join(name for name, _ in result)
        raise UsageError(
            f"{entry.name}: transforms {names}", "rotate once, before all other transforms"
        )
    return tuple(result)


def _usual_transforms(entry: Quantize) -> tuple[Mapping[str, Any], ...]:
    """Transforms of an entry that names none: its scheme's, or the search of a combination.

    An entry whose schemes are to be chosen has none: sensitivities are those of the unchanged
    weights.
    """
    scheme = preset(entry.scheme)
    combination = _combination_of(entry)
    searched = combination is not None and combination.smooths(scheme)
    if searched and not scheme.transforms and not entry.mixed:
        # a cache's scales belong to the values as the model makes them
        values = {} if entry.kv_cache is None else {smoothquant.CHANGES_VALUES: False}
        return ({smoothquant.NAME: {**smoothquant.SEARCHED, **values}},)
    return tuple({name: {}} for name in scheme.transforms)
