"""A random program run with the library and without it, and what is wrong with the
results.
"""

import dataclasses
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stacked_remat

from .entries import ENTRIES
from .parts import FLAG
from .programs import DIFFERENTIATING, Program, Spec, build, simpler
from .transformations import TRANSFORMS, Choice, Function, is_float

LIBRARY = str(Path(stacked_remat.__file__).parent)
REFUSALS = {  # what the documentation of an entry point says that it refuses
    "until with a policy that offloads or drops": "With until=, a policy can neither",
    "a visitor needs carries": "is not supported with a visitor",
    "no derivatives of a visitor's results": (
        "the results of a sweep with a visitor have no derivatives"
    ),
    "ordered effects where values are offloaded": "ordered effects",
    "an optimizer with nothing to train": "there is nothing to fuse",
    "a loop of JAX around layers on the host": "closes over layers in host memory",
    "nothing to move to the host": "has no Stacked with an array for to_host",
    "a number in the carry becomes a named array": r"comes out as NamedArray",
}
TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        kind: `"equal"`; `"refused"`, by a documented error; `"invalid"`, where the
            reference raises an error or has no finite numbers; `"wrong"`, another
            number; `"types"`, another structure, shape, dtype or weak type; `"crash"`,
            any other error.
        detail: where, or the error.
    """

    kind: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the library is at fault."""
        return self.kind in ("wrong", "types", "crash")


def functions(spec: Spec) -> tuple[Function, Function, list[jax.Array]]:
    """The program with the library, the reference, and the arrays that both take."""
    transformed, leaves = [], []
    for is_ours in (True, False):
        program = build(spec, is_ours=is_ours)
        run = ENTRIES[spec.entry][0 if is_ours else 1]
        leaves, of_leaves, choice = _on_leaves(program, run)
        for number, name in enumerate(spec.transforms):
            own = choice._replace(rng=spec.numbers("transform", number))
            of_leaves = TRANSFORMS[name](of_leaves, own)
        transformed.append(of_leaves)
    return transformed[0], transformed[1], leaves


def _on_leaves(
    program: Program, run: Callable[..., Any]
) -> tuple[list[jax.Array], Function, Choice]:
    entries, structure = jax.tree.flatten(program.inputs)
    numbers = [
        number for number, leaf in enumerate(entries) if isinstance(leaf, jax.Array)
    ]
    groups = [
        path[0].key
        for path, _ in jax.tree_util.tree_flatten_with_path(program.inputs)[0]
    ]
    wanted, differentiated, rows = program.spec.differentiated, [], 0
    for place, number in enumerate(numbers):
        if groups[number] == "x":
            rows = place
        if groups[number] in wanted and is_float(entries[number]):
            differentiated.append(place)

    def of_leaves(leaves: Any) -> Any:
        filled = list(entries)
        for number, leaf in zip(numbers, leaves, strict=True):
            filled[number] = leaf
        return run(program, jax.tree.unflatten(structure, filled))

    choice = Choice(differentiated or [rows], rows, np.random.default_rng(0))
    return [entries[number] for number in numbers], of_leaves, choice


# How both are called: each of these yields pairs of results.


def in_one_jit(
    ours: Function, right: Function, leaves: list[jax.Array]
) -> Iterator[tuple[Any, Any]]:
    """Both in one program."""
    yield jax.jit(lambda leaves: (ours(leaves), right(leaves)))(leaves)


def over_constants(
    ours: Function, right: Function, leaves: list[jax.Array]
) -> Iterator[tuple[Any, Any]]:
    """Both in one program that closes over all arrays but the last."""

    def both(last: jax.Array) -> tuple[Any, Any]:
        given = [*leaves[:-1], last]
        return ours(given), right(given)

    yield jax.jit(both)(leaves[-1])


def eagerly(
    ours: Function, right: Function, leaves: list[jax.Array]
) -> Iterator[tuple[Any, Any]]:
    """The library's outside of `jax.jit`."""
    yield ours(leaves), jax.jit(right)(leaves)


def with_two_flags(
    ours: Function, right: Function, leaves: list[jax.Array]
) -> Iterator[tuple[Any, Any]]:
    """Both again after a flag has changed that layers read, outside of `jax.jit` and in
    a new one.
    """
    try:
        for FLAG["sign"] in (1.0, -1.0, 0.5):
            found = (
                jax.jit(lambda: ours(leaves))() if FLAG["sign"] == 0.5 else ours(leaves)
            )
            yield found, jax.jit(lambda leaves: right(leaves))(leaves)
    finally:
        FLAG["sign"] = 1.0


def on_a_mesh(
    ours: Function, right: Function, leaves: list[jax.Array]
) -> Iterator[tuple[Any, Any]]:
    """Both in one program, with arrays divided over devices where they can be."""
    mesh = jax.make_mesh((4,), ("device",), axis_types=(AxisType.Auto,))

    def placed(leaf: jax.Array) -> jax.Array:
        is_divided = leaf.ndim == 2 and leaf.shape[0] == 4
        return jax.device_put(
            leaf,
            NamedSharding(
                mesh, PartitionSpec("device") if is_divided else PartitionSpec()
            ),
        )

    with jax.set_mesh(mesh):
        yield jax.jit(lambda leaves: (ours(leaves), right(leaves)))(
            [placed(leaf) for leaf in leaves]
        )


RUNS = {
    "jit": in_one_jit,
    "constants": over_constants,
    "eager": eagerly,
    "twice": with_two_flags,
    "mesh": on_a_mesh,
}


