"""What the Triton kernels need of a GPU: registers, shared memory, spills. Compiles ahead of time, without a GPU.

The launches of one decoding step and of a chunk of drafted tokens are recorded, not run, on tensors of many shapes;
each kernel is then compiled for exactly the arguments it was launched with. The table shows the worst of each kernel:
what does not fit or spills most first, then what takes most shared memory, then most registers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from benchmarks.machine import command_line, describe_machine
from benchmarks.markdown import table
from oval_core import OvalConfig
from oval_core.basis import PageBasis
from oval_core.kernels import Reads, load
from oval_core.layer import OvalLayer

HEADS, PAGE_SIZE, RANK = 8, 16, 8  # of Llama-3.1-8B and of OvalConfig
PAGES, SHORTLIST, BUDGET = 512, 180, 32
SHARED_BYTES = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # a block may have (CUDA guide)
DIVISIBLE = 16  # what Triton assumes of pointers, and of numbers where it is true
Row = dict[str, Any]


class Shape(NamedTuple):
    """What a layer is asked: tokens of a chunk, dtype of keys and values, head dimension, query heads a KV head."""

    queries: int
    dtype: str
    dim: int
    group: int


class Launch(NamedTuple):
    """A kernel and what it was launched with."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]
    shape: Shape


COLUMNS = ("kernel", "sm", *Shape._fields, "registers", "shared_bytes", "spilled_bytes", "warps")


@contextmanager
def recorded(launches: list[Launch], shape: Shape) -> Iterator[None]:
    """Note the launches inside the `with` block instead of running them."""
    run = JITFunction.run

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        arguments = {name: named.pop(name) for name in kernel.arg_names}
        launches.append(Launch(kernel, arguments, named, shape))

    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = run


def launches_of(shape: Shape) -> list[Launch]:
    """Every kernel once, as a layer with `PAGES` sealed pages launches it."""
    kernels, launches = load("triton"), list[Launch]()
    queries, dim, scaling = shape.queries, shape.dim, shape.dim**-0.5
    query = torch.zeros(1, HEADS, shape.group, queries, dim)
    basis = PageBasis.empty(1, HEADS, PAGE_SIZE, RANK, (dim, dim), query.device).grown(PAGES)
    keys = torch.zeros(1, HEADS, PAGES * PAGE_SIZE, dim, dtype=getattr(torch, shape.dtype))
    runs = torch.zeros(1, HEADS, BUDGET, dtype=torch.long)
    mask = None if queries == 1 else torch.ones(1, 1, queries, keys.shape[2], dtype=torch.bool)
    listed = torch.zeros(1, HEADS, SHORTLIST, dtype=torch.long)
    layers = {router: _layer(keys[:, :, : 8 * BUDGET * PAGE_SIZE], router) for router in ("basis", "box")}
    with recorded(launches, shape):
        kernels.evaluate_bases(query, basis, listed, scaling, None)
        if queries == 1:
            for layer in layers.values():
                kernels.cascade(query.flatten(1, 2).to(keys.dtype), layer, None, scaling)
            return list({launch.kernel.__name__: launch for launch in reversed(launches)}.values())
        kernels.coarse_scores(query, basis, scaling, None)
        reads = Reads(runs, runs, PAGE_SIZE, torch.zeros(1, queries, dtype=torch.long), mask)
        part = kernels.attend_pages(query, keys, keys, reads, scaling, None)
        kernels.merge([part, part], None)
    return launches


def _layer(keys: Tensor, router: str) -> OvalLayer:
    """A layer that has read these keys, values alike, and one more token."""
    layer = OvalLayer(OvalConfig(router=router, rank=RANK, page_size=PAGE_SIZE), None, 0)
    for tokens in (keys, keys[:, :, :1]):
        layer.update(tokens, tokens)
        layer.attended(None)
    return layer


