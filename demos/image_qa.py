"""Ask about an image: OVAL's answer beside the dense one, what was read for it, and a picture of where it looked.

Without an image, sample scenes and their questions are shown.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL.Image import Image
from rich.console import Console
from rich.table import Table

from demos.tiny_llava import Answer, Reader, load
from oval_core import OvalConfig
from oval_mm import IMAGE_CONFIG
from oval_mm.heatmap import draw_heat
from oval_mm.pictures import load_picture

IMAGES = Path(__file__).parent / "data" / "images"
# Scenes of the test split, which no training of this project sees, with questions and right answers, chosen among those
# that the small LLaVA answers right; how many it does stands in its card.
SAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "scene_09000001.png": (
        ("which letter is in the orange star?", "r"),
        ("which digit is in the orange cross?", "9"),
    ),
    "scene_09000006.png": (
        ("which digit is in the purple circle?", "1"),
        ("what is above the purple circle?", "top center green cross"),
    ),
    "scene_09000016.png": (
        ("what color is the shape with the letter p?", "black"),
        ("which digit is in the pink square?", "0"),
    ),
}
USUAL_QUESTION = "how many shapes are there?"  # about an image that comes without one


def main(arguments: list[str] | None = None) -> None:
    """Run the demo; see `--help`."""
    options = _parse(arguments)
    try:
        talks = _talks(options)
        model, processor = load(options.model)
        table = Table(show_lines=True)
        table.add_column("image, question", min_width=20)
        for column in ("right", "dense", "OVAL", "KV bytes read", "image pages read"):
            table.add_column(column, overflow="fold")
        for name, picture, turns in talks:
            _talk(model, processor, options, table, (name, picture, turns))
    except (OSError, TypeError, ValueError) as error:  # files, models and questions that cannot be used
        sys.exit(f"image_qa: {error}")
    Console().print(table)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demos.image_qa", description=__doc__)
    parser.add_argument("image", nargs="?", type=Path, help="picture file (default: sample scenes)")
    parser.add_argument("question", nargs="?", help=f"default: {USUAL_QUESTION!r}")
    add_model_options(parser)
    parser.add_argument("--new-tokens", type=int, default=64, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/image_qa"), help="folder for pictures")
    options = parser.parse_args(arguments)
    if options.new_tokens < 1:
        parser.error(f"--new-tokens must be at least 1, got {options.new_tokens}")
    options.config = make_config(parser, options)
    return options


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--budget-pages` and `--share`."""
    parser.add_argument("--model", help="path or hub id (default: the small LLaVA of this project)")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--budget-pages", type=int, help="pages per KV head that a step reads exactly")
    usual = IMAGE_CONFIG.budget_ratio
    budget.add_argument("--share", type=float, help=f"the same as a share of all pages (default: {usual})")


def make_config(parser: argparse.ArgumentParser, options: argparse.Namespace) -> OvalConfig:
    """The config that the options ask for; leaves with a message where there is none."""
    try:
        if options.budget_pages is not None:
            return replace(IMAGE_CONFIG, budget_pages=options.budget_pages, budget_ratio=None)
        return IMAGE_CONFIG if options.share is None else replace(IMAGE_CONFIG, budget_ratio=options.share)
    except ValueError as error:
        parser.error(str(error))


def _talks(options: argparse.Namespace) -> list[tuple[str, Image, tuple[tuple[str, str], ...]]]:
    """Name, picture, and questions with right answers (or "") of every conversation."""
    if options.image is not None:
        question = USUAL_QUESTION if options.question is None else options.question
        return [(options.image.name, load_picture(options.image), ((question, ""),))]
    return [(name, load_picture(IMAGES / name), turns) for name, turns in SAMPLES.items()]


def _talk(model: Any, processor: Any, options: argparse.Namespace, table: Table, talk: tuple[Any, ...]) -> None:
    """Ask everything about one picture, dense and with OVAL; each goes on from its own answers."""
    name, picture, turns = talk
    readers = [Reader(model, processor, [picture], config, options.new_tokens) for config in (None, options.config)]
    said: list[list[tuple[str, str]]] = [[], []]
    for question, right in turns:
        dense, oval = (reader.answer(earlier, question) for reader, earlier in zip(readers, said, strict=True))
        for earlier, answer in zip(said, (dense, oval), strict=True):
            earlier.append((question, answer.text))
        table.add_row(f"{name}\n{question}", right or "–", dense.text, oval.text, *figures(oval))
        path = options.out / f"{Path(name).stem}_{len(said[0])}_{_file_name(question)}.png"
        if draw(oval, question, path):
            print(f"What each token of the answer read: {path}")
        else:
            why = f"every page was read: {dict(oval.dense_steps)}" if oval.words else "the answer is empty"
            print(f"No picture for {question!r}: {why}")


def figures(answer: Answer) -> tuple[str, str]:
    """Shares of the KV bytes and of the image pages that were read, in words."""
    return f"{answer.read_ratio:.1%}", f"{answer.image_pages:.1%}"


def draw(answer: Answer, question: str, path: Path) -> bool:
    """Write the heat picture of an answer; False where there is nothing to draw."""
    if not answer.views or not answer.words:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_heat(answer.views, answer.heats, answer.words, path, question.strip())
    return True


def _file_name(question: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", question.lower()).strip("_")[:40]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
