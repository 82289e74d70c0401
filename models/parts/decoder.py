"""The decoder, dense or with experts: embedding, layers, a norm and a head."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from jax.sharding import AxisType
from jaxtyping import Array, DTypeLike, PRNGKeyArray

from models.parts.cache import Caches, Kept, LayerCache
from models.parts.config import DecoderConfig, LayerKind, SparseDecoderConfig
from models.parts.experts import reading_in_stack
from models.parts.linear import cast_floating, linear
from models.parts.mixer import Mixer
from models.parts.multi_token_prediction import DEPTHS_AXIS, MtpLayer, with_further
from models.parts.norms import Norm
from models.parts.remat_presets import check_remat_names
from models.parts.rotary import RotaryEmbedding
from models.parts.router_statistics import (
    AuxiliaryLoss,
    RouterStatistics,
    router_losses,
)
from models.parts.tokens import Tokens, has_positions
from stacked_remat import (
    ScanCheckpointSpec,
    Stacked,
    StackedPattern,
    checkpoint_name,
    per_kind,
    streaming,
)
from stacked_remat.ops import (
    apply_linear,
    chunked_cross_entropy,
    per_device,
    soft_capped,
)
from stacked_remat.ops.per_device import align_varying_axes
from stacked_remat.training import POSITION_AXIS, gathered

LayerOutput: TypeAlias = tuple[NamedArray, LayerCache | None, RouterStatistics | None]
"""The residual stream, the layer's cache if it was given one, and the statistics of its
router if it has one.
"""


class Layer(eqx.Module):
    """What a decoder asks of its layers.

    In `forward` a layer's arrays have the dtype of activations. `empty_cache` and
    `rotary` are asked of a stack of layers, whose arrays have the layers' axis in
    front, and come from static fields.
    """

    @abc.abstractmethod
    def forward(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> LayerOutput:
        """Maps the residual stream `[..., Embed]` to itself.

        The same in training, where there is no cache, in prefill and in decoding.
        """

    def __call__(
        self, x: NamedArray, tokens: Tokens
    ) -> tuple[NamedArray, RouterStatistics | None]:
        """`forward` as a step of a scan over the layers in training."""
        # Parameters stay in their own dtype outside: one layer is cast at a time, and
        # what devices send each other has the smaller type. Experts are gathered as
        # they run: two layers of them would be most of a step's memory.
        layer = gathered(cast_floating(self, x.dtype), leave=["experts"])
        x, _, statistics = layer.forward(x, tokens)
        return x, statistics

    @abc.abstractmethod
    def empty_cache(self, Batch: Axis, slots: int, dtype: DTypeLike) -> Kept:
        """What the layer keeps of sequences of so many tokens, before it has read
        some.
        """

    @property
    @abc.abstractmethod
    def rotary(self) -> RotaryEmbedding | None:
        """The rotary embedding that it uses; None for none."""


class DecoderLayer(Layer):
    """A layer with one mixer among its fields; a subclass has the residual wiring of an
    architecture, or of several.

    Of a hybrid decoder's layer the fields for other mixers are None.
    """

    @property
    def mixer(self) -> Mixer:
        """The field that is a mixer."""
        (mixer,) = [part for part in vars(self).values() if isinstance(part, Mixer)]
        return mixer

    def empty_cache(self, Batch: Axis, slots: int, dtype: DTypeLike) -> Kept:
        """That of its mixer."""
        return self.mixer.empty_cache(Batch, slots, dtype)

    @property
    def rotary(self) -> RotaryEmbedding | None:
        """That of its mixer."""
        return self.mixer.rotary


def residual(x: NamedArray) -> NamedArray:
    """The residual stream between the halves of a layer, under its name for remat
    policies.
    """
    return checkpoint_name(x, "residual")


class Decoder(eqx.Module):
    """A causal language model on tokens `[..., position]`.

    Attributes:
        embedding: of the tokens.
        layers: a `Stacked` where all are of one kind, else a `StackedPattern` by
            `config.pattern`.
        norm: of the last layer's output.
        head: None where the embedding is used in its place.
        rotary: the rotary embedding of each kind of layers.
        mtp: the layers that predict further tokens; None for none.
    """

    embedding: hnn.Embedding
    layers: Stacked[Any] | StackedPattern[Any]
    norm: Norm
    head: hnn.Linear | None
    Vocab: Axis = eqx.field(static=True)
    config: DecoderConfig = eqx.field(static=True)
    # Not read from the layers: in a fused update they only scan and fold.
    rotary: tuple[RotaryEmbedding | None, ...] = eqx.field(static=True)
    mtp: Stacked[Any] | None = None

    @staticmethod
    def init(
        config: DecoderConfig,
        Vocab: Axis,
        *,
        remat: ScanCheckpointSpec = True,
        key: PRNGKeyArray,
        init_stack: Callable[..., Any] = Stacked.init,
    ) -> "Decoder":
        """Makes a decoder in float32; `remat` is the policy of its layers.

        `init_stack` is `Stacked.init`, or makes the layers of a kind elsewhere, such as
        `stacked_remat.streaming.init`.
        """
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        weight = (
            hax.random.normal(embedding_key, (Vocab, config.Embed))
            * config.initializer_range
        )
        keys = jax.random.split(layers_key, config.num_layers)

        def stack(name: str, kind: LayerKind) -> Stacked:
            # Keys go by a layer's number, not by its row among layers of its kind.
            own = keys[np.array(config.layers_of(name))]
            make_layers = init_stack(
                config.Layers.resize(len(own)), config.init_layer, remat=remat
            )
            return make_layers(kind, key=own)

        stacks = {name: stack(name, kind) for name, kind in config.kinds.items()}
        layers, *others = stacks.values()
        if others:
            layers = StackedPattern(stacks, config.pattern, config.Layers, remat)
        check_remat_names(config.remat_names, layers.remat)
        tied = config.tie_word_embeddings
        further = None
        if depths := config.further_tokens.trained_depths:
            make_depths = init_stack(
                Axis(DEPTHS_AXIS, depths),
                MtpLayer.init,
                remat=layers.remat.without_places(),
            )
            # Of another key, so that the rest is the same without them
            own = jax.random.split(jax.random.fold_in(layers_key, 1), depths)
            further = make_depths(config, key=own)
        return Decoder(
            embedding=hnn.Embedding(weight, Vocab, config.Embed),
            layers=layers,
            norm=config.init_norm(),
            head=None if tied else linear(config, config.Embed, Vocab, key=head_key),
            Vocab=Vocab,
            config=config,
            rotary=tuple(stack.stacked.rotary for stack in stacks.values()),
            mtp=further,
        )

    def layer_states(
        self,
        tokens: NamedArray,
        *,
        documents: NamedArray | None = None,
        positions: NamedArray | None = None,
    ) -> tuple[NamedArray, RouterStatistics | None]:
        """As `hidden_states`, with router statistics `[layers, Experts]` of the layers
        that have experts.
        """
        positions = _positions(tokens) if positions is None else positions
        return self._through_layers(self._embedded(tokens), documents, positions)

    def _through_layers(
        self, x: NamedArray, documents: NamedArray | None, positions: NamedArray
    ) -> tuple[NamedArray, RouterStatistics | None]:
        known = self._known(positions, documents=documents)
        x, statistics = self.layers.scan(x, known)
        if isinstance(statistics, dict):  # of several kinds of layers
            statistics = _in_order(statistics, self.config)
        return self._normalised(x), statistics

    def hidden_states(
        self,
        tokens: NamedArray,
        *,
        documents: NamedArray | None = None,
        positions: NamedArray | None = None,
    ) -> tuple[NamedArray, AuxiliaryLoss]:
        """Maps tokens `[..., position]` to hidden states `[..., position, Embed]`, with
        auxiliary losses.

        Args:
            documents: integers like `tokens`; a position sees only positions with its
                own. 0 is padding, which auxiliary losses leave out. None for one
                document and no padding.
            positions: integers like `tokens`, the position of each in its document;
                None to count from the start of the sequence.
        """
        hidden, statistics = self.layer_states(
            tokens, documents=documents, positions=positions
        )
        return hidden, self.auxiliary(statistics)

    def further_states(
        self,
        tokens: NamedArray,
        *,
        documents: NamedArray | None = None,
        positions: NamedArray | None = None,
    ) -> tuple[NamedArray, NamedArray | None, AuxiliaryLoss]:
        """As `hidden_states`, and in between the hidden states of the layers that
        predict further tokens, `[depths, ..., position, Embed]`; None without such
        layers.

        Memory: of each depth, what is kept of a layer and its hidden states.
        """
        positions = _positions(tokens) if positions is None else positions
        embedded = self._embedded(tokens)
        hidden, statistics = self._through_layers(embedded, documents, positions)
        further = None
        if self.mtp is not None:
            before = hidden, embedded
            _, found = self.mtp.scan(before, positions, documents)
            further, of_further = found
            statistics = with_further(statistics, of_further)
        return hidden, further, self.auxiliary(statistics)

    def auxiliary(self, statistics: RouterStatistics | None) -> AuxiliaryLoss:
        """The losses of the routers from their statistics, none where no layer has
        experts.
        """
        if statistics is None or not isinstance(self.config, SparseDecoderConfig):
            return AuxiliaryLoss(jnp.zeros(()), {})
        found = router_losses(statistics, self.config)
        term = self._bias_term(statistics.load) if self.config.balances_by_bias else 0.0
        return dataclasses.replace(found, loss=found.loss + term)

    def _bias_term(self, load: NamedArray) -> Array:
        """Zero, with the gradients of the biases of routers; see `Routing.bias`."""
        kinds = enumerate(self.config.layer_kinds)
        sparse = [number for number, kind in kinds if kind.sparse]
        # [layers, Experts]
        # 1 where more tokens than the mean chose an expert: descent lowers its bias.
        sign = jnp.sign(load.array - jnp.mean(load.array, axis=-1, keepdims=True))
        routers = []
        for name in (name for name, kind in self.config.kinds.items() if kind.sparse):
            rows = [sparse.index(number) for number in self.config.layers_of(name)]
            routers.append((self.stacks[name].stacked.mlp, rows))
        if len(load.array) > len(sparse) and self.mtp is not None:
            rows = range(len(sparse), len(load.array))
            routers.append((self.mtp.stacked.layer.mlp, rows))
        term = jnp.zeros(())
        for router, rows in routers:
            direction = jax.lax.stop_gradient(sign[np.array(rows)])
            term += jnp.sum(router.bias.value.array * direction)
        # The value is zero, so that the reported loss is that of the model.
        return term - jax.lax.stop_gradient(term)

    @property
    def stacks(self) -> Mapping[str, Stacked[Any]]:
        """The layers of each kind, by its name."""
        layers = self.layers
        return (
            layers.stacks
            if isinstance(layers, StackedPattern)
            else {self.config.pattern[0]: layers}
        )

    def prefill(
        self, tokens: NamedArray, slots: int, lengths: NamedArray | None = None
    ) -> tuple[NamedArray, Caches]:
        """Reads the beginnings of sequences at once, and makes the caches for `slots`
        tokens of each.

        Args:
            tokens: integers `[Batch, position]`. Rows may differ in length: pad the
                shorter ones at their ends with any tokens, which no earlier position
                sees and `decode` overwrites.
            lengths: integers `[Batch]`, at least 1: of the rows without padding; None
                where there is none.

        Memory: of a layer with a window, the cache has the last positions alone.
        """
        Batch, Pos = tokens.axes
        if lengths is None:
            # Always known to layers: a window's slots, or a state, leave padding out.
            lengths = hax.full(Batch, Pos.size, dtype=jnp.int32)
        known = self._known(hax.arange(Pos), lengths=lengths)
        return self._read(tokens, known, self.empty_caches(Batch, slots))

    def decode(
        self, tokens: NamedArray, positions: NamedArray, caches: Caches
    ) -> tuple[NamedArray, Caches]:
        """Reads one more token of each sequence, `[Batch]` at `positions`, whose
        earlier ones have been read.

        The caches are updated in place if they are donated to a jitted function.
        """
        known = Tokens(self._rotary(positions), positions=positions)
        return self._read(tokens, known, caches)

    def _read(
        self, tokens: NamedArray, known: Tokens, caches: Caches
    ) -> tuple[NamedArray, Caches]:
        """Reads tokens, of which the layers keep what they need in the caches."""

        # Of all layers in a closure: of the arguments, those with the layers' axis are
        # split, and those on the host moved.
        def read(
            layer: Layer,
            state: tuple[NamedArray, Caches],
            row_of_kind: tuple[str, NamedArray],
            known: Tokens,
        ) -> tuple[NamedArray, Caches]:
            x, caches = state
            kind, row = row_of_kind
            layer = cast_floating(layer, x.dtype)
            # A prompt chooses most experts, and reads its layer's whole.
            if not has_positions(x):
                stack = self.stacks[kind]
                layer = reading_in_stack(layer, stack.stacked, row, stack.Layers)
            # The statistics of routers are of training alone.
            x, cache, _ = layer.forward(x, known, LayerCache(caches[kind], row))
            assert cache is not None
            return x, caches | {kind: cache.stacked}

        rows = {
            kind: (kind, hax.arange(stack.Layers))
            for kind, stack in self.stacks.items()
        }
        own = per_kind(rows) if len(rows) > 1 else rows[self.config.pattern[0]]
        # The caches are a carry of the layers, so that each writes into the buffers.
        state = self._embedded(tokens), caches
        x, caches = self.layers.fold_via(read, remat=False)(state, own, known)
        return self._normalised(x), caches

    def empty_caches(self, Batch: Axis, slots: int) -> Caches:
        """The caches of sequences of so many tokens, before any is read."""

        def of_layers(stack: Stacked[Any]) -> Any:
            one = stack.stacked.empty_cache(Batch, slots, self.config.compute_dtype)
            return jax.tree.map(
                lambda kept: kept.broadcast_axis(stack.Layers),
                one,
                is_leaf=is_named_array,
            )

        return {kind: of_layers(stack) for kind, stack in self.stacks.items()}

    def cache_bytes(self, rows: int, slots: int) -> int:
        """The size of the caches of so many sequences of so many tokens; shapes of the
        weights are enough.
        """
        Batch = Axis("batch", rows)
        caches = eqx.filter_eval_shape(self.empty_caches, Batch, slots)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))

    def _known(self, positions: NamedArray, **known: NamedArray | None) -> Tokens:
        """What layers know of whole sequences; of positions only if they ask for them,
        since tiles would keep what none reads.
        """
        own = positions if self.config.layers_know_positions else None
        return Tokens(self._rotary(positions), positions=own, **known)

    def _rotary(self, positions: NamedArray) -> Any:
        """The rotary table of all layers, or that of each kind."""
        tables = {
            # One table for all kinds that share it
            rotary: None if rotary is None else rotary.table(positions)
            for rotary in dict.fromkeys(self.rotary)
        }
        if len(tables) == 1:
            return tables[self.rotary[0]]
        of_kinds = zip(self.config.kinds, self.rotary, strict=True)
        return per_kind({name: tables[rotary] for name, rotary in of_kinds})

    def _embedded(self, tokens: NamedArray) -> NamedArray:
        embedding = self.embedding
        out = (*tokens.axes, self.config.Embed)
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            # JAX refuses to read a table at tokens that such an axis divides.
            def of_tokens(embedding: hnn.Embedding, own: NamedArray) -> NamedArray:
                return embedding(align_varying_axes("the embedding", own))

            x = per_device(of_tokens, embedding, tokens, over=tokens.axes, out=out)
        else:
            x = embedding(tokens)
        # The scale is rounded to this dtype first, as transformers does.
        x = x.astype(self.config.compute_dtype)
        scale = self.config.embedding_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def _normalised(self, x: NamedArray) -> NamedArray:
        # The norm computes in float32 from weights rounded as in layers.
        return cast_floating(self.norm, x.dtype)(x)

    def logits(self, hidden: NamedArray) -> NamedArray:
        """Maps hidden states `[..., Embed]` to float32 logits `[..., Vocab]`."""
        head = streaming.in_memory(self.unembedding(), hidden.dtype)
        head = cast_floating(head, hidden.dtype)
        # As `token_losses` does, in float32
        logits = apply_linear(head, hidden).astype(jnp.float32)
        if self.config.logit_factor != 1.0:
            logits = logits * self.config.logit_factor
        return soft_capped(logits, self.config.logit_softcap)

    def token_losses(
        self,
        hidden: NamedArray,
        targets: NamedArray,
        *,
        weights: NamedArray,
        z_loss: float = 0.0,
    ) -> NamedArray:
        """The cross entropy of `logits`, of which few exist at once; arguments are
        those of `stacked_remat.ops.chunked_cross_entropy`.
        """
        return chunked_cross_entropy(
            hidden,
            self.unembedding(),
            targets,
            self.config.Embed,
            self.Vocab,
            weights=weights,
            z_loss=z_loss,
            scale=self.config.logit_factor,
            softcap=self.config.logit_softcap,
        )

    def unembedding(self) -> hnn.Linear | NamedArray:
        """What maps hidden states to logits: the head, or the embedding's weights where
        they are tied.
        """
        return self.embedding.weight if self.head is None else self.head


def _positions(tokens: NamedArray) -> NamedArray:
    """The positions of tokens in sequences that are one document."""
    return hax.arange(tokens.resolve_axis(POSITION_AXIS))


def _in_order(
    of_kinds: dict[str, RouterStatistics | None], config: DecoderConfig
) -> RouterStatistics | None:
    """The statistics of each kind of layers as one, in the order of the layers that
    have some.
    """
    found = {
        name: statistics
        for name, statistics in of_kinds.items()
        if statistics is not None
    }
    if not found:
        return None
    numbers = np.concatenate([config.layers_of(name) for name in found])
    Layers = config.Layers.resize(len(numbers))
    order = hax.named(np.argsort(numbers), Layers)

    def join(*some: NamedArray) -> NamedArray:
        return hax.concatenate(Layers, some).take(Layers, order)

    return jax.tree.map(join, *found.values(), is_leaf=is_named_array)
