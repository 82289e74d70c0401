"""Greedy continuations against those of Hugging Face's `generate`, on exported random models."""

import warnings

import equinox as eqx
import jax
import numpy as np
import pytest
from haliax import Axis

from models.decoder.config import FULL, SLIDING, AttentionConfig, ExpertsConfig
from models.decoder.decoder import Decoder
from models.generation.decoding import continued_tokens
from models.generation.sampling import Sampling
from models.gpt_oss import GptOssConfig
from models.hf_io.decoder_weights import write_decoder
from models.loading import find_model

from ..training.data import word_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

NEW, END = 8, 1
SIZES = dict(hidden_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, initializer_range=0.4)
MODELS = {
    "sinks": GptOssConfig(
        **SIZES,
        attention=AttentionConfig(bias=True, window=3, layer_types=(SLIDING, FULL)),
        experts=ExpertsConfig(4, 2, 8),
    ),
}


def of_hugging_face(folder, prompts):
    """The new tokens of each prompt by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        found = []
        for prompt in prompts:
            tokens = torch.tensor([prompt.tolist()])
            whole = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=END,
            )
            found.append(whole[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_continues_as_hugging_face_continues_each_prompt(name, tmp_path):
    folder = word_tokenizer.save(tmp_path / "words")
    tokenizer = word_tokenizer.word_tokenizer()
    Vocab = Axis("vocab", tokenizer.get_vocab_size())
    model = eqx.filter_jit(Decoder.init)(MODELS[name], Vocab, key=jax.random.key(3))
    write_decoder(tmp_path / "exported", model)
    source = find_model(str(tmp_path / "exported"), tokenizer=str(folder))
    prompts = [source.tokenizer.encode(text) for text in ("never odd or even", " hello")]
    assert len({len(prompt) for prompt in prompts}) == 2
    steps = continued_tokens(
        source.load(),
        prompts,
        max_new_tokens=NEW,
        sampling=Sampling(temperature=0.0),
        key=jax.random.key(0),
    )
    ours = np.stack(list(steps), axis=1).tolist()
    assert ours == of_hugging_face(tmp_path / "exported", prompts)
    assert len({token for row in ours for token in row}) > 4
