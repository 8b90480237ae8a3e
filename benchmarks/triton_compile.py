"""What the Triton kernels need of a GPU: registers, shared memory, spills. Compiles ahead of time, without a GPU.

The launches of one decoding step and of a chunk of drafted tokens are recorded, not run, on tensors of Llama-3.1-8B's
shapes; each kernel is then compiled for exactly the arguments it was launched with.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from benchmarks.machine import command_line, describe_machine
from benchmarks.markdown import table
from oval_core import OvalConfig
from oval_core.basis import PageBasis
from oval_core.kernels import Reads, load
from oval_core.layer import OvalLayer

HEADS, GROUP, DIM, PAGE_SIZE, RANK = 8, 4, 128, 16, 8  # of Llama-3.1-8B and of OvalConfig
PAGES, SHORTLIST, BUDGET = 512, 180, 32
SHARED_BYTES = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # a block may have (CUDA guide)
DIVISIBLE = 16  # what Triton assumes of pointers, and of numbers where it is true
COLUMNS = ("kernel", "queries", "sm", "registers", "shared_bytes", "spilled_bytes", "warps")


class Launch(NamedTuple):
    """A kernel and what it was launched with."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]
    queries: int


@contextmanager
def recorded(launches: list[Launch], queries: int) -> Iterator[None]:
    """Note the launches inside the `with` block instead of running them."""
    run = JITFunction.run

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        arguments = {name: named.pop(name) for name in kernel.arg_names}
        launches.append(Launch(kernel, arguments, named, queries))

    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = run


def launches_of(dtype: torch.dtype, queries: int) -> list[Launch]:
    """Every kernel once, as a layer with `PAGES` sealed pages launches it for a chunk of `queries` tokens."""
    kernels, launches = load("triton"), list[Launch]()
    query = torch.zeros(1, HEADS, GROUP, queries, DIM)
    basis = PageBasis.empty(1, HEADS, PAGE_SIZE, RANK, (DIM, DIM), query.device).grown(PAGES)
    keys = torch.zeros(1, HEADS, PAGES * PAGE_SIZE, DIM, dtype=dtype)
    runs = torch.zeros(1, HEADS, BUDGET, dtype=torch.long)
    mask = None if queries == 1 else torch.ones(1, 1, queries, keys.shape[2], dtype=torch.bool)
    listed = torch.zeros(1, HEADS, SHORTLIST, dtype=torch.long)
    layer = _layer(keys[:, :, : 8 * BUDGET * PAGE_SIZE])
    with recorded(launches, queries):
        kernels.evaluate_bases(query, basis, listed, DIM**-0.5, None)
        if queries == 1:
            kernels.cascade(query.flatten(1, 2), layer, None, DIM**-0.5)
            return launches
        kernels.coarse_scores(query, basis, DIM**-0.5, None)
        reads = Reads(runs, runs, PAGE_SIZE, torch.zeros(1, queries, dtype=torch.long), mask)
        part = kernels.attend_pages(query, keys, keys, reads, DIM**-0.5, None)
        kernels.merge([part, part], None)
    return launches


def _layer(keys: Tensor) -> OvalLayer:
    """A layer that has read these keys, values alike, and one more token."""
    layer = OvalLayer(OvalConfig(router="basis", rank=RANK, page_size=PAGE_SIZE), None, 0)
    for tokens in (keys, keys[:, :, :1]):
        layer.update(tokens, tokens)
        layer.attended(None)
    return layer


def compiled(launch: Launch, capability: int) -> dict[str, Any]:
    """Compile for a GPU of compute capability `capability` (90: 9.0); what the binary needs, by `COLUMNS`."""
    kernel, constants = launch.kernel, dict[str, Any]()
    signature, divisible = dict[str, Any](), dict[tuple[int, ...], list[list[Any]]]()
    for param in kernel.params:
        value = launch.arguments[param.name]
        if param.is_constexpr:
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = _type(value)
        if not param.do_not_specialize:
            divisible |= {path: [["tt.divisibility", DIVISIBLE]] for path in _divisible(value, (param.num,))}
    source = ASTSource(kernel, signature, constants, divisible)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    used = _resources(binary.asm["cubin"])
    cells = (kernel.__name__, launch.queries, capability, used["REG"], binary.metadata.shared, used["LOCAL"])
    return dict(zip(COLUMNS, (*cells, binary.metadata.num_warps), strict=True))


def _type(value: Any) -> Any:
    """The type of an argument in a signature; named tuples stay named."""
    return type(value)(*map(_type, value)) if isinstance(value, tuple) else mangle_type(value)


def _divisible(value: Any, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Where in an argument there are pointers and numbers that are divisible by 16."""
    if isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from _divisible(part, (*path, place))
    elif isinstance(value, Tensor) or (isinstance(value, int) and value % DIVISIBLE == 0):
        yield path


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread (REG) and bytes of local memory a thread (LOCAL and STACK: what was spilled)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"REG": found["REG"], "LOCAL": found["LOCAL"] + found["STACK"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and as the last line everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90], choices=sorted(SHARED_BYTES))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8], help="tokens of a chunk")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled")
    launches = [launch for n in options.queries for launch in launches_of(getattr(torch, options.dtype), n)]
    rows = [compiled(launch, capability) for capability in options.capabilities for launch in launches]
    print(table(COLUMNS, [list(row.values()) for row in rows]))
    result = {
        "benchmark": "triton_compile",
        "command": command_line("triton_compile", arguments),
        "machine": {**describe_machine(), "triton": triton.__version__},
        "kernels": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
