# %% [markdown]
# # The sharpest direction of a deep network
#
# The largest eigenvalue of the loss's Hessian bounds the learning rate: near a minimum
# gradient descent diverges above 2 divided by it. Lanczos' method needs products of the
# Hessian with vectors alone, and `jax.jvp` of `jax.grad` gives them under every policy.

# %%
import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
from matplotlib.figure import Figure

from stacked_remat import Stacked, memory

DEPTH, WIDTH = 96, 24


class Block(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(x @ self.weight) / DEPTH**0.5


network = Stacked.init(DEPTH, Block)

# %% [markdown]
# ## What a product takes
#
# Forward mode goes through the loops of the backward pass, so a product keeps what the
# policy keeps, and the tangents of that. With 16,384 rows of 256 numbers a carry is 16
# MiB; the products are compiled, not run.


# %%
def loss(blocks, x, y, remat):
    return jnp.mean((blocks.fold(x, remat=remat) - y) ** 2)


def product(blocks, direction, x, y, remat="nested"):
    """The Hessian of the loss times a direction."""
    return jax.jvp(
        lambda blocks: jax.grad(loss)(blocks, x, y, remat), (blocks,), (direction,)
    )[1]


blocks = eqx.filter_eval_shape(network, jnp.zeros((DEPTH, 256, 256)))
rows = jax.ShapeDtypeStruct((16_384, 256), jnp.float32)
for remat in (False, True, "nested"):
    report = memory.report(
        lambda *args, remat=remat: product(*args, remat), blocks, blocks, rows, rows
    )
    print(f"{remat!s:7} {report.temporaries / 2**30:6.2f} GiB")

# %% [markdown]
# ## Lanczos
#
# Thirty products span a space in which the Hessian is a small matrix. The largest
# eigenvalue of that matrix comes close to the Hessian's own after a few of them.


# %%
@jax.jit
def top_eigenvalue(blocks, x, y, rounds=30):
    """The largest eigenvalue of the Hessian, and its direction."""
    flat, tree_of = jax.flatten_util.ravel_pytree(blocks)

    def times(vector):
        return jax.flatten_util.ravel_pytree(product(blocks, tree_of(vector), x, y))[0]

    def extend(number, basis):
        multiplied = times(basis[number])
        for _ in range(2):  # a second time for what rounding left
            multiplied -= (basis @ multiplied) @ basis
        return basis.at[number + 1].set(multiplied / jnp.linalg.norm(multiplied))

    basis = jnp.zeros((rounds, flat.size)).at[0].set(flat / jnp.linalg.norm(flat))
    basis = jax.lax.fori_loop(0, rounds - 1, extend, basis)
    values, vectors = jnp.linalg.eigh(basis @ jax.lax.map(times, basis).T)
    return values[-1], tree_of(vectors[:, -1] @ basis)


keys = jax.random.split(jax.random.key(0), 3)
blocks = network(jax.random.normal(keys[0], (DEPTH, WIDTH, WIDTH)) / WIDTH**0.5)
x, y = (jax.random.normal(key, (64, WIDTH)) for key in keys[1:])
sharpness, direction = top_eigenvalue(blocks, x, y)
print(
    f"largest eigenvalue {sharpness:.4f}, so a learning rate below {2 / sharpness:.2f}"
)

# %% [markdown]
# It is the second derivative of the loss along the direction.

# %%
multiplied = product(blocks, direction, x, y).stacked.weight
error = jnp.linalg.norm(multiplied - sharpness * direction.stacked.weight)
print(f"|Hv - av| / a = {error / sharpness:.1e}")


def along(step):
    return loss(
        jax.tree.map(lambda leaf, v: leaf + step * v, blocks, direction), x, y, "nested"
    )


second = jax.jvp(jax.grad(along), (0.0,), (1.0,))[1]
print(f"second derivative of the loss along it {second:.4f}")
assert error < 1e-2 * sharpness and jnp.allclose(second, sharpness, rtol=1e-3)
value, slope = jax.value_and_grad(along)(0.0)
distance = jnp.linspace(-4, 4, 33)
parabola = value + slope * distance + sharpness * distance**2 / 2
figure = Figure((6, 2.5), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="step along the direction", ylabel="loss")
axes.plot(distance, jax.lax.map(along, distance), label="loss")
axes.plot(distance, parabola, "--", label="parabola with this eigenvalue")
_ = axes.legend()
