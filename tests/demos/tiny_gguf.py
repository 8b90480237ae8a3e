"""A GGUF file of a tiny random Llama with a byte-level tokenizer: all that `demos.smollm2` reads from the real one."""

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = [*SPECIAL, *sorted(ByteLevel.alphabet()), "Ġa", "ĠĠ"]
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    _add_config(writer, model.config)
    _add_tokenizer(writer)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(_gguf_name(name), _gguf_layout(name, weight, model.config).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([control if token in SPECIAL else normal for token in VOCABULARY])
    writer.add_token_merges(["Ġ a", "Ġ Ġ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}")


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", maxsplit=1)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def _gguf_layout(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """GGUF interleaves the two halves that rotary embeddings rotate, of every query and key head."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    halves = weight.unflatten(0, (-1, 2, config.head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)
