"""Multi-head latent attention: keys and values are projected from a narrow vector per
token.
"""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from models.decoder.attention import SLOT_AXIS, CausalAttention, named_heads
from models.decoder.config import DecoderConfig, LatentConfig, LayerSpec
from models.decoder.layers import linear
from stacked_remat.lora import merge_lora
from stacked_remat.ops import RotaryTable, apply_rotary, decode_attention

# The norms of latents have an epsilon of their own, whatever that of other norms.
_norm: Any = functools.partial(
    hnn.RmsNorm.init, eps=1e-6, use_bias=False, dtype=jnp.float32
)


class LatentAttention(CausalAttention):
    """Multi-head latent attention (Liu et al. 2024, arXiv:2405.04434, section 2.1).

    The last coordinates of a head are rotated, and those of keys are shared by all
    heads. Names for remat policies are those of `Attention`. The cache keeps the
    latents: `key_value_rank + rotary_dim` numbers a token, whatever the number of
    heads.
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
    def init(
        config: DecoderConfig, spec: LayerSpec, *, key: PRNGKeyArray
    ) -> "LatentAttention":
        """Makes the projections from `key`."""
        keys, latent = jax.random.split(key, 5), spec.latent
        assert latent is not None
        Embed, Heads, bias = config.Embed, spec.KVHeads, spec.qkv_bias
        Latent = Axis("latent", latent.key_value_rank)
        Plain, Value = spec.HeadDim.resize(latent.plain_dim), latent.value_dim
        Both, Joint = (
            Plain.resize(Plain.size + Value),
            Latent.resize(Latent.size + latent.rotary_dim),
        )
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
            o_proj=linear(
                config,
                (Heads, Plain.resize(Value)),
                Embed,
                bias=spec.output_bias,
                key=keys[4],
            ),
            sinks=None,
            spec=spec,
            config=config,
        )

    def heads(
        self, x: NamedArray, rotary: RotaryTable
    ) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Queries, keys and values `[..., KVHeads, HeadDim]`; values are narrower."""
        latent, HeadDim = self._latent, self.spec.HeadDim
        plain = latent.plain_dim
        if self.q_proj is not None:
            query = self.q_proj(x)
        else:
            assert (
                self.q_a_proj is not None
                and self.q_a_norm is not None
                and self.q_b_proj is not None
            )
            query = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        query = named_heads(query, "query", x)
        narrow, shared = self._narrow(x, rotary)
        both = self.kv_b_proj(narrow)
        rotated = shared.broadcast_axis(both.resolve_axis(self.spec.KVHeads.name))
        key = hax.concatenate(HeadDim.name, [both[HeadDim.name, :plain], rotated])
        query = hax.concatenate(
            HeadDim.name,
            [query[HeadDim, :plain], self._rotated(query[HeadDim, plain:], rotary)],
        )
        value = both[HeadDim.name, plain:]
        return query, named_heads(key, "key", x), named_heads(value, "value", x)

    def kept(
        self, x: NamedArray, rotary: RotaryTable, key: NamedArray, value: NamedArray
    ) -> tuple[NamedArray, ...]:
        """The vector from which keys and values are projected, and the rotated
        coordinates of keys.
        """
        narrow, shared = self._narrow(x, rotary)
        return (
            hax.concatenate(
                "latent", [narrow, shared.rename({self.spec.HeadDim.name: "latent"})]
            ),
        )

    def attend_to_cache(
        self, query: NamedArray, kept: tuple[NamedArray, ...], positions: NamedArray
    ) -> NamedArray:
        """Attention whose keys and values are never made: their projection is applied
        to query and result.

        A score is `query . (W k) = (query W) . k`, with which all heads read the same
        k. Of the result the rotated coordinates, which are of keys alone, are dropped.
        """
        latent, HeadDim, (joint,) = self._latent, self.spec.HeadDim, kept
        plain, rank = latent.plain_dim, latent.key_value_rank
        weight = merge_lora(self.kv_b_proj).weight
        to_keys, to_values = weight[HeadDim.name, :plain], weight[HeadDim.name, plain:]
        narrow = hax.dot(query[HeadDim, :plain], to_keys, axis=HeadDim.name)
        rotated = query[HeadDim, plain:].rename({HeadDim.name: "latent"})
        absorbed = hax.concatenate(
            "latent", [narrow, rotated.rearrange((*narrow.axes[:-1], ...))]
        )
        scale = HeadDim.size**-0.5 if self.spec.scale is None else self.spec.scale
        attended = decode_attention(
            absorbed,
            joint,
            joint,
            SLOT_AXIS,
            "latent",
            positions=positions,
            scale=scale,
        )
        return hax.dot(attended["latent", :rank], to_values, axis="latent")

    def _narrow(
        self, x: NamedArray, rotary: RotaryTable
    ) -> tuple[NamedArray, NamedArray]:
        """The vector from which keys and values are projected, and the coordinates that
        keys share.
        """
        rank = self._latent.key_value_rank
        joint = self.kv_a_proj(x)
        shared = joint["latent", rank:].rename({"latent": self.spec.HeadDim.name})
        return self.kv_a_norm(joint["latent", :rank]), self._rotated(shared, rotary)

    @property
    def _latent(self) -> LatentConfig:
        assert self.spec.latent is not None
        return self.spec.latent

    def _rotated(self, x: NamedArray, rotary: RotaryTable) -> NamedArray:
        name = self.spec.HeadDim.name
        if self._latent.interleaved:  # neighbours are the pairs
            x = hax.concatenate(name, [x[name, 0::2], x[name, 1::2]])
        return apply_rotary(x, rotary, x.resolve_axis(name))
