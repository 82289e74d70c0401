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

import haliax as hax
import jax
import jax.numpy as jnp
from equinox import tree_pformat
from haliax import Axis, NamedArray
from haliax.axis import axis_spec_to_tuple
from jax import lax
from jaxtyping import Array, Float, Int

from .. import lax_scan
from .._in_files import ArrayInFiles, is_in_files
from .._messages import axes_text
from .._noted import DERIVATIVE_OF_RESULT, noted
from .._sweep.store import zeros_after
from ._grouped_linear import ComposedLinear, apply_linear, is_plain
from ._named import FLOATS, INTEGERS, check_named, named_as
from ._padding import multiple_above, pad_axis
from ._perturbed_vjp import perturbed_vjp
from ._row_calls import call_on_rows
from .per_device import align_varying_axes, per_device
from .softcap import check_softcap, soft_capped

# The logits are the sum of the products of these, one of each for one matrix: a head
# with a low-rank adapter has two.
Rows = tuple[Float[Array, "token in"], ...]
Matrices = tuple[Float[Array, "in vocab"] | Float[Array, "vocab in"], ...]

# Of a position without a target, as in PyTorch and Hugging Face's transformers
IGNORED_TARGET = -100

_MOST_ROWS_IN_FILES = 1024
"""Of a head in files, which are read at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class CrossEntropyCall:
    """A call of `chunked_cross_entropy`, for an interpreter of the program that makes
    it.
    """

    # The arrays of hidden, head (of one array), targets and perhaps weights, and a
    # direction of the head, to the losses and their derivative along it, which costs
    # one product more.
    along: Callable[[Sequence[Any], Any], tuple[Any, Any]]


def chunked_cross_entropy(
    hidden: NamedArray,
    head: Any,
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
    logits = scale * apply_linear(head, hidden)
    logits = softcap * hax.tanh(logits / softcap)  # if there is one
    lse = hax.nn.logsumexp(logits, Vocab)
    weights * (lse - hax.take(logits, Vocab, targets) + z_loss * lse**2)
    ```

    Args:
        hidden: `[..., Embed]`.
        head: `[Embed, Vocab]` in any order, or a linear map from `Embed` to `Vocab`: an
            `hnn.Linear`, or a `ComposedLinear` that adds up what its maps to `Vocab`
            give, such as a `LoraLinear`. Cast to the dtype of `hidden`. One in files
            (`streaming.from_files`), `[Vocab, Embed]`, is read some rows at a time.
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
    kept), and 2 less if `head` is frozen; the same for the rank of an adapter. Memory
    in float32: a few times `chunk_size * vocab`, and the gradient of `head`.
    """
    tokens = targets.axes
    check_named("targets", targets, INTEGERS, ())
    check_named("hidden", hidden, FLOATS, (*tokens, Embed), ())
    _check_head(head, Embed, Vocab)
    if weights is not None:
        check_named("weights", weights, FLOATS, tokens, ())
    if chunk_size < 1:
        raise ValueError(
            f"chunk_size must be a number of tokens, at least 1; got {chunk_size}."
        )

    check_softcap(softcap, "logits")
    cap = None if softcap is None else float(softcap)
    options = _Options(float(z_loss), chunk_size, (), float(scale), cap)
    in_files = _in_files(head)
    if in_files is not None:
        if in_files.entry_axes != (Vocab, Embed):
            raise ValueError(
                f"A head in files has entries of {axes_text((Vocab, Embed))}; got"
                f" {axes_text(in_files.entry_axes or ())}. Give streaming.from_files an"
                " array with these axes, and stacked=0."
            )
        options = options._replace(names=("ve",))
        return _of_head_in_files(
            hidden, in_files, targets, weights, Embed, Vocab, options
        )
    losses = functools.partial(_of_tokens, Embed, Vocab, options)

    def of_all(*arguments: Any) -> NamedArray:
        return per_device(losses, *arguments, over=tokens, out=tokens)

    structure = jax.tree.structure((hidden, head, targets, weights))
    of_head = jax.tree.structure(head)

    def along(arrays: Sequence[Any], direction: Any) -> tuple[Any, Any]:
        arguments = jax.tree.unflatten(structure, arrays)
        of_direction = jax.tree.unflatten(of_head, [direction])
        out = tokens, tokens
        found = per_device(losses, *arguments, of_direction, over=tokens, out=out)
        own, derivatives = found
        return own.array, derivatives.array

    # With a direction for one matrix alone, as of the usual head
    rule = CrossEntropyCall(along) if of_head.num_leaves == 1 else DERIVATIVE_OF_RESULT
    return noted(rule, of_all)(hidden, head, targets, weights)


