"""Configs of decoders, dense and with experts, and the named axes that they define."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import draccus
import jax.numpy as jnp
from haliax import Axis

from models.decoder.remat_presets import (
    DENSE_NAMES,
    SPARSE_NAMES,
    decoder_remat_presets,
)
from stacked_remat.ops import RotaryScaling, rotary_from_hf, rotary_to_hf
from stacked_remat.training import RematPresets
from stacked_remat.training.config_checks import check_choices, check_positive
from stacked_remat.training.config_file import RecordsArguments

OF_RUN = MappingProxyType({"of_run": True})
"""The metadata of fields that a run decides, not the folder of its weights; null takes
the folder's value.
"""
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class AttentionConfig(RecordsArguments):
    """Settings of attention.

    Attributes:
        head_dim: width of a head; `hidden_dim / num_heads` if not given.
        bias: whether the four projections have biases.
        window: how many positions a query sees, itself included; null for all up to
            itself.
        layer_types: of each layer `sliding_attention`, which uses `window`, or
            `full_attention`; a shorter list repeats. Null where all layers use the
            window.
        backend: the kernel: `auto`, or a name that `stacked_remat.ops.causal_attention`
            takes.
    """

    head_dim: int | None = None
    bias: bool = False
    window: int | None = None
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = (
        None
    )
    backend: Literal["auto", "cudnn", "tokamax", "splash", "blockwise", "exact"] = (
        field(default="auto", metadata=OF_RUN)
    )

    def __post_init__(self) -> None:
        check_choices("model.attention", self)
        check_positive("model.attention", self, "window")
        if self.layer_types and (SLIDING in self.layer_types) != (
            self.window is not None
        ):
            raise ValueError(
                "model.attention.window is of layers of the type sliding_attention."
                " Give both, or neither."
            )


@dataclass(frozen=True)
class RotaryConfig(RecordsArguments):
    """The rotary position embedding.

    Attributes:
        theta: base of the wavelengths.
        scaling: how they are stretched for longer contexts, as in Hugging Face's
            `rope_scaling`, such as `{rope_type: yarn, factor: 4.0,
            original_max_position_embeddings: 32768}`; null for none.
        max_position_embeddings: the longest context of the weights, for exported
            configs.
    """

    theta: float = 1_000_000.0
    scaling: RotaryScaling | None = None
    max_position_embeddings: int = 32_768

    def __post_init__(self) -> None:
        check_positive("model.rotary", self, "max_position_embeddings")
        if self.theta <= 1:
            raise ValueError(f"model.rotary.theta must be above 1, got {self.theta}.")


@dataclass(frozen=True)
class ExpertsConfig(RecordsArguments):
    """A router that sends every token to a few experts.

    Attributes:
        num_experts: experts in a layer.
        experts_per_token: how many of them each token is routed to.
        intermediate_dim: inner width of one expert.
        norm_topk_prob: whether the weights of the chosen experts are rescaled to sum to
            one.
        load_balance_weight: weight in the training loss of the load-balance loss; null
            for that of the folder of `initialize_from_hf`: its `router_aux_loss_coef`,
            or 0 where its `output_router_logits` is false. Without a folder null is
            0.001.
        z_loss_weight: the same for the router's z-loss, which keeps its logits small;
            the mean over layers.
        dense_layers: numbers of the layers that have one MLP of `model.mlp_dim` in
            place of experts.
        load_balance_loss: `per_layer` for the mean of each layer's load-balance loss,
            which makes every layer even; `pooled` for the loss of loads and
            probabilities averaged over layers, as in Hugging Face's transformers, in
            which layers may make up for each other.
        backend: how experts are applied: `auto`, or a name that
            `stacked_remat.ops.grouped_experts` takes.
        router_dtype: dtype of the router's product: `compute` for
            `model.compute_dtype`, whose rounding may decide between experts, or
            `float32`.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    intermediate_dim: int = 128
    norm_topk_prob: bool = True
    load_balance_weight: float | None = field(default=None, metadata=OF_RUN)
    z_loss_weight: float = field(default=0.0, metadata=OF_RUN)
    dense_layers: tuple[int, ...] = ()
    load_balance_loss: Literal["per_layer", "pooled"] = field(
        default="per_layer", metadata=OF_RUN
    )
    backend: Literal["auto", "megablox", "tokamax", "block"] = field(
        default="auto", metadata=OF_RUN
    )
    router_dtype: Literal["compute", "float32"] = field(
        default="compute", metadata=OF_RUN
    )

    def __post_init__(self) -> None:
        check_positive(
            "model.experts",
            self,
            "num_experts",
            "experts_per_token",
            "intermediate_dim",
        )
        if self.experts_per_token > self.num_experts:
            most, given = self.num_experts, self.experts_per_token
            raise ValueError(
                f"model.experts.experts_per_token = {given} is more than num_experts ="
                f" {most}."
            )
        for name in ("load_balance_weight", "z_loss_weight"):
            weight = getattr(self, name)
            if weight is not None and not 0 <= weight < math.inf:
                raise ValueError(
                    f"model.experts.{name} must not be negative or infinite, got"
                    f" {weight}."
                )
        check_choices("model.experts", self)

    @property
    def load_balance_weight_used(self) -> float:
        """The weight, or its default."""
        return 0.001 if self.load_balance_weight is None else self.load_balance_weight


