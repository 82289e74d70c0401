"""The loss of further tokens against layers of transformers; needs torch.

transformers itself has no such loss, and reads none of these layers: they are put
together by the formulas of DeepSeek V3 (arXiv:2412.19437, section 2.2).
"""

import copy
import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.hf_io.decoder_weights import read_decoder, write_decoder
from models.hf_io.formats import read_hf_config
from models.hf_io.safetensors_folder import SINGLE
from models.lm import loss_and_sums
from models.parts.decoder import Decoder
from models.parts.sections import MtpConfig
from stacked_remat.training import TokenBatch

from .architecture_cases import CASES
from .test_parity import (
    TOKENS,
    Batch,
    Pos,
    Vocab,
    close,
    loaded,
    new_model,
    rounded_otherwise,
)

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

WEIGHT, NUM_TARGETS = 0.3, Batch.size * (Pos.size - 1)
MODELS = {
    "DeepSeek V3": 1,
    "DeepSeek V3, yarn": 2,
    "DeepSeek V3, no query ranks or groups, biases, halves, raw gates, odd widths": 1,
    "GLM-4.5": 2,
    "GLM-4.5, norms, biases, groups, no dense layer": 1,
    "Qwen3-Next": 1,
    "Qwen3-Next, tied, biases, raw gates, dense first layer, yarn": 1,
    "Qwen3.5, tied, biases, linear attention alone at the end": 1,
    "Qwen3.5 MoE": 1,
}
QWEN3 = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}


class Joining(torch.nn.Module):
    """What a depth has beside its layer."""

    def __init__(self, config, norm):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = norm(width, eps=eps), norm(width, eps=eps)
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.shared_head = torch.nn.ModuleDict({"norm": norm(width, eps=eps)})


def new_reference(family, fields, depths):
    """A model of transformers whose last layers are those of the depths, and what joins
    their inputs.
    """
    num_layers = fields["num_hidden_layers"]
    more, types = {"num_hidden_layers": num_layers + depths}, None
    if family.startswith("Qwen3"):
        usual = (["linear_attention"] * 3 + ["full_attention"]) * num_layers
        types = fields.get("layer_types", usual[:num_layers])
        more["layer_types"] = [*types, "full_attention"]
    model = new_model(family, fields | more)
    # Its forward pass takes so many of its layers.
    model.config.num_hidden_layers = num_layers
    model.config.num_nextn_predict_layers = depths
    model.config.mtp_num_hidden_layers = depths  # of Qwen3.5
    if types is not None:
        model.config.layer_types = types
    torch.manual_seed(1)
    joining = torch.nn.ModuleList()
    for _ in range(depths):
        joining.append(Joining(model.config, type(model.model.norm)))
    with torch.no_grad():
        for name, parameter in joining.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn_like(parameter) * 0.2 + mean)
    return model, joining


