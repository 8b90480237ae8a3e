"""Any picture that a person may have, made into what image processors expect: RGB, upright, of a moderate size."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
ACCEPTED = "PNG, JPEG, GIF, WebP, BMP, TIFF or PPM"
MOST_PIXELS = 80_000_000  # of the file; 240 MB as RGB
LARGEST_SIDE_PX = 2048  # of what is given on: no supported model looks at more
SMALLEST_SIDE_PX = 32  # below 4 pixels image processors take a side for the colours
MOST_ELONGATED = LARGEST_SIDE_PX // SMALLEST_SIDE_PX  # longer side over shorter side
PAPER = (255, 255, 255)  # what shows through transparent pixels


class PictureError(ValueError):
    """What is wrong with a picture, in words for the person who gave it."""


def load_picture(source: str | Path | BinaryIO) -> Image.Image:
    """The first frame of a picture, RGB, as a viewer would show it.

    It is turned as its EXIF data say; transparent parts are white; 16-bit and floating-point pictures are brought to
    8 bits. Sides are at most `LARGEST_SIDE_PX` and at least `SMALLEST_SIDE_PX`, their ratio stays.

    Args:
        source: a path, or a binary file that can seek.

    Raises:
        PictureError: no such file, an empty or damaged one, one that is no picture, or one that is too large or thin.
    """
    name = _name(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(source, formats=FORMATS) as image:
                _check_size(name, *image.size)
                return _fit(_to_rgb(_upright(image)))
    except PictureError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise PictureError(f"{name} has too many pixels: expected at most {MOST_PIXELS:,}") from None
    except UnidentifiedImageError:
        raise PictureError(_why_unreadable(name, source)) from None
    except FileNotFoundError:
        raise PictureError(f"there is no file {name}") from None
    except IsADirectoryError:
        raise PictureError(f"{name} is a folder, expected a picture") from None
    except Exception as error:  # a damaged file can break its decoder anywhere
        raise PictureError(f"{name} is damaged or cut short and cannot be shown ({error})") from error


def _name(source: str | Path | BinaryIO) -> str:
    path = source if isinstance(source, str | Path) else getattr(source, "name", None)
    return Path(path).name or str(path) if isinstance(path, str | Path) else "the picture"


def _check_size(name: str, width: int, height: int) -> None:
    size = f"{name} has {width:,} x {height:,} pixels"
    if width * height > MOST_PIXELS:
        raise PictureError(f"{size}, {width * height:,} in all: expected at most {MOST_PIXELS:,}")
    if max(width, height) > MOST_ELONGATED * min(width, height):
        raise PictureError(f"{size}: expected one side to be at most {MOST_ELONGATED} times as long as the other")


def _upright(image: Image.Image) -> Image.Image:
    image.draft(None, (LARGEST_SIDE_PX, LARGEST_SIDE_PX))  # a large JPEG is decoded at a half, quarter or eighth
    return ImageOps.exif_transpose(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _to_8_bits(image).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, PAPER), layer).convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Grey levels of 16 bits by their upper half; floating-point ones from the darkest to the brightest."""
    levels = np.asarray(image).astype(np.float64)
    if image.mode == "F":
        levels = np.nan_to_num(levels)
        levels -= levels.min()
        levels *= 65535 / (levels.max() or 1)
    return Image.fromarray((levels.clip(0, 65535) // 256).astype(np.uint8))


def _fit(image: Image.Image) -> Image.Image:
    """Keep the longer side within `LARGEST_SIDE_PX`; enlarge what is too small, without smoothing."""
    image.thumbnail((LARGEST_SIDE_PX, LARGEST_SIDE_PX))
    factor = SMALLEST_SIDE_PX / min(image.size)
    if factor <= 1:
        return image
    width, height = (min(LARGEST_SIDE_PX, max(SMALLEST_SIDE_PX, round(side * factor))) for side in image.size)
    return image.resize((width, height), Image.Resampling.NEAREST)


def _why_unreadable(name: str, source: str | Path | BinaryIO) -> str:
    head = _head(source)
    if not head:
        return f"{name} is empty: it has 0 bytes"
    kind = "a text file" if _is_text(head) else "a file of another kind, or damaged at its beginning"
    return f"{name} is not a picture but {kind}: expected {ACCEPTED}"


def _head(source: str | Path | BinaryIO) -> bytes:
    if isinstance(source, str | Path):
        with Path(source).open("rb") as file:
            return file.read(512)
    source.seek(0)
    return source.read(512)


def _is_text(head: bytes) -> bool:
    """Whether the beginning of a file is UTF-8 without control characters; a character may be cut at its end."""
    text = head.decode("utf-8", errors="ignore")
    return len(text.encode()) >= len(head) - 3 and all(sign.isprintable() or sign.isspace() for sign in text)
