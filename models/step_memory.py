"""What one training step of a config needs in memory, by compiling it, and the policy that fits a budget."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from models.lm import LmConfig, next_token_loss
from models.pretrained import resolved_model
from models.run_state import ModelOfRun, StepConfig, batch_shapes, run_optimizer, state_shapes
from stacked_remat import ScanCheckpointSpec
from stacked_remat.memory import MemoryReport, Plan, Target, find_target, plan, report
from stacked_remat.training import Partitioning, TokenBatch, TrainState, build_step, check_fits


def step_report(
    config: StepConfig,
    remat: ScanCheckpointSpec,
    *,
    target: str | Target = "local",
    devices: int | None = None,
) -> MemoryReport:
    """What one training step needs under `remat`, its state updated in place; costs one compilation.

    Args:
        config: the model, its data, its optimizer and the mesh.
        remat: policy of the model's stacks.
        target: the device to compile for.
        devices: how many of them; all of `local`, one of another target, if not given.

    Raises:
        ConfigError: the mesh does not fit the devices, or the model or the batch the mesh.
    """
    step = _Step(config, *_on(config, target, devices))
    with step.partitioning.activations():
        return report(step.under(remat), *step.shapes(), donate="state", target=target)


def check_memory(
    config: StepConfig,
    *,
    target: str | Target = "local",
    devices: int | None = None,
) -> None:
    """Refuses a config whose weights, optimizer state and one batch are more than a device has memory for.

    They are there whatever the policy. Costs one tracing of how the model is made, whatever its size.

    Args:
        config: the model, its data, its optimizer and the mesh.
        target: the device.
        devices: how many of them; all of `local`, one of another target, if not given.

    Raises:
        ConfigError: says how much each takes, and how much there is; as `step_report`.
    """
    batch, state = _Step(config, *_on(config, target, devices)).shapes()
    check_fits(
        {
            "trained weights": state.trained,
            "frozen weights": state.frozen,
            "optimizer state": state.optimizer_state,
            "a batch": batch,
        },
        f"Now model.num_layers = {config.model.num_layers:,}, vocab_size = {state.model.Vocab.size:,}, "
        f"data.batch_size = {config.data.batch_size:,} and data.seq_len = {config.data.seq_len:,}: lower "
        f"what is too large, or divide the arrays over more devices (trainer.mesh).",
        limit=find_target(target).memory,
    )


def plan_step(
    config: StepConfig,
    *,
    budget: int | str,
    host_budget: int | str | None = None,
    target: str | Target = "local",
    devices: int | None = None,
) -> Plan:
    """The first policy, as `stacked_remat.memory.plan` tries them, that trains `config` within a budget.

    Args:
        config: the model, its data, its optimizer and the mesh.
        budget: memory of each device for the whole step, as `stacked_remat.memory.plan` takes it.
        host_budget: the same for the host.
        target: the device to compile for.
        devices: how many of them; all of `local`, one of another target, if not given.

    Raises:
        BudgetError: no policy fits.
        ConfigError: the mesh does not fit the devices, or the model or the batch the mesh.
    """
    step = _Step(config, *_on(config, target, devices))
    with step.partitioning.activations():
        return plan(
            step.under,
            *step.shapes(),
            budget=budget,
            host_budget=host_budget,
            target=target,
            donate="state",
            layers=step.architecture.num_layers,
        )


def _on(config: StepConfig, target: str | Target, devices: int | None) -> tuple[Partitioning, LmConfig, int]:
    """The mesh on the target, and what the config's model comes to."""
    chosen = find_target(target)
    if devices is None:
        devices = jax.device_count() if chosen.name == "local" else 1
    return Partitioning.of(config.trainer.mesh, chosen.devices(devices)), *resolved_model(
        config, check_folder=False
    )


@dataclass(frozen=True)
class _Step:
    """One training step as a function of the policy.

    Attributes:
        config: what it does.
        partitioning: the devices.
        architecture: the model.
        vocab_size: rows of its embedding.
    """

    config: StepConfig
    partitioning: Partitioning
    architecture: LmConfig
    vocab_size: int

    def under(self, remat: ScanCheckpointSpec) -> Callable[..., Any]:
        """The step under a policy."""
        train_step = build_step(
            self.config.trainer,
            loss_function=next_token_loss,
            optimizer=run_optimizer(self.config),
            partitioning=self.partitioning,
        )
        structure = jax.tree.structure(self._state(remat))

        def step(batch: TokenBatch, state: TrainState) -> Any:
            state = jax.tree.unflatten(structure, jax.tree.leaves(state))  # the same arrays under this policy
            return train_step(batch, state)

        return step

    def shapes(self) -> tuple[TokenBatch, TrainState]:
        """Those of its arguments."""
        data = self.config.data
        self.partitioning.check_rows(data.batch_size, self.config.trainer.update.microbatches)
        return batch_shapes(data, self.partitioning), self._state(True)

    def _state(self, remat: ScanCheckpointSpec) -> TrainState:
        model = ModelOfRun(self.architecture, self.vocab_size, remat)
        return state_shapes(self.config, model, self.partitioning)
