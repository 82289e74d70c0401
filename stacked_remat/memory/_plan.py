"""Chooses a remat policy: the one with the fewest FLOPs that fits in memory.

`plan` and `compare` make the user's program for each policy and hand it to `_call.py`,
which traces it (seconds; gives FLOPs and transfers) and compiles it (up to minutes;
gives memory). A `Search` does as little of both as it can:

1. Policies that recompute nothing are compiled first. If one fits it is the answer, and
   no other is traced.
2. Else all candidates are traced and compiled in order of their FLOPs, up to the first
   that fits. No later one can have fewer.
3. With the number of layers known, three families of policies lie between the
   candidates, each with one count: so many `first_layers`, so many `max_carries`, or
   `first_layers` in front of a cut that keeps a segment's internals. Within a family a
   larger count is taken to have fewer FLOPs and more memory, so the largest that fits
   is found by bisection.

Of everything that was compiled and fits, the cheapest is the answer. Memory is always
the compiler's figure, never a model's: a model (carries and internals of one size in
each layer) only chooses which cut to compile in the third family.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax

from .. import ScanCheckpointPolicy, ScanCheckpointSpec
from .._messages import parse_bytes
from .._policy import resolve_policy
from .._schedule import whole_number
from .._static import PyTree
from ._call import DoesNotFit, TracedCall, trace_call
from ._report import Comparison, MemoryReport, Trial
from ._table import readable_bytes
from ._targets import Target

# The cost (see `Search._cost`) of a policy under which the program can't be traced.
_NEVER = (math.inf, math.inf, math.inf)
# A family of policies: the member for a count.
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

    FLOPs are those of matrix products; of equals, the policy comes first that moves
    fewer bytes between device and host, or, with `layers`, runs fewer layers again. A
    larger budget never plans more of them, for the same place of the weights.

    With `layers`, candidates with as many `first_layers`, or `max_carries`, as fit are
    considered too, and for `nested=True` cuts that keep the internals of a segment
    while it is reversed (`nested=k, save_block_internals=True`): then no layer runs
    more than twice. For layers that are alike, the plan takes at most 1.05 times the
    FLOPs of any order of the same operations where such a cut fits, and up to 1.2 times
    as many below that.

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
        notes = *self.tried.notes, note
        return str(Comparison(self.tried.trials, "plan", notes))


@dataclasses.dataclass(frozen=True)
class Search:
    """Traces and compiles a program under policies, each policy once."""

    # The program under a policy, traced.
    program: Callable[[ScanCheckpointSpec], TracedCall]
    # Limits in bytes for one device, and for what it uses of its host's memory.
    budget: float = math.inf
    host_budget: float = math.inf
    # Folder for what compilations find; None for none.
    cache: str | Path | None = None
    # Called with each trial once it is compiled.
    show: Callable[[Trial], None] = lambda _: None
    # Whether the program's weights are on the host, for the names of trials.
    streamed: bool = False
    # Number of layers; None if not known, and then no family is searched.
    layers: int | None = None
    # What was traced and what was compiled so far, in order.
    traced: dict[ScanCheckpointPolicy, TracedCall] = dataclasses.field(
        default_factory=dict
    )
    compiled: dict[ScanCheckpointPolicy, Trial] = dataclasses.field(
        default_factory=dict
    )

    def fits(self, trial: Trial) -> bool:
        report = trial.report
        return (
            report is not None
            and report.total <= self.budget
            and report.host.total <= self.host_budget
        )

    def trial(self, policy: ScanCheckpointSpec) -> Trial:
        """The policy, compiled. If the compiler refuses, its error is in the trial."""
        key = resolve_policy(policy)
        if key in self.compiled:
            return self.compiled[key]
        report = failure = None
        try:
            report = self._trace(policy).report(self.cache)
        except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
            failure = error
        trial = Trial(policy, report, failure, self.streamed)
        self.compiled[key] = trial
        if failure is not None:
            failure.add_note(f"while compiling the policy {trial.name}")
        self.show(trial)
        return trial

    def least(self, candidates: Sequence[ScanCheckpointSpec]) -> Trial | None:
        """The policy with the fewest FLOPs that fits, of the candidates and of the
        families around them; None if no candidate fits.

        With wider limits the result never has more FLOPs: the order of candidates and
        the counts that a bisection may try do not depend on the limits.
        """
        in_order = self._in_order(candidates)
        for policy in in_order:
            first = self.trial(policy)
            if self.fits(first):
                break
            # Arguments take the same memory under every policy.
            if first.report is not None and first.report.arguments > self.budget:
                return None
        else:
            return None
        if self.layers is None or _recomputes_nothing(policy):
            return first
        # Later candidates have more FLOPs, but a member of their families may have
        # fewer than the first that fits: they leave more memory for first layers.
        # (The generator goes on where the loop above left it.)
        for base in (policy, *in_order):
            for of_count, low in self._families(resolve_policy(base), self.layers):
                self._try_counts(of_count, low, self.layers)
        return self._best()

    def _in_order(
        self, candidates: Sequence[ScanCheckpointSpec]
    ) -> Iterator[ScanCheckpointSpec]:
        """First what recomputes nothing, then the others by FLOPs.

        A generator, since sorting traces the program once for each of the others.
        """
        others: list[ScanCheckpointSpec] = []
        for policy in candidates:
            if _recomputes_nothing(policy):
                yield policy
            else:
                others.append(policy)
        yield from sorted(others, key=self._cost)

    def _families(
        self, base: ScanCheckpointPolicy, layers: int
    ) -> Iterator[tuple[_OfCount, int]]:
        """The families around a policy, each with the count to start above."""
        if not base.saves_everything and base.max_carries is None:
            yield (
                lambda count: dataclasses.replace(base, first_layers=count),
                base.first_layers,
            )
        is_plain_cut = (
            base.nested is True and base.save_carries is True and not base.first_layers
        )
        if is_plain_cut or base.max_carries is not None:
            cut = dataclasses.replace(base, nested=False)
            yield lambda count: dataclasses.replace(cut, max_carries=count), 1
        if is_plain_cut and (of_count := self._cut_with_internals(base, layers)):
            yield of_count, -1

    def _cut_with_internals(
        self, base: ScanCheckpointPolicy, layers: int
    ) -> _OfCount | None:
        """The family of cuts that keep the internals of the segment being reversed, so
        that no layer runs more than twice; its count is of `first_layers` before the
        cut. None if a policy that it is measured by can't be compiled.

        With segments of length L, N layers need ceil(N / L) carries and the internals
        of L layers. Which L needs least depends on bytes of a carry and of a layer's
        internals. They are found from three compiled programs: one that keeps all N
        carries; one that keeps S slots of them (`base`) and one layer's internals; and
        one with S segments, which keeps the internals of ceil(N / S) layers.
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
        # Two layers or fewer have nothing to measure. A policy that can't be traced is
        # found here, before others are compiled for nothing.
        if slots == layers or _NEVER in map(self._cost, policies):
            return None
        totals = []
        for policy in policies:
            report = self.trial(policy).report
            if report is None:
                return None
            totals.append(report.total)
        of_all_carries, of_slots, of_internals = totals
        # A difference that XLA's other temporaries hide may be negative; 0 then.
        carry = max(0, of_all_carries - of_slots) / (layers - slots)
        segment = math.ceil(layers / slots)
        internals = max(0, of_internals - of_slots) / (segment - 1)

        def of_count(first_layers: int) -> ScanCheckpointPolicy:
            rest = layers - first_layers

            def needs(length: int) -> float:
                segments = math.ceil(rest / length)
                return segments * carry + length * internals

            length = min(range(1, rest + 1), key=needs)
            return dataclasses.replace(
                kept, nested=math.ceil(rest / length), first_layers=first_layers
            )

        return of_count

    def _best(self) -> Trial:
        """The cheapest of the compiled policies that fit; there is one at least."""
        fitting = filter(self.fits, self.compiled.values())
        return min(fitting, key=lambda trial: self._cost(trial.policy))

    def _try_counts(self, of_count: _OfCount, low: int, high: int) -> None:
        """Compile members of a family: a bisection for the largest count that fits,
        between `low` and `high` (both excluded).

        It ends where even the largest count left would not beat the best so far.
        """
        least = self._cost(self._best().policy)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                cheapest = of_count(high - 1)
                policy = of_count(middle)
            except ValueError:  # a policy refuses the count
                return
            if self._cost(cheapest) >= least:
                return
            if self.fits(self.trial(policy)):
                low = middle
            else:
                high = middle

    def _trace(self, policy: ScanCheckpointSpec) -> TracedCall:
        key = resolve_policy(policy)
        if key not in self.traced:
            self.traced[key] = self.program(policy)
        return self.traced[key]

    def _cost(self, policy: ScanCheckpointSpec) -> tuple[float, float, float]:
        """What policies are ordered by: FLOPs of matrix products; of equals, bytes
        moved between device and host; of equals, and if `layers` is known, how many
        layers run again.
        """
        try:
            flops = self._trace(policy).flops
            remat = resolve_policy(policy).for_layers(self.layers or 0)
        except Exception:
            # Another policy may do. `trial` raises this again if it is reached.
            return _NEVER
        again = 0
        if not _recomputes_nothing(policy):
            again += remat.length - remat.first_layers
        if remat.schedule:
            again += remat.schedule.replays
        return flops.matmul, flops.moved, again


