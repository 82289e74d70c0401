# %% [markdown]
# # A neuron, fitted to a recording
#
# In the nerve cell of Hodgkin and Huxley (1952) channels for ions open and close with
# the voltage. Which conductances explain a recorded voltage? Gradient descent finds
# them through every time step, in the memory of a few states. See [long
# loops](../long-loops.md).

# %%
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure

from stacked_remat import scan, shared

DT = 0.02  # milliseconds
Time = hax.Axis("time", 1_500)
# Of sodium, potassium and leak, in millivolts
REVERSAL = jnp.array([50.0, -77.0, -54.4])


def rate(x, scale):
    """The value of x / (1 - exp(-x / scale)), with its limit at zero."""
    small = jnp.abs(x) < 1e-4
    return jnp.where(small, scale, x / -jnp.expm1(-jnp.where(small, 1.0, x) / scale))


def opening_and_closing(v):
    """Rates of the gates m, h and n, per millisecond."""
    opening = (
        0.1 * rate(v + 40, 10),
        0.07 * jnp.exp(-(v + 65) / 20),
        0.01 * rate(v + 55, 10),
    )
    closing = (
        4 * jnp.exp(-(v + 65) / 18),
        1 / (1 + jnp.exp(-(v + 35) / 10)),
        0.125 * jnp.exp(-(v + 65) / 80),
    )
    return jnp.stack(opening), jnp.stack(closing)


def step(cell, current, conductances):
    """The cell after one step, and its voltage. Gates are solved exactly for a constant
    voltage.
    """
    v, gates = cell
    opening, closing = opening_and_closing(v)
    rest = opening / (opening + closing)
    m, h, n = gates = rest + (gates - rest) * jnp.exp(-DT * (opening + closing))
    open_now = conductances * jnp.stack([m**3 * h, n**4, jnp.ones_like(v)])
    total = open_now.sum()
    steady = (open_now @ REVERSAL + current) / total
    v = steady + (v - steady) * jnp.exp(-DT * total)
    return (v, gates), v


def recording(conductances, current, remat="nested"):
    """The voltage at every step, in millivolts."""
    start = jnp.float32(-65.0), jnp.array([0.05, 0.6, 0.32])
    return scan(step, Time, remat=remat)(start, current, shared(conductances))[1]


# %% [markdown]
# ## What is to be explained
#
# A cell with the conductances of the squid's axon, under a current that is switched on.

# %%
current = jnp.where(jnp.arange(Time.size) * DT > 2, 10.0, 0.0)  # µA/cm²
true = jnp.array([120.0, 36.0, 0.3])  # mS/cm²
measured = jax.jit(recording)(true, current)
print(f"{Time.size * DT:.0f} ms, from {measured.min():.0f} to {measured.max():.0f} mV")

# %% [markdown]
# ## The fit, of logarithms since conductances are positive


# %%
def loss(log_conductances, remat="nested"):
    return jnp.mean(
        jnp.abs(recording(jnp.exp(log_conductances), current, remat) - measured)
    )


optimizer = optax.adam(optax.exponential_decay(0.03, 100, 0.4))
guess = jnp.log(jnp.array([100.0, 30.0, 0.4]))


@jax.jit
def update(guess, state):
    value, slope = jax.value_and_grad(loss)(guess)
    moves, state = optimizer.update(slope, state)
    return optax.apply_updates(guess, moves), state, value


state, first = optimizer.init(guess), jnp.exp(guess)
for number in range(301):
    guess, state, value = update(guess, state)
    if number % 60 == 0:
        found = "  ".join(f"{value:.2f}" for value in jnp.exp(guess))
        print(f"update {number:3}  error {value:6.3f} mV  conductances {found}")
assert jnp.allclose(jnp.exp(guess), true, rtol=0.05)

# %%
figure = Figure((7, 2.5), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="time (ms)", ylabel="voltage (mV)")
milliseconds = DT * jnp.arange(Time.size)
axes.plot(milliseconds, measured, color="black", lw=3, label="recorded")
axes.plot(milliseconds, recording(first, current), "--", label="first guess")
axes.plot(milliseconds, recording(jnp.exp(guess), current), label="fit")
_ = axes.legend()

# %% [markdown]
# ## What a gradient takes

# %%
for remat in (False, True, "nested"):
    gradient = jax.jit(jax.grad(lambda guess, remat=remat: loss(guess, remat)))
    memory = gradient.lower(guess).compile().memory_analysis()
    print(f"{remat!s:7} {memory.temp_size_in_bytes / 2**10:7.1f} KiB")
