"""The one place that works around JAX and Haliax, or uses their private parts; each
says why.

JAX 0.10.2 and 0.12, and Haliax 1.4.dev453, need it, unless another version is named.
Most are functions for which JAX has no public name.
"""

import contextlib
import functools
import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import haliax.partitioning
import jax
import jax._src.ad_util
import jax._src.clusters
import jax._src.config
import jax._src.core
import jax._src.cudnn.fused_attention_stablehlo
import jax._src.distributed
import jax._src.effects
import jax._src.interpreters.ad
import jax._src.interpreters.batching
import jax._src.interpreters.partial_eval
import jax._src.lib
import jax._src.named_sharding
import jax._src.util
import jax.core
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.extend.core.primitives import device_put_p
from jax.interpreters import ad


def cluster_size() -> int | None:
    """The number of processes of the cluster that JAX finds in the environment; None if
    it finds none.
    """
    known = jax._src.clusters.ClusterEnv._cluster_types
    found = next(
        (env for env in known if not env.opt_in_only_method and env.is_env_present()),
        None,
    )
    return None if found is None else found.get_process_count()


def exchange(name: str, text: str, seconds: int) -> list[str] | None:
    """Exchange texts between processes without a collective, in their order; None where
    that takes longer.
    """
    client: Any = jax._src.distributed.global_state.client
    client.key_value_set(f"{name}/{jax.process_index()}", text)
    try:
        every = range(jax.process_count())
        return [
            client.blocking_key_value_get(f"{name}/{index}", 1000 * seconds)
            for index in every
        ]
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


@functools.cache
def cudnn_is_installed() -> bool:
    """Whether JAX can compile calls of cuDNN, for a GPU that is there or not; they fail
    late otherwise.
    """
    versions: Any = getattr(jax._src.lib, "cuda_versions", None)
    with contextlib.suppress(RuntimeError):  # cuDNN not found
        return versions is not None and versions.cudnn_get_version() > 0
    return False


