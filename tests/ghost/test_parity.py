"""Scores against PyTorch: a loop over examples' gradients of Hugging Face's model with the same weights."""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from models.qwen3 import Qwen3MoeConfig
from stacked_remat import ghost
from stacked_remat.training import TokenBatch

from .cases import token_means

torch = pytest.importorskip("torch")
parity = pytest.importorskip("tests.models.test_parity")

pytestmark = pytest.mark.torch

Examples, Pos = Axis("batch", 3), parity.Pos


def drawn(seed):
    return np.random.default_rng(seed).integers(0, parity.Vocab.size, (2, Examples.size, Pos.size))


def torch_gradients(reference, ids, targets):
    reference.zero_grad()
    logits = reference(torch.tensor(ids)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    loss.backward()
    return {name: parameter.grad.double().clone() for name, parameter in reference.named_parameters()}


@pytest.mark.parametrize(
    "variant", ["Qwen3 MoE", "Qwen3 MoE, tied, biases, dense first layer", "Qwen3", "Gemma 3"]
)
def test_scores_equal_those_of_a_loop_in_pytorch(variant, tmp_path):
    reference = parity.new_model(*parity.CASES[variant])
    model = parity.decoder_from(reference, tmp_path)
    assert isinstance(model.config, Qwen3MoeConfig) == ("MoE" in variant)
    (train, targets), (val, val_targets) = drawn(0), drawn(1)
    direction = torch_gradients(reference, val, val_targets)
    total = np.zeros(Examples.size)
    by_layer = np.zeros((model.config.num_layers, Examples.size))
    for number in range(Examples.size):
        own = torch_gradients(reference, train[[number]], targets[[number]])
        for name, gradient in own.items():
            score = float((gradient * direction[name]).sum())
            total[number] += score
            if name.startswith("model.layers."):
                by_layer[int(name.split(".")[2]), number] += score

    def batch(ids, targets):
        ids, targets = (hax.named(jnp.asarray(array, jnp.int32), (Examples, Pos)) for array in (ids, targets))
        return TokenBatch(ids, targets, hax.ones((Examples, Pos)))

    @eqx.filter_jit
    def step(model, train, val):
        direction = ghost.val_direction(model, token_means, val)
        return ghost.grad_dot(model, token_means, train, direction=direction)[1]

    found = step(model, batch(train, targets), batch(val, val_targets))
    np.testing.assert_allclose(found.total.array, total, rtol=0, atol=1e-4 * np.abs(total).max())
    kinds = {kind.name: kind.name for kind in model.config.kinds} if len(model.config.kinds) > 1 else {}
    by_kind = {
        prefix: sum(score.array for path, score in found.scores.items() if path.startswith(prefix))
        for prefix in ([f"layers.{name}." for name in kinds] or ["layers."])
    }
    rows = [model.config.layers_of(name) for name in kinds] or [range(model.config.num_layers)]
    for scores, own in zip(by_kind.values(), rows, strict=True):
        np.testing.assert_allclose(scores, by_layer[own], rtol=0, atol=1e-4 * np.abs(by_layer).max())
