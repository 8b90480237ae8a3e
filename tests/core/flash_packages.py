"""Stand-ins for the FlashAttention packages, with their signatures and plain arithmetic.

`flash_attn` 2.8 (Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py) and `flash_attn_interface` 3.0
(hopper/flash_attn_interface.py of the same repository): what transformers and OVAL use of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils as transformers_flash

PAGE_MULTIPLE = 256  # of FlashAttention 2
Calls = list[dict[str, Any]]


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: int = -1
) -> tuple[Tensor, Tensor]:
    """Output `[rows, heads, D_v]` and log-sum-exp `[heads, rows]` of one sequence; +inf where nothing is read."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1).float() for x in (k, v))
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * q.transpose(0, 1).float() @ keys.mT
    position = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0])
    if causal:
        logits = logits.masked_fill(key > position, -torch.inf)
    if window >= 0:
        logits = logits.masked_fill(key < position - window, -torch.inf)
    lse = logits.logsumexp(-1)
    out = (logits - lse[..., None]).exp().nan_to_num() @ values
    return out.transpose(0, 1).to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf)


def check(q: Tensor, k: Tensor) -> None:
    """Refuse what FlashAttention refuses."""
    if q.dtype not in (torch.float16, torch.bfloat16) or k.dtype != q.dtype:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")


def flash_attn_2(calls: Calls) -> ModuleType:
    """The package `flash_attn`; every call is noted in `calls`."""

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        calls.append({"function": "flash_attn_func", "q": q, "k": k})
        rows = [attention(*x, softmax_scale, causal, window_size[0])[0] for x in zip(q, k, v, strict=True)]
        return torch.stack(rows)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        calls.append({"function": "flash_attn_varlen_func", "cu_seqlens_k": cu_seqlens_k})
        sizes_q, sizes_k = (x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k))
        parts = zip(q.split(sizes_q), k.split(sizes_k), v.split(sizes_k), strict=True)
        return torch.cat([attention(*part, softmax_scale, causal, window_size[0])[0] for part in parts])

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        assert block_table is not None
        if k_cache.shape[1] % PAGE_MULTIPLE:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        calls.append({"function": "flash_attn_with_kvcache", "k_cache": k_cache, "cache_seqlens": cache_seqlens})
        out, lse = paged(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal)
        return (out, lse) if return_softmax_lse else out

    module = _module("flash_attn", "2.8.3", flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
    padding = _module("flash_attn.bert_padding", "2.8.3")
    padding.__dict__.update(pad_input=transformers_flash._pad_input, unpad_input=transformers_flash._unpad_input)
    module.__dict__.update(bert_padding=padding, __path__=[])
    return module


def flash_attn_3(calls: Calls) -> ModuleType:
    """The module `flash_attn_interface`; every call is noted in `calls`."""

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        assert page_table is not None
        calls.append({"function": "flash_attn_with_kvcache", "k_cache": k_cache, "cache_seqlens": cache_seqlens})
        out, lse = paged(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, causal)
        return (out, lse, None, None) if return_softmax_lse else out

    return _module("flash_attn_interface", "3.0.0", flash_attn_with_kvcache)


def paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: int | Tensor | None,
    table: Tensor,
    scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Output `[batch, rows, heads, D_v]` and log-sum-exp `[batch, heads, rows]` of sequences that lie in pages."""
    check(q, k_cache)
    assert isinstance(lengths, Tensor)
    assert lengths.dtype == table.dtype == torch.int32
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    rows = [
        attention(row, k_cache[pages].flatten(0, 1)[:length], v_cache[pages].flatten(0, 1)[:length], scale, causal)
        for row, pages, length in zip(q, table.long(), lengths.tolist(), strict=True)
    ]
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


def _module(name: str, version: str, *functions: Callable[..., Any]) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    module.__dict__.update({function.__name__: function for function in functions}, __version__=version)
    return module


def install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let `import` find these and no other FlashAttention package."""
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if hasattr(module, "bert_padding"):
            monkeypatch.setitem(sys.modules, f"{module.__name__}.bert_padding", module.bert_padding)
