"""Tiny random models of the architectures that OVAL must work with, built in code, float32 and in eval mode.

Weights are large enough that attention is selective and greedy decoding has clear margins; no token ends a text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

VOCAB = 96
PAD = 0
MAX_POSITIONS = 512
SLIDING_WINDOW = 48
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Architecture:
    """One architecture and what stock transformers can do with it.

    Attributes:
        build: makes the model; `seed` draws other weights, `layers` changes the depth.
        layers: what `handle.stats()["layers"]` must say.
        dense_because: what `handle.stats()["dense_steps"]` must count at every step; None: nothing after prefill.
        refuses: what the stock model itself cannot do, and why.
    """

    name: str
    build: Callable[..., PreTrainedModel]
    layers: dict[str, int]
    dense_because: str | None = None
    refuses: dict[str, str] = field(default_factory=dict)

    @property
    def is_paged(self) -> bool:
        """Whether decoding steps take the paged path."""
        return "paged" in self.layers and self.dense_because is None

    def __str__(self) -> str:
        return self.name


def build(model_class: str, config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A seeded random model whose logits are spread out."""
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, model_class)(config).eval()
    head = model.get_output_embeddings()
    if head is not None and not config.get_text_config(decoder=True).tie_word_embeddings:
        torch.nn.init.normal_(head.weight, std=0.5)
    if model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD
    return model


