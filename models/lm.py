"""The interface of language models: their registry of configs, hidden states, logits, and the loss.

A model maps tokens to hidden states, which is the expensive part, and has the matrix from these to logits.
The loss applies that matrix itself, so that it decides how many logits exist at once.
"""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import draccus
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Float, PRNGKeyArray

from stacked_remat import ScanCheckpointPolicy, ScanCheckpointSpec, Stacked
from stacked_remat.ops import chunked_cross_entropy
from stacked_remat.training import NO_PRESETS, POSITION_AXIS, ConfigError, Metrics, RematPresets, TokenBatch


class AuxiliaryLoss(eqx.Module):
    """The terms that layers add to the loss, and their metrics.

    Attributes:
        loss: a scalar, already weighted, to be added to the cross entropy.
        metrics: named scalars or arrays for the log; they carry no gradient.
        statistics: the means over tokens of which both are functions, for `LanguageModel.auxiliary`.
    """

    loss: Float[Array, ""]
    metrics: Metrics
    statistics: Any = None


class LanguageModel(eqx.Module):
    """A causal language model over the named axis `Vocab`."""

    Vocab: eqx.AbstractVar[Axis]

    @abc.abstractmethod
    def hidden_states(
        self,
        tokens: NamedArray,
        *,
        documents: NamedArray | None = None,
        positions: NamedArray | None = None,
    ) -> tuple[NamedArray, AuxiliaryLoss]:
        """Maps tokens `[..., Pos]` to final hidden states `[..., Pos, Embed]` and auxiliary losses.

        Args:
            tokens: integers.
            documents: integers like `tokens`; a position sees only positions with its own. 0 is padding,
                which auxiliary losses leave out. None for one document and no padding.
            positions: integers like `tokens`, the position of each in its document; None to count from the
                start of the sequence.
        """

    def auxiliary(self, statistics: Any) -> AuxiliaryLoss:
        """The auxiliary losses of tokens of which these are the means, as `hidden_states` returns them."""
        return AuxiliaryLoss(jnp.zeros(()), {})

    @abc.abstractmethod
    def prefill(self, tokens: NamedArray, slots: int) -> tuple[NamedArray, Any]:
        """Reads the beginnings of sequences at once, and makes the cache that later tokens need.

        Args:
            tokens: integers `[Batch, position]`. Rows may differ in length: pad the shorter ones at their
                ends with any tokens, which no earlier position sees and `decode` overwrites.
            slots: how many tokens the longest sequence will have in the end.

        Returns:
            Hidden states `[Batch, position, Embed]`, as `hidden_states` gives them, and the cache: a tree of
            arrays of fixed shapes.
        """

    @abc.abstractmethod
    def decode(self, tokens: NamedArray, positions: NamedArray, cache: Any) -> tuple[NamedArray, Any]:
        """Reads one more token of each sequence.

        Args:
            tokens: integers `[Batch]`.
            positions: integers `[Batch]`, the position of each in its sequence, below the cache's slots;
                earlier positions have been read.
            cache: of `prefill` or an earlier `decode`.

        Returns:
            Hidden states `[Batch, Embed]`, as `hidden_states` of the whole sequence has them at `positions`,
            and the cache with these tokens. Donated to a jitted function, it is updated in place.
        """

    @abc.abstractmethod
    def unembedding(self) -> NamedArray:
        """The matrix `[Embed, Vocab]`, its axes in any order, that maps hidden states to logits."""

    def logits(self, hidden: NamedArray) -> NamedArray:
        """Maps hidden states `[..., Embed]` to float32 logits `[..., Vocab]`."""
        weight = self.unembedding()
        (Embed,) = (axis for axis in weight.axes if axis != self.Vocab)
        return hax.dot(hidden, weight.astype(hidden.dtype), axis=Embed).astype(jnp.float32)