@dataclass(frozen=True)
class LatentConfig(RecordsArguments):
    """Widths of multi-head latent attention.

    Attributes:
        query_rank: of the vector from which queries are projected; null for none.
        key_value_rank: of the vector from which keys and values are projected.
        plain_dim: coordinates of a head of queries and keys that are not rotated.
        rotary_dim: those that are.
        value_dim: coordinates of a head of values, at most those of keys.
        interleaved: whether coordinates 2i and 2i + 1 are a pair that is rotated.
    """

    query_rank: int | None = 1_536
    key_value_rank: int = 512
    plain_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128
    interleaved: bool = True

    def __post_init__(self) -> None:
        sizes = ("query_rank", "key_value_rank", "plain_dim", "rotary_dim", "value_dim")
        check_positive("model.latent", self, *sizes)
        if self.rotary_dim % 2:
            raise ValueError(
                f"model.latent.rotary_dim = {self.rotary_dim} must be even: pairs are"
                " rotated."
            )
        if self.value_dim > self.plain_dim + self.rotary_dim:
            raise ValueError(
                f"model.latent.value_dim = {self.value_dim} must be at most plain_dim +"
                f" rotary_dim = {self.plain_dim + self.rotary_dim}."
            )


@dataclass(frozen=True)
class RouterSpec:
    """How a router chooses experts.

    Attributes:
        scoring: of its logits.
        bias: whether a bias is added to the scores by which experts are chosen, but not
            to their gates. `frozen` gets no gradient; `by_load` is raised for experts
            that fewer tokens than the mean choose, and lowered for others.
        num_groups: experts are in so many groups.
        groups_per_token: the groups with the best two experts in sum, from which a
            token chooses.
        gate_scale: factor of the gates.
        shared_dim: inner width of an MLP that all tokens are routed to besides; 0 for
            none.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    bias: Literal["none", "frozen", "by_load"] = "none"
    num_groups: int = 1
    groups_per_token: int = 1
    gate_scale: float = 1.0
    shared_dim: int = 0


def _axis(name: str, size: str, doc: str) -> Any:
    """An axis of a config, whose size is an attribute."""
    return property(lambda config: Axis(name, attrgetter(size)(config)), doc=doc)


@dataclass(frozen=True)
class LayerSpec:
    """What a layer is; layers with equal specs form one stack. The defaults are the
    most common ones.

    Attributes:
        num_heads, num_kv_heads: as in `DecoderConfig`.
        head_dim: width of a head of queries and keys.
        window: how many positions a query sees, itself included; None for all up to
            itself.
        rotary: the rotary position embedding.
        scale: factor of attention's scores; None for `head_dim ** -0.5`.
        qk_norm: which RMS norms queries and keys have: none, one over each head, or one
            over all heads.
        qkv_bias: whether the projections to queries, keys and values have biases.
        output_bias: whether attention's last projection has one.
        sinks: whether every query head has a learnt score that attends to nothing; see
            `stacked_remat.ops.causal_attention`.
        latent: multi-head latent attention in place of grouped queries.
        sparse: whether the feed-forward half is a router with experts rather than one
            MLP.
        router: how experts are chosen.
        mlp_bias: whether MLPs, experts and routers have biases.
        activation: of the MLP's gate.
        swiglu_limit: clamps both halves of gated MLPs (`SwiGlu`); None for no clamp.
        norms: whether attention and MLP have RMS norms of what they are given, of what
            they add to the residual stream, or of both.
    """

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    scale: float | None = None
    qk_norm: Literal["none", "per_head", "all_heads"] = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    latent: LatentConfig | None = None
    sparse: bool = False
    router: RouterSpec = field(default_factory=RouterSpec)
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    swiglu_limit: float | None = None
    norms: Literal["before", "after", "both"] = "before"

    @property
    def name(self) -> str:
        """What layers of this kind are called: `sliding_sparse`."""
        return ("" if self.window is None else "sliding_") + (
            "sparse" if self.sparse else "dense"
        )

    KVHeads = _axis("kv_heads", "num_kv_heads", "Key and value heads.")
    HeadDim = _axis(
        "head_dim", "head_dim", "Coordinates of one head of queries and keys."
    )

    @property
    def HeadsPerKV(self) -> Axis:
        """Query heads that share one key-value head; (KVHeads, HeadsPerKV) are all
        query heads, in order.
        """
        return Axis("heads_per_kv", self.num_heads // self.num_kv_heads)

    def slots(self, tokens: int) -> int:
        """How many positions of a sequence of so many tokens the cache of a layer
        has.
        """
        return tokens if self.window is None else min(tokens, self.window)

    @property
    def numbers_of_token(self) -> int:
        """How many numbers the cache of a layer keeps of a token."""
        if self.latent is not None:
            return self.latent.key_value_rank + self.latent.rotary_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def RotaryDim(self) -> Axis:
        """Coordinates of one head that are rotated."""
        return Axis(
            "head_dim", self.head_dim if self.latent is None else self.latent.rotary_dim
        )


@dataclass(frozen=True)
class DecoderConfig(RecordsArguments, draccus.ChoiceRegistry):
    """A decoder in which every layer has one MLP, and what decoders with experts share
    with it.

    An architecture is a subclass, which says in `block` and `layer` what its layers
    are.

    Attributes:
        block: what all layers of an architecture have alike.
        norm_offset: added to the weights of all norms.
        embedding_scale: factor of the embedded tokens; None for none.
        hidden_dim: width of the residual stream.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; each serves `num_heads / num_kv_heads` query
            heads.
        attention: width of a head, biases, window, kernel.
        mlp_dim: inner width of the MLP of a dense layer; `3 * hidden_dim` if not given.
        rotary: the rotary position embedding.
        rms_norm_eps: added to the mean square in every norm.
        initializer_range: standard deviation of the initial weights.
        tie_word_embeddings: whether the head reuses the embedding's weights.
        tiles: into how many parts a layer is cut that exist one after the other, so
            that what it computes inside takes less memory: attention by its key-value
            heads (at most as many; whole where norms are over all heads), MLPs and
            experts by positions. Each part is computed once more in the backward pass,
            and gives names to nothing.
        compute_dtype: dtype of activations; parameters are cast to it a layer at a
            time.
    """

    block: ClassVar[LayerSpec] = LayerSpec()
    norm_offset: ClassVar[float] = 0.0
    embedding_scale: ClassVar[Any] = None

    hidden_dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mlp_dim: int | None = None
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    rms_norm_eps: float = 1e-6
    initializer_range: float = field(default=0.02, metadata=OF_RUN)
    tie_word_embeddings: bool = False
    tiles: int = field(default=1, metadata=OF_RUN)
    compute_dtype: Literal["float32", "bfloat16"] = field(
        default="float32", metadata=OF_RUN
    )

    def __post_init__(self) -> None:
        sizes = (
            "hidden_dim",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "mlp_dim",
            "tiles",
        )
        check_positive("model", self, *sizes, "rms_norm_eps", "initializer_range")
        self._check_heads()
        check_choices("model", self)
        types = self.attention.layer_types or ()
        if len(types) > self.num_layers:
            raise ValueError(
                f"model.attention.layer_types has {len(types)} entries for"
                f" model.num_layers = {self.num_layers}. Give at most one for each"
                " layer."
            )

    @property
    def remat_names(self) -> tuple[str, ...]:
        """The names inside its layers that policies see: none where parts of layers are
        recomputed anyway.
        """
        return self._internal_names if self.tiles == 1 else ()

    @property
    def remat_presets(self) -> RematPresets:
        """Named policies for the `remat` config entry."""
        return decoder_remat_presets(self._internal_names)

    @property
    def _internal_names(self) -> tuple[str, ...]:
        named = (
            SPARSE_NAMES if spec.sparse else DENSE_NAMES for spec in self.kinds.values()
        )
        return tuple(dict.fromkeys(name for names in named for name in names))

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            heads, own = self.num_heads, self.num_kv_heads
            raise ValueError(
                f"model.num_heads = {heads} must be a multiple of model.num_kv_heads ="
                f" {own}."
            )
        given = self.attention.head_dim is not None
        if not given and self.hidden_dim % self.num_heads:
            raise ValueError(
                f"model.hidden_dim = {self.hidden_dim} is not divisible by"
                f" model.num_heads = {self.num_heads}; change one of them, or give"
                " model.attention.head_dim."
            )
        if self.head_dim < 2 or self.head_dim % 2:
            what = (
                "model.attention.head_dim"
                if given
                else "model.hidden_dim / model.num_heads"
            )
            raise ValueError(
                f"{what} = {self.head_dim} must be even and at least 2: pairs are"
                " rotated."
            )

    Layers = _axis("layers", "num_layers", "The layers.")
    Embed = _axis("embed", "hidden_dim", "The residual stream.")

    @property
    def head_dim(self) -> int:
        """Width of a head of queries and keys."""
        given = self.attention.head_dim
        return self.hidden_dim // self.num_heads if given is None else given

    @property
    def Mlp(self) -> Axis:
        """Inner width of the MLP of a dense layer."""
        return Axis(
            "mlp", 3 * self.hidden_dim if self.mlp_dim is None else self.mlp_dim
        )

    @property
    def sparse(self) -> ExpertsConfig | None:
        """The experts of the layers that have some; None if no layer has."""
        return None

    def layer(self, number: int) -> LayerSpec:
        """What one layer is."""
        attention = self.attention
        types = attention.layer_types or (SLIDING,)
        windowed = types[number % len(types)] == SLIDING
        return replace(
            self.block,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=attention.window if windowed else None,
            rotary=self.rotary,
            qkv_bias=attention.bias,
            output_bias=attention.bias,
            sparse=self.sparse is not None and number not in self.sparse.dense_layers,
        )

    @functools.cached_property
    def specs(self) -> tuple[LayerSpec, ...]:
        """What each layer is."""
        return tuple(map(self.layer, range(self.num_layers)))

    @property
    def balances_by_bias(self) -> bool:
        """Whether the biases of routers follow the load of their experts; see
        `RouterSpec.bias`.
        """
        return any(spec.router.bias == "by_load" for spec in self.kinds.values())

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether routers add to the cross entropy."""
        experts = self.sparse
        weighted = experts is not None and (
            experts.load_balance_weight_used or experts.z_loss_weight
        )
        return self.balances_by_bias or bool(weighted)

    @functools.cached_property
    def kinds(self) -> Mapping[str, LayerSpec]:
        """Each kind by its name in paths of arrays and targets of adapters: `dense`,
        then `dense_2`.
        """
        found: dict[str, LayerSpec] = {}
        for spec in dict.fromkeys(self.specs):
            number = 1 + [kind.name for kind in found.values()].count(spec.name)
            found[spec.name if number == 1 else f"{spec.name}_{number}"] = spec
        return found

    @property
    def pattern(self) -> tuple[str, ...]:
        """The name of the kind of each layer."""
        names = {spec: name for name, spec in self.kinds.items()}
        return tuple(names[spec] for spec in self.specs)

    def layers_of(self, kind: str) -> list[int]:
        """The numbers of the layers of a kind, by its name."""
        return [layer for layer, name in enumerate(self.pattern) if name == kind]

    def cache_bytes(self, rows: int, slots: int) -> int:
        """The size of the caches of all layers, of so many sequences of so many
        tokens.
        """
        numbers = sum(spec.slots(slots) * spec.numbers_of_token for spec in self.specs)
        return rows * numbers * jnp.dtype(self.compute_dtype).itemsize


