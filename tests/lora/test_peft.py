"""Tests of files in PEFT's format; they are compared with PEFT itself in the tests of
the models.
"""

import json
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat.lora import (
    LoraConfig,
    PeftParameter,
    load_peft,
    merge_lora,
    peft_tensor_names,
    save_peft,
)

from ..blocks import assert_close, assert_equal
from .stacks import adapted, filled, model, with_trained_adapters

safetensors_numpy = pytest.importorskip("safetensors.numpy")

PREFIX = "base_model.model."


def names(path, index):
    """Experts are one parameter each; `q_proj` and `o_proj` are modules."""
    if path == "head":
        return "lm_head"
    module = f"model.layers.{index[0]}"
    if "experts" not in path:
        return f"{module}.attn.{path.rpartition('.')[2]}"
    order = ["up", "down"].index(path.rpartition(".")[2])
    return PeftParameter(
        f"{module}.experts", ("up_proj", "down_proj")[order], index[1], 3, order=order
    )


def equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    assert_equal(left, right)


def gate_and_up():
    """Two linears, and the same with adapters."""
    shapes = eqx.filter_eval_shape(lambda: eqx.nn.Linear(6, 8, key=jax.random.key(0)))
    linears = filled({"gate": shapes, "up": shapes}, 0)
    return linears, with_trained_adapters(linears, LoraConfig(2, 3.0, ("*",)))


def fused(path, index, interleaved=False):
    """They are parts of one matrix."""
    part = ["gate", "up"].index(path)
    rows = (part, 16, 2) if interleaved else (8 * part, 8 * part + 8, 1)
    return PeftParameter("mlp", "gate_up", rows=rows)


def with_head():
    """The adapted model with an adapter of the head too, of another rank and scale."""
    config = LoraConfig(3, 1.0, ("head",))
    head = with_trained_adapters({"head": model().head}, config)["head"]
    return eqx.tree_at(lambda tree: tree.head, adapted(), head)


def tensors_in(folder):
    return safetensors_numpy.load_file(folder / "adapter_model.safetensors")


def rewrite(folder, change=None, **settings):
    """Change the files: the tensors by a function, fields of the config by name."""
    tensors = tensors_in(folder)
    if change is not None:
        change(tensors)
    safetensors_numpy.save_file(tensors, folder / "adapter_model.safetensors")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.fixture
def saved(tmp_path):
    save_peft(tmp_path / "made", adapted(), names, base_model="some/model@v1")
    return tmp_path / "made"


def test_saved_adapters_load_into_the_base_and_into_an_adapted_model(saved):
    equal(load_peft(model(), saved, names), adapted())
    equal(load_peft(filled(adapted(), 9), saved, names), adapted())
    others = with_trained_adapters(model(), LoraConfig(4, 1.0, ("*.q_proj",)))
    equal(load_peft(others, saved, names), adapted())
    assert (
        load_peft(
            model(), saved, names, dtype=jnp.bfloat16
        ).layers.stacked.q_proj.b.dtype
        == jnp.bfloat16
    )


@pytest.mark.parametrize("key", ["lm_head.base_layer.weight", "lm_head.weight"])
def test_a_stored_weight_of_a_head_is_not_read(tmp_path, key):
    """PEFT stores the weight of an adapted `lm_head` beside its adapter."""
    save_peft(tmp_path, with_head(), names)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update({PREFIX + key: np.zeros((1, 1), np.float32)}),
    )
    equal(load_peft(model(), tmp_path, names), with_head())


def test_the_layout_of_the_files(saved):
    tensors, tree = tensors_in(saved), adapted().layers.stacked
    assert set(tensors) == set(peft_tensor_names(saved)) and len(tensors) == 5 * 4 * 2
    a, b = (
        tensors[f"{PREFIX}model.layers.4.attn.q_proj.lora_{which}.weight"]
        for which in "AB"
    )
    np.testing.assert_array_equal(a, tree.q_proj.a.array[4].T)
    np.testing.assert_array_equal(b, tree.q_proj.b.array[4].reshape(2, 8).T)
    # The first parameter of a module is wrapped innermost. Rows: expert after expert;
    # columns: interleaved.
    a, b = (
        tensors[f"{PREFIX}model.layers.1.experts.base_layer.lora_{which}.weight"]
        for which in "AB"
    )
    up = tree.experts.stacked.up
    np.testing.assert_array_equal(
        a, np.concatenate([up.a.array[1, expert].T for expert in range(3)])
    )
    np.testing.assert_array_equal(b.reshape(8, 2, 3)[:, :, 2], up.b.array[1, 2].T)
    config = json.loads((saved / "adapter_config.json").read_text())
    assert (
        config["peft_type"] == "LORA"
        and config["base_model_name_or_path"] == "some/model"
    )
    assert config["revision"] == "v1"
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (2, 3, {})
    assert config["target_modules"] == ["o_proj", "q_proj"]
    assert config["target_parameters"] == ["experts.down_proj", "experts.up_proj"]


