import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat.training import ConfigError, held_out_evaluator

from .next_byte import NextByte, next_byte, next_byte_loss
from .token_batches import held_out_of


def test_every_token_counts_the_same_in_a_short_last_sequence_too():
    stream = (
        np.random.default_rng(0).integers(0, 7, 43).astype(np.uint16)
    )  # 42 targets: 5 sequences of 8, and 2
    packed = held_out_of(stream, 8, 2)
    model = NextByte(jnp.asarray(np.random.default_rng(1).normal(size=(7, 7)), jnp.float32))
    table = np.asarray(model.table, np.float64)
    log_probs = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    expected = -log_probs[stream[:-1], stream[1:]].mean()
    evaluate = held_out_evaluator(next_byte_loss, packed, 3)
    np.testing.assert_allclose(evaluate(model), expected, rtol=1e-5)
    assert evaluate(model) == evaluate(model)
    np.testing.assert_allclose(evaluate(next_byte(7)), np.log(7), rtol=1e-6)


def test_too_little_held_out_text_is_refused():
    packed = held_out_of(np.zeros(81, np.uint16), 8, 4)
    with pytest.raises(ConfigError, match=r"The set code has 3 batches, fewer than trainer.eval_batches = 4"):
        held_out_evaluator(next_byte_loss, packed, 4, name="code")
