"""The state that a run begins with, and checkpoints of earlier versions."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.command import error_message
from models.decoder.config import ExpertsConfig
from models.decoder.decoder import Decoder
from models.qwen3 import Qwen3MoeConfig
from models.run_config import LmRunConfig
from models.run_state import check_step, initial_state, present_name, present_target, saved_arrays
from stacked_remat.lora import LoraConfig
from stacked_remat.training import (
    CheckpointConfig,
    CheckpointMismatchError,
    Checkpoints,
    MeshConfig,
    Partitioning,
    TrainerConfig,
    UpdateConfig,
)

MODEL = Qwen3MoeConfig(
    hidden_dim=8, num_layers=3, num_heads=2, num_kv_heads=1, experts=ExpertsConfig(2, 1, 4)
)


class OldDecoder(eqx.Module):
    """The arrays of a decoder by the paths that they had: a stack for every run of equal layers."""

    embedding: Any
    stacks: tuple[Any, ...]
    norm: Any
    head: Any


def as_it_was(state):
    def old(node):
        if not isinstance(node, Decoder):
            return node
        return OldDecoder(node.embedding, (node.layers,), node.norm, node.head)

    return jax.tree.map(old, state, is_leaf=lambda node: isinstance(node, Decoder))


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["weights", "adapters"])
def test_checkpoints_of_an_earlier_version_are_read(tmp_path, lora):
    config = LmRunConfig(model=MODEL, vocab_size=11, lora=lora)
    like = initial_state(config)
    state = jax.tree.map(lambda leaf: leaf + 1 if eqx.is_inexact_array(leaf) else leaf, like)
    state = dataclasses.replace(state, frozen=like.frozen)
    options: Any = {"run_config": {}, "saved": saved_arrays, "present_name": present_name}
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), **options)
    checkpoints.save(1, as_it_was(state), {"step": 1})
    found, position = checkpoints.restore(like)
    checkpoints.close()
    assert position == {"step": 1} and jax.tree.structure(found) == jax.tree.structure(state)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize("fused", [False, True])
def test_errors_of_a_model_are_not_errors_of_its_config(monkeypatch, standard_promotion, fused):
    """They keep their class, and a command shows their traceback."""

    def broken(self, *args, **kwargs):
        raise ValueError("operands do not fit")

    monkeypatch.setattr(Decoder, "hidden_states", broken)
    trainer = TrainerConfig(update=UpdateConfig(fused=fused), mesh=MeshConfig(axes={"data": 1}))
    config = LmRunConfig(model=MODEL, vocab_size=11, trainer=trainer)
    with pytest.raises(ValueError, match="operands do not fit") as raised:
        check_step(config, Partitioning.of(trainer.mesh))
    assert type(raised.value) is ValueError and error_message(raised.value) is None

    monkeypatch.setattr(Decoder, "unembedding", lambda self: self.no_such_field)
    with pytest.raises(AttributeError, match="no_such_field"):
        initial_state(dataclasses.replace(config, lora=LoraConfig(rank=2)))


def test_those_of_layers_of_several_kinds_are_refused():
    name = "optimizer_state.0.mu.stacks.{}.stacked.mlp.experts.stacked.up_proj.weight"
    assert present_name(name.format(0)) == name.format(0).replace("stacks.0", "layers")
    for target, now in (
        ("stacks.*.attention.*", "layers.*.attention.*"),
        ("stacks.0.*_proj", "layers.*_proj"),
    ):
        assert present_target(target) == now and present_target(now) == now
    of_fused_update = "optimizer_state.stacks.1.0.count"
    assert present_name(of_fused_update) == of_fused_update
    with pytest.raises(
        CheckpointMismatchError, match=r"several stacks .*mu.stacks.1.*models.export_hf; then"
    ):
        present_name(name.format(1))
