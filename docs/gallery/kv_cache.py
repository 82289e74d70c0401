# %% [markdown]
# # A key-value cache
#
# How to generate with a cache: each layer reads and writes its own part of it. `scan`
# splits the cache over the layers on the way in and stacks the layers' parts on the way
# out, so the whole stack takes one cache and returns one; a stack of several kinds
# takes [one for each](../patterns.md). The reference models [generate
# text](../generate.md) so.

# %%
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp

from stacked_remat import Stacked, memory
from stacked_remat.ops import causal_attention, decode_attention

Layers, Embed, Heads, HeadDim = hax.make_axes(layers=8, embed=64, heads=4, head_dim=16)
Position = hax.Axis("position", 128)
Slot = Position.alias("slot")

# %% [markdown]
# One block does both: a whole text at once, and one token with the cache.


# %%
class Attention(eqx.Module):
    qkv: hax.nn.Linear
    out: hax.nn.Linear

    @staticmethod
    def init(*, key):
        first, second = jax.random.split(key)
        return Attention(
            hax.nn.Linear.init(
                Embed, (hax.Axis("qkv", 3), Heads, HeadDim), key=first, use_bias=False
            ),
            hax.nn.Linear.init(
                (Heads, HeadDim), Embed, key=second, use_bias=False, init_scale=0.1
            ),
        )

    def __call__(self, x):
        query, key, value = self.qkv(x).unbind("qkv")
        return x + self.out(
            causal_attention(query, key, value, "position", Heads, HeadDim)
        )

    def decode(self, x, cache, position):
        query, key, value = self.qkv(x).unbind("qkv")
        cache = {
            "key": cache["key"].at[Slot, position].set(key),
            "value": cache["value"].at[Slot, position].set(value),
        }
        # One query, with an axis of its own.
        query, at = (
            query.broadcast_axis(hax.Axis("query", 1)),
            hax.named(position[None], "query"),
        )
        seen = decode_attention(
            query, cache["key"], cache["value"], Slot, HeadDim, positions=at
        )
        return x + self.out(seen["query", 0]), cache


blocks = Stacked.init(Layers, Attention)(
    key=jax.random.split(jax.random.key(0), Layers.size)
)


# %% [markdown]
# `scan_via` calls another method of the block. The cache is donated, so XLA writes into
# it in place.


# %%
@eqx.filter_jit(donate="all-except-first")
def decode(blocks, x, cache, position):
    return blocks.scan_via(Attention.decode)(x, cache, position)


tokens = hax.random.normal(jax.random.key(1), (Position, Embed))
cache = {name: hax.zeros((Layers, Slot, Heads, HeadDim)) for name in ("key", "value")}
print("cache:", ", ".join(f"{axis.name} {axis.size}" for axis in cache["key"].axes))

outputs = []
for position in range(Position.size):
    y, cache = decode(
        blocks, tokens["position", position], cache, jnp.asarray(position)
    )
    outputs.append(y)

# %% [markdown]
# One token after the other gives what the whole text gives:

# %%
whole = eqx.filter_jit(lambda blocks, x: blocks.fold(x))(blocks, tokens)
one_by_one = hax.stack(Position, outputs)
print(f"largest difference: {hax.max(hax.abs(whole - one_by_one)).item():.1e}")
assert jnp.allclose(whole.array, one_by_one.rearrange(whole.axes).array, atol=1e-4)

# %% [markdown]
# Without a cache, every new token costs the products of the whole text again:

# %%
again = memory.report(lambda blocks, x: blocks.fold(x), blocks, tokens).flops.matmul
cached = memory.report(
    decode.__wrapped__, blocks, tokens["position", 0], cache, jnp.asarray(0)
).flops.matmul
print(
    f"a token after 127 others: {again / 1e6:.1f} MFLOP without the cache,"
    f" {cached / 1e6:.2f} MFLOP with it"
)