def decoder(name: str, layers: int = 2, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A causal model: `decoder("Llama")` is a `LlamaForCausalLM`; `settings` go to its config."""
    config_class = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    config = getattr(transformers, config_class)(**{**COMMON, "num_hidden_layers": layers, **settings})
    return build(f"{name}ForCausalLM", config, seed)


def llama(layers: int = 2, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """The plain case: grouped queries, full attention."""
    return decoder("Llama", layers, seed, **settings)


def mistral(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Sliding window in every layer."""
    return decoder("Mistral", layers, seed, sliding_window=SLIDING_WINDOW)


def qwen3(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Queries and keys are normalised per head."""
    return decoder("Qwen3", layers, seed, head_dim=16)


def phi3(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Fused projections, full attention."""
    return decoder("Phi3", layers, seed)


def gemma2(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Capped logits; sliding and full layers alternate."""
    return decoder(
        "Gemma2",
        layers,
        seed,
        head_dim=16,
        sliding_window=SLIDING_WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=4.0,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=False,
        attn_implementation="eager",
    )


def gemma3(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Normalised queries and keys, two rotary bases; two of four layers slide."""
    types = ["sliding_attention", "full_attention"] * 2
    return decoder(
        "Gemma3",
        layers,
        seed,
        head_dim=16,
        sliding_window=SLIDING_WINDOW,
        query_pre_attn_scalar=16,
        layer_types=types[:layers],
        tie_word_embeddings=False,
    )


def gpt_oss(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """A sink logit a head, experts; sliding and full layers alternate."""
    model = decoder(
        "GptOss",
        layers,
        seed,
        head_dim=16,
        sliding_window=SLIDING_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, mean=3.0)
    return model


def deepseek_v3(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Multi-head latent attention: the cache holds latents, not the keys that attention sees."""
    return decoder(
        "DeepseekV3",
        layers,
        seed,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    )


def qwen3_next(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Linear attention in every other layer, gated full attention in the rest."""
    types = ["linear_attention", "full_attention"] * 2
    return decoder(
        "Qwen3Next",
        layers,
        seed,
        head_dim=16,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=types[:layers],
    )


def falcon_h1(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Attention and a state space model side by side in every layer."""
    return decoder(
        "FalconH1",
        layers,
        seed,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_chunk_size=32,
    )


def t5(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Encoder-decoder with a relative position bias."""
    config_class: Any = transformers.T5Config
    config = config_class(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=layers,
        num_heads=4,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=None,
        decoder_start_token_id=1,
        initializer_factor=1.0,
    )
    return build("T5ForConditionalGeneration", config, seed)


def bart(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Encoder-decoder with learned positions."""
    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=64,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=None,
        forced_eos_token_id=None,
        decoder_start_token_id=1,
        init_std=0.2,
    )
    return build("BartForConditionalGeneration", config, seed)


def whisper(layers: int = 2, seed: int = 0) -> PreTrainedModel:
    """Encoder-decoder over sound."""
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        d_model=64,
        num_mel_bins=8,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_source_positions=24,
        max_target_positions=MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=None,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        init_std=0.2,
    )
    return build("WhisperForConditionalGeneration", config, seed)


HYBRID = {
    "crop": "a recurrent state cannot be cropped",
    "assisted": "generate refuses assisted decoding for stateful models",
}
ENCODER_DECODER = {"left padding": "it is the source that is padded, see the test of padded sources"}
WHISPER = {
    **ENCODER_DECODER,
    "chunked prefill": "generate cannot chunk the prompt of a decoder that takes no input_ids",
}
MLA = "keys are not the cached ones (latent attention)"

ARCHITECTURES = [
    Architecture("llama", llama, {"paged": 2}),
    Architecture("mistral", mistral, {"DynamicSlidingWindowLayer": 2}),
    Architecture("qwen3", qwen3, {"paged": 2}),
    Architecture("phi3", phi3, {"paged": 2}),
    Architecture("gemma2", gemma2, {"DynamicSlidingWindowLayer": 1, "paged": 1}),
    Architecture("gemma3", gemma3, {"DynamicSlidingWindowLayer": 1, "paged": 1}),
    Architecture("gpt_oss", gpt_oss, {"DynamicSlidingWindowLayer": 1, "paged": 1}),
    Architecture("deepseek_v3", deepseek_v3, {f"dense: {MLA}": 2}, dense_because=MLA),
    Architecture("qwen3_next", qwen3_next, {"LinearAttentionLayer": 1, "paged": 1}, refuses=HYBRID),
    Architecture("falcon_h1", falcon_h1, {"LinearAttentionAndFullAttentionLayer": 2}, refuses=HYBRID),
    Architecture("t5", t5, {"dense: position bias": 2}, dense_because="position bias", refuses=ENCODER_DECODER),
    Architecture("bart", bart, {"paged": 2}, refuses=ENCODER_DECODER),
    Architecture("whisper", whisper, {"paged": 2}, refuses=WHISPER),
]


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> Tensor:
    """Random text, `[rows, tokens]`."""
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def source(model: PreTrainedModel, rows: int = 1) -> dict[str, Tensor]:
    """What the encoder reads, the same in every row; nothing for a causal model."""
    if not model.config.is_encoder_decoder:
        return {}
    if model.main_input_name == "input_features":
        frames = 2 * model.config.max_source_positions
        noise = torch.randn(1, model.config.num_mel_bins, frames, generator=torch.Generator().manual_seed(0))
        return {"input_features": noise.expand(rows, -1, -1)}
    return {"input_ids": prompt(24).expand(rows, -1)}


def inputs(model: PreTrainedModel, text: Tensor | None) -> dict[str, Tensor]:
    """Arguments of `generate` and `forward` that make the decoder read `text [rows, tokens]`; None: its start token."""
    if text is None:
        return source(model)
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    return {**source(model, len(text)), name: text}


def generate(model: Any, text: Tensor | None, **options: Any) -> Any:
    """Continue `text` greedily; the result holds `sequences`, `logits` and `cache`."""
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**{**inputs(model, text), **settings, **options})


def empty_cache(model: PreTrainedModel) -> Any:
    """The cache that `generate` would make."""
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    return transformers.EncoderDecoderCache(*caches) if model.config.is_encoder_decoder else caches[0]


def one_by_one(text: Tensor, prefill: int) -> list[Tensor]:
    """Chunks of `text [rows, tokens]`: the first `prefill` tokens, then single ones."""
    return [text[:, :prefill], *text[:, prefill:].split(1, dim=1)]


@torch.no_grad()
def read(model: PreTrainedModel, chunks: list[Tensor], mask: Tensor | None = None, cache: Any = None) -> Tensor:
    """Let the decoder read chunks `[rows, n]` one after the other, whatever it would have said itself.

    Args:
        mask: `[rows, tokens]` of all chunks together, 0 for left padding.
        cache: what the decoder already holds.

    Returns: logits of the last token of each chunk, `[rows, chunks, vocab]`.
    """
    logits, end = [], 0
    for chunk in chunks:
        begin, end = end, end + chunk.shape[1]
        arguments: dict[str, Any] = inputs(model, chunk)
        if mask is not None:
            arguments["attention_mask"] = mask[:, :end]
            arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, begin:end]
        out = model(**arguments, cache=cache, use_cache=True)
        cache = out.cache
        logits.append(out.logits[:, -1:])
    return torch.cat(logits, dim=1)
