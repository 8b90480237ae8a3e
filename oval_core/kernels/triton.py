"""The three tiers and their merge in Triton, for CUDA devices; under Triton's interpreter also for CPU tensors.

Each kernel has a file of its own: `triton_coarse.py`, `triton_basis.py`, `triton_exact.py`, `triton_merge.py`. Basis
fields, page numbers and runs of tokens are read where they lie; nothing is unpacked or gathered beforehand. A decoding
step without a mask takes few launches, see `triton_cascade.py`.

A decoding step without an attention mask never waits for the device: selections stay there, and the few numbers that
Python knows (`memory.on_device`) are copied without waiting. With a mask it waits once a layer, to see whether a new
token is hidden; at the steps that `stats_every` samples it waits, too. Between such a step and a CUDA graph stand:

- Shapes grow: `view_pages` narrows to the pages that exist, shortlist and budget are shares of these, and the open tail
  is as many runs as it needs. A graph wants the capacity of `SealedPages`, upper bounds, and counts on the device.
- `PageStore.append` writes where Python says, `reads_of` gets lengths and ends from Python: a replay would use those of
  the captured step. Both want a counter on the device that the graph itself advances.
- `PageStore` and `SealedPages` move when they grow, so a graph is good until then; pages are sealed between replays.
"""

from __future__ import annotations

from oval_core.kernels.reference import attend
from oval_core.kernels.triton_basis import evaluate_bases
from oval_core.kernels.triton_cascade import FUSED_ROUTERS, cascade, unsupported
from oval_core.kernels.triton_coarse import coarse_scores
from oval_core.kernels.triton_exact import attend_pages
from oval_core.kernels.triton_merge import merge

__all__ = [
    "FUSED_ROUTERS",
    "attend",
    "attend_pages",
    "cascade",
    "coarse_scores",
    "evaluate_bases",
    "merge",
    "unsupported",
]
