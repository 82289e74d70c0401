"""Optax optimizers and learning-rate schedules from their configs."""

from typing import Any

import equinox as eqx
import haliax.nn as hnn
import jax
import optax
from haliax import NamedArray
from haliax.util import ensure_tuple

from . import optimizer_config as configs
from .parameters import scale_by_pattern
from .precision import in_float32
from .trainer_config import FloatName

# linear maps from or to an axis of this name are not orthogonalised, as embeddings
_VOCABULARY = "vocab"


def learning_rate_schedule(
    config: configs.OptimizerConfig, num_steps: int
) -> optax.Schedule:
    """The learning rate by step, from 0: linear during the warm-up, then
    `config.schedule`.

    The rate grows by the same amount from step to step, first from zero, and the step
    after the warm-up is the first at the highest. A schedule reaches its lowest rate
    right after the last step, so no step has a rate of zero.

    Raises:
        ValueError: the warm-up leaves no steps, or too few for the decay.
    """
    steps = config.warmup_steps(num_steps)
    if steps >= num_steps:
        raise ValueError(
            f"optimizer.warmup = {config.warmup:g} takes {steps} steps, but"
            f" trainer.num_steps = {num_steps} is not more: lower optimizer.warmup"
            " (below 1 it is a share of all steps), or raise trainer.num_steps."
        )
    highest = config.learning_rate
    left = num_steps - steps
    match config.schedule:
        case configs.ConstantSchedule():
            after = optax.constant_schedule(highest)
        case configs.CosineSchedule(ratio):
            after = optax.cosine_decay_schedule(highest, left, alpha=ratio)
        case configs.LinearSchedule(ratio):
            after = optax.linear_schedule(highest, highest * ratio, left)
        case configs.WarmupStableDecaySchedule(ratio, fraction):
            decay = config.schedule.decay_steps(num_steps)
            if decay > left:
                raise ValueError(
                    f"optimizer.schedule.decay_fraction = {fraction} takes {decay}"
                    f" steps of decay, but the warm-up leaves {left} of"
                    f" trainer.num_steps = {num_steps}: lower it or optimizer.warmup."
                )
            # From the last step at the highest rate to the end of the run
            falls = min(decay + 1, left)
            down = optax.linear_schedule(highest, highest * ratio, falls)
            after = optax.join_schedules(
                [optax.constant_schedule(highest), down], [left - falls]
            )
        case other:
            raise TypeError(f"No schedule is registered for {type(other).__name__}.")
    warmup = optax.linear_schedule(highest / (steps + 1), highest, steps)
    return optax.join_schedules([warmup, after], [steps]) if steps else after


def build_optimizer(
    config: configs.OptimizerConfig,
    num_steps: int,
    *,
    state_dtype: FloatName = "float32",
    eps_root: float = 0.0,
) -> optax.GradientTransformation:
    """Clipping, the update of `config`'s optimizer, weight decay, and the learning rate
    by step and parameter.

    Args:
        config: the optimizer and its schedule.
        num_steps: steps of the run, for the schedule.
        state_dtype: dtype in which the optimizer's arrays are stored; it computes in
            float32.
        eps_root: added below the square root of AdamW, and of that in Muon, for
            derivatives of the updates.

    Memory: as the config's class says, in `state_dtype`.
    """
    # Weight decay after the direction and before the rate, as in AdamW (Loshchilov and
    # Hutter 2019): it is scaled by the rate, and not by second moments.
    chain = [
        _direction(config, eps_root),
        optax.add_decayed_weights(config.weight_decay, mask=_is_decayed),
        optax.scale_by_learning_rate(learning_rate_schedule(config, num_steps)),
    ]
    if config.learning_rates:
        # Last, so that a factor counts for weight decay too
        chain.append(scale_by_pattern(config.learning_rates))
    if config.max_grad_norm is not None:
        # First, so that moments are of clipped gradients.
        chain.insert(0, optax.clip_by_global_norm(config.max_grad_norm))
    return in_float32(optax.chain(*chain), state_dtype)


