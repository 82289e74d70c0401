"""The decoder, dense or with experts: embedding, layers, a norm and a head."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

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

from models.decoder.attention import Attention, Cache, Caches
from models.decoder.config import DecoderConfig, LayerSpec, SparseDecoderConfig
from models.decoder.experts import AuxiliaryLoss, RouterStatistics, SparseExperts, means
from models.decoder.latent_attention import LatentAttention
from models.decoder.layers import Norm, SwiGlu, cast_floating, linear, rms_norm
from models.decoder.remat_presets import check_remat_names
from stacked_remat import (
    LayerStack,
    ScanCheckpointSpec,
    Stacked,
    StackedPattern,
    checkpoint_name,
    per_kind,
    tiled,
)
from stacked_remat.lora import LoraLinear
from stacked_remat.ops import RotaryTable, per_device, rotary_table
from stacked_remat.ops.per_device import align_varying_axes
from stacked_remat.training import POSITION_AXIS


class DecoderLayer(eqx.Module):
    """Attention, then an MLP or experts, each on the residual stream and added back to
    it.

    What they are given is normalised, or what they add, or both.

    Names for remat policies, beside those of the parts: `residual`, the stream between
    them, and `mlp_internals`, what an MLP makes of it before the activation.
    """

    input_norm: Norm | None
    attention: Attention | LatentAttention
    attention_output_norm: Norm | None
    post_attention_norm: Norm | None
    mlp: SparseExperts | SwiGlu
    mlp_output_norm: Norm | None

    @staticmethod
    def init(
        config: DecoderConfig, spec: LayerSpec, *, key: PRNGKeyArray
    ) -> "DecoderLayer":
        """Makes one layer from `key`."""
        attention_key, mlp_key = jax.random.split(key)
        if spec.sparse and isinstance(config, SparseDecoderConfig):
            mlp = SparseExperts.init(config, spec, key=mlp_key)
        else:
            mlp = SwiGlu.init(config, spec, config.Mlp, key=mlp_key)
        attention = Attention if spec.latent is None else LatentAttention
        before, after = spec.norms != "after", spec.norms != "before"
        return DecoderLayer(
            input_norm=rms_norm(config, config.Embed) if before else None,
            attention=attention.init(config, spec, key=attention_key),
            attention_output_norm=rms_norm(config, config.Embed) if after else None,
            post_attention_norm=rms_norm(config, config.Embed) if before else None,
            mlp=mlp,
            mlp_output_norm=rms_norm(config, config.Embed) if after else None,
        )

    def __call__(
        self, x: NamedArray, rotary: RotaryTable, documents: NamedArray | None
    ) -> tuple[NamedArray, RouterStatistics | None]:
        """Maps the residual stream `[..., position, Embed]` to itself, with the
        statistics of a router.
        """
        layer = self._cast(x.dtype)
        attended = layer.attention(
            _normed(layer.input_norm, x), rotary, documents=documents
        )
        attended = _normed(layer.attention_output_norm, attended)
        return layer._feed_forward(checkpoint_name(x + attended, "residual"), documents)

    def prefill(
        self, x: NamedArray, rotary: RotaryTable, lengths: NamedArray, slots: int
    ) -> tuple[NamedArray, Cache]:
        """Maps `[Batch, position, Embed]` to itself, with its cache for `slots`
        tokens.
        """
        layer = self._cast(x.dtype)
        attended, cache = layer.attention.prefill(
            _normed(layer.input_norm, x), rotary, lengths, slots
        )
        return (
            layer._feed_forward(x + _normed(layer.attention_output_norm, attended))[0],
            cache,
        )

    def decode(
        self,
        state: tuple[NamedArray, Caches],
        row_of_kind: tuple[str, NamedArray],
        rotary: RotaryTable,
        positions: NamedArray,
        stacks: Mapping[str, "DecoderLayer"],
    ) -> tuple[NamedArray, Caches]:
        """Maps one token a row, `[Batch, Embed]`, to itself.

        `row_of_kind` is the name of this layer's kind and its row in the stack of that,
        which `stacks` has.
        """
        (x, caches), (kind, row) = state, row_of_kind
        layers, layer = stacks[kind], self._cast(x.dtype)
        given = _normed(layer.input_norm, x)
        attended, cache = layer.attention.decode(
            given, rotary, positions, caches[kind], row
        )
        x, caches = (
            x + _normed(layer.attention_output_norm, attended),
            caches | {kind: cache},
        )
        if isinstance(layer.mlp, SparseExperts) and isinstance(
            layers.mlp, SparseExperts
        ):
            mixed = layer.mlp.decode(
                _normed(layer.post_attention_norm, x), layers.mlp, row
            )
            return x + _normed(layer.mlp_output_norm, mixed), caches
        return layer._feed_forward(x)[0], caches

    def _cast(self, dtype: DTypeLike) -> "DecoderLayer":
        """The layer in the dtype of activations, but for a router that has a dtype of
        its own.
        """
        layer, mlp = cast_floating(self, dtype), self.mlp
        if (
            not isinstance(mlp, SparseExperts)
            or mlp.config.experts.router_dtype == "compute"
        ):
            return layer
        router, bias = cast_floating(
            (mlp.router, mlp.bias), mlp.config.experts.router_dtype
        )
        return dataclasses.replace(
            layer, mlp=dataclasses.replace(layer.mlp, router=router, bias=bias)
        )

    def _feed_forward(
        self, x: NamedArray, documents: NamedArray | None = None
    ) -> tuple[NamedArray, RouterStatistics | None]:
        layer, tiles = self, self.attention.config.tiles
        half = DecoderLayer._feed_forward_half
        if tiles > 1 and POSITION_AXIS in [axis.name for axis in x.axes]:
            half = tiled(half, POSITION_AXIS, tiles=tiles, reduce="sum")
            # Each tile adds to the gradients of what it is given: not to those of all
            # layers.
            layer = jax.tree.map(
                lambda node: node.layer if isinstance(node, LayerStack) else node,
                self,
                is_leaf=lambda node: isinstance(node, LayerStack),
            )
        mixed, sums = half(layer, x, documents)
        mixed = _normed(layer.mlp_output_norm, mixed)
        Embed = self.attention.config.Embed
        return x + mixed, None if sums is None else means(sums, x, Embed, documents)

    def _feed_forward_half(
        self, x: NamedArray, documents: NamedArray | None
    ) -> tuple[NamedArray, RouterStatistics | None]:
        """What is added to the residual stream, and the sums of a router."""
        normalised = _normed(self.post_attention_norm, x)
        if isinstance(self.mlp, SwiGlu):
            products = checkpoint_name(self.mlp.products(normalised), "mlp_internals")
            return self.mlp(normalised, products=products).rearrange(x.axes), None
        return self.mlp(normalised, documents)


class Decoder(eqx.Module):
    """A causal language model on tokens `[..., position]`.

    Attributes:
        embedding: of the tokens.
        layers: a `Stacked` where all are of one kind, else a `StackedPattern` by
            `config.pattern`.
        norm: of the last layer's output.
        head: None where the embedding is used in its place.
    """

    embedding: hnn.Embedding
    layers: Stacked[Any] | StackedPattern[Any]
    norm: Norm
    head: hnn.Linear | None
    Vocab: Axis = eqx.field(static=True)
    config: DecoderConfig = eqx.field(static=True)

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

        def stack(name: str, spec: LayerSpec) -> Stacked:
            own = keys[np.array(config.layers_of(name))]
            make_layers = init_stack(
                config.Layers.resize(len(own)), DecoderLayer, remat=remat
            )
            return make_layers(config, spec, key=own)

        stacks = {name: stack(name, spec) for name, spec in config.kinds.items()}
        layers, *others = stacks.values()
        if others:
            layers = StackedPattern(stacks, config.pattern, config.Layers, remat)
        check_remat_names(config.remat_names, layers.remat)
        tied = config.tie_word_embeddings
        return Decoder(
            embedding=hnn.Embedding(weight, Vocab, config.Embed),
            layers=layers,
            norm=rms_norm(config, config.Embed),
            head=None if tied else linear(config, config.Embed, Vocab, key=head_key),
            Vocab=Vocab,
            config=config,
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
        if positions is None:
            positions = hax.arange(tokens.resolve_axis(POSITION_AXIS))
        x, statistics = self.layers.scan(
            self._embedded(tokens), self._rotary(positions), documents
        )
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
        """Zero, with the gradients of the biases of routers; see `RouterSpec.bias`."""
        sparse = [
            number for number, spec in enumerate(self.config.specs) if spec.sparse
        ]
        # [layers, Experts]
        sign = jnp.sign(load.array - jnp.mean(load.array, axis=-1, keepdims=True))
        term = jnp.zeros(())
        for name in (name for name, spec in self.config.kinds.items() if spec.sparse):
            rows = np.array(
                [sparse.index(number) for number in self.config.layers_of(name)]
            )
            term += jnp.sum(
                self.stacks[name].stacked.mlp.bias.array
                * jax.lax.stop_gradient(sign[rows])
            )
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
        (Batch, Pos), embedded = tokens.axes, self._embedded(tokens)
        lengths = (
            hax.full(Batch, Pos.size, dtype=jnp.int32) if lengths is None else lengths
        )
        prefill = functools.partial(DecoderLayer.prefill, slots=slots)
        scan = self.layers.scan_via(prefill, remat=False)
        x, found = scan(embedded, self._rotary(hax.arange(Pos)), lengths)
        caches: Any = found if len(self.stacks) > 1 else {self.config.pattern[0]: found}
        return self._normalised(x), caches

    def decode(
        self, tokens: NamedArray, positions: NamedArray, caches: Caches
    ) -> tuple[NamedArray, Caches]:
        """Reads one more token of each sequence, `[Batch]` at `positions`, whose
        earlier ones have been read.

        The caches are updated in place if they are donated to a jitted function.
        """
        # In a closure: of the arguments, those with the layers' axis are split, and
        # those on the host moved.
        decode = functools.partial(
            DecoderLayer.decode,
            stacks={kind: stack.stacked for kind, stack in self.stacks.items()},
        )
        fold = self.layers.fold_via(decode, remat=False)
        # The caches are a carry of the layers, so that each writes its token into the
        # buffers.
        state = self._embedded(tokens), caches
        rows = {
            kind: (kind, hax.arange(stack.Layers))
            for kind, stack in self.stacks.items()
        }
        own = per_kind(rows) if len(rows) > 1 else rows[self.config.pattern[0]]
        x, caches = fold(state, own, self._rotary(positions), positions)
        return self._normalised(x), caches

    def _rotary(self, positions: NamedArray) -> Any:
        """The rotary table of all layers, or that of each kind."""
        of_kinds = {
            name: (spec.rotary, spec.RotaryDim)
            for name, spec in self.config.kinds.items()
        }
        tables = {
            (rotary, Dim): rotary_table(
                positions, Dim, theta=rotary.theta, scaling=rotary.scaling
            )
            for rotary, Dim in dict.fromkeys(of_kinds.values())
        }
        if len(tables) == 1:
            return next(iter(tables.values()))
        return per_kind({name: tables[own] for name, own in of_kinds.items()})

    def _embedded(self, tokens: NamedArray) -> NamedArray:
        embedding, out = self.embedding, (*tokens.axes, self.config.Embed)
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            # JAX refuses to read a table at tokens that such an axis divides.
            def of_tokens(embedding: hnn.Embedding, own: NamedArray) -> NamedArray:
                return embedding(align_varying_axes("the embedding", own))

            x = per_device(of_tokens, embedding, tokens, over=tokens.axes, out=out)
        else:
            x = embedding(tokens)
        x, scale = x.astype(self.config.compute_dtype), self.config.embedding_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def _normalised(self, x: NamedArray) -> NamedArray:
        return cast_floating(self.norm, x.dtype)(x)

    def unembedding(self) -> NamedArray:
        """The head's weights, or the embedding's where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: NamedArray) -> NamedArray:
        """Maps hidden states `[..., Embed]` to float32 logits `[..., Vocab]`, with the
        head's adapter.
        """
        if isinstance(self.head, LoraLinear):
            return cast_floating(self.head, hidden.dtype)(hidden).astype(jnp.float32)
        weight = self.unembedding().astype(hidden.dtype)
        return hax.dot(hidden, weight, axis=self.config.Embed).astype(jnp.float32)


