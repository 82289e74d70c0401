"""Configs of decoders, dense and with experts, and the named axes that they define."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal

from haliax import Axis
from jaxtyping import PRNGKeyArray

from models.parts.norms import rms_norm
from models.parts.remat_presets import (
    ATTENTION_NAMES,
    decoder_remat_presets,
    names_in_layer,
)
from models.parts.sections import (
    OF_RUN,
    SLIDING,
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    MtpConfig,
    RotaryConfig,
    Routing,
)
from stacked_remat.training import ChoiceRegistry, RematPresets
from stacked_remat.training.config_checks import Count, Positive, check_fields


def _axis(name: str, size: str, doc: str) -> Any:
    """An axis of a config, whose size is an attribute."""
    return property(lambda config: Axis(name, attrgetter(size)(config)), doc=doc)


@dataclass(frozen=True)
class LayerKind:
    """What distinguishes a layer from others of its decoder; layers of equal kinds form
    one stack.

    An architecture whose layers differ in more has a subclass.

    Attributes:
        window: how many positions a query sees, itself included; None for all up to
            itself.
        sparse: whether the layer has experts rather than one MLP.
        linear: whether its mixer is not attention but one whose cost is linear in the
            sequence, and which keeps a state of one size.
    """

    window: int | None = None
    sparse: bool = False
    linear: bool = False

    @property
    def name(self) -> str:
        """What layers of this kind are called: `sliding_sparse`, `linear_dense`."""
        prefix = "" if self.window is None else "sliding_"
        if self.linear:
            prefix = "linear_"
        return prefix + ("sparse" if self.sparse else "dense")


@dataclass(frozen=True)
class DecoderConfig(ChoiceRegistry):
    """A decoder in which every layer has one MLP, and what decoders with experts share
    with it.

    An architecture is a subclass, with the fields that it adds and a layer of its own.

    Attributes:
        embedding_scale: factor of the embedded tokens; None for none.
        logit_factor: factor of the logits.
        logit_softcap: scaled logits become `softcap * tanh(logits / softcap)`; None for
            not.
        layers_know_positions: whether layers use positions for more than a rotary
            embedding.
        has_halves: whether MLPs or experts read what attention has added.
        attention_names: the names for remat policies in attention.
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

    # For an architecture to set, as a class attribute or a property: no field of a file
    # reaches an architecture that does not have it.
    embedding_scale: ClassVar[Any] = None
    logit_factor: ClassVar[Any] = 1.0
    logit_softcap: ClassVar[Any] = None
    layers_know_positions: ClassVar[bool] = False
    has_halves: ClassVar[bool] = True  # of parallel blocks it is False
    attention_names: ClassVar[tuple[str, ...]] = ATTENTION_NAMES

    hidden_dim: Count = 128
    num_layers: Count = 4
    num_heads: Count = 4
    num_kv_heads: Count = 2
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mlp_dim: Count | None = None
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    rms_norm_eps: Positive = 1e-6
    initializer_range: Positive = field(default=0.02, metadata=OF_RUN)
    tie_word_embeddings: bool = False
    tiles: Count = field(default=1, metadata=OF_RUN)
    compute_dtype: Literal["float32", "bfloat16"] = field(
        default="float32", metadata=OF_RUN
    )

    def __post_init__(self) -> None:
        check_fields("model.", self)
        self._check_heads()
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
        # A dict, for its order: that of the layers
        found: dict[str, None] = {}
        for kind in self.kinds.values():
            names = names_in_layer(
                self.mixer_names(kind),
                is_sparse=kind.sparse,
                has_halves=self.has_halves,
            )
            found |= dict.fromkeys(names)
        return tuple(found)

    def mixer_names(self, kind: LayerKind) -> tuple[str, ...]:
        """The names inside the mixer of a layer of this kind."""
        return self.attention_names

    @property
    def head_axes(self) -> tuple[str, ...]:
        """The axes of heads, by which several devices may divide mixers."""
        return (self.KVHeads.name,)

    def _check_heads(self) -> None:
        if self.num_heads % self.num_kv_heads:
            heads = self.num_heads
            own = self.num_kv_heads
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

    # The axes that parts share: their names and sizes are stated once.
    Layers = _axis("layers", "num_layers", "The layers.")
    Embed = _axis("embed", "hidden_dim", "The residual stream.")
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

    @property
    def QueryHeads(self) -> tuple[Axis, ...]:
        """Coordinates of all query heads."""
        return self.KVHeads, self.HeadsPerKV, self.HeadDim

    @property
    def KeyHeads(self) -> tuple[Axis, ...]:
        """Coordinates of all key heads, and of all value heads."""
        return self.KVHeads, self.HeadDim

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

    @property
    def further_tokens(self) -> MtpConfig:
        """The layers that predict further tokens, of an architecture that has some."""
        return MtpConfig()

    @property
    def further_kind(self) -> LayerKind:
        """The kind of the layers that predict further tokens."""
        return self.kind_of(self.num_layers)

    def init_layer(self, kind: LayerKind, *, key: PRNGKeyArray) -> Any:
        """Makes a layer of this kind; an architecture's own class."""
        raise NotImplementedError(f"{type(self).__name__} has no layer.")

    def init_norm(self) -> Any:
        """Makes a norm over `Embed`, as before the head."""
        return rms_norm(self.Embed, self.rms_norm_eps)

    def kind_of(self, number: int) -> LayerKind:
        """The kind of a layer."""
        types = self.attention.layer_types or (SLIDING,)
        is_windowed = types[number % len(types)] == SLIDING
        return LayerKind(window=self.attention.window if is_windowed else None)

    @functools.cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(map(self.kind_of, range(self.num_layers)))

    @property
    def balances_by_bias(self) -> bool:
        """Whether the biases of routers follow the load of their experts; see
        `Routing.bias`.
        """
        return False

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether routers, or layers that predict further tokens, add to the cross
        entropy of the next token.
        """
        experts = self.sparse
        weighted = experts is not None and (
            experts.load_balance_weight_used or experts.z_loss_weight
        )
        predicts_further = self.further_tokens.trained_depths > 0
        return self.balances_by_bias or bool(weighted) or predicts_further

    @functools.cached_property
    def kinds(self) -> Mapping[str, LayerKind]:
        """Each kind by its name in paths of arrays and targets of adapters: `dense`,
        then `dense_2`.
        """
        found: dict[str, LayerKind] = {}
        # In the order in which they first occur: names must not depend on hashes.
        for kind in dict.fromkeys(self.layer_kinds):
            number = 1 + [other.name for other in found.values()].count(kind.name)
            found[kind.name if number == 1 else f"{kind.name}_{number}"] = kind
        return found

    @property
    def pattern(self) -> tuple[str, ...]:
        """The name of the kind of each layer."""
        # Kinds are compared by value: equal ones are one stack.
        names = {kind: name for name, kind in self.kinds.items()}
        return tuple(names[kind] for kind in self.layer_kinds)

    def layers_of(self, kind: str) -> list[int]:
        """The numbers of the layers of a kind, by its name."""
        return [layer for layer, name in enumerate(self.pattern) if name == kind]


@dataclass(frozen=True)
class SparseDecoderConfig(DecoderConfig):
    """A decoder with experts in every layer, or in all but some.

    Attributes:
        all_sparse: whether an architecture has them in every layer, with gates that sum
            to one.
        routing: how routers choose experts.
        shared_dim: inner width of an MLP that all tokens are routed to besides; 0 for
            none.
        shared_gate: whether a number of each token scales the output of that MLP.
        experts: the router and its experts.
    """

    # For an architecture to set, as in `DecoderConfig`
    all_sparse: ClassVar[bool] = False
    routing: ClassVar[Any] = Routing()
    shared_dim: ClassVar[Any] = 0
    shared_gate: ClassVar[bool] = False

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
        dense = self.experts.dense_layers
        check_layer_numbers("model.experts.dense_layers", dense, self.num_layers)
        if self.mlp_dim is not None and not dense:
            raise ValueError(
                "model.mlp_dim has no effect where all layers have experts, of the"
                " width model.experts.intermediate_dim. Leave it out, or name the"
                " layers with one MLP in model.experts.dense_layers."
            )

    @property
    def sparse(self) -> ExpertsConfig | None:
        """The experts."""
        return self.experts

    def kind_of(self, number: int) -> LayerKind:
        """The kind of a layer."""
        is_sparse = number not in self.experts.dense_layers
        return replace(super().kind_of(number), sparse=is_sparse)

    Experts = _axis("experts", "experts.num_experts", "Experts of one layer.")
    ExpertDim = _axis(
        "expert_dim", "experts.intermediate_dim", "Inner width of one expert."
    )


@dataclass(frozen=True)
class PartialRotaryConfig(DecoderConfig):
    """A decoder that rotates a part of each head.

    Attributes:
        partial_rotary_factor: the part of a head that is rotated, its first
            coordinates.
    """

    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.rotated_dim
        head_dim = self.head_dim
        # Coordinates are rotated in pairs.
        if not 0 < width <= head_dim or width % 2:
            raise ValueError(
                f"model.partial_rotary_factor = {self.partial_rotary_factor} of the"
                f" head width {head_dim} is {width} coordinates. An even number from 2"
                f" to {head_dim} can be rotated."
            )

    @property
    def rotated_dim(self) -> int:
        """How many coordinates of a head are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class MtpDecoderConfig(DecoderConfig):
    """A decoder that may have layers after its last, which predict further tokens.

    Attributes:
        most_depths: how many such layers files of the architecture may have; None for
            any number.
        mtp: these layers.
    """

    most_depths: ClassVar[int | None] = None

    mtp: MtpConfig = field(default_factory=MtpConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        depths = self.mtp.depths
        most = self.most_depths
        if most is not None and depths > most:
            raise ValueError(
                f"model.mtp.depths = {depths} must be at most {most}, as in files of"
                " this architecture."
            )

    @property
    def further_tokens(self) -> MtpConfig:
        """The layers that predict further tokens."""
        return self.mtp


@dataclass(frozen=True)
class GroupedDecoderConfig(SparseDecoderConfig):
    """A decoder whose routers score experts by a sigmoid, have a bias, and choose among
    groups of experts (arXiv:2412.19437, section 2.1.2).

    Attributes:
        num_groups: groups of experts.
        groups_per_token: from how many of them a token chooses.
        gate_scale: factor of the gates.
        shared_experts: experts that all tokens are routed to.
        bias: of routers: `frozen`, or `by_load`: its gradient is 1 for experts that
            more tokens than the mean chose and -1 for others, so that the optimizer
            evens the load out without a loss (Wang et al. 2024, arXiv:2408.15664). The
            norm that `optimizer.max_grad_norm` bounds leaves them out.
    """

    num_groups: Count = 1
    groups_per_token: Count = 1
    gate_scale: Positive = 1.0
    shared_experts: Count = 1
    bias: Literal["frozen", "by_load"] = field(default="frozen", metadata=OF_RUN)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A group is scored by its best two experts, so it has at least two.
        members = self.experts.num_experts // self.num_groups
        if (
            self.experts.num_experts % self.num_groups
            or self.num_groups > 1 > members - 1
        ):
            raise ValueError(
                f"model.num_groups = {self.num_groups} must divide"
                f" model.experts.num_experts = {self.experts.num_experts} into groups"
                " of at least two."
            )
        groups = self.groups_per_token
        chosen = self.experts.experts_per_token
        if groups > self.num_groups or chosen > groups * members:
            raise ValueError(
                f"model.groups_per_token = {groups} must be at most model.num_groups ="
                f" {self.num_groups}, and model.experts.experts_per_token = {chosen} at"
                f" most {groups} groups of {members}."
            )

    @property
    def balances_by_bias(self) -> bool:
        """Whether the biases of routers follow the load of their experts."""
        return self.bias == "by_load"

    @property
    def routing(self) -> Routing:
        """How the routers choose experts."""
        return Routing(
            scoring="sigmoid",
            bias=self.bias,
            num_groups=self.num_groups,
            groups_per_token=self.groups_per_token,
            gate_scale=self.gate_scale,
        )

    @property
    def shared_dim(self) -> int:
        """Inner width of the shared experts together."""
        return self.shared_experts * self.experts.intermediate_dim


@dataclass(frozen=True)
class LatentDecoderConfig(GroupedDecoderConfig):
    """A decoder with multi-head latent attention.

    Attributes:
        latent: widths of attention; they give `attention.head_dim`.
    """

    # Each head has keys and values of its own: they are made of one narrow vector.
    num_heads: Count = 4
    num_kv_heads: Count = 4
    experts: ExpertsConfig = field(
        # The routers of these models multiply in float32.
        default_factory=lambda: ExpertsConfig(router_dtype="float32")
    )
    latent: LatentConfig = field(default_factory=LatentConfig)

    def _check_heads(self) -> None:
        if self.attention.head_dim not in (None, self.head_dim):
            raise ValueError(
                "Leave model.attention.head_dim out: model.latent gives the width of"
                " heads."
            )
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"model.num_kv_heads must be model.num_heads = {self.num_heads}, got"
                f" {self.num_kv_heads}."
            )

    @property
    def head_dim(self) -> int:
        """Width of a head of queries and keys."""
        return self.latent.plain_dim + self.latent.rotary_dim


def check_layer_numbers(key: str, numbers: Sequence[int], num_layers: int) -> None:
    """Refuses numbers that no layer has, and numbers that are not in order."""
    if list(numbers) != sorted({*numbers} & {*range(num_layers)}):
        raise ValueError(
            f"{key} = {list(numbers)} must be from 0 to {num_layers - 1}, in increasing"
            " order."
        )
