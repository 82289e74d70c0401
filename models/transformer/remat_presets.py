"""Remat policies that name what is inside a Qwen3 layer, for `remat:` in a config."""

from collections.abc import Mapping
from types import MappingProxyType

from stacked_remat import ScanCheckpointPolicy

_ATTENTION = ("attention_output", "attention_lse")
ATTENTION_NAMES = ("query", "key", "value", *_ATTENTION)
EXPERTS_NAMES = ("router_probs", "router_choices", "router_gates", "expert_output")
"""What `checkpoint_name` calls the values inside a layer, in its two halves."""

DECODER_REMAT_PRESETS: Mapping[str, ScanCheckpointPolicy] = MappingProxyType(
    {
        "attention_saved": ScanCheckpointPolicy(save_block_internals=_ATTENTION),
        "attention_offloaded": ScanCheckpointPolicy(offload_block_internals=_ATTENTION),
        "projections_saved": ScanCheckpointPolicy(save_block_internals=ATTENTION_NAMES),
        "nested_attention_saved": ScanCheckpointPolicy(nested=True, save_block_internals=_ATTENTION),
    }
)
"""By name. What each costs beside the policy it is based on, in bytes a token and layer, with activations of
`b` bytes, `H` query heads and `K` key-value heads of width `d`:

| preset | kept besides carries | where | not computed again |
|---|---|---|---|
| `attention_saved` | `H * (d * b + 4)` | device, all layers | attention |
| `attention_offloaded` | the same | host, all layers | the same |
| `projections_saved` | `(2 * H + 2 * K) * d * b + 4 * H` | device, all layers | and its three projections |
| `nested_attention_saved` | `H * (d * b + 4)` | device, one segment | attention, in the segment's walk |

cuDNN's kernel keeps numbers of its own that have no name (there is no `attention_lse`): with it attention is
computed again all the same: these policies cost memory, and the nested one, which replays layers to fill
it, arithmetic too. Choose `attention.backend: blockwise` with them. What they come to at 65,536 tokens is in
docs/long-context.md.
"""
