"""Multi-head latent attention: keys and values are projected from a narrow vector per
token.
"""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax import Axis, NamedArray
from jaxtyping import DTypeLike, PRNGKeyArray

from models.parts.attention import CausalAttention, named_heads
from models.parts.cache import SLOT_AXIS, Kept, num_slots
from models.parts.config import DecoderConfig
from models.parts.linear import linear
from models.parts.norms import rms_norm
from models.parts.rotary import RotaryEmbedding
from models.parts.sections import LatentConfig, RotaryConfig
from models.parts.tokens import Tokens
from stacked_remat.lora import merge_lora
from stacked_remat.ops import decode_attention

# The norms of latents have an epsilon of their own, whatever that of other norms.
_EPS = 1e-6


class LatentAttention(CausalAttention):
    """Multi-head latent attention (Liu et al. 2024, arXiv:2405.04434, section 2.1).

    The last coordinates of a head are rotated, unless there is no rotary embedding, and
    those of keys are shared by all heads. Names for remat policies are those of
    `Attention`. The cache keeps the latents: `key_value_rank + rotary_dim` numbers a
    token, whatever the number of heads.
    """

    q_proj: hnn.Linear | None
    q_a_proj: hnn.Linear | None
    q_a_norm: hnn.RmsNorm | None
    q_b_proj: hnn.Linear | None
    kv_a_proj: hnn.Linear
    kv_a_norm: hnn.RmsNorm
    kv_b_proj: hnn.Linear
    o_proj: hnn.Linear
    gate_proj: None
    sinks: None
    latent: LatentConfig = eqx.field(static=True)
    KVHeads: Axis = eqx.field(static=True)
    HeadDim: Axis = eqx.field(static=True)
    rotary: RotaryEmbedding | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    chunk: None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    softcap: None = eqx.field(static=True)
    backend: str = eqx.field(static=True)
    tiles: int = eqx.field(static=True)

    @staticmethod
    def init(
        config: DecoderConfig,
        latent: LatentConfig,
        *,
        rotary: RotaryConfig | None,
        window: int | None = None,
        scale: float | None = None,
        key: PRNGKeyArray,
    ) -> "LatentAttention":
        """Makes the projections from `key`; arguments are as of `Attention.init`."""
        keys = jax.random.split(key, 5)
        Embed = config.Embed
        Heads = config.KVHeads
        HeadDim = config.HeadDim
        bias = config.attention.bias
        Latent = Axis("latent", latent.key_value_rank)
        # The key that all heads share is projected with the narrow vector, by one map.
        Joint = Latent.resize(latent.key_value_rank + latent.rotary_dim)
        Value = HeadDim.resize(latent.value_dim)
        Rotated = HeadDim.resize(latent.rotary_dim)
        Both = HeadDim.resize(latent.plain_dim + latent.value_dim)
        q_proj = q_a_proj = q_a_norm = q_b_proj = None
        if latent.query_rank is None:
            # Without a bias, whatever the config: so it is in transformers.
            q_proj = linear(config, Embed, (Heads, HeadDim), key=keys[0])
        else:
            Query = Axis("query_latent", latent.query_rank)
            q_a_proj = linear(config, Embed, Query, bias=bias, key=keys[0])
            q_a_norm = rms_norm(Query, _EPS)
            q_b_proj = linear(config, Query, (Heads, HeadDim), key=keys[1])
        return LatentAttention(
            q_proj=q_proj,
            q_a_proj=q_a_proj,
            q_a_norm=q_a_norm,
            q_b_proj=q_b_proj,
            kv_a_proj=linear(config, Embed, Joint, bias=bias, key=keys[2]),
            kv_a_norm=rms_norm(Latent, _EPS),
            kv_b_proj=linear(config, Latent, (Heads, Both), key=keys[3]),
            o_proj=linear(config, (Heads, Value), Embed, bias=bias, key=keys[4]),
            gate_proj=None,
            sinks=None,
            latent=latent,
            KVHeads=Heads,
            HeadDim=HeadDim,
            rotary=rotary and RotaryEmbedding(rotary, Rotated, latent.interleaved),
            window=window,
            chunk=None,
            scale=scale,
            softcap=None,
            backend=config.attention.backend,
            tiles=min(config.tiles, Heads.size),
        )

    def heads(
        self, x: NamedArray, tokens: Tokens
    ) -> tuple[NamedArray, NamedArray, NamedArray, tuple[NamedArray, ...]]:
        """Queries, keys and values, the latter two of the latents that the cache
        keeps.
        """
        HeadDim = self.HeadDim
        plain = self.latent.plain_dim
        if self.q_proj is not None:
            query = self.q_proj(x)
        else:
            assert (
                self.q_a_proj is not None
                and self.q_a_norm is not None
                and self.q_b_proj is not None
            )
            query = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        # Before rotation, so that a policy that keeps it recomputes no product
        query = named_heads(query, "query", x)
        # c = norm(W_a x), of which head h has the keys [W_k c, r] and the values W_v c,
        # with r = rotate(W_r x) the same for all heads.
        narrow, shared = self._latents(x, tokens)
        # Keys without their shared coordinates, then values
        both = self.kv_b_proj(narrow)
        # Kernels take whole keys of each head; decoding does not use them.
        of_heads = shared.broadcast_axis(both.resolve_axis(self.KVHeads.name))
        key = hax.concatenate(HeadDim.name, [both[HeadDim.name, :plain], of_heads])
        if self.rotary is not None:
            rotated = self.rotary(query[HeadDim, plain:], tokens)
            query = hax.concatenate(HeadDim.name, [query[HeadDim, :plain], rotated])
        value = both[HeadDim.name, plain:]
        # In one buffer, which decoding reads once
        joint = [narrow, shared.rename({HeadDim.name: "latent"})]
        kept = hax.concatenate("latent", joint)
        key = named_heads(key, "key", x)
        value = named_heads(value, "value", x)
        return query, key, value, (kept,)

    def _latents(self, x: NamedArray, tokens: Tokens) -> tuple[NamedArray, NamedArray]:
        """The vector from which keys and values are projected, and the coordinates that
        keys share.
        """
        rank = self.latent.key_value_rank
        joint = self.kv_a_proj(x)
        shared = joint["latent", rank:].rename({"latent": self.HeadDim.name})
        if self.rotary is not None:
            shared = self.rotary(shared, tokens)
        # The shared coordinates are not normalised: they never pass `kv_b_proj`.
        return self.kv_a_norm(joint["latent", :rank]), shared

    def empty_cache(self, Batch: Axis, slots: int, dtype: DTypeLike) -> Kept:
        """The vector from which keys and values are projected, and the rotated
        coordinates of keys.
        """
        Joint = Axis("latent", self.latent.key_value_rank + self.latent.rotary_dim)
        Slot = Axis(SLOT_AXIS, num_slots(slots, self.window))
        return (hax.zeros((Batch, Slot, Joint), dtype),)

    def attend_to_kept(
        self, query: NamedArray, kept: Kept, positions: NamedArray
    ) -> NamedArray:
        """Attention whose keys and values are never made: their projection is applied
        to query and result.

        A score is `query . (W k) = (query W) . k`, with which all heads read the same
        k. Of the result the rotated coordinates, which are of keys alone, are dropped.
        """
        HeadDim = self.HeadDim
        plain = self.latent.plain_dim
        (joint,) = kept
        weight = merge_lora(self.kv_b_proj).weight
        to_keys = weight[HeadDim.name, :plain]
        to_values = weight[HeadDim.name, plain:]
        narrow = hax.dot(query[HeadDim, :plain], to_keys, axis=HeadDim.name)
        rotated = query[HeadDim, plain:].rename({HeadDim.name: "latent"})
        absorbed = hax.concatenate(
            "latent", [narrow, rotated.rearrange((*narrow.axes[:-1], ...))]
        )
        # All heads read one key of the width of latents, which is their value too.
        attended = decode_attention(
            absorbed,
            joint,
            joint,
            SLOT_AXIS,
            "latent",
            positions=positions,
            # Not by the width of latents
            scale=HeadDim.size**-0.5 if self.scale is None else self.scale,
        )
        values = attended["latent", : self.latent.key_value_rank]
        return hax.dot(values, to_values, axis="latent")