def reference_losses(model, joining):
    """The cross entropies of the next token, and of those that each depth predicts,
    added up over the tokens.
    """
    tokens = torch.tensor(TOKENS)
    hidden = model.model(tokens).last_hidden_state
    embedded = model.model.embed_tokens(tokens)
    length, num_layers = tokens.shape[1], model.config.num_hidden_layers
    losses = [summed_cross_entropy(model, hidden[:, :-1], tokens[:, 1:])]
    for depth, own in enumerate(joining, start=1):
        rest = length - depth
        both = own.enorm(embedded[:, depth:]), own.hnorm(hidden[:, :rest])
        joined = own.eh_proj(torch.cat(both, dim=-1))
        positions = torch.arange(rest)[None]
        hidden = model.model.layers[num_layers + depth - 1](
            joined,
            attention_mask=torch.full((rest, rest), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(joined, positions),
        )
        hidden = own.shared_head["norm"](hidden)
        losses.append(
            summed_cross_entropy(model, hidden[:, :-1], tokens[:, depth + 1 :])
        )
    return losses


def summed_cross_entropy(model, hidden, targets):
    logits = model.lm_head(hidden).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")


def write(model, joining, folder):
    """A folder in the published form."""
    model.save_pretrained(folder)
    tensors, first = load_file(folder / SINGLE), model.config.num_hidden_layers
    if model.config.model_type.startswith("qwen3"):
        prefix = f"model.layers.{first}."
        tensors = {
            name.replace(prefix, "mtp.layers.0."): tensor
            for name, tensor in tensors.items()
        }
        for name, tensor in joining[0].state_dict().items():
            module = QWEN3[name.removesuffix(".weight")]
            tensors[f"{module}.weight"] = tensor.numpy()
    else:
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        # The published files have copies of both.
        copies = {"embed_tokens": embedding, "shared_head.head": head}
        for depth, own in enumerate(joining):
            prefix = f"model.layers.{first + depth}"
            for name, tensor in own.state_dict().items():
                tensors[f"{prefix}.{name}"] = tensor.numpy()
            for name, tensor in copies.items():
                tensors[f"{prefix}.{name}.weight"] = tensor.detach().numpy()
    whole = {name: tensor.copy() for name, tensor in tensors.items()}
    save_file(whole, folder / SINGLE)


def read(folder, depths):
    """Ours, with the layers of the depths."""
    config, rows = read_hf_config(folder)
    assert config.further_tokens == MtpConfig(depths, 0.0)
    config = dataclasses.replace(config, mtp=MtpConfig(depths, WEIGHT))
    shapes = eqx.filter_eval_shape(
        Decoder.init, config, Vocab.resize(rows), key=jax.random.key(0)
    )
    return read_decoder(folder, shapes)


@pytest.fixture(params=MODELS, scope="module")
def case(request, tmp_path_factory):
    depths = MODELS[request.param]
    reference = new_reference(*CASES[request.param], depths)
    folder = tmp_path_factory.mktemp("weights")
    write(*reference, folder)
    return reference, read(folder, depths), folder


def expected_gradients(model, joining, folder):
    """The sums of cross entropies, and the gradients of the loss as leaves of ours."""
    model, joining = copy.deepcopy(model), copy.deepcopy(joining)
    first, *further = reference_losses(model, joining)
    (first + WEIGHT / len(further) * sum(further)).backward()
    with torch.no_grad():
        for one in (model, joining):
            for parameter in one.parameters():
                parameter.copy_(parameter.grad / NUM_TARGETS)
            for name, buffer in one.named_buffers():
                if "e_score_correction" in name:
                    buffer.zero_()
    write(model, joining, folder)
    gradients = jax.tree.leaves(read(folder, len(joining)))
    return [loss.item() for loss in (first, *further)], gradients


def test_loss_and_gradients(case, tmp_path):
    (model, joining), decoder, _ = case
    (first, *further), expected = expected_gradients(model, joining, tmp_path / "own")
    named = hax.named(jnp.asarray(TOKENS), (Batch, Pos))
    is_target = (hax.arange(Pos) < Pos.size - 1).astype(jnp.float32)
    weights = hax.ones((Batch, Pos)) * is_target
    batch = TokenBatch(named, hax.roll(named, -1, Pos), weights)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def loss_of(decoder):
        (loss, _), metrics = loss_and_sums(decoder, batch)
        return loss, metrics

    (loss, metrics), gradient = loss_of(decoder)
    whole = first + WEIGHT / len(further) * sum(further)
    np.testing.assert_allclose(loss, whole / NUM_TARGETS, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], first / NUM_TARGETS, rtol=1e-5)
    for depth, summed in enumerate(further, start=1):
        mean = summed / (NUM_TARGETS - Batch.size * depth)
        np.testing.assert_allclose(metrics[f"mtp_loss_{depth}"], mean, rtol=1e-5)
    assert np.any(gradient.mtp.stacked.eh_proj.weight.array)
    pairs = list(zip(jax.tree.leaves(gradient), expected, strict=True))
    errors = [np.linalg.norm(ours - theirs) for ours, theirs in pairs]
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in expected))
    allowed = [1e-5 * norm] * len(errors)
    if all(np.asarray(errors) <= allowed):
        return
    for number, other in enumerate(rounded_otherwise(model)):
        folder = tmp_path / f"rounded {number}"
        _, leaves = expected_gradients(other, joining, folder)
        for place, leaf in enumerate(leaves):
            change = 2 * np.linalg.norm(leaf - expected[place])
            allowed[place] = max(allowed[place], change)
    assert all(np.asarray(errors) <= allowed)


def test_the_round_trip_is_exact(case, tmp_path):
    (model, _), decoder, folder = case
    write_decoder(tmp_path / "again", decoder)
    first, second = (load_file(root / SINGLE) for root in (folder, tmp_path / "again"))
    tied = {"lm_head.weight"} if decoder.head is None else set()
    assert first.keys() - tied == second.keys() - tied
    for name, tensor in second.items():
        np.testing.assert_array_equal(tensor, first[name])
    # transformers leaves these layers out.
    with torch.no_grad():
        again = loaded(model, tmp_path / "again")
        found = again(torch.tensor(TOKENS)).logits.numpy()
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    # Of the largest logit, as other round trips: PyTorch rounds by the CPU
    close(found, expected, 1e-6)
