"""Whether devices wait for weights and gradients of fully sharded layers.

The gradient of a residual MLP whose weights are divided over 8 devices, and an update
within the backward pass (`fused_update`), compiled for devices that need not be
attached, and not run:

    python -m benchmarks.gathered_ahead --target h200
    python -m benchmarks.gathered_ahead --target v5p
    python -m benchmarks.gathered_ahead --kinds 2 --policies True nested
    python -m benchmarks.gathered_ahead --experts all_to_all grouped_experts
    python -m benchmarks.gathered_ahead --experts all_to_all grouped_experts \
        --experts_first

The compiled program is a schedule: where no product runs between the start and the end
of a collective, the devices wait for it. The rows count the collectives of weights and
their gradients in loops, and those that are waited for; with weights that are gathered
a layer ahead, and by each layer itself. With several `--kinds` the layers are a
`StackedPattern`, one of each kind in turn. With `--experts` a layer ends with experts,
one on each device, to which tokens go by a plain `all_to_all` or by `grouped_experts`;
with `--experts_first` it begins with them.

Writes `results/gathered_ahead_<target>_8.json`, with several kinds
`results/gathered_ahead_kinds_<target>_8.json`, and with experts
`results/gathered_ahead_experts_<target>_8.json`, or
`results/gathered_ahead_experts_first_<target>_8.json`.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from stacked_remat import Stacked, StackedPattern, fused_update
from stacked_remat._compat import compiled_with_text
from stacked_remat._memory_spaces import compiled_for
from stacked_remat.memory import find_target
from stacked_remat.ops import grouped_experts

from .command import Rows, benchmark
from .residual_mlp import Sizes

DEVICES = 8
# The inner width of an expert is this part of the MLP's.
EXPERT_PART = 4
# 8,192 tokens for each device.
SIZES = Sizes(layers=16, tokens=65_536, width=2_048, inner=8_192)
POLICIES = ("True", "nested", "offload", "fused")
# With which gathers run beside products; docs/devices.md names them. XLA for GPUs runs
# collectives beside products by default.
OPTIONS = {
    "v5p": {
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
    }
}


class Collective(NamedTuple):
    """What devices send each other at a time.

    Attributes:
        kind: as XLA names it.
        shape: of the largest array of its results, as `bf16[8192,2048]`.
        in_loop: whether it is in a loop.
        products: how many products there are between its start and its end; a loop with
            some counts as one. None where it has no start, so that all devices wait.
    """

    kind: str
    shape: str
    in_loop: bool
    products: int | None


class Block(eqx.Module):
    """`x + silu(x @ up) @ down`, with its own weights gathered."""

    up: jax.Array
    down: jax.Array
    whole: NamedSharding = eqx.field(static=True)
    ahead: bool = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next carry."""
        return x + jax.nn.silu(x @ self._whole(self.up)) @ self._whole(self.down)

    def _whole(self, weight: jax.Array) -> jax.Array:
        def gather(weight: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(weight, self.whole)

        # In a `jax.jit` of its own a gather is not seen: the layer waits for it.
        return gather(weight) if self.ahead else jax.jit(gather)(weight)


class ExpertBlock(Block):
    """The same, after or before as many experts as devices, each on its own device.

    Their weights are not gathered: tokens go to the devices of their experts and back.
    """

    expert_up: jax.Array
    expert_down: jax.Array
    exchange: str = eqx.field(static=True)
    experts_first: bool = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next carry."""
        if self.experts_first:
            return super().__call__(self._with_experts(x))
        return self._with_experts(super().__call__(x))

    def _with_experts(self, x: jax.Array) -> jax.Array:
        spec = PartitionSpec("data")
        experts = jax.shard_map(
            EXCHANGES[self.exchange],
            mesh=self.whole.mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        return x + experts(x, self.expert_up, self.expert_down)


def by_all_to_all(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """A device sends an equal part of its tokens to each expert."""

    def swap(rows: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(rows, "data", 0, 0, tiled=True)

    return swap(jax.nn.silu(swap(x) @ up[0]) @ down[0])


def by_grouped_experts(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Each token goes to two experts. Its first numbers are their scores."""

    def expert(weights: Any, rows: jax.Array, gates: jax.Array) -> jax.Array:
        up, down = weights
        return (jax.nn.silu(rows @ up) * gates[:, None]) @ down

    gates, choices = jax.lax.top_k(jax.nn.softmax(x[:, :DEVICES]), 2)
    Experts = hax.Axis("experts", DEVICES)
    return grouped_experts(
        expert, (up, down), Experts, x, choices, gates, over=("data",)
    )


EXCHANGES = {"all_to_all": by_all_to_all, "grouped_experts": by_grouped_experts}


def program(
    target: str,
    policy: str,
    sizes: Sizes,
    ahead: bool,
    kinds: int = 1,
    experts: str = "",
    experts_first: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
    """A function in `jax.jit`, and the shapes of its arguments."""
    devices = np.array(find_target(target).devices(DEVICES), dtype=object)
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))

    def shape(dims: tuple[int, ...], *spec: str | None) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(dims, sizes.dtype, sharding=sharding)

    remat: Any = {"True": True, "False": False, "fused": "nested"}.get(policy, policy)
    names = [chr(ord("a") + kind) for kind in range(kinds)]
    stacks = {}
    for name in names:
        layers = sizes.layers // kinds
        up = shape((layers, sizes.width, sizes.inner), None, None, "data")
        down = shape((layers, sizes.inner, sizes.width), None, "data", None)
        block = Block(up, down, NamedSharding(mesh, PartitionSpec()), ahead)
        if experts:
            inner = sizes.inner // EXPERT_PART
            expert_up = shape((layers, DEVICES, sizes.width, inner), None, "data")
            expert_down = shape((layers, DEVICES, inner, sizes.width), None, "data")
            block = ExpertBlock(
                **vars(block),
                expert_up=expert_up,
                expert_down=expert_down,
                exchange=experts,
                experts_first=experts_first,
            )
        stacks[name] = Stacked(block, hax.Axis("layers", layers), remat)
    blocks = stacks["a"]
    if kinds > 1:
        Layers = hax.Axis("layers", sizes.layers)
        in_turn = itertools.islice(itertools.cycle(names), sizes.layers)
        blocks = StackedPattern(stacks, [*in_turn], Layers, remat)
    x = shape((sizes.tokens, sizes.width), "data", None)

    def loss(blocks: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(blocks.fold(x).astype(jnp.float32))

    if policy != "fused":
        shardings = jax.tree.map(lambda leaf: leaf.sharding, blocks)
        return jax.jit(jax.grad(loss), out_shardings=shardings), (blocks, x)
    update = fused_update(loss, optax.sgd(0.1))

    def step(blocks: Any, x: jax.Array) -> Any:
        return update(blocks, update.init(blocks), x).model

    return jax.jit(step, donate_argnums=0), (blocks, x)


def compiled(
    target: str,
    policy: str,
    sizes: Sizes = SIZES,
    *,
    ahead: bool = True,
    kinds: int = 1,
    experts: str = "",
    experts_first: bool = False,
) -> tuple[Any, str]:
    """What `program` compiles to, and its text."""
    fn, args = program(target, policy, sizes, ahead, kinds, experts, experts_first)
    device = find_target(target).devices()[0]
    return with_text(fn.trace(*args), device, OPTIONS.get(target))


def with_text(
    traced: Any, device: Any, options: dict[str, Any] | None = None
) -> tuple[Any, str]:
    """What a traced program compiles to for a device that may be absent, and its
    text.
    """
    with compiled_for(device):
        lowered = traced.lower()
    return compiled_with_text(lowered, device.platform, options)


# `%name (parameters) -> type {`, and `%name = types kind(operands), attributes`.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([^\s(]+) ?\(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(
    r"(?:calls|body|to_apply|true_computation|false_computation)=(%[\w.\-]+)"
    r"|(?:called_computations|branch_computations)=\{([^}]*)\}"
)
_FIRST_OPERAND = re.compile(r"[^%]*%([\w.\-]+)")
_PRODUCT_CALL = re.compile(r'custom_call_target="(?:__cublas|__triton_gemm)')
_COLLECTIVE = re.compile(
    r"^(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?$"
)


