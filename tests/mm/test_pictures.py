"""Every kind of picture file, good and bad, through `load_picture`."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oval_mm.pictures import (
    LARGEST_SIDE_PX,
    MOST_ELONGATED,
    MOST_PIXELS,
    SMALLEST_SIDE_PX,
    PictureError,
    load_picture,
)
from tests.mm.tiny_vlms import NAMES, tiny, words

RED, GREEN, WHITE = (255, 0, 0), (0, 128, 0), (255, 255, 255)
HEIGHT, WIDTH = 60, 80


def two_halves(mode: str = "RGB", left: Any = RED, right: Any = GREEN) -> Image.Image:
    image = Image.new(mode, (WIDTH, HEIGHT), left)
    image.paste(right, (WIDTH // 2, 0, WIDTH, HEIGHT))
    return image


def stored(image: Image.Image, suffix: str = "PNG", **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, suffix, **options)
    file.seek(0)
    return file


def colours(image: Image.Image) -> list[tuple[int, ...]]:
    """The colours in the middle of the left and the right half."""
    assert image.mode == "RGB"
    points = [(image.width // 4, image.height // 2), (3 * image.width // 4, image.height // 2)]
    return [tuple(image.convert("RGB").getpixel(point)) for point in points]  # type: ignore[arg-type]


def is_close(found: list[tuple[int, ...]], expected: list[tuple[int, ...]], tolerance: int = 4) -> bool:
    return bool(np.abs(np.subtract(found, expected)).max() <= tolerance)


def png_header(width: int, height: int) -> bytes:
    """A PNG file that claims a size and holds no pixels."""
    chunks = {b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks.items()
    )


@pytest.mark.parametrize("suffix", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_every_format_is_read(suffix: str) -> None:
    image = load_picture(stored(two_halves(), suffix))
    assert image.size == (WIDTH, HEIGHT)
    assert is_close(colours(image), [RED, GREEN], 12)


def test_a_path_is_read_as_text_and_as_path(tmp_path: Path) -> None:
    two_halves().save(tmp_path / "halves.png")
    for path in (tmp_path / "halves.png", str(tmp_path / "halves.png")):
        assert colours(load_picture(path)) == [RED, GREEN]


def test_cmyk_becomes_rgb() -> None:
    image = two_halves("CMYK", (0, 255, 255, 0), (255, 0, 255, 128))
    assert is_close(colours(load_picture(stored(image, "JPEG", quality=95))), [RED, (0, 127, 0)], 12)


def test_a_palette_becomes_rgb() -> None:
    assert colours(load_picture(stored(two_halves().quantize(8)))) == [RED, GREEN]


@pytest.mark.parametrize("transparent", [0, b"\x00\xff"])
def test_the_transparent_colour_of_a_palette_is_white(transparent: int | bytes) -> None:
    image = two_halves("P", 0, 1)
    image.putpalette([*RED, *GREEN])
    assert colours(load_picture(stored(image, transparency=transparent))) == [WHITE, GREEN]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (two_halves("RGBA", (*RED, 0), (*GREEN, 255)), [WHITE, GREEN]),
        (two_halves("LA", (0, 0), (90, 255)), [WHITE, (90, 90, 90)]),
        (two_halves("RGBA", (0, 0, 0, 102), (*GREEN, 255)), [(153, 153, 153), GREEN]),
        (two_halves("L", 200, 90), [(200,) * 3, (90,) * 3]),
        (two_halves("1", 0, 1), [(0, 0, 0), WHITE]),
    ],
    ids=["RGBA", "LA", "half transparent", "L", "1"],
)
def test_grey_and_transparent_pictures(image: Image.Image, expected: list[tuple[int, ...]]) -> None:
    assert colours(load_picture(stored(image))) == expected


def test_sixteen_bits_keep_their_grey_levels() -> None:
    levels = np.full((HEIGHT, WIDTH), 0x4000, dtype=np.uint16)
    levels[:, WIDTH // 2 :] = 0xC0FF
    for suffix in ("PNG", "TIFF"):
        assert colours(load_picture(stored(Image.fromarray(levels), suffix))) == [(0x40,) * 3, (0xC0,) * 3]


def test_floating_point_pictures_go_from_black_to_white() -> None:
    levels = np.zeros((HEIGHT, WIDTH), dtype=np.float32)
    levels[:, WIDTH // 2 :] = 0.003
    levels[0, 0] = np.nan
    assert colours(load_picture(stored(Image.fromarray(levels), "TIFF"))) == [(0, 0, 0), WHITE]
    flat = np.full((HEIGHT, WIDTH), 7, dtype=np.float32)
    assert colours(load_picture(stored(Image.fromarray(flat), "TIFF"))) == [(0, 0, 0)] * 2


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [two_halves(), two_halves("RGB", GREEN, RED)]
    for suffix in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if suffix == "WEBP" else {}
        file = stored(frames[0], suffix, save_all=True, append_images=frames[1:], duration=100, **options)
        assert is_close(colours(load_picture(file)), [RED, GREEN]), suffix


@pytest.mark.parametrize(
    ("orientation", "expected"),
    [(1, [RED, GREEN]), (2, [GREEN, RED]), (3, [GREEN, RED]), (6, None), (8, None)],
)
def test_exif_rotation_is_applied(orientation: int, expected: list[tuple[int, ...]] | None) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = load_picture(stored(two_halves(), "JPEG", exif=exif, quality=95))
    if expected is not None:
        assert image.size == (WIDTH, HEIGHT)
        assert is_close(colours(image), expected, 12)
        return
    assert image.size == (HEIGHT, WIDTH)
    turned_back = image.rotate(90 if orientation == 6 else -90, expand=True)
    assert is_close(colours(turned_back), [RED, GREEN], 12)


def test_one_pixel_is_enlarged() -> None:
    image = load_picture(stored(Image.new("RGB", (1, 1), RED)))
    assert image.size == (SMALLEST_SIDE_PX, SMALLEST_SIDE_PX)
    assert colours(image) == [RED, RED]


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (64, 1), (33, 2000)])
@pytest.mark.parametrize("name", NAMES)
def test_every_processor_takes_small_and_thin_pictures(name: str, size: tuple[int, int]) -> None:
    inputs = tiny(name).inputs((f"{words(2)} *", [load_picture(stored(Image.new("RGB", size, RED)))]))
    assert inputs["pixel_values"].isfinite().all()


@pytest.mark.parametrize("suffix", ["JPEG", "PNG"])
def test_a_picture_of_20_megapixels_is_made_smaller(suffix: str) -> None:
    image = load_picture(stored(two_halves().resize((5472, 3648), Image.Resampling.NEAREST), suffix))
    assert image.size == (LARGEST_SIDE_PX, LARGEST_SIDE_PX * 2 // 3)
    assert is_close(colours(image), [RED, GREEN], 12)


@pytest.mark.parametrize("side", [9_001, 10_000, 40_000])
def test_more_pixels_than_stated_are_refused_without_decoding(side: int) -> None:
    assert side**2 > MOST_PIXELS
    with pytest.raises(PictureError, match=f"expected at most {MOST_PIXELS:,}"):
        load_picture(io.BytesIO(png_header(side, side)))


def test_a_line_is_refused() -> None:
    load_picture(stored(Image.new("RGB", (MOST_ELONGATED, 1))))
    with pytest.raises(PictureError, match="at most 64 times as long"):
        load_picture(stored(Image.new("RGB", (MOST_ELONGATED + 1, 1))))


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _noise_inside(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(50) + content[middle + 50 :]


@pytest.mark.parametrize("damage", [_cut, _noise_inside])
def test_a_damaged_png_is_refused(damage: Callable[[bytes], bytes]) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 50, 3), dtype=np.uint8))
    with pytest.raises(PictureError, match="the picture is damaged or cut short"):
        load_picture(io.BytesIO(damage(stored(noise).getvalue())))


@pytest.mark.parametrize("suffix", ["JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_half_a_file_is_refused(suffix: str, tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 50, 3), dtype=np.uint8))
    (tmp_path / "photo").write_bytes(_cut(stored(noise, suffix).getvalue()))
    with pytest.raises(PictureError, match=r"^photo is"):
        load_picture(tmp_path / "photo")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"photo\.png is empty: it has 0 bytes"),
        ("Grüße, nicht ein Bild\n".encode(), r"photo\.png is not a picture but a text file: expected PNG, JPEG"),
        (bytes(range(256)), r"photo\.png is not a picture but a file of another kind"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture but a text file"),
        (b"\x89PNG\r\n\x1a\n", "damaged at its beginning"),
    ],
    ids=["empty", "text", "binary", "PostScript", "only a signature"],
)
def test_what_is_no_picture_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    with pytest.raises(PictureError, match=message):
        load_picture(path)
    with pytest.raises(PictureError, match=message.replace(r"photo\.png", "the picture")):
        load_picture(io.BytesIO(content))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=r"there is no file none\.png"):
        load_picture(tmp_path / "none.png")
    with pytest.raises(PictureError, match="is a folder, expected a picture"):
        load_picture(tmp_path)
    assert issubclass(PictureError, ValueError)
