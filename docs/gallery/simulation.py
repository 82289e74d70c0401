# %% [markdown]
# # A simulation, differentiated by its parameters
#
# How to differentiate a simulation that stops on its own. A ball flies through air
# until it lands; the gradient of where it lands goes back through every time step, and
# steps after the landing cost nothing. See [long loops](../long-loops.md).

# %%
import haliax as hax
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from stacked_remat import fold, scan, shared

DT = 1e-3
Time = hax.Axis("time", 20_000)  # at most 20 seconds
WIND = shared(jnp.array([-2.0, 0.0]))


def step(ball, wind):
    """Semi-implicit Euler: gravity, and drag by the square of the speed relative to the
    air.
    """
    place, velocity, drag = ball["place"], ball["velocity"], ball["drag"]
    relative = velocity - wind
    force = jnp.array([0.0, -9.81]) - drag * jnp.linalg.norm(relative) * relative
    velocity = velocity + DT * force
    return {
        "place": place + DT * velocity,
        "velocity": velocity,
        "drag": drag,
        "steps": ball["steps"] + 1,
    }


def has_landed(ball):
    return ball["place"][1] < 0


def thrown(angle, speed, drag):
    velocity = speed * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    return {"place": jnp.zeros(2), "velocity": velocity, "drag": drag, "steps": 0}


def flight(angle, speed, drag, remat="nested"):
    """Where the ball lands, and after how many steps."""
    start = thrown(angle, speed, drag)
    ball = fold(step, Time, remat=remat, until=has_landed)(start, WIND)
    x, y = ball["place"]
    # Back to the ground
    return (
        x - y * ball["velocity"][0] / ball["velocity"][1],
        ball["steps"],
    )


# %% [markdown]
# ## The gradient by three parameters

# %%
parameters = jnp.array([0.8, 40.0, 0.005])
of_flight = jax.jit(jax.value_and_grad(lambda p: flight(*p), has_aux=True))
(x, steps), slope = of_flight(parameters)
print(f"lands at {x:.2f} m after {steps} of {Time.size} steps")
for name, value, size in zip(
    ("angle", "speed", "drag"), slope, (1e-2, 0.5, 2e-4), strict=True
):
    moved = [
        parameters.at[("angle", "speed", "drag").index(name)].add(sign * size)
        for sign in (1, -1)
    ]
    difference = (of_flight(moved[0])[0][0] - of_flight(moved[1])[0][0]) / (2 * size)
    print(
        f"{name:5}  gradient {value:9.3f}   difference of two flights {difference:9.3f}"
    )
    assert abs(value - difference) < 0.02 * abs(difference) + 0.2

# %% [markdown]
# ## What it takes
#
# The memory is that of the policy for all 20,000 steps. Every state is five numbers
# here, so nothing is scarce; a flow field in its place would have millions.

# %%
for remat in (False, True, "nested"):
    gradient = jax.jit(jax.grad(lambda p, remat=remat: flight(*p, remat)[0]))
    memory = gradient.lower(parameters).compile().memory_analysis()
    print(f"{remat!s:7} {memory.temp_size_in_bytes / 2**10:7.1f} KiB")

# %% [markdown]
# ## Aiming
#
# Newton's method on the angle: the ball is to land at 80 m. At the end, the derivative
# of the slope, in forward mode over the gradient, which goes through the same steps.

# %%
at = jax.jit(jax.value_and_grad(lambda angle: flight(angle, 40.0, 0.005)[0]))
angle = jnp.float32(0.3)
figure = Figure((7, 2.5), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="distance (m)", ylabel="height (m)")
for dashes in (":", "-.", "--", "-"):
    x, slope = at(angle)
    print(
        f"angle {jnp.degrees(angle):6.3f}°  lands at {x:7.3f} m  slope {slope:8.3f} m"
        " per radian"
    )
    _, path = scan(lambda ball, wind: (step(ball, wind), ball["place"]), Time)(
        thrown(angle, 40.0, 0.005), WIND
    )
    axes.plot(*path[path[:, 1] >= 0].T, dashes, label=f"{jnp.degrees(angle):.2f}°")
    angle = angle - (x - 80.0) / slope
_ = axes.legend()
assert abs(at(angle)[0] - 80.0) < 0.01
slope, curvature = jax.jvp(
    lambda angle: at(angle)[1], (angle,), (jnp.ones_like(angle),)
)
print(f"slope {slope:.3f}, its derivative {curvature:.3f}")