class LmConfig(draccus.ChoiceRegistry):
    """Registry of model configs: `model: {type: NAME, ...}` in YAML picks the dataclass of that name.

    A config is only data; the module that defines the model registers its constructor with `build_model`.

    Attributes:
        num_layers: how many layers it has.
        compute_dtype: dtype of activations.
    """

    num_layers: int
    compute_dtype: Literal["float32", "bfloat16"]

    @property
    def remat_names(self) -> tuple[str, ...] | None:
        """The names that `checkpoint_name` gives to values inside its layers; None if unknown."""
        return None

    @property
    def remat_presets(self) -> RematPresets:
        """Named policies for the `remat` config entry."""
        return NO_PRESETS

    def num_weights(self, vocab_size: int) -> int:
        """How many numbers the model has, computed without making it."""
        make = functools.partial(build_model, self, Axis("vocab", vocab_size), remat=True)
        shapes = eqx.filter_eval_shape(lambda key: make(key=key), jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    def cache_bytes(self, rows: int, slots: int) -> int:
        """The size of the cache that `LanguageModel.prefill` makes of so many sequences."""
        raise NotImplementedError(f"{type(self).__name__} has no cache_bytes.")


def check_remat_names(config: LmConfig, policy: ScanCheckpointPolicy | None, key: str = "remat") -> None:
    """Refuses a policy that saves or offloads names that the model's layers lack, which would do nothing.

    Raises:
        ConfigError: lists the names.
    """
    if policy is None or config.remat_names is None:
        return
    if isinstance(policy.first_policy, ScanCheckpointPolicy):
        check_remat_names(config, policy.first_policy, f"{key}.first_policy")
    internals = policy.save_block_internals
    saved = {
        "save_block_internals": internals if isinstance(internals, tuple) else (),
        "offload_block_internals": policy.offload_block_internals,
    }
    for field, names in saved.items():
        for name in names:
            if name not in config.remat_names:
                raise ConfigError(
                    f"{key}.{field} has {name!r}, which names nothing in a layer of this model. "
                    f"Valid: {', '.join(config.remat_names) or 'none (with model.tiles nothing has a name)'}."
                )


def check_remat_levels(policy: ScanCheckpointPolicy, num_layers: int) -> None:
    """Refuses levels that can't cut the layers.

    Args:
        policy: of the layers.
        num_layers: how many there are.

    Raises:
        ConfigError: the outer levels make more parts than there are layers, or all levels hold too few.
    """
    if not isinstance(policy.nested, tuple):
        return
    length = num_layers - policy.first_layers
    parts = math.prod(policy.nested[:-1])
    if 0 < length < parts:
        raise ConfigError(
            f"remat.nested = {list(policy.nested)} cuts the layers into {parts} parts before its last level, "
            f"and this model has {length} layers to cut. Give smaller numbers, fewer of them, or nested: "
            f"true."
        )
    try:
        if length > 1:
            policy.schedule(length)
    except ValueError as error:
        raise ConfigError(f"remat.nested = {list(policy.nested)}: {error}.") from error


@functools.singledispatch
def build_model(
    config: LmConfig,
    Vocab: Axis,
    *,
    remat: ScanCheckpointSpec,
    key: PRNGKeyArray,
    init_stack: Callable[..., Any] = Stacked.init,
) -> LanguageModel:
    """Makes the model that `config` describes, with float32 parameters, its layers under the policy `remat`.

    `init_stack(Layers, Block, remat=remat)` makes what builds layers of one kind, as `Stacked.init` does.

    Raises:
        TypeError: no builder is registered for this type of config.
    """
    raise TypeError(
        f"No builder is registered for {type(config).__name__}. Import the package that defines the model, "
        f"and register its builder there with `@build_model.register`."
    )


def next_token_loss(
    model: LanguageModel, batch: TokenBatch, z_loss: float = 0.0
) -> tuple[Float[Array, ""], Metrics]:
    """Mean cross entropy of the next token, in nats, plus the model's auxiliary losses.

    Args:
        model: any causal language model.
        batch: all `[Batch, Pos]`; a target of weight 0 does not count, and documents do not see each other.
        z_loss: as `chunked_cross_entropy` takes it; the cross entropy includes it.

    Returns:
        The scalar to minimise, and metrics with the cross entropy alone under `loss`.

    Cost: that of the model, and of `stacked_remat.ops.chunked_cross_entropy`.
    """
    losses, auxiliary = _token_losses(model, batch, z_loss)
    cross_entropy = hax.sum(losses).scalar() / _total_weight(batch)
    return cross_entropy + auxiliary.loss, {"loss": cross_entropy, **auxiliary.metrics}


def example_losses(
    model: LanguageModel, batch: TokenBatch, z_loss: float = 0.0
) -> tuple[tuple[NamedArray, Any], Metrics]:
    """`next_token_loss`, sequence by sequence.

    Returns:
        Each sequence's part of the batch's mean cross entropy, `[Batch]` in nats, and the sums for
        `auxiliary_of_sums`; and the metrics. The parts add up to the metric `loss`, the mean over the targets
        of the batch.
    """
    losses, auxiliary = _token_losses(model, batch, z_loss)
    parts = hax.sum(losses, POSITION_AXIS) / _total_weight(batch)
    real = hax.ones(batch.tokens.axes)
    if batch.documents is not None:
        real = hax.where(batch.documents != 0, real, 0.0)
    count = hax.sum(real).scalar()
    sums = jax.tree.map(lambda mean: mean * count, auxiliary.statistics), count
    return (parts, sums), {"loss": hax.sum(parts).scalar(), **auxiliary.metrics}


def auxiliary_of_sums(model: LanguageModel, sums: Any) -> tuple[Float[Array, ""], Metrics]:
    """The auxiliary losses of sequences, which they have together, and their metrics.

    Args:
        model: any causal language model.
        sums: of `example_losses`, added up over the sequences.
    """
    of_statistics, count = sums
    means = jax.tree.map(lambda one: one / jnp.maximum(count, 1.0), of_statistics)
    found = model.auxiliary(means)
    return found.loss, found.metrics


def _token_losses(model: LanguageModel, batch: TokenBatch, z_loss: float) -> tuple[NamedArray, AuxiliaryLoss]:
    """The weighted cross entropy of every token, `[Batch, Pos]`, and the model's auxiliary losses."""
    hidden, auxiliary = model.hidden_states(
        batch.tokens, documents=batch.documents, positions=batch.positions
    )
    head = model.unembedding()
    (Embed,) = (axis for axis in head.axes if axis != model.Vocab)
    options = {"weights": batch.weights, "z_loss": z_loss}
    losses = chunked_cross_entropy(hidden, head, batch.targets, Embed, model.Vocab, **options)
    return losses, auxiliary


def _total_weight(batch: TokenBatch) -> Array:
    return jnp.maximum(hax.sum(batch.weights).scalar(), 1.0)
