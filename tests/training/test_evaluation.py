"""The mean loss on held-out batches, overall and per source."""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat.training import ConfigError, held_out_evaluators

from .next_byte import NextByte, next_byte, next_byte_loss
from .token_batches import held_out_of


def evaluator(held_out, num_batches):
    return held_out_evaluators(next_byte_loss, held_out, {}, num_batches)["held_out"]


def test_every_token_counts_the_same_in_a_short_last_sequence_too():
    # 42 targets: 5 sequences of 8, and 2
    stream = np.random.default_rng(0).integers(0, 7, 43).astype(np.uint16)
    packed = held_out_of(stream, 8, 2)
    model = NextByte(
        jnp.asarray(np.random.default_rng(1).normal(size=(7, 7)), jnp.float32)
    )
    table = np.asarray(model.table, np.float64)
    log_probs = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    expected = -log_probs[stream[:-1], stream[1:]].mean()
    evaluate = evaluator(packed, 3)
    assert evaluator(packed, 1)(model) != evaluate(model)
    np.testing.assert_allclose(evaluate(model), expected, rtol=1e-5)
    assert evaluate(model) == evaluate(model)
    np.testing.assert_allclose(evaluate(next_byte(7)), np.log(7), rtol=1e-6)


def test_each_of_several_sources_has_a_loss_of_its_own_and_all_share_one_compilation():
    rng = np.random.default_rng(0)
    model = NextByte(
        jnp.asarray(np.random.default_rng(1).normal(size=(7, 7)), jnp.float32)
    )
    sources = {  # 5 and 2 batches of 2 sequences
        "web": held_out_of(rng.integers(0, 7, 81).astype(np.uint16), 8, 2),
        "my_chats": held_out_of(rng.integers(0, 3, 33).astype(np.uint16), 8, 2),
    }
    traces = []

    def counted_loss(model, batch):
        traces.append(batch.tokens.axes)
        return next_byte_loss(model, batch)

    evaluators = held_out_evaluators(counted_loss, sources["web"], sources, 3)
    found = {name: evaluate(model) for name, evaluate in evaluators.items()}
    assert len(traces) == 1
    assert found == {
        "held_out": found["held_out/web"],
        "held_out/web": evaluator(sources["web"], 3)(model),
        "held_out/my_chats": evaluator(sources["my_chats"], 2)(model),
    }
    assert found["held_out/web"] != found["held_out/my_chats"]


class Blank(list):
    """Batches, as of held-out text."""

    batch = list.__getitem__


def test_a_single_source_is_evaluated_once_and_little_text_in_all_its_batches():
    some = held_out_of(np.zeros(81, np.uint16), 8, 2)
    assert list(held_out_evaluators(next_byte_loss, some, {"only": some}, 3)) == [
        "held_out"
    ]
    model = next_byte(7)
    assert evaluator(some, 6)(model) == evaluator(some, 5)(model)
    assert held_out_evaluators(next_byte_loss, Blank(), {}, 6) == {}
    blank = eqx.tree_at(
        lambda batch: batch.weights, some.batch(0), replace_fn=hax.zeros_like
    )
    with pytest.raises(
        ConfigError, match="No token of the set held_out counts as a target"
    ):
        held_out_evaluators(next_byte_loss, Blank([blank]), {}, 1)["held_out"](
            next_byte(7)
        )
