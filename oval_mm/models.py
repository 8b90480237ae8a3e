"""What each supported model makes of a picture: one class a family of models, see `FAMILIES`.

A family knows how many image tokens a picture has, which parts they form, and which settings of its stock processor
decide that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from oval_mm.image_spans import SETTINGS, Part, Picture
from oval_mm.picture_counts import (
    any_resolution_picture,
    check_settings,
    interpolated_picture,
    patch_grid,
    picture_for,
)

RESOLUTIONS = "image_processor.image_grid_pinpoints"


class Family:
    """LLaVA: every picture has the same tokens. The other families override what differs.

    Args:
        config: of the model.
        processor: checked against the model; None: not checked.

    Attributes:
        settings: of the stock processor that decide how many image tokens it writes.
        needs: arguments of `get_image_features` without which the number of tokens is not known.
        image_token_id: the token that stands for one image feature.

    Raises:
        ValueError: the processor would write another number of image tokens, or nobody knows the vision tower.
    """

    settings: tuple[str, ...] = SETTINGS
    needs: tuple[str, ...] = ("pixel_values",)

    def __init__(self, config: Any, processor: Any = None) -> None:
        self.config, self.image_token_id = config, int(config.image_token_id)
        self.check(processor)

    def check(self, processor: Any) -> None:
        """Raise ValueError if `processor` (or None) and the model disagree."""
        self._picture = picture_for(self.config, processor)

    def encoded(self, arguments: Mapping[str, Any]) -> list[Picture]:
        """The pictures that `get_image_features` makes of these arguments of it, in their order."""
        config, strategy = self.config, arguments.get("vision_feature_select_strategy")
        if strategy is not None and strategy != config.vision_feature_select_strategy:
            config = copy(config)
            config.vision_feature_select_strategy = strategy
            return [picture_for(config)] * len(arguments["pixel_values"])
        return [self._picture] * len(arguments["pixel_values"])

    def counted(self, tokens: int) -> Picture:
        """A picture of which only the number of features is known."""
        is_usual = tokens == sum(part.tokens or 0 for part in self._picture.parts)
        return self._picture if is_usual else Picture((Part(tokens),))

    def in_prompt(self, input_ids: Tensor, pictures: Sequence[Picture]) -> Sequence[Picture]:
        """The pictures of a prompt `[B, T]`, of which `pictures` were encoded."""
        return pictures


class LlavaNext(Family):
    """An overview and a grid of tiles whose rows end with a newline token."""

    needs = ("image_sizes",)

    def check(self, processor: Any) -> None:
        """See `Family.check`; the grids of resolutions must be the same, too."""
        if processor is not None:
            picture_for(self.config, processor)
            check_settings(processor, {RESOLUTIONS: self.config.image_grid_pinpoints})

    def encoded(self, arguments: Mapping[str, Any]) -> list[Picture]:
        """See `Family.encoded`."""
        sizes = [_numbers(size) for size in arguments["image_sizes"]]
        return [any_resolution_picture(self.config, height, width) for height, width in sizes]

    def counted(self, tokens: int) -> Picture:
        """See `Family.counted`; the grid of the tiles stays unknown."""
        overview = patch_grid(self.config)
        rest = tokens - (overview.tokens or 0)
        return Picture((overview, Part(rest)) if rest > 0 else (Part(tokens),))


class LlavaOnevision(LlavaNext):
    """The same, made smaller where it would be too large; several pictures in a row are overviews only."""

    settings = ("num_image_tokens", "vision_feature_select_strategy", "vision_aspect_ratio")

    def check(self, processor: Any) -> None:
        """See `Family.check`."""
        if processor is None:
            return
        strategy, ratio = self.config.vision_feature_select_strategy, self.config.vision_aspect_ratio
        wanted = dict(zip(self.settings, (patch_grid(self.config).tokens, strategy, ratio), strict=True))
        check_settings(processor, {**wanted, RESOLUTIONS: self.config.image_grid_pinpoints})

    def encoded(self, arguments: Mapping[str, Any]) -> list[Picture]:
        """See `Family.encoded`."""
        sizes, in_row = arguments["image_sizes"], arguments.get("batch_num_images")
        is_alone = [True] * len(sizes) if in_row is None else [n == 1 for n in _numbers(in_row) for _ in range(n)]
        ratio = arguments.get("vision_aspect_ratio") or self.config.vision_aspect_ratio
        most_tiles = int(ratio.removeprefix("anyres_max_"))
        with_newline = Picture((patch_grid(self.config), Part(1)))
        pictures = []
        for size, alone in zip(sizes, is_alone, strict=True):
            height, width = _numbers(size)
            pictures.append(interpolated_picture(self.config, height, width, most_tiles) if alone else with_newline)
        return pictures


class QwenVL(Family):
    """As many tokens as the picture has merged patches, frame after frame."""

    settings = ("image_processor.merge_size", "image_processor.patch_size")
    needs = ("image_grid_thw",)

    def check(self, processor: Any) -> None:
        """See `Family.check`."""
        vision = self.config.vision_config
        if processor is not None:
            wanted = (vision.spatial_merge_size, vision.patch_size)
            check_settings(processor, dict(zip(self.settings, wanted, strict=True)))

    def encoded(self, arguments: Mapping[str, Any]) -> list[Picture]:
        """See `Family.encoded`."""
        merge, pictures = self.config.vision_config.spatial_merge_size, []
        for frames, height, width in (_numbers(grid) for grid in arguments["image_grid_thw"]):
            rows, columns = height // merge, width // merge
            pictures.append(Picture((Part(rows * columns, rows, columns),) * frames))
        return pictures

    def counted(self, tokens: int) -> Picture:
        """See `Family.counted`; grid and frames stay unknown."""
        return Picture((Part(tokens),))


class Idefics3(Family):
    """Tiles and an overview, each a run of image tokens between marker tokens."""

    settings = ("image_seq_len",)

    def check(self, processor: Any) -> None:
        """See `Family.check`."""
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size // self.config.scale_factor
        self._tile = Part(side * side, side, side)
        if processor is not None:
            check_settings(processor, {self.settings[0]: self._tile.tokens})

    def encoded(self, arguments: Mapping[str, Any]) -> list[Picture]:
        """None: how many tiles a picture has is told by the prompt alone."""
        return []

    def counted(self, tokens: int) -> Picture:
        """Not a picture: features come by row."""
        return Picture((self._tile,))

    def in_prompt(self, input_ids: Tensor, pictures: Sequence[Picture]) -> Sequence[Picture]:
        """`<fake> <row_1_col_1> I..I <fake> <row_1_col_2> I..I <fake> <global-img> I..I <fake>`.

        The marker before a tile's name also ends the picture: between two pictures it comes twice.
        """
        tiles: list[int] = []
        for row in input_ids:
            is_image = (row == self.image_token_id).int()
            starts = (torch.nn.functional.pad(is_image, (1, 0)).diff() == 1).nonzero().flatten().tolist()
            for before, start in zip([None, *starts], starts, strict=False):
                between = row[before:start]
                if before is not None and start >= 2 and int((between == row[start - 2]).sum()) == 1:
                    tiles[-1] += 1
                else:
                    tiles.append(1)
        return [Picture((self._tile,) * count) for count in tiles]


FAMILIES: dict[str, type[Family]] = {
    "llava": Family,
    "llava_next": LlavaNext,
    "llava_onevision": LlavaOnevision,
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
}


def family_of(model: Any, processor: Any = None) -> Family:
    """The family of a stock vision-language model. Raises TypeError, naming what is supported, for any other model."""
    name = getattr(getattr(model, "config", None), "model_type", None)
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise TypeError(f"model must be one of {known}; got {type(model).__name__} ({name}). Text: oval_core.attach")
    return FAMILIES[name](model.config, processor)


def _numbers(sizes: Any) -> list[int]:
    return [int(number) for number in sizes]