@dataclass(frozen=True)
class SparseDecoderConfig(DecoderConfig):
    """A decoder with experts in every layer, or in all but some.

    Attributes:
        all_sparse: whether an architecture has them in every layer, with gates that sum
            to one.
        experts: the router and its experts.
    """

    all_sparse: ClassVar[bool] = False

    experts: ExpertsConfig = field(default_factory=ExpertsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.all_sparse and (
            self.mlp_dim is not None
            or self.experts.dense_layers
            or not self.experts.norm_topk_prob
        ):
            raise ValueError(
                "Leave out model.mlp_dim, model.experts.dense_layers and"
                " model.experts.norm_topk_prob, which have no effect: in this"
                " architecture every layer has experts, of the width"
                " model.experts.intermediate_dim, and the weights of a token's experts"
                " sum to one."
            )
        dense, last = self.experts.dense_layers, self.num_layers - 1
        if list(dense) != sorted({*dense} & {*range(self.num_layers)}):
            raise ValueError(
                f"model.experts.dense_layers = {list(dense)} must be from 0 to {last},"
                " in increasing order."
            )

    @property
    def sparse(self) -> ExpertsConfig | None:
        """The experts."""
        return self.experts

    Experts = _axis("experts", "experts.num_experts", "Experts of one layer.")
    ExpertDim = _axis(
        "expert_dim", "experts.intermediate_dim", "Inner width of one expert."
    )


def _decode_scaling(raw: Any, path: Sequence[str]) -> RotaryScaling:
    """Reads the section of a YAML file as Hugging Face's field of the same contents."""
    if isinstance(raw, RotaryScaling):
        return raw
    given = "original_max_position_embeddings"
    if not isinstance(raw, dict):
        raise ValueError(
            f"{'.'.join(path)} needs rope_type and its fields; got {raw!r}."
        )
    found = rotary_from_hf(raw, max_position_embeddings=raw.get(given, 1))
    if hasattr(found, given) and given not in raw:
        raise ValueError(f"{'.'.join(path)} needs {given}; got {raw!r}.")
    return found


draccus.decode.register(RotaryScaling, _decode_scaling)
draccus.encode.register(RotaryScaling, lambda scaling, *_: rotary_to_hf(scaling))
