"""Chooses a remat policy: the one with the fewest FLOPs that fits in memory.

`plan` and `compare` make the user's program for each policy and hand it to `_call.py`,
which traces it (seconds; gives FLOPs and transfers) and compiles it (up to minutes;
gives memory). `_search.py` does as little of both as it can.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .. import ScanCheckpointPolicy, ScanCheckpointSpec
from .._messages import parse_bytes
from .._policy import resolve_policy
from .._static import PyTree
from ._call import DoesNotFit, TracedCall, trace_call
from ._report import Comparison, MemoryReport, Trial, unknown_names
from ._search import Search
from ._table import readable_bytes, readable_count
from ._targets import Target

CANDIDATES: tuple[ScanCheckpointSpec, ...] = (
    False,
    True,
    "nested",
    ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "offload",
    *(ScanCheckpointPolicy(max_carries=most) for most in (8, 6, 4, 3, 2)),
)
"""What `plan` tries, with their variations."""


class BudgetError(RuntimeError):
    """No candidate fits; the message holds the table of what was tried."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The policy to use, and how it was found.

    FLOPs are those of matrix products; of equals, the policy comes first that moves
    fewer bytes between device and host, or runs fewer layers again. A larger budget
    plans no more of them, for the same place of the weights, but for errors of the
    model that chooses what to compile.

    Candidates are varied, in a program that folds or scans over layers (or steps of a
    loop). Values inside layers are kept: by the names that blocks give, or by their
    *place*, such as `"dot_general 2/7"`, the result of the second of a layer's seven
    matrix products. Which, is found from the program of a layer, exactly. With a
    `host_budget` some go to the host instead, where their transfers hide behind the
    forward pass. Variations also differ in the number of `first_layers` before a cut,
    of carries that are kept (`max_carries`), and of segments (`nested`). The values of
    a segment may be kept while it is reversed: then no layer runs more than twice.

    Attributes:
        policy: of those that fit, the one with the fewest FLOPs: a candidate, or a
            variation of one.
        report: its memory and FLOPs.
        tried: everything that was compiled, in order.
        budget: bytes of device memory it had to fit in.
        streamed: whether it fits with weights on the host only.
    """

    policy: ScanCheckpointPolicy
    report: MemoryReport
    tried: Comparison
    budget: int
    streamed: bool = False

    @property
    def summary(self) -> str:
        """What the policy takes, and how it was found, in two lines."""
        report = self.report
        takes = f"{readable_bytes(report.total)} of {readable_bytes(self.budget)}"
        host = readable_bytes(report.host.total)
        flops = readable_count(report.flops.matmul)
        return (
            f"takes {takes} a device, and {host} on the host\n"
            f"{flops} FLOP in matrix products; {len(self.tried.trials)} policies were"
            " compiled"
        )

    def __str__(self) -> str:
        name = Trial(self.policy, self.report, streamed=self.streamed).name
        note = f"{name} fits {readable_bytes(self.budget)} a device"
        notes = *self.tried.notes, note
        return str(dataclasses.replace(self.tried, title="plan", notes=notes))


def compare(
    fn_of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]],
    *args: PyTree,
    candidates: Sequence[ScanCheckpointSpec] = CANDIDATES,
    target: str | Target = "local",
    donate: str | Sequence[str] = (),
    **kwargs: PyTree,
) -> Comparison:
    """Compile a program under every policy and compare the reports. Nothing is
    executed.

    The arguments, and errors but `BudgetError`, are those of `plan`. There is a trial
    for each candidate, in their order, with the compiler's error for one that it
    refuses.

    Cost: one compilation a candidate, and a tracing of `False`; of a program without
    matrix products one of `"nested"` too.
    """
    check_policies(candidates)
    traced = tracer(fn_of_policy, args, kwargs, target, donate)
    search = Search(traced)
    return compared(map(search.trial, candidates), search)


def plan(
    fn_of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]],
    *args: PyTree,
    budget: int | str,
    host_budget: int | str | None = None,
    candidates: Sequence[ScanCheckpointSpec] = CANDIDATES,
    target: str | Target = "local",
    donate: str | Sequence[str] = (),
    vary: bool = True,
    streamed: Sequence[PyTree] | None = None,
    cache: str | Path | None = None,
    begin: Callable[[str], None] = lambda _: None,
    show: Callable[[Trial], None] = lambda _: None,
    **kwargs: PyTree,
) -> Plan:
    """Find the policy with the fewest FLOPs among those that fit in a budget, as `Plan`
    says. Nothing is executed.

    Args:
        fn_of_policy: makes the function to compile from a policy, for example `lambda
            remat: lambda blocks, x: train_step(blocks, x, remat=remat)`. It should be
            the whole training step, with its optimizer state and donation.
        *args: its arguments; these, `target`, `donate`, `cache` and `**kwargs` are as
            for `report`.
        budget: memory of each device, arguments and results included: bytes, or text
            such as `"80GiB"` or `"80GB"`. Nine tenths of the device is a usual figure,
            since the compiler does not count all (fragmentation, other programs).
        host_budget: of the host memory that one device uses; None for no limit.
        candidates: the policies, in any order.
        vary: whether variations of the candidates are tried too.
        streamed: the arguments with weights on the host, such as
            `(streaming.to_host(model), x)` of shapes, to be tried where nothing fits.
        begin: called with the name of each policy before it is compiled.
        show: called with each trial once it is compiled.

    Raises:
        BudgetError: no candidate fits; shows all of them and the smallest.
        jax.errors.JaxRuntimeError: the compiler takes no candidate, and fails at one of
            them for another reason than memory; a note names the policy.
        ValueError, TypeError, TargetError: as `report`; for a wrong `budget` or
            `candidates`.

    Cost: mostly three to five compilations, where the model of a program is far off
    up to a dozen, and as many tracings; with `streamed` twice that.
    Without variations a compilation for each candidate with fewer FLOPs than the first
    that fits, and a tracing for each, unless one fits that recomputes nothing.
    """
    most = parse_bytes(budget)
    most_on_host = math.inf if host_budget is None else parse_bytes(host_budget)
    check_policies(candidates)
    _check_streamed(streamed, args)
    trials: list[Trial] = []
    # Streamed weights cost transfers, so they come second.
    for arguments in (args,) if streamed is None else (args, streamed):
        traced = tracer(fn_of_policy, arguments, kwargs, target, donate)
        is_streamed = arguments is streamed
        search = Search(
            traced,
            budget=most,
            host_budget=most_on_host,
            vary=vary,
            streamed=is_streamed,
            cache=cache,
            begin=begin,
            show=show,
        )
        found = search.least(candidates)
        trials += search.compiled.values()
        if found is not None and found.report is not None:
            tried = compared(trials, search, candidates)
            policy = resolve_policy(found.policy)
            return Plan(policy, found.report, tried, most, is_streamed)
    tried = compared(trials, search, candidates)
    raise BudgetError(_nothing_fits(tried, most, most_on_host))


def _remarks(
    candidates: Sequence[ScanCheckpointSpec], search: Search
) -> tuple[str, ...]:
    """A remark for each candidate that was not compiled because the program raises an
    error under it, or that has names that no value of the program has.
    """
    reports = [trial.report for trial in search.compiled.values() if trial.report]
    # What a policy moves to the host has no name in its program.
    known = next((report for report in reports if not report.flops.moved), None)
    notes = []
    for policy in candidates:
        key = resolve_policy(policy)
        name = Trial(policy, None).name
        if error := search.refused.get(key):
            first_line = str(error).partition("\n")[0]
            notes.append(f"left out, {name}: {type(error).__name__}: {first_line}")
        elif known is None or key in search.compiled:
            continue
        elif unknown := unknown_names(policy, known.flops):
            notes.append(f"{name}: {unknown}")
    return tuple(notes)


def _check_streamed(streamed: Any, args: Sequence[PyTree]) -> None:
    if streamed is None:
        return
    is_list = isinstance(streamed, tuple | list)
    if not is_list or len(streamed) != len(args):
        raise TypeError(
            f"streamed is the {len(args)} arguments in order, with weights on the host,"
            f" as in (streaming.to_host(model), x); got {type(streamed).__name__}."
        )


def tracer(
    fn_of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]],
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    target: str | Target,
    donate: str | Sequence[str],
) -> Callable[[ScanCheckpointSpec], TracedCall]:
    """What a `Search` traces the program under a policy with."""

    def traced(policy: ScanCheckpointSpec) -> TracedCall:
        try:
            fn = fn_of_policy(policy)
        except (AttributeError, TypeError) as error:
            reason = str(error).rstrip(".")
            raise TypeError(
                "plan and compare call their first argument with a policy, and for"
                f" {policy!r} it raised {type(error).__name__}: {reason}. Write a"
                " function of the policy that returns the program: lambda remat: lambda"
                " blocks, x: train_step(blocks, x, remat=remat)."
            ) from error
        return trace_call((fn, args, kwargs), target, donate)

    return traced


def check_policies(candidates: Any) -> None:
    """Refuse none, and a policy in place of several."""
    # A policy's name, such as "nested", is a sequence too: of letters.
    if not isinstance(candidates, list | tuple):
        raise TypeError(
            f"candidates is a list of policies; got {candidates!r}. For one write"
            " [policy]."
        )
    if not candidates:
        raise ValueError(
            "candidates has no policy. Leave it out for those that plan usually tries."
        )


def compared(
    trials: Iterable[Trial],
    search: Search,
    candidates: Sequence[ScanCheckpointSpec] = (),
) -> Comparison:
    """The trials of a search side by side, with remarks on candidates that were not
    compiled.

    If the compiler took no policy, and failed for one of them for another reason than
    memory, that error is raised: it is one of the program, not of the policies.
    """
    comparison = Comparison(
        tuple(trials),
        notes=_remarks(candidates, search),
        flops_of_false=search.flops_of_false,
    )
    if not any(trial.report for trial in comparison.trials):
        for trial in comparison.trials:
            if trial.failure and not isinstance(trial.failure, DoesNotFit):
                raise trial.failure
    if comparison.base[1]:
        return comparison
    # Without matrix products only the runs of layers say what a policy costs.
    return dataclasses.replace(comparison, layers=search.longest())


def _nothing_fits(tried: Comparison, budget: int, host_budget: float) -> str:
    """The message of a `BudgetError`: what was tried, and the smallest of it, among
    those that fit on the host if there is one.
    """
    on_host = ""
    if host_budget < math.inf:
        on_host = f" and {readable_bytes(int(host_budget))} on the host"

    def size(trial: Trial) -> Any:
        report = trial.report
        if report is None:
            return math.inf, math.inf
        return report.host.total > host_budget, report.total

    trial = min(tried.trials, key=size)
    needs = trial.report
    smallest = "The compiler refused all of them."
    if needs is not None:
        # Then no policy fits, and not all of them were compiled
        alone = ", too much alone," if needs.arguments > budget else ""
        smallest = (
            f"The smallest found is {trial.name} with {readable_bytes(needs.total)} a"
            f" device, {readable_bytes(needs.arguments)} of it arguments{alone} and"
            f" {readable_bytes(needs.host.total)} on the host. Shrink the batch, the"
            " sequence or the state, shard over more devices, freeze weights or keep"
            " them on the host."
        )
    return (
        f"no candidate fits {readable_bytes(budget)} a device{on_host}."
        f" {smallest}\n{tried}"
    )