def _recomputes_nothing(policy: ScanCheckpointSpec) -> bool:
    resolved = resolve_policy(policy)
    return resolved.saves_everything and not resolved.has_cut


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
    traced = _tracer(fn_of_policy, args, kwargs, target, donate)
    return _compared(map(Search(traced).trial, candidates))


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
        layers: of the stack, or steps of the loop, to search for more policies.
        streamed: the arguments with weights on the host, such as
            `(streaming.to_host(model), x)` of shapes, to be tried where nothing fits.
        show: called with each trial once it is compiled.

    Raises:
        BudgetError: no candidate fits; shows all of them and the smallest.
        jax.errors.JaxRuntimeError: the compiler takes no candidate, and fails at one of
            them for another reason than memory; a note names the policy.
        ValueError, TypeError, TargetError: as `report`; for a wrong `budget`,
            `candidates` or `layers`.

    Cost: a compilation for each candidate with fewer FLOPs than the first that fits,
    and a tracing for each, unless one fits that recomputes nothing; with `streamed`
    twice that. With `layers` three more, and `log2(layers)` for each way to keep more.
    """
    most = parse_bytes(budget)
    most_on_host = math.inf if host_budget is None else parse_bytes(host_budget)
    _check_policies(candidates)
    _check_options(layers, streamed, args)
    trials: list[Trial] = []
    # Streamed weights cost transfers, so they come second.
    for arguments in (args,) if streamed is None else (args, streamed):
        traced = _tracer(fn_of_policy, arguments, kwargs, target, donate)
        is_streamed = arguments is streamed
        search = Search(traced, most, most_on_host, cache, show, is_streamed, layers)
        found = search.least(candidates)
        trials += search.compiled.values()
        if found is not None and found.report is not None:
            tried = _compared(trials)
            return Plan(found.policy, found.report, tried, most, is_streamed)
    raise BudgetError(_nothing_fits(_compared(trials), most, most_on_host))


def _check_options(layers: Any, streamed: Any, args: Sequence[PyTree]) -> None:
    if layers is not None:
        meaning = "the number of layers or steps"
        whole_number("layers", layers, meaning, "Leave it out if not known.")
    if streamed is None:
        return
    is_list = isinstance(streamed, tuple | list)
    if not is_list or len(streamed) != len(args):
        raise TypeError(
            f"streamed is the {len(args)} arguments in order, with weights on the host,"
            f" as in (streaming.to_host(model), x); got {type(streamed).__name__}."
        )


def _tracer(
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
            raise TypeError(
                "plan and compare call their first argument with a policy, and for"
                f" {policy!r} it raised {type(error).__name__}: {error}. Write a"
                " function of the policy that returns the program: lambda remat: lambda"
                " blocks, x: train_step(blocks, x, remat=remat)."
            ) from error
        return trace_call((fn, args, kwargs), target, donate)

    return traced


def _check_policies(candidates: Any) -> None:
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


def _compared(trials: Iterable[Trial]) -> Comparison:
    """The trials side by side.

    If the compiler took no policy, and failed for one of them for another reason than
    memory, that error is raised: it is one of the program, not of the policies.
    """
    comparison = Comparison(tuple(trials))
    if not any(trial.report for trial in comparison.trials):
        for trial in comparison.trials:
            if trial.failure and not isinstance(trial.failure, DoesNotFit):
                raise trial.failure
    return comparison


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
        smallest = (
            f"The smallest found is {trial.name} with {readable_bytes(needs.total)} a"
            f" device, {readable_bytes(needs.arguments)} of it arguments, and"
            f" {readable_bytes(needs.host.total)} on the host. Shorten the context,"
            " shard over more devices, freeze weights or keep them on the host."
        )
    return (
        f"no candidate fits {readable_bytes(budget)} a device{on_host}."
        f" {smallest}\n{tried}"
    )
