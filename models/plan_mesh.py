"""How to divide a training step over devices: the meshes, policies and microbatches with which it fits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from models.plan_search import Budget
from models.step_memory import StepMemory
from stacked_remat import ScanCheckpointSpec
from stacked_remat.memory import BudgetError, DoesNotFit, MemoryReport, Trial
from stacked_remat.training import ConfigError, MeshConfig, mesh_sizes

_POLICIES: tuple[ScanCheckpointSpec, ...] = (True, "offload", "nested")
"""What is tried, by arithmetic, until one fits; where the first does, `False` too."""

_MORE_MICROBATCHES = (1, 2, 4)
"""Times as many microbatches as the config has."""


@dataclass(frozen=True)
class Division:
    """A mesh, a number of microbatches and a policy, with the memory of the step.

    Attributes:
        mesh: as `trainer.mesh` takes it.
        microbatches: as `trainer.update.microbatches`.
        policy: the policy.
        report: the memory of the step.
    """

    mesh: MeshConfig
    microbatches: int
    policy: ScanCheckpointSpec
    report: MemoryReport

    @property
    def trial(self) -> Trial:
        """The division as the row of a table."""
        return Trial(self.policy, self.report, label=_named(self.mesh, self.microbatches, self.policy))


def find_divisions(step: StepMemory, devices: int, budget: Budget) -> list[Division]:
    """For each mesh the policy with the least arithmetic that fits, and as few microbatches as allow it.

    More microbatches are tried where nothing fits, or nothing but `nested`.

    Args:
        step: the step; its own mesh is tried first.
        devices: how many devices every mesh has.
        budget: what the step must fit in.

    Returns:
        Those that fit, the least arithmetic first; of equals, those that send less.

    Raises:
        BudgetError: none fits.

    Cost: from one to nine compilations for each mesh.
    """
    found = [one for mesh in meshes(step, devices) for one in _divisions(_with(step, mesh, devices), budget)]
    if not found:
        raise BudgetError(
            f"no mesh of {devices} devices fits {budget.device} a device under any policy: give more "
            f"devices, raise the budget, shorten the context, or freeze weights (lora)."
        )
    return sorted(found, key=lambda one: (one.report.flops.matmul, one.report.sent))


def meshes(step: StepMemory, devices: int) -> list[MeshConfig]:
    """The config's own mesh and those of the documentation's table that the model and the batch allow."""
    found: dict[str, MeshConfig] = {}
    for mesh in (step.config.trainer.mesh, *_candidates(step, devices)):
        if _is_allowed(own := _with(step, mesh, devices), devices):
            sized = replace(mesh, axes=mesh_sizes(own.config.trainer.mesh, devices))
            found.setdefault(repr(sized), sized)
    return list(found.values())


def _candidates(step: StepMemory, devices: int) -> Iterator[MeshConfig]:
    """FSDP; experts, positions or heads over all devices, and over half of them, with FSDP over the rest."""
    yield MeshConfig({"data": devices})
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
        for names in (("kv_heads", "mlp"), ("kv_heads",)):
            of_heads = dict.fromkeys(names, "tensor")
            yield MeshConfig(
                {**rest, "tensor": size}, {"batch": "data", **of_heads}, {"embed": "data", **of_heads}
            )


def _is_allowed(step: StepMemory, devices: int) -> bool:
    try:
        return step.mesh_size() == devices
    except ConfigError:
        return False


def _divisions(step: StepMemory, budget: Budget) -> Iterator[Division]:
    """What fits on one mesh: with the fewest microbatches, and with more where that saves arithmetic."""
    update, devices = step.config.trainer.update, step.mesh_size()
    policies: tuple[ScanCheckpointSpec, ...] = _POLICIES
    for count in (update.microbatches * times for times in _MORE_MICROBATCHES):
        trainer = replace(step.config.trainer, update=replace(update, microbatches=count))
        cut = replace(step, config=replace(step.config, trainer=trainer))
        if not _is_allowed(cut, devices):
            return
        fitting = next(filter(None, (_tried(cut, policy, budget) for policy in policies)), None)
        if fitting is None:
            continue
        yield (_tried(cut, False, budget) or fitting) if fitting.policy is True else fitting
        if fitting.policy != "nested":
            return
        policies = tuple(policy for policy in policies if policy != "nested")


def _tried(step: StepMemory, policy: ScanCheckpointSpec, budget: Budget) -> Division | None:
    """The division with the step's mesh and microbatches, if it fits under the policy."""
    trainer = step.config.trainer
    try:
        report = step.report(policy)
    except (DoesNotFit, ValueError):
        report = None
    budget.show_trial(_named(trainer.mesh, trainer.update.microbatches, policy), report)
    if report is None or not budget.holds(report):
        return None
    return Division(trainer.mesh, trainer.update.microbatches, policy, report)


def _with(step: StepMemory, mesh: MeshConfig, devices: int) -> StepMemory:
    trainer = replace(step.config.trainer, mesh=mesh)
    return replace(step, config=replace(step.config, trainer=trainer), devices=devices)


def _named(mesh: MeshConfig, microbatches: int, policy: ScanCheckpointSpec) -> str:
    divided = ", ".join(f"{axis}: {size}" for axis, size in mesh.axes.items() if size != 1)
    parts = f", {microbatches} microbatches" if microbatches > 1 else ""
    return f"{{{divided}}}{parts}, {policy!r}"