class _Instruction(NamedTuple):
    name: str
    types: str  # of its results
    kind: str
    rest: str  # operands and attributes
    called: list[str]  # names of computations


class _Program:
    """A compiled program, as a list of instructions for each computation."""

    def __init__(self, text: str):
        self.computations: dict[str, list[_Instruction]] = {}
        self.loops = set()
        body: list[_Instruction] = []
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                body = self.computations.setdefault(start[1], [])
            elif match := _INSTRUCTION.match(line):
                name, types, kind, rest = match.groups()
                called = []
                for one, several in _CALLED.findall(rest):
                    called += re.findall(r"%([\w.\-]+)", one or several)
                body.append(_Instruction(name, types, kind, rest, called))
                if kind == "while":
                    self.loops.update(called)
        # And what their bodies call, the branches of conditionals among it
        for name in [*self.loops]:
            for inner in self.reached([name]):
                if inner.kind in ("conditional", "call"):
                    self.loops.update(inner.called)

    def reached(self, names: list[str]) -> Iterator[_Instruction]:
        """The instructions of computations, and of those that they call."""
        for name in names:
            for one in self.computations.get(name, ()):
                yield one
                yield from self.reached(one.called)

    def has_product(self, one: _Instruction) -> bool:
        """Whether it is a product, or a fusion or a loop with some."""
        # What runs on its own ends with another instruction.
        if one.kind.startswith("async"):
            return False
        return any(map(_is_product, (one, *self.reached(one.called))))

    def collectives_of(self, name: str) -> Iterator[Collective]:
        """The collectives of one computation, as they end."""
        # By the name of the instruction that they were at last.
        running: dict[str, Collective] = {}
        for one in self.computations[name]:
            operand = _FIRST_OPERAND.match(one.rest)
            before = running.pop(operand[1], None) if operand else None
            if before is not None and one.kind.endswith("-done"):
                yield before
            elif before is not None:
                # TPUs: now it is given its operands.
                running[one.name] = before._replace(products=0)
            elif (found := self._collective(one, name in self.loops)) is None:
                pass
            elif found.products is None:
                yield found
            else:
                running[one.name] = found
            if self.has_product(one):
                for key, collective in running.items():
                    products = (collective.products or 0) + 1
                    running[key] = collective._replace(products=products)

    def _collective(self, one: _Instruction, in_loop: bool) -> Collective | None:
        """The collective of a matrix that an instruction is, or starts."""
        starts = one.kind == "async-start"
        for inner in self.reached(one.called) if starts else [one]:
            match = _COLLECTIVE.match(inner.kind)
            shape = _largest(inner.types)
            if match and shape:
                is_async = starts or match[2]
                return Collective(match[1], shape, in_loop, 0 if is_async else None)
        return None


