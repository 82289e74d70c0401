"""Chooses a remat policy: the one with the fewest FLOPs among those that fit in memory."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .._messages import parse_bytes
from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec
from .._schedule import whole_number
from .._static import PyTree
from ._call import TracedCall, trace_call
from ._report import MemoryReport
from ._search import Search, Trial, check_compiled
from ._table import as_table, common_unit, readable_bytes, readable_count
from ._targets import Target

CANDIDATES: tuple[ScanCheckpointSpec, ...] = (
    False,
    True,
    "nested",
    ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "offload",
    *(ScanCheckpointPolicy(max_carries=most) for most in (8, 6, 4, 3, 2)),
)
"""What `plan` tries, the policy that recomputes nothing first and the others by their FLOPs."""


class BudgetError(RuntimeError):
    """No candidate fits; the message holds the table of what was tried."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Policies of one program side by side, in the order in which they were tried.

    Attributes:
        trials: one for each policy.
        title: of the table.
        notes: what stands below the table.
    """

    trials: tuple[Trial, ...]
    title: str = "memory by policy"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = [trial.report for trial in self.trials if trial.report is not None]
        least = min((each.flops.matmul for each in found), default=0)
        size, unit = common_unit(max(each.total, each.host.total, each.flops.moved) for each in found)
        rows = [(trial.name, _row(trial.report, size, least)) for trial in self.trials]
        headings = [name for name in _COLUMNS if any(name in row for _, row in rows)]
        cells = [[name, *(row.get(heading, "") for heading in headings)] for name, row in rows]
        notes = [
            *([f"FLOPs / least: {readable_count(least)} FLOP in matrix products"] if least else []),
            *sorted({f"?: {reason}" for each in found for reason in each.flops.reasons}),
            *(_COLUMNS[name] for name in headings if _COLUMNS[name]),
            *(f"{one.name}: {str(one.failure).splitlines()[0]}" for one in self.trials if one.failure),
        ]
        figures = {(each.temporaries, each.flops.matmul, each.host.total) for each in found}
        if len(found) > 1 and len(figures) == 1:
            notes.append("every policy gives the same: is remat passed on to fold or scan?")
        title = f"{self.title}; sizes in {unit}"
        return as_table(title, [["policy", *headings], *cells], (*notes, *self.notes))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The policy to use, and how it was found.

    Attributes:
        policy: of those that fit, the one with the fewest FLOPs: a candidate as it was given, or one with
            `first_layers`, more `max_carries` or another cut.
        report: its memory and FLOPs.
        tried: everything that was compiled, in order.
        budget: bytes of device memory it had to fit in.
        streamed: whether it fits with weights on the host only.
    """

    policy: ScanCheckpointSpec
    report: MemoryReport
    tried: Comparison
    budget: int
    streamed: bool = False

    def __str__(self) -> str:
        name = Trial(self.policy, self.report, streamed=self.streamed).name
        note = f"{name} fits {readable_bytes(self.budget)} a device"
        return str(dataclasses.replace(self.tried, title="plan", notes=(*self.tried.notes, note)))


def compare(
    fn_of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]],
    *args: PyTree,
    candidates: Sequence[ScanCheckpointSpec] = CANDIDATES,
    target: str | Target = "local",
    donate: str | Sequence[str] = (),
    **kwargs: PyTree,
) -> Comparison:
    """Compile a program under every policy and compare the reports. Nothing is executed.

    The arguments are those of `plan`. There is a trial for each candidate, in their order, with the
    compiler's error for one that it refuses. It raises that of the last if it refuses all for another reason
    than memory.

    Cost: one compilation a candidate.
    """
    _check_policies(candidates)
    search = Search(lambda policy: trace_call(fn_of_policy(policy), args, kwargs, target, donate))
    trials = tuple(map(search.trial, candidates))
    check_compiled(trials)
    return Comparison(trials)


