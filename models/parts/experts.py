"""The sparse feed-forward half of a layer: a top-k router and gated experts.

The experts are a stack over the named axis `Experts`. Each is applied only to the
tokens that chose it, by `stacked_remat.ops.grouped_experts`: exact for any routing,
without a capacity.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray

from models.parts.config import DecoderConfig, LayerKind, SparseDecoderConfig
from models.parts.linear import Float32Part, cast_floating, linear
from models.parts.mlp import FeedForward, GatedMlp, Gating, silu_gated
from models.parts.router_statistics import RouterStatistics
from models.parts.sections import ExpertsConfig, Routing
from stacked_remat import (
    LayerStack,
    Stacked,
    checkpoint_name,
    internals_are_saved,
    streaming,
    unsliced,
)
from stacked_remat.lora import has_quantized
from stacked_remat.ops import (
    ExpertLinear,
    apply_linear,
    grouped_experts,
    mesh_axes,
    per_device,
    unmapped,
)
from stacked_remat.training import gathered

T = TypeVar("T")


SOFTMAX = Routing()
"""The best of the softmax of the router's logits."""


class RouterBias(Float32Part):
    """What is added to the scores by which experts are chosen, and not to their gates.

    It may be much larger than the differences between scores, and is changed by small
    steps: in bfloat16 other experts would be chosen.

    Attributes:
        value: `[Experts]`.
    """

    value: NamedArray