def _is_product(one: _Instruction) -> bool:
    is_call = _PRODUCT_CALL.search(one.rest) is not None
    return one.kind in ("dot", "convolution") or is_call


def _largest(types: str) -> str:
    """The largest matrix of an instruction's results; "" if there is none."""
    matrices = {}
    for dtype, sizes in re.findall(r"\b(\w+)\[([\d,]+)\]", types):
        dims = [int(size) for size in sizes.split(",") if size != "1"]
        if len(dims) > 1:
            matrices[f"{dtype}[{sizes}]"] = math.prod(dims)
    return max(matrices, key=matrices.__getitem__, default="")


def collectives(text: str) -> Iterator[Collective]:
    """The collectives of matrices in a scheduled program."""
    read = _Program(text)
    # What runs on its own is found where it starts.
    apart = set()
    for instructions in read.computations.values():
        for one in instructions:
            if one.kind == "async-start":
                apart.update(map(id, read.reached(one.called)))
    for name, instructions in read.computations.items():
        if not apart.intersection(map(id, instructions)):
            yield from read.collectives_of(name)


def of_weights(text: str) -> list[Collective]:
    """Those of weights and their gradients in loops. Not the exchange of tokens between
    experts, which what comes next in a layer needs.
    """
    found = []
    for one in collectives(text):
        if one.in_loop and one.kind != "all-to-all":
            found.append(one)
    return found


def _result(
    target: str, kinds: int, experts: tuple[str, ...], experts_first: bool, **_: Any
) -> str:
    layers = "kinds_" if kinds > 1 else ""
    if experts != ("",):
        layers += "experts_first_" if experts_first else "experts_"
    return f"gathered_ahead_{layers}{target}_8"


@benchmark(_result)
def main(
    target: str = "h200",
    policies: tuple[str, ...] = POLICIES,
    gathered: tuple[str, ...] = ("by the layer", "ahead"),
    sizes: Sizes = SIZES,
    kinds: int = 1,
    experts: tuple[str, ...] = ("",),
    experts_first: bool = False,
) -> Rows:
    layer_bytes = 2 * sizes.width * sizes.inner * jnp.dtype(sizes.dtype).itemsize
    held: dict[tuple[str, str, str], int] = {}
    for exchange, policy, way in itertools.product(experts, policies, gathered):
        found, text = compiled(
            target,
            policy,
            sizes,
            ahead=way == "ahead",
            kinds=kinds,
            experts=exchange,
            experts_first=experts_first,
        )
        in_loops = of_weights(text)
        temporaries = found.memory_analysis().temp_size_in_bytes
        held[exchange, policy, way] = temporaries
        by_layer = held.get((exchange, policy, "by the layer"), temporaries)
        yield {
            **({"experts": exchange} if exchange else {}),
            "policy": policy,
            "weights gathered": way,
            **dataclasses.asdict(sizes),
            "collectives in loops": len(in_loops),
            "waited for": sum(not one.products for one in in_loops),
            "all-reduce": sum(one.kind == "all-reduce" for one in in_loops),
            "temporaries": temporaries,
            "gathered layers more": round((temporaries - by_layer) / layer_bytes, 2),
        }


if __name__ == "__main__":
    main()
