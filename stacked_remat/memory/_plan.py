"""Chooses a remat policy: the one with the fewest FLOPs among those that fit in
memory.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax

from .._messages import parse_bytes
from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from .._schedule import whole_number
from .._static import PyTree
from ._call import DoesNotFit, TracedCall, trace_call
from ._report import Comparison, MemoryReport, Trial
from ._table import readable_bytes
from ._targets import Target

_NEVER = (math.inf, math.inf, math.inf)
_OfCount: TypeAlias = Callable[[int], ScanCheckpointPolicy]

CANDIDATES: tuple[ScanCheckpointSpec, ...] = (
    False,
    True,
    "nested",
    ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "offload",
    *(ScanCheckpointPolicy(max_carries=most) for most in (8, 6, 4, 3, 2)),
)
"""What `plan` tries, the policy that recomputes nothing first and the others by their
FLOPs.
"""


class BudgetError(RuntimeError):
    """No candidate fits; the message holds the table of what was tried."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The policy to use, and how it was found.

    Attributes:
        policy: of those that fit, the one with the fewest FLOPs: a candidate as it was
            given, or one with `first_layers`, more `max_carries` or another cut.
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
        return str(
            dataclasses.replace(
                self.tried, title="plan", notes=(*self.tried.notes, note)
            )
        )


