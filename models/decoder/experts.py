"""The sparse feed-forward half of a layer: a top-k router and SwiGLU experts.

The experts are a stack over the named axis `Experts`. Each is applied only to the
tokens that chose it, by `stacked_remat.ops.grouped_experts`: exact for any routing,
without a capacity.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.util import is_named_array
from jaxtyping import Array, Float, PRNGKeyArray

from models.decoder.config import LayerSpec, RouterSpec, SparseDecoderConfig
from models.decoder.layers import SwiGlu, cast_floating, linear
from stacked_remat import (
    LayerStack,
    Stacked,
    checkpoint_name,
    internals_are_saved,
    streaming,
    unsliced,
)
from stacked_remat.ops import (
    ExpertLinear,
    apply_linear,
    grouped_experts,
    mesh_axes,
    per_device,
    unmapped,
)
from stacked_remat.training import Metrics


class AuxiliaryLoss(eqx.Module):
    """The terms that layers add to the loss, and their metrics.

    Attributes:
        loss: a scalar, already weighted, to be added to the cross entropy.
        metrics: named scalars or arrays for the log; they carry no gradient.
        statistics: the means over tokens of which both are functions, for
            `Decoder.auxiliary`.
    """

    loss: Float[Array, ""]
    metrics: Metrics
    statistics: "RouterStatistics | None" = None


class RouterStatistics(eqx.Module):
    """How one layer's router spread its tokens, without padding, over the axis
    `Experts`, in float32.

    Attributes:
        load: how many times an expert was chosen, per token; sums to
            `experts_per_token`. Has no gradient.
        importance: mean router probability of an expert; sums to one.
        z_loss: without `Experts`: mean square of the logarithm of the sum of the
            exponentials of the router's logits (Zoph et al. 2022, "ST-MoE", eq. 5).
    """

    load: NamedArray
    importance: NamedArray
    z_loss: NamedArray


def means(
    sums: RouterStatistics, x: NamedArray, Embed: Axis, documents: NamedArray | None
) -> RouterStatistics:
    """The statistics of the tokens `x` from their sums, without padding."""
    count = hax.ones(tuple(axis for axis in x.axes if axis != Embed))
    if documents is not None:
        count = hax.where(documents != 0, count, 0.0)
    total = hax.maximum(hax.sum(count), 1.0)
    return jax.tree.map(lambda one: one / total, sums, is_leaf=is_named_array)


class SparseExperts(eqx.Module):
    """Routes every token to `experts_per_token` experts and sums their weighted
    outputs.

    Names for remat policies: `router_logits`, `router_probs`, `router_choices`
    (integers), `router_gates` (before they are normalised), `expert_internals` (what
    experts make of their tokens before the activation, where they are not divided over
    devices) and `expert_output`. Saving the last has no use: the experts' backward pass
    starts from the tokens and never reads it.
    """

    router: hnn.Linear
    config: SparseDecoderConfig = eqx.field(static=True)
    spec: RouterSpec = eqx.field(static=True)
    experts: Stacked = unsliced()
    bias: NamedArray | None = None
    shared: SwiGlu | None = None

    @staticmethod
    def init(
        config: SparseDecoderConfig, spec: LayerSpec, *, key: PRNGKeyArray
    ) -> "SparseExperts":
        """Makes the router and all experts from `key`."""
        router_key, experts_key = jax.random.split(key)
        router, shared = spec.router, None
        if router.shared_dim:
            Shared = Axis("shared_dim", router.shared_dim)
            shared = SwiGlu.init(config, spec, Shared, key=jax.random.fold_in(key, 2))
        # The policy of the stack of layers decides whether an expert's intermediates
        # are kept.
        make_experts = Stacked.init(config.Experts, SwiGlu, remat=False)
        keys = jax.random.split(experts_key, config.Experts.size)
        return SparseExperts(
            router=linear(
                config, config.Embed, config.Experts, bias=spec.mlp_bias, key=router_key
            ),
            experts=make_experts(config, spec, config.ExpertDim, key=keys),
            config=config,
            spec=router,
            bias=hax.zeros(config.Experts) if router.bias != "none" else None,
            shared=shared,
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
        with unmapped(self.config.Experts):
            return self._route(x, documents)

    def _logits(self, x: NamedArray) -> NamedArray:
        dtype = self.config.experts.router_dtype
        if dtype == "compute":
            return self.router(x).astype(jnp.float32)
        with jax.default_matmul_precision(dtype):  # TPUs multiply in bfloat16 otherwise
            return self.router(x.astype(dtype)).astype(jnp.float32)

    def _route(
        self, x: NamedArray, documents: NamedArray | None
    ) -> tuple[NamedArray, NamedArray, RouterStatistics]:
        Experts = self.config.Experts
        logits = checkpoint_name(self._logits(x), "router_logits")
        is_softmax = self.spec.scoring == "softmax"
        scores = (
            hnn.softmax(logits, axis=Experts) if is_softmax else hnn.sigmoid(logits)
        )
        probabilities = checkpoint_name(scores, "router_probs")
        Choice = Axis("choice", self.config.experts.experts_per_token)
        tokens = tuple(axis for axis in probabilities.axes if axis != Experts)

        def best(
            probabilities: NamedArray, bias: NamedArray | None
        ) -> tuple[NamedArray, NamedArray]:
            if self.spec == RouterSpec():
                return hax.top_k(probabilities, Experts, Choice.size, new_axis=Choice)
            preferred = _preferred(probabilities, bias, self.spec, Experts)
            _, choices = hax.top_k(preferred, Experts, Choice.size, new_axis=Choice)
            return hax.take(probabilities, Experts, choices), choices

        out = ((*tokens, Choice), (*tokens, Choice))
        gates, choices = per_device(
            best, probabilities, self.bias, over=tokens, out=out
        )
        choices, gates = (
            checkpoint_name(choices, "router_choices"),
            checkpoint_name(gates, "router_gates"),
        )
        if self.config.experts.norm_topk_prob:
            gates = gates / hax.sum(gates, axis=Choice)
        if self.spec.gate_scale != 1:
            gates = gates * self.spec.gate_scale
        chosen = hax.sum(hnn.one_hot(choices, Experts, dtype=jnp.float32), axis=Choice)
        real = hax.ones(tokens)
        if documents is not None:
            real = hax.where(documents != 0, real, 0.0)

        def total(x: NamedArray) -> NamedArray:
            return hax.sum(x * real, axis=tokens)

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

    def __call__(
        self,
        x: NamedArray,
        documents: NamedArray | None = None,
        stack: LayerStack | None = None,
    ) -> tuple[NamedArray, RouterStatistics]:
        """Maps `[..., Embed]` to `[..., Embed]`, with the sums of `route`; takes what
        that takes.

        With `stack`, for a few tokens, experts are read there block by block: no
        backend has an advantage.

        In a layer that is not recomputed, or keeps `expert_internals`, the outputs of
        `gate_proj` and `up_proj` are kept for the backward pass, which then recomputes
        neither, at `2 * experts_per_token * expert_dim` activations a token.

        Cost: `6 * tokens * experts_per_token * embed * expert_dim` FLOPs and up to an
        eighth more for padding; see `grouped_experts` for the memory and the backward
        pass.
        """
        choices, gates, sums = self.route(x, documents)
        keep = internals_are_saved("expert_internals")
        backend = self.config.experts.backend if stack is None else "block"
        # In the stack of all layers, if that is what a fold gives
        weights: Any = self.experts
        if stack is not None:
            weights = stack
        elif isinstance(weights, LayerStack):
            weights = dataclasses.replace(
                weights, stack=weights.stack.stacked, own=weights.layer.stacked
            )
        else:
            weights = weights.stacked
        output = self._mixed(
            x, choices, gates, weights, self.config.Experts, backend, keep
        )
        output = checkpoint_name(output, "expert_output")
        return (
            output if self.shared is None else output + self.shared(x).rearrange(x.axes)
        ), sums

    def decode(
        self, x: NamedArray, layers: "SparseExperts", layer_index: NamedArray
    ) -> NamedArray:
        """Maps a few tokens `[..., Embed]` to themselves, without a copy of the layer's
        experts.

        From a stack on the host only those come to the device that tokens may choose;
        where that can be all of them, the layer's come as it begins, once.

        Args:
            layers: these weights of all layers of the stack, whose axis is the first of
                every array.
        """
        stack, config = layers.experts.stacked, self.config
        Layers = jax.tree.leaves(stack, is_leaf=is_named_array)[0].axes[0]
        choices = x.size // config.Embed.size * config.experts.experts_per_token
        if choices >= config.Experts.size and any(
            map(streaming.is_on_host, jax.tree.leaves(stack))
        ):
            return self(x)[0]
        return self(x, stack=LayerStack(stack, layer_index.array, Layers.name))[0]

    def _mixed(
        self,
        x: NamedArray,
        choices: NamedArray,
        gates: NamedArray,
        weights: Any,
        Experts: Axis,
        backend: str,
        keep: bool = False,
    ) -> NamedArray:
        """The sum of each token's chosen experts, whose weights have the axis
        `Experts`.
        """
        Embed = self.config.Embed
        tokens = tuple(axis for axis in x.axes if axis != Embed)
        over, divided = (
            mesh_axes(Experts),
            {one for axis in tokens for one in mesh_axes(axis)},
        )
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
                functools.partial(_apply_expert, self.config.ExpertDim),
                weights,
                Experts,
                rows,
                chosen,
                factors.astype(rows.dtype),
                saved=_products if keep else None,
                backend=backend,
                over=over,
            )
            return hax.named(
                mixed.reshape([axis.size for axis in (*own, Embed)]), (*own, Embed)
            )

        return per_device(
            mix, weights, x, choices, gates, over=(*tokens, Experts), out=x.axes
        )


def _preferred(
    scores: NamedArray, bias: NamedArray | None, spec: RouterSpec, Experts: Axis
) -> NamedArray:
    """The scores by which experts are chosen; minus infinity in groups that a token
    does not choose from.
    """
    scores = jax.lax.stop_gradient(
        scores if bias is None else scores + bias.astype(scores.dtype)
    )
    if spec.num_groups == 1:
        return scores
    Group = Axis("group", spec.num_groups)
    Member = Axis("member", Experts.size // Group.size)
    by_group = scores.unflatten_axis(Experts, (Group, Member))
    best_two, _ = hax.top_k(by_group, Member, 2)
    of_groups = hax.sum(best_two, axis=Member.name)
    _, chosen = hax.top_k(of_groups, Group, spec.groups_per_token, new_axis="choice")
    is_chosen = hax.sum(hnn.one_hot(chosen, Group), axis="choice") > 0
    open_to_choice = hax.where(is_chosen, by_group, -jnp.inf)
    return open_to_choice.flatten_axes((Group, Member), Experts).rearrange(scores.axes)


def _apply_expert(
    Inner: Axis,
    expert: SwiGlu,
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
    mixed = expert(
        hax.named(rows, (Row, "embed")), hax.named(gates, Row), named, linear
    )
    return mixed.rearrange((Row, "embed")).array


def _products(
    expert: SwiGlu, rows: Float[Array, "row embed"], linear: ExpertLinear = apply_linear
) -> tuple[Float[Array, "row inner"], Float[Array, "row inner"]]:
    """The outputs of the expert's `gate_proj` and `up_proj`, `[row, inner]`."""
    Row = Axis("row", rows.shape[0])
    gated, up = cast_floating(expert, rows.dtype).products(
        hax.named(rows, (Row, "embed")), linear
    )
    return gated.rearrange((Row, ...)).array, up.rearrange((Row, ...)).array
