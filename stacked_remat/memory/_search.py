"""Looks for the policy with the fewest FLOPs that fits, with few compilations.

Candidates are varied: how many layers come before a cut, how many carries are kept,
into how many segments layers are cut, and which values inside layers are kept or moved
to the host (`_variations.py`). A model of the program (`_model.py`) tells the FLOPs of
each, and its bytes beside those of one policy that is compiled. Of these stay the
policies that take less memory than all with fewer FLOPs, the *ladder*. Where it crosses
the budget is found by compiling the first step that should fit; what the model is wrong
by there tells which step to compile next. At the end some steps are compiled that take
a little more than the budget by the model as it is.

Candidates that are not to be varied, and those of a program without a sweep over
layers, are compiled in order, up to the first that fits: those that recompute nothing,
after which no other is even traced, then the others by their FLOPs.

Of everything that was compiled and fits, the cheapest is the answer. Memory is always
the compiler's figure, never the model's. The ladder does not depend on the budget, so
that with a larger one the answer has no more FLOPs, but for errors of the model.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from .. import ScanCheckpointPolicy, ScanCheckpointSpec
from .._policy import recomputes_nothing, resolve_policy
from .._remat import Remat
from ._call import DoesNotFit, TracedCall
from ._model import NESTED, Cost, Model, traced_model
from ._report import Trial, runs_again
from ._values import ProgramValues
from ._variations import is_varied, variations

# The cost (see `Search.cost`) of a policy under which the program can't be traced.
_NEVER = (math.inf, math.inf, math.inf)
# The model's error differs between steps, and that of one may rule out another that
# fits. So steps that take up to so much more than the budget by the model as it is are
# compiled too, this many at most. Each has fewer FLOPs, by this share, than the one
# that was compiled before it.
_NEAR = 1.3
# The same where the model's error is known from a step of the same kind
_NEARER = 1.02
_MOST_NEAR = 3
# What takes so many times the budget by the model is not compiled.
_RULED_OUT = 2
_GAIN = 0.01
# How many policies stay of those that the model can't tell apart, as `True` and a sweep
# that holds every carry.
_MOST_EQUALS = 3


class Search:
    """Traces and compiles a program under policies, each policy once."""

    def __init__(
        self,
        program: Callable[[ScanCheckpointSpec], TracedCall],
        *,
        budget: float = math.inf,
        host_budget: float = math.inf,
        vary: bool = True,
        streamed: bool = False,
        cache: str | Path | None = None,
        begin: Callable[[str], None] = lambda _: None,
        show: Callable[[Trial], None] = lambda _: None,
    ) -> None:
        """A search that has not begun.

        Args:
            program: the program under a policy, traced.
            budget: bytes of memory of each device.
            host_budget: bytes that each device may use of its host's memory.
            vary: whether candidates are varied.
            streamed: whether the program's weights are on the host, for the names of
                trials.
            cache: folder for what compilations find; None for none.
            begin: called with the name of each policy before it is compiled.
            show: called with each trial once it is compiled.
        """
        self.program = program
        self.budget = budget
        self.host_budget = host_budget
        self.vary = vary
        self.streamed = streamed
        self.cache = cache
        self.begin = begin
        self.show = show
        # The number of layers; 0 as long as it is not known.
        self.layers = 0
        # What was traced and what was compiled so far, in order.
        self.traced: dict[ScanCheckpointPolicy, TracedCall] = {}
        self.compiled: dict[ScanCheckpointPolicy, Trial] = {}
        # The errors of the program under policies that it does not take.
        self.refused: dict[ScanCheckpointPolicy, Exception] = {}

    @property
    def flops_of_false(self) -> int | None:
        """FLOPs of matrix products where nothing runs again; None if the program does
        not take `False`.
        """
        traced = self._taken_trace(False)
        return None if traced is None else traced.flops.matmul

    def longest(self) -> int:
        """The number of layers of the longest stack; 0 if it is not known."""
        if self.layers:
            return self.layers
        program = self._taken_trace(NESTED)
        if program is None:
            return 0
        values = ProgramValues.of(program.traced.jaxpr, NESTED)
        return (
            0 if values is None else max(stack.spec.length for stack in values.stacks)
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
        """The policy with the fewest FLOPs that fits, of the candidates and of their
        variations; None if none fits.
        """
        steps = self._steps(candidates)
        ladder = _best(steps)
        # Arguments take the same memory under every policy.
        for trial in self.compiled.values():
            if trial.report is not None and trial.report.arguments > self.budget:
                return None
        first = self._climb(ladder)
        self._compile_near(ladder, first)
        # Policies of JAX, of which the ladder has none.
        for policy in candidates if ladder else ():
            if callable(resolve_policy(policy).save_block_internals):
                self.taken(policy)
        # Others were compiled to measure them.
        offered = {*map(resolve_policy, candidates)}
        offered |= {resolve_policy(step.policy) for step in ladder}
        # Also where no step of the ladder fits: the model may be wrong, but not by so
        # much.
        if not self.fitting(offered):
            too_large = set()
            for step in steps:
                if step.total > _RULED_OUT * self.budget:
                    too_large.add(resolve_policy(step.policy))
            left: list[ScanCheckpointSpec] = []
            for policy in candidates:
                if resolve_policy(policy) not in too_large:
                    left.append(policy)
            for policy in self._in_order(left):
                trial = self.taken(policy)
                if trial is None:
                    continue
                if self.fits(trial):
                    break
                if trial.report is not None and trial.report.arguments > self.budget:
                    return None
        if not self.compiled:
            # Raises why: the program takes no policy.
            self.trial(candidates[0])
        fitting = self.fitting(offered)
        return min(fitting, key=lambda trial: self.cost(trial.policy), default=None)

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
        yield from sorted(others, key=self.cost)

    def fitting(self, offered: Collection[ScanCheckpointPolicy]) -> list[Trial]:
        """What of these policies was compiled and fits."""
        compiled = self.compiled.items()
        return [trial for key, trial in compiled if key in offered and self.fits(trial)]

    def ladder(self, candidates: Sequence[ScanCheckpointSpec]) -> "list[Step]":
        """The variations of some policies that take less memory than all with fewer
        FLOPs, from the fewest FLOPs to the most; [] where there is no model.
        """
        return _best(self._steps(candidates))

    def _steps(self, candidates: Sequence[ScanCheckpointSpec]) -> "list[Step]":
        """The candidates and their variations, with their costs by a model; [] where
        there is none.
        """
        if not self.vary or not any(map(is_varied, map(resolve_policy, candidates))):
            return []
        model = traced_model(self._taken_trace)
        return [] if model is None else self._by_model(candidates, model)

    def _by_model(
        self, candidates: Sequence[ScanCheckpointSpec], model: Model
    ) -> "list[Step]":
        """All variations with their costs by a model; candidates as they were given."""
        self.layers = model.layers
        given: dict[ScanCheckpointPolicy, ScanCheckpointSpec] = {}
        for policy in candidates:
            given[resolve_policy(policy)] = policy
        measured = self.trial(given.get(model.reference, model.reference)).report
        if measured is None:
            return []
        # Of several devices each is taken to hold as much.
        devices = measured.devices
        common = measured.total - model.reference_cost.device / devices
        has_host = self._has_host
        # What a policy of JAX keeps the model does not know.
        known = [one for one in given if not callable(one.save_block_internals)]
        # Candidates have variations in common, and some that execute the same, of which
        # the candidates themselves come first.
        offered: dict[Remat, ScanCheckpointPolicy] = {}
        for policy in itertools.chain(
            known, *(variations(one, model) for one in known)
        ):
            offered.setdefault(policy.for_layers(model.layers), policy)
        forward_flops = model.forward_flops / devices
        steps = []
        for policy in offered.values():
            cost = model.cost(policy).of_device(devices)
            if cost.host > self.host_budget:
                continue
            if policy not in given and not self._hides(policy, cost, forward_flops):
                continue
            # A CPU has one memory.
            kept = cost.device if has_host else cost.device + cost.host
            again = runs_again(policy, self.layers)
            spec = given.get(policy, policy)
            steps.append(Step(spec, cost, again, common + kept, policy in given))
        return steps

    @property
    def _has_host(self) -> bool:
        """Whether the host's memory is another than the device's."""
        return self._trace(NESTED).target.devices()[0].platform != "cpu"

    def _hides(
        self, policy: ScanCheckpointPolicy, cost: Cost, forward_flops: float
    ) -> bool:
        """Whether values that a policy moves to the host cross the link while layers
        run forward, by the target's figures; they come back while layers are reversed,
        which takes longer. Not where the user says nothing of the host's memory.
        """
        if not policy.offload_block_internals:
            return True
        target = self._trace(NESTED).target
        if self.host_budget == math.inf or not target.flops or not target.link:
            return False
        return cost.host / target.link <= forward_flops / target.flops

    def _climb(self, ladder: "Sequence[Step]") -> int:
        """Compile steps of a ladder until one fits, and those above it do not, as far
        as the model tells. Returns the number of the first that fits, or that of all
        steps.
        """
        # Steps up to `low` do not fit, `high` and those after it do. The last step that
        # was compiled took so much more than the model says.
        low = -1
        high = len(ladder)
        error = 0.0
        while high - low > 1:
            numbers = range(low + 1, high)
            likely = (n for n in numbers if ladder[n].total + error <= self.budget)
            at = next(likely, None)
            if at is None and high < len(ladder):
                break
            if at is None:
                at = high - 1
            trial = self.taken(ladder[at].policy)
            if trial is not None and trial.report is not None:
                error = trial.report.total - ladder[at].total
            if trial is not None and self.fits(trial):
                high = at
            else:
                low = at
        return high

    def _compile_near(self, ladder: "Sequence[Step]", first: int) -> None:
        """Compile some steps that may fit too, up from the first that does."""
        errors: dict[Any, float] = {}
        for step in ladder:
            self._note_error(step, errors)
        left = _MOST_NEAR
        last = ladder[first] if first < len(ladder) else None
        last_fits = True
        for step in reversed(ladder[:first]):
            if left == 0:
                return
            if resolve_policy(step.policy) in self.compiled:
                continue
            if step.kind in errors:
                is_near = step.total + errors[step.kind] <= _NEARER * self.budget
            else:
                is_near = step.total <= _NEAR * self.budget
            if not is_near:
                continue
            if last is not None and not _is_worth_it(step, last, last_fits):
                continue
            trial = self.taken(step.policy)
            self._note_error(step, errors)
            left -= 1
            last = step
            last_fits = trial is not None and self.fits(trial)

    def _note_error(self, step: "Step", errors: dict[Any, float]) -> None:
        """Put in by how much a step takes more than the model says, by its kind, if it
        was compiled.
        """
        trial = self.compiled.get(resolve_policy(step.policy))
        if trial is not None and trial.report is not None:
            errors[step.kind] = trial.report.total - step.total

    def _takes(self, policy: ScanCheckpointSpec) -> bool:
        """Whether the program can be traced under a policy."""
        return self.cost(policy) != _NEVER

    def taken(self, policy: ScanCheckpointSpec) -> Trial | None:
        """The policy, compiled; None if the program does not take it."""
        return self.trial(policy) if self._takes(policy) else None

    def _taken_trace(self, policy: ScanCheckpointSpec) -> TracedCall | None:
        """The program under a policy; None if it does not take it."""
        return self._trace(policy) if self._takes(policy) else None

    def _trace(self, policy: ScanCheckpointSpec) -> TracedCall:
        key = resolve_policy(policy)
        if key not in self.traced:
            self.traced[key] = self.program(policy)
        return self.traced[key]

    def cost(self, policy: ScanCheckpointSpec) -> tuple[float, float, float]:
        """What policies are ordered by: FLOPs of matrix products; of equals, bytes
        moved between device and host; of equals, and if there is a model, how many
        layers run again.
        """
        key = resolve_policy(policy)
        try:
            flops = self._trace(policy).flops
            again = runs_again(key, self.layers)
        except Exception as error:
            # Another policy may do. `trial` raises this again if it is reached.
            self.refused[key] = error
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
    # Whether the user asked for it.
    is_candidate: bool

    @property
    def price(self) -> float:
        """FLOPs; without products, how many layers run again."""
        return self.cost.flops or self.again

    @property
    def kind(self) -> tuple[Any, ...]:
        """What policies have in common of which the model's error is about the same:
        the values that they keep, and the form of their loops.
        """
        policy = resolve_policy(self.policy)
        names = policy.save_block_internals, policy.offload_block_internals
        return *names, policy.has_cut, policy.first_layers

    @property
    def figures(self) -> tuple[float, float, float]:
        """FLOPs and bytes by the model, which can't tell equal ones apart."""
        return self.price, self.cost.host, self.total


def _is_worth_it(step: Step, last: Step, last_fits: bool) -> bool:
    """Whether to compile a step that takes more memory than the last that was."""
    if step.figures == last.figures:
        # It gains nothing, but may fit where one that the model can't tell apart does
        # not.
        return not last_fits
    # What the user asked for is worth any gain.
    gain = 0 if step.is_candidate else _GAIN
    return step.price < (1 - gain) * last.price


def _best(steps: list[Step]) -> list[Step]:
    """Of steps those that take less memory than all with fewer FLOPs, in this order,
    and some that the model can't tell apart from them.
    """
    equals: dict[tuple[float, ...], list[Step]] = {}
    for step in steps:
        equals.setdefault(step.figures, []).append(step)

    def order(step: Step) -> tuple[float, ...]:
        return step.price, step.cost.host, step.again, step.total

    best: list[Step] = []
    for step in sorted(steps, key=order):
        if not best or step.total < best[-1].total:
            best.append(step)
            others = [one for one in equals[step.figures] if one is not step]
            # Candidates come before their variations.
            best += others[: _MOST_EQUALS - 1]
    return best
