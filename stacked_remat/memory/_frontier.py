"""The curve of memory against FLOPs: policies of which none is better in both.

`frontier` compiles some of the policies that a plan would choose between
(`Search.ladder`), from the one with the fewest FLOPs to one with twice as many.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import ScanCheckpointSpec
from .._messages import parse_bytes
from .._policy import resolve_policy
from .._schedule import whole_number
from .._static import PyTree
from ._plan import CANDIDATES, check_policies, compared, tracer
from ._report import Comparison, MemoryReport, Trial
from ._search import Search, Step
from ._table import readable_bytes
from ._targets import Target

# Characters of the longest bar of a chart.
_BAR = 40
# Policies with more than so many times the fewest FLOPs are left out.
_MOST_FLOPS = 2


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Policies by the memory that they take, the least first; each has fewer FLOPs than
    those before it or, in a program without matrix products, runs fewer layers again.

    `print` shows a table, and a chart of the FLOPs if there are any.

    Attributes:
        trials: of policies that were compiled, those that no other one is better than.
        tried: all that were compiled, in order.
    """

    trials: tuple[Trial, ...]
    tried: Comparison

    def rows(self) -> list[dict[str, Any]]:
        """Plain values for JSON: the policy as text, bytes of a device and of its host,
        FLOPs, and bytes moved between them.
        """
        rows = []
        for trial, report in self._reports():
            rows.append(
                {
                    "policy": trial.name,
                    "total": report.total,
                    "host": report.host.total,
                    "matmul_flops": report.flops.matmul,
                    "moved": report.flops.moved,
                }
            )
        return rows

    def _reports(self) -> list[tuple[Trial, MemoryReport]]:
        return [(one, one.report) for one in self.trials if one.report is not None]

    def __str__(self) -> str:
        reports = [report for _, report in self._reports()]
        curve = dataclasses.replace(self.tried, trials=self.trials, title="frontier")
        base_name, base = curve.base
        most = max((report.flops.matmul for report in reports), default=0)
        notes = [*curve.notes]
        if base and most:
            notes.append(f"FLOPs / {base_name}, by memory of a device:")
            for report in reports:
                flops = report.flops.matmul
                bar = "#" * round(_BAR * flops / most)
                size = readable_bytes(report.total)
                notes.append(f"{size:>10} {bar} {flops / base:.2f}")
        return str(dataclasses.replace(curve, notes=tuple(notes)))


def frontier(
    fn_of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]],
    *args: PyTree,
    points: int = 8,
    host_budget: int | str | None = None,
    candidates: Sequence[ScanCheckpointSpec] = CANDIDATES,
    target: str | Target = "local",
    donate: str | Sequence[str] = (),
    cache: str | Path | None = None,
    begin: Callable[[str], None] = lambda _: None,
    show: Callable[[Trial], None] = lambda _: None,
    **kwargs: PyTree,
) -> Frontier:
    """Find how many FLOPs a program takes in how much memory. Nothing is executed.

    Args:
        fn_of_policy: as in `plan`, as are all other arguments and errors but
            `BudgetError`.
        points: how many policies are compiled, at the most: the one with the fewest
            FLOPs, and of those with at most twice as many the ones where the curve
            falls the most. The candidates, where there is no model of the program.

    Cost: a compilation for each point, and one more.
    """
    check_policies(candidates)
    whole_number("points", points, "a number of policies", least=2)
    most_on_host = math.inf if host_budget is None else parse_bytes(host_budget)
    traced = tracer(fn_of_policy, args, kwargs, target, donate)
    search = Search(
        traced, host_budget=most_on_host, cache=cache, begin=begin, show=show
    )
    ladder = search.ladder(candidates)
    chosen: list[ScanCheckpointSpec] = [step.policy for step in _spread(ladder, points)]
    # No ladder, where the search has no model of the program
    for policy in chosen or candidates:
        search.taken(policy)
    if not search.compiled:
        # Raises why: no policy can be traced.
        search.trial(candidates[0])
    tried = compared(search.compiled.values(), search, candidates)
    # Not one that was compiled to measure others
    offered = {*map(resolve_policy, candidates)}
    offered |= {resolve_policy(step.policy) for step in ladder}
    compiled = search.fitting(offered)

    def order(trial: Trial) -> tuple[int, float]:
        assert trial.report is not None
        flops, _, again = search.cost(trial.policy)
        # Without products nothing else says what a policy costs.
        return trial.report.total, flops or again

    # By memory: each costs less than all that take less
    best: list[Trial] = []
    for trial in sorted(compiled, key=order):
        if not best or order(trial)[1] < order(best[-1])[1]:
            best.append(trial)
    return Frontier(tuple(best), tried)


def _spread(ladder: Sequence[Step], points: int) -> list[Step]:
    """The first step of a ladder, the last with at most `_MOST_FLOPS` times its FLOPs,
    and of those between them the ones that say the most of the curve.
    """
    if not ladder:
        return []
    most = _MOST_FLOPS * ladder[0].cost.flops
    steps = [step for step in ladder if not most or step.cost.flops <= most]
    chosen = {0, len(steps) - 1}

    def gain(number: int) -> float:
        """What a step saves beside the next that is chosen, times the ratio of memory
        for which it does.
        """
        above = max(other for other in chosen if other < number)
        below = min(other for other in chosen if other > number)
        ratio = steps[above].total / steps[number].total
        return (steps[below].price - steps[number].price) * math.log(ratio)

    while len(chosen) < min(points, len(steps)):
        left = {*range(len(steps))} - chosen
        chosen.add(max(left, key=gain))
    return [steps[number] for number in sorted(chosen)]
