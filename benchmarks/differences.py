"""How far one run's predictions are from another's. Needs torch alone, so that other environments can use it."""

from __future__ import annotations

from torch import Tensor


def differences(dense: Tensor, run: Tensor, truth: Tensor) -> tuple[float, float, float]:
    """Compare a run with the dense model, means over the positions.

    Args:
        dense, run: logits, float32 `[positions, vocabulary]`.
        truth: the tokens that really follow the positions, int64 `[positions - 1]`; nothing follows the last one.

    Returns:
        KL(dense || run) in nats; share of positions with the same most likely token; perplexity of `truth` under the
        run over that under the dense model.
    """
    dense, run = dense.log_softmax(-1), run.log_softmax(-1)
    kl = (dense.exp() * (dense - run)).sum(-1).mean()
    top1 = (dense.argmax(-1) == run.argmax(-1)).float().mean()
    nll = [(-rows[:-1].gather(-1, truth[:, None])).mean() for rows in (run, dense)]
    return kl.item(), top1.item(), (nll[0] - nll[1]).exp().item()