def plan(
    fn_of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]],
    *args: PyTree,
    budget: int | str,
    host_budget: int | str | None = None,
    candidates: Sequence[ScanCheckpointSpec] = CANDIDATES,
    target: str | Target = "local",
    donate: str | Sequence[str] = (),
    layers: int | None = None,
    streamed: Sequence[PyTree] | None = None,
    cache: str | Path | None = None,
    show: Callable[[Trial], None] = lambda _: None,
    **kwargs: PyTree,
) -> Plan:
    """Find the policy with the fewest FLOPs among those that fit in a budget. Nothing is executed.

    FLOPs are those of matrix products, found by tracing; of equals, the policy that moves fewer bytes
    between device and host comes first. A larger budget never plans more of them, for the same place of the
    weights.

    With `layers`, also every candidate but `max_carries` with as many `first_layers` as fit is considered;
    and, for one with `nested=True`, as many `max_carries` as fit, and cuts that keep the internals of a
    segment while it is reversed (`nested=k, save_block_internals=True`): then no layer runs more than twice.
    For layers that are alike, the plan takes at most 1.05 times the FLOPs of any order of the same operations
    where such a cut fits. Below that the carries of loops and their internals would have to share memory, and
    it takes up to 1.2 times as many.

    Args:
        fn_of_policy: makes the function to compile from a policy, for example
            `lambda remat: lambda blocks, x: train_step(blocks, x, remat=remat)`. It should be what will run:
            the whole training step, with its optimizer state and donation.
        *args: its arguments; these, `target`, `donate`, `cache` and `**kwargs` are as for `report`.
        budget: memory of each device, arguments and results included: bytes, or text such as `"80GiB"` or
            `"80GB"`. The compiler does not count all (fragmentation, library workspaces, other programs):
            nine tenths of the device is a usual figure.
        host_budget: the same for the host memory that one device uses; 0 to leave the host out, None for no
            limit.
        candidates: the policies, in any order.
        layers: how many layers the stack has, or steps the loop, to search for `first_layers` and cuts.
        streamed: the arguments with weights on the host, such as `(streaming.to_host(model), x)` of shapes.
            If no candidate fits, they are tried again with these; the table says whether the transfers hide
            behind compute (see `TimeBound`).
        show: called with each trial once it is compiled.

    Raises:
        BudgetError: no candidate fits; shows all of them and the smallest.
        jax.errors.JaxRuntimeError: the compiler takes no candidate, and fails at one of them for another
            reason than memory; a note names the policy.
        ValueError, TypeError, TargetError: as `report`; for a budget that cannot be read, no candidates or
            one policy in their place, and what is no number of layers.

    Cost: one compilation if a policy fits that recomputes nothing. Otherwise one tracing for each candidate,
    and a compilation for each with fewer FLOPs than the first that fits; with `streamed` at most twice
    that. With `layers` up to three more, and at most `log2(layers)` for each way to keep more.
    """
    most, on_host = parse_bytes(budget), math.inf if host_budget is None else parse_bytes(host_budget)
    if layers is not None:
        what = "the number of layers of the stack or steps of the loop"
        whole_number("layers", layers, what, "Leave it out if not known.")
    _check_policies(candidates)

    def search(given: Sequence[PyTree], is_streamed: bool) -> Search:
        def trace(policy: ScanCheckpointSpec) -> TracedCall:
            return trace_call(fn_of_policy(policy), given, kwargs, target, donate)

        return Search(trace, most, on_host, cache, show, is_streamed)

    searches = [search(args, False), *([] if streamed is None else [search(streamed, True)])]
    chosen = next(filter(None, (each.least(candidates, layers) for each in searches)), None)
    tried = Comparison(tuple(trial for each in searches for trial in each.compiled.values()))
    if chosen is None:
        check_compiled(tried.trials)
        raise BudgetError(_nothing_fits(tried, most, on_host))
    assert chosen.report is not None
    return Plan(chosen.policy, chosen.report, tried, most, chosen.streamed)


def _check_policies(candidates: Any) -> None:
    """Refuse none, and a policy in place of several."""
    if not isinstance(candidates, Sequence) or isinstance(candidates, str):
        raise TypeError(f"candidates={candidates!r} is one policy. Write a list: [{candidates!r}].")
    if not candidates:
        raise ValueError("candidates has no policy. Leave it out for those that plan usually tries.")


_COLUMNS = {
    "total": "",
    "temp.": "",
    "host": "",
    "moved": "moved: between device and host",
    "sent": "sent: to other devices, by each",
    "link": "link: seconds that it takes, or hidden behind compute",
    "FLOPs": "",
    "compiled": "compiled: in so many seconds",
}
"""The columns of a comparison, and what is said of them below it."""


def _row(found: MemoryReport | None, unit: int, flops: int) -> dict[str, str]:
    if found is None:
        return {"total": "refused"}
    sizes = {"total": found.total, "temp.": found.temporaries, "host": found.host.total}
    sizes |= {"moved": found.flops.moved, "sent": found.sent}
    row = {name: f"{size / unit:.2f}" for name, size in sizes.items() if size or name == "temp."}
    if (least := found.least_time) and least.transfer:
        row["link"] = "hidden" if least.hidden else f"{least.transfer:.3g}"
    if flops:
        row["FLOPs"] = f"{found.flops.matmul / flops:.2f}{'' if found.flops.exact else ' ?'}"
    return row | {"compiled": f"{found.compile_seconds:.1f}"}


def _nothing_fits(tried: Comparison, budget: int, host_budget: float) -> str:
    """What was tried, and the smallest of it that the host's budget allows, if there is one."""
    on_host = f" and {readable_bytes(int(host_budget))} on the host" if host_budget < math.inf else ""
    found = [(trial.name, trial.report) for trial in tried.trials if trial.report is not None]
    if not found:
        smallest = "The compiler refused all of them."
    else:
        name, needs = min(found, key=lambda pair: (pair[1].host.total > host_budget, pair[1].total))
        smallest = (
            f"The smallest found is {name} with {readable_bytes(needs.total)} a device, "
            f"{readable_bytes(needs.arguments)} of it arguments, and {readable_bytes(needs.host.total)} on "
            "the host. Shorten the context, shard over more devices, freeze weights or keep them on the host."
        )
    return f"no candidate fits {readable_bytes(budget)} a device{on_host}. {smallest}\n{tried}"