def _normed(norm: Norm | None, x: NamedArray) -> NamedArray:
    return x if norm is None else norm(x)


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


def router_losses(
    statistics: RouterStatistics, config: SparseDecoderConfig
) -> AuxiliaryLoss:
    """The weighted losses of the routers; see `ExpertsConfig.load_balance_loss`."""

    def balance(load: NamedArray, importance: NamedArray) -> Array:
        """That of Switch Transformer (Fedus et al. 2021, eq. 4), for the choice of
        several experts.

        `experts_per_token` for even routing, and at most `num_experts`; pooled as in
        transformers.
        """
        return hax.dot(load, importance, axis=config.Experts).array * float(
            config.Experts.size
        )

    per_layer = {
        "load_balance": balance(statistics.load, statistics.importance),
        "router_z_loss": statistics.z_loss.array,
    }
    metrics = {name: jnp.mean(values) for name, values in per_layer.items()}
    if config.experts.load_balance_loss == "pooled":
        pooled = (
            hax.mean(one, "layers") for one in (statistics.load, statistics.importance)
        )
        metrics["load_balance"] = balance(*pooled)
    loss = config.experts.load_balance_weight_used * metrics["load_balance"]
    loss += config.experts.z_loss_weight * metrics["router_z_loss"]
    metrics |= {f"{name}_per_layer": values for name, values in per_layer.items()}
    # 1 for even routing, num_experts / experts_per_token where all tokens choose the
    # same experts.
    busiest = (
        hax.max(statistics.load, config.Experts).array
        / config.experts.experts_per_token
    )
    metrics["busiest_expert_per_layer"] = busiest * config.experts.num_experts
    return AuxiliaryLoss(loss, jax.lax.stop_gradient(metrics), statistics)