def test_ranks_and_scales_that_differ_are_patterns(tmp_path):
    tree = with_head()
    save_peft(tmp_path, tree, names)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == 2 and config["rank_pattern"] == {"lm_head": 3}
    assert config["alpha_pattern"] == {"lm_head": 1}
    equal(load_peft(model(), tmp_path, names), tree)


@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_of_one_matrix_share_its_tensors(tmp_path, interleaved):
    linears, tree = gate_and_up()
    save_peft(tmp_path, tree, partial(fused, interleaved=interleaved))
    tensors = tensors_in(tmp_path)
    a, b = (tensors[f"{PREFIX}mlp.lora_{which}.weight"] for which in "AB")
    assert a.shape == (4, 6) and b.shape == (16, 4)
    whole = 1.5 * (b @ a)
    for part, (name, plain) in enumerate(linears.items()):
        own = whole[part::2] if interleaved else whole[8 * part : 8 * part + 8]
        assert_close(merge_lora(tree)[name].weight, plain.weight + own)
    equal(load_peft(linears, tmp_path, partial(fused, interleaved=interleaved)), tree)


def test_parts_may_share_an_a_or_have_no_adapter(tmp_path):
    linears, tree = gate_and_up()
    save_peft(tmp_path, tree, fused)

    def share(tensors):
        for key in tensors:
            if "lora_B" in key:
                tensors[key] = np.ones_like(tensors[key])

    rewrite(tmp_path, share)  # as PEFT trains them
    again = load_peft(linears, tmp_path, fused)
    assert again["gate"].b.shape == again["up"].b.shape == (4, 8)
    half = {**linears, "up": tree["up"]}
    save_peft(tmp_path, half, fused)
    equal(load_peft(linears, tmp_path, fused), half)


def test_layers_of_unequal_rank_and_scale_are_padded(saved):
    key = f"{PREFIX}model.layers.3.attn.q_proj.lora_"

    def widen(tensors):
        rng = np.random.default_rng(0)
        tensors[f"{key}A.weight"] = rng.normal(size=(5, 6)).astype(np.float32)
        tensors[f"{key}B.weight"] = rng.normal(size=(8, 5)).astype(np.float32)

    rewrite(saved, widen, rank_pattern={r"layers\.3\.attn\.q_proj": 5})
    tree = load_peft(model(), saved, names).layers.stacked.q_proj
    assert tree.a.axes[-1].size == 5 and tree.scale == 1.5
    tensors = tensors_in(saved)
    product = 3 / 5 * tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"]
    merged, old = merge_lora(tree).weight, model().layers.stacked.q_proj.weight
    difference = (
        (merged - old)
        .rearrange(("layers", "heads", "dim", "embed"))
        .array.reshape(5, 8, 6)
    )
    np.testing.assert_allclose(difference[3], product, atol=1e-5)
    first = merge_lora(adapted()).layers.stacked.q_proj.weight.array[0]
    np.testing.assert_allclose(merged.array[0], first, atol=1e-6)


def test_missing_unknown_and_mismatched_tensors_and_integers_are_named(saved):
    attention = f"{PREFIX}model.layers.0.attn"

    def spoil(tensors):
        del tensors[f"{attention}.q_proj.lora_A.weight"]
        del tensors[f"{PREFIX}model.layers.2.experts.lora_B.weight"]
        tensors[f"{PREFIX}model.layers.7.attn.q_proj.lora_A.weight"] = np.zeros(
            (2, 6), np.float32
        )
        tensors[f"{attention}.o_proj.lora_A.weight"] = np.zeros((2, 9), np.float32)
        tensors["\x1b[2J"] = np.zeros(1, np.float32)
        tensors[f"{attention}.q_proj.lora_B.weight"] = np.zeros((8, 2), np.int8)

    rewrite(saved, spoil)
    with pytest.raises(ValueError, match="do not fit the model") as error:
        load_peft(model(), saved, names)
    assert str(error.value).splitlines()[1:] == [
        f"missing: {attention}.q_proj.lora_A.weight (2, 6)",
        f"missing: {PREFIX}model.layers.2.experts.lora_B.weight (6, 6)",
        "unknown: '\\x1b[2J' (1,)",
        f"unknown: {PREFIX}model.layers.7.attn.q_proj.lora_A.weight (2, 6)",
        f"mismatched: {attention}.o_proj.lora_A.weight is (2, 9), expected (2, 8)",
        (
            f"not a float: {attention}.q_proj.lora_B.weight is I8, expected one of F64,"
            " F32, F16, BF16"
        ),
    ]


