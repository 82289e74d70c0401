"""The one place that works around JAX and Haliax, or uses their private parts; each
says why.

JAX 0.10.2 and 0.12, and Haliax 1.4.dev453, need it, unless another version is named.
Most are functions for which JAX has no public name: `PRIVATE` of
`tests/test_compat.py` says for each of these what to do once it is gone. Primitives as
objects are in `_hijax.py`, and kernels of JAX in `ops/`.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
from jax import lax
from jax._src.clusters import ClusterEnv
from jax._src.config import trace_context as jax_trace_context
from jax._src.core import NamedAxisEffect
from jax._src.distributed import global_state
from jax._src.effects import ordered_effects as ordered_types
from jax._src.interpreters.batching import batch_jaxpr as jax_batch_jaxpr
from jax._src.interpreters.partial_eval import convert_constvars_jaxpr
from jax._src.util import register_cache
from jax.extend.core import mapped_aval, take_current_trace
from jax.interpreters import ad, batching

try:
    import haliax.partitioning
except (AttributeError, ImportError) as error:
    # Haliax uses names of JAX that later versions remove: 1.3 does not import on 0.10.
    raise ImportError(
        f"Haliax does not import with JAX {jax.__version__}: {error}. haliax 1.4.dev453"
        " goes with jax 0.10.2 to 0.12. Write: pip install 'haliax==1.4.dev453'"
        " 'jax>=0.10.2,<0.13'"
    ) from error

# Its settings are no attributes of its class.
_config: Any = jax.config


def cluster_size() -> int | None:
    """The number of processes of the cluster that JAX finds in the environment; None if
    it finds none.
    """
    for environment in ClusterEnv._cluster_types:
        if not environment.opt_in_only_method and environment.is_env_present():
            return environment.get_process_count()
    return None


def exchange(name: str, text: str, seconds: int) -> list[str] | None:
    """Exchange texts between processes without a collective, in their order; None where
    that takes longer.
    """
    client: Any = global_state.client
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


def compiled_with_text(
    lowered: Any, platform: str, options: Mapping[str, Any] | None = None
) -> tuple[Any, str]:
    """A lowered program, compiled with these options of XLA, and the text of what it
    was compiled to.

    Instead of the first, the error where memory is too small. libtpu (0.0.51) writes
    the text to a file then too, and JAX (0.10.2) can't read that of several devices.
    """
    if platform != "tpu":
        with _sources_in_cache_keys():
            compiled = lowered.compile(compiler_options=options)
        return compiled, compiled.as_text() or ""
    with tempfile.TemporaryDirectory() as folder:
        dumps = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = lowered.compile(compiler_options={**(options or {}), **dumps})
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
def _sources_in_cache_keys() -> Iterator[None]:
    """Within it, JAX takes no program from its cache that was compiled from other
    source lines, which its text would have.
    """
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(_config, name)
    _config.update(name, True)
    try:
        yield
    finally:
        _config.update(name, before)


@contextlib.contextmanager
def no_axis_mapping() -> Iterator[None]:
    """Within it Haliax gives no product a sharding, as inside a `jax.shard_map` over
    the whole mesh.

    An empty `haliax.axis_mapping` would replicate all.
    """
    with haliax.axis_mapping({}):
        haliax.partitioning._mapping_holder.thread_data.resource_mapping = None
        yield


# Where the traces of `jax.grad` and the like, and of `jax.vmap`, are defined.
_MAPS_AND_DERIVATIVES = ad.JVPTrace.__module__, batching.broadcast.__module__


@functools.cache
def _evaluation() -> type:
    """The class of the trace that evaluates."""
    with jax.core.eval_context(), take_current_trace() as trace:
        return type(trace)


def _current_trace() -> Any:
    with take_current_trace() as trace:
        return trace


def is_eager() -> bool:
    """Whether no program is traced around the caller: arrays are at most differentiated
    or mapped.

    So not within `jax.jit`, `jax.checkpoint`, a loop of JAX or `jax.shard_map`, or
    under `jax.disable_jit`.
    """
    trace = _current_trace()
    while type(trace).__module__ in _MAPS_AND_DERIVATIVES:
        trace = trace.parent_trace
    return isinstance(trace, _evaluation()) and not _config.jax_disable_jit


def nothing_is_traced() -> bool:
    """Whether no function is being traced, mapped or differentiated around the
    caller.
    """
    return isinstance(_current_trace(), _evaluation())


def numbers_are_checked() -> bool:
    """Whether JAX looks for NaN or infinity in results; for an executable its error is
    an internal one.
    """
    return _config.jax_debug_nans or _config.jax_debug_infs


def cleared_with_jax(cache: Any) -> Any:
    """A `functools.lru_cache` that `jax.clear_caches` clears."""
    register_cache(cache, cache.__name__)
    return cache


def trace_context() -> Any:
    """What a trace, and where it runs, depend on beside its function and the types of
    its inputs.
    """
    of_jax = jax_trace_context(), _config.jax_default_device
    mapping = haliax.partitioning.current_thread_local_mapping()
    if mapping is None:
        return of_jax, None
    return of_jax, tuple(map(str, mapping.items()))


def ordered_effects(jaxpr: Any) -> list[str]:
    """Names of the effects of a jaxpr that have an order; JAX lowers none beside host
    memory, nor says so.
    """
    found = ordered_types.filter_in(jaxpr.effects)
    return sorted({type(effect).__name__ for effect in found})


def named_axes(effects: Iterable[Any]) -> set[Any]:
    return {effect.name for effect in effects if isinstance(effect, NamedAxisEffect)}


def batch_jaxpr(
    closed: Any, axis: Any, is_mapped: Sequence[bool], must_be: Sequence[bool]
) -> tuple[Any, list[bool]]:
    """A jaxpr mapped over the axis of a batching rule, always the first, and which
    outputs are mapped.
    """
    return jax_batch_jaxpr(closed, axis, tuple(is_mapped), tuple(must_be))


def without_constants(closed: Any) -> tuple[Any, list[Any]]:
    """A traced jaxpr whose constants are its first inputs, and these.

    JAX makes it once for each jaxpr, so that equal ones are the same object.
    """
    return convert_constvars_jaxpr(closed.jaxpr), list(closed.consts)


def made_on_host(type_: Any, make: Callable[[Any], Any]) -> Any:
    """An array of a type in host memory, with equal entries, which `make` makes from
    their type.
    """
    host = jax.memory.Space.Host
    device = type_.update(memory_space=jax.memory.Space.Device)
    if not type_.shape:
        return jax.device_put(make(device), host)
    # A scan stacks on the host one entry at a time; the whole stack would be made on
    # the device.
    length = type_.shape[0]
    entry = make(mapped_aval(length, 0, device))

    def step(carry: None, _: None) -> tuple[None, Any]:
        return carry, jax.device_put(entry, host)

    _, stack = lax.scan(step, None, length=length)
    return stack


# Haliax's products call it, and JAX has none since 0.11. A symbolic dimension of
# `jax.export` is no int.
if jax.__version_info__ >= (0, 11):
    jax.core.is_constant_dim = lambda dimension: isinstance(dimension, int)  # pyright: ignore[reportAttributeAccessIssue]
