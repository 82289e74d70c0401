"""The policy with which a training step fits a budget, and the size of the run up to which one does."""

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax

from models.step_memory import StepMemory
from stacked_remat import ScanCheckpointPolicy, ScanCheckpointSpec
from stacked_remat.memory import (
    BudgetError,
    DoesNotFit,
    MemoryReport,
    Plan,
    TargetError,
    Trial,
    find_target,
    parse_bytes,
    readable_bytes,
)
from stacked_remat.training import ConfigError

Found = Literal["context", "batch", "devices"]
"""What is searched for: the longest context, the largest batch, or the fewest devices."""

KEYS: Mapping[Found, str] = {
    "context": "data.seq_len",
    "batch": "data.batch_size",
    "devices": "devices",
}
"""The keys of a config that they stand for."""

_LARGEST = 2**31 - 1  # tokens of a batch, which positions in 32 bits count
_MOST_DEVICES = 256
_LEAN: tuple[ScanCheckpointSpec, ...] = (
    ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "offload",
    "nested",
    ScanCheckpointPolicy(max_carries=2),
)  # one of them takes the least memory of all candidates


@dataclass(frozen=True)
class Budget:
    """Memory of each device, and of the host for each device, as text; and who shows what is tried."""

    device: str
    host: str | None = None
    show: Callable[[str], None] = lambda _: None

    def holds(self, found: MemoryReport) -> bool:
        """Whether a step fits."""
        host = None if self.host is None else parse_bytes(self.host)
        return found.total <= parse_bytes(self.device) and (host is None or found.host.total <= host)

    def show_trial(self, name: str, found: MemoryReport | None) -> None:
        """Shows what a policy takes, and whether that fits."""
        if found is None:
            return self.show(f"{name}: refused by the compiler")
        verdict = "fits" if self.holds(found) else "does not fit"
        on_host = f" and {readable_bytes(found.host.total)} on the host" if found.host.total else ""
        return self.show(f"{name}: {readable_bytes(found.total)} a device{on_host}, {verdict}")


def planned(step: StepMemory, budget: Budget) -> tuple[Plan, StepMemory]:
    """What fits the budget, and the step: as it is, or the first of `leaner` with which something does.

    Raises:
        BudgetError: neither.
    """

    def plan(step: StepMemory) -> Plan:
        def show(trial: Trial) -> None:
            budget.show_trial(trial.name + step.label, trial.report)

        return step.plan(budget=budget.device, host_budget=budget.host, streamed=step.can_stream, show=show)

    try:
        return plan(step), step
    except BudgetError as error:
        for lean in step.leaner:
            with contextlib.suppress(BudgetError):
                return plan(lean), lean
        raise error from None


def find_size(step: StepMemory, what: Found, budget: Budget) -> tuple[int, StepMemory]:
    """The longest context, the largest batch or the fewest devices with which the step fits the budget.

    The policy that takes the least memory at the config's own size is compiled at other sizes, first doubled
    or halved, then by bisection. Contexts and batches are found to about a thirty-second, and devices among
    the powers of two; only sizes that the mesh allows are tried.

    Args:
        step: at its own size.
        what: what to find.
        budget: what it must fit in.

    Returns:
        The size, and the step with it.

    Raises:
        BudgetError: the step fits with none of the sizes.
        ConfigError: the mesh allows none.

    Cost: up to seven compilations to find that policy, and one for each size that is tried.
    """
    sizes, own = _sizes(step, what), _own_size(step, what)
    start = min(bisect.bisect_left(sizes, own), len(sizes) - 1)
    begin = _with_size(step, what, sizes[start])
    lean, policy, streamed = _leanest(begin, budget)

    def fits(index: int) -> bool:
        name = f"{KEYS[what]} {sizes[index]:,}, {policy!r}"
        found = _report(_with_size(lean, what, sizes[index]), policy, streamed, name)
        budget.show_trial(name, found)
        return found is not None and budget.holds(found)

    if what == "devices":
        index = next(filter(fits, range(len(sizes))), None)
    else:
        index = last_that_fits(fits, start, sizes)
    if index is None:
        tried = sizes[0] if what != "devices" else sizes[-1]
        raise BudgetError(
            f"nothing fits {budget.device} a device with {KEYS[what]} = {tried:,} either, the "
            f"{'most that the mesh allows' if what == 'devices' else 'least'}: raise the budget, freeze "
            f"weights (lora), or make the model smaller."
        )
    return sizes[index], _with_size(step, what, sizes[index])


