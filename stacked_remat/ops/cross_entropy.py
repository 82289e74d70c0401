"""Cross entropy from hidden states, a chunk of tokens at a time.

The logits of all tokens are the largest array of a long-context step: with 65,536
tokens and a vocabulary of 151,936 they take 37 GiB in float32. Here the logits of one
chunk exist at a time, and the backward pass recomputes them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import lax
from jaxtyping import Array, Float

from .._noted import noted
from .._sweep.store import zeros_after
from ._named import FLOATS, INTEGERS, check_named
from ._padding import multiple_above, pad_axis
from ._perturbed_vjp import perturbed_vjp
from ._row_calls import call_on_rows
from .per_device import align_varying_axes, per_device

Hidden = Float[Array, "token embed"]
Head = Float[Array, "embed vocab"] | Float[Array, "vocab embed"]

# Of a position without a target, as in PyTorch and Hugging Face's transformers
IGNORED_TARGET = -100


@dataclasses.dataclass(frozen=True, eq=False)
class CrossEntropyCall:
    """A call of `chunked_cross_entropy`, for an interpreter of the program that makes
    it.
    """

    # The arrays of hidden, head, targets and perhaps weights, and a direction of the
    # head, to the losses and their derivative along it, which costs one product more.
    along: Callable[[Sequence[Any], Any], tuple[Any, Any]]


def chunked_cross_entropy(
    hidden: NamedArray,
    head: NamedArray,
    targets: NamedArray,
    Embed: Axis,
    Vocab: Axis,
    *,
    weights: NamedArray | None = None,
    z_loss: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = 512,
) -> NamedArray:
    """The cross entropy of every token, in nats, without the logits of all tokens.

    Equals, in float32,

    ```python
    logits = scale * hax.dot(hidden, head, axis=Embed)
    logits = softcap * hax.tanh(logits / softcap)  # if there is one
    lse = hax.nn.logsumexp(logits, Vocab)
    weights * (lse - hax.take(logits, Vocab, targets) + z_loss * lse**2)
    ```

    Args:
        hidden: `[..., Embed]`.
        head: `[Embed, Vocab]` in any order, cast to the dtype of `hidden`.
        targets: integers `[...]`. The loss of -100 is zero and has no gradient, for any
            weight. That of any other integer outside `Vocab` is NaN.
        weights: float `[...]`; a token of weight 0 may have any target. The gradient of
            a weight is the token's loss, and zero where its target is outside `Vocab`.
        z_loss: a Python number, factor of the squared log-sum-exp (Chowdhery et al.
            2022).
        scale: a Python number, factor of the logits.
        softcap: a Python number, which bounds the scaled logits (Gemma Team 2024,
            "Gemma 2"); None for no bound.
        chunk_size: tokens whose logits exist at once.

    Returns:
        Float32 `[...]`, in the axis order of `targets`.

    Raises:
        ValueError: an argument does not fit.

    On several devices: each computes the tokens that Haliax's axis mapping gives it,
    with all of `head`.

    Cost: `8 * tokens * embed * vocab` FLOPs with the gradient (6 if the logits were
    kept), and 2 less if `head` is frozen. Memory in float32: a few times `chunk_size *
    vocab`, and the gradient of `head`.
    """
    tokens = targets.axes
    check_named("targets", targets, INTEGERS, ())
    check_named("hidden", hidden, FLOATS, (*tokens, Embed), ())
    check_named("head", head, FLOATS, (Embed, Vocab), ())
    if weights is not None:
        check_named("weights", weights, FLOATS, tokens, ())
    if chunk_size < 1:
        raise ValueError(
            f"chunk_size must be a number of tokens, at least 1; got {chunk_size}."
        )

    names = "ev" if head.axes[0] == Embed else "ve"
    cap = None if softcap is None else float(softcap)
    options = _Options(float(z_loss), chunk_size, names, float(scale), cap)
    losses = functools.partial(_of_tokens, Embed, Vocab, options)

    def of_all(*arguments: Any) -> NamedArray:
        return per_device(losses, *arguments, over=tokens, out=tokens)

    structure = jax.tree.structure((hidden, head, targets, weights))
    axes = head.axes

    def along(arrays: Sequence[Any], direction: Any) -> tuple[Any, Any]:
        arguments = jax.tree.unflatten(structure, arrays)
        named = NamedArray(direction, axes)
        out = tokens, tokens
        found = per_device(losses, *arguments, named, over=tokens, out=out)
        own, derivatives = found
        return own.array, derivatives.array

    return noted(CrossEntropyCall(along), of_all)(hidden, head, targets, weights)


def _of_tokens(Embed: Axis, Vocab: Axis, options: "_Options", *given: Any) -> Any:
    """The losses, and with a direction of the head a tuple of these and their
    derivative along it.
    """
    hidden, head, targets, weights, *rest = align_varying_axes(
        "chunked_cross_entropy", given
    )
    (direction,) = rest or (None,)
    tokens = targets.axes
    count = math.prod(axis.size for axis in tokens)
    flat = hidden.rearrange((*tokens, Embed)).array.reshape(count, Embed.size)
    # As it is stored: XLA would hold the transpose of a frozen head through the whole
    # step.
    matrix = head.array.astype(flat.dtype)
    # Narrower types could not hold Vocab.size
    labels = targets.array.reshape(count).astype(jnp.int32)
    counted = None
    if weights is not None:
        counted = weights.rearrange(tokens).array.reshape(count)
    ignored = labels == IGNORED_TARGET
    if counted is not None:
        is_outside = (labels < 0) | (labels >= Vocab.size)
        ignored |= (counted == 0) & is_outside
    # A negative index would count from the end; an index beyond the end reads NaN.
    labels = jnp.where(labels < 0, Vocab.size, labels)
    labels = jnp.where(ignored, 0, labels)
    along = None if direction is None else direction.array.astype(flat.dtype)
    of_rows = functools.partial(_of_rows, options)
    found = call_on_rows(of_rows, (flat, labels), (matrix, along))

    def of_tokens(each: Any) -> NamedArray:
        each = jnp.where(ignored, 0.0, each)
        if counted is not None:
            each = each * counted.astype(jnp.float32)
        return NamedArray(each.reshape([axis.size for axis in tokens]), tokens)

    losses, derivatives = found
    if derivatives is None:
        return of_tokens(losses)
    return of_tokens(losses), of_tokens(derivatives)


class _Options(NamedTuple):
    z_loss: float
    size: int  # of a chunk
    names: str  # of the axes of the head
    scale: float  # of the logits
    softcap: float | None  # of the scaled logits


def _of_rows(
    options: _Options, rows: tuple[Hidden, Array], heads: tuple[Head, Head | None]
) -> Any:
    """The losses and derivatives of rows, in chunks of which the last is padded."""
    hidden, targets = rows
    head, along = heads
    count = len(targets)
    options = options._replace(size=min(options.size, count) or 1)
    # Rows of zeros with the target 0, whose losses are dropped again
    padded = multiple_above(count, options.size)
    hidden = pad_axis(hidden, 0, padded)
    targets = pad_axis(targets, 0, padded)
    found = _losses(options, (hidden, head), (targets, along))
    return jax.tree.map(lambda each: each[:count], found)


def _found(options: _Options, inputs: Any, constants: Any) -> tuple[Any, Array]:
    """The losses and their derivatives along a direction of the head, and the
    log-sum-exps.
    """
    hidden, head = inputs
    targets, along = constants
    z_loss = options.z_loss
    rows = targets.reshape(-1, options.size)
    chunks = hidden.reshape(*rows.shape, hidden.shape[1]), rows

    def of_head(head: Head) -> tuple[Array, Array]:
        def chunk(
            _: None, at: tuple[Hidden, Array]
        ) -> tuple[None, tuple[Array, Array]]:
            own, target = at
            logits = _logits(own, head, options)
            lse = jax.nn.logsumexp(logits, axis=-1)
            picked = jnp.take_along_axis(logits, target[:, None], axis=-1)
            picked = picked[:, 0]
            return None, (lse - picked + z_loss * lse**2, lse)

        _, (losses, lse) = lax.scan(chunk, None, chunks)
        return losses.reshape(-1), lse.reshape(-1)

    if along is None:
        losses, lse = of_head(head)
        return (losses, None), lse
    primals, tangents = jax.jvp(of_head, (head,), (along,))
    losses, lse = primals
    derivatives, _ = tangents
    return (losses, derivatives), lse


def _forward(options: _Options, inputs: Any, constants: Any) -> tuple[Any, Any]:
    found, lse = _found(options, inputs, constants)
    return found, (*inputs, constants[0], lse)


def _backward(
    options: _Options, wanted: tuple[bool, ...], residuals: Any, cotangents: Any
) -> Any:
    """Chunk by chunk, whose logits are computed again. The gradient of a logit is its
    softmax, less one for the target, times the cotangent of the loss.
    """
    hidden, head, targets, lse = residuals
    z_loss, size, names = options.z_loss, options.size, options.names
    cotangent, _ = cotangents

    def chunk(
        gradients: tuple[Array, Array | None], i: Array
    ) -> tuple[tuple[Array, Array | None], None]:
        of_hidden, of_head = gradients
        slices = []
        for array in (hidden, targets, lse, cotangent):
            slices.append(lax.dynamic_slice_in_dim(array, i * size, size))
        own, target, own_lse, ct = slices
        # Of the log-sum-exp: its own part of the loss, and that of the z-loss
        of_lse = ct * (1.0 + 2.0 * z_loss * own_lse)
        logits = _logits(own, head, options)
        softmax = jnp.exp(logits - own_lse[:, None])
        of_logits = softmax * of_lse[:, None]
        labels = jnp.arange(of_logits.shape[1])[None, :]
        hit = target[:, None] == labels
        of_logits = jnp.where(hit, of_logits - ct[:, None], of_logits)
        if options.softcap is not None:  # the derivative of tanh
            of_logits *= 1.0 - (logits / options.softcap) ** 2
        if options.scale != 1.0:
            of_logits *= options.scale
        of_logits = of_logits.astype(own.dtype)
        if of_head is not None:
            new = jnp.einsum(
                f"te,tv->{names}", own, of_logits, preferred_element_type=jnp.float32
            )
            of_head = of_head + new
        new = jnp.einsum(f"tv,{names}->te", of_logits, head)
        of_hidden = lax.dynamic_update_slice_in_dim(of_hidden, new, i * size, 0)
        return (of_hidden, of_head), None

    of_head = jax.ShapeDtypeStruct(head.shape, jnp.float32) if wanted[1] else None
    start = zeros_after((hidden, cotangent), (hidden, of_head))
    chunks = jnp.arange(len(targets) // size, dtype=jnp.int32)
    (of_hidden, of_head), _ = lax.scan(chunk, start, chunks)
    if of_head is not None:
        of_head = of_head.astype(head.dtype)
    return of_hidden, of_head


_losses = perturbed_vjp(lambda *args: _found(*args)[0], _backward, _forward)


def _logits(
    hidden: Hidden, head: Head, options: _Options
) -> Float[Array, "token vocab"]:
    logits = jnp.einsum(
        f"te,{options.names}->tv", hidden, head, preferred_element_type=jnp.float32
    )
    if options.scale != 1.0:
        logits = logits * options.scale
    if options.softcap is None:
        return logits
    return options.softcap * jnp.tanh(logits / options.softcap)
