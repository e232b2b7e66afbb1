"""A calibration that changed nothing: every linear came out as plain round to nearest makes it.

One linear may: a small one, or one of 8 bits. If all do, then what the algorithm was given said nothing, and whoever chose it
over rtn has to know. The layers' records are what is looked at, so a run that was resumed says what one that was not says.
Linears that a policy for experts rounds to nearest do not count.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quantflow.algorithms import ALGORITHMS
from quantflow.errors import StatisticsError
from quantflow.measurements.record import Measurement
from quantflow.numerics.output_errors import unchanged
from quantflow.observers.hessian import HESSIAN_SUM
from quantflow.planning.plan import Plan


def refuse_unchanged(plan: Plan, records: Sequence[Mapping[str, Any]], measurement: Measurement | None) -> None:
    """Refuse the records of all layers, where a calibrated algorithm left these as plain round to nearest makes them.

    Raises:
        StatisticsError: they are; names the calibration and how many linears there are.
    """
    if measurement is None or (HESSIAN_SUM.name not in ALGORITHMS[plan.algorithm].NEEDS and not plan.learns):
        return
    told = {name: of for record in records for name, of in record["decisions"].items()}
    if unchanged(told):
        counts, calibration = measurement.meta["counts"], measurement.meta["calibration"]["hash"][:16]
        compared = sum("same_as_rtn" in of for of in told.values())
        raise StatisticsError(
            f"quantize {plan.name}: {plan.method} with calibration {calibration} ({counts['samples']} sequences, "
            f"{counts['tokens']} tokens) changed nothing: all {compared} linears are what rtn makes of them",
            f"{'give it more iterations, ' if plan.learned is not None else ''}look at the text with `quantflow calibration "
            "inspect` and measure again, or use --algorithm rtn",
        )