@dataclasses.dataclass(frozen=True)
class _Logits:
    """Logits that are computed later, a chunk of tokens at a time.

    They stand for the array that a head's maps to the vocabulary would give, so that a
    `ComposedLinear` adds them up without knowing of chunks.
    """

    # Rows `[..., In]` and matrices `[In, Vocab]`, whose products sum up to the logits
    products: tuple[tuple[NamedArray, NamedArray], ...]
    axes: tuple[Axis, ...]

    def __add__(self, other: "_Logits") -> "_Logits":
        return _Logits(self.products + other.products, self.axes)

    def rearrange(self, axes: tuple[Axis, ...]) -> "_Logits":
        return _Logits(self.products, axes)


def _apply_later(Vocab: Axis, linear: Any, x: NamedArray) -> Any:
    """`apply_linear`, whose result is `_Logits` if it would have the axis `Vocab`."""
    apply = functools.partial(_apply_later, Vocab)
    if isinstance(linear, ComposedLinear):
        return linear.apply_maps(apply, x)
    if is_plain(linear):
        factor = linear.reparam.active_scale
        weight = linear.weight if factor == 1 else linear.weight * factor
        logits = apply(weight, x)
        if linear.bias is None:
            return logits
        # A bias is the only row of a matrix, by which every token is one.
        One = Axis("one", 1)
        tokens = [axis for axis in x.axes if axis not in axis_spec_to_tuple(linear.In)]
        ones = hax.ones((*tokens, One), x.dtype)
        return logits + apply(linear.bias.broadcast_axis(One), ones)
    if not isinstance(linear, NamedArray):
        raise ValueError(
            f"`head` maps by {tree_pformat(linear)}. It must be a named array,"
            " hnn.Linear, LoraLinear, or a module of such maps with a method"
            " `apply_maps`."
        )
    if Vocab not in linear.axes:
        return apply_linear(linear, x)
    (In,) = (axis for axis in linear.axes if axis != Vocab)
    tokens = tuple(axis for axis in x.axes if axis != In)
    rows = x.rearrange((*tokens, In))
    return _Logits(((rows, linear),), (*tokens, Vocab))


def _in_files(head: Any) -> ArrayInFiles | None:
    """The weights of a head in files, None for any other; refuses a bias or an
    adapter.
    """
    if is_in_files(head):
        return head
    if not any(map(is_in_files, jax.tree.leaves(head, is_leaf=is_in_files))):
        return None
    if not is_plain(head) or head.bias is not None:
        raise ValueError(
            "A head in files is an array or an hnn.Linear without a bias or an adapter."
            " Leave it out of LoraConfig.targets, or read it: streaming.in_memory."
        )
    return head.weight


def _check_head(head: Any, Embed: Axis, Vocab: Axis) -> None:
    if is_in_files(head):
        return
    if isinstance(head, NamedArray):
        check_named("head", head, FLOATS, (Embed, Vocab), ())
        return
    In = axis_spec_to_tuple(getattr(head, "In", Embed))
    Out = axis_spec_to_tuple(getattr(head, "Out", Vocab))
    if (In, Out) != ((Embed,), (Vocab,)):
        raise ValueError(
            f"`head` maps {axes_text(In)} to {axes_text(Out)}; it must map"
            f" {axes_text([Embed])} to {axes_text([Vocab])}."
        )


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
    hidden = hidden.rearrange((*tokens, Embed))
    logits = _apply_later(Vocab, head, hidden)
    rows = []
    for x, _ in logits.products:
        rows.append(x.array.reshape(count, x.axes[-1].size))
    matrices, names = _matrices(logits, Vocab, hidden.dtype)
    options = options._replace(names=names)
    labels, counted = _labels(targets, weights, Vocab)
    along = None
    if direction is not None:
        of_direction = _apply_later(Vocab, direction, hidden)
        along, _ = _matrices(of_direction, Vocab, hidden.dtype)
    of_rows = functools.partial(_of_rows, options)
    found = call_on_rows(of_rows, (tuple(rows), labels), (matrices, along))

    losses, derivatives = found
    if derivatives is None:
        return named_as(counted(losses), tokens)
    return named_as(counted(losses), tokens), named_as(counted(derivatives), tokens)


