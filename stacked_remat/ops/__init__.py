"""Operations of long-context models: attention, cross entropy, grouped matrix products."""

from .attention import causal_attention as causal_attention
