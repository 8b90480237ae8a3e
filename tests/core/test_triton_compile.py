"""The Triton kernels compile for GPUs that are not here, without spilling, and fit into their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.triton_compile import SHARED_BYTES

CAPABILITIES = (80, 90)
TIERS = {"coarse_kernel", "evaluate_kernel", "exact_kernel"}
STEP = {f"{name}_kernel" for name in ("shortlist", "mass", "impact", "box", "tail", "merge")}
KERNELS = {1: TIERS | STEP, 8: TIERS}  # of a chunk: those that are other binaries than those of a step


def test_every_kernel_compiles_ahead_of_time() -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.triton_compile", "--capabilities", *map(str, CAPABILITIES)]
    command += ["--dtypes", "bfloat16", "--dims", "128", "--groups", "4"]  # Llama-3.1-8B; the whole takes minutes
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    kernels = json.loads(run.stdout.splitlines()[-1])["kernels"]
    for queries, expected in KERNELS.items():
        for capability in CAPABILITIES:
            chosen = [found for found in kernels if (found["queries"], found["sm"]) == (queries, capability)]
            assert {found["kernel"] for found in chosen} == expected
    for found in kernels:
        assert 0 < found["registers"] < 256, found
        assert found["spilled_bytes"] == 0, found
        assert found["shared_bytes"] <= SHARED_BYTES[found["sm"]], found
