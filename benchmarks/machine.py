"""What a figure was measured on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


def describe_machine() -> dict[str, Any]:
    """Processor, cores, threads, instruction set and versions."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def command_line(benchmark: str, arguments: Sequence[str] | None) -> str:
    """The command that runs `benchmark` with `arguments` (None: those of this process)."""
    return shlex.join(["python", "-m", f"benchmarks.{benchmark}", *(sys.argv[1:] if arguments is None else arguments)])


def publish(result: dict[str, Any], out: Path) -> None:
    """Write `result` to `out/<benchmark>.json` and print it as the last line."""
    save(result, out)
    print(json.dumps(result), flush=True)


def save(result: dict[str, Any], out: Path) -> None:
    """Write `result` to `out/<benchmark>.json`; a process that is ended meanwhile leaves what was there."""
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{result['benchmark']}.json"
    unfinished = target.with_suffix(".json.new")
    unfinished.write_text(json.dumps(result) + "\n")
    unfinished.replace(target)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
