"""How to divide a training step over devices: the meshes, policies and microbatches with which it fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
from haliax.util import ensure_tuple

from models.plan_search import Budget
from models.step_memory import StepMemory
from stacked_remat import ScanCheckpointSpec
from stacked_remat.memory import BudgetError, DoesNotFit, MemoryReport, Trial, find_target
from stacked_remat.training import ConfigError, MeshConfig, mesh_sizes

_POLICIES: tuple[ScanCheckpointSpec, ...] = (True, "offload", "nested")
"""What is tried, by arithmetic, until one fits; where the first does, `False` too."""

_ARITHMETIC: tuple[tuple[ScanCheckpointSpec, ...], ...] = ((False,), (True, "offload"), ("nested",))
"""The policies by arithmetic. What reports count of it differs between meshes, by padding and by loops whose
trips depend on data, which count as often as is expected."""

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
        number: of the mesh, among those that were tried.
    """

    mesh: MeshConfig
    microbatches: int
    policy: ScanCheckpointSpec
    report: MemoryReport
    number: int

    @property
    def name(self) -> str:
        """With what is divided in place of the number: `{batch, embed: 4; kv_heads: 2}, 'nested'`."""
        return _named(f"{{{_divided(self.mesh)}}}", self.microbatches, self.policy)

    @property
    def trial(self) -> Trial:
        """The division as the row of a table, by its number."""
        return Trial(self.policy, self.report, label=_named(self.number, self.microbatches, self.policy))

    @property
    def cost(self) -> tuple[int, int]:
        """To sort by: the rank of the policy's arithmetic, and what a device sends to others."""
        rank = next(at for at, policies in enumerate(_ARITHMETIC) if self.policy in policies)
        return rank, self.report.sent


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
        ConfigError: the model and the batch allow no mesh of so many devices.
        ValueError, jax.errors.JaxRuntimeError: nothing compiles, for another reason than memory.

    Cost: from two to nine compilations for each mesh.
    """
    allowed = meshes(step, devices)
    if not allowed:
        raise ConfigError(
            f"no mesh of {devices} devices divides data.batch_size = {step.config.data.batch_size} (in "
            f"{step.config.trainer.update.microbatches} microbatches), data.seq_len = "
            f"{step.config.data.seq_len} or the model's axes evenly; give another number of devices."
        )
    errors: list[Exception] = []
    budget.show("what is divided, and into how many parts; two to nine compilations each:")
    for number, mesh in enumerate(allowed, 1):
        budget.show(f"{number:2}  {_divided(mesh)}")
    steps = [_with(step, mesh, devices) for mesh in allowed]
    found = [one for number, own in enumerate(steps, 1) for one in _divisions(own, number, budget, errors)]
    if not found and errors:
        raise errors[0]
    if not found:
        raise BudgetError(
            f"no mesh of {devices} devices fits {budget.device} a device under any policy: give more "
            f"devices, raise the budget, shorten the context, or freeze weights (lora)."
        )
    return sorted(found, key=lambda one: one.cost)


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
    if find_target(step.target).devices(1)[0].platform == "gpu":  # whole stacks would be copied
        yield MeshConfig({"data": devices}, param_mapping={"experts": "data", "embed": "data"})
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


def _divisions(step: StepMemory, number: int, budget: Budget, errors: list[Exception]) -> Iterator[Division]:
    """What fits on one mesh: with the fewest microbatches, and with more where that saves arithmetic."""
    update = step.config.trainer.update
    policies: tuple[ScanCheckpointSpec, ...] = _POLICIES
    more = (1,) if update.fused else _MORE_MICROBATCHES  # a fused update takes one microbatch
    for count in (update.microbatches * times for times in more):
        trainer = replace(step.config.trainer, update=replace(update, microbatches=count))
        cut = replace(step, config=replace(step.config, trainer=trainer))
        try:
            cut.check_batch()
        except ConfigError:
            return
        tried = (_tried(cut, policy, number, budget, errors) for policy in policies)
        fitting = next(filter(None, tried), None)
        if fitting is None:
            continue
        yield (_tried(cut, False, number, budget, errors) or fitting) if fitting.policy is True else fitting
        if fitting.policy != "nested":
            return
        policies = tuple(policy for policy in policies if policy != "nested")


def _tried(
    step: StepMemory, policy: ScanCheckpointSpec, number: int, budget: Budget, errors: list[Exception]
) -> Division | None:
    """The division with the step's mesh and microbatches, if it fits under the policy."""
    trainer, report = step.config.trainer, None
    name = _named(number, trainer.update.microbatches, policy)
    try:
        report = step.report(policy)
    except DoesNotFit:
        budget.show_trial(name, None)
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # such as an axis that a mesh does not divide
        errors.append(error)
        budget.show(f"{name}: {str(error).splitlines()[0]}")
    else:
        budget.show_trial(name, report)
    if report is None or not budget.holds(report):
        return None
    return Division(trainer.mesh, trainer.update.microbatches, policy, report, number)


def _with(step: StepMemory, mesh: MeshConfig, devices: int) -> StepMemory:
    trainer = replace(step.config.trainer, mesh=mesh)
    return replace(step, config=replace(step.config, trainer=trainer), devices=devices)


def _named(division: int | str, microbatches: int, policy: ScanCheckpointSpec) -> str:
    parts = f", {microbatches} microbatches" if microbatches > 1 else ""
    return f"{division}{parts}, {policy!r}"


def _divided(mesh: MeshConfig) -> str:
    """What is divided into how many parts, as `batch, embed: 4; kv_heads: 2`."""
    divided = (
        f"{', '.join(_divided_over(axis, mesh))}: {size}" for axis, size in mesh.axes.items() if size != 1
    )
    return "; ".join(divided)


def _divided_over(axis: str, mesh: MeshConfig) -> Sequence[str]:
    pairs = [*mesh.compute_mapping.items(), *mesh.param_mapping.items()]
    return list(dict.fromkeys(name for name, axes in pairs if axis in ensure_tuple(axes)))
