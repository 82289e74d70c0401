"""Collectives that a stage of a pipeline can't have in what it runs of a microbatch.

In a tick stages run different branches, or none (`stages.py`). So a collective of one
branch may have the devices of one stage alone, or some would wait for others that never
come. Two kinds have more: those over the axis of the stages, and `ppermute` over any
axis, in which XLA has all devices of the mesh take part.
"""

from collections.abc import Iterator

from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn

from .._activity import name_of, programs_in
from .._compat import named_axes


def check_collectives(program: Jaxpr, axis: str, name: str) -> None:
    """Refuse such a collective.

    Args:
        program: what runs the stages, with `jax.shard_map` in it. Of its loops those
            are branches whose trips are not known: `while` equations.
        axis: of the stages.
        name: of the stack, for errors.

    Raises:
        ValueError: names the collective, its axes and where it is in the user's code.
    """
    for equation in _leaves_of_branches(program, is_branch=False, seen=set()):
        axes = _axes_of(equation)
        over_stages = axis in axes and equation.primitive.name != "axis_index"
        if not over_stages and equation.primitive.name != "ppermute":
            continue
        place = source_info_util.summarize(equation.source_info)
        what = f"`{name_of(equation)}` over {', '.join(map(repr, sorted(axes)))}"
        if over_stages:
            reason = "which is the axis of the stages. Use other axes of the mesh."
        else:
            reason = (
                "in which XLA has all devices of the mesh take part. Use"
                " jax.lax.all_gather or jax.lax.all_to_all, which only devices of one"
                " stage take part in."
            )
        raise ValueError(
            f"The layers of {name}, or the loss around them, have {what} ({place}),"
            f" {reason} The stages of a pipeline run different microbatches at a time,"
            " and would wait for each other forever."
        )


def _axes_of(equation: JaxprEqn) -> set[str]:
    """The named axes that a collective is over."""
    # Collectives have effects by axis where these are not of a mesh that is Auto.
    axes = named_axes(equation.effects)
    for name in ("axis_name", "axes"):
        found = equation.params.get(name, ())
        axes.update(found if isinstance(found, tuple) else [found])
    return {axis for axis in axes if isinstance(axis, str)}


def _leaves_of_branches(
    program: Jaxpr, is_branch: bool, seen: set[tuple[int, bool]]
) -> Iterator[JaxprEqn]:
    """The equations in branches, at any depth, that have no programs in them."""
    if (id(program), is_branch) in seen:
        return
    seen.add((id(program), is_branch))
    for equation in program.eqns:
        inner = programs_in(equation)
        if not inner and is_branch:
            yield equation
        inside = is_branch or equation.primitive.name == "while"
        for one in inner:
            yield from _leaves_of_branches(one, inside, seen)
