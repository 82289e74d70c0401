"""Operations of long-context models: attention, cross entropy, grouped matrix products."""

from .attention import causal_attention as causal_attention
from .cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from .grouped_experts import grouped_experts as grouped_experts
