"""From an optimizer config to optax."""

from typing import Any

import equinox as eqx
import haliax.nn as hnn
import jax
import optax

from .config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate by step: linear from zero, then a cosine down to `min_lr_ratio` at `num_steps`.

    Raises:
        ValueError: the warm-up leaves no step to train.
    """
    if config.warmup_steps >= num_steps:
        raise ValueError(
            f"optimizer.warmup_steps = {config.warmup_steps} must be less than trainer.num_steps = "
            f"{num_steps}: lower the one or raise the other."
        )
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=config.learning_rate * config.min_lr_ratio,
    )


def build_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW with clipping and the schedule of `config`; memory: two arrays like the parameters."""
    adamw = optax.adamw(
        learning_rate_schedule(config, num_steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=_is_decayed,
    )
    if config.max_grad_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)


def _is_decayed(parameters: Any) -> Any:
    """Whether each leaf is decayed: all but the weights of norms, and biases."""

    def is_norm(node: Any) -> bool:
        return isinstance(node, hnn.LayerNorm | hnn.RmsNorm | eqx.nn.LayerNorm | eqx.nn.RMSNorm)

    def decayed(path: tuple[Any, ...], node: Any) -> Any:
        if is_norm(node):
            return jax.tree.map(lambda _: False, node)
        return "bias" not in (getattr(entry, "name", None) for entry in path)

    return jax.tree_util.tree_map_with_path(decayed, parameters, is_leaf=is_norm)
