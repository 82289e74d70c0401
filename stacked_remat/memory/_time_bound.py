"""The least time that a program takes: its arithmetic at the device's peak, its transfers at the link's."""

import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from ._costs import Flops
from ._table import readable_count
from ._targets import Target, TargetError, find_target


@dataclasses.dataclass(frozen=True)
class TimeBound:
    """The least time of one call of a program: two quotients, not a prediction.

    It leaves out elementwise operations, the bandwidth of device memory and communication between devices,
    and takes transfers to run beside compute, those to the host beside those from it.

    Attributes:
        compute: seconds of the matrix products at the device's peak.
        transfer: seconds of the transfers between device and host, of the slower direction.
    """

    compute: float
    transfer: float

    @staticmethod
    def of(flops: Flops, target: Target, devices: int = 1) -> "TimeBound | None":
        """The bound for costs that are divided over devices; None if the target's figures are not known."""
        if target.flops is None or target.link is None:
            return None
        moved = max(flops.bytes_from_host, flops.bytes_to_host)
        return TimeBound(flops.matmul / devices / target.flops, moved / devices / target.link)

    def at(self, utilization: float) -> "TimeBound":
        """The bound where the matrix products reach a share of the peak; training usually reaches 0.3 to 0.5.

        Raises:
            ValueError: the share is not above 0 and at most 1.
        """
        _check_utilization(utilization)
        return TimeBound(self.compute / utilization, self.transfer)

    @property
    def seconds(self) -> float:
        """Whichever takes longer."""
        return max(self.compute, self.transfer)

    @property
    def hidden(self) -> bool:
        """Whether compute takes as long as the transfers, or longer."""
        return self.transfer <= self.compute

    def verdict(self, tokens: int | None = None) -> str:
        """`"hidden"`, or `"bound by the link at"` the most tokens per second.

        Args:
            tokens: of one call, on all devices; if None, seconds are given instead.
        """
        if self.hidden:
            return "hidden"
        if tokens is None:
            return f"bound by the link at {self.transfer:.3g} s"
        return f"bound by the link at {readable_count(int(tokens / self.transfer))} tokens/s"


def tokens_to_hide(counts: Mapping[int, Flops], target: str | Target, *, utilization: float = 1.0) -> float:
    """Find the tokens of a step above which its transfers take less time than its compute.

    FLOPs and bytes are taken to be linear in the tokens, through the two counts that are given. Attention's
    FLOPs grow faster where the tokens are those of one sequence: then a result above both counts is too high,
    and one between them too low, so give counts close to the result. It is a bound as `TimeBound` is.

    Args:
        counts: for two numbers of tokens, what a step with as many costs: `count_flops` of the traced step,
            or `report(...).flops`.
        target: a name in `TARGETS` or a `Target`.
        utilization: as for `TimeBound.at`; at 1 the result holds however fast the products are.

    Returns:
        The number of tokens; 0 if any number hides the transfers, `math.inf` if none does because they grow
        at least as fast as compute. It is the same for any number of devices, if each has a link of its own
        and an even share.

    Raises:
        TypeError: `counts` does not map positive numbers to `Flops`.
        ValueError: not two counts, or a utilization that is no share.
        TargetError: the target's peak or link is not known.
    """
    items = counts.items() if isinstance(counts, Mapping) else [(0, None)]
    if not all(isinstance(n, int | float) and n > 0 and isinstance(flops, Flops) for n, flops in items):
        raise TypeError(
            f"tokens_to_hide needs a dict from numbers of tokens to the Flops of a step with as many; got "
            f"{counts!r:.200}"
        )
    _check_utilization(utilization)
    if len(counts) != 2:
        raise ValueError(f"tokens_to_hide needs the costs of two numbers of tokens; got {len(counts)}")
    chosen = find_target(target)
    (few, first), (many, second) = sorted(counts.items())

    def excess(matmul: int, moved: int) -> float:
        bound = TimeBound.of(Flops(matmul, bytes_from_host=moved), chosen)
        if bound is None:
            raise TargetError(
                f"target {chosen.name!r} has no known peak or link: give a Target with `flops` and `link`"
            )
        bound = bound.at(utilization)
        return bound.transfer - bound.compute

    def crossing(direction: str) -> float:
        """Where the transfers in one direction take as long as compute."""
        moved = [getattr(flops, direction) for flops in (first, second)]
        if not any(moved):
            return 0.0
        low, high = map(excess, (first.matmul, second.matmul), moved)
        slope = (high - low) / (many - few)
        if slope < 0:
            return max(0.0, few - low / slope)
        return 0.0 if slope == 0 and low <= 0 else math.inf

    return max(crossing("bytes_from_host"), crossing("bytes_to_host"))


def _check_utilization(utilization: Any) -> None:
    if not isinstance(utilization, Real) or not 0 < float(utilization) <= 1:
        raise ValueError(f"utilization is a share of the peak, above 0 and at most 1; got {utilization!r}")