def cudnn_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, scale: float, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of `[batch, position, heads, head_dim]`, and float32
    log-sum-exp, positions last.
    """
    fused: Any = jax._src.cudnn.fused_attention_stablehlo
    options = {
        "scale": scale,
        "mask_type": fused.MaskType.CAUSAL,
        "sliding_window_length": window,
    }
    return fused.dot_product_attention(
        query, key, value, **options, return_residual=True
    )


def cudnn_attention_gradients(
    inputs: Sequence[jax.Array],
    results: Sequence[jax.Array],
    ct: jax.Array,
    scale: float,
    window: int | None,
) -> Sequence[jax.Array]:
    fused: Any = jax._src.cudnn.fused_attention_stablehlo
    newer = inspect.signature(fused.dot_product_attention).parameters
    return fused._dot_product_attention_bwd_p_wrapper.bind(
        *(*inputs, *[jnp.zeros(0, inputs[0].dtype)] * 7, *reversed(results), ct),
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias
        mask_type=fused.MaskType.CAUSAL,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window,
        **({"score_mod": None} if "score_mod" in newer else {}),
    )


def splash_gradients(
    kernel: Any, residuals: tuple[Any, ...], cotangent: jax.Array
) -> Sequence[jax.Array]:
    """The gradients of query, key and value, the first of `residuals`; output and
    log-sum-exp are last.
    """
    tables = kernel.dq_mask_info, kernel.dkv_mask_info
    backward: Any = splash_attention_kernel._splash_attention_bwd
    return backward(**kernel.kwargs, res=(*residuals, *tables), do=cotangent)[3:6]


def compiled_with_text(lowered: Any, platform: str) -> tuple[Any, str]:
    """A lowered program, compiled, and the text of what it was compiled to.

    Instead of the first, the error where memory is too small. libtpu (0.0.51) writes
    the text to a file then too, and JAX (0.10.2) can't read that of several devices.
    From its cache JAX may take a program that was compiled from other source lines,
    which its text then has.
    """
    if platform != "tpu":
        with jax._src.config.compilation_cache_include_metadata_in_key(True):
            compiled = lowered.compile()
        return compiled, compiled.as_text() or ""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            compiled = error
        # The kernels within it are programs too, and smaller.
        texts = [
            path.read_text() for path in Path(folder).glob("*.after_optimizations.txt")
        ]
    return compiled, max(texts, key=len, default="")


@contextlib.contextmanager
def no_axis_mapping() -> Iterator[None]:
    """Within it Haliax gives no product a sharding, as inside a `jax.shard_map` over
    the whole mesh.

    An empty `haliax.axis_mapping` would replicate all.
    """
    with haliax.axis_mapping({}):
        haliax.partitioning._mapping_holder.thread_data.resource_mapping = None
        yield


_transpose = ad.primitive_transposes[device_put_p]


def _transpose_to_source(
    cotangents: Any, *operands: Any, srcs: Any, **params: Any
) -> Any:
    """Cotangents of arrays that were moved to the host come back to where the arrays
    were.

    JAX refuses them otherwise, so that offloaded residuals have no second derivatives.
    """

    def source(given: Any, operand: Any, cotangent: Any) -> Any:
        space = getattr(getattr(cotangent, "aval", None), "memory_space", None)
        is_moved = ad.is_undefined_primal(operand) and space == jax.memory.Space.Host
        return operand.aval.memory_space if given is None and is_moved else given

    srcs = tuple(map(source, srcs, operands, cotangents))
    return _transpose(cotangents, *operands, srcs=srcs, **params)


ad.primitive_transposes[device_put_p] = _transpose_to_source


def is_concrete(array: Any) -> bool:
    """Whether the value of an array is known: it is not traced by `jit`, `vmap` or the
    like.
    """
    return jax._src.core.is_concrete(array)


def is_eager() -> bool:
    """Whether no program is traced around the caller: arrays are at most differentiated
    or mapped.

    So not within `jax.jit`, `jax.checkpoint`, a loop of JAX or `jax.shard_map`, or
    under `jax.disable_jit`.
    """
    trace: Any = jax._src.core.trace_ctx.trace
    kinds = jax._src.interpreters.ad, jax._src.interpreters.batching
    while type(trace).__module__ in [kind.__name__ for kind in kinds]:
        trace = trace.parent_trace
    return (
        isinstance(trace, jax._src.core.EvalTrace)
        and not jax._src.config.disable_jit.value
    )


def numbers_are_checked() -> bool:
    """Whether JAX looks for NaN or infinity in results; for an executable its error is
    an internal one.
    """
    return jax._src.config.debug_nans.value or jax._src.config.debug_infs.value


def cleared_with_jax(cache: Any) -> Any:
    """A `functools.lru_cache` that `jax.clear_caches` clears."""
    jax._src.util.register_cache(cache, cache.__name__)
    return cache


DebugInfo = jax._src.core.DebugInfo
# Types of parameters of primitives whose values are equal where they mean the same.
VALUE_TYPES = (
    jax._src.core.AbstractValue,
    jax._src.core.Primitive,
    jax._src.effects.Effect,
    jax._src.named_sharding.UnspecifiedValue,
    jax.sharding.Sharding,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.PartitionSpec,
    jax.ShapeDtypeStruct,
    jax.tree_util.SequenceKey,
    jax.tree_util.DictKey,
    jax.tree_util.GetAttrKey,
    jax.tree_util.FlattenedIndexKey,
    jax.tree_util.PyTreeDef,
)


def trace_context() -> Any:
    """What a trace, and where it runs, depend on beside its function and the types of
    its inputs.
    """
    mapping = haliax.partitioning.current_thread_local_mapping()
    of_jax = jax._src.config.trace_context(), jax._src.config.default_device.value
    return of_jax, None if mapping is None else tuple(map(str, mapping.items()))


def ordered_effects(jaxpr: Any) -> list[str]:
    """Names of the effects of a jaxpr that have an order; JAX lowers none beside host
    memory, nor says so.
    """
    found = jax._src.effects.ordered_effects.filter_in(jaxpr.effects)
    return sorted({type(effect).__name__ for effect in found})


def nothing_is_traced() -> bool:
    """Whether no function is being traced, mapped or differentiated around the
    caller.
    """
    return jax._src.core.trace_state_clean()


def named_axes(effects: Iterable[Any]) -> set[Any]:
    return {
        found.name
        for found in effects
        if isinstance(found, jax._src.core.NamedAxisEffect)
    }


def batch_jaxpr(
    closed: Any, axis: Any, is_mapped: Sequence[bool], must_be: Sequence[bool]
) -> tuple[Any, list[bool]]:
    """A jaxpr mapped over the axis of a batching rule, always the first, and which
    outputs are mapped.
    """
    return jax._src.interpreters.batching.batch_jaxpr(
        closed, axis, tuple(is_mapped), tuple(must_be)
    )


def without_constants(closed: Any) -> tuple[Any, list[Any]]:
    """A traced jaxpr whose constants are its first inputs, and these."""
    return jax._src.interpreters.partial_eval.convert_constvars_jaxpr(
        closed.jaxpr
    ), list(closed.consts)


def made_on_host(type_: Any, make: Callable[[Any], Any]) -> Any:
    """An array of a type in host memory, with equal entries, which `make` makes from
    their type.
    """
    host, device = (
        jax.memory.Space.Host,
        type_.update(memory_space=jax.memory.Space.Device),
    )
    if not type_.shape:
        return jax.device_put(make(device), host)
    # A scan stacks on the host one entry at a time; the whole stack would be made on
    # the device.
    entry = make(jax.extend.core.mapped_aval(type_.shape[0], 0, device))
    return lax.scan(
        lambda _, __: (None, jax.device_put(entry, host)),
        None,
        None,
        length=type_.shape[0],
    )[1]


_zeros_like_aval = jax._src.ad_util.aval_zeros_likers[jax.core.ShapedArray]


def _zeros(aval: Any) -> Any:
    """Zero tangents and cotangents of arrays on the host are made there, where they
    have their type.
    """
    if aval.memory_space != jax.memory.Space.Host or aval.dtype == jax.dtypes.float0:
        return _zeros_like_aval(aval)
    return made_on_host(aval, _zeros_like_aval)


jax._src.ad_util.aval_zeros_likers[jax.core.ShapedArray] = _zeros
# Haliax's products call it, and JAX 0.11 has none. A symbolic dimension of `jax.export`
# is no int.
jax.core.is_constant_dim = lambda dimension: isinstance(dimension, int)  # pyright: ignore[reportAttributeAccessIssue]
