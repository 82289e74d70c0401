"""Operations of long-context models: attention, rotary embedding, cross entropy, grouped matrix products."""

from .attention import causal_attention as causal_attention
from .cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from .grouped_experts import grouped_experts as grouped_experts
from .rotary import RotaryTable as RotaryTable, apply_rotary as apply_rotary, rotary_table as rotary_table
