"""What fits a budget: the policy of a training step, the size of the run, and the
mesh.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from haliax.util import ensure_tuple

from models.candidate import STREAMED, Candidate
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
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    ConfigError,
    MeshConfig,
    PipelineConfig,
    mesh_sizes,
)

KEYS = {"context": "data.seq_len", "batch": "data.batch_size"}
"""The keys of a config whose largest value is searched for, by the names of `find`."""

_LARGEST = 2**31 - 1  # tokens of a batch, which positions in 32 bits count
_LEAN: tuple[ScanCheckpointSpec, ...] = (
    ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "offload",
    "nested",
    ScanCheckpointPolicy(max_carries=2),
)  # one of them takes the least memory of all candidates


@dataclass(frozen=True)
class Budget:
    """Memory of each device, and of the host for each device; and a callback that shows
    trials.
    """

    device: int | str
    host: int | str | None = None
    show: Callable[[str], None] = lambda _: None

    def holds(self, found: MemoryReport | None, *, on_host_alone: bool = False) -> bool:
        """Whether a step fits, or at least what it has on the host."""
        if found is None or (
            self.host is not None and found.host.total > parse_bytes(self.host)
        ):
            return False
        return on_host_alone or found.total <= parse_bytes(self.device)

    def compiled(self, candidate: Candidate, size: str = "") -> MemoryReport | None:
        """What a step takes, which is shown; None if the compiler refuses it for want
        of memory.
        """
        report = None
        name = f"{size}{candidate.config.remat!r}{candidate.label}"
        self.begin(name)
        try:
            report = candidate.report()
        except DoesNotFit:
            pass
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            error.add_note(f"while compiling {name}")
            raise
        self.show_report(name, report)
        return report

    def begin(self, name: str) -> None:
        """Says that a policy is compiled, which may take minutes."""
        self.show(f"compiling {name}")

    def show_report(self, name: str, found: MemoryReport | None) -> None:
        """Shows what a policy takes, and whether that fits."""
        if found is None:
            return self.show(f"{name}: refused by the compiler")
        verdict = "fits" if self.holds(found) else "does not fit"
        on_host = (
            f" and {readable_bytes(found.host.total)} on the host"
            if found.host.total
            else ""
        )
        return self.show(
            f"{name}: {readable_bytes(found.total)} a device{on_host}, {verdict}"
        )


def planned(candidate: Candidate, budget: Budget) -> tuple[Plan, Candidate]:
    """What fits the budget, and the step: as it is, or with the first of `leaner` with
    which any does.
    """
    error = None
    for step in (candidate, *map(candidate.having, candidate.leaner)):

        def begin(name: str, label: str = step.label) -> None:
            budget.begin(name + label)

        def show(trial: Trial, label: str = step.label) -> None:
            budget.show_report(trial.name + label, trial.report)

        try:
            return (
                step.plan(
                    budget=budget.device,
                    host_budget=budget.host,
                    begin=begin,
                    show=show,
                ),
                step,
            )
        except BudgetError as refused:
            error = error or refused
    assert error is not None
    raise error


def find_size(candidate: Candidate, what: str, budget: Budget) -> tuple[int, Candidate]:
    """The longest `context` or the largest `batch` with which the step fits the budget,
    and the step with it.

    The policy that takes the least memory at the config's own size is compiled at other
    sizes, first doubled or halved, then by bisection, to about a thirty-second; only
    sizes that the mesh allows are tried.

    Cost: up to seven compilations to find that policy, and one for each size that is
    tried.
    """
    # Devices divide sizes evenly, so only multiples of their number are tried.
    config = candidate.config
    parts_of = candidate.partitioning.parts_of
    key = KEYS[what]
    if what == "context":
        own = config.data.seq_len
        other = config.data.batch_size
        unit = parts_of(POSITION_AXIS)
    else:
        own = config.data.batch_size
        other = config.data.seq_len
        unit = parts_of(BATCH_AXIS) * config.trainer.update.microbatches
    sizes = list(_rounded(unit, _LARGEST // other))
    start = min(bisect.bisect_left(sizes, own), len(sizes) - 1)
    # Under it the most fits; which policy is fastest there is asked once, at the end.
    lean, policy = _leanest(candidate.having({key: sizes[start]}), budget)

    def fits(index: int) -> bool:
        step = lean.having({key: sizes[index]}, policy)
        return budget.holds(budget.compiled(step, f"{key} {sizes[index]:,}, "))

    index = last_that_fits(fits, start, sizes)
    if index is None:
        raise BudgetError(
            f"nothing fits {budget.device} a device with {key} = {sizes[0]:,} either,"
            " the least: raise the budget, freeze weights (lora), or make the model"
            " smaller."
        )
    return sizes[index], candidate.having({key: sizes[index]})


def last_that_fits(
    fits: Callable[[int], bool], start: int, sizes: Sequence[int]
) -> int | None:
    """The last index of sizes that fits, if those before one that fits do; None if the
    first does not.

    Asks at `start`, then at twice or half that size until the answer changes, then by
    bisection.
    """
    # All up to `low` fit, and none from `high` on.
    low = -1
    high = len(sizes)
    at = start
    while high - low > 1:
        low, high = (at, high) if fits(at) else (low, at)
        at = (low + high) // 2
        # Nothing was too large yet: twice the size
        if high == len(sizes):
            at = min(bisect.bisect_left(sizes, 2 * sizes[low]), high - 1)
        # Nothing fitted yet: half the size
        elif low < 0:
            at = max(bisect.bisect_right(sizes, sizes[high] // 2) - 1, 0)
    return None if low < 0 else low


def _leanest(
    candidate: Candidate, budget: Budget
) -> tuple[Candidate, ScanCheckpointSpec]:
    """The step, with settings and a policy, that takes the least memory of a device."""
    # By memory, then by the order in which they were tried
    found: list[tuple[int, int, Candidate, ScanCheckpointSpec]] = []

    def take(settings: Mapping[str, Any], policy: ScanCheckpointSpec) -> None:
        step = candidate.having(settings, policy)
        report = budget.compiled(step)
        if report is not None and budget.holds(report, on_host_alone=True):
            found.append((report.total, len(found), step, policy))

    # Policies first, then settings, each of which would double the compilations.
    for policy in _LEAN:
        take({}, policy)
    # A TPU's compiler refuses what is too large
    policy = min(found)[3] if found else _LEAN[0]
    streamed = [STREAMED] if candidate.can_stream else []
    leaner = candidate.leaner[-1:]
    for settings in (
        *streamed,
        *leaner,
        *(STREAMED | one for one in leaner if streamed),
    ):
        take(settings, policy)
    return min(found)[2:] if found else (candidate, policy)


def _rounded(unit: int, most: int) -> Iterator[int]:
    """Multiples of a unit up to a most: all of the first 63, then 32 for each
    doubling.
    """
    count = 1
    while count * unit <= most:
        yield count * unit
        count += max(1, 2 ** (count.bit_length() - 6))


def find_meshes(candidate: Candidate, budget: Budget) -> list[tuple[Plan, Candidate]]:
    """What fits the budget on each mesh, as `planned`.

    The fewest FLOPs come first (to two digits: padding differs), and of equals what
    sends less. The time that the stages of a pipeline wait counts as FLOPs.
    """
    found = []
    for step in meshes(candidate):
        budget.show(f"on {divided(step)}:")
        try:
            found.append(planned(step, budget))
        except (BudgetError, jax.errors.JaxRuntimeError, ValueError) as error:
            # One mesh that fails, as one XLA can't compile, does not end the search.
            budget.show(str(error).splitlines()[0])
    if not found:
        raise BudgetError(
            f"no mesh of {candidate.devices} devices fits {budget.device} a device"
            " under any policy: give more devices, raise the budget, shorten the"
            " context, or freeze weights (lora)."
        )
    return sorted(
        found,
        key=lambda one: (
            float(f"{one[0].report.flops.matmul / (1 - one[1].idle):.1e}"),
            one[0].report.sent,
        ),
    )


def meshes(candidate: Candidate) -> list[Candidate]:
    """The step on the config's own mesh and on those of the documentation's table that
    the model and the batch allow.
    """
    devices = candidate.devices
    data = candidate.config.data
    assert devices is not None
    trainer = candidate.config.trainer
    own = trainer.mesh, trainer.pipeline
    alone = ((mesh, None) for mesh in _documented(devices, candidate))
    found: dict[str, Candidate] = {}
    for mesh, pipeline in (own, *alone, *_in_stages(devices, candidate)):
        # What a pipeline doesn't go with is refused as the config is made
        refused = [] if pipeline is None else [ValueError]
        with contextlib.suppress(ConfigError, TargetError, *refused):
            sized = replace(mesh, axes=mesh_sizes(mesh, devices))
            changed = replace(trainer, mesh=sized, pipeline=pipeline)
            step = candidate.having({"trainer": changed})
            if step.shapes and step.partitioning.mesh.size == devices:
                # The config's own may be one of the table's.
                found.setdefault(repr((sized, pipeline)), step)
    if not found:
        raise ConfigError(
            f"no mesh of {devices} devices divides data.batch_size = {data.batch_size}"
            f" (in {candidate.config.trainer.update.microbatches} microbatches),"
            f" data.seq_len = {data.seq_len} or the model's axes evenly; give another"
            " number of devices."
        )
    return list(found.values())


def _documented(devices: int, candidate: Candidate) -> Iterator[MeshConfig]:
    """FSDP; experts, positions or heads over all devices, and over half of them, with
    FSDP over the rest.
    """
    for fsdp in _fsdp(candidate):
        yield MeshConfig({"data": devices}, param_mapping=fsdp)
    for size in filter(lambda size: size > 1, (devices, devices // 2)):
        rest = {"data": devices // size}
        of_experts = {"experts": "expert"}
        yield MeshConfig(
            {**rest, "expert": size},
            {"batch": ["data", "expert"], **of_experts},
            {"embed": "data", **of_experts},
        )
        yield MeshConfig(
            {**rest, "context": size},
            {"batch": "data", "position": "context"},
            {"embed": ["data", "context"]},
        )
        heads = candidate.config.model.head_axes
        # MLPs' inner widths too, or heads alone
        for names in ((*heads, "mlp"), heads):
            of_heads = dict.fromkeys(names, "tensor")
            yield MeshConfig(
                {**rest, "tensor": size},
                {"batch": "data", **of_heads},
                {"embed": "data", **of_heads},
            )


def _fsdp(candidate: Candidate) -> Iterator[dict[str, list[str] | str]]:
    """How weights are divided over the axis `data`."""
    yield {"embed": "data"}
    if find_target(candidate.target).devices(1)[0].platform == "gpu":
        # Whole stacks would be copied
        yield {"experts": "data", "embed": "data"}


def _in_stages(
    devices: int, candidate: Candidate
) -> Iterator[tuple[MeshConfig, PipelineConfig]]:
    """Layers over all devices, half and a quarter of them, with FSDP over the rest; of
    a batch in microbatches.
    """
    if candidate.config.trainer.update.microbatches == 1:
        return
    sizes = devices, devices // 2, devices // 4
    for size in filter(lambda size: size > 1, sizes):
        # With one device for a stage all are alike
        for fsdp in [*_fsdp(candidate)][-1 if size == devices else 0 :]:
            axes = {"stage": size, "data": devices // size}
            yield MeshConfig(axes, param_mapping=fsdp), PipelineConfig("stage")


def divided(step: Candidate) -> str:
    """What is divided into how many parts, as `batch, embed: 4; kv_heads: 2`."""
    mesh = step.config.trainer.mesh
    pipeline = step.config.trainer.pipeline
    pairs = [*mesh.compute_mapping.items(), *mesh.param_mapping.items()]
    if pipeline is not None:
        pairs.append(("layers", pipeline.axis))
    divided = {
        axis: dict.fromkeys(name for name, axes in pairs if axis in ensure_tuple(axes))
        for axis in mesh.axes
    }
    return "; ".join(
        f"{', '.join(divided[axis])}: {size}"
        for axis, size in mesh.axes.items()
        if size != 1
    )