def _labels(
    targets: NamedArray, weights: NamedArray | None, Vocab: Axis
) -> tuple[Int[Array, " token"], Callable[[Array], Array]]:
    """Targets from 0 to `Vocab.size`, the latter for those outside of it, and a
    function that weighs the losses of tokens.
    """
    # Narrower types could not hold Vocab.size
    labels = targets.array.reshape(-1).astype(jnp.int32)
    factors = None
    if weights is not None:
        factors = weights.rearrange(targets.axes).array.reshape(-1)
    ignored = labels == IGNORED_TARGET
    if factors is not None:
        is_outside = (labels < 0) | (labels >= Vocab.size)
        ignored |= (factors == 0) & is_outside
    # A negative index would count from the end; an index beyond the end reads NaN.
    labels = jnp.where(labels < 0, Vocab.size, labels)
    labels = jnp.where(ignored, 0, labels)

    def counted(losses: Array) -> Array:
        losses = jnp.where(ignored, 0.0, losses)
        return losses if factors is None else losses * factors.astype(jnp.float32)

    return labels, counted


def _of_head_in_files(
    hidden: NamedArray,
    head: ArrayInFiles,
    targets: NamedArray,
    weights: NamedArray | None,
    Embed: Axis,
    Vocab: Axis,
    options: "_Options",
) -> NamedArray:
    """The losses by a head `[Vocab, Embed]` in files, some rows of it at a time, with
    the logits of all tokens; as many logits as in a chunk.
    """
    tokens = targets.axes
    labels, counted = _labels(targets, weights, Vocab)
    hidden = hidden.rearrange((*tokens, Embed))
    rows = hidden.array.reshape(len(labels), Embed.size)
    # The gradient of the rows is a sum over blocks, in float32.
    wide = rows.astype(jnp.float32)
    size = options.size * Vocab.size // max(len(labels), 1)
    size = max(1, min(size, _MOST_ROWS_IN_FILES, Vocab.size))
    blocks = head.in_blocks(size, Embed.size)

    def block(
        state: tuple[Array, Array], numbers: Array
    ) -> tuple[tuple[Array, Array], None]:
        lse, picked = state
        of_block = dataclasses.replace(blocks, numbers=numbers)
        matrix = of_block.cast_to(rows.dtype)
        logits = _logits((wide.astype(rows.dtype),), (matrix,), options)
        first = numbers * size
        begin = jnp.minimum(first, Vocab.size - size)
        entries = begin + jnp.arange(size)[None, :]
        # The last block has rows that the one before has too.
        is_new = entries >= first
        logits = jnp.where(is_new, logits, -jnp.inf)
        hit = (labels[:, None] == entries) & is_new
        of_targets = jnp.where(hit, logits, 0.0)
        picked = picked + jnp.sum(of_targets, axis=-1)
        own_lse = jax.nn.logsumexp(logits, axis=-1)
        return (jnp.logaddexp(lse, own_lse), picked), None

    start = jnp.full(labels.shape, -jnp.inf), jnp.zeros(labels.shape)
    (lse, picked), _ = lax_scan(block, start, blocks.numbers, remat=True)
    picked = jnp.where(labels < Vocab.size, picked, jnp.nan)
    losses = lse - picked + options.z_loss * lse**2
    return named_as(counted(losses), tokens)


def _matrices(
    logits: _Logits, Vocab: Axis, dtype: Any
) -> tuple[Matrices, tuple[str, ...]]:
    """The matrices of logits, and how einsum calls their axes."""
    matrices = []
    names = []
    for _, matrix in logits.products:
        # As it is stored: XLA would hold the transpose of a frozen head through the
        # whole step.
        matrices.append(matrix.array.astype(dtype))
        names.append("ve" if matrix.axes[0] == Vocab else "ev")
    return tuple(matrices), tuple(names)


class _Options(NamedTuple):
    z_loss: float
    size: int  # of a chunk
    names: tuple[str, ...]  # of the axes of each matrix
    scale: float  # of the logits
    softcap: float | None  # of the scaled logits


def _of_rows(
    options: _Options,
    each: tuple[Rows, Array],
    of_all: tuple[Matrices, Matrices | None],
) -> Any:
    """The losses and derivatives of rows, in chunks of which the last is padded."""
    rows, targets = each
    matrices, along = of_all
    count = len(targets)
    # Of no tokens a chunk of one, which does not run
    options = options._replace(size=min(options.size, count) or 1)
    # Rows of zeros with the target 0, whose losses are dropped again
    padded = multiple_above(count, options.size)
    rows = jax.tree.map(lambda x: pad_axis(x, 0, padded), rows)
    targets = pad_axis(targets, 0, padded)
    found = _losses(options, (rows, matrices), (targets, along))
    return jax.tree.map(lambda each: each[:count], found)


