"""Compiles policies of one program, and finds the one with the fewest FLOPs among those that fit."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import jax

from .._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._call import TracedCall
from ._compiled_sizes import DoesNotFit
from ._report import MemoryReport
from ._table import readable_bytes

_NEVER = (float("inf"), float("inf"))
_Trace: TypeAlias = Callable[[ScanCheckpointSpec, bool], TracedCall]  # with weights on the host or not
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


_Show: TypeAlias = Callable[[Trial], None]


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

    def text(self, device: int, host: int | None) -> str:
        """Bytes on a device, and on the host where that has a limit."""
        on_host = "" if self.host is None or host is None else f" and {readable_bytes(host)} on the host"
        return f"{readable_bytes(device)} a device{on_host}"

    def holds_on_host(self, found: MemoryReport) -> bool:
        return self.host is None or found.host.total <= self.host


class Search:
    """Traces and compiles policies of a program, and remembers what it compiled, in order."""

    def __init__(self, trace: _Trace, cache: str | Path | None = None, show: _Show | None = None):
        self._program, self._cache, self._show = trace, cache, show
        self._traced: dict[tuple[ScanCheckpointPolicy, bool], TracedCall] = {}
        self._error: Exception | None = None
        self.trials: list[Trial] = []

    def trial(self, policy: ScanCheckpointSpec, streamed: bool) -> Trial:
        """Compile the program under a policy, if it wasn't yet."""
        for known in self.trials:
            if (resolve_policy(known.policy), known.streamed) == (resolve_policy(policy), streamed):
                return known
        try:
            report = self._trace(policy, streamed).report(self._cache)
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
        first = self._first_to_fit(plain, limits, streamed)
        if first is not None or self._too_large(limits, streamed):
            return first
        others: list[ScanCheckpointSpec] = [policy for policy in candidates if policy not in plain]
        others.sort(key=lambda policy: self._cost(policy, streamed))
        first = self._first_to_fit(others, limits, streamed)
        if first is None or layers is None:
            return first
        for policy in others[others.index(first.policy) :]:
            base = resolve_policy(policy)
            for kept in _kept_of_first_layers(base):
                with_first = functools.partial(_with_first, base, kept)
                self._try_first_layers(with_first, base.first_layers, layers, limits, streamed)
            if base.nested is True and base.save_carries is True and not base.first_layers:
                cut = self._cut_with_internals(base, layers, streamed)
                self._try_first_layers(cut, -1, layers, limits, streamed)
        return self._best(limits, streamed)

    def _cut_with_internals(self, base: ScanCheckpointPolicy, layers: int, streamed: bool) -> _OfCount:
        """From a number of first layers to the cut of the others that needs least memory.

        The internals of a segment are kept while it is reversed. The bytes of a carry and of a layer's
        internals are what three policies differ in; where one of them can't be compiled, there is no cut.
        """
        plain = dataclasses.replace(base, save_block_internals=False)
        kept = dataclasses.replace(base, save_block_internals=base.save_block_internals or True)
        policies = dataclasses.replace(plain, nested=False), plain, kept
        schedule = base.schedule(layers)
        if schedule.slots == layers or _NEVER in [self._cost(policy, streamed) for policy in policies]:
            return lambda first_layers: None
        found = [self.trial(policy, streamed).report for policy in policies]
        totals = [report.total for report in found if report is not None]
        if len(totals) < len(found):
            return lambda first_layers: None
        every_carry, cut, with_internals = totals
        carry = max(0, every_carry - cut) / (layers - schedule.slots)
        visited_at_once = max(run.visits for run in schedule.runs)
        internals = max(0, with_internals - cut) / (visited_at_once - 1)

        def of_count(first_layers: int) -> ScanCheckpointPolicy | None:
            rest = layers - first_layers

            def needs(longest: int) -> float:
                return (-(-rest // longest) - 1 + longest) * carry + longest * internals

            # Segments of one layer would be visited together, with the internals of all of them.
            longest = min(range(min(2, rest), rest + 1), key=needs)
            return _with_first(dataclasses.replace(kept, nested=-(-rest // longest)), False, first_layers)

        return of_count

    def _best(self, limits: Limits, streamed: bool) -> Trial:
        """The one with the fewest FLOPs of the compiled policies that fit, of which there is one."""
        fitting = (trial for trial in self.trials if trial.streamed == streamed and limits.hold(trial))
        return min(fitting, key=lambda trial: self._cost(trial.policy, streamed))

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

    def _try_first_layers(
        self, with_first: _OfCount, low: int, high: int, limits: Limits, streamed: bool
    ) -> None:
        """Tries how many first layers fit, above `low` and below `high`, while that can have fewer FLOPs."""
        least = self._cost(self._best(limits, streamed).policy, streamed)
        while high - low > 1:
            middle = (low + high) // 2
            most, policy = with_first(high - 1), with_first(middle)
            if most is None or policy is None or self._cost(most, streamed) >= least:
                break
            if limits.hold(self.trial(policy, streamed)):
                low = middle
            else:
                high = middle

    def _trace(self, policy: ScanCheckpointSpec, streamed: bool) -> TracedCall:
        key = resolve_policy(policy), streamed
        if key not in self._traced:
            self._traced[key] = self._program(policy, streamed)
        return self._traced[key]

    def _cost(self, policy: ScanCheckpointSpec, streamed: bool) -> tuple[float, float]:
        """FLOPs and bytes moved; infinite where the program can't be traced under the policy."""
        try:
            flops = self._trace(policy, streamed).flops
            return flops.matmul, flops.moved
        except Exception:  # raised again where it is this policy's turn to be compiled
            return _NEVER


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
