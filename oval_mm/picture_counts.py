"""How many image tokens a stock model makes of a picture, and the grid that they fill."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oval_mm.image_spans import SETTINGS, Part, Picture

LEADING_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # what a tower puts before its patches (CLS)
Size = int | Sequence[int]  # a side of a square, or height and width, in pixels


def count_for(model_config: Any, processor: Any = None) -> int:
    """Image tokens a picture of a stock `LlavaForConditionalGeneration`, see `picture_for`."""
    return sum(part.tokens or 0 for part in picture_for(model_config, processor).parts)


def picture_for(model_config: Any, processor: Any = None) -> Picture:
    """What a stock `LlavaForConditionalGeneration` makes of a picture: its patches, and the CLS token if that is kept.

    Args:
        model_config: a `LlavaConfig`.
        processor: a `LlavaProcessor` to check; it says how many tokens an unknown tower puts before the patches.

    Raises:
        ValueError: the processor would write another number of image tokens, or nobody knows the tower.
    """
    vision = model_config.vision_config
    leading = LEADING_TOKENS.get(vision.model_type, getattr(processor, SETTINGS[1], None))
    if leading is None:
        known = ", ".join(LEADING_TOKENS)
        raise ValueError(f"vision tower must be one of {known}, got {vision.model_type!r}: state the counts yourself")
    wanted = (vision.patch_size, leading, model_config.vision_feature_select_strategy)
    rows, columns, extra = _grid(vision.image_size, *wanted)
    if processor is not None:
        _check_processor(processor, vision.image_size, wanted)
    if extra < 0:  # "default" drops the first token, here a patch: the tower has nothing before its patches
        return Picture((Part(rows * columns + extra),))
    patches = Part(rows * columns, rows, columns)
    return Picture((Part(extra), patches) if extra else (patches,))


def _grid(image_size: Size, patch_size: Size, leading: int, strategy: str) -> tuple[int, int, int]:
    """Rows and columns of patches, and the tokens that a picture has beside them."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    down, across = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    return height // down, width // across, leading - (strategy == "default")


def _check_processor(processor: Any, image_size: Size, wanted: tuple[Size, int, str]) -> None:
    """Raise ValueError if the processor gives a picture another number of tokens than its settings `wanted` would."""
    have = tuple(getattr(processor, name, None) for name in SETTINGS)
    counts = []
    for settings in (wanted, have):
        rows, columns, extra = _grid(image_size, *settings) if None not in settings[:2] else (0, 0, 0)
        counts.append(rows * columns + extra)
    if counts[0] != counts[1]:
        differ = zip(SETTINGS, wanted, have, strict=True)
        change = ", ".join(f"{name} = {right!r} (is {wrong!r})" for name, right, wrong in differ if right != wrong)
        raise ValueError(
            f"expected {counts[0]} image tokens a picture, the processor makes {counts[1]}: set its {change}"
        )


def check_settings(processor: Any, wanted: Mapping[str, Any]) -> None:
    """Raise ValueError if settings of `processor`, "image_processor.merge_size" for example, are not as `wanted`."""
    wrong = []
    for name, right in wanted.items():
        have = processor
        for part in name.split("."):
            have = getattr(have, part, None)
        if _plain(have) != _plain(right):
            wrong.append(f"{name} = {right!r} (is {have!r})")
    if wrong:
        raise ValueError(f"the processor does not fit the model: set its {', '.join(wrong)}")


def _plain(value: Any) -> Any:
    """Lists in place of tuples, all the way down."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def any_resolution_picture(model_config: Any, height: int, width: int) -> Picture:
    """What a stock `LlavaNextForConditionalGeneration` makes of one picture.

    First the overview, then all tiles as one grid, without the bars that fill up its shape; every row of that grid
    ends with a newline token, which is counted as a column.

    Args:
        model_config: a `LlavaNextConfig`.
        height, width: of the picture as it was given, in pixels.
    """
    return _overview_and_tiles(model_config, *_tiles_grid(model_config, height, width))


def interpolated_picture(model_config: Any, height: int, width: int, most_tiles: int) -> Picture:
    """What a stock `LlavaOnevisionForConditionalGeneration` makes of the only picture of a prompt.

    As `any_resolution_picture`, but a grid of clearly more than `most_tiles` tiles is made smaller.

    Args:
        model_config: a `LlavaOnevisionConfig`.
        height, width: of the picture as it was given, in pixels.
        most_tiles: the number in the config's `vision_aspect_ratio`, 9 in "anyres_max_9".
    """
    rows, columns = _tiles_grid(model_config, height, width)
    tile = model_config.vision_config.image_size // model_config.vision_config.patch_size
    ratio = math.sqrt(rows * columns / (most_tiles * tile**2))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return _overview_and_tiles(model_config, rows, columns)


def patch_grid(model_config: Any) -> Part:
    """The patches of a square picture as large as the vision tower sees at once."""
    side = model_config.vision_config.image_size // model_config.vision_config.patch_size
    return Part(side * side, side, side)


def _overview_and_tiles(model_config: Any, rows: int, columns: int) -> Picture:
    overview = patch_grid(model_config)
    if not rows:  # the picture is a line, thinner than a patch
        return Picture((overview,))
    return Picture((overview, Part(rows * (columns + 1), rows, columns + 1)))


def _tiles_grid(model_config: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the patches of all tiles together, without bars and newlines."""
    from transformers.image_processing_utils import select_best_resolution

    tile = model_config.vision_config.image_size
    side = tile // model_config.vision_config.patch_size
    canvas = select_best_resolution((height, width), model_config.image_grid_pinpoints)
    rows, columns = (pixels // tile * side for pixels in canvas)
    if width / height > columns / rows:
        return _without_bars(rows, height * (columns / width)), columns
    return rows, _without_bars(columns, width * (rows / height))


def _without_bars(patches: int, shown: float) -> int:
    """Patches that are left of a side when as many are cut at both its ends; about `shown` of them show something."""
    return patches - (patches - int(round(shown, 7))) // 2 * 2
