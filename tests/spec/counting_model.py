"""A target whose text is known: it counts from `FIRST` to `LAST` and begins again."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.core.tiny_models import VOCAB, llama

FIRST, LAST = 2, 13
CYCLE = LAST - FIRST + 1


def counting_model() -> PreTrainedModel:
    model: Any = llama(layers=1)
    embedding = torch.nn.functional.normalize(model.get_input_embeddings().weight.detach(), dim=-1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token in range(FIRST, LAST + 1):
            model.lm_head.weight[after(token)] = embedding[token]
    found: PreTrainedModel = model
    return found


def after(token: int, steps: int = 1) -> int:
    """The token so many steps later."""
    return FIRST + (token - FIRST + steps) % CYCLE


def counted(tokens: int, first: int = FIRST) -> Tensor:
    """The text, int64 `[tokens]`."""
    assert first < VOCAB
    return torch.tensor([after(first, step) for step in range(tokens)])
