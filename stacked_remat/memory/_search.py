"""Compiles policies of one program, and finds the one with the fewest FLOPs among those that fit."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import jax

from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._call import DoesNotFit, TracedCall
from ._report import MemoryReport

_NEVER = (float("inf"), float("inf"))
_OfCount: TypeAlias = Callable[[int], ScanCheckpointPolicy]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One policy, compiled.

    Attributes:
        policy: the policy, as it was given.
        report: its memory and FLOPs; None if the compiler refused it.
        failure: the compiler's error, if it refused.
        streamed: whether weights were on the host.
        label: what tables call it; the policy by default.
    """

    policy: ScanCheckpointSpec
    report: MemoryReport | None
    failure: Exception | None = None
    streamed: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """What tables call it: `'nested'`, or its settings, as `nested=True, save_carries='offload'`."""
        name = repr(self.policy)
        if isinstance(self.policy, ScanCheckpointPolicy):
            name = name.removeprefix("ScanCheckpointPolicy(").removesuffix(")") or name
        return self.label or (f"{name}, streamed" if self.streamed else name)


def check_compiled(trials: Sequence[Trial]) -> None:
    """Raise what the compiler failed for, unless it took a policy, or memory is too small for all."""
    errors = [one.failure for one in trials if one.failure and not isinstance(one.failure, DoesNotFit)]
    if errors and all(trial.report is None for trial in trials):
        raise errors[-1]


@dataclasses.dataclass(frozen=True)
class Search:
    """Traces and compiles policies of a program, and remembers what it compiled, in order."""

    program: Callable[[ScanCheckpointSpec], TracedCall]
    budget: float = math.inf
    host_budget: float = math.inf
    cache: str | Path | None = None
    show: Callable[[Trial], None] = lambda _: None
    streamed: bool = False
    traced: dict[ScanCheckpointPolicy, TracedCall] = dataclasses.field(default_factory=dict)
    compiled: dict[ScanCheckpointPolicy, Trial] = dataclasses.field(default_factory=dict)

    def fits(self, trial: Trial) -> bool:
        found = trial.report
        return found is not None and found.total <= self.budget and found.host.total <= self.host_budget

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

    def least(self, candidates: Sequence[ScanCheckpointSpec], layers: int | None) -> Trial | None:
        """The policy with the fewest FLOPs that fits, of the candidates and what is derived from them.

        With wider limits the result never has more FLOPs: candidates are tried in an order that does not
        depend on the limits, and `first_layers` and carries by bisection over counts that do not either.
        """
        plain: list[ScanCheckpointSpec] = [
            one for one in candidates if (own := resolve_policy(one)).saves_everything and not own.is_nested
        ]
        first = self._first_to_fit(plain)
        if first is not None or self._too_large():
            return first
        others: list[ScanCheckpointSpec] = [policy for policy in candidates if policy not in plain]
        others.sort(key=self._cost)
        first = self._first_to_fit(others)
        if first is None or layers is None:
            return first
        for policy in others[others.index(first.policy) :]:
            for of_count, low in self._families(resolve_policy(policy), layers):
                self._try_counts(of_count, low, layers)
        return self._best()

    def _families(self, base: ScanCheckpointPolicy, layers: int) -> Iterator[tuple[_OfCount, int]]:
        """Policies that have fewer FLOPs the larger a number is, and the number to start above."""
        if not base.saves_everything and base.max_carries is None:
            yield lambda count: dataclasses.replace(base, first_layers=count), base.first_layers
        if base.nested is True and base.save_carries is True and not base.first_layers:
            cut = dataclasses.replace(base, nested=False)
            yield lambda count: dataclasses.replace(cut, max_carries=count), base.schedule(layers).slots
            if of_count := self._cut_with_internals(base, layers):
                yield of_count, -1

    def _cut_with_internals(self, base: ScanCheckpointPolicy, layers: int) -> _OfCount | None:
        """From a number of first layers to the cut of the others that needs least memory.

        The internals of a segment are kept while it is reversed. The bytes of a carry and of a layer's
        internals are what three policies differ in; where one of them can't be compiled, there is no cut.
        """
        kept = dataclasses.replace(base, save_block_internals=base.save_block_internals or True)
        policies = ScanCheckpointPolicy(), dataclasses.replace(base, save_block_internals=False), kept
        schedule = base.schedule(layers)
        if schedule.slots == layers or _NEVER in map(self._cost, policies):
            return None
        found = [self.trial(policy).report for policy in policies]
        totals = [report.total for report in found if report is not None]
        if len(totals) < len(found):
            return None
        every_carry, cut, with_internals = totals
        carry = max(0, every_carry - cut) / (layers - schedule.slots)
        visited_at_once = max(run.visits for run in schedule.runs)
        internals = max(0, with_internals - cut) / (visited_at_once - 1)

        def of_count(first_layers: int) -> ScanCheckpointPolicy:
            rest = layers - first_layers

            def needs(longest: int) -> float:
                return (-(-rest // longest) - 1 + longest) * carry + longest * internals

            # Segments of one layer would be visited together, with the internals of all of them.
            longest = min(range(min(2, rest), rest + 1), key=needs)
            return dataclasses.replace(kept, nested=-(-rest // longest), first_layers=first_layers)

        return of_count

    def _best(self) -> Trial:
        """The one with the fewest FLOPs of the compiled policies that fit, of which there is one."""
        return min(filter(self.fits, self.compiled.values()), key=lambda trial: self._cost(trial.policy))

    def _first_to_fit(self, policies: Sequence[ScanCheckpointSpec]) -> Trial | None:
        for policy in policies:
            if self.fits(trial := self.trial(policy)):
                return trial
            if self._too_large():
                break
        return None

    def _too_large(self) -> bool:
        """Whether the arguments, which are the same under every policy, don't fit."""
        found = (trial.report for trial in self.compiled.values() if trial.report is not None)
        return any(report.arguments > self.budget for report in found)

    def _try_counts(self, of_count: _OfCount, low: int, high: int) -> None:
        """Tries how many fit, above `low` and below `high`, while more can have fewer FLOPs."""
        least = self._cost(self._best().policy)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                most, policy = of_count(high - 1), of_count(middle)
            except ValueError:  # of a policy that cannot have such a number
                break
            if self._cost(most) >= least:
                break
            low, high = (middle, high) if self.fits(self.trial(policy)) else (low, middle)

    def _trace(self, policy: ScanCheckpointSpec) -> TracedCall:
        key = resolve_policy(policy)
        if key not in self.traced:
            self.traced[key] = self.program(policy)
        return self.traced[key]

    def _cost(self, policy: ScanCheckpointSpec) -> tuple[float, float]:
        """FLOPs and bytes moved; infinite where the program can't be traced under the policy."""
        try:
            flops = self._trace(policy).flops
            return flops.matmul, flops.moved
        except Exception:  # raised again where it is this policy's turn to be compiled
            return _NEVER
