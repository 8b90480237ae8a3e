"""The Triton kernels compile for GPUs that are not here, without spilling, and fit into their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.triton_compile import SHARED_BYTES

CAPABILITIES = (80, 90)
TIERS = {"coarse_kernel", "evaluate_kernel", "exact_kernel"}
STEP = {f"{name}_kernel" for name in ("shortlist", "mass", "impact", "box", "tail", "merge")}
KERNELS = {1: TIERS | STEP, 8: TIERS | {"merge_kernel"}}  # of a step, and of a chunk


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.triton_compile", *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    kernels: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])["kernels"]
    return kernels


def test_every_kernel_compiles_ahead_of_time() -> None:
    """In the shapes of Llama-3.1-8B; all shapes would take minutes."""
    shape = ("--dtypes", "bfloat16", "--dims", "128", "--groups", "4")
    kernels = compiled("--capabilities", *map(str, CAPABILITIES), *shape)
    for queries, expected in KERNELS.items():
        for capability in CAPABILITIES:
            chosen = [found for found in kernels if (found["queries"], found["sm"]) == (queries, capability)]
            assert {found["kernel"] for found in chosen} == expected
    for found in kernels:
        assert 0 < found["registers"] < 256, found
        assert found["spilled_bytes"] == 0, found
        assert found["shared_bytes"] <= SHARED_BYTES[found["sm"]], found


def test_the_widest_heads_fit_into_the_smallest_gpu() -> None:
    """Float32, the most there is to hold; a few registers are spilled."""
    shape = ("--dtypes", "float32", "--dims", "256", "--groups", "4", "--queries", "1", "32")
    for found in compiled("--capabilities", "86", *shape):
        assert found["shared_bytes"] <= SHARED_BYTES[86], found
        assert found["spilled_bytes"] <= 128, found
