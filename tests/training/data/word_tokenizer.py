"""A small tokenizer.json of words, as the `tokenizers` package writes it."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CHAT_TEMPLATE = """{% for m in messages %}<turn>{{ m.role }} {{ m.content }}</turn>{% endfor %}
{%- if add_generation_prompt %}<turn>assistant{% endif %}"""  # noqa: E501


def word_tokenizer(*, begin=False):
    """Bytes merged into words of a few texts, with special tokens `<s>`, `</s>`,
    `<turn>` and `</turn>`.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<turn>", "</turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["never odd or even", "user assistant hello there"] * 4, trainer
    )
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer


def save(folder, *, begin=False, template=CHAT_TEMPLATE, config=None):
    """Writes the tokenizer and its config as models on the hub have them."""
    folder.mkdir(parents=True, exist_ok=True)
    word_tokenizer(begin=begin).save(str(folder / "tokenizer.json"))
    config = (
        {"eos_token": "</s>", "bos_token": {"content": "<s>"}}
        if config is None
        else config
    )
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
