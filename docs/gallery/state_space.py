# %% [markdown]
# # A state space model: a parallel scan in every layer
#
# How to stack layers of a sequence model without attention. The layers of S5 (Smith et
# al. 2023) each run a linear recurrence over time, all times at once by
# `jax.lax.associative_scan`. `nested` keeps the states of one layer.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import Stacked, memory

TIME, WIDTH, STATES = 64, 16, 16


class Layer(eqx.Module):
    """`x + gelu(Re(C h) + D u)` with `u = norm(x)` and `h[t] = a * h[t - 1] + B u[t]`;
    `[time, feature]`.
    """

    rate: jax.Array
    B: jax.Array
    C: jax.Array
    D: jax.Array
    norm: eqx.nn.RMSNorm

    def __init__(self, key):
        of_rate, of_b, of_c = jax.random.split(key, 3)
        largest = jnp.array([[0.3], [0.5]])  # of decay and rotation in one step
        self.rate = jax.random.uniform(
            of_rate, (2, STATES), minval=0.001, maxval=largest
        )
        self.B = jax.random.normal(of_b, (2, STATES, WIDTH)) / (2 * WIDTH) ** 0.5
        self.C = jax.random.normal(of_c, (2, WIDTH, STATES)) / (2 * STATES) ** 0.5
        self.D = jnp.ones(WIDTH)
        self.norm = eqx.nn.RMSNorm(WIDTH)

    def __call__(self, x):
        u = jax.vmap(self.norm)(x)
        B, C = (jax.lax.complex(*part) for part in (self.B, self.C))
        decay = jnp.exp(jax.lax.complex(-jnp.abs(self.rate[0]), self.rate[1]))

        def combine(earlier, later):
            return earlier[0] * later[0], later[0] * earlier[1] + later[1]

        steps = jnp.broadcast_to(decay, (x.shape[0], STATES)), u.astype(B.dtype) @ B.T
        _, h = jax.lax.associative_scan(combine, steps)
        return x + jax.nn.gelu((h @ C.T).real + self.D * u)


def speed_of(model, series):
    return model[1].fold(series[:, None] * model[0]).mean(0) @ model[2]


# %% [markdown]
# ## Training
#
# Each series is a wave in noise as large as itself. The model says how fast it is.


# %%
def series(key, count):
    of_speed, of_phase, of_noise = jax.random.split(key, 3)
    speed = jax.random.uniform(of_speed, (count,))
    phase = jax.random.uniform(of_phase, (count, 1), maxval=2 * jnp.pi)
    wave = jnp.sin(0.5 * speed[:, None] * jnp.arange(TIME) + phase)
    return wave + 0.7 * jax.random.normal(of_noise, wave.shape), speed


def loss(model, x, y):
    return jnp.mean((jax.vmap(speed_of, (None, 0))(model, x) - y) ** 2)


@eqx.filter_jit
def step(model, state, key):
    value, slope = eqx.filter_value_and_grad(loss)(model, *series(key, 64))
    updates, state = optimizer.update(slope, state)
    return eqx.apply_updates(model, updates), state, value


optimizer, keys = optax.adam(3e-3), jax.random.split(jax.random.key(0), 4)
encode, decode = jax.random.normal(jax.random.key(1), (2, WIDTH))
model = encode, Stacked.init(4, Layer, remat="nested")(keys), 0.1 * decode
state = optimizer.init(eqx.filter(model, eqx.is_array))
for number, key in enumerate(jax.random.split(jax.random.key(2), 201)):
    model, state, value = step(model, state, key)
    if number % 50 == 0:
        print(f"step {number:3}  squared error {value:.4f}")
assert value < 0.02  # always 0.5: 0.083

# %% [markdown]
# Of series that it has not seen:

# %%
x, y = series(jax.random.key(3), 256)
figure = Figure((5, 3), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="speed (radians in two steps)", ylabel="speed that the model says")
axes.plot(y, jax.vmap(speed_of, (None, 0))(model, x), ".", color="black")
_ = axes.plot([0, 1], [0, 1], "--")

# %% [markdown]
# ## What the gradient of 48 layers takes


# %%
def gradient(remat):
    return jax.grad(
        lambda layers, x: jnp.sum(
            jax.vmap(lambda one: layers.fold(one, remat=remat))(x)
        )
    )


deep = eqx.filter_eval_shape(
    Stacked.init(48, Layer), jax.random.split(jax.random.key(0), 48)
)
x = jax.ShapeDtypeStruct((128, 256, WIDTH), jnp.float32)
print(memory.compare(gradient, deep, x, candidates=[True, "nested"]))