def _direction(
    config: configs.OptimizerConfig, eps_root: float
) -> optax.GradientTransformation:
    """From gradients to updates, before weight decay and the learning rate."""
    match config:
        case configs.AdamWConfig():
            return optax.scale_by_adam(
                config.beta1, config.beta2, config.epsilon, eps_root
            )
        case configs.LionConfig():
            return optax.scale_by_lion(b1=config.beta1, b2=config.beta2)
        case configs.AdafactorConfig():
            least = config.min_factored_dim
            threshold = config.clipping_threshold
            return optax.chain(
                optax.scale_by_factored_rms(
                    decay_rate=config.decay_rate, min_dim_size_to_factor=least
                ),
                (
                    optax.identity()
                    if threshold is None
                    else optax.clip_by_block_rms(threshold)
                ),
                (
                    optax.scale_by_param_block_rms()
                    if config.scale_by_parameter
                    else optax.identity()
                ),
            )
        case configs.MuonConfig():
            muon = optax.contrib.muon(
                1.0,
                beta=config.momentum,
                eps=config.epsilon,
                adam_b1=config.beta1,
                adam_b2=config.beta2,
                adam_eps_root=eps_root,
                muon_weight_dimension_numbers=_matrices,
                consistent_rms=config.update_rms,
            )
            # Like optax's aliases, it negates by its rate
            return optax.chain(muon, optax.scale(-1.0))
        case configs.SgdConfig():
            return (
                optax.trace(config.momentum, config.nesterov)
                if config.momentum
                else optax.identity()
            )
    raise TypeError(f"No optimizer is registered for {type(config).__name__}.")


def _is_decayed(parameters: Any) -> Any:
    """Whether each leaf is decayed: all except the weights of norms, biases, and what a
    module leaves out.
    """

    def is_left_out(node: Any) -> bool:
        return getattr(node, "weight_decay", True) is False or _is_norm(node)

    def decayed(path: tuple[Any, ...], node: Any) -> Any:
        if is_left_out(node):
            return jax.tree.map(lambda _: False, node)
        return "bias" not in (getattr(entry, "name", None) for entry in path)

    return jax.tree_util.tree_map_with_path(decayed, parameters, is_leaf=is_left_out)


def _is_norm(node: Any) -> bool:
    """Whether a node is a norm, by its name, which holds arrays alone: one around a
    layer has its weights.
    """
    if not type(node).__name__.lower().endswith("norm"):
        return False
    children = jax.tree.leaves(
        node, is_leaf=lambda part: part is not node and isinstance(part, eqx.Module)
    )
    layers = (one for one in children if isinstance(one, eqx.Module))
    return all(isinstance(one, eqx.nn.StateIndex) for one in layers)


def _matrices(parameters: Any) -> Any:
    """For each leaf the dimensions of its matrices, or None if it is not one."""

    def is_linear(node: Any) -> bool:
        return isinstance(node, hnn.Linear | hnn.MoELinear | eqx.nn.Linear)

    def dimensions(node: Any) -> Any:
        found = (
            _matrix_of(node) if is_linear(node) and node.weight is not None else None
        )
        return jax.tree_util.tree_map_with_path(
            lambda path, _: (
                found if path and getattr(path[0], "name", None) == "weight" else None
            ),
            node,
        )

    return jax.tree.map(dimensions, parameters, is_leaf=is_linear)


def _matrix_of(linear: Any) -> optax.contrib.MuonDimensionNumbers | None:
    if not isinstance(linear.weight, NamedArray):  # Equinox: [..., out, in]
        return optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
    # Axes beside `In` and `Out` are those of layers and experts, each of which has a
    # matrix of its own.
    names = [axis.name for axis in linear.weight.axes]
    ends = [
        tuple(axis.name for axis in ensure_tuple(spec))
        for spec in (linear.In, linear.Out)
    ]
    if not all(ends) or _VOCABULARY in ends[0] + ends[1]:
        return None
    rows, columns = (tuple(names.index(name) for name in end) for end in ends)
    return optax.contrib.MuonDimensionNumbers(reduction_axis=rows, output_axis=columns)
