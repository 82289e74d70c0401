"""The config of gpt-oss decoders."""

from dataclasses import dataclass
from typing import ClassVar

from models.lm import LmConfig
from models.transformer.config import SparseDecoderConfig


@LmConfig.register_subclass("gpt_oss")
@dataclass(frozen=True)
class GptOssConfig(SparseDecoderConfig):
    """A gpt-oss decoder: attention with sinks, and experts with biases and a clamped SwiGLU in every layer.

    In the published models every second layer, from the first on, has a window of 128 positions, and
    attention has biases.
    """

    qk_norm: ClassVar[bool] = False
    sinks: ClassVar[bool] = True
    mlp_bias: ClassVar[bool] = True
    swiglu_limit: ClassVar[float | None] = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlp_dim is not None:
            raise ValueError(
                f"model.mlp_dim = {self.mlp_dim} has no effect: every layer of a gpt_oss has experts, whose "
                f"width is model.experts.intermediate_dim."
            )
        if self.experts.dense_layers:
            raise ValueError(
                f"model.experts.dense_layers = {list(self.experts.dense_layers)}: every layer of a gpt_oss "
                f"has experts. Leave it out."
            )
        if not self.experts.norm_topk_prob:
            raise ValueError(
                "model.experts.norm_topk_prob is false: the weights of the experts that a token of a gpt_oss "
                "chooses sum to one. Leave it out."
            )