def test_an_adapter_that_the_file_lacks_is_missing(saved):
    with pytest.raises(
        ValueError, match="missing: head has an adapter, the file has none for lm_head"
    ):
        load_peft(with_head(), saved, names)


def test_the_tensors_may_decide_which_layers_are_adapted(saved):
    def keep_one(tensors):
        for key in list(tensors):
            if "layers.2.attn" not in key:
                del tensors[key]

    rewrite(saved, keep_one, layers_to_transform=[2])
    tree = load_peft(model(), saved, names).layers.stacked
    assert not hasattr(tree.experts.stacked.up, "a")
    np.testing.assert_array_equal(
        tree.q_proj.a.array[2], adapted().layers.stacked.q_proj.a.array[2]
    )
    assert not np.any(tree.q_proj.a.array[1]) and not np.any(tree.q_proj.b.array[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora = True"),
        (
            {"bias": "all", "modules_to_save": ["lm_head"]},
            r"bias = 'all', modules_to_save = \['lm_head'\]",
        ),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4'"),
        ({"r": "two", "target_modules": 5}, "r = 'two', target_modules = 5"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config = "),
    ],
)
def test_other_kinds_of_adapters_are_refused(saved, settings, message):
    rewrite(saved, **settings)
    with pytest.raises(
        ValueError, match=f"has settings that are not supported: {message}"
    ):
        load_peft(model(), saved, names)


def test_unknown_fields_are_named_in_a_warning_unless_they_are_off(saved):
    rewrite(
        saved,
        use_later=False,
        later_config=None,
        later_modules=[],
        lora_dropout=0.1,
        revision="main",
    )
    equal(load_peft(model(), saved, names), adapted())
    rewrite(saved, **{"lora_scale_by": "depth", "\x1b[2J": 1})
    with pytest.warns(UserWarning, match=r"are not used: 'lora_scale_by', '\\x1b\[2J'"):
        equal(load_peft(model(), saved, names), adapted())


def test_truncated_files_are_named(saved):
    tensors, config = saved / "adapter_model.safetensors", saved / "adapter_config.json"
    tensors.write_bytes(tensors.read_bytes()[:-8])
    for read in (
        lambda: load_peft(model(), saved, names),
        lambda: peft_tensor_names(saved),
    ):
        with pytest.raises(
            ValueError,
            match="adapter_model.safetensors can't be read .* truncated; fetch or save",
        ):
            read()
    config.write_text(config.read_text()[:-8])
    with pytest.raises(
        ValueError,
        match="adapter_config.json is not valid JSON.* truncated; fetch or save",
    ):
        load_peft(model(), saved, names)


@pytest.mark.parametrize("modules", ["all-linear", r".*\.(q_proj|o_proj)"])
def test_targets_may_be_a_pattern(saved, modules):
    rewrite(saved, target_modules=modules)
    equal(load_peft(model(), saved, names), adapted())


def test_missing_files_and_adapters_are_errors(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match="adapter_config.json is missing"):
        load_peft(model(), tmp_path, names)
    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_model.safetensors is missing"):
        load_peft(model(), saved, names)
    with pytest.raises(ValueError, match="no adapters to save"):
        save_peft(tmp_path / "none", model(), names)
    assert not (tmp_path / "none").exists()


def test_invalid_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Two linears are named"):
        save_peft(tmp_path, adapted(), lambda path, index: "one")
    with pytest.raises(
        ValueError, match=r"can't be written as one: \(rows, index\) \[\(None, 2\)"
    ):
        save_peft(
            tmp_path,
            with_trained_adapters(
                [model().head, model().head], LoraConfig(2, 1.0, ("*",))
            ),
            lambda path, index: PeftParameter("module", "parameter", int(path), 3),
        )
