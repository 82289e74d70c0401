"""Named remat policies of decoders, which keep values inside a layer, for the `remat` config entry."""

from collections.abc import Mapping
from types import MappingProxyType

from stacked_remat import ScanCheckpointPolicy

_ATTENTION = ("attention_output", "attention_lse")
ATTENTION_NAMES = ("query", "key", "value", *_ATTENTION)
EXPERTS_NAMES = ("router_probs", "router_choices", "router_gates", "expert_output")
"""The names that `checkpoint_name` gives to values inside the two halves of a layer."""

DECODER_REMAT_PRESETS: Mapping[str, ScanCheckpointPolicy] = MappingProxyType(
    {
        "attention_saved": ScanCheckpointPolicy(save_block_internals=_ATTENTION),
        "attention_offloaded": ScanCheckpointPolicy(offload_block_internals=_ATTENTION),
        "projections_saved": ScanCheckpointPolicy(save_block_internals=ATTENTION_NAMES),
        "nested_attention_saved": ScanCheckpointPolicy(nested=True, save_block_internals=_ATTENTION),
    }
)
"""The cost of each beside its base policy, in bytes a token and layer, with activations of `b` bytes, `H`
query heads and `K` key-value heads of width `d`:

| preset | kept besides carries | where | not recomputed |
|---|---|---|---|
| `attention_saved` | `H * (d * b + 4)` | device, all layers | attention |
| `attention_offloaded` | the same | host, all layers | the same |
| `projections_saved` | `(2 * H + 2 * K) * d * b + 4 * H` | device, all layers | and its three projections |
| `nested_attention_saved` | `H * (d * b + 4)` | device, one segment | attention, in the reverse pass |

cuDNN's kernel keeps residuals that have no name (there is no `attention_lse`), so attention is recomputed
anyway: with it these policies only cost memory, and the nested one, which replays layers to fill it, also
arithmetic. Choose `attention.backend: blockwise` with them. docs/long-context.md has the cost at 65,536
tokens.
"""
