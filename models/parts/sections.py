"""Sections of a decoder's config: the settings of its parts."""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt
from haliax import Axis
from pydantic import BeforeValidator, WithJsonSchema

from stacked_remat._messages import shown
from stacked_remat.ops import RotaryScaling, rotary_from_hf, rotary_to_hf
from stacked_remat.training.config_checks import Count, NotNegative, check_fields
from stacked_remat.training.config_sections import RecordsArguments, natural, plain

OF_RUN = MappingProxyType({"of_run": True})
"""The metadata of fields that a run decides, not the folder of its weights; null takes
the folder's value.
"""
SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"


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
    window: Count | None = None
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = (
        None
    )
    backend: Literal["auto", "cudnn", "tokamax", "splash", "blockwise", "exact"] = (
        field(default="auto", metadata=OF_RUN)
    )

    def __post_init__(self) -> None:
        check_fields("model.attention.", self)
        if self.layer_types and (SLIDING in self.layer_types) != (
            self.window is not None
        ):
            raise ValueError(
                "model.attention.window is of layers of the type sliding_attention."
                " Give both, or neither."
            )


def _scaling(raw: Any) -> Any:
    """Reads the section of a YAML file as Hugging Face's field of the same contents."""
    # From Python a scaling is given as such.
    if isinstance(raw, RotaryScaling):
        return raw
    if not isinstance(raw, dict):
        raise ValueError(
            f"model.rotary.scaling needs rope_type and its fields; got {shown(raw)}."
        )
    given = "original_max_position_embeddings"
    found = rotary_from_hf(natural(raw), max_position_embeddings=raw.get(given, 1))
    if hasattr(found, given) and given not in raw:
        raise ValueError(f"model.rotary.scaling needs {given}; got {raw!r}.")
    return found


Scaling: TypeAlias = Annotated[
    RotaryScaling, BeforeValidator(_scaling), WithJsonSchema({"type": "object"})
]
plain.register(RotaryScaling, rotary_to_hf)


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

    # The wavelengths are powers of it: with 1 all pairs would turn alike.
    theta: Annotated[float, Gt(1)] = 1_000_000.0
    scaling: Scaling | None = None
    max_position_embeddings: Count = 32_768

    def __post_init__(self) -> None:
        check_fields("model.rotary.", self)


@dataclass(frozen=True)
class TemperatureConfig(RecordsArguments):
    """Factors of queries that grow with their positions, so that the softmax of long
    contexts does not flatten (Nakanishi 2025, arXiv:2501.19399).

    That of position p is `1 + scale * log(1 + (p + 1) // floor)`.

    Attributes:
        floor: how many positions have the same factor.
        scale: how much it grows; 0 for not.
    """

    floor: Count = 8_192
    scale: float = 0.1

    def __post_init__(self) -> None:
        check_fields("model.temperature.", self)


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

    num_experts: Count = 8
    experts_per_token: Count = 2
    intermediate_dim: Count = 128
    norm_topk_prob: bool = True
    load_balance_weight: NotNegative | None = field(default=None, metadata=OF_RUN)
    z_loss_weight: NotNegative = field(default=0.0, metadata=OF_RUN)
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
        check_fields("model.experts.", self)
        if self.experts_per_token > self.num_experts:
            most = self.num_experts
            given = self.experts_per_token
            raise ValueError(
                f"model.experts.experts_per_token = {given} is more than num_experts ="
                f" {most}."
            )

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

    query_rank: Count | None = 1_536
    key_value_rank: Count = 512
    plain_dim: Count = 128
    rotary_dim: Count = 64
    value_dim: Count = 128
    interleaved: bool = True

    def __post_init__(self) -> None:
        check_fields("model.latent.", self)
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
class MtpConfig(RecordsArguments):
    """Layers after the last that predict further tokens (multi-token prediction,
    arXiv:2412.19437, section 2.2).

    Attributes:
        depths: how many tokens after the next one are predicted, each by a layer of its
            own.
        weight: factor of the mean of their cross entropies in the loss of training; 0
            leaves these layers out, so that they are neither made nor read nor
            exported. The paper has 0.3, and 0.1 at the end of training.
    """

    depths: Annotated[int, Ge(0)] = 0
    weight: NotNegative = field(default=0.0, metadata=OF_RUN)

    def __post_init__(self) -> None:
        check_fields("model.mtp.", self)

    @property
    def trained_depths(self) -> int:
        """The number of layers that a decoder has."""
        return self.depths if self.weight else 0


@dataclass(frozen=True)
class LinearAttentionConfig(RecordsArguments):
    """Sizes of layers with linear attention.

    Attributes:
        num_key_heads: heads of queries and keys.
        num_value_heads: heads of values, each with a state; a multiple of
            `num_key_heads`.
        key_dim: width of a head of queries and keys.
        value_dim: width of a head of values.
        conv_size: how many tokens the convolution of each channel reads, the newest
            included.
    """

    num_key_heads: Count = 2
    num_value_heads: Count = 4
    key_dim: Count = 32
    value_dim: Count = 32
    conv_size: Count = 4

    def __post_init__(self) -> None:
        check_fields("model.linear.", self)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"model.linear.num_value_heads = {self.num_value_heads} must be a"
                f" multiple of model.linear.num_key_heads = {self.num_key_heads}."
            )

    @property
    def KeyHeads(self) -> Axis:
        """Heads of queries and keys."""
        return Axis("key_heads", self.num_key_heads)

    @property
    def ValuesPerKey(self) -> Axis:
        """Heads of values that share a head of keys; (KeyHeads, ValuesPerKey) are all,
        in order.
        """
        return Axis("values_per_key", self.num_value_heads // self.num_key_heads)

    @property
    def KeyDim(self) -> Axis:
        """Coordinates of a head of queries and keys."""
        return Axis("key_dim", self.key_dim)

    @property
    def ValueDim(self) -> Axis:
        """Coordinates of a head of values."""
        return Axis("value_dim", self.value_dim)


@dataclass(frozen=True)
class Routing:
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
        weighs_input: whether gates are factors of what experts are given, and not of
            what they give. Experts have no biases then.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    bias: Literal["none", "frozen", "by_load"] = "none"
    num_groups: int = 1
    groups_per_token: int = 1
    gate_scale: float = 1.0
    weighs_input: bool = False
