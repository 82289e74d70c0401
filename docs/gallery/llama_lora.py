# %% [markdown]
# # Fine-tune a Hugging Face Llama with LoRA
#
# How to fine-tune a model from a folder in Hugging Face's format, with low-rank
# adapters that PEFT loads. The model is a tiny random Llama, made on the spot; for a
# real one, name its folder. This example uses the reference models, so it runs in a
# checkout of the repository.

# %%
import json
import tempfile
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import optax
from matplotlib.figure import Figure

from models.hf_io.adapters import load_adapters, save_adapters
from models.hf_io.decoder_weights import write_decoder
from models.llama import LlamaConfig
from models.lm import next_token_loss
from models.loading import load_model
from models.parts.decoder import Decoder
from models.run_config import find_model
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.training import TokenBatch

folder = Path(tempfile.mkdtemp())
tiny = LlamaConfig(
    hidden_dim=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=128,
    initializer_range=0.1,
)
random = Decoder.init(tiny, hax.Axis("vocab", 256), remat=True, key=jax.random.key(0))
write_decoder(folder / "base", random)
print("written:", ", ".join(sorted(path.name for path in (folder / "base").iterdir())))

# %% [markdown]
# ## Read it, and adapt it
#
# The layers are read into one stack. Adapters are added by the paths of the linears;
# only they get gradients and optimizer state.

# %%
base = load_model(find_model(str(folder / "base")))
lora = LoraConfig(rank=8, alpha=16, targets=("*.attention.*", "*.mlp.*"))
model = apply_lora(base, lora, key=jax.random.key(1))
trained, frozen = eqx.partition(model, lora_filter(model))


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


print(f"trained: {count(trained):,} of {count(model):,} numbers")

# %% [markdown]
# ## Train on a sentence
#
# Bytes are the tokens here; for a real model take its tokenizer.

# %%
text = b"Low-rank adapters learn this sentence while the base model stays as it is. "
tokens = np.frombuffer(2 * text, np.uint8).astype(np.int32)[None, : len(text) + 1]
batch = TokenBatch.of(
    tokens[:, :-1], tokens[:, 1:], np.ones((1, len(text)), np.float32)
)
optimizer = optax.adam(1e-2)


@eqx.filter_jit
def step(trained, state, frozen):
    def loss(trained):
        return next_token_loss(eqx.combine(trained, frozen), batch)[0]

    value, gradient = eqx.filter_value_and_grad(loss)(trained)
    updates, state = optimizer.update(gradient, state)
    return eqx.apply_updates(trained, updates), state, value


state = optimizer.init(trained)
values = []
for number in range(41):
    trained, state, value = step(trained, state, frozen)
    values.append(value)
    if number % 10 == 0:
        print(f"step {number:2}  loss {value:.3f}")
figure = Figure((6, 2.5), layout="constrained")
axes = figure.subplots()
axes.set(xlabel="step", ylabel="loss (nats a byte)")
axes.plot(values, label="with adapters")
axes.axhline(values[0], color="black", ls="--", label="base model")
_ = axes.legend()

# %% [markdown]
# ## For PEFT
#
# `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapters")`
# loads them, and so does this library:

# %%
save_adapters(
    folder / "adapters", eqx.combine(trained, frozen), base_model=str(folder / "base")
)
written = json.loads((folder / "adapters" / "adapter_config.json").read_text())
print(written["peft_type"], written["r"], *written["target_modules"])
again = load_adapters(base, folder / "adapters")
print(f"loss of what was read: {eqx.filter_jit(next_token_loss)(again, batch)[0]:.3f}")
