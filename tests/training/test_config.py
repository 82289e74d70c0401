from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat.training import (
    OptimizerConfig,
    TrainerConfig,
    build_optimizer,
    learning_rate_schedule,
)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (OptimizerConfig, {"learning_rate": 0.0}, r"optimizer.learning_rate must be positive"),
        (OptimizerConfig, {"max_grad_norm": 0.0}, r"optimizer.max_grad_norm must be positive"),
        (OptimizerConfig, {"warmup_steps": -1}, r"optimizer.warmup_steps must be at least 0"),
        (OptimizerConfig, {"beta2": 1.0}, r"optimizer.beta2 must lie in \[0, 1\), got 1.0"),
        (OptimizerConfig, {"min_lr_ratio": 2.0}, r"optimizer.min_lr_ratio must lie in \[0, 1\]"),
        (TrainerConfig, {"num_steps": 0}, r"trainer.num_steps must be at least 1"),
        (TrainerConfig, {"eval_every": 0}, r"trainer.eval_every must be at least 1"),
        (TrainerConfig, {"seed": -1}, r"trainer.seed must be at least 0"),
    ],
)
def test_values_out_of_range_are_refused(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_the_learning_rate_rises_to_its_height_and_falls_to_its_end():
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=4, min_lr_ratio=0.2)
    schedule = learning_rate_schedule(config, 20)
    rates = np.array([schedule(step) for step in range(21)])
    np.testing.assert_allclose(rates[:5], [0, 0.125, 0.25, 0.375, 0.5], rtol=1e-6)
    assert (np.diff(rates[4:]) < 0).all()
    np.testing.assert_allclose(rates[20], 0.1, rtol=1e-5)


def test_without_warm_up_the_first_step_has_the_full_rate():
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=0.5, warmup_steps=0), 10)
    np.testing.assert_allclose(schedule(0), 0.5)


def test_a_warm_up_without_end_is_refused():
    with pytest.raises(ValueError, match=r"warmup_steps = 10 must be less than trainer.num_steps = 10"):
        learning_rate_schedule(OptimizerConfig(warmup_steps=10), 10)


def step(config, parameters, gradients) -> Any:
    """What one step adds to the parameters; optax's Adam raises a float to an integer power."""
    optimizer = build_optimizer(config, 10)
    return optimizer.update(gradients, optimizer.init(parameters), parameters)[0]


def test_norms_and_biases_do_not_decay(standard_promotion):
    Embed, Out = hax.make_axes(embed=3, out=2)
    parameters = {
        "norm": hnn.RmsNorm.init(Embed, use_bias=False),
        "linear": hnn.Linear.init(Embed, Out, key=jax.random.key(0)),
    }
    parameters = jax.tree.map(jnp.ones_like, parameters)
    still = jax.tree.map(jnp.zeros_like, parameters)
    updates = step(OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5), parameters, still)
    np.testing.assert_allclose(updates["linear"].weight.array, -0.05, rtol=1e-6)
    assert not updates["linear"].bias.array.any() and not updates["norm"].weight.array.any()


def test_clipping_limits_the_gradient(standard_promotion):
    parameters = {"w": jnp.ones(2)}
    gradients = {"w": jnp.array([30.0, 40.0])}
    # a huge epsilon makes Adam's step proportional to the gradient: clipping then shows
    plain = {"warmup_steps": 0, "weight_decay": 0.0, "epsilon": 1e6}
    loose = step(OptimizerConfig(max_grad_norm=None, **plain), parameters, gradients)["w"]
    tight = step(OptimizerConfig(max_grad_norm=1.0, **plain), parameters, gradients)["w"]
    np.testing.assert_allclose(tight * 50, loose, rtol=1e-3)
