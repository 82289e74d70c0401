"""Compiles policies of one program, and finds the one with the fewest FLOPs among those that fit."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from .._static import PyTree
from ._arguments import arguments_on_host
from ._call import TracedCall, trace_call
from ._compiled_sizes import DoesNotFit
from ._costs import Flops
from ._report import MemoryReport
from ._targets import Target

_NEVER = (float("inf"), float("inf"))
_OfCount: TypeAlias = Callable[[int], ScanCheckpointPolicy | None]  # of first layers, if it can have any


@dataclasses.dataclass(frozen=True)
class Trial:
    """One policy, compiled.

    Attributes:
        policy: the policy, as it was given.
        report: its memory and FLOPs; None if the compiler refused it.
        failure: the compiler's message, if it refused.
        streamed: whether weights were on the host.
        label: what tables call it; the policy by default.
    """

    policy: ScanCheckpointSpec
    report: MemoryReport | None
    failure: str = ""
    streamed: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or policy_name(self.policy, self.streamed)


def policy_name(policy: ScanCheckpointSpec, streamed: bool) -> str:
    """What tables call a policy: `'nested'`, or its settings, as `nested=True, save_carries='offload'`."""
    name = repr(policy)
    if isinstance(policy, ScanCheckpointPolicy):
        name = name.removeprefix("ScanCheckpointPolicy(").removesuffix(")") or name
    return f"{name}, streamed" if streamed else name


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bytes on a device and on the host; None for no limit."""

    device: int
    host: int | None = None

    def hold(self, trial: Trial) -> bool:
        """Whether a policy fits."""
        found = trial.report
        return found is not None and found.total <= self.device and self.holds_on_host(found)

    def holds_on_host(self, found: MemoryReport) -> bool:
        return self.host is None or found.host.total <= self.host


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that takes a policy, with the options of `plan`."""

    of_policy: Callable[[ScanCheckpointSpec], Callable[..., Any]]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    target: str | Target = "local"
    donate: str | Sequence[str] = ()
    streamed: Callable[..., Sequence[PyTree]] | None = None
    cache: str | Path | None = None

    def traced(self, policy: ScanCheckpointSpec, on_host: bool) -> TracedCall:
        args = arguments_on_host(self.streamed, self.args) if on_host and self.streamed else self.args
        return trace_call(self.of_policy(policy), args, self.kwargs, self.target, self.donate)


class Search:
    """Traces and compiles policies of a program, and remembers what it compiled, in order."""

    def __init__(self, program: Program, show: Callable[[Trial], None] | None = None):
        self._program, self._show = program, show
        self._traced: dict[tuple[str, bool], TracedCall] = {}
        self._error: Exception | None = None
        self.trials: list[Trial] = []

    def trial(self, policy: ScanCheckpointSpec, streamed: bool) -> Trial:
        """Compile the program under a policy, if it wasn't yet."""
        for known in self.trials:
            if (known.policy, known.streamed) == (policy, streamed):
                return known
        try:
            report = self._trace(policy, streamed).report(self._program.cache)
            found = Trial(policy, report, streamed=streamed)
        except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, DoesNotFit):
                error.add_note(f"while compiling the policy {policy_name(policy, streamed)}")
                self._error = error
            found = Trial(policy, None, str(error).splitlines()[0], streamed)
        self.trials.append(found)
        if self._show is not None:
            self._show(found)
        return found

    def check(self) -> None:
        """Whether the compiler took a policy, or refused all because memory is too small.

        Raises:
            jax.errors.JaxRuntimeError: it failed for another reason; a note names the policy.
        """
        if self._error is not None and all(trial.report is None for trial in self.trials):
            raise self._error

    def least(
        self, candidates: Sequence[ScanCheckpointSpec], limits: Limits, layers: int | None, streamed: bool
    ) -> Trial | None:
        """The policy with the fewest FLOPs that fits, of the candidates and what is derived from them.

        With wider limits the result never has more FLOPs: candidates are tried in an order that does not
        depend on the limits, and `first_layers` by bisection over counts that do not either.

        Nothing is derived if `layers` (of the stack) is None. The result is None if no candidate fits.
        """
        plain: list[ScanCheckpointSpec] = [policy for policy in candidates if _recomputes_nothing(policy)]
        best = self._first_to_fit(plain, limits, streamed)
        if best is not None or self._too_large(limits, streamed):
            return best
        others: list[ScanCheckpointSpec] = [policy for policy in candidates if policy not in plain]
        others.sort(key=lambda policy: self._cost(policy, streamed))
        best = self._first_to_fit(others, limits, streamed)
        if best is None or layers is None:
            return best
        for policy in others[others.index(best.policy) :]:
            base = resolve_policy(policy)
            for kept in _kept_of_first_layers(base):
                with_first = functools.partial(_with_first, base, kept)
                best = self._with_first_layers(best, with_first, base.first_layers, layers, limits)
            if base.nested is True and base.save_carries is True and not base.first_layers:
                cut = self._cut_with_internals(base, layers, streamed)
                best = self._with_first_layers(best, cut, -1, layers, limits)
        return best

    def _cut_with_internals(self, base: ScanCheckpointPolicy, layers: int, streamed: bool) -> _OfCount:
        """From a number of first layers to the cut of the others that needs least memory.

        The internals of a segment are kept while it is reversed. The bytes of a carry and of a layer's
        internals are those that three compiled cuts tell; where they don't, there is no cut.
        """
        kept = dataclasses.replace(base, save_block_internals=base.save_block_internals or True)
        longest = kept.schedule(layers).slots
        shorter = [-(-layers // max(1, longest // part)) for part in (2, 3)]
        cuts = [kept, *(dataclasses.replace(kept, nested=k) for k in shorter)]
        schedules = [policy.schedule(layers) for policy in cuts]
        held = [(each.slots, max(run.visits for run in each.runs), 1) for each in schedules]
        if np.linalg.matrix_rank(held) < len(held) or _NEVER in [self._cost(cut, streamed) for cut in cuts]:
            return lambda first_layers: None
        found = [self.trial(policy, streamed).report for policy in cuts]
        totals = [report.total for report in found if report is not None]
        if len(totals) < len(held):
            return lambda first_layers: None
        carry, internals, _ = np.maximum(np.linalg.solve(held, totals), 0.0)

        def cut(first_layers: int) -> ScanCheckpointPolicy | None:
            rest = layers - first_layers

            def needs(longest: int) -> float:
                return (-(-rest // longest) - 1 + longest) * carry + longest * internals

            # Segments of one layer would be visited together, with the internals of all of them.
            longest = min(range(min(2, rest), rest + 1), key=needs)
            return _with_first(dataclasses.replace(kept, nested=-(-rest // longest)), False, first_layers)

        return cut

    def _first_to_fit(
        self, policies: Sequence[ScanCheckpointSpec], limits: Limits, streamed: bool
    ) -> Trial | None:
        for policy in policies:
            if limits.hold(trial := self.trial(policy, streamed)):
                return trial
            if self._too_large(limits, streamed):
                break
        return None

    def _too_large(self, limits: Limits, streamed: bool) -> bool:
        """Whether the arguments, which are the same under every policy, don't fit."""
        found = (trial.report for trial in self.trials if trial.streamed == streamed and trial.report)
        return any(report.arguments > limits.device for report in found)

    def _with_first_layers(
        self, best: Trial, with_first: _OfCount, low: int, high: int, limits: Limits
    ) -> Trial:
        """`best`, or the policy with as many first layers as fit, if that has fewer FLOPs.

        Their number is above `low` and below `high`.
        """
        assert best.report is not None
        found, cost = best, _order(best.report.flops)
        while high - low > 1:
            most, middle = map(with_first, (high - 1, (low + high) // 2))
            if most is None or middle is None or self._cost(most, best.streamed) >= cost:
                break
            trial = self.trial(middle, best.streamed)
            if limits.hold(trial):
                low, found = (low + high) // 2, trial
            else:
                high = (low + high) // 2
        return found if self._cost(found.policy, best.streamed) < cost else best

    def _trace(self, policy: ScanCheckpointSpec, streamed: bool) -> TracedCall:
        key = repr(policy), streamed
        if key not in self._traced:
            self._traced[key] = self._program.traced(policy, streamed)
        return self._traced[key]

    def _cost(self, policy: ScanCheckpointSpec, streamed: bool) -> tuple[float, float]:
        """FLOPs and bytes moved; infinite where the program can't be traced under the policy."""
        try:
            return _order(self._trace(policy, streamed).flops)
        except Exception:  # raised again where it is this policy's turn to be compiled
            return _NEVER


def _order(flops: Flops) -> tuple[float, float]:
    return flops.matmul, flops.moved


def _recomputes_nothing(policy: ScanCheckpointSpec) -> bool:
    policy = resolve_policy(policy)
    return policy.saves_everything and not policy.is_nested


def _kept_of_first_layers(base: ScanCheckpointPolicy) -> tuple[ScanCheckpointSpec, ...]:
    """What the first layers of a policy could keep to leave less to compute or to move."""
    if base.saves_everything or base.max_carries is not None:
        return ()
    if base.first_layers:
        return (base.first_policy,)
    return (False, True) if base.is_nested or base.save_carries == "offload" else (False,)


def _with_first(
    base: ScanCheckpointPolicy, kept: ScanCheckpointSpec, count: int
) -> ScanCheckpointPolicy | None:
    """The policy with that many first layers; None if it cannot have any."""
    try:
        return dataclasses.replace(base, first_layers=count, first_policy=kept)
    except ValueError:
        return None
