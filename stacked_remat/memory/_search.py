"""Looks for the policy with the fewest FLOPs that fits, with few compilations.

Without the number of layers, candidates are compiled in order, up to the first that
fits: those that recompute nothing, after which no other is even traced, then the others
by their FLOPs.

With it, candidates are varied: how many layers come before a cut, how many carries are
kept, into how many segments layers are cut, and which values inside layers are kept or
moved to the host (`variations`). A model of the program (`_model.py`) tells the FLOPs
of each, and its bytes beside those of one policy that is compiled. Of these stay the
policies that take less memory than all with fewer FLOPs, the *ladder*. Where it crosses
the budget is found by compiling the first step that should fit; what the model is wrong
by there tells which step to compile next. At the end up to two steps are compiled that
fit by the model as it is, without that correction.

Of everything that was compiled and fits, the cheapest is the answer. Memory is always
the compiler's figure, never the model's. The ladder does not depend on the budget, so
that with a larger one the answer has no more FLOPs, but for errors of the model.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import jax

from .. import ScanCheckpointPolicy, ScanCheckpointSpec
from .._policy import recomputes_nothing, resolve_policy
from ._call import DoesNotFit, TracedCall
from ._model import Cost, Model, measured_model, traced_model
from ._report import MemoryReport, Trial

# The cost (see `Search._cost`) of a policy under which the program can't be traced.
_NEVER = (math.inf, math.inf, math.inf)
# Policies whose FLOPs differ by less than this factor are taken for one.
_ALIKE = 1.0005
# A step that takes up to so much more than the budget, by the model, may fit.
_SLACK = 1.1
# The model's error differs between steps, and that of one may rule out another that
# fits. So steps that take up to so much more than the budget by the model as it is are
# compiled too, this many at most.
_NEAR = 1.03
_MOST_NEAR = 2


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
    # Called with the name of each policy before it is compiled, and with each trial
    # once it is.
    begin: Callable[[str], None] = lambda _: None
    show: Callable[[Trial], None] = lambda _: None
    # Whether the program's weights are on the host, for the names of trials.
    streamed: bool = False
    # Number of layers; None if not known, and then candidates are not varied.
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
        self.begin(Trial(policy, None, None, self.streamed).name)
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
        """The policy with the fewest FLOPs that fits, of the candidates and, with
        `layers`, of their variations; None if no candidate fits.
        """
        ladder = self.ladder(candidates)
        # Arguments take the same memory under every policy.
        for trial in self.compiled.values():
            if trial.report is not None and trial.report.arguments > self.budget:
                return None
        self._climb(ladder)
        self._compile_near(ladder)
        # Policies of JAX, of which the ladder has none.
        for policy in candidates if ladder else ():
            if callable(resolve_policy(policy).save_block_internals):
                self.taken(policy)
        # Others were compiled to measure them.
        offered = {*map(resolve_policy, candidates)}
        offered |= {resolve_policy(step.policy) for step in ladder}
        # Also where no step of the ladder fits: the model may be wrong.
        if not self._fitting(offered):
            for policy in self._in_order(candidates):
                trial = self.trial(policy)
                if self.fits(trial):
                    break
                if trial.report is not None and trial.report.arguments > self.budget:
                    return None
        fitting = self._fitting(offered)
        return min(fitting, key=lambda trial: self._cost(trial.policy), default=None)

    def _in_order(
        self, candidates: Sequence[ScanCheckpointSpec]
    ) -> Iterator[ScanCheckpointSpec]:
        """First what recomputes nothing, then the others by FLOPs.

        A generator, since sorting traces the program once for each of the others.
        """
        others: list[ScanCheckpointSpec] = []
        for policy in candidates:
            if recomputes_nothing(policy):
                yield policy
            else:
                others.append(policy)
        yield from sorted(others, key=self._cost)

    def _fitting(self, offered: Collection[ScanCheckpointPolicy]) -> list[Trial]:
        """What of these policies was compiled and fits."""
        compiled = self.compiled.items()
        return [trial for key, trial in compiled if key in offered and self.fits(trial)]

    def ladder(self, candidates: Sequence[ScanCheckpointSpec]) -> "list[Step]":
        """The variations of some policies that take less memory than all with fewer
        FLOPs, from the fewest FLOPs to the most; [] where there is no model.
        """
        resolved = [*map(resolve_policy, candidates)]
        if self.layers is None or not any(map(_is_varied, resolved)):
            return []
        model = self._model(self.layers)
        if model is None:
            return []
        steps = self._steps(candidates, model)
        best = _best(steps)
        with_places = [step for step in best if resolve_policy(step.policy).places]
        # Layers of another stack, which have other operations, may refuse them.
        if with_places and self._cost(with_places[0].policy) == _NEVER:
            return _best(
                [step for step in steps if not resolve_policy(step.policy).places]
            )
        return best

    def _steps(
        self, candidates: Sequence[ScanCheckpointSpec], model: Model
    ) -> "list[Step]":
        """All variations with their costs by a model; candidates as they were given."""
        given: dict[ScanCheckpointPolicy, ScanCheckpointSpec] = {}
        for policy in candidates:
            given[resolve_policy(policy)] = policy
        measured = self.trial(given.get(model.reference, model.reference)).report
        if measured is None or self.layers is None:
            return []
        # Of several devices each is taken to hold as much.
        devices = measured.devices
        common = measured.total - model.reference_cost.device / devices
        has_host = self._has_host
        # Candidates have variations in common, each of which is one step.
        offered: dict[ScanCheckpointPolicy, None] = {}
        for policy in given:
            # What a policy of JAX keeps the model does not know.
            if not callable(policy.save_block_internals):
                offered |= dict.fromkeys(variations(policy, self.layers, model))
        steps = []
        for policy in offered:
            cost = model.cost(policy).of_device(devices)
            is_candidate = policy in given
            if cost.host > self.host_budget:
                continue
            if not is_candidate and not self._hides(policy, cost):
                continue
            # A CPU has one memory.
            kept = cost.device if has_host else cost.device + cost.host
            again = _runs_again(policy, self.layers)
            spec = given.get(policy, policy)
            steps.append(Step(spec, cost, again, common + kept, is_candidate))
        return steps

    @property
    def _has_host(self) -> bool:
        """Whether the host's memory is another than the device's."""
        return self._trace(_NESTED).target.devices()[0].platform != "cpu"

    def _model(self, layers: int) -> Model | None:
        def trace(policy: ScanCheckpointPolicy) -> TracedCall | None:
            # A program may refuse a policy.
            return None if self._cost(policy) == _NEVER else self._trace(policy)

        def report(policy: ScanCheckpointPolicy) -> MemoryReport | None:
            trial = self.taken(policy)
            return None if trial is None else trial.report

        return traced_model(trace) or measured_model(report, layers)

    def _hides(self, policy: ScanCheckpointPolicy, cost: Cost) -> bool:
        """Whether values that a policy moves to the host cross the link while others
        are computed, by the target's figures. Not where the user says nothing of the
        host's memory.
        """
        if not policy.offload_block_internals:
            return True
        target = self._trace(_NESTED).target
        if self.host_budget == math.inf or not target.flops or not target.link:
            return False
        return cost.host / target.link <= cost.flops / target.flops

    def _climb(self, ladder: "Sequence[Step]") -> None:
        """Compile steps of a ladder until one fits, and those above it do not, as far
        as the model tells.
        """
        # Steps up to `low` do not fit, `high` and those after it do. The last step that
        # was compiled took so much more than the model says.
        low = -1
        high = len(ladder)
        error = 0.0
        slack = _SLACK
        while high - low > 1:
            limit = self.budget
            if high < len(ladder):
                # The model may be wrong by a little for a step above one that fits,
                # which is tried once.
                limit = limit * slack
                slack = 1.0
            likely = [
                number
                for number in range(low + 1, high)
                if ladder[number].total + error <= limit
            ]
            if not likely and high < len(ladder):
                return
            at = likely[0] if likely else high - 1
            trial = self.taken(ladder[at].policy)
            if trial is not None and trial.report is not None:
                error = trial.report.total - ladder[at].total
            if trial is not None and self.fits(trial):
                high = at
            else:
                low = at

    def _compile_near(self, ladder: "Sequence[Step]") -> None:
        """Compile some steps before the first that is known to fit, those with the
        fewest FLOPs, that fit or nearly fit by the model.
        """
        left = _MOST_NEAR
        for step in ladder:
            trial = self.compiled.get(resolve_policy(step.policy))
            if trial is None and left and step.total <= _NEAR * self.budget:
                left -= 1
                trial = self.taken(step.policy)
            if trial is not None and self.fits(trial):
                return

    def taken(self, policy: ScanCheckpointSpec) -> Trial | None:
        """The policy, compiled; None if the program does not take it."""
        return None if self._cost(policy) == _NEVER else self.trial(policy)

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
            again = _runs_again(resolve_policy(policy), self.layers or 0)
        except Exception:
            # Another policy may do. `trial` raises this again if it is reached.
            return _NEVER
        return flops.matmul, flops.moved, again


@dataclasses.dataclass(frozen=True)
class Step:
    """A policy on a ladder."""

    policy: ScanCheckpointSpec
    cost: Cost
    # How many layers run again.
    again: int
    # Bytes of device memory that the program takes, by the model.
    total: float
    # Whether the user gave it, and not a variation of it.
    is_candidate: bool

    def is_like(self, other: "Step") -> bool:
        """Whether it has hardly more FLOPs than another, and no other drawback."""
        if self.cost.flops > _ALIKE * other.cost.flops or not other.cost.flops:
            return False
        same_host = bool(self.cost.host) == bool(other.cost.host)
        return same_host and bool(self.again) == bool(other.again)

    @property
    def key(self) -> tuple[float, float, float]:
        """What steps are ordered by, as `Search._cost`."""
        return self.cost.flops, self.cost.host, self.again


def _best(steps: list[Step]) -> list[Step]:
    """Of steps those that take less memory than all with fewer FLOPs, in this order;
    of those that are alike, candidates and the one that takes the least.
    """
    best: list[Step] = []
    first = None
    for step in sorted(steps, key=lambda step: step.key):
        is_alike = first is not None and step.is_like(first)
        if best and step.total >= best[-1].total:
            # The model can't tell which of two candidates takes less.
            if is_alike and step.is_candidate:
                best.append(step)
            continue
        if is_alike and not best[-1].is_candidate:
            best[-1] = step
        else:
            best.append(step)
            first = step
    return best


_NESTED = ScanCheckpointPolicy(nested=True)


def variations(
    base: ScanCheckpointPolicy, layers: int, model: Model
) -> Iterator[ScanCheckpointPolicy]:
    """A policy, and others that keep more where it recomputes."""
    yield base
    if not _is_varied(base):
        return
    if base.max_carries is not None:
        for count in range(2, layers + 1):
            yield dataclasses.replace(base, max_carries=count)
        return
    for count in range(1, layers):
        yield dataclasses.replace(base, first_layers=count)
    if base == _NESTED:
        yield from _cuts(layers, model)
    # Values are not kept beside carries on disk.
    if base.has_cut or base.save_carries == "disk":
        return
    choices = [names for names in model.choices if names]
    for names in choices:
        yield dataclasses.replace(base, save_block_internals=names)
    # What a choice keeps beside another is on the host.
    for saved in ((), *choices):
        for names in choices:
            if {*saved} < {*names}:
                yield dataclasses.replace(
                    base,
                    save_block_internals=saved,
                    offload_block_internals=sorted({*names} - {*saved}),
                )


def _is_varied(policy: ScanCheckpointPolicy) -> bool:
    """Whether it says no more than where carries are kept and how layers are cut."""
    keeps = policy.save_block_internals or policy.offload_block_internals
    return not (keeps or policy.first_layers or policy.save_carries is False)


def _cuts(layers: int, model: Model) -> Iterator[ScanCheckpointPolicy]:
    """Other cuts than `nested=True`: so many carries; and segments of one length whose
    values are kept while they are reversed, some layers before them.
    """
    for count in range(2, layers):
        yield ScanCheckpointPolicy(max_carries=count)
    kept = [*filter(None, model.choices), True] if model.keeps_values else []
    for first_layers in range(layers):
        rest = layers - first_layers
        counts = {math.ceil(rest / length) for length in range(1, rest + 1)}
        for count in sorted(counts):
            for names in kept:
                yield ScanCheckpointPolicy(
                    nested=count, save_block_internals=names, first_layers=first_layers
                )


def _runs_again(policy: ScanCheckpointPolicy, layers: int) -> int:
    """How many layers run again, of so many."""
    if recomputes_nothing(policy):
        return 0
    remat = policy.for_layers(layers)
    again = remat.length - remat.first_layers
    return again + (remat.schedule.replays if remat.schedule else 0)
