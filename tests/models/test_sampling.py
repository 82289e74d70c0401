"""How the next token is drawn: against probabilities computed by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.generation.sampling import Sampling, keep_top_k, next_tokens

PROBABILITIES = np.array([0.125, 0.5, 0.0625, 0.25, 0.0625])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32))
DRAWS = 4000


def kept(logits):
    return np.flatnonzero(np.isfinite(logits)).tolist()


@functools.cache
def frequencies(sampling):
    logits = jnp.broadcast_to(LOGITS, (DRAWS, 5))
    tokens = next_tokens(logits, sampling, jax.random.split(jax.random.key(0), DRAWS))
    assert tokens.shape == (DRAWS,) and tokens.dtype == jnp.int32
    return np.bincount(tokens, minlength=5) / DRAWS


def by_hand(temperature=1.0, top_k=5, top_p=1.0):
    """The exact distribution, a token at a time."""
    weights = PROBABILITIES ** (1 / temperature)
    weights = weights / weights.sum()
    order = sorted(range(5), key=lambda token: (-weights[token], token))[:top_k]
    total = sum(weights[order])
    found, mass = np.zeros(5), 0.0
    for token in order:
        if mass >= top_p:
            break
        found[token] = weights[token] / total
        mass += found[token]
    return found / found.sum()


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        (Sampling(), 5),
        (Sampling(temperature=0.5), 5),
        (Sampling(top_k=2), 2),
        (Sampling(top_p=0.7), 2),
        (Sampling(temperature=2.0, top_k=3, top_p=0.6), 2),
        (Sampling(top_k=1), 1),
        (Sampling(top_p=0.01), 1),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_exact_distribution(sampling, support):
    options = {
        name: value
        for name, value in dataclasses.asdict(sampling).items()
        if value is not None
    }
    expected = by_hand(**options)
    assert np.count_nonzero(expected) == support
    found = frequencies(sampling)
    assert not np.any(found[expected == 0])
    # five standard deviations of a frequency
    assert np.all(
        np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / DRAWS)
    )


def test_temperature_zero_takes_the_first_of_the_likeliest():
    logits = jnp.array([[0.0, 2.0, 2.0], [5.0, 1.0, 2.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    assert next_tokens(logits, Sampling(temperature=0.0), keys).tolist() == [1, 0]


def test_the_smallest_temperature_takes_the_likeliest():
    logits = jnp.array([[-7.0, 100.0, 1.0, 200.0]])
    for temperature in (float(np.finfo(np.float32).tiny), 1e-30, 1e-300):
        drawn = next_tokens(
            logits, Sampling(temperature), jax.random.split(jax.random.key(0), 1)
        )
        assert drawn.tolist() == [3]


@pytest.mark.parametrize(
    ("k", "expected"),
    [(2, [1, 3]), (3, [0, 1, 3]), (2**40, [0, 1, 2, 3, 4])],
)
def test_top_k_keeps_k_and_their_equals(k, expected):
    """Tokens 2 and 4 are alike."""
    assert kept(keep_top_k(LOGITS, k)) == expected


def test_a_row_depends_on_its_own_key_alone():
    keys = jax.random.split(jax.random.key(3), 6)
    rows = jnp.broadcast_to(LOGITS, (6, 5))
    together = next_tokens(rows, Sampling(), keys)
    alone = [
        int(next_tokens(rows[:1], Sampling(), keys[row : row + 1])[0])
        for row in range(6)
    ]
    assert together.tolist() == alone and len(set(alone)) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(temperature=-1.0),
            "temperature must be 0, for the likeliest token, or positive; got -1.0",
        ),
        (dict(top_k=0), "top_k must be at least 1 token; got 0"),
        (dict(top_p=0.0), "top_p must be above 0 and at most 1; got 0.0"),
        (dict(temperature=0.0, top_k=3), "top_k has no effect with temperature 0"),
    ],
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
