"""Tables of fields that several architectures have."""

from models.hf_io.config_fields.entries import Field, Fields, KeyValueHeads, Only

SIZES: Fields = {
    "hidden_size": Field("hidden_dim"),
    "num_hidden_layers": Field("num_layers"),
    "num_attention_heads": Field("num_heads"),
    "head_dim": Field("attention.head_dim", None, written="head_dim"),
    "attention_bias": Field("attention.bias", False),
    "rms_norm_eps": Field("rms_norm_eps", 1e-6),
    "initializer_range": Field("initializer_range", 0.02),
    "tie_word_embeddings": Field("tie_word_embeddings", False),
    "num_key_value_heads": KeyValueHeads(),
    "hidden_act": Only("silu", "swish", written=True),
    "attention_dropout": Only(0),
}
"""Those that most decoders have."""
DENSE_SIZES: Fields = SIZES | {
    "intermediate_size": Field("mlp_dim", written="Mlp.size")
}
"""The same, with that of an MLP."""

LINEAR_SIZES: Fields = {
    "linear_num_key_heads": Field("linear.num_key_heads", 16),
    "linear_num_value_heads": Field("linear.num_value_heads", 32),
    "linear_key_head_dim": Field("linear.key_dim", 128),
    "linear_value_head_dim": Field("linear.value_dim", 128),
    "linear_conv_kernel_dim": Field("linear.conv_size", 4),
}
"""Those of layers with linear attention."""

LATENT_SIZES: Fields = {
    "q_lora_rank": Field("latent.query_rank", None),
    "kv_lora_rank": Field("latent.key_value_rank", 512),
    "qk_nope_head_dim": Field("latent.plain_dim", 128),
    "qk_rope_head_dim": Field("latent.rotary_dim", 64),
    "v_head_dim": Field("latent.value_dim", 128),
}
"""Those of latent attention, without that of heads, which is their sum."""

FURTHER_TOKENS: Fields = {
    "num_nextn_predict_layers": Field(
        "mtp.depths", 0, ("num_mtp_layers",), written="mtp.trained_depths"
    )
}
"""The number of layers that predict further tokens, which are files' own: transformers
has none.
"""