class SparseExperts(FeedForward):
    """Routes every token to `experts_per_token` experts and sums their weighted
    outputs.

    Names for remat policies: `router_logits`, `router_probs`, `router_choices`
    (integers), `router_gates` (before they are normalised), `expert_internals` (what
    experts make of their tokens before the activation, where they are not divided over
    devices) and `expert_output`. Saving the last has no use: the experts' backward pass
    starts from the tokens and never reads it.
    """

    router: hnn.Linear
    settings: ExpertsConfig = eqx.field(static=True)
    routing: Routing = eqx.field(static=True)
    Embed: Axis = eqx.field(static=True)
    Experts: Axis = eqx.field(static=True)
    ExpertDim: Axis = eqx.field(static=True)
    tiles: int = eqx.field(static=True)
    experts: Stacked = unsliced()
    bias: RouterBias | None = None
    # An MLP that all tokens are routed to besides
    shared: GatedMlp | None = None
    # Whose sigmoid the output of that MLP is multiplied by
    shared_gate: hnn.Linear | None = None
    # This layer's experts in the stack of all layers, for `reads_in_stack`
    in_stack: LayerStack | None = None

    @staticmethod
    def init(
        config: SparseDecoderConfig,
        *,
        gating: Gating = silu_gated,
        mlp_bias: bool = False,
        key: PRNGKeyArray,
    ) -> "SparseExperts":
        """Makes the router and all experts from `key`.

        Args:
            gating: as of `GatedMlp`.
            mlp_bias: whether router and experts have biases.
        """
        router_key, experts_key = jax.random.split(key)
        options: Any = {"gating": gating, "bias": mlp_bias}
        shared = gate = None
        if config.shared_dim:
            Shared = Axis("shared_dim", config.shared_dim)
            shared = GatedMlp.init(
                config, Shared, **options, key=jax.random.fold_in(key, 2)
            )
        if config.shared_gate:
            gate = linear(config, config.Embed, (), key=jax.random.fold_in(key, 3))
        # The policy of the stack of layers decides whether an expert's intermediates
        # are kept.
        make_experts = Stacked.init(
            config.Experts, functools.partial(GatedMlp.init, **options), remat=False
        )
        keys = jax.random.split(experts_key, config.Experts.size)
        bias = None
        if config.routing.bias != "none":
            bias = RouterBias(hax.zeros(config.Experts))
        return SparseExperts(
            router=linear(
                config, config.Embed, config.Experts, bias=mlp_bias, key=router_key
            ),
            experts=make_experts(config, config.ExpertDim, key=keys),
            bias=bias,
            shared=shared,
            shared_gate=gate,
            settings=config.experts,
            routing=config.routing,
            Embed=config.Embed,
            Experts=config.Experts,
            ExpertDim=config.ExpertDim,
            tiles=config.tiles,
        )

    def cast_to(self, dtype: DTypeLike) -> "SparseExperts":
        """In this dtype but for the router, if that has a dtype of its own."""
        # Rounding may decide between experts, so a router may be wider.
        of_router: Any = self.settings.router_dtype
        if of_router == "compute":
            of_router = dtype
        return dataclasses.replace(
            self,
            router=cast_floating(self.router, of_router),
            bias=None if self.bias is None else self.bias.cast_to(dtype),
            experts=cast_floating(self.experts, dtype),
            shared=cast_floating(self.shared, dtype),
            shared_gate=cast_floating(self.shared_gate, dtype),
        )

    def route(
        self, x: NamedArray, documents: NamedArray | None = None
    ) -> tuple[NamedArray, NamedArray, RouterStatistics]:
        """Chooses experts for every token `[..., Embed]`.

        Gives their numbers and gates in float32, both `[..., choice]`, and the sums
        over tokens of which the statistics are means; without padding, where
        `documents` is 0.
        """
        # Tokens and experts may be divided over the same devices, and router logits are
        # of both.
        with unmapped(self.Experts):
            return self._route(x, documents)

    def _logits(self, x: NamedArray) -> NamedArray:
        dtype = self.settings.router_dtype
        # The layer doesn't gather what has the axis of experts. A router is small.
        router = gathered(self.router, whole=[self.Experts.name])
        if dtype == "compute":
            return router(x).astype(jnp.float32)
        with jax.default_matmul_precision(dtype):  # TPUs multiply in bfloat16 otherwise
            return router(x.astype(dtype)).astype(jnp.float32)

    def _route(
        self, x: NamedArray, documents: NamedArray | None
    ) -> tuple[NamedArray, NamedArray, RouterStatistics]:
        Experts = self.Experts
        logits = checkpoint_name(self._logits(x), "router_logits")
        is_softmax = self.routing.scoring == "softmax"
        scores = (
            hnn.softmax(logits, axis=Experts) if is_softmax else hnn.sigmoid(logits)
        )
        probabilities = checkpoint_name(scores, "router_probs")
        Choice = Axis("choice", self.settings.experts_per_token)
        tokens = tuple(axis for axis in probabilities.axes if axis != Experts)

        def best(
            probabilities: NamedArray, bias: NamedArray | None
        ) -> tuple[NamedArray, NamedArray]:
            if self.routing == SOFTMAX:
                return hax.top_k(probabilities, Experts, Choice.size, new_axis=Choice)
            preferred = _preferred(probabilities, bias, self.routing, Experts)
            _, choices = hax.top_k(preferred, Experts, Choice.size, new_axis=Choice)
            # The bias is of the choice alone: gates are the scores without it.
            return hax.take(probabilities, Experts, choices), choices

        out = ((*tokens, Choice), (*tokens, Choice))
        bias = None if self.bias is None else self.bias.value
        gates, choices = per_device(best, probabilities, bias, over=tokens, out=out)
        choices = checkpoint_name(choices, "router_choices")
        gates = checkpoint_name(gates, "router_gates")
        # After the name: the derivative of the division reads what it divides.
        if self.settings.norm_topk_prob:
            gates = gates / hax.sum(gates, axis=Choice)
        if self.routing.gate_scale != 1:
            gates = gates * self.routing.gate_scale
        # Of integers, so it carries no gradient to the router; `shares` does.
        chosen = hax.sum(hnn.one_hot(choices, Experts, dtype=jnp.float32), axis=Choice)
        real = hax.ones(tokens)
        if documents is not None:
            real = hax.where(documents != 0, real, 0.0)

        def total(x: NamedArray) -> NamedArray:
            return hax.sum(x * real, axis=tokens)

        # Sigmoids do not sum to one, as the loss of `router_losses` takes them to.
        shares = (
            probabilities
            if is_softmax
            else probabilities / hax.sum(probabilities, axis=Experts)
        )
        z_loss = hnn.logsumexp(logits, axis=Experts) ** 2
        return (
            choices,
            gates,
            RouterStatistics(total(chosen), total(shares), total(z_loss)),
        )

    def apply(
        self, x: NamedArray, documents: NamedArray | None = None
    ) -> tuple[NamedArray, RouterStatistics]:
        """Maps `[..., Embed]` to `[..., Embed]`, with the sums of `route`; takes what
        that takes.

        In a layer that is not recomputed, or keeps `expert_internals`, the outputs of
        `gate_proj` and `up_proj` are kept for the backward pass, which then recomputes
        neither, at `2 * experts_per_token * expert_dim` activations a token, and twice
        its width for a shared expert.

        Cost: `6 * tokens * experts_per_token * embed * expert_dim` FLOPs and up to an
        eighth more for padding; see `grouped_experts` for the memory and the backward
        pass.
        """
        choices, gates, sums = self.route(x, documents)
        output = self._mixed(x, choices, gates)
        output = checkpoint_name(output, "expert_output")
        if self.shared is not None:
            products = checkpoint_name(self.shared.products(x), "expert_internals")
            shared = self.shared.down(products)
            # All tokens pass this expert; a sigmoid of each may scale what it gives.
            if self.shared_gate is not None:
                shared = shared * hnn.sigmoid(self.shared_gate(x))
            output = output + shared.rearrange(x.axes)
        return output, sums

    def reads_in_stack(self, x: NamedArray) -> bool:
        """Whether experts are read from the stack of all layers block by block: for a
        few tokens, to which no backend has an advantage.

        From a stack on the host only those come to the device that tokens may choose;
        where that can be all of them, the layer's come as it begins, once.
        """
        if self.in_stack is None:
            return False
        choices = x.size // self.Embed.size * self.settings.experts_per_token
        arrays = jax.tree.leaves(self.in_stack.stack)
        is_on_host = any(map(streaming.is_on_host, arrays))
        return choices < self.Experts.size or not is_on_host

    def _weights(self, is_in_stack: bool) -> Any:
        """The experts' weights: in the stack of all layers, if that is what a fold
        gives.
        """
        weights: Any = self.experts
        if is_in_stack:
            return self.in_stack
        if isinstance(weights, LayerStack):
            own = weights.layer.stacked
            if has_quantized(weights.stack):
                return own  # which was computed from the stack, and is not in it
            return dataclasses.replace(weights, stack=weights.stack.stacked, own=own)
        return weights.stacked

    def _mixed(
        self,
        x: NamedArray,
        choices: NamedArray,
        gates: NamedArray,
    ) -> NamedArray:
        """The sum of each token's chosen experts."""
        Embed = self.Embed
        Experts = self.Experts
        is_in_stack = self.reads_in_stack(x)
        weights = self._weights(is_in_stack)
        keep = internals_are_saved("expert_internals")
        tokens = tuple(axis for axis in x.axes if axis != Embed)
        over = mesh_axes(Experts)
        divided = {one for axis in tokens for one in mesh_axes(axis)}
        for one in (one for one in over if one not in divided):
            raise ValueError(
                f"`{Experts.name}` is divided over {one!r} of the mesh, and no axis of"
                " tokens is: its devices would all compute the same. Map `batch` or"
                " `position` to it too, for instance trainer.mesh.compute_mapping:"
                f" {{batch: [data, {one}], {Experts.name}: {one}}}."
            )

        def mix(
            weights: Any, x: NamedArray, choices: NamedArray, gates: NamedArray
        ) -> NamedArray:
            own = tuple(axis for axis in x.axes if axis != Embed)
            rows, chosen, factors = (
                named.rearrange((*own, last)).array.reshape(-1, last.size)
                for named, last in (
                    (x, Embed),
                    (choices, choices.resolve_axis("choice")),
                    (gates, gates.resolve_axis("choice")),
                )
            )
            mixed = grouped_experts(
                functools.partial(
                    _apply_expert, self.ExpertDim, self.routing.weighs_input
                ),
                weights,
                Experts,
                rows,
                chosen,
                factors.astype(rows.dtype),
                saved=_products if keep else None,
                backend="block" if is_in_stack else self.settings.backend,
                over=over,
            )
            return hax.named(
                mixed.reshape([axis.size for axis in (*own, Embed)]), (*own, Embed)
            )

        return per_device(
            mix, weights, x, choices, gates, over=(*tokens, Experts), out=x.axes
        )


