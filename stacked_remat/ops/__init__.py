"""Operations of long-context models: attention, rotary embedding, loss, experts."""

from ._backends import (
    UnsupportedCallError as UnsupportedCallError,
    backends_taken as backends_taken,
)
from ._grouped_linear import (
    ComposedLinear as ComposedLinear,
    ExpertLinear as ExpertLinear,
    apply_linear as apply_linear,
)
from .attention import (
    causal_attention as causal_attention,
    decode_attention as decode_attention,
)
from .cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from .grouped_experts import (
    expert_backend as expert_backend,
    grouped_experts as grouped_experts,
)
from .linear_attention import (
    linear_attention as linear_attention,
    linear_attention_step as linear_attention_step,
)
from .per_device import (
    mesh_axes as mesh_axes,
    per_device as per_device,
    unmapped as unmapped,
)
from .rotary import (
    DefaultRotary as DefaultRotary,
    LinearRotary as LinearRotary,
    Llama3Rotary as Llama3Rotary,
    RotaryScaling as RotaryScaling,
    RotaryTable as RotaryTable,
    YarnRotary as YarnRotary,
    apply_rotary as apply_rotary,
    rotary_from_hf as rotary_from_hf,
    rotary_table as rotary_table,
    rotary_to_hf as rotary_to_hf,
)
from .short_convolution import (
    short_convolution as short_convolution,
    short_convolution_step as short_convolution_step,
)
from .softcap import soft_capped as soft_capped
