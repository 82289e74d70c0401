"""Steps that score their examples: what steps without return, and scores that are the
dot products.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from stacked_remat.ghost import ScoreLog
from stacked_remat.ghost.log import read_scores
from stacked_remat.training import (
    ByteTokenizer,
    FusedOptimizer,
    GhostConfig,
    GhostValidationConfig,
    Scoring,
    SgdConfig,
    TokenBatch,
    TrainState,
    TrainStep,
    build_optimizer,
    validation_batches,
)
from stacked_remat.training.example_texts import examples_by_token, named_examples
from stacked_remat.training.scoring import StepScorer

from .next_byte import NextByte, next_byte, next_byte_loss, token_losses
from .token_batches import held_out_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
VOCAB = 11
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 400).astype(np.uint16)
OPTIMIZER = build_optimizer(SgdConfig(learning_rate=0.1, warmup=0), 10)


def losses_by_token(model, batch):
    parts = token_losses(model, batch) / jnp.sum(batch.weights.array)
    return hax.named(parts, batch.tokens.axes), {"loss": jnp.sum(parts)}


def batch_of(seed):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (4, 9)).astype(np.int32)
    weights = np.ones((4, 8), np.float32)
    weights[1, 3:] = weights[2, 5:] = 0.0
    return TokenBatch.of(tokens[:, :-1], tokens[:, 1:], weights)


def scorer_of(folder, held_out, microbatches=1, **settings):
    config = GhostConfig("grad_dot", **{"token_mean": "batch", "every": 2} | settings)
    validation = validation_batches(config.validation, *held_out)
    decode = lambda tokens: " ".join(map(str, tokens))  # noqa: E731
    names = lambda position: [f"a.jsonl:{position['batches']}{row}" for row in range(4)]  # noqa: E731
    log = ScoreLog(folder)
    scoring = Scoring(config, losses_by_token, True, validation, decode, log, names)
    return StepScorer(scoring, TrainStep(next_byte_loss, OPTIMIZER, microbatches))


@pytest.mark.parametrize("token_mean", ["batch", "example"])
def test_a_scored_step_is_the_step_and_logs_the_dot_products(tmp_path, token_mean):
    texts = {
        name: held_out_of(TOKENS[at], 8, 4)
        for name, at in (("a", slice(90)), ("b", slice(200, 400)))
    }
    sources = GhostValidationConfig({"a": 1.0, "b": 3.0}, batches=2)
    settings = {"token_mean": token_mean, "validation": sources, "norms": True}
    scorer = scorer_of(tmp_path, (texts["a"], texts), 2, **settings)
    assert [step for step in range(1, 7) if scorer.is_due(step)] == [2, 4, 6]
    table = jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))
    state = TrainState.init(
        eqx.tree_at(lambda model: model.table, next_byte(VOCAB), table), OPTIMIZER
    )
    batch = batch_of(1)
    expected, metrics = eqx.filter_jit(TrainStep(next_byte_loss, OPTIMIZER, 2))(
        batch, state
    )
    gradient = jax.jit(
        jax.grad(lambda table, batch: next_byte_loss(NextByte(table), batch)[0])
    )
    direction = jnp.zeros_like(table)
    for name, share in (("a", 0.25), ("b", 0.75)):
        batches = [texts[name].batch(index) for index in range(2)]
        counts = [float(one.weights.array.sum()) for one in batches]
        for one, count in zip(batches, counts, strict=True):
            direction += share * count / sum(counts) * gradient(table, one)
    dots, norms = [], []
    for row in range(4):
        only = jnp.where(jnp.arange(4)[:, None] == row, batch.weights.array, 0.0)
        of_row = gradient(table, eqx.tree_at(lambda b: b.weights.array, batch, only))
        share = (
            1.0
            if token_mean == "example"
            else float(only.sum() / batch.weights.array.sum())
        )
        dots.append(share * float(jnp.vdot(of_row, direction)))
        norms.append(share * float(jnp.linalg.norm(of_row)))

    # Which donates it
    found, of_scored = scorer.step(batch, jax.tree.map(jnp.copy, state))
    np.testing.assert_allclose(found.trained.table, expected.trained.table, rtol=1e-6)
    assert found.step == 1
    assert of_scored.keys() == metrics.keys()
    np.testing.assert_allclose(of_scored["loss"], metrics["loss"], rtol=1e-6)
    scorer.log(2, {"batches": 3})
    scorer.flush()
    names = ["step", "example", "layer", "leaf", "score", "norm", "text", "place"]
    rows = read_scores(tmp_path, names).to_pylist()
    assert [row["place"] for row in rows] == [f"a.jsonl:3{row}" for row in range(4)]
    np.testing.assert_allclose([row["score"] for row in rows], dots, rtol=1e-5)
    np.testing.assert_allclose([row["norm"] for row in rows], norms, rtol=1e-5)
    assert {(row["step"], row["layer"], row["leaf"]) for row in rows} == {
        (2, None, "table")
    }
    assert len({row["example"] for row in rows}) == 4
    tokens = [*np.asarray(batch.tokens.array[0]), int(batch.targets.array[0, -1])]
    assert rows[0]["text"] == " ".join(map(str, tokens))


def test_tokens_of_a_scored_step_have_the_dot_products_of_their_losses(tmp_path):
    text = held_out_of(TOKENS, 8, 4)
    scorer = scorer_of(tmp_path, (text, {}), 2, by_token=True)
    model = NextByte(jax.random.normal(jax.random.key(0), (VOCAB, VOCAB)))
    state, batch = TrainState.init(model, OPTIMIZER), batch_of(1)
    step = eqx.filter_jit(TrainStep(next_byte_loss, OPTIMIZER, 2))
    expected, metrics = step(batch, state)
    direction = jax.grad(
        lambda table: next_byte_loss(NextByte(table), text.batch(0))[0]
    )
    of_losses = lambda table: losses_by_token(NextByte(table), batch)[0].array  # noqa: E731
    along = (direction(model.table),)
    _, dots = jax.jvp(of_losses, (model.table,), along)
    found, of_scored = scorer.step(batch, jax.tree.map(jnp.copy, state))
    np.testing.assert_allclose(found.trained.table, expected.trained.table, rtol=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(of_scored[name], value, rtol=1e-6)
    scorer.log(2, {"batches": 3})
    scorer.flush()
    names = ["leaf", "score", "loss", "text", "token_scores", "token_ends"]
    rows = read_scores(tmp_path, names).to_pylist()
    losses = of_losses(model.table).sum(axis=1)
    for row, of_tokens, loss in zip(rows, np.asarray(dots), losses, strict=True):
        assert row["leaf"] == "model" and row["token_ends"][-1] == len(row["text"])
        # The first token is no target.
        np.testing.assert_allclose(
            row["token_scores"], [0.0, *of_tokens], rtol=1e-4, atol=1e-7
        )
        np.testing.assert_allclose(row["score"], of_tokens.sum(), rtol=1e-4)
        np.testing.assert_allclose(row["loss"], loss, rtol=1e-5)


def test_texts_of_tokens_are_together_the_text():
    # Words with the space before them, which a text does not begin with
    words = ["▁so", "▁it", "▁goes", "▁on"]
    of_words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, "▁so")
    )
    of_words.decoder = tokenizers.decoders.Metaspace()
    of_bytes = ByteTokenizer().decode
    unknown = "\N{REPLACEMENT CHARACTER}"
    for decode, documents, tokens, first_pieces in (
        (
            of_bytes,
            ["añ", "語言 so"],
            [[*text.encode()] for text in ("añ", "語言 so")],
            ["a", "", "ñ", "\n", "", "語"],
        ),
        (
            of_bytes,
            [6 * unknown, "so"],
            [6 * [0xC3], [*b"so"]],
            ["", "", "", 4 * unknown, "", 2 * unknown, "\ns", "o"],
        ),
        (
            lambda own: of_words.decode([*own]),
            ["so it goes", "on so"],
            [[0, 1, 2], [3, 0]],
            ["so", " it", " goes", "\non", " so"],
        ),
    ):
        tokens = [np.array(one, np.int32) for one in tokens]
        inputs = np.concatenate([one[:-1] for one in tokens])
        targets = np.concatenate([one[1:] for one in tokens])
        numbers = np.repeat([1, 2], [len(one) - 1 for one in tokens])
        rows = (np.append(one, [0, 0])[None] for one in (inputs, targets, numbers))
        inputs, targets, numbers = rows
        weights = np.ones(inputs.shape, np.float32)
        batch = TokenBatch.of(inputs, targets, weights, numbers)
        scores = np.arange(1.0, 1 + inputs.size)[None]
        (found,), (of_tokens,) = examples_by_token(batch, scores, decode)
        assert found == named_examples(batch, decode)[1][0]
        assert found == "\n".join(documents)
        first = len(tokens[0])
        expected = np.arange(1.0, sum(map(len, tokens)) - 1)
        np.testing.assert_array_equal(np.delete(of_tokens.scores, [0, first]), expected)
        assert of_tokens.scores[0] == of_tokens.scores[first] == 0
        ends = of_tokens.ends.tolist()
        pieces = [found[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        assert len(pieces) == sum(map(len, tokens)) and "".join(pieces) == found
        assert pieces[: len(first_pieces)] == first_pieces


def test_updates_within_the_backward_pass_are_not_scored(tmp_path):
    scoring = scorer_of(tmp_path, (held_out_of(TOKENS, 8, 4), {}))._scoring
    with pytest.raises(ValueError, match="Scored steps take no FusedOptimizer"):
        StepScorer(scoring, TrainStep(next_byte_loss, FusedOptimizer(OPTIMIZER)))