@dataclasses.dataclass(frozen=True)
class Search:
    """Traces and compiles policies of a program, and remembers what it compiled, in
    order.
    """

    program: Callable[[ScanCheckpointSpec], TracedCall]
    budget: float = math.inf
    host_budget: float = math.inf
    cache: str | Path | None = None
    show: Callable[[Trial], None] = lambda _: None
    streamed: bool = False
    layers: int | None = None
    traced: dict[ScanCheckpointPolicy, TracedCall] = dataclasses.field(
        default_factory=dict
    )
    compiled: dict[ScanCheckpointPolicy, Trial] = dataclasses.field(
        default_factory=dict
    )

    def fits(self, trial: Trial) -> bool:
        found = trial.report
        return (
            found is not None
            and found.total <= self.budget
            and found.host.total <= self.host_budget
        )

    def trial(self, policy: ScanCheckpointSpec) -> Trial:
        key, report, failure = resolve_policy(policy), None, None
        if key in self.compiled:
            return self.compiled[key]
        try:
            report = self._trace(policy).report(self.cache)
        except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
            failure = error
        found = self.compiled[key] = Trial(policy, report, failure, self.streamed)
        if failure is not None:
            failure.add_note(f"while compiling the policy {found.name}")
        self.show(found)
        return found

    def least(self, candidates: Sequence[ScanCheckpointSpec]) -> Trial | None:
        """The policy with the fewest FLOPs that fits, of the candidates and what is
        derived from them.

        With wider limits the result never has more FLOPs: candidates are tried in an
        order that does not depend on the limits, and `first_layers` and carries by
        bisection over counts that do not either.
        """
        ordered = self._in_order(candidates)
        for policy in ordered:
            first = self.trial(policy)
            if self.fits(first):
                break
            if (
                first.report is not None and first.report.arguments > self.budget
            ):  # as under every policy
                return None
        else:
            return None
        if self.layers is None or _recomputes_nothing(policy):
            return first
        for each in (policy, *ordered):
            for of_count, low in self._families(resolve_policy(each), self.layers):
                self._try_counts(of_count, low, self.layers)
        return self._best()

    def _in_order(
        self, candidates: Sequence[ScanCheckpointSpec]
    ) -> Iterator[ScanCheckpointSpec]:
        """What recomputes nothing, and then the others by their FLOPs, for which all of
        them are traced.
        """
        yield from filter(_recomputes_nothing, candidates)
        others: list[ScanCheckpointSpec] = [
            one for one in candidates if not _recomputes_nothing(one)
        ]
        yield from sorted(others, key=self._cost)

    def _families(
        self, base: ScanCheckpointPolicy, layers: int
    ) -> Iterator[tuple[_OfCount, int]]:
        """Policies that have fewer FLOPs the larger a number is, and the number to
        start above.
        """
        if not base.saves_everything and base.max_carries is None:
            yield (
                lambda count: dataclasses.replace(base, first_layers=count),
                base.first_layers,
            )
        cuts = (
            base.nested is True and base.save_carries is True and not base.first_layers
        )
        if cuts or base.max_carries is not None:
            yield (
                lambda count: dataclasses.replace(
                    base, nested=False, max_carries=count
                ),
                1,
            )
        if cuts and (of_count := self._cut_with_internals(base, layers)):
            yield of_count, -1

    def _cut_with_internals(
        self, base: ScanCheckpointPolicy, layers: int
    ) -> _OfCount | None:
        """From a number of first layers to the cut of the others that needs least
        memory.

        The internals of a segment are kept while it is reversed. Three policies differ
        in bytes of carries and of what is kept of a layer; where one of them can't be
        compiled, there is no cut.
        """
        slots = base.schedule(layers).slots
        kept = dataclasses.replace(
            base, nested=slots, save_block_internals=base.save_block_internals or True
        )
        policies = (
            ScanCheckpointPolicy(),
            dataclasses.replace(base, save_block_internals=False),
            kept,
        )
        if slots == layers or _NEVER in map(self._cost, policies):
            return None
        totals = [
            one.total
            for one in (self.trial(policy).report for policy in policies)
            if one is not None
        ]
        if len(totals) < len(policies):
            return None
        every_carry, cut, with_internals = totals
        carry = max(0, every_carry - cut) / (layers - slots)
        # Both keep as many starts
        internals = max(0, with_internals - cut) / (-(-layers // slots) - 1)

        def of_count(first_layers: int) -> ScanCheckpointPolicy:
            rest = layers - first_layers

            def needs(longest: int) -> float:
                return -(-rest // longest) * carry + longest * internals

            # Segments of one layer would be visited together, with the internals of all
            # of them.
            longest = min(range(min(2, rest), rest + 1), key=needs)
            return dataclasses.replace(
                kept, nested=-(-rest // longest), first_layers=first_layers
            )

        return of_count

    def _best(self) -> Trial:
        """The one with the fewest FLOPs of the compiled policies that fit, of which
        there is one.
        """
        return min(
            filter(self.fits, self.compiled.values()),
            key=lambda trial: self._cost(trial.policy),
        )

    def _try_counts(self, of_count: _OfCount, low: int, high: int) -> None:
        """Tries how many fit, above `low` and below `high`, while more can have fewer
        FLOPs.
        """
        least = self._cost(self._best().policy)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                most, policy = of_count(high - 1), of_count(middle)
            except ValueError:  # of a policy that cannot have such a number
                break
            if self._cost(most) >= least:
                break
            low, high = (
                (middle, high) if self.fits(self.trial(policy)) else (low, middle)
            )

    def _trace(self, policy: ScanCheckpointSpec) -> TracedCall:
        key = resolve_policy(policy)
        if key not in self.traced:
            self.traced[key] = self.program(policy)
        return self.traced[key]

    def _cost(self, policy: ScanCheckpointSpec) -> tuple[float, float, float]:
        """FLOPs, bytes moved, and layers run again; infinite where the program can't be
        traced under it.
        """
        try:
            flops, remat = (
                self._trace(policy).flops,
                resolve_policy(policy).for_layers(self.layers or 0),
            )
        except Exception:  # raised again where it is this policy's turn to be compiled
            return _NEVER
        again = 0 if _recomputes_nothing(policy) else remat.length - remat.first_layers
        return (
            flops.matmul,
            flops.moved,
            again + (remat.schedule.replays if remat.schedule else 0),
        )


def _recomputes_nothing(policy: ScanCheckpointSpec) -> bool:
    own = resolve_policy(policy)
    return own.saves_everything and not own.is_nested


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

    Cost: one compilation a candidate.
    """
    _check_policies(candidates)
    search = Search(
        lambda policy: trace_call(
            (_program(fn_of_policy, policy), args, kwargs), target, donate
        )
    )
    return _compared(map(search.trial, candidates))


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
    """Find the policy with the fewest FLOPs among those that fit in a budget. Nothing
    is executed.

    FLOPs are those of matrix products; of equals, the policy comes first that moves
    fewer bytes between device and host, or, with `layers`, runs fewer layers again. A
    larger budget never plans more of them, for the same place of the weights.

    With `layers`, candidates with as many `first_layers`, or `max_carries`, as fit are
    considered too, and for `nested=True` cuts that keep the internals of a segment
    while it is reversed (`nested=k, save_block_internals=True`): then no layer runs
    more than twice. For layers that are alike, the plan takes at most 1.05 times the
    FLOPs of any order of the same operations where such a cut fits, and up to 1.2 times
    as many below that.

    Args:
        fn_of_policy: makes the function to compile from a policy, for example `lambda
            remat: lambda blocks, x: train_step(blocks, x, remat=remat)`. It should be
            what will run: the whole training step, with its optimizer state and
            donation.
        *args: its arguments; these, `target`, `donate`, `cache` and `**kwargs` are as
            for `report`.
        budget: memory of each device, arguments and results included: bytes, or text
            such as `"80GiB"` or `"80GB"`. The compiler does not count all
            (fragmentation, library workspaces, other programs): nine tenths of the
            device is a usual figure.
        host_budget: the same for the host memory that one device uses; None for no
            limit.
        candidates: the policies, in any order.
        layers: how many layers the stack has, or steps the loop, to search for
            `first_layers` and cuts.
        streamed: the arguments with weights on the host, such as
            `(streaming.to_host(model), x)` of shapes. If no candidate fits, they are
            tried again with these; the table says whether the transfers hide behind
            compute (see `TimeBound`).
        show: called with each trial once it is compiled.

    Raises:
        BudgetError: no candidate fits; shows all of them and the smallest.
        jax.errors.JaxRuntimeError: the compiler takes no candidate, and fails at one of
            them for another reason than memory; a note names the policy.
        ValueError, TypeError, TargetError: as `report`; for a wrong `budget`,
            `candidates` or `layers`.

    Cost: one compilation if a policy fits that recomputes nothing. Otherwise one
    tracing for each candidate, and a compilation for each with fewer FLOPs than the
    first that fits; with `streamed` at most twice that. With `layers` up to three more,
    and at most `log2(layers)` for each way to keep more.
    """
    most, on_host = (
        parse_bytes(budget),
        math.inf if host_budget is None else parse_bytes(host_budget),
    )
    if layers is not None:
        whole_number(
            "layers",
            layers,
            "the number of layers or steps",
            "Leave it out if not known.",
        )
    _check_policies(candidates)
    if streamed is not None and (
        not isinstance(streamed, tuple | list) or len(streamed) != len(args)
    ):
        raise TypeError(
            f"streamed is the {len(args)} arguments in order, with weights on the host,"
            f" as in (streaming.to_host(model), x); got {type(streamed).__name__}."
        )

    def search(given: Sequence[PyTree], is_streamed: bool) -> Search:
        def trace(policy: ScanCheckpointSpec) -> TracedCall:
            return trace_call(
                (_program(fn_of_policy, policy), given, kwargs), target, donate
            )

        return Search(trace, most, on_host, cache, show, is_streamed, layers)

    searches = [
        search(args, False),
        *([] if streamed is None else [search(streamed, True)]),
    ]
    chosen = next(filter(None, (each.least(candidates) for each in searches)), None)
    tried = _compared(trial for each in searches for trial in each.compiled.values())
    if chosen is None:
        raise BudgetError(_nothing_fits(tried, most, on_host))
    assert chosen.report is not None
    return Plan(chosen.policy, chosen.report, tried, most, chosen.streamed)


def _program(
    fn_of_policy: Callable[..., Any], policy: ScanCheckpointSpec
) -> Callable[..., Any]:
    """The function that a policy makes; says how to write one that can't be called with
    a policy alone.
    """
    try:
        return fn_of_policy(policy)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            "plan and compare call their first argument with a policy, and for"
            f" {policy!r} it raised {type(error).__name__}: {error}. Write a function"
            " of the policy that returns the program: lambda remat: lambda blocks, x:"
            " train_step(blocks, x, remat=remat)."
        ) from error


def _check_policies(candidates: Any) -> None:
    """Refuse none, and a policy in place of several."""
    if not isinstance(candidates, list | tuple):
        raise TypeError(
            f"candidates is a list of policies; got {candidates!r}. For one write"
            " [policy]."
        )
    if not candidates:
        raise ValueError(
            "candidates has no policy. Leave it out for those that plan usually tries."
        )


def _compared(trials: Iterable[Trial]) -> Comparison:
    """The trials; what the compiler failed for, unless it took a policy, or memory is
    too small for all.
    """
    found = Comparison(tuple(trials))
    errors = [
        one.failure
        for one in found.trials
        if one.failure and not isinstance(one.failure, DoesNotFit)
    ]
    if errors and all(trial.report is None for trial in found.trials):
        raise errors[-1]
    return found


def _nothing_fits(tried: Comparison, budget: int, host_budget: float) -> str:
    """What was tried, and the smallest of it that the host's budget allows, if there is
    one.
    """
    on_host = (
        f" and {readable_bytes(int(host_budget))} on the host"
        if host_budget < math.inf
        else ""
    )
    found = [
        (trial.name, trial.report) for trial in tried.trials if trial.report is not None
    ]
    if not found:
        smallest = "The compiler refused all of them."
    else:
        name, needs = min(
            found, key=lambda pair: (pair[1].host.total > host_budget, pair[1].total)
        )
        smallest = (
            f"The smallest found is {name} with {readable_bytes(needs.total)} a device,"
            f" {readable_bytes(needs.arguments)} of it arguments, and"
            f" {readable_bytes(needs.host.total)} on the host. Shorten the context,"
            " shard over more devices, freeze weights or keep them on the host."
        )
    return (
        f"no candidate fits {readable_bytes(budget)} a device{on_host}."
        f" {smallest}\n{tried}"
    )