def _found(options: _Options, inputs: Any, constants: Any) -> tuple[Any, Array]:
    """The losses and their derivatives along a direction of the head, and the
    log-sum-exps.
    """
    rows, matrices = inputs
    targets, along = constants
    z_loss = options.z_loss
    size = options.size
    chunks = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (rows, targets))

    def of_head(matrices: Matrices) -> tuple[Array, Array]:
        def chunk(_: None, at: tuple[Rows, Array]) -> tuple[None, tuple[Array, Array]]:
            own, target = at
            logits = _logits(own, matrices, options)
            lse = jax.nn.logsumexp(logits, axis=-1)
            picked = jnp.take_along_axis(logits, target[:, None], axis=-1)
            picked = picked[:, 0]
            return None, (lse - picked + z_loss * lse**2, lse)

        _, (losses, lse) = lax.scan(chunk, None, chunks)
        return losses.reshape(-1), lse.reshape(-1)

    if along is None:
        losses, lse = of_head(matrices)
        return (losses, None), lse
    primals, tangents = jax.jvp(of_head, (matrices,), (along,))
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
    rows, matrices, targets, lse = residuals
    z_loss = options.z_loss
    size = options.size
    cotangent, _ = cotangents

    def chunk(gradients: tuple[Any, Any], i: Array) -> tuple[tuple[Any, Any], None]:
        of_rows, of_matrices = gradients
        own, target, own_lse, ct = jax.tree.map(
            lambda array: lax.dynamic_slice_in_dim(array, i * size, size),
            (rows, targets, lse, cotangent),
        )
        # Of the log-sum-exp: its own part of the loss, and that of the z-loss
        of_lse = ct * (1.0 + 2.0 * z_loss * own_lse)
        logits = _logits(own, matrices, options)
        softmax = jnp.exp(logits - own_lse[:, None])
        of_logits = softmax * of_lse[:, None]
        labels = jnp.arange(of_logits.shape[1])[None, :]
        hit = target[:, None] == labels
        of_logits = jnp.where(hit, of_logits - ct[:, None], of_logits)
        if options.softcap is not None:  # the derivative of tanh
            of_logits *= 1.0 - (logits / options.softcap) ** 2
        if options.scale != 1.0:
            of_logits *= options.scale
        of_logits = of_logits.astype(own[0].dtype)
        new_matrices = []
        new_rows = []
        for number, names in enumerate(options.names):
            of_matrix = of_matrices[number]
            if of_matrix is not None:
                of_matrix = of_matrix + jnp.einsum(
                    f"te,tv->{names}",
                    own[number],
                    of_logits,
                    preferred_element_type=jnp.float32,
                )
            new_matrices.append(of_matrix)
            new = jnp.einsum(f"tv,{names}->te", of_logits, matrices[number])
            new_rows.append(
                lax.dynamic_update_slice_in_dim(of_rows[number], new, i * size, 0)
            )
        return (tuple(new_rows), tuple(new_matrices)), None

    sums = []
    for matrix, is_wanted in zip(matrices, wanted[len(rows) :], strict=True):
        total = jax.ShapeDtypeStruct(matrix.shape, jnp.float32)
        sums.append(total if is_wanted else None)
    # Gradients of matrices are sums over chunks, unrounded; of rows each is written
    # once.
    start = zeros_after((rows, cotangent), (rows, tuple(sums)))
    chunks = jnp.arange(len(targets) // size, dtype=jnp.int32)
    (of_rows, of_matrices), _ = lax.scan(chunk, start, chunks)
    dtype = rows[0].dtype
    return of_rows, jax.tree.map(lambda total: total.astype(dtype), of_matrices)


_losses = perturbed_vjp(lambda *args: _found(*args)[0], _backward, _forward)


def _logits(
    rows: Rows, matrices: Matrices, options: _Options
) -> Float[Array, "token vocab"]:
    logits: Any = None
    for x, matrix, names in zip(rows, matrices, options.names, strict=True):
        product = jnp.einsum(
            f"te,{names}->tv", x, matrix, preferred_element_type=jnp.float32
        )
        logits = product if logits is None else logits + product
    if options.scale != 1.0:
        logits = logits * options.scale
    return soft_capped(logits, options.softcap)
