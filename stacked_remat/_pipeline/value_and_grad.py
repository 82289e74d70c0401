"""`pipeline`: the loss of a model and its gradients, with the layers over devices.

`Pipeline` finds the stack in the model, divides the model into the
arrays of the stack, of which each stage has a part, and the rest, of which each has
all, and runs `Stages` by `jax.shard_map` over the axis of the stages alone. The other
axes of the mesh stay what they were.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import DTypeLike

from .._fused.folds import leaves_or_none
from .._fused.trained import check_floating, check_split
from .._messages import shortened
from .._placement import has_host_arrays
from .._scan.arguments import argument_namer, is_unsplit_key
from .._scan.checks import describe
from .._scan.layer_axis import axis_resized
from .._scan.marks import changed, is_split, take_marks_off
from .._scan.returned import is_none
from .._schedule import whole_number
from .._stacked import Stacked, StackedKinds
from .._static import (
    PyTree,
    Static,
    is_array,
    is_named,
    raw_array,
    with_axes,
    with_leaves,
)
from .._sweep.gradient import merge, pick, scatter_leaves
from .._sweep.slots import inverted
from .loss_parts import cut_loss
from .schedule import Schedule, ScheduleName, make_schedule
from .stages import Stages, StageState


def pipeline(
    loss: Callable[..., Any],
    axis: str,
    *,
    microbatches: int,
    schedule: ScheduleName = "1f1b",
    stack: Callable[[Any], Any] | None = None,
    trainable: Any = eqx.is_inexact_array,
    has_aux: bool = False,
    gradient_dtype: DTypeLike | None = None,
) -> "Pipeline":
    """The gradient of a loss with the layers of its stack over an axis of the mesh.

    ```python
    # loss(model, *batch) calls model.blocks.fold(x).
    run = pipeline(loss, "stage", microbatches=8)
    with jax.set_mesh(jax.make_mesh((4, 2), ("stage", "data"), (AxisType.Auto,) * 2)):
        value, gradients = jax.jit(run.value_and_grad)(model, *batch)
    ```

    equals, with `part(n, x)` the rows `x[n::microbatches]`,

    ```python
    def mean(model):
        losses = [loss(model, *map(part(n), batch)) for n in range(microbatches)]
        return sum(losses) / microbatches
    value, gradients = eqx.filter_value_and_grad(mean)(model)
    ```

    Each of the P devices (or groups of devices, with further axes) along the axis is a
    *stage*: it has a contiguous part of the layers, and microbatches go from stage to
    stage. Along other axes everything is divided as it would be without a pipeline.

    Args:
        loss: takes the model and the arguments `batch`; returns a scalar. It calls
            `fold` or `scan` of the stack once, directly or inside of `jax.jit`, and
            can't use its weights otherwise. It is traced for one microbatch.
        axis: of the mesh that is set (`jax.set_mesh`), with `AxisType.Auto`.
        microbatches: into how many parts the batch is divided: M.
        schedule: `"1f1b"` or `"zero_bubble"`, as below.
        stack: finds the stack in the model; by default its only `Stacked`. Layers must
            divide evenly over the stages.
        trainable: which arrays have gradients: a filter spec, as in `eqx.filter`.
        has_aux: whether `loss` returns a pair, of the scalar and anything else but
            named arrays: of the arrays in it those of all microbatches are returned,
            the microbatches in front.
        gradient_dtype: in which gradients of real weights are added up and returned; by
            default, and for complex weights, that of each weight.

    Returns:
        A `Pipeline`, which has `value_and_grad(model, *batch)`, `value(model, *batch)`
        and `schedule_of(P)`.

    Raises:
        ValueError, TypeError: for what is no loss, number or schedule. `value_and_grad`
            refuses a mesh without the axis, numbers of layers or rows that don't
            divide, and a loss that it can't follow.

    Time: stages are idle for (P - 1) / (M + P - 1) of it. With `"zero_bubble"` the
    backward pass of a layer is taken apart: the cotangent of the carry, which the stage
    before waits for, is computed first, and those of weights where a stage would wait.
    That leaves (P - 1)(F + B - W) of the idle time (P - 1)(F + B + W), if the forward
    pass and the two parts take F, B and W, with W <= F. Each stage runs its forward
    pass once more in B, in addition to what the policy replays.

    Memory of a stage: its layers, their gradients, and the rest of the model and its
    gradients; the inputs of min(P, M) microbatches; what the policy keeps of one
    microbatch and the stage's layers. With a `scan` each input has the outputs of all
    layers, which are sent with the carry. `"zero_bubble"` keeps, for
    each layer of the stage and at most P microbatches, what its weights are multiplied
    with, and the cotangents of these products.
    """
    return Pipeline(
        loss, axis, microbatches, schedule, stack, trainable, has_aux, gradient_dtype
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """The gradient by `pipeline`; the fields are its arguments."""

    loss: Callable[..., Any]
    axis: str
    microbatches: int
    schedule: ScheduleName
    stack: Callable[[Any], Any] | None
    trainable: Any
    has_aux: bool
    gradient_dtype: DTypeLike | None

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise TypeError(
                f"pipeline takes a loss function first; got {describe(self.loss)}."
            )
        if not isinstance(self.axis, str):
            raise TypeError(
                "pipeline takes the name of an axis of the mesh; got"
                f" {describe(self.axis)}."
            )
        whole_number("microbatches", self.microbatches, "a number of microbatches")
        if not (self.stack is None or callable(self.stack)):
            raise TypeError(
                "stack is a function that finds the stack, lambda model: model.blocks;"
                f" got {describe(self.stack)}."
            )
        _check_gradient_dtype(self.gradient_dtype)
        self.schedule_of(1)

    def schedule_of(self, stages: int) -> Schedule:
        """The schedule on this many stages: `print(run.schedule_of(4).draw())`."""
        return make_schedule(self.schedule, stages, self.microbatches)

    def value_and_grad(self, model: PyTree, *batch: PyTree) -> tuple[Any, PyTree]:
        """The mean of the loss over the microbatches, and its gradients.

        Args:
            model: any tree with the stack. Its layers should be divided over the axis:
                `jax.device_put(stack, NamedSharding(mesh, P("stage")))`.
            batch: the other arguments of the loss, by position. Row
                `i * microbatches + n` of each array (of its first axis) is row `i` of
                microbatch `n`, so that rows which are divided over devices stay there.
                `shared(x)` is given whole to every microbatch.

        Returns:
            What the loss returns, as a mean over microbatches, and the gradients, as
            of `eqx.filter_value_and_grad`. Of a pair, arrays of the second part have
            the microbatches in front.
        """
        model_parts = ModelParts.of(model, self.stack, self.trainable)
        of_layers, of_rest, returned = self._run(Stages.run, model_parts, batch)
        return returned, model_parts.gradients(of_layers, of_rest)

    def value(self, model: PyTree, *batch: PyTree) -> Any:
        """What `value_and_grad` returns first, without gradients: to evaluate a model
        whose layers stay where they are.

        Each stage runs a microbatch once, and keeps nothing. Stages are idle for
        (P - 1) / (M + P - 1) of the time.
        """
        model_parts = ModelParts.of(model, self.stack, trainable=False)
        return self._run(Stages.run_forward, model_parts, batch)[-1]

    def _run(
        self,
        program: Callable[[Stages], StageState],
        model_parts: "ModelParts",
        batch: tuple[PyTree, ...],
    ) -> tuple[list[Any], list[Any], Any]:
        """The gradients of the layers and of the rest, and what the loss returns."""
        stages = self._stages()
        stack = model_parts.stack
        _check_layers(stack, model_parts.name)
        rows = Rows.of(self.loss, batch, self.microbatches)
        of_stage = functools.partial(self._of_stage, program, stages, model_parts, rows)
        # The last two are what the loss returned on each stage, and its types
        by_stage, on_all = PartitionSpec(self.axis), PartitionSpec()
        layer_specs = [
            by_stage if is_split(leaf, stack.Layers) else on_all
            for leaf in _named_leaves(stack)
        ]
        run = jax.shard_map(
            of_stage,
            in_specs=(layer_specs, on_all, on_all, on_all),
            out_specs=(by_stage, on_all, by_stage, on_all),
            axis_names={self.axis},
            # Its rules for what varies over devices would add sums over stages, which
            # have no place in branches that not all of them take
            check_vma=False,
        )
        layers = [
            raw_array(leaf) if spec == on_all else _padded(raw_array(leaf), stages)
            for leaf, spec in zip(_named_leaves(stack), layer_specs, strict=True)
        ]
        inputs = _without_derivatives((layers, *model_parts.rest, rows.arrays))
        # JAX runs a shard_map over some of the axes of a mesh within jit alone
        of_layers, of_rest, returned, types = jax.jit(run)(*inputs)
        of_layers = [gradient[: stack.Layers.size] for gradient in of_layers]
        # The last stage has it
        value, *aux = [leaf[-1] for leaf in returned]
        if not self.has_aux:
            return of_layers, of_rest, value
        arrays, static = eqx.partition(types.value[1], is_array)
        pair = value, eqx.combine(with_leaves(arrays, aux), static)
        return of_layers, of_rest, pair

    def _of_stage(
        self,
        program: Callable[[Stages], StageState],
        stages: int,
        model_parts: "ModelParts",
        rows: "Rows",
        layers: list[Any],
        trained: list[Any],
        frozen: list[Any],
        batch: list[Any],
    ) -> tuple[list[Any], list[Any], list[Any], Static]:
        """What each stage runs, within `jax.shard_map`.

        Args:
            program: the method of `Stages`.
            stages: how many there are.
            model_parts: the model, whose arrays are those that follow.
            rows: the batch, in the same way.
            layers: the arrays of this stage's layers.
            trained: what is trained of the rest of the model.
            frozen: the other arrays of it.
            batch: the arrays of the batch.

        Returns:
            The gradients of these layers and of the rest; the arrays that the loss
            returned; all that it returned, with types for arrays.
        """

        def rest(trained: Sequence[Any]) -> list[Any]:
            is_trained = model_parts.is_rest_trained
            leaves = scatter_leaves(frozen, inverted(is_trained))
            return merge(leaves, trained, is_trained)

        def microbatch(number: Any) -> list[Any]:
            return rows.of_microbatch(batch, number)

        stack = model_parts.stack
        parts = cut_loss(
            self.loss,
            model_parts.model,
            eqx.filter_eval_shape(lambda: stack),
            rest(trained),
            rows.arguments(microbatch(0)),
            model_parts.name,
            self.has_aux,
        )
        inputs = [*model_parts.is_rest_trained, *[False] * len(batch)]
        of_stage = Stages(
            axis=self.axis,
            schedule=self.schedule_of(stages),
            parts=parts,
            has_aux=self.has_aux,
            Layers=stack.Layers,
            layers=_own_layers(stack, layers, stages),
            is_trained=model_parts.is_layer_trained,
            trained=trained,
            rest=rest,
            microbatch=microbatch,
            is_active=parts.operands_depend_on(inputs),
            dtype=self.gradient_dtype,
        )
        sums = program(of_stage)
        returned = [leaf[None] for leaf in (sums.value, *sums.aux)]
        of_rest = lax.psum(sums.rest, self.axis)
        return sums.layers, of_rest, returned, Static(parts.returned)

    def _stages(self) -> int:
        """The size of the axis in the mesh that is set."""
        mesh = jax.sharding.get_abstract_mesh()
        if self.axis not in mesh.axis_names:
            found = ", ".join(map(repr, mesh.axis_names)) or "none is set"
            raise ValueError(
                f"pipeline runs over the axis {self.axis!r} of the mesh, whose axes"
                f" are: {found}. Call it within jax.set_mesh(mesh)."
            )
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if kinds[self.axis] != AxisType.Auto:
            raise ValueError(
                f"The axis {self.axis!r} of the mesh is {kinds[self.axis]}; pipeline"
                " takes an axis with AxisType.Auto, outside of jax.shard_map:"
                " jax.make_mesh(sizes, names, (AxisType.Auto,) * len(names))."
            )
        return mesh.shape[self.axis]


def _check_gradient_dtype(dtype: Any) -> None:
    try:
        is_real = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_real = False
    if not is_real:
        raise TypeError(f"gradient_dtype is a real floating-point type; got {dtype!r}.")


@jax.custom_jvp
def _without_derivatives(arrays: PyTree) -> PyTree:
    """The same arrays; a derivative with respect to them is an error."""
    return arrays


@_without_derivatives.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> NoReturn:
    raise TypeError(
        "The results of a pipeline's value and value_and_grad have no derivatives:"
        " value_and_grad computes the gradients itself. Differentiate the loss without"
        " a pipeline, or use jax.lax.stop_gradient on the model and the batch."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ModelParts:
    """A model as its stack and the leaves of the rest."""

    stack: Stacked
    # Its path, as `model.blocks`
    name: str
    # Of the model with the stack as one leaf, which is at `place`
    structure: Any
    place: int
    # All leaves of the rest; arrays are replaced
    leaves: list[Any]
    # For each array of the rest whether it is trained
    is_rest_trained: list[bool]
    # What is trained of the stack, which has None for other arrays
    trained_stack: PyTree
    # What is trained of the rest, in the same way
    trained_leaves: list[Any]

    @staticmethod
    def of(
        model: PyTree, find: Callable[[Any], Any] | None, trainable: Any
    ) -> "ModelParts":
        stack, name = _stack_of(model, find)
        leaves, structure = jax.tree.flatten(model, is_leaf=lambda node: node is stack)
        place = next(i for i, leaf in enumerate(leaves) if leaf is stack)
        try:
            trained = eqx.filter(model, trainable)
        except ValueError as error:
            raise ValueError(
                "trainable is a function of leaves, or a tree of them and of booleans"
                f" with the structure of the model or of its top; got"
                f" {describe(trainable)}."
            ) from error
        trained_leaves = structure.flatten_up_to(trained)
        trained_stack = trained_leaves[place]
        trained_leaves[place] = leaves[place] = None
        is_rest_trained = []
        for leaf, kept in zip(leaves, trained_leaves, strict=True):
            if is_array(leaf):
                is_rest_trained.append(kept is not None)
        check_floating(trained)
        why = "all stages would have a gradient of it"
        check_split(trained_stack, name, stack.Layers, why)
        return ModelParts(
            stack,
            name,
            structure,
            place,
            leaves,
            is_rest_trained,
            trained_stack,
            trained_leaves,
        )

    @property
    def rest(self) -> tuple[list[Any], list[Any]]:
        """The arrays of the rest: those that are trained, and the others."""
        arrays = [*filter(is_array, self.leaves)]
        is_trained = self.is_rest_trained
        return pick(arrays, is_trained), pick(arrays, inverted(is_trained))

    @property
    def is_layer_trained(self) -> list[bool]:
        """For each leaf of the stack, None being one."""
        return [leaf is not None for leaf in leaves_or_none(self.trained_stack)]

    def model(self, stack: PyTree, rest: Sequence[Any]) -> PyTree:
        """The model with another stack, and these arrays in the rest."""
        arrays = iter(rest)
        leaves = [next(arrays) if is_array(leaf) else leaf for leaf in self.leaves]
        leaves[self.place] = stack
        return self.structure.unflatten(leaves)

    def gradients(self, of_layers: Sequence[Any], of_rest: Sequence[Any]) -> PyTree:
        """The gradients as a tree like the model, with None for what has none."""
        structure = jax.tree.structure(self.trained_stack, is_leaf=is_none)
        stack = structure.unflatten(scatter_leaves(of_layers, self.is_layer_trained))
        gradients = iter(of_rest)
        leaves = []
        for leaf, kept in zip(self.leaves, self.trained_leaves, strict=True):
            has_one = is_array(leaf) and kept is not None
            leaves.append(next(gradients) if has_one else None)
        leaves[self.place] = stack
        return self.structure.unflatten(leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The arguments of a loss beside the model, divided into microbatches."""

    # The arrays; those that are divided are `[row, microbatch, ...]`
    arrays: list[Any]
    # For each array whether it is divided
    is_divided: list[bool]
    # The arguments of one microbatch, without marks; arrays are replaced
    template: PyTree

    @staticmethod
    def of(loss: Callable, batch: tuple[PyTree, ...], microbatches: int) -> "Rows":
        """Divide a batch.

        Raises:
            ValueError: rows don't divide evenly, or a random key is for all.
        """
        name_of = argument_namer(loss, skip=1)
        entries, (tree, _) = take_marks_off((batch, {}))
        leaves, arrays, is_divided = [], [], []
        for path, leaf, rule in entries:
            array = raw_array(leaf)
            divides = is_array(array) and rule != "shared" and array.ndim > 0
            if rule == "default" and is_unsplit_key(name_of(path), leaf):
                raise ValueError(
                    f"{name_of(path)} is a single random key, from which every"
                    " microbatch would draw the same numbers. Give each its own,"
                    f" jax.random.split(key, {microbatches}), of which the loss is"
                    " given an array of one, or mark it stacked_remat.shared(...)."
                )
            if divides:
                rows = array.shape[0]
                if rows % microbatches:
                    raise ValueError(
                        f"{name_of(path)} has {rows} rows (shape {array.shape}), which"
                        f" don't divide into {microbatches} microbatches. Change"
                        " microbatches, or mark it stacked_remat.shared(...)."
                    )
                count = rows // microbatches
                array = jnp.reshape(array, (count, microbatches, *array.shape[1:]))
                if is_named(leaf):
                    first, *others = leaf.axes
                    leaf = with_axes(array, (first.resize(count), *others))
            leaves.append(leaf)
            if is_array(array):
                arrays.append(array)
                is_divided.append(divides)
        treedef = jtu.tree_structure(tree, is_leaf=is_named)
        return Rows(arrays, is_divided, jtu.tree_unflatten(treedef, leaves))

    def of_microbatch(self, arrays: Sequence[Any], number: Any) -> list[Any]:
        """The arrays of one microbatch, of all arrays."""
        found = []
        for array, divides in zip(arrays, self.is_divided, strict=True):
            found.append(
                lax.dynamic_index_in_dim(array, number, 1, keepdims=False)
                if divides
                else array
            )
        return found

    def arguments(self, arrays: Sequence[Any]) -> tuple[PyTree, ...]:
        """The arguments of the loss for one microbatch, with these arrays."""
        types, static = eqx.partition(self.template, is_array)
        return eqx.combine(with_leaves(types, arrays), static)


