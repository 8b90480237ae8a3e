"""Few rows times the weights of SmolLM2, as `x W^T` (what `torch.nn.functional.linear` computes) and as `W x^T`.

All weights of the model are used once a round, so that they come from memory as they do in a pass. `oval_spec` takes
the second form for up to 8 rows, see `oval_spec.short_linears`. The last line is JSON: milliseconds a round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.alternating import median_ms, time_in_turns
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from demos.smollm2 import load_model
from oval_spec.short_linears import few_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x W^T": linear,
    "W x^T": few_rows,
}


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short_linears", description=__doc__)
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds takes 1 or more, got {options.rounds}")
    rows = []
    for dtype in options.dtypes:
        model, _ = load_model(options.model, DTYPES[dtype])
        weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        rows += [{"dtype": dtype, **_row(weights, count, options.rounds)} for count in ROWS]
    about = {"command": command_line("short_linears", arguments), "machine": describe_machine()}
    publish({"benchmark": "short_linears", **about, "rows": rows}, options.out)


def _row(weights: list[Tensor], count: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of each form for so many rows."""
    widths, dtype = {weight.shape[1] for weight in weights}, weights[0].dtype
    inputs = {width: torch.randn(count, width, dtype=dtype) for width in widths}

    def multiply(form: Callable[[Tensor, Tensor], Tensor]) -> None:
        for weight in weights:
            form(inputs[weight.shape[1]], weight)

    seconds = time_in_turns({name: partial(multiply, form) for name, form in FORMS.items()}, rounds)
    row = {"rows": count, **{name: median_ms(found) for name, found in seconds.items()}}
    print("  ".join(f"{name} {value:6.1f}" for name, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
