"""Multi-head latent attention: keys and values are projected from a narrow vector per token."""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from models.decoder.attention import CausalAttention, named_heads
from models.decoder.config import DecoderConfig, LayerSpec
from models.decoder.layers import linear
from stacked_remat.ops import RotaryTable, apply_rotary

# The norms of latents have an epsilon of their own, whatever that of other norms.
_norm: Any = functools.partial(hnn.RmsNorm.init, eps=1e-6, use_bias=False, dtype=jnp.float32)


class LatentAttention(CausalAttention):
    """Multi-head latent attention (Liu et al. 2024, arXiv:2405.04434, section 2.1).

    The last coordinates of a head are rotated, and those of keys are shared by all heads. Names for remat
    policies are those of `Attention`. The cache holds whole keys and values, and not the latents.
    """

    q_proj: hnn.Linear | None
    q_a_proj: hnn.Linear | None
    q_a_norm: hnn.RmsNorm | None
    q_b_proj: hnn.Linear | None
    kv_a_proj: hnn.Linear
    kv_a_norm: hnn.RmsNorm
    kv_b_proj: hnn.Linear
    o_proj: hnn.Linear
    sinks: None
    spec: LayerSpec = eqx.field(static=True)
    config: DecoderConfig = eqx.field(static=True)

    @staticmethod
    def init(config: DecoderConfig, spec: LayerSpec, *, key: PRNGKeyArray) -> "LatentAttention":
        """Makes the projections from `key`."""
        keys, latent = jax.random.split(key, 5), spec.latent
        assert latent is not None
        Embed, Heads, bias = config.Embed, spec.KVHeads, spec.qkv_bias
        Latent = Axis("latent", latent.key_value_rank)
        Plain, Value = spec.HeadDim.resize(latent.plain_dim), latent.value_dim
        Both, Joint = Plain.resize(Plain.size + Value), Latent.resize(Latent.size + latent.rotary_dim)
        q_proj = q_a_proj = q_a_norm = q_b_proj = None
        if latent.query_rank is None:
            q_proj = linear(config, Embed, (Heads, spec.HeadDim), key=keys[0])
        else:
            Query = Axis("query_latent", latent.query_rank)
            q_a_proj = linear(config, Embed, Query, bias=bias, key=keys[0])
            q_a_norm = _norm(Query)
            q_b_proj = linear(config, Query, (Heads, spec.HeadDim), key=keys[1])
        return LatentAttention(
            q_proj=q_proj,
            q_a_proj=q_a_proj,
            q_a_norm=q_a_norm,
            q_b_proj=q_b_proj,
            kv_a_proj=linear(config, Embed, Joint, bias=bias, key=keys[2]),
            kv_a_norm=_norm(Latent),
            kv_b_proj=linear(config, Latent, (Heads, Both), key=keys[3]),
            o_proj=linear(config, (Heads, Plain.resize(Value)), Embed, bias=spec.output_bias, key=keys[4]),
            sinks=None,
            spec=spec,
            config=config,
        )

    def heads(self, x: NamedArray, rotary: RotaryTable) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Queries, keys and values `[..., KVHeads, HeadDim]`; values end in zeros."""
        latent, HeadDim = self.spec.latent, self.spec.HeadDim
        assert latent is not None
        plain = latent.plain_dim
        if self.q_proj is not None:
            query = self.q_proj(x)
        else:
            assert self.q_a_proj is not None and self.q_a_norm is not None and self.q_b_proj is not None
            query = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        query = named_heads(query, "query", x)
        joint = self.kv_a_proj(x)
        both = self.kv_b_proj(self.kv_a_norm(joint["latent", : latent.key_value_rank]))
        shared = joint["latent", latent.key_value_rank :].rename({"latent": HeadDim.name})
        rotated = self._rotated(shared, rotary).broadcast_axis(both.resolve_axis(self.spec.KVHeads.name))
        key = hax.concatenate(HeadDim.name, [both[HeadDim.name, :plain], rotated])
        query = hax.concatenate(
            HeadDim.name, [query[HeadDim, :plain], self._rotated(query[HeadDim, plain:], rotary)]
        )
        value = both[HeadDim.name, plain:]
        padding = hax.zeros((*value.axes[:-1], HeadDim.resize(HeadDim.size - latent.value_dim)), value.dtype)
        value = hax.concatenate(HeadDim.name, [value, padding])
        return query, named_heads(key, "key", x), named_heads(value, "value", x)

    def _rotated(self, x: NamedArray, rotary: RotaryTable) -> NamedArray:
        name, latent = self.spec.HeadDim.name, self.spec.latent
        if latent is not None and latent.interleaved:  # neighbours are the pairs
            x = hax.concatenate(name, [x[name, 0::2], x[name, 1::2]])
        return apply_rotary(x, rotary, x.resolve_axis(name))
