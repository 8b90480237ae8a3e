import dataclasses
import hashlib
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_mm.recipes.scene_samples import main
from oval_mm.recipes.scenes import SPLITS, Scene, caption, draw_scene, make_scene, paint, split_of
from oval_mm.recipes.shapes import COLOURS, DIGITS, LETTERS, SHAPES, ink

SEEDS = st.integers(0, 9_999_999)


def _pixels(scene: Scene) -> np.ndarray:
    return np.asarray(paint(scene)).astype(int)


def _distance(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return np.abs(pixels - np.array(colour)).max(-1)


@given(SEEDS)
@settings(max_examples=40)
def test_a_scene_has_three_to_six_objects_that_a_question_can_tell_apart(seed: int) -> None:
    scene = make_scene(seed)
    assert 3 <= len(scene.objects) <= 6
    assert len({(thing.colour, thing.shape) for thing in scene.objects}) == len(scene.objects)
    glyphs = [thing.glyph for thing in scene.objects if thing.glyph]
    assert len(set(glyphs)) == len(glyphs)
    assert all(glyph in DIGITS + LETTERS for glyph in glyphs)
    assert all(thing.shape in SHAPES and thing.colour in COLOURS for thing in scene.objects)
    assert len({thing.place for thing in scene.objects}) == len(scene.objects)


@given(SEEDS, st.sampled_from((64, 128, 224)))
@settings(max_examples=40)
def test_no_two_boxes_overlap_and_all_are_inside_the_image(seed: int, size_px: int) -> None:
    boxes = [thing.box for thing in make_scene(seed, size_px).objects]
    covered = np.zeros((size_px, size_px), dtype=int)
    for x0, y0, x1, y1 in boxes:
        assert 0 <= x0 < x1 <= size_px
        assert 0 <= y0 < y1 <= size_px
        covered[y0:y1, x0:x1] += 1
    assert covered.max() == 1


@given(SEEDS)
@settings(max_examples=40)
def test_boxes_hold_all_pixels_of_their_object_tightly(seed: int) -> None:
    scene = make_scene(seed)
    pixels = _pixels(scene)
    outside = np.ones(pixels.shape[:2], dtype=bool)
    for thing in scene.objects:
        x0, y0, x1, y1 = thing.box
        outside[y0:y1, x0:x1] = False
        filled = _distance(pixels[y0:y1, x0:x1], COLOURS[thing.colour]) < 40
        rows, columns = np.flatnonzero(filled.any(1)), np.flatnonzero(filled.any(0))
        assert rows[0] <= 3
        assert columns[0] <= 3
        assert rows[-1] >= y1 - y0 - 4
        assert columns[-1] >= x1 - x0 - 4
    assert pixels[outside].min() > 200  # pale: nothing but background


@given(SEEDS)
@settings(max_examples=40)
def test_the_pixels_have_the_colour_that_the_description_says(seed: int) -> None:
    scene = make_scene(seed)
    pixels = _pixels(scene)
    for thing in scene.objects:
        x0, y0, x1, y1 = thing.box
        matches = {name: (_distance(pixels[y0:y1, x0:x1], rgb) < 12).sum() for name, rgb in COLOURS.items()}
        matches.pop("black" if ink(thing.colour) == (0, 0, 0) else "", None)  # what the glyph is written in
        assert max(matches, key=lambda name: matches[name]) == thing.colour


@given(SEEDS, st.sampled_from((128, 256)))
@settings(max_examples=40)
def test_a_region_is_where_its_name_says(seed: int, size_px: int) -> None:
    for thing in make_scene(seed, size_px).objects:
        x0, y0, x1, y1 = thing.box
        thirds = [min(2, int(3 * (low + high) / 2 / size_px)) for low, high in ((y0, y1), (x0, x1))]
        assert thing.place == f"{['top', 'middle', 'bottom'][thirds[0]]} {['left', 'center', 'right'][thirds[1]]}"


@given(SEEDS)
@settings(max_examples=40)
def test_objects_do_not_touch(seed: int) -> None:
    boxes = [thing.box for thing in make_scene(seed).objects]
    for (x0, y0, x1, y1), (u0, v0, u1, v1) in itertools.combinations(boxes, 2):
        assert max(u0 - x1, x0 - u1, v0 - y1, y0 - v1) >= 16, "less than a cell apart"


@given(SEEDS)
@settings(max_examples=40)
def test_boxes_end_where_cells_do_and_a_glyph_fills_the_cell_in_the_middle(seed: int) -> None:
    scene = make_scene(seed)
    for thing in scene.objects:
        x0, y0, x1, y1 = thing.box
        assert {edge % 16 for edge in thing.box} == {0}
        assert (x1 - x0, y1 - y0) == (48, 48)
        if thing.glyph:
            plain = dataclasses.replace(scene, objects=(dataclasses.replace(thing, glyph=None),))
            drawn = np.abs(_pixels(dataclasses.replace(scene, objects=(thing,))) - _pixels(plain)).max(-1) > 40
            assert drawn[y0 + 16 : y1 - 16, x0 + 16 : x1 - 16].sum() == drawn.sum() > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_every_glyph_lies_on_its_shape_and_is_large_enough_to_read(shape: str) -> None:
    place = make_scene(0).objects[0]
    for glyph, colour in zip(DIGITS + LETTERS, itertools.cycle(COLOURS)):
        thing = dataclasses.replace(place, shape=shape, colour=colour, glyph=glyph, box=(40, 40, 88, 88))
        plain = _pixels(Scene(0, 128, (dataclasses.replace(thing, glyph=None),)))
        changed = np.abs(_pixels(Scene(0, 128, (thing,))) - plain).max(-1) > 25
        rows = np.flatnonzero(changed.any(1))
        assert rows[-1] - rows[0] + 1 >= 12
        assert _distance(plain, COLOURS[colour])[changed].max() < 20, f"{glyph} reaches beyond the {shape}"


def test_shapes_can_be_told_apart() -> None:
    thing = make_scene(0).objects[0]
    masks = []
    for shape in SHAPES:
        alone = dataclasses.replace(thing, shape=shape, colour="black", glyph=None, box=(40, 40, 70, 70))
        masks.append(_pixels(Scene(0, 128, (alone,)))[40:70, 40:70].max(-1) < 128)
    for one, other in itertools.combinations(masks, 2):
        assert (one != other).mean() > 0.08


def test_colours_can_be_told_apart() -> None:
    assert len(COLOURS) >= 7
    for one, other in itertools.combinations(COLOURS.values(), 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 85


@given(SEEDS)
@settings(max_examples=30)
def test_a_caption_names_every_object(seed: int) -> None:
    scene = make_scene(seed)
    parts = caption(scene).split(" and ")
    for part, thing in zip(parts, scene.objects, strict=True):
        assert thing.name in part
        assert part.endswith(thing.glyph.lower() if thing.glyph else thing.shape)
        assert part.startswith("an orange" if thing.colour == "orange" else f"a {thing.colour}")


def test_one_seed_gives_one_scene_in_every_process_and_at_every_size() -> None:
    code = (
        "import hashlib; from oval_mm.recipes.scenes import draw_scene; image, scene = draw_scene(17);"
        "print(hashlib.sha256(image.tobytes() + repr(scene).encode()).hexdigest())"
    )
    image, scene = draw_scene(17)
    expected = hashlib.sha256(image.tobytes() + repr(scene).encode()).hexdigest()
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert output.stdout.strip() == expected, output.stderr
    large = draw_scene(17, 512)[1]
    assert [thing.name for thing in large.objects] == [thing.name for thing in scene.objects]
    assert [thing.box for thing in large.objects] == [tuple(2 * edge for edge in thing.box) for thing in scene.objects]


def test_splits_are_disjoint() -> None:
    assert list(SPLITS) == ["train", "validation", "test"]
    for one, other in itertools.combinations(SPLITS.values(), 2):
        assert one.stop <= other.start or other.stop <= one.start
    for name, seeds in SPLITS.items():
        assert split_of(seeds[0]) == split_of(seeds[-1]) == name


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"seed must lie in one of the splits .* got -1"):
        split_of(-1)
    with pytest.raises(ValueError, match=r"size_px must be at least 64.* got 32"):
        draw_scene(0, 32)


def test_samples_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path / "deep"), "--count", "5", "--split", "validation"])
    names = sorted(path.name for path in (tmp_path / "deep").iterdir())
    assert names[0] == "contact_sheet.png"
    assert names[1:3] == ["scene_08000000.json", "scene_08000000.png"]
    assert len(names) == 11
    assert "5 scenes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--count", "0"])