def _named_leaves(stack: Stacked) -> list[Any]:
    """The arrays of a stack, named ones as they are."""
    leaves = jtu.tree_leaves(stack, is_leaf=is_named)
    return [leaf for leaf in leaves if is_array(raw_array(leaf))]


def _rows_of_stage(layers: int, stages: int) -> int:
    """How many layers a stage has; the last ones may have fewer."""
    return -(-layers // stages)


def _padded(array: Any, stages: int) -> Any:
    """An array of all layers, with as many rows for each stage: zeros are added."""
    layers = array.shape[0]
    added = _rows_of_stage(layers, stages) * stages - layers
    return jnp.pad(array, [(0, added), *[(0, 0)] * (array.ndim - 1)])


def _own_layers(stack: Stacked, arrays: Sequence[Any], stages: int) -> Stacked:
    """The stack of one stage, of its arrays."""
    count = _rows_of_stage(stack.Layers.size, stages)
    own = iter(arrays)

    def of_stage(leaf: Any) -> Any:
        if not is_array(raw_array(leaf)):
            return leaf
        array = next(own)
        if is_split(leaf, stack.Layers):
            return axis_resized(leaf, stack.Layers, count, array)
        return with_axes(array, leaf.axes if is_named(leaf) else None)

    stacked = jtu.tree_map(of_stage, stack.stacked, is_leaf=is_named)
    return changed(stack, stacked=stacked, Layers=stack.Layers.resize(count))


def _stack_of(model: PyTree, find: Callable[[Any], Any] | None) -> tuple[Stacked, str]:
    """The stack that is divided, and its path."""
    nodes, _ = jtu.tree_flatten_with_path(
        model, is_leaf=lambda node: isinstance(node, StackedKinds)
    )
    stacks = {}
    for path, node in nodes:
        if isinstance(node, StackedKinds):
            stacks[f"model{jtu.keystr(path)}"] = node
    if find is not None:
        wanted = find(model)
        names = shortened([*stacks], ", ") or "none"
        stacks = {name: node for name, node in stacks.items() if node is wanted}
        if not stacks:
            raise ValueError(
                f"stack finds {describe(wanted)}, which is no Stacked of the model; it"
                f" has: {names}."
            )
    if len(stacks) != 1:
        found = shortened([*stacks], ", ") or "none"
        raise ValueError(
            f"pipeline divides one stack of the model; found {found}. Let its layers be"
            " a Stacked, and say which, stack=lambda model: model.blocks."
        )
    ((name, stack),) = stacks.items()
    if not isinstance(stack, Stacked):
        raise TypeError(
            f"{name} is a {type(stack).__name__}; pipeline divides a Stacked, whose"
            " layers are all of one kind."
        )
    return stack, name


def _check_layers(stack: Stacked, name: str) -> None:
    if not stack.Layers.size:
        raise ValueError(f"{name} has no layers; a pipeline divides them over stages.")
    if has_host_arrays(stack):
        raise ValueError(
            f"{name} is in host memory; a pipeline takes layers on devices:"
            " stacked_remat.streaming.to_device(model)."
        )
