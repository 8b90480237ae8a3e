"""The Muon optimizer (Jordan et al., 2024) in the precision of its weights.

Small models learn to look things up in several times fewer steps with it than with AdamW. torch has one too, but it
computes in bfloat16, which takes most CPUs longer than everything else in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
SIZE = 0.2  # root mean square of an update over the learning rate, as AdamW has it
WEIGHT_DECAY, SMALLER, LARGEST_GRADIENT = 0.05, 0.3, 1.0
# Every round x <- (a + b x x' + c (x x')^2) x brings all singular values nearer to 1.
ROUNDS, A, B, C = 5, 3.4445, -4.7750, 2.0315


class Muon(torch.optim.Optimizer):
    """Steps of equal length in all directions of a matrix: its momentum with all singular values near 1.

    Args:
        params: tensors of 2 or more dimensions, or groups of them; all but the first dimension are taken as one.
        lr: about what AdamW takes.
        weight_decay: share of a weight, times lr, that is taken off in a step.

    Raises:
        ValueError: a parameter is a vector or scalar.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim < 2:
                    raise ValueError(f"Muon takes matrices, got a parameter of shape {list(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Change all parameters that have a gradient; `closure` must be None."""
        if closure is not None:
            raise ValueError("Muon evaluates no closure, expected None")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._advance(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _advance(self, parameter: Tensor, gradient: Tensor, rate: float, decay: float) -> None:
        state = self.state[parameter]
        momentum: Tensor = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonal(gradient.lerp(momentum, MOMENTUM).flatten(1))
        size = SIZE * max(update.shape) ** 0.5
        parameter.mul_(1 - rate * decay).add_(update.view_as(parameter), alpha=-rate * size)


def make_optimizers(parts: Iterable[tuple[float, dict[str, torch.nn.Parameter]]]) -> list[torch.optim.Optimizer]:
    """Optimizers for parts of a model, each with its highest learning rate, and its parameters by name.

    Muon has the matrices of layers, with `WEIGHT_DECAY`. AdamW has all else, at `SMALLER` times the rate: embeddings
    and convolutions, and vectors, which do not decay. Every group has its rate as "highest_lr", too.
    """
    matrices, others = list[dict[str, Any]](), list[dict[str, Any]]()
    for rate, parameters in parts:
        inner = [name for name, one in parameters.items() if one.ndim == 2 and "embed" not in name]
        matrices.append(_group([parameters[name] for name in inner], rate, WEIGHT_DECAY))
        rest = [one for name, one in parameters.items() if name not in inner]
        others.append(_group([one for one in rest if one.ndim > 1], SMALLER * rate, WEIGHT_DECAY))
        others.append(_group([one for one in rest if one.ndim < 2], SMALLER * rate, 0.0))
    return [Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.98))]


def _group(parameters: list[torch.nn.Parameter], rate: float, decay: float) -> dict[str, Any]:
    return {"params": parameters, "lr": rate, "highest_lr": rate, "weight_decay": decay}


def advance(optimizers: Sequence[torch.optim.Optimizer], share: float) -> None:
    """One step at `share` of the highest rates, with gradients cut to `LARGEST_GRADIENT`; clears these."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        group["lr"] = group["highest_lr"] * share
    torch.nn.utils.clip_grad_norm_([one for group in groups for one in group["params"]], LARGEST_GRADIENT)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def restore(optimizers: Sequence[torch.optim.Optimizer], states: Sequence[dict[str, Any]]) -> None:
    """Load what their `state_dict` gave, in the same order."""
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors, its singular values between about 0.7 and 1.2; `[M, N]`.

    Those that are several hundred times smaller than the largest stay smaller.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(ROUNDS):
        square = wide @ wide.T
        wide = A * wide + (B * square + C * square @ square) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