def check(spec: Spec) -> Outcome:
    """Run a program and its reference."""
    ours, right, leaves = functions(spec)
    try:
        for found, expected in RUNS[spec.run](ours, right, leaves):
            outcome = compared(spec, found, expected)
            if outcome.kind != "equal":
                return outcome
    except Exception as error:
        return _of_error(spec, error)
    return Outcome("equal")


def _of_error(spec: Spec, error: Exception) -> Outcome:
    text = f"{type(error).__name__}: {str(error).strip()}"
    shown = f"{text[:400]} ({_place(error)})"
    for reason, pattern in REFUSALS.items():
        if re.search(pattern, text):
            return Outcome("refused", reason)
    try:
        _, right, leaves = functions(spec)
        for _ in RUNS[spec.run](right, right, leaves):
            pass
    except Exception as own:
        return Outcome("invalid", f"{type(own).__name__}: {str(own).strip()[:200]}")
    return Outcome("crash", shown)


def _place(error: Exception) -> str:
    """The last line of the library, or of this package, that the error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename.startswith(LIBRARY)] or frames
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno}"


def compared(spec: Spec, found: Any, expected: Any) -> Outcome:
    """Structure, types and numbers of a result beside the reference's."""
    if jax.tree.structure(found) != jax.tree.structure(expected):
        trees = (str(jax.tree.structure(tree))[:150] for tree in (found, expected))
        return Outcome("types", "structure {}, not {}".format(*trees))
    paths = jax.tree_util.tree_leaves_with_path(expected)
    pairs = list(zip(jax.tree.leaves(found), [leaf for _, leaf in paths], strict=True))
    for (path, _), (own, right) in zip(paths, pairs, strict=True):
        if problem := _other_type(spec, own, right):
            return Outcome("types", f"{jax.tree_util.keystr(path)}: {problem}")
    pairs = [tuple(map(_numbers, pair)) for pair in pairs]
    if not all(np.isfinite(right).all() for _, right in pairs):
        return Outcome("invalid", "the reference is not finite")
    largest = max((np.abs(right).max(initial=0) for _, right in pairs), default=0)
    errors = [np.abs(own - right).max(initial=0) for own, right in pairs]
    worst = (
        int(np.argmax([np.nan_to_num(error, nan=np.inf) for error in errors]))
        if errors
        else 0
    )
    if not errors or errors[worst] <= TOLERANCE * max(1.0, largest):
        return Outcome("equal")
    bound = _bound(spec, [right for _, right in pairs], largest)
    if errors[worst] <= bound:
        return Outcome("equal")
    of_largest = np.abs(pairs[worst][1]).max(initial=0)
    shown = f"{errors[worst]:.3g} from {of_largest:.3g}, allowed {bound:.2g}"
    return Outcome("wrong", f"{jax.tree_util.keystr(paths[worst][0])}: {shown}")


def _other_type(spec: Spec, found: Any, expected: Any) -> str:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return (
            f"{found.dtype}{list(found.shape)}, not"
            f" {expected.dtype}{list(expected.shape)}"
        )
    # Derivatives may have other weak types, and so may results of a Python loop.
    has_weak_types = spec.reference == "scan" and not {*spec.transforms} & {
        *DIFFERENTIATING
    }
    is_scan = spec.entry in ("bare", "lax_scan", "stacked_layers")
    if (
        has_weak_types
        and is_scan
        and not spec.named
        and spec.run != "eager"
        and _is_weak(found) != _is_weak(expected)
    ):
        return f"weak_type {_is_weak(found)}, not {_is_weak(expected)}"
    return ""


def _is_weak(leaf: Any) -> bool:
    return getattr(leaf, "weak_type", False)  # keys have none


def _numbers(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not leaf.size:  # which JAX (0.10.2) can't read if it is on several devices
        return np.zeros(leaf.shape)
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _bound(spec: Spec, expected: list[np.ndarray], largest: float) -> float:
    """How far a result may be from the reference, by what rounding does to the
    reference.
    """
    _, right, leaves = functions(spec)

    def difference(run: Function, moved: list[Any]) -> float:
        again = map(_numbers, jax.tree.leaves(jax.jit(run)(moved)))
        pairs = zip(expected, again, strict=True)
        return max(np.abs(a - b).max(initial=0) for a, b in pairs)

    least = TOLERANCE
    if spec.dtype == "float64":
        moved = [leaf * (1 + 1e-13) if leaf.dtype == float else leaf for leaf in leaves]
        by_rounding = 100 * difference(right, moved)
        if "mixed_dtypes" in spec.parts:
            epsilon = float(jnp.finfo(jnp.float32).eps)
            least = 30 * epsilon
            moved = []
            for leaf in leaves:
                is_narrow = leaf.dtype == jnp.float32
                moved.append(leaf * np.float32(1 + epsilon) if is_narrow else leaf)
            by_rounding = max(by_rounding, difference(right, moved))
    else:
        least = 30 * float(jnp.finfo(spec.dtype).eps)
        _, right, wide = functions(dataclasses.replace(spec, dtype="float64"))
        moved = [
            narrow.astype(own.dtype) if is_float(own) else own
            for narrow, own in zip(leaves, wide, strict=True)
        ]
        by_rounding = 100 * difference(right, moved)
    return max(least * max(1.0, largest), by_rounding)


def smallest(spec: Spec, kind: str) -> Spec:
    """A simpler program that fails in the same way."""
    for candidate in simpler(spec):
        if check(candidate).kind == kind:
            return smallest(candidate, kind)
    return spec
