"""Write scenes with their questions, and a contact sheet, for a person to look at."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from oval_mm.recipes.scene_questions import KINDS, Example, Question, examples
from oval_mm.recipes.scenes import SPLITS, caption

COLUMNS, MOST_ON_SHEET = 4, 24
TILE_PX, LINE_PX, LINES, PAD_PX = 384, 17, 12, 10


def main(arguments: list[str] | None = None) -> None:
    """Write samples; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m oval_mm.recipes.scenes", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--count", type=_positive, default=12, help="scenes (default: %(default)s)")
    parser.add_argument("--split", choices=SPLITS, default="train", help="where from (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    shown: list[Example] = []
    wanted = itertools.islice(examples(options.split), options.count)
    for example in tqdm(wanted, total=options.count, desc="scenes", unit="scene"):
        _write(example, options.out)
        shown += [example] if len(shown) < MOST_ON_SHEET else []
    _contact_sheet(shown).save(options.out / "contact_sheet.png")
    print(f"{options.count} scenes, and an overview in {options.out / 'contact_sheet.png'}")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _write(example: Example, out: Path) -> None:
    name = f"scene_{example.scene.seed:08d}"
    example.image.save(out / f"{name}.png")
    content = {
        "image": f"{name}.png",
        "caption": caption(example.scene),
        "objects": [dataclasses.asdict(thing) for thing in example.scene.objects],
        "questions": [dataclasses.asdict(question) for question in example.questions],
    }
    (out / f"{name}.json").write_text(json.dumps(content, indent=1))


def _contact_sheet(shown: list[Example]) -> Image.Image:
    """All scenes, enlarged, each above some of its questions."""
    width, height = TILE_PX + PAD_PX, TILE_PX + LINES * LINE_PX + PAD_PX
    columns = min(COLUMNS, len(shown))
    rows = -(-len(shown) // COLUMNS)
    sheet = Image.new("RGB", (columns * width + PAD_PX, rows * height + PAD_PX), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=13)
    for index, example in enumerate(shown):
        x, y = PAD_PX + index % COLUMNS * width, PAD_PX + index // COLUMNS * height
        sheet.paste(example.image.resize((TILE_PX, TILE_PX), Image.Resampling.NEAREST), (x, y))
        for line, question in enumerate(_varied(example.questions)[:LINES]):
            text = f"{question.question} {question.answer}"
            draw.text((x, y + TILE_PX + 2 + line * LINE_PX), text, fill="black", font=font)
    return sheet


def _varied(questions: tuple[Question, ...]) -> list[Question]:
    """The questions, so that the first ones are of different kinds."""
    by_kind = [[question for question in questions if question.kind == kind] for kind in KINDS]
    rounds = itertools.zip_longest(*by_kind)
    return [question for one_of_each in rounds for question in one_of_each if question]
