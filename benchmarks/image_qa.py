"""Questions about images: how often the model is right, and how near to dense it stays, while it reads few image pages.

The images are read without a question, densely. Then every question and its expected answer are read token by token,
each token a step of its own with pages selected for it, so nothing of an image that no step selected can help. Text
pages and open tokens are always read: a share is one of the image pages. A question is answered right if the model
would choose all words of the expected answer and its end, each after the expected ones before; a second turn knows the
right first answer.

Readers:  dense; routers of OVAL (basis, box); the oracle, which looks at every key to decide; controls: random pages
(anew at every step), random fixed (one random set of pages a conversation, the same for all layers, heads and steps),
recent (the last pages), last patch (the last page of every image), no_image; rivals: fastv (keeps the image tokens that
the first question attends to most, for good), downsampled (images with that share of their pixels' detail); and every
routing head given with --hybrid. Only `basis`, alone or below a head, estimates what it does not read. Settings are to
be tuned on the validation split; the test split is for the final report.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.image_evaluation import asked, evaluate, load
from benchmarks.image_readers import OvalReader, Reader
from benchmarks.image_rivals import DownsamplingReader, EvictingReader
from benchmarks.image_routers import ROUTERS, shares_of
from benchmarks.image_scores import Row
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from demos.tiny_llava import FOLDER
from oval_core import OvalConfig
from oval_core.routers import Router
from oval_mm import IMAGE_CONFIG, HybridRouter
from oval_mm.hybrid_router import BASES
from oval_mm.recipes.answering import majority_baseline
from oval_mm.recipes.llava_batches import SOURCES
from oval_mm.recipes.patches import image_tokens
from oval_mm.recipes.tiny_llava import load_llava

DENSE, FASTV, DOWNSAMPLED = "dense", "fastv", "downsampled"
READERS = (DENSE, *ROUTERS, FASTV, DOWNSAMPLED)
DEFAULT = IMAGE_CONFIG
SETTINGS = ("page_size", "rank", "shortlist_ratio")  # of `OvalConfig`, options of the command


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    model, processor = _load(options.model or FOLDER)
    rows: list[Row] = []
    baseline: dict[str, dict[str, float]] = {}
    for dataset in options.datasets:
        batches = load(dataset, options.split, options.packs, processor)
        baseline[dataset] = majority_baseline(asked(batches))
        readers = _readers(model, processor, options)
        for row in evaluate(dataset, batches, readers):
            tqdm.write(_line(row))
            rows.append(row)
    result = {
        "benchmark": options.name,
        "command": command_line("image_qa", arguments),
        "model": str(options.model or "the small LLaVA"),
        "machine": describe_machine(),
        "split": options.split,
        "packs": options.packs,
        "settings": _settings(options) | {"block": options.block, "hybrid_base": options.hybrid_base},
        "rows": [asdict(row) for row in rows],
        "majority_baseline": baseline,
    }
    publish(result, options.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.image_qa", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="folder of a LLaVA made by oval_mm.recipes (default: the small LLaVA)"
    )
    parser.add_argument("--split", choices=("validation", "test"), default="validation", help="default: %(default)s")
    parser.add_argument("--datasets", nargs="+", choices=SOURCES, default=list(SOURCES), help="default: all")
    parser.add_argument("--packs", type=_positive, default=100, help="images or sets of images of each (%(default)s)")
    parser.add_argument("--readers", nargs="+", choices=READERS, default=list(READERS), help="default: all")
    parser.add_argument("--shares", nargs="+", type=_share, default=[0.1, 0.25, 0.5], help="of the image pages")
    parser.add_argument("--hybrid", nargs="+", type=Path, default=[], help="files of routing heads to measure, too")
    parser.add_argument("--hybrid-base", choices=BASES, default="basis", help="what heads correct (%(default)s)")
    parser.add_argument(
        "--block", type=int, help="side of square image pages in patches; 0: runs (default: squares that fill a page)"
    )
    parser.add_argument("--page-size", type=int, default=DEFAULT.page_size, help="tokens a page (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=DEFAULT.rank, help="of the bases (default: %(default)s)")
    parser.add_argument(
        "--shortlist-ratio", type=float, default=DEFAULT.shortlist_ratio, help="pages with basis (default: %(default)s)"
    )
    parser.add_argument("--name", default="image_qa", help="of the JSON (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    try:
        OvalConfig(**_settings(options))
    except ValueError as error:
        parser.error(str(error))
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {share}")
    return share


def _load(folder: Path) -> tuple[Any, Any]:
    try:
        return load_llava(folder)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in SETTINGS}


def _readers(model: Any, processor: Any, options: argparse.Namespace) -> dict[str, Reader]:
    """Those that were asked for; `dense`, which all are compared with, is the first."""
    shares = tuple(options.shares)
    pages_per_image = -(-image_tokens(processor) // options.page_size)
    block = "auto" if options.block is None else options.block or None
    made: dict[str, Reader] = {DENSE: Reader(model, processor)}
    for name, router in _routers(model, options).items():
        own = shares_of(name, shares, pages_per_image)
        made[name] = OvalReader(model, processor, own, router, _settings(options), block)
    rivals = {FASTV: EvictingReader, DOWNSAMPLED: DownsamplingReader}
    return made | {name: rivals[name](model, processor, shares) for name in rivals if name in options.readers}


def _routers(model: Any, options: argparse.Namespace) -> dict[str, Router]:
    routers = {name: make() for name, make in ROUTERS.items() if name in options.readers}
    for file in options.hybrid:
        head = HybridRouter.load(file, model, options.hybrid_base)
        name = f"hybrid {head.embedding.kind}"
        if name in routers:
            raise SystemExit(f"--hybrid takes one head of each kind, got two of {head.embedding.kind}")
        routers[name] = head
    return routers


def _line(row: Row) -> str:
    recall = "    –" if row.page_recall is None else f"{row.page_recall:5.3f}"
    return (
        f"{row.dataset:9} {row.router:20} {row.read_share:6.1%} of image pages  {row.bytes_ratio:6.1%} of the bytes  "
        f"accuracy {row.accuracy:.3f}  KL {row.kl:.4f}  top-1 {row.top1:.3f}  page recall {recall}"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
