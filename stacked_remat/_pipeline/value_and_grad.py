"""`pipeline`: the loss of a model and its gradients, with the layers over devices.

`Pipeline` divides the model into the arrays of the stack, of which each stage has a
part, and the rest, of which each has all (`model_parts.py`), and the batch into
microbatches (`batch_rows.py`). It runs `Stages` by `jax.shard_map` over the axis of the
stages alone. The other axes of the mesh stay what they were.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, DTypeLike

from .._scan.checks import describe
from .._schedule import whole_number
from .._static import (
    PyTree,
    Static,
    is_array,
    with_leaves,
)
from .._sweep.gradient import merge, scatter_leaves
from .._sweep.slots import inverted
from .batch_rows import BatchRows
from .collectives import check_collectives
from .loss_parts import cut_loss
from .model_parts import ModelParts, rows_of_stage, with_rows
from .schedule import Schedule, ScheduleName, make_schedule
from .stage_layers import StageLayers
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
    stage. Of N layers each stage has ceil(N / P), but for the last ones, which may have
    fewer or none. Along other axes everything is divided as it would be without a
    pipeline.

    Args:
        loss: takes the model and the arguments `batch`; returns a scalar. It calls
            `fold` or `scan` of the stack once, directly or inside of `jax.jit`, and
            can't use its weights otherwise. It is traced for one microbatch.
        axis: of the mesh that is set (`jax.set_mesh`), with `AxisType.Auto`.
        microbatches: into how many parts the batch is divided: M.
        schedule: `"1f1b"` or `"zero_bubble"`, as below.
        stack: finds the stack in the model; by default its only `Stacked`.
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
            refuses a mesh without the axis, rows that don't divide into microbatches,
            a loss that it can't follow, and collectives for which stages would wait
            forever: `jax.lax.ppermute`, and any over the axis.

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
                `jax.device_put(stack, NamedSharding(mesh, P("stage")))`; of a number
                that is no multiple of the stages, by another dimension.
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
        model_parts: ModelParts,
        batch: tuple[PyTree, ...],
    ) -> tuple[list[Any], list[Any], Any]:
        """The gradients of the layers and of the rest, and what the loss returns."""
        stages = self._stages()
        rows = BatchRows.of(self.loss, batch, self.microbatches)
        of_stage = functools.partial(self._of_stage, program, stages, model_parts, rows)
        # The last two are what the loss returned on each stage, and its types
        by_stage = PartitionSpec(self.axis)
        on_all = PartitionSpec()
        rows_of_all = stages * rows_of_stage(model_parts.stack.Layers.size, stages)
        layers = []
        layer_specs = []
        for array, is_by_layer in zip(
            model_parts.arrays, model_parts.are_by_layer, strict=True
        ):
            layers.append(with_rows(array, rows_of_all) if is_by_layer else array)
            layer_specs.append(by_stage if is_by_layer else on_all)
        run = jax.shard_map(
            of_stage,
            in_specs=(layer_specs, on_all, on_all, on_all),
            out_specs=(by_stage, on_all, by_stage, on_all),
            axis_names={self.axis},
            # Its rules for what varies over devices would add sums over stages, which
            # have no place in branches that not all of them take
            check_vma=False,
        )
        inputs = _without_derivatives((layers, *model_parts.rest, rows.arrays))
        # JAX runs a shard_map over some of the axes of a mesh within jit alone
        jitted = jax.jit(run)
        closed: Any = jitted.trace(*inputs).jaxpr
        check_collectives(closed.jaxpr, self.axis, model_parts.name)
        of_layers, of_rest, returned, types = jitted(*inputs)
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
        model_parts: ModelParts,
        rows: BatchRows,
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

        Layers = model_parts.stack.Layers
        own_rows = rows_of_stage(Layers.size, stages)
        parts = cut_loss(
            self.loss,
            model_parts.model,
            model_parts.stack_types(),
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
            layers=StageLayers(
                parts.fold,
                Layers,
                model_parts.stack_of_rows(own_rows, layers),
                lax.axis_index(self.axis),
                stages,
            ),
            is_trained=model_parts.is_layer_trained,
            trained=trained,
            rest=rest,
            microbatch=microbatch,
            is_active=parts.operands_depend_on(inputs),
            dtype=self.gradient_dtype,
        )
        sums = program(of_stage)
        returned = [leaf[None] for leaf in (sums.value, *sums.aux)]
        of_rest = [_summed(gradient, self.axis) for gradient in sums.rest]
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


def _summed(gradient: Array, axis: str) -> Array:
    """The sum of a gradient over stages, rounded once."""
    # In bfloat16 XLA for CPUs (jaxlib 0.10.2) aborts where the mesh has further axes.
    exact = gradient.astype(np.promote_types(gradient.dtype, np.float32))
    return lax.psum(exact, axis).astype(gradient.dtype)


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
