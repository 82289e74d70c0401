"""What one training step of a config needs in memory, by compiling it, and the policy that fits a budget."""

from collections.abc import Callable
from typing import Any, Protocol

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis

from models.lm import build_model, next_token_loss
from models.lora import with_adapters
from models.pretrained import ModelEntries, resolved_model
from stacked_remat import ScanCheckpointSpec
from stacked_remat.lora import LoraConfig
from stacked_remat.memory import MemoryReport, Plan, Target, plan, report
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    OptimizerConfig,
    TokenBatch,
    TrainerConfig,
    TrainState,
    build_optimizer,
    build_step,
    cast_parameters,
)


class StepConfig(ModelEntries, Protocol):
    """What a config says of the training step."""

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters, where they alone are trained."""
        ...

    @property
    def optimizer(self) -> OptimizerConfig:
        """What keeps state for every weight that is trained."""
        ...

    @property
    def trainer(self) -> TrainerConfig:
        """Microbatches and dtypes; the number of steps, for the schedule."""
        ...


def step_report(
    config: StepConfig, remat: ScanCheckpointSpec, *, target: str | Target = "local"
) -> MemoryReport:
    """What one training step needs under `remat`, its state updated in place; costs one compilation."""
    return report(_step(config, remat), *_shapes(config), donate="state", target=target)


def plan_step(
    config: StepConfig,
    *,
    budget: int | str,
    host_budget: int | str | None = None,
    target: str | Target = "local",
) -> Plan:
    """The policy that trains `config` within a budget with the least recomputation.

    Args:
        config: the model, its data and its optimizer.
        budget: device memory for the whole step, as `stacked_remat.memory.plan` takes it.
        host_budget: the same for the host.
        target: the device to compile for.

    Raises:
        BudgetError: no policy fits.
    """
    return plan(
        lambda remat: _step(config, remat),
        *_shapes(config),
        budget=budget,
        host_budget=host_budget,
        target=target,
        donate="state",
        layers=resolved_model(config, check_folder=False)[0].num_layers,
    )


def _step(config: StepConfig, remat: ScanCheckpointSpec) -> Callable[..., Any]:
    train_step = build_step(config.trainer, loss_function=next_token_loss, optimizer=_optimizer(config))
    structure = jax.tree.structure(_initial_state(config, remat))

    def step(batch: TokenBatch, state: TrainState) -> Any:
        state = jax.tree.unflatten(structure, jax.tree.leaves(state))  # the same arrays under this policy
        return train_step(batch, state)

    return step


def _shapes(config: StepConfig) -> tuple[TokenBatch, TrainState]:
    def first_batch() -> TokenBatch:
        axes = (Axis(BATCH_AXIS, config.data.batch_size), Axis(POSITION_AXIS, config.data.seq_len))
        tokens = hax.zeros(axes, dtype=jnp.int32)
        documents = tokens if config.data.separate_documents else None
        return TokenBatch(tokens, tokens, hax.ones(axes, dtype=jnp.float32), documents, documents)

    return eqx.filter_eval_shape(first_batch), _initial_state(config, True)


def _initial_state(config: StepConfig, remat: ScanCheckpointSpec) -> TrainState:
    architecture, vocab_size = resolved_model(config, check_folder=False)

    def initial() -> TrainState:
        key = jax.random.key(0)
        model = build_model(architecture, Axis("vocab", vocab_size), remat=remat, key=key)
        model = cast_parameters(model, config.trainer.precision.parameters)
        model, trainable = with_adapters(model, config.lora, key=key)
        return TrainState.init(model, _optimizer(config), trainable)

    return eqx.filter_eval_shape(initial)


def _optimizer(config: StepConfig) -> optax.GradientTransformation:
    return build_optimizer(
        config.optimizer,
        config.trainer.num_steps,
        state_dtype=config.trainer.precision.optimizer_state,
    )
