"""A picture of one speculative generation."""

from __future__ import annotations

from pathlib import Path

from oval_spec import SpeculativeStats


def draw_acceptance(stats: SpeculativeStats, path: Path) -> None:
    """How often the guesses of each depth held, and how far draft and target agreed on pages, step after step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    rates = stats.accept_rate
    left.bar([str(depth) for depth in rates], list(rates.values()), color="tab:green")
    left.set(xlabel="depth in the draft", ylabel="accepted where its parent was", ylim=(0, 1))
    overlap = stats.page_sets.overlap if stats.page_sets else []
    right.plot(range(1, len(overlap) + 1), overlap, marker="o", color="tab:blue")
    right.set(xlabel="verification looked at", ylabel="|D & T| / |D | T|", ylim=(0, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