class Binary(NamedTuple):
    """What a launch is compiled from, and how: the same for many shapes."""

    kernel: JITFunction
    signature: dict[str, Any]
    constants: dict[str, Any]
    divisible: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]


def binary_of(launch: Launch) -> Binary:
    """Types, constants and what is divisible of the arguments."""
    binary = Binary(launch.kernel, {}, {}, {}, launch.options)
    for param in launch.kernel.params:
        value = launch.arguments[param.name]
        if param.is_constexpr:
            binary.signature[param.name], binary.constants[param.name] = "constexpr", value
            continue
        binary.signature[param.name] = _type(value)
        if not param.do_not_specialize:
            paths = _divisible(value, (param.num,))
            binary.divisible.update({path: [["tt.divisibility", DIVISIBLE]] for path in paths})
    return binary


def compiled(binary: Binary, capability: int) -> Row:
    """Compile for a GPU of compute capability `capability` (90: 9.0); what it needs."""
    source = ASTSource(binary.kernel, binary.signature, binary.constants, binary.divisible)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=binary.options)
    used = _resources(made.asm["cubin"])
    return {
        "registers": used["REG"],
        "shared_bytes": made.metadata.shared,
        "spilled_bytes": used["LOCAL"],
        "warps": made.metadata.num_warps,
    }


def measured(shapes: Iterable[Shape], capabilities: Sequence[int]) -> list[Row]:
    """One row a kernel, capability and binary: of the first shape that launches it."""
    rows: dict[str, Row] = {}
    for shape in tqdm(list(shapes), desc="shapes", disable=None):
        for launch in launches_of(shape):
            binary = binary_of(launch)
            for capability in capabilities:
                key = f"{capability} {launch.kernel.__name__} {binary[1:]}"
                if key not in rows:
                    begin = {"kernel": launch.kernel.__name__, "sm": capability, **launch.shape._asdict()}
                    rows[key] = begin | compiled(binary, capability)
    return list(rows.values())


def worst(rows: list[Row]) -> list[Row]:
    """Of each kernel and capability the row that asks most of a GPU."""
    found: dict[tuple[str, int], Row] = {}
    for row in sorted(rows, key=_demand):
        found[row["kernel"], row["sm"]] = row
    return [found[key] for key in sorted(found)]


def fits(row: Row) -> bool:
    """Whether a GPU runs it, and nothing is spilled."""
    return bool(row["shared_bytes"] <= SHARED_BYTES[row["sm"]] and not row["spilled_bytes"])


def _demand(row: Row) -> tuple[bool, int, int, int]:
    too_large = row["shared_bytes"] > SHARED_BYTES[row["sm"]]
    return too_large, row["spilled_bytes"], row["shared_bytes"], row["registers"]


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triton_compile", description=__doc__)
    parser.add_argument(
        "--capabilities", type=int, nargs="+", default=[80, 86, 90], choices=sorted(SHARED_BYTES), help="90: sm_90"
    )
    dtypes = ["float32", "float16", "bfloat16"]
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=dtypes, help="of keys")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 80, 128, 256], help="head dimensions")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8], help="query heads a KV head")
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8], help="tokens of a chunk")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled")
    shapes = map(Shape._make, product(options.queries, options.dtypes, options.dims, options.groups))
    rows = measured(shapes, options.capabilities)
    print(f"torch {torch.__version__}, triton {triton.__version__}: {len(rows)} binaries, the worst of each kernel:")
    print(table(COLUMNS, [[row[column] for column in COLUMNS] for row in worst(rows)]))
    spoilt = sorted(
        f"{row['kernel']} (sm_{row['sm']}, {row['dtype']}, D {row['dim']})" for row in rows if not fits(row)
    )
    print(f"do not fit, or spill: {', '.join(dict.fromkeys(spoilt)) or 'none'}")
    result = {
        "benchmark": "triton_compile",
        "command": command_line("triton_compile", arguments),
        "machine": {**describe_machine(), "triton": triton.__version__},
        "kernels": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
