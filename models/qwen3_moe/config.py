"""The hyperparameters of a Qwen3 mixture-of-experts decoder, and the named axes they define."""

from dataclasses import dataclass, field
from typing import Literal

from haliax import Axis

from models.lm import LmConfig


@dataclass(frozen=True)
class ExpertsConfig:
    """The feed-forward half of a layer: a router that sends every token to a few experts.

    Attributes:
        num_experts: experts in a layer.
        experts_per_token: how many of them each token visits.
        intermediate_dim: inner width of one expert.
        norm_topk_prob: whether the weights of the chosen experts are rescaled to sum to one.
        load_balance_weight: weight in the training loss of the load-balance loss, averaged over layers.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    intermediate_dim: int = 128
    norm_topk_prob: bool = True
    load_balance_weight: float = 0.001

    def __post_init__(self) -> None:
        _require_positive(
            "model.experts",
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            intermediate_dim=self.intermediate_dim,
        )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts.experts_per_token = {self.experts_per_token} is more than "
                f"model.experts.num_experts = {self.num_experts}: a token can't visit more experts than "
                f"there are. Lower the one or raise the other."
            )
        if self.load_balance_weight < 0:
            raise ValueError(
                f"model.experts.load_balance_weight must not be negative, got {self.load_balance_weight}; "
                f"0 turns the loss off."
            )


@LmConfig.register_subclass("qwen3_moe")
@dataclass(frozen=True)
class Qwen3MoeConfig(LmConfig):
    """A Qwen3 MoE decoder in which every layer is sparse.

    Attributes:
        hidden_dim: width of the residual stream.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; each serves `num_heads / num_kv_heads` query heads.
        head_dim: width of a head; `hidden_dim / num_heads` if not given.
        experts: the router and its experts.
        rope_theta: base of the rotary embedding's wavelengths.
        rms_norm_eps: added to the mean square in every norm.
        initializer_range: standard deviation of the initial weights.
        tie_word_embeddings: whether the head reuses the embedding's weights.
        attention_backend: kernel of the attention: `auto`, or one of `stacked_remat.ops.causal_attention`.
        compute_dtype: dtype of activations; parameters stay in float32 and are cast a layer at a time.
    """

    hidden_dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    attention_backend: Literal["auto", "cudnn", "blockwise", "exact"] = "auto"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _require_positive(
            "model",
            hidden_dim=self.hidden_dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            rope_theta=self.rope_theta,
            rms_norm_eps=self.rms_norm_eps,
            initializer_range=self.initializer_range,
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads = {self.num_heads} must be a multiple of model.num_kv_heads = "
                f"{self.num_kv_heads}, because every key-value head serves the same number of query heads."
            )
        if self.head_dim is None and self.hidden_dim % self.num_heads:
            raise ValueError(
                f"model.hidden_dim = {self.hidden_dim} is not divisible by model.num_heads = "
                f"{self.num_heads}; change one of them, or give model.head_dim."
            )
        if self.HeadDim.size < 2 or self.HeadDim.size % 2:
            given = "model.head_dim" if self.head_dim is not None else "model.hidden_dim / model.num_heads"
            raise ValueError(
                f"{given} = {self.HeadDim.size} must be even and at least 2, because the rotary embedding "
                f"turns pairs of coordinates."
            )
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f"model.compute_dtype = {self.compute_dtype!r} is not one of 'float32', 'bfloat16'."
            )

    @property
    def Embed(self) -> Axis:
        """The residual stream."""
        return Axis("embed", self.hidden_dim)

    @property
    def Layers(self) -> Axis:
        """The stack of decoder layers."""
        return Axis("layers", self.num_layers)

    @property
    def KVHeads(self) -> Axis:
        """Key and value heads."""
        return Axis("kv_heads", self.num_kv_heads)

    @property
    def HeadsPerKV(self) -> Axis:
        """Query heads that share one key-value head; (KVHeads, HeadsPerKV) are all query heads, in order."""
        return Axis("heads_per_kv", self.num_heads // self.num_kv_heads)

    @property
    def HeadDim(self) -> Axis:
        """Coordinates of one head."""
        return Axis("head_dim", self.hidden_dim // self.num_heads if self.head_dim is None else self.head_dim)

    @property
    def Experts(self) -> Axis:
        """Experts of one layer."""
        return Axis("experts", self.experts.num_experts)

    @property
    def ExpertDim(self) -> Axis:
        """Inner width of one expert."""
        return Axis("expert_dim", self.experts.intermediate_dim)


def _require_positive(where: str, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{where}.{name} must be positive, got {value}.")
