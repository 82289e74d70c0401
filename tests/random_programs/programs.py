"""Random programs: their description, drawn from a seed, and the layers and arrays that
are made from it.
"""

import dataclasses
import functools
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import stacked_remat as sr

from .parts import COLUMNS, NO_FORWARD_MODE, PARTS, ROWS, SPECIAL, Make

DIFFERENTIATING = (
    "grad",
    "value_and_grad",
    "vjp",
    "jacrev",
    "jvp",
    "linearize",
    "jacfwd",
)
FORWARD_MODE = ("jvp", "linearize", "jacfwd")
OTHERS = (
    "value",
    "vmap",
    "jit",
    "checkpoint",
    "scan",
    "cond",
    "fori",
    "eval_jaxpr",
    "shard_map",
)
ALIASES = (False, True, "recompute", "offload", "nested", "save_all")
JAX_POLICIES = (
    "dots_saveable",
    "everything_saveable",
    "nothing_saveable",
    "dots_with_no_batch_dims_saveable",
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A program in words and numbers; equal ones are equal programs.

    Attributes:
        seed: of its arrays.
        entry: what of the library runs the layers, a name in `entries.ENTRIES`.
        layers: how many.
        parts: of a layer, names in `parts.PARTS`.
        policy: an alias, the name of one of `jax.checkpoint_policies`, or the settings
            of a `ScanCheckpointPolicy`.
        transforms: names in `transformations.TRANSFORMS`, the innermost first.
        run: how the outermost function is called, a name in `checking.RUNS`.
        dtype: of the rows.
        reference: `"loop"` for a Python loop, `"scan"` for `lax.scan`.
        reverse: whether the last layer runs first.
        unroll: layers in one iteration.
        closure: whether the layers close over what they share.
        named: whether weights and carry are named arrays.
        outputs: what each layer returns beside its carry: `"none"`, `"sum"` or
            `"tree"`.
        differentiated: the groups of inputs whose derivatives are taken.
    """

    seed: int
    entry: str
    layers: int
    parts: tuple[str, ...]
    policy: Any = True
    transforms: tuple[str, ...] = ()
    run: str = "jit"
    dtype: str = "float64"
    reference: str = "loop"
    reverse: bool = False
    unroll: int | bool = 1
    closure: bool = False
    named: bool = False
    outputs: str = "sum"
    differentiated: tuple[str, ...] = ("x", "weights", "own", "shared")

    def numbers(self, *names: Any) -> np.random.Generator:
        """Random numbers of this program for a purpose."""
        return np.random.default_rng([self.seed, zlib.crc32(repr(names).encode())])

    def __str__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default or type(value) is not type(field.default):
                shown.append(f"{field.name}={value!r}")
        return f"Spec({', '.join(shown)})"


class Program(NamedTuple):
    """A layer of a spec, and its first arrays.

    Attributes:
        spec: its description.
        layer: `(carry, weights, shared) -> (carry, output)`, of the first kind.
        other_layer: of the second kind, where a pattern has two.
        inputs: a dict with the rows `x`, and by part the `weights` of all layers, the
            `own` leaves of the carry, and what is `shared`.
    """

    spec: Spec
    layer: Callable[[Any, Any, Any], tuple[Any, Any]]
    other_layer: Callable[[Any, Any, Any], tuple[Any, Any]]
    inputs: dict[str, Any]

    def carry(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The first carry."""
        return {"x": inputs["x"], "own": inputs["own"]}

    def kinds(self) -> list[str]:
        """The kind of each layer of a pattern."""
        numbers = self.spec.numbers("kinds").integers(0, 2, self.spec.layers)
        return ["ab"[number] for number in numbers]

    def is_over(self, carry: dict[str, Any]) -> Any:
        """When a loop of this program stops, if it has the part `edge`."""
        own = carry["own"][self.spec.parts.index("edge")]
        return own["count"] >= own["last"]


def build(spec: Spec, *, is_ours: bool) -> Program:
    """The program of a spec: that which uses the library, or the reference."""
    make = Make(
        spec.numbers("x"), jnp.dtype(spec.dtype), spec.layers, spec.reverse, is_ours
    )
    parts = []
    for number, name in enumerate(spec.parts):
        parts.append(PARTS[name](make._replace(rng=spec.numbers(name, number))))
    inputs = {
        "x": make.array(ROWS, COLUMNS),
        "weights": [part.weights for part in parts],
        "own": [part.own for part in parts],
        "shared": [part.shared for part in parts],
    }

    def layer(numbers: range, carry: Any, weights: Any, shared: Any) -> tuple[Any, Any]:
        x, own = carry["x"], list(carry["own"])
        for number in numbers:
            x, own[number] = parts[number].step(
                x, weights[number], own[number], shared[number]
            )
        output = {"none": None, "sum": jnp.sum(x), "tree": {"x": x, "own": own}}[
            spec.outputs
        ]
        return {"x": x, "own": own}, output

    every = range(len(parts))
    return Program(
        spec,
        functools.partial(layer, every),
        functools.partial(layer, every[:0:-1]),
        inputs,
    )


def policy_of(spec: Spec) -> Any:
    """The policy as the library takes it."""
    if isinstance(spec.policy, dict):
        return sr.ScanCheckpointPolicy(**spec.policy)
    if spec.policy in JAX_POLICIES:
        return getattr(jax.checkpoint_policies, spec.policy)
    return spec.policy


def layer_of(tree: Any, index: Any) -> Any:
    """The part of a layer, of a tree of stacked arrays."""
    return jax.tree.map(
        lambda leaf: leaf[index] if isinstance(leaf, jax.Array) else leaf, tree
    )


def reference(program: Program, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """The last carry and the outputs by a Python loop or `lax.scan`."""
    spec, shared = program.spec, inputs["shared"]
    if spec.reference == "scan":
        return lax.scan(
            lambda carry, weights: program.layer(carry, weights, shared),
            program.carry(inputs),
            inputs["weights"],
            length=spec.layers,
            reverse=spec.reverse,
        )
    carry, outputs = program.carry(inputs), [None] * spec.layers
    for index in layer_numbers(spec):
        carry, outputs[index] = program.layer(
            carry, layer_of(inputs["weights"], index), shared
        )
    return carry, stacked(outputs)


def layer_numbers(spec: Spec) -> range:
    """The layers in the order in which they run."""
    return range(spec.layers)[:: -1 if spec.reverse else 1]


def stacked(trees: list[Any]) -> Any:
    """Trees of a list as one with stacked arrays."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) if trees else None


def draw(seed: int, *, is_small: bool = False) -> Spec:
    """The program of a seed; a small one takes a fraction of the time."""
    rng = random.Random(seed)
    entry = rng.choice(ENTRY_NAMES)
    layers = rng.choice(SHORT if is_small or entry in OF_LOOPS else LONG)
    run = rng.choice(
        ("jit",) * 6 + ("constants", "constants", "eager", "twice", "mesh")
    )
    dtype = rng.choice(("float64",) * 6 + ("float32", "bfloat16"))
    spec = Spec(
        seed=seed,
        entry=entry,
        layers=layers,
        parts=_parts(rng, entry, run),
        policy=_policy(rng, layers),
        run=run,
        dtype=dtype,
        reference=rng.choice(("loop", "scan")) if layers < 6 else "scan",
        reverse=rng.random() < 0.3,
        unroll=rng.choice((1, 1, 1, 2, 3, True)),
        closure=rng.random() < 0.4,
        named=rng.random() < 0.3,
        outputs=rng.choice(("none", "sum", "tree")),
        differentiated=_differentiated(rng),
    )
    transforms = _transforms(rng, spec)[: 1 if is_small else None]
    return restricted(dataclasses.replace(spec, transforms=transforms))


ENTRY_NAMES = (
    ("stacked_layers",) * 5
    + ("bare",) * 4
    + ("lax_scan",) * 2
    + ("pattern",) * 2
    + ("until",) * 2
)
ENTRY_NAMES += (
    "block_seq",
    "visitor",
    "fused",
    "streamed",
    "state",
    "checkpoint",
    "tiled",
)
ENTRY_NAMES += ("map_over_layers", "all_at_once")
# Beside a Python loop alone
OF_LOOPS = (
    "pattern",
    "block_seq",
    "state",
    "map_over_layers",
    "all_at_once",
)
LONG = (0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 10, 11, 12)
SHORT = (0, 1, 2, 2, 3, 3, 3, 4, 5, 5, 7)
# jax.checkpoint takes no rule that closes over an argument of its function, and a scan
# in jax.jit, or in tiles, none that closes over a traced value.
WITH_CLOSURES = ("stacked_layers", "bare", "lax_scan", "until")
WITHOUT_DERIVATIVES = ("visitor", "fused")


def _parts(rng: random.Random, entry: str, run: str) -> tuple[str, ...]:
    common = [name for name in PARTS if name not in SPECIAL]
    if entry not in WITH_CLOSURES:
        common.remove("rule_with_closure")
    chosen = rng.sample(common, rng.choice((1, 2, 2, 3)))
    if entry == "until":
        chosen.append("edge")
    if run == "twice":
        chosen.append("flag")
    if entry == "streamed":
        chosen.insert(0, "mlp")
    return tuple(chosen)


def _policy(rng: random.Random, layers: int) -> Any:
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(ALIASES)
    if kind < 0.42:
        return rng.choice(JAX_POLICIES)
    values = {
        "save_carries": (False, "offload", True),
        "save_block_internals": (True, ("a",), ("a", "b"), ("b",)),
        "offload_block_internals": (("b",), ("a",)),
        "nested": (True, 1, 2, 3, max(1, layers - 1)),
        "max_carries": (2, 3, 4),
        "first_layers": (1, 2, layers),
    }
    while True:
        names = rng.sample(sorted(values), rng.choice((1, 2, 2, 3)))
        settings = {name: rng.choice(values[name]) for name in names}
        try:
            sr.ScanCheckpointPolicy(**settings)
        except ValueError:
            continue  # settings that contradict each other are refused
        return settings


def _differentiated(rng: random.Random) -> tuple[str, ...]:
    groups = ("x", "weights", "own", "shared")
    if rng.random() < 0.5:
        return groups
    return tuple(sorted(rng.sample(groups, rng.choice((1, 2))), key=groups.index))


def _transforms(rng: random.Random, spec: Spec) -> tuple[str, ...]:
    allowed = set(DIFFERENTIATING + OTHERS)
    if spec.entry in WITHOUT_DERIVATIVES:
        allowed -= {*DIFFERENTIATING}
    chosen: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 2, 3))):
        names = [name for name in DIFFERENTIATING * 2 + OTHERS if name in allowed]
        is_first = not {*chosen} & {*DIFFERENTIATING}
        if is_first and NO_FORWARD_MODE & {*spec.parts}:
            names = [name for name in names if name not in FORWARD_MODE]
        chosen.append(rng.choice(names))
    return tuple(chosen)


def restricted(spec: Spec) -> Spec:
    """The spec with what its parts and its entry cannot have taken back."""
    changes: dict[str, Any] = {}
    if spec.layers == 0 or spec.entry == "until":
        changes["reference"] = "scan"
    if spec.entry in OF_LOOPS:
        changes["reference"] = "loop"
        # A loop over none has no outputs to stack
        changes["layers"] = max(1, spec.layers)
    # JAX moves nothing to the host in a jax.shard_map outside of jax.jit.
    is_eager = spec.run in ("mesh", "eager") or spec.entry == "streamed"
    if "shard_map" in spec.transforms and is_eager:
        changes["run"] = "jit"
    if spec.entry == "all_at_once" and "inner_cond" in spec.parts:
        # jax.vmap makes lax.cond a select. In a jax.shard_map where the condition
        # varies over devices and an operand does not, JAX marks the operand as varying
        # twice, which is an error (0.10.2 and 0.12). A plain jax.vmap has it too; the
        # reference is a loop.
        changes["transforms"] = tuple(
            name for name in spec.transforms if name != "shard_map"
        )
    policy = spec.policy if isinstance(spec.policy, dict) else {}
    if spec.entry == "block_seq" and {"nested", "max_carries"} <= {*policy}:
        # Two levels are refused for layers that are compiled one by one.
        changes["policy"] = {**policy}
        del changes["policy"]["max_carries"]
    if "custom_jvp" in spec.parts:
        # lax.scan drops rules that are not derivatives of their functions from its
        # second derivatives (the hoisting of its partial evaluation, JAX 0.10.2 and
        # 0.12).
        transforms = changes.get("transforms", spec.transforms)
        derivatives = [
            n for n, name in enumerate(transforms) if name in DIFFERENTIATING
        ]
        if len(derivatives) > 1:
            changes["transforms"] = transforms[: derivatives[1]]
    if "rule_with_closure" in spec.parts:
        changes["closure"] = True  # JAX lets rules close over what the loop closes over
    if "custom_vjp_with_another_value" in spec.parts:
        # A rule runs where a carry is differentiated, which in a loop may be from a
        # later layer on.
        if changes.get("reference") == "loop":
            changes["differentiated"] = tuple(
                dict.fromkeys(("x", *spec.differentiated))
            )
        elif spec.entry != "checkpoint":
            changes["reference"] = "scan"
    return dataclasses.replace(spec, **changes)


def simpler(spec: Spec) -> Iterator[Spec]:
    """Specs that leave something of this one out."""
    for number in range(len(spec.transforms)):
        yield _without(spec, "transforms", number)
    for number in range(len(spec.parts)):
        if len(spec.parts) > 1 and spec.parts[number] not in SPECIAL:
            yield _without(spec, "parts", number)
    for layers in (1, 2, 3, spec.layers - 1):
        if layers < spec.layers:
            yield dataclasses.replace(spec, layers=layers)
    plain = {
        "reverse": False,
        "unroll": 1,
        "named": False,
        "closure": False,
        "outputs": "none",
        "dtype": "float64",
    }
    plain |= {"policy": True, "run": "jit"} if spec.run != "twice" else {"policy": True}
    for name, value in plain.items():
        if getattr(spec, name) != value:
            yield dataclasses.replace(spec, **{name: value})


def _without(spec: Spec, name: str, number: int) -> Spec:
    values = getattr(spec, name)
    return dataclasses.replace(spec, **{name: values[:number] + values[number + 1 :]})
