"""How to divide a training step over devices: the meshes, policies and microbatches with which it fits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
from haliax.util import ensure_tuple

from models.candidate import Candidate
from models.plan_search import Budget
from stacked_remat import ScanCheckpointSpec
from stacked_remat.memory import BudgetError, MemoryReport, Trial, find_target
from stacked_remat.training import ConfigError, MeshConfig, mesh_sizes

_POLICIES: tuple[ScanCheckpointSpec, ...] = (True, "offload", "nested")
"""What is tried, by FLOPs, until one fits; where the first does, `False` too."""

_ARITHMETIC = {False: 0, True: 1, "offload": 1, "nested": 2}
"""The policies by FLOPs. What reports count of them differs between meshes, by padding and by loops whose
trip counts depend on data, which count as often as is expected."""

_MORE_MICROBATCHES = (1, 2, 4)
"""Times as many microbatches as the config has."""


@dataclass(frozen=True)
class Division:
    """A step with a mesh, a number of microbatches and a policy, and its memory.

    Attributes:
        step: the step.
        report: its memory.
        number: of the mesh, among those that were tried.
    """

    step: Candidate
    report: MemoryReport
    number: int

    @property
    def name(self) -> str:
        """With what is divided in place of the number: `{batch, embed: 4; kv_heads: 2}, 'nested'`."""
        return _named(f"{{{_divided(self.step.config.trainer.mesh)}}}", self.step)

    @property
    def trial(self) -> Trial:
        """The division as the row of a table, by its number."""
        return Trial(self.step.policy, self.report, label=_named(self.number, self.step))

    @property
    def cost(self) -> tuple[int, int]:
        """To sort by: the rank of the policy's FLOPs, and what a device sends to others."""
        return _ARITHMETIC[self.step.config.remat], self.report.sent


def find_divisions(candidate: Candidate, budget: Budget) -> list[Division]:
    """For each mesh the policy with the fewest FLOPs that fits, and as few microbatches as allow it.

    More microbatches are tried where nothing fits, or nothing but `nested`.

    Args:
        candidate: the step and its devices; its own mesh is tried first.
        budget: what the step must fit in.

    Returns:
        Those that fit, the fewest FLOPs first; of equals, those that send less.

    Raises:
        BudgetError: none fits.
        ConfigError: the model and the batch allow no mesh of so many devices.
        ValueError, jax.errors.JaxRuntimeError: nothing compiles, for another reason than memory.

    Cost: from two to nine compilations for each mesh.
    """
    config, devices = candidate.config, candidate.devices
    allowed = meshes(candidate)
    if not allowed:
        raise ConfigError(
            f"no mesh of {devices} devices divides data.batch_size = {config.data.batch_size} (in "
            f"{config.trainer.update.microbatches} microbatches), data.seq_len = {config.data.seq_len} or "
            f"the model's axes evenly; give another number of devices."
        )
    errors: list[Exception] = []
    budget.show("what is divided, and into how many parts; two to nine compilations each:")
    for number, mesh in enumerate(allowed, 1):
        budget.show(f"{number:2}  {_divided(mesh)}")
    steps = enumerate((candidate.having({"trainer.mesh": mesh}) for mesh in allowed), 1)
    found = [one for number, step in steps for one in _divisions(step, number, budget, errors)]
    if not found and errors:
        raise errors[0]
    if not found:
        raise BudgetError(
            f"no mesh of {devices} devices fits {budget.device} a device under any policy: give more "
            f"devices, raise the budget, shorten the context, or freeze weights (lora)."
        )
    return sorted(found, key=lambda one: one.cost)


def meshes(candidate: Candidate) -> list[MeshConfig]:
    """The config's own mesh and those of the documentation's table that the model and the batch allow."""
    assert candidate.devices is not None
    found: dict[str, MeshConfig] = {}
    for mesh in (candidate.config.trainer.mesh, *_documented(candidate.devices, candidate)):
        if candidate.having({"trainer.mesh": mesh}).is_divided:
            sized = replace(mesh, axes=mesh_sizes(mesh, candidate.devices))
            found.setdefault(repr(sized), sized)
    return list(found.values())


def _documented(devices: int, candidate: Candidate) -> Iterator[MeshConfig]:
    """FSDP; experts, positions or heads over all devices, and over half of them, with FSDP over the rest."""
    yield MeshConfig({"data": devices})
    if find_target(candidate.target).devices(1)[0].platform == "gpu":  # whole stacks would be copied
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


def _divisions(step: Candidate, number: int, budget: Budget, errors: list[Exception]) -> Iterator[Division]:
    """What fits on one mesh: with the fewest microbatches, and with more where that saves FLOPs."""

    def tried(settings: dict[str, int], policy: ScanCheckpointSpec) -> Division | None:
        own = step.having(settings, policy)
        name = _named(number, own)
        try:
            report = budget.compiled(own, name)
        except (
            jax.errors.JaxRuntimeError,
            ValueError,
        ) as error:  # such as axes that a mesh does not divide
            errors.append(error)
            budget.show(f"{name}: {str(error).splitlines()[0]}")
            return None
        return Division(own, report, number) if report is not None and budget.holds(report) else None

    update = step.config.trainer.update
    policies: list[ScanCheckpointSpec] = [*_POLICIES]
    for times in (1,) if update.fused else _MORE_MICROBATCHES:  # a fused update takes one microbatch
        settings = {"trainer.update.microbatches": update.microbatches * times}
        try:
            step.having(settings).check_batch()
        except ConfigError:
            return
        for policy in policies:
            if fitting := tried(settings, policy):
                yield (tried(settings, False) or fitting) if policy is True else fitting
                if policy != "nested":
                    return
                policies = [policy for policy in policies if policy != "nested"]
                break


def _named(division: int | str, step: Candidate) -> str:
    microbatches = step.config.trainer.update.microbatches
    parts = f", {microbatches} microbatches" if microbatches > 1 else ""
    return f"{division}{parts}, {step.config.remat!r}"


def _divided(mesh: MeshConfig) -> str:
    """What is divided into how many parts, as `batch, embed: 4; kv_heads: 2`."""
    pairs = [*mesh.compute_mapping.items(), *mesh.param_mapping.items()]
    divided = {
        axis: dict.fromkeys(name for name, axes in pairs if axis in ensure_tuple(axes)) for axis in mesh.axes
    }
    return "; ".join(f"{', '.join(divided[axis])}: {size}" for axis, size in mesh.axes.items() if size != 1)
