"""Reading questions about images with few image pages: what is measured is what the names say."""

import dataclasses
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessor

from benchmarks import image_qa
from benchmarks.image_questions import ImageBatch, Region, make_batch, regions_of
from benchmarks.image_readers import OvalReader, Reader, rows_of
from benchmarks.image_regions import Grid, shares_of_pages
from benchmarks.image_rivals import DownsamplingReader, EvictingReader, downsampled, kept_tokens
from benchmarks.image_routers import ROUTERS, ImageBudget
from benchmarks.image_scores import right_turns
from benchmarks.image_tables import image_qa_table
from oval_core.page_table import PageTable
from oval_core.routers.box import BoxRouter
from oval_mm.head_file import save_head
from oval_mm.hybrid_head import HeadSizes, HybridHead
from oval_mm.page_embeddings import PlaceEmbedding
from oval_mm.recipes.answering import packed_answers
from oval_mm.recipes.llava_batches import conversation_pack, easy_vqa_images, easy_vqa_pack, scene_pack
from oval_mm.recipes.scenes import make_scene
from oval_mm.recipes.tiny_llava import build_llava, language_config, make_processor, save_llava
from tests.mm.test_tiny_llava import tiny_tower

PACKS = [conversation_pack(seed, 2, 64, most=3) for seed in (1, 2)]
HEAD = "hybrid text-only"
SETTINGS = {"page_size": 8, "rank": 2}
IMAGE_PAGES, PAGES = 2 * 8, 2 * 8 + 1  # two images of 64 tokens, and a page of the text before them


@pytest.fixture(scope="module")
def llava() -> tuple[Any, Any]:
    """64 px, 64 image tokens; random weights so large that answers differ."""
    torch.manual_seed(0)
    tower = tiny_tower(patch_px=8)
    images = CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    language = language_config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    return build_llava(tower, language), make_processor(images, tower)


@pytest.fixture(scope="module")
def batch(llava: tuple[Any, Any]) -> ImageBatch:
    return make_batch(PACKS, llava[1])


def oval(llava: tuple[Any, Any], name: str, **more: Any) -> OvalReader:
    return OvalReader(*llava, (1.0,), ROUTERS[name](), SETTINGS, **more)


def read_pages(llava: tuple[Any, Any], batch: ImageBatch, name: str, share: float) -> list[Tensor]:
    """Pages of every selection, bool `[R, H, P]`, while the first rows are read."""
    with oval(llava, name) as reader:
        filled = reader.fill(batch)
        with reader.handle.trace() as entries:
            reader.router.share = share
            cache = rows_of(filled, batch.rows[0].packs)
            for token in batch.rows[0].tokens.split(1, dim=1):
                llava[0](input_ids=token, cache=cache)
        return [entry.read for entry in entries]


def test_every_question_is_in_one_row(batch: ImageBatch) -> None:
    talks = [talk for rows in batch.rows for talk in rows.talks]
    expected = [(number, talk) for number, pack in enumerate(PACKS) for talk in pack.dialogues]
    assert sorted((talk.pack, talk.turns) for talk in talks) == sorted(expected)
    for rows in batch.rows:
        lengths = [len(talk.block.tokens) for talk in rows.talks]
        assert max(lengths) <= 1.2 * min(lengths)
        assert int(rows.is_answer.sum()) == sum(label >= 0 for talk in rows.talks for label in talk.block.labels)


def test_dense_rows_are_the_packed_answers(llava: tuple[Any, Any], batch: ImageBatch) -> None:
    expected = {answer.asked: answer for answer in packed_answers(*llava, PACKS)}
    reader, end = Reader(*llava), llava[1].tokenizer.eos_token_id
    filled = reader.fill(batch)
    for rows in batch.rows:
        chosen = torch.zeros_like(rows.tokens)
        chosen[rows.is_answer] = reader.read(filled, rows, 1.0).logits.argmax(-1)
        for row, talk in enumerate(rows.talks):
            for number, turn in enumerate(talk.turns):
                given = chosen[row, rows.is_answer[row] & (rows.turn[row] == number)].tolist()
                words = llava[1].tokenizer.decode(given[: given.index(end)] if end in given else given)
                assert words == expected[turn].given.removesuffix(" ...")