def _preferred(
    scores: NamedArray, bias: NamedArray | None, routing: Routing, Experts: Axis
) -> NamedArray:
    """The scores by which experts are chosen; minus infinity in groups that a token
    does not choose from.
    """
    scores = jax.lax.stop_gradient(
        scores if bias is None else scores + bias.astype(scores.dtype)
    )
    if routing.num_groups == 1:
        return scores
    Group = Axis("group", routing.num_groups)
    Member = Axis("member", Experts.size // Group.size)
    by_group = scores.unflatten_axis(Experts, (Group, Member))
    best_two, _ = hax.top_k(by_group, Member, 2)
    of_groups = hax.sum(best_two, axis=Member.name)
    _, chosen = hax.top_k(of_groups, Group, routing.groups_per_token, new_axis="choice")
    is_chosen = hax.sum(hnn.one_hot(chosen, Group), axis="choice") > 0
    # Not zero: with a bias, a score in an open group may be negative.
    open_to_choice = hax.where(is_chosen, by_group, -jnp.inf)
    return open_to_choice.flatten_axes((Group, Member), Experts).rearrange(scores.axes)


def _apply_expert(
    Inner: Axis,
    weighs_input: bool,
    expert: GatedMlp,
    rows: Float[Array, "row embed"],
    gates: Float[Array, " row"],
    products: tuple[Float[Array, "row inner"], Float[Array, "row inner"]] | None = None,
    linear: ExpertLinear = apply_linear,
) -> Array:
    Row = Axis("row", rows.shape[0])
    named: Any = products and tuple(
        hax.named(product, (Row, Inner)) for product in products
    )
    expert = cast_floating(expert, rows.dtype)
    if named is None:
        named = expert.products(hax.named(rows, (Row, "embed")), linear)
    weight: Any = hax.named(gates, Row)
    if weighs_input:
        # Without biases the products of weighed rows are the weighed products.
        named = tuple(product * weight for product in named)
        weight = None
    mixed = expert.down(named, weight, linear)
    return mixed.rearrange((Row, "embed")).array


def _products(
    expert: GatedMlp,
    rows: Float[Array, "row embed"],
    linear: ExpertLinear = apply_linear,
) -> tuple[Float[Array, "row inner"], Float[Array, "row inner"]]:
    """The outputs of the expert's `gate_proj` and `up_proj`, `[row, inner]`."""
    Row = Axis("row", rows.shape[0])
    gated, up = cast_floating(expert, rows.dtype).products(
        hax.named(rows, (Row, "embed")), linear
    )
    return gated.rearrange((Row, ...)).array, up.rearrange((Row, ...)).array


def init_feed_forward(
    config: DecoderConfig, kind: LayerKind, *, key: PRNGKeyArray
) -> FeedForward:
    """Makes the MLP of a layer, or experts where its kind has some."""
    if kind.sparse and isinstance(config, SparseDecoderConfig):
        return SparseExperts.init(config, key=key)
    return GatedMlp.init(config, config.Mlp, key=key)


def reading_in_stack(layer: T, stack: T, layer_index: NamedArray, Layers: Axis) -> T:
    """A layer whose experts a few tokens read from the stack of all layers, without a
    copy of the layer's.
    """

    def is_sparse(node: Any) -> bool:
        return isinstance(node, SparseExperts)

    def with_stack(node: Any, of_all: Any) -> Any:
        if not is_sparse(node):
            return node
        experts = LayerStack(of_all.experts.stacked, layer_index.array, Layers.name)
        return dataclasses.replace(node, in_stack=experts)

    return jax.tree.map(
        with_stack,
        layer,
        stack,
        is_leaf=lambda node: is_sparse(node) or is_named_array(node),
    )
