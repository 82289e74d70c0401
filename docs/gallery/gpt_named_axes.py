# %% [markdown]
# # A GPT with named axes
#
# How to stack layers with Haliax's named axes: the model of [a GPT in plain
# Equinox](gpt_equinox.py) with names for dimensions, so without `reshape`, `transpose`
# and `vmap`. The layers are an axis like any other.

# %%
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import Stacked
from stacked_remat.ops import causal_attention

Layers, Vocab, Embed, Hidden = hax.make_axes(layers=12, vocab=256, embed=32, hidden=128)
Heads, HeadDim, Batch, Position = hax.make_axes(
    heads=4, head_dim=8, batch=16, position=32
)

# %% [markdown]
# A block says which axes a product contracts and which it makes. Axes that it does not
# mention, such as the batch, go through.


# %%
class Block(eqx.Module):
    qkv: hax.nn.Linear
    out: hax.nn.Linear
    up: hax.nn.Linear
    down: hax.nn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 4)
        heads, small = (Heads, HeadDim), Layers.size**-0.5
        return Block(
            hax.nn.Linear.init(
                Embed, (hax.Axis("qkv", 3), *heads), key=keys[0], use_bias=False
            ),
            hax.nn.Linear.init(
                heads, Embed, key=keys[1], use_bias=False, init_scale=small
            ),
            hax.nn.Linear.init(Embed, Hidden, key=keys[2], use_bias=False),
            hax.nn.Linear.init(
                Hidden, Embed, key=keys[3], use_bias=False, init_scale=small
            ),
        )

    def __call__(self, x):
        query, key, value = self.qkv(hax.nn.standardize(x, Embed)).unbind("qkv")
        x = x + self.out(
            causal_attention(query, key, value, "position", Heads, HeadDim)
        )
        return x + self.down(hax.nn.gelu(self.up(hax.nn.standardize(x, Embed))))


blocks = Stacked.init(Layers, Block, remat="nested")(
    key=jax.random.split(jax.random.key(0), Layers.size)
)
print("a weight of the stack:", [axis.name for axis in blocks.stacked.qkv.weight.axes])

# %% [markdown]
# One call runs the whole batch through the stack.


# %%
class Gpt(eqx.Module):
    embedding: hax.NamedArray
    positions: hax.NamedArray
    blocks: Stacked[Block]

    def __call__(self, tokens):
        x = self.embedding.take(Vocab, tokens) + self.positions
        x = hax.nn.standardize(self.blocks.fold(x), Embed)
        return hax.dot(x, self.embedding, axis=Embed)


@eqx.filter_jit
def update(model, state, tokens, targets):
    def loss(model):
        wanted = hax.nn.one_hot(targets, Vocab)
        return hax.nn.cross_entropy_loss(model(tokens), Vocab, wanted).scalar()

    value, gradient = eqx.filter_value_and_grad(loss)(model)
    updates, state = optimizer.update(gradient, state, model)
    return eqx.apply_updates(model, updates), state, value


first, second = jax.random.split(jax.random.key(1))
embedding = hax.random.normal(first, (Vocab, Embed)) / Embed.size**0.5
model = Gpt(embedding, 0.1 * hax.random.normal(second, (Position, Embed)), blocks)
optimizer = optax.adam(5e-3)
state = optimizer.init(eqx.filter(model, eqx.is_array))

# %% [markdown]
# The text counts, and each row begins at a number of its own. That first number can't
# be guessed, the next ones can.

# %%
text = jnp.asarray(list("".join(f"{n:02}, " for n in range(100)).encode()))
rows = text[4 * 5 * jnp.arange(Batch.size)[:, None] + jnp.arange(Position.size + 1)]
tokens, targets = (
    hax.named(part, (Batch, Position)) for part in (rows[:, :-1], rows[:, 1:])
)
for number in range(161):
    model, state, value = update(model, state, tokens, targets)
    if number % 40 == 0:
        print(f"step {number:3}  loss {value:.3f} nats a byte")

logits = eqx.filter_jit(model)(tokens)
print("logits:", [axis.name for axis in logits.axes])
guessed = hax.argmax(logits, Vocab)["batch", 3].array
print("text:   ", bytes(rows[3, 1:].tolist()).decode())
print("guessed:", bytes(guessed.tolist()).decode())
wanted = hax.nn.one_hot(targets, Vocab)
by_row = hax.nn.cross_entropy_loss(logits, Vocab, wanted, reduction=None)
figure = Figure((7, 2), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="text of row 3", ylabel="loss of all rows (nats)")
axes.set_xticks(range(Position.size), bytes(rows[3, 1:].tolist()).decode())
_ = axes.bar(range(Position.size), hax.mean(by_row, Batch).array)