def test_an_answer_is_right_if_every_token_is(batch: ImageBatch) -> None:
    for rows in batch.rows:
        chosen = rows.wanted[rows.is_answer]
        assert all(is_right for _, is_right in right_turns(rows, chosen))
        last = int(rows.is_answer.nonzero()[-1, 0])  # the row of the token that is going to be wrong
        chosen = torch.cat([chosen[:-1], chosen[-1:] + 1])
        wrong = [kind for kind, is_right in right_turns(rows, chosen) if not is_right]
        assert wrong == [rows.talks[last].turns[-1].kind]


@pytest.mark.parametrize("name", ["box", "basis"])
def test_all_image_pages_are_dense(llava: tuple[Any, Any], batch: ImageBatch, name: str) -> None:
    dense = Reader(*llava)
    filled = dense.fill(batch)
    with oval(llava, name) as reader:
        paged = reader.fill(batch)
        for rows in batch.rows:
            got, expected = reader.read(paged, rows, 1.0), dense.read(filled, rows, 1.0)
            torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-4)
            assert got.regions.hits == got.regions.selections
            assert got.regions.shares == pytest.approx(got.regions.selections)


def test_fewer_pages_are_not_dense(llava: tuple[Any, Any], batch: ImageBatch) -> None:
    dense = Reader(*llava)
    expected = dense.read(dense.fill(batch), batch.rows[0], 1.0).logits
    for name in ROUTERS:
        with oval(llava, name) as reader:
            got = reader.read(reader.fill(batch), batch.rows[0], 0.25)
        assert (got.logits - expected).abs().max() > 1e-2
        assert 0.2 < got.bytes_read / got.bytes_dense < 0.8


@pytest.mark.parametrize(("name", "share"), [("box", 0.0), ("box", 0.1), ("basis", 0.25), ("random fixed", 0.5)])
def test_text_pages_are_forced_and_image_pages_counted(
    llava: tuple[Any, Any], batch: ImageBatch, name: str, share: float
) -> None:
    for read in read_pages(llava, batch, name, share):
        assert read[..., 0].all()  # <s> USER:
        assert read[..., PAGES:].all()  # of the question
        assert (read[..., 1:PAGES].sum(-1) == round(share * IMAGE_PAGES)).all()


def test_a_share_above_none_is_at_least_one_page(llava: tuple[Any, Any], batch: ImageBatch) -> None:
    assert all((read[..., 1:PAGES].sum(-1) == 1).all() for read in read_pages(llava, batch, "box", 0.01))


def test_random_fixed_pages_stay_the_same(llava: tuple[Any, Any], batch: ImageBatch) -> None:
    fixed = [read[..., :PAGES] for read in read_pages(llava, batch, "random fixed", 0.25)]
    assert all((read == fixed[0][:, :1]).all() for read in fixed)
    assert (fixed[0][0] != fixed[0][1]).any()  # of another conversation: other pages
    anew = [read[..., :PAGES] for read in read_pages(llava, batch, "random", 0.25)]
    assert any((read != anew[0]).any() for read in anew)


def test_controls_read_what_their_names_say(llava: tuple[Any, Any], batch: ImageBatch) -> None:
    expected = {"recent": [*range(13, 17)], "last patch": [8, 16], "no_image": []}
    for (name, pages), share in zip(expected.items(), (0.25, 1 / 8, 0.0), strict=True):
        for read in read_pages(llava, batch, name, share):
            assert read[..., 1:PAGES].nonzero()[:, -1].add(1).unique().tolist() == pages


def test_metadata_is_that_of_the_shortlist_that_was_looked_at(llava: tuple[Any, Any], batch: ImageBatch) -> None:
    rows = batch.rows[0]
    with oval(llava, "basis") as reader:
        filled = reader.fill(batch)
        few, many = (reader.read(filled, rows, share) for share in (0.1, 1.0))
    assert many.bytes_read > many.bytes_dense  # every page and every basis
    assert few.bytes_read < 0.6 * many.bytes_read


