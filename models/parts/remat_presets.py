"""Remat policies of decoders: named ones, which keep values inside a layer, and what is
refused.
"""

from collections.abc import Sequence

from stacked_remat import ScanCheckpointPolicy
from stacked_remat.training import ConfigError, RematPresets

_ATTENTION = ("attention_output", "attention_lse")
_PROJECTIONS = ("query", "key", "value", *_ATTENTION, "gate")
ATTENTION_NAMES = ("query", "key", "value", *_ATTENTION)
"""The names in attention."""
_ROUTER = ("router_logits", "router_probs", "router_choices", "router_gates")
_EXPERTS = (*_ROUTER, "expert_internals", "expert_output")


def names_in_layer(
    mixer: Sequence[str], *, is_sparse: bool, has_halves: bool
) -> tuple[str, ...]:
    """The names that `checkpoint_name` gives to values inside a layer.

    `mixer` has those in its mixer; `has_halves` if its MLP or experts read what that
    has added.
    """
    between = ("residual",) if has_halves else ()
    return *mixer, *between, *(_EXPERTS if is_sparse else ("mlp_internals",))


def decoder_remat_presets(names: Sequence[str]) -> RematPresets:
    """The presets of a decoder whose layers have these names.

    The cost of each beside its base policy, in bytes a token and layer, with
    activations of `b` bytes, `H` query heads and `K` key-value heads of width `d`, an
    embedding of width `E`, and an inner width `F`, that of an MLP or of all chosen
    experts together:

    | preset | kept besides carries | where | not recomputed |
    |---|---|---|---|
    | `attention_offloaded` | `H * (d * b + 4)` | host, all layers | attention |
    | `attention_saved` | the same | device, all layers | attention |
    | `projections_saved` | `2 * (H + K) * d * b + 4 * H` | the same | and projections |
    | `products_saved` | that and `(E + 2 * F) * b` | the same | and other products |
    | `nested_attention_saved` | `H * (d * b + 4)` | device, one segment | attention |

    Of `nested_attention_saved` attention is not recomputed in the reverse pass; of
    `projections_saved` attention's three projections are not, and of `products_saved`
    the other products that are read.

    `products_saved` recomputes norms, rotations, activations, the router's choice, and
    the products of adapters; and experts that are divided over devices, of which
    nothing is kept. It keeps less than `remat: false`, which keeps what each of their
    derivatives reads. Of experts it also keeps the router's logits, and a few integers
    a choice.

    Of gated attention `projections_saved` keeps the gate too, and of linear attention
    `query`, `key`, `value` and `gate`, as wide as they are; what it computes of them is
    computed again.

    docs/long-context.md has the cost at 65,536 tokens.
    """
    # The probabilities come from the logits, and nothing reads the output.
    products = [name for name in names if name not in ("router_probs", "expert_output")]
    # Some attention alone has a gate
    projections = [name for name in _PROJECTIONS if name in names]
    return {
        "attention_saved": ScanCheckpointPolicy(save_block_internals=_ATTENTION),
        "attention_offloaded": ScanCheckpointPolicy(offload_block_internals=_ATTENTION),
        "projections_saved": ScanCheckpointPolicy(save_block_internals=projections),
        "products_saved": ScanCheckpointPolicy(save_block_internals=products),
        "nested_attention_saved": ScanCheckpointPolicy(
            nested=True, save_block_internals=_ATTENTION
        ),
    }


def check_remat_names(
    valid: Sequence[str], policy: ScanCheckpointPolicy | None, key: str = "remat"
) -> None:
    """Raises ConfigError for a policy that saves or offloads names that no layer of the
    model has.
    """
    if policy is None:
        return
    known = {*valid, *policy.places}
    for field in ("save_block_internals", "offload_block_internals"):
        names = getattr(policy, field)
        unknown = (
            [name for name in names if name not in known]
            if isinstance(names, tuple)
            else []
        )
        if unknown:
            raise ConfigError(
                f"{key}.{field} has {unknown[0]!r}, which names nothing in a layer of"
                " this model. Valid:"
                f" {', '.join(valid) or 'none (with model.tiles nothing has a name)'}."
            )
