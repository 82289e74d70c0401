"""fold, scan and map over named and plain arrays: what is split, what is shared, and
what is refused.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import ScanCheckpointPolicy, fold, map, scan
from stacked_remat._scan.checks import check_carry, layers_axis, text

from .jaxprs import equations_of, outline

Time, Width, Depth = hax.Axis("time", 5), hax.Axis("width", 3), hax.Axis("depth", 2)
ONES, HALF, NAMED = jnp.ones(3), jnp.ones(3, jnp.float16), hax.ones((Width, Depth))


@pytest.fixture
def data():
    return hax.random.normal(jax.random.key(0), (Time, Width, Depth))


def test_map_stacks_in_front_and_takes_several_arguments(data):
    mapped = map(lambda x, y, *, power: hax.sum(x) * y**power, Depth)(
        data, jnp.array([2.0, 3.0]), power=2
    )
    np.testing.assert_allclose(
        mapped.array, data.array.sum((0, 1)) * jnp.array([4.0, 9.0]), rtol=1e-5
    )


def unrolled(fn, *args):
    """By how much each scan in the program of `fn` is unrolled."""
    return [
        equation.params["unroll"]
        for equation in equations_of(fn, *args)
        if equation.primitive.name == "scan"
    ]


class TestOptionsOfMap:
    def test_reverse_starts_at_the_end_and_keeps_the_order_of_outputs(self):
        order = []

        def visit(x, i):
            jax.debug.callback(lambda i: order.append(int(i)), i, ordered=True)
            return 2.0 * x

        for reverse in (False, True):
            outputs = map(visit, Time, reverse=reverse)(jnp.arange(5.0), jnp.arange(5))
            np.testing.assert_array_equal(outputs, 2.0 * jnp.arange(5.0))
            jax.effects_barrier()
        assert order == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]

    def test_remat(self):
        def kept(remat):
            run = map(lambda x: jnp.sin(jnp.sin(jnp.sin(x))), Time, remat=remat)
            return len(
                jax.tree.leaves(
                    jax.eval_shape(lambda x: jax.vjp(run, x)[1], jnp.ones((5, 3)))
                )
            )

        assert kept(True) == 1 and kept(False) == 3


@pytest.mark.parametrize("remat", ["nested", ScanCheckpointPolicy(first_layers=2)])
def test_only_true_unrolls_a_sweep(data, remat):
    def program(unroll):
        def run(init, data):
            step = fold(
                lambda carry, x: jnp.tanh(carry + x), Time, remat=remat, unroll=unroll
            )
            return jnp.sum(step(init, data))

        return outline(equations_of(jax.grad(run), jnp.ones((3, 2)), data.array))

    assert program(2) == program(1) != program(True)


def test_what_is_split_and_what_is_shared():
    seen = {}

    def step(
        carry, split, *, module, whole, scalar, number, flag, text, nothing, function
    ):
        seen.update(locals())
        return carry + jnp.sum(split)

    class Module(eqx.Module):
        plain: jax.Array
        named: hax.NamedArray
        act: object = jnp.tanh
        size: int = 7

    fold(step, Time)(
        jnp.zeros(()),
        jnp.ones((5, 4)),
        module=Module(jnp.ones((5, 2)), hax.ones((Width, Time))),
        whole=hax.ones(Width),
        scalar=jnp.ones(()),
        number=2,
        flag=True,
        text="text",
        nothing=None,
        function=jnp.sin,
    )
    assert seen["split"].shape == (4,)
    assert seen["module"].plain.shape == (2,) and seen["module"].named.axes == (Width,)
    assert seen["module"].act is jnp.tanh and seen["module"].size == 7
    assert seen["whole"].axes == (Width,) and seen["scalar"].shape == ()
    assert (seen["number"], seen["flag"], seen["text"], seen["nothing"]) == (
        2,
        True,
        "text",
        None,
    )
    assert seen["function"] is jnp.sin


@pytest.mark.parametrize("name", ["carry", "f", "self"])
def test_arguments_may_have_any_name(data, name):
    def step(total, x, /, **further):
        return total + hax.sum(x).array * further[name]

    by_name = {name: jnp.arange(5.0)}
    total = fold(step, Time)(jnp.zeros(()), data, **by_name)
    expected = jnp.sum(data.array.sum((1, 2)) * jnp.arange(5.0))
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    both, _ = scan(lambda *args, **kwargs: (step(*args, **kwargs), None), Time)(
        jnp.zeros(()), data, **by_name
    )
    np.testing.assert_allclose(both, expected, rtol=1e-5)
    parts = map(lambda x, /, **further: hax.sum(x).array * further[name], Time)(
        data, **by_name
    )
    np.testing.assert_allclose(jnp.sum(parts), expected, rtol=1e-5)


def test_is_scanned_and_is_mapped_share_what_they_refuse(data):
    def value(x, table):
        assert table.shape == (9, 4)
        return hax.sum(x).array + jnp.sum(table)

    mapped = map(value, Time, is_mapped=hax.is_named_array)(data, jnp.ones((9, 4)))
    np.testing.assert_allclose(mapped, data.array.sum((1, 2)) + 36, rtol=1e-5)
    step = fold(
        lambda carry, *args: carry + value(*args), Time, is_scanned=hax.is_named_array
    )
    total = step(jnp.zeros(()), data, jnp.ones((9, 4)))
    np.testing.assert_allclose(total, data.array.sum() + 5 * 36, rtol=1e-5)
    shared = fold(lambda carry, x: carry + hax.sum(x).array, Time, is_scanned=False)(
        jnp.zeros(()), data
    )
    np.testing.assert_allclose(shared, 5 * data.array.sum(), rtol=1e-5)


def test_an_axis_without_inputs_is_a_loop_and_a_number_is_an_axis():
    carry, outputs = scan(lambda carry, _: (2 * carry, carry), 5)(1, None)
    assert int(carry) == 32
    np.testing.assert_array_equal(outputs, [1, 2, 4, 8, 16])


def test_a_carry_may_be_any_tree_with_static_parts(data):
    # Of a tree that was partitioned
    without_array = eqx.filter(hax.zeros(Width), False)
    init = {
        "total": hax.zeros((Width, Depth)),
        "count": 0,
        "kind": "sum",
        "act": jnp.tanh,
        "none": None,
    }
    init["other part"] = without_array

    def step(carry, x):
        return {**carry, "total": carry["total"] + x, "count": carry["count"] + 1}

    carry = jax.jit(
        lambda data: {
            k: v
            for k, v in fold(step, "time")(init, data).items()
            if k in ("total", "count")
        }
    )(data)
    assert int(carry["count"]) == 5
    np.testing.assert_allclose(carry["total"].array, data.array.sum(0), rtol=1e-5)
    assert fold(step, "time")(init, data)["act"] is jnp.tanh


@pytest.mark.parametrize("remat", [False, "nested"])
def test_a_number_as_carry_takes_the_dtype_of_the_data(remat):
    values = jnp.arange(5, dtype=jnp.bfloat16)
    total = fold(lambda carry, x: carry + x, Time, remat=remat)(0, values)
    assert total.dtype == jnp.bfloat16 and float(total) == 10.0


@pytest.mark.parametrize("remat", [True, "nested"])
def test_outputs_may_be_any_tree(data, remat):
    def step(carry, x):
        return carry, {"x": x, "n": 1.5, "none": None, "raw": x.array, "kind": "x"}

    _, outputs = scan(step, Width, remat=remat)(0.0, data)
    assert outputs["x"].axes == (Width, Time, Depth) and outputs["raw"].shape == (
        3,
        5,
        2,
    )
    assert (
        outputs["n"].shape == (3,)
        and outputs["none"] is None
        and outputs["kind"] == "x"
    )


@pytest.mark.parametrize(
    "unroll, layers", [(1, 1), (2, 2), (5, 5), (9, 9), (True, 5), (False, 1)]
)
def test_unroll_changes_the_program(unroll, layers):
    """And not the result, which is in `test_policies_at_work.py`."""
    assert unrolled(fold(jnp.add, Time, unroll=unroll), 0.0, jnp.ones(5)) == [layers]
    assert unrolled(map(jnp.sin, Time, unroll=unroll), jnp.ones(5)) == [layers]


class TestErrors:
    def test_a_scalar_under_is_scanned_true(self, data):
        with pytest.raises(ValueError, match="scale has no dimension to split"):
            fold(lambda carry, x, scale: carry, Time, is_scanned=True)(
                0.0, data, jnp.ones(())
            )

    @pytest.mark.parametrize(
        "init, step, message",
        [
            (
                hax.zeros((Width, Depth)),
                lambda c, x: c.rearrange((Depth, Width)),
                "Rearrange it",
            ),
            (
                {"h": jnp.zeros(3)},
                lambda c, x: {"g": c["h"]},
                (
                    r"The carry goes in as a dict with 'h' and comes out as a dict"
                    r" with 'g'"
                ),
            ),
            (
                {"h": 0.0, "state": {"count": 0, "mean": 0.0}},
                lambda c, x: {**c, "state": {**c["state"], "mean": None}},
                (
                    r"The carry\['state'\]\['mean'\] goes in as float32.. and comes out"
                    r" as None"
                ),
            ),
            (
                [eqx.nn.Identity(), eqx.nn.Lambda(jnp.tanh)],
                lambda c, x: [c[0], eqx.nn.Dropout()],
                (
                    r"The carry\[1\] goes in as a value of type Lambda and comes out as"
                    r" .* Dropout"
                ),
            ),
            (
                ("a", 0.0),
                lambda c, x: ("b", 0.0),
                r"carry\[0\] goes in as 'a' and comes out as 'b'. Keep it as it is",
            ),
            (
                hax.zeros(Width),
                lambda c, x: c.array,
                "goes in as NamedArray.*comes out as float32",
            ),
        ],
    )
    def test_a_carry_that_changes(self, data, init, step, message):
        for remat in (False, "nested"):
            with pytest.raises(ValueError, match=message):
                fold(step, Time, remat=remat)(init, data)

    @pytest.mark.parametrize(
        "before, after, fix",
        [
            (
                ONES,
                HALF,
                "Cast the result, y.astype(carry.dtype), or the initial carry.",
            ),
            ([ONES], [HALF], "Cast the result, y.astype(carry[0].dtype), or the"),
            (NAMED, NAMED.rearrange((Depth, Width)), "Rearrange it: carry.rearrange"),
            (NAMED, hax.ones(Width), "Keep its axes and shape."),
            (ONES, jnp.ones(2), "Keep its axes and shape."),
            (NAMED, ONES, "Keep its axes and shape."),
            ((ONES, ONES), [ONES, ONES], "Return a tuple, as the carry is."),
            ([ONES], (ONES,), "Return a list, as the carry is."),
            ([ONES], [ONES, ONES], "Keep it as it is."),
            (ONES, None, "Keep it as it is."),
            (None, ONES, "Keep it as it is."),
            (
                ONES,
                (ONES, 0.0),
                "For a function that returns (carry, output) use scan.",
            ),
            (ONES, [ONES, 0.0], "Keep it as it is."),
            (ONES, (ONES, 0.0, 0.0), "Keep it as it is."),
            ({"a": ONES}, {"a": (ONES, 0.0)}, "Keep it as it is."),
        ],
    )
    def test_how_a_carry_is_kept(self, before, after, fix):
        with pytest.raises(ValueError) as error:
            check_carry(before, after)
        assert f" {fix}" in str(error.value)
        # Numbers take the dtype that they meet
        check_carry((0.5, before), (jnp.float16(1), before))

    @pytest.mark.parametrize(
        "before, after, options, fix",
        [
            (
                ONES,
                None,
                {"output": ONES},
                "returned is (carry, output), in this order.",
            ),
            (ONES, jnp.ones(2), {"output": ONES}, "is (carry, output), in this order."),
            (ONES, jnp.ones(2), {"output": None}, "Keep its axes and shape."),
            (ONES, (ONES, 0.0), {"what": "layer"}, "Keep it as it is."),
            (None, ONES, {"what": "state"}, "Pass the first state to sweep_back."),
            ([None], [ONES], {"what": "state"}, "Keep it as it is."),
            (ONES, None, {"what": "state"}, "Keep it as it is."),
        ],
    )
    def test_how_another_state_is_kept(self, before, after, options, fix):
        with pytest.raises(ValueError) as error:
            check_carry(before, after, **options)
        assert str(error.value).endswith(fix)

    @pytest.mark.parametrize("init", [0.0, jnp.float32(0)])
    def test_a_layer_is_traced_once(self, init):
        calls = []

        def add(total, x):
            calls.append(None)
            return total + x

        jax.make_jaxpr(lambda xs: fold(add, Time)(init, xs))(jnp.ones(Time.size))
        assert len(calls) == 1

    @pytest.mark.parametrize(
        "axis, what, fix",
        [
            (-1, "fold", "Write hax.Axis('layers', size)."),
            (True, "fold", "Write hax.Axis('layers', size)."),
            (2.0, "fold", "Write int(2.0)."),
            (2.5, "fold", "Write hax.Axis('layers', size)."),
            ("time", "fold", "Write hax.Axis('time', size)."),
            ("nested", "fold", "Write remat='nested'."),
            (eqx.nn.Identity(), "Stacked.of", "Give the layers in a list."),
            (eqx.nn.Identity(), "fold", "Write hax.Axis('layers', size)."),
            (jnp.ones(3), "Stacked.of", "Write hax.Axis('layers', size)."),
        ],
    )
    def test_an_axis_of_another_kind(self, axis, what, fix):
        with pytest.raises(TypeError) as error:
            layers_axis(axis, what)
        assert str(error.value).endswith(fix)
        assert layers_axis(np.int8(0), what) == hax.Axis("layers", 0)

    @pytest.mark.parametrize(
        "value, written",
        [
            (None, "None"),
            (NAMED, "NamedArray axes (width=3, depth=2) of float32"),
            (ONES, "float32[3]"),
            (dict.fromkeys("abcd"), "a dict with 'a', 'b', 'c', 'd'"),
            (dict.fromkeys("abcde"), "a dict with 'a', 'b', 'c', 'd', and 1 more"),
            ((1, ONES), "a tuple of 2 (a value of type int, float32[3])"),
            ([None] * 4, "a list of 4 (None, None, None, None)"),
            ([None] * 5, "a list of 5 (None, None, None, None, …)"),
            ("a", "'a'"),
            (2, "2"),
        ],
    )
    def test_how_errors_describe_a_value(self, value, written):
        assert text(value) == written

    def test_a_linear_scan_is_transposed(self):
        def step(carry, weight):
            return weight * carry, carry

        def derivatives(x, remat):
            def run(x):
                return scan(step, Time, remat=remat)(x, jnp.arange(1.0, 6.0))[0]

            return jax.linear_transpose(run, 1.0)(1.0)[0], *jax.vmap(jax.grad(run))(x)

        # Not "offload", whose carries have names, which JAX can't transpose.
        policies = (True, "nested", "recompute", False, "save_all")
        found = jax.jit(lambda x: [derivatives(x, remat) for remat in policies])(
            jnp.ones(2)
        )
        np.testing.assert_allclose(found, np.full((5, 3), 120.0))