def test_the_wrapper_asks_the_inner_router(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = BoxRouter()
    router = ImageBudget(inner, 0.5)
    assert (router.name, router.needs_bases, router.needs_hidden_states) == ("box", False, False)
    keys = torch.zeros(1, 1, 2, 8, 4)
    monkeypatch.setattr(inner, "page_features", lambda keys, mask: keys.amax(-2))
    assert router.page_features(keys, None) is not None


def test_places_of_answers_are_those_of_the_questions() -> None:
    scene = make_scene(3, 64)
    for one in (scene_pack(scene), conversation_pack(5, 2, 64)):
        found = regions_of(one)
        asked = [turn for talk in one.dialogues for turn in talk if turn.kind in ("glyph", "shape")]
        assert asked
        for turn in asked:
            region = found[turn.question, turn.answer]
            owner = next(thing for thing in one.pictures[region.image].objects if thing.box == region.box)  # type: ignore[union-attr]
            assert turn.answer in (owner.shape, (owner.glyph or "").lower())


def test_shares_of_pages_are_of_the_right_image() -> None:
    grid = Grid(side=4, patch_px=8)
    assert grid.patches((8, 15, 17, 16)) == [5, 6]
    table = PageTable(8)
    table.extend(2 + 2 * 16)
    table.mark(2, 18, 0)
    table.mark(18, 34, 1)
    table.seal()
    assert shares_of_pages(table, Region(1, (0, 8, 8, 24)), grid).tolist() == [0, 0, 0, 0.5, 0.5]


def test_shares_of_pages_follow_blocks() -> None:
    table = PageTable(8)
    table.extend(16)
    table.mark(0, 16, 0, blocks=[[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])
    table.seal()
    assert shares_of_pages(table, Region(0, (16, 0, 32, 16)), Grid(4, 8)).tolist() == [0, 1, 0, 0]


def test_square_pages_read_as_much(llava: tuple[Any, Any], batch: ImageBatch) -> None:
    rows = batch.rows[0]
    with oval(llava, "box", block=2) as reader:
        filled = reader.fill(batch)
        squares, everything = (reader.read(filled, rows, share) for share in (0.25, 1.0))
    assert everything.regions.hits == everything.regions.selections > 0
    assert 0.2 < squares.bytes_read / squares.bytes_dense < 0.5


def test_fastv_keeps_the_tokens_with_most_attention(llava: tuple[Any, Any], batch: ImageBatch) -> None:
    is_image = torch.tensor([False, True, True, True, True, False])
    attention = torch.tensor([[0.0, 0.1, 0.4, 0.3, 0.2, 0.0], [0.9, 0.4, 0.1, 0.2, 0.3, 0.9]])
    assert kept_tokens(attention, is_image, 0.5).tolist() == [[0, 2, 3, 5], [0, 1, 4, 5]]
    assert kept_tokens(attention, is_image, 0.01).shape == (2, 3)
    reader = EvictingReader(*llava, (0.25,))
    before = llava[0].config.text_config._attn_implementation
    filled = reader.fill(batch)
    few, everything = (reader.read(filled, batch.rows[0], share) for share in (0.25, 1.0))
    dense = Reader(*llava)
    expected = dense.read(dense.fill(batch), batch.rows[0], 1.0)
    torch.testing.assert_close(everything.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert (few.logits - expected.logits).abs().max() > 1e-2
    steps = batch.rows[0].tokens.shape[1]
    own = sum(range(1, steps + 1))
    assert few.bytes_read / few.bytes_dense == pytest.approx((34 * steps + own) / (130 * steps + own))
    assert llava[0].config.text_config._attn_implementation == before


def test_downsampled_images_lose_detail_and_keep_their_size(llava: tuple[Any, Any], batch: ImageBatch) -> None:
    stripes = Image.new("RGB", (64, 64))
    for x in range(0, 64, 2):
        stripes.paste((255, 255, 255), (x, 0, x + 1, 64))
    small = downsampled(stripes, 0.1)
    assert small.size == stripes.size
    levels = np.asarray(small)
    assert levels.min() > 100
    assert levels.max() < 155
    reader = DownsamplingReader(*llava, (0.1, 1.0))
    filled = reader.fill(batch)
    blurred, plain = (reader.read(filled, batch.rows[0], share).logits for share in (0.1, 1.0))
    dense = Reader(*llava)
    torch.testing.assert_close(plain, dense.read(dense.fill(batch), batch.rows[0], 1.0).logits)
    assert (blurred - plain).abs().max() > 1e-3


def test_images_without_places_have_no_recall(llava: tuple[Any, Any]) -> None:
    pytest.importorskip("easy_vqa")
    batch = make_batch([easy_vqa_pack(easy_vqa_images("validation")[0])], llava[1])
    with oval(llava, "box") as reader:
        assert reader.read(reader.fill(batch), batch.rows[0], 0.5).regions.selections == 0


def test_a_dense_step_is_an_error(llava: tuple[Any, Any], batch: ImageBatch) -> None:
    reader = oval(llava, "box")
    reader.config = dataclasses.replace(reader.config, min_context_tokens=10_000, always_paged=False)
    with reader, pytest.raises(RuntimeError, match="context below min_context_tokens"):
        reader.read(reader.fill(batch), batch.rows[0], 0.5)


@pytest.fixture(scope="module")
def result(llava: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes, also about a routing head that was never trained and therefore says nothing."""
    path = tmp_path_factory.mktemp("image_qa")
    save_llava(*llava, path / "model")
    save_head(path / "head", HybridHead(HeadSizes.of(llava[0], PlaceEmbedding().size)), PlaceEmbedding())
    sizes = ["--packs", "1", "--datasets", "one", "two", "--page-size", "8", "--shares", "0.25", "0.5"]
    readers = ["--readers", "box", "no_image", "fastv", "downsampled"]
    heads = ["--hybrid", str(path / "head"), "--hybrid-base", "box"]
    with redirect_stdout(io.StringIO()) as printed:
        image_qa.main(["--model", str(path / "model"), "--out", str(path), *sizes, *readers, *heads])
    last: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    assert last == json.loads((path / "image_qa.json").read_text())
    return last


def test_the_command_measures_what_was_asked_for(result: dict[str, Any]) -> None:
    assert set(result["majority_baseline"]) == {"one", "two"}
    shares = {(row["router"], row["read_share"]) for row in result["rows"]}
    named = {(name, share) for name in ("box", HEAD, "fastv", "downsampled") for share in (0.25, 0.5)}
    assert shares == {("dense", 1), ("no_image", 0)} | named
    for row in result["rows"]:
        assert {"dataset", "images", "accuracy", "kl", "page_recall", "top1", "bytes_ratio", "answers"} <= row.keys()
        assert 0 <= row["accuracy"] <= 1
        assert row["kl"] >= -1e-6
        assert (row["page_recall"] is None) == (row["router"] in ("dense", "fastv", "downsampled"))


def test_readers_differ_from_dense_as_they_should(result: dict[str, Any]) -> None:
    rows = {(row["router"], row["dataset"], row["read_share"]): row for row in result["rows"]}
    assert rows["dense", "two", 1]["kl"] == 0
    assert rows["dense", "two", 1]["top1"] == rows["dense", "two", 1]["bytes_ratio"] == 1
    assert rows["no_image", "two", 0]["page_recall"] == 0
    for share in (0.25, 0.5):
        assert rows[HEAD, "two", share]["kl"] == pytest.approx(rows["box", "two", share]["kl"], rel=1e-3)
        assert 0 < rows["box", "two", share]["kl"] < rows["no_image", "two", 0]["kl"]


def test_the_table_has_a_line_a_reader(result: dict[str, Any]) -> None:
    text = image_qa_table(result)
    for name in ("dense", "box", HEAD, "no_image", "fastv", "downsampled"):
        assert text.count(f"| {name} | ") == 2
    assert "| two images, second turn |" in text


@pytest.mark.parametrize("wrong", ["--shares 0", "--packs 0", "--readers nobody", "--page-size 5"])
def test_wrong_options_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        image_qa.main(["--model", "nowhere", *wrong.split()])
    assert wrong.split()[1] in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"must hold a LLaVA .* has no config\.json"):
        image_qa.main(["--model", str(tmp_path)])
