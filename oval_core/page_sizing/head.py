"""A small trained head that says how much of a page each token takes, and its file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from oval_core.page_sizing.token_scores import NAMES
from oval_core.tensor_file import read_tensors, require_tensors

FORMAT = "oval sizing head 1"
WIDTH = 8


class SizingHead(nn.Module):
    """Weights of tokens from their scores, for `SelfSizedPages(weigh=...)`; one head serves all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(len(NAMES), WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, scores: Tensor) -> Tensor:
        """Weights `[n]` > 0 of `scores [n, 4]`, float32, wherever those are."""
        at = scores.device
        hidden = nn.functional.linear(scores, self.hidden.weight.to(at), self.hidden.bias.to(at)).tanh()
        weight = nn.functional.linear(hidden, self.out.weight.to(at), self.out.bias.to(at))
        return nn.functional.softplus(weight).squeeze(-1)

    def save(self, path: Path) -> None:
        """Write the head to a safetensors file."""
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, {"format": FORMAT, "scores": " ".join(NAMES)})

    @classmethod
    def load(cls, path: Path) -> SizingHead:
        """What `save` wrote, without gradients.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is another file, or its metadata, a tensor's name, shape or dtype is not as expected.
        """
        metadata, tensors = read_tensors(path, "a sizing head")
        expected = {"format": FORMAT, "scores": " ".join(NAMES)}
        if dict(metadata) != expected:
            raise ValueError(f"{path}: expected metadata {expected}, got {dict(metadata)}")
        head = cls()
        shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
        require_tensors(path, tensors, torch.float32, shapes)
        head.load_state_dict(tensors)
        return head.requires_grad_(False)