def last_that_fits(fits: Callable[[int], bool], start: int, sizes: Sequence[int]) -> int | None:
    """The last index of sizes that fits, if those before one that fits do; None if the first does not.

    Asks at `start`, then at twice or half that size until the answer changes, then by bisection.
    """
    low, high = -1, len(sizes)
    if fits(start):
        low = start
        while (twice := bisect.bisect_left(sizes, 2 * sizes[low])) < len(sizes):
            if not fits(twice):
                high = twice
                break
            low = twice
    else:
        high = start
        while (half := bisect.bisect_right(sizes, sizes[high] // 2) - 1) >= 0:
            if fits(half):
                low = half
                break
            high = half
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return None if low < 0 else low


def _leanest(step: StepMemory, budget: Budget) -> tuple[StepMemory, ScanCheckpointSpec, bool]:
    """The step, policy and place of the weights that take the least memory of a device."""
    found: list[tuple[int, int, StepMemory, ScanCheckpointSpec, bool]] = []

    def take(step: StepMemory, policy: ScanCheckpointSpec, streamed: bool) -> None:
        name = f"{policy!r}{', streamed' if streamed else ''}{step.label}"
        report = _report(step, policy, streamed, name)
        budget.show_trial(name, report)
        if report is not None and (budget.host is None or report.host.total <= parse_bytes(budget.host)):
            found.append((report.total, len(found), step, policy, streamed))

    for policy in _LEAN:
        take(step, policy, False)
    policy = min(found)[3] if found else _LEAN[0]  # a TPU's compiler refuses what is too large
    for other, streamed in itertools.product((step, *step.leaner[-1:]), (False, True)):
        if (other is not step or streamed) and (other.can_stream or not streamed):
            take(other, policy, streamed)
    return min(found)[2:] if found else (step, policy, False)


def _report(step: StepMemory, policy: ScanCheckpointSpec, streamed: bool, name: str) -> MemoryReport | None:
    """The report of a policy; None if the compiler refuses it for want of memory."""
    try:
        return step.report(policy, streamed=streamed)
    except DoesNotFit:
        return None
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        error.add_note(f"while compiling {name}")
        raise


def _own_size(step: StepMemory, what: Found) -> int:
    data = step.config.data
    return {"context": data.seq_len, "batch": data.batch_size, "devices": 1}[what]


def _with_size(step: StepMemory, what: Found, size: int) -> StepMemory:
    if what == "devices":
        return replace(step, devices=size)
    field = KEYS[what].removeprefix("data.")
    data = replace(step.config.data, **{field: size})
    return replace(step, config=replace(step.config, data=data))


def _sizes(step: StepMemory, what: Found) -> Sequence[int]:
    """The sizes that can be tried, in order.

    Raises:
        ConfigError: the mesh allows none.
    """
    data, mesh = step.config.data, step.config.trainer.mesh
    if what == "devices":
        found = [
            count for count in (2**k for k in range(_MOST_DEVICES.bit_length())) if _allowed(step, count)
        ]
        if not found:
            raise ConfigError(
                f"No number of devices goes with trainer.mesh.axes {mesh.axes} and data.batch_size = "
                f"{data.batch_size}. Give one axis -1, as in {{data: -1}}, and a batch that can be divided."
            )
        return found
    parts = step.parts_of(what)
    other = data.batch_size if what == "context" else data.seq_len
    return list(_rounded(parts, _LARGEST // other))


def _rounded(unit: int, most: int) -> Iterator[int]:
    """Multiples of a unit up to a most: all of the first 63, then 32 for each doubling."""
    count = 1
    while count * unit <= most:
        yield count * unit
        count += max(1, 2 ** (count.bit_length() - 6))


def _allowed(step: StepMemory, devices: int) -> bool:
    """Whether the mesh, the model and the batch can be divided over so many devices."""
    if find_target(step.target).name == "local" and devices > jax.device_count():
        return False
    try:
        return replace(step, devices=devices).mesh_size() == devices
    except (ConfigError, TargetError):
        return False
