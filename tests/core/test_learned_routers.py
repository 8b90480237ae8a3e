"""Learned routers work at any context, keep the rules of selection, and refuse what they were not made for."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oval_core import OvalConfig, attach
from oval_core.routers import ROUTERS, Pages, Selection
from oval_core.routers.learned import LearnedHead, LearnedRouter, Places, free
from oval_core.routers.learned_file import ModelSizes, load_learned, save_learned
from oval_core.routers.output_head import OutputHead, OutputHeadRouter
from oval_core.routers.position_mlp import PositionMlpHead, PositionMlpRouter, encoded, radii, window
from oval_core.routers.repair import InputRepair, RepairedRouter
from tests.core.scenes import DIM, GROUP, HEADS, filled, random_tokens, small_config
from tests.core.tiny_models import llama, prompt

HIDDEN = 12
SIZES = ModelSizes(layers=1, heads=HEADS, group=GROUP, hidden_size=HIDDEN, head_dim=DIM)
KINDS: list[type[LearnedRouter]] = [PositionMlpRouter, OutputHeadRouter]
PADDING = [0, 37, 73]  # 80 tokens and one: 10, 5 and 0 sealed pages


def lively(head: LearnedHead, seed: int = 0) -> LearnedHead:
    """With all weights drawn: first weights hold zeros, too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
    return head


def made(kind: type[LearnedRouter], sizes: ModelSizes = SIZES, **options: Any) -> LearnedRouter:
    return kind(lively(kind.head_class(sizes, dim=8, **options)))


def scene(
    padding: list[int], queries: int = 1, total: int = 81, **changes: Any
) -> tuple[Tensor, Pages, dict[str, Any]]:
    """Grouped query, pages, and what they were made of."""
    tokens, config = random_tokens(len(padding), total), small_config(router="window", **changes)
    attention = filled(config, tokens, padding)
    query, hidden = torch.randn(len(padding), HEADS * GROUP, queries, DIM), torch.randn(len(padding), queries, HIDDEN)
    attention.binding.hidden_states[0] = hidden
    return *attention.pages(query), {"tokens": tokens, "query": query, "hidden": hidden, "config": config}


def chosen(selection: Selection, row: int, head: int = 0) -> list[int]:
    return selection.pages[row, head][selection.valid[row, head]].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 3])
def test_the_rules_of_selection(kind: type[LearnedRouter], queries: int) -> None:
    router = made(kind)
    query, pages, _ = scene(PADDING, queries, budget_pages=5, sink_pages=1, window_pages=2)
    selection = router.select(query, pages)
    assert selection.pages.shape == selection.valid.shape == (3, HEADS, 4)
    assert selection.tail is None
    for row, count in enumerate((10, 5, 0)):
        for head in range(HEADS):
            read = chosen(selection, row, head)
            assert len(read) == len(set(read)) == min(4, count)
            assert {0, count - 2, count - 1} <= set(read) <= set(range(count)) or not count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coarse", [False, True])
def test_a_padded_row_is_routed_like_the_row_alone(kind: type[LearnedRouter], coarse: bool) -> None:
    router = made(kind, coarse=coarse)
    query, pages, made_of = scene([0, 37])
    scores, together = router.score(query, pages), router.select(query, pages)
    for row, padding in enumerate((0, 37)):
        alone = filled(made_of["config"], made_of["tokens"].part(padding, None, row))
        alone.binding.hidden_states[0] = made_of["hidden"][row : row + 1]
        one, seen = alone.pages(made_of["query"][row : row + 1])
        found = router.score(one, seen)
        torch.testing.assert_close(found[0], scores[row, ..., : found.shape[-1]], atol=1e-2, rtol=1e-3)
        single = router.select(one, seen)
        for head in range(HEADS):
            assert sorted(chosen(single, 0, head)) == sorted(chosen(together, row, head))


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(KINDS), st.integers(9, 200), st.integers(0, 9))
def test_any_context_length(kind: type[LearnedRouter], total: int, spare: int) -> None:
    router = made(kind)
    query, pages, _ = scene([0], total=total, budget_pages=3 + spare)
    count = (total - 1) // 8
    for head in range(HEADS):
        assert len(chosen(router.select(query, pages), 0, head)) == min(2 + spare, count)


@given(st.integers(0, 10_000), st.floats(0, 5e8), st.floats(0, 32))
def test_a_window_is_clipped_and_never_empty(position: int, offset: float, radius: float) -> None:
    bounds = window(torch.tensor(position), torch.tensor(offset), torch.tensor(radius))
    begin, end = (int(bound) for bound in bounds)
    assert 0 <= begin < end <= position + 1
    assert min(3, position + 1) <= end - begin <= max(3, 2 * radius + 1)
    centre = position - offset
    if radius >= 4 and centre - radius >= 0 and centre + radius <= position:
        assert begin - 1 < centre - radius <= begin + 1e-2
        assert end - 1 <= centre + radius + 1e-2 < end + 1e-2
    if offset == 0:
        assert end == position + 1


def test_the_radius_follows_the_entropy() -> None:
    among = torch.ones(1, 1, 1, 1, 16, dtype=torch.bool)
    even = torch.full((1, 1, 1, 1, 16), -math.log(16))
    sure = torch.full_like(even, -1e4)
    sure[..., 3] = 0
    four = torch.full_like(even, -1e4)
    four[..., :4] = -math.log(4)
    found = [radii(log_weights, among).item() for log_weights in (sure, four, even)]
    assert found == pytest.approx([4, 4 + 28 * math.log(4) / math.log(16), 32], abs=1e-3)


def with_offset(head: PositionMlpHead, offset: float) -> PositionMlpHead:
    """Every query head looks `offset` tokens back, and likes all pages the same."""
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.second_bias[..., -1] = math.log(math.expm1(math.log1p(offset)))  # undoes the softplus
    return head


def test_pages_under_the_window_come_first() -> None:
    head = with_offset(PositionMlpHead(SIZES, dim=8), offset=84)
    router = PositionMlpRouter(head)
    query, pages, _ = scene([0], total=201, sink_pages=0, window_pages=0, budget_pages=12)
    _, asked = router.scored(query, pages)
    torch.testing.assert_close(head.offsets(asked), torch.full((1, HEADS, GROUP, 1), 84.0))
    under = {page for page in range(25) if page * 8 <= 116 + 32 and page * 8 + 7 >= 116 - 32}
    first = {0, 1, 2}  # of equal pages, topk may take any three
    wanted = router.wanted(router.score(query, pages), asked, pages)[0, 0, 0, 0].nonzero().flatten().tolist()
    assert under <= set(wanted)
    assert len(wanted) - len(under) <= len(first)
    assert len(under & set(chosen(router.select(query, pages), 0))) >= len(under) - len(first)


def test_a_sure_head_wants_a_narrow_window_and_its_three_heaviest_pages() -> None:
    router = PositionMlpRouter(with_offset(PositionMlpHead(SIZES, dim=8), offset=82))
    query, pages, _ = scene([0], total=201, sink_pages=0, window_pages=0)
    _, asked = router.scored(query, pages)
    scores = torch.zeros(1, HEADS, GROUP, 1, 25)
    scores[..., [3, 5, 7, 9]] = torch.tensor([80.0, 60.0, 50.0, 40.0])
    wanted = router.wanted(scores, asked, pages)
    expected = torch.zeros(25, dtype=torch.bool)
    expected[[3, 5, 7, 14, 15]] = True  # tokens 114 to 122 are within 4 of 200 - 82
    assert torch.equal(wanted, expected.expand_as(wanted))


def test_a_page_that_one_head_wants_beats_the_mean() -> None:
    """The third page of one query head, light as it is, is read before what the mean of the group likes."""
    router = OutputHeadRouter(lively(OutputHead(SIZES, dim=8)))
    query, pages, _ = scene([0], sink_pages=0, window_pages=0, budget_pages=11)
    scores = torch.full((1, HEADS, GROUP, 1, 10), -20.0)
    scores[:, :, 0, :, 9], scores[:, :, 0, :, [6, 7, 8]] = 0.0, -15.0
    scores[:, :, 1:, :, [0, 1, 2, 3]], scores[:, :, 1:, :, [4, 5]] = 0.0, -1.0
    router.scored = lambda query, pages: (scores, scores)  # type: ignore[method-assign]
    order = chosen(router.select(query, pages), 0)
    assert set(order[:8]) == {0, 1, 2, 3, 6, 7, 8, 9}
    assert set(order[8:]) == {4, 5}


def test_hidden_pages_are_not_wanted() -> None:
    router = made(PositionMlpRouter)
    query, pages, _ = scene([0])
    hidden = torch.full((1, 1, 10), 8)
    hidden[..., 2:8] = 0
    pages = dataclasses.replace(pages, seen=hidden, budget=torch.tensor([4]), most=(4, 10))
    assert free(pages)[0, 0, 0, 0].tolist() == [False, True, *[False] * 6, True, False]  # the others are read anyway
    assert sorted(chosen(router.select(query, pages), 0)) == [0, 1, 8, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_head_says_of_pages_that_are_read_anyway_does_not_count(kind: type[LearnedRouter]) -> None:
    router = made(kind)
    query, pages, _ = scene([0], sink_pages=1, window_pages=2, budget_pages=7)
    expected = router.select(query, pages)
    forced, plain = pages.forced()[0, 0].nonzero()[:, 0], router.head.scores

    def scores(*inputs: Any) -> Tensor:
        found: Tensor = plain(*inputs)
        found[:, :, 0, :, forced] += 50.0
        return found

    router.head.scores = scores
    found = router.select(query, pages)
    assert torch.equal(found.mask(10), expected.mask(10))


@pytest.mark.parametrize("kind", KINDS)
def test_two_routers_of_a_kind_may_look_at_the_same_pages(kind: type[LearnedRouter]) -> None:
    query, pages, _ = scene([0])
    heads = [lively(kind.head_class(SIZES, dim=8), seed) for seed in range(2)]
    alone = [kind(head).score(query, dataclasses.replace(pages, derived={})) for head in heads]
    for head, expected in zip(heads, alone, strict=True):
        torch.testing.assert_close(kind(head).score(query, pages), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_are_no_numbers_are_refused(kind: type[LearnedRouter]) -> None:
    router = made(kind)
    with torch.no_grad():
        router.head.key.fill_(torch.nan)
    query, pages, _ = scene([0])
    with pytest.raises(ValueError, match="NaN"):
        router.select(query, pages)


def test_positions_are_absolute() -> None:
    router = made(PositionMlpRouter)
    query, pages, _ = scene([0])
    later = dataclasses.replace(pages, positions=pages.positions + 1000)
    assert not torch.allclose(router.scored(query, pages)[1], router.scored(query, later)[1])
    assert torch.equal(encoded(torch.tensor([[-9, 0]]))[0, 0], encoded(torch.tensor([[0]]))[0, 0])  # in padding
    code = encoded(torch.arange(0, 100_000, 7)[None])
    assert code.abs().max() <= 1
    assert len(code[0].unique(dim=0)) == code.shape[1]


def test_places_do_without_padding() -> None:
    _, pages, _ = scene([0, 37])
    places = Places.of(pages)
    assert places.starts[1, :5].tolist() == [0, 8, 16, 24, 32]
    assert places.positions.tolist() == [[80], [43]]
    back = 43 - torch.tensor([3.5, 11.5, 19.5])  # tokens from the pages' middles
    torch.testing.assert_close(places.features()[1, 0, :3, 0], back.log1p() / math.log(1024))
    torch.testing.assert_close(places.features()[1, 0, :3, -1], torch.exp(-back / 1024))


def asked_by_hand(head: Any, hidden: Tensor, positions: Tensor) -> Tensor:
    """Of the second query head of the second group."""
    hidden = hidden * head.hidden_scale[0]
    if isinstance(head, OutputHead):
        z = torch.nn.functional.gelu(head.down[0] @ hidden + head.down_bias[0])
        asked = (head.base[0, 4] + 2.0 * head.adapter_out[0, 4] @ head.adapter_in[0, 4]) @ z
        return asked / head.log_temperature[0, 4].exp()
    inputs = torch.cat([hidden, encoded(positions)[0, 0]])
    return (
        head.second[0, 4] @ torch.nn.functional.gelu(head.first[0] @ inputs + head.first_bias[0])
        + head.second_bias[0, 4]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scores_by_formula(kind: type[LearnedRouter]) -> None:
    router = made(kind, coarse=True)
    query, pages, made_of = scene([0], sink_pages=0, window_pages=0)
    head = router.head
    head.hidden_scale.copy_(torch.rand(HIDDEN) + 0.5)
    head.key_mean.normal_()
    asked = asked_by_hand(head, made_of["hidden"][0, 0], pages.positions)
    keys = (pages.basis.coarse()[0][0, 1] - head.key_mean[0, 1]) @ head.key[0, 1].T
    place = Places.of(pages).features()[0, 0] @ asked[8:13]
    coarse = pages.kernels.coarse_scores(query, pages.basis, pages.scaling, None)[0, 1, 1, 0]
    expected = (keys @ asked[:8] + place) / math.sqrt(8) + head.gate[0, 1] * coarse
    torch.testing.assert_close(router.score(query, pages)[0, 1, 1, 0], expected, atol=1e-2, rtol=1e-2)


def test_the_output_head_is_adapted_not_replaced() -> None:
    head = OutputHead(SIZES)
    assert {name for name, _ in head.named_parameters()} == {
        "key", "down", "down_bias", "adapter_in", "adapter_out", "log_temperature",
    }  # fmt: skip
    assert "base" in head.state_dict()
    assert head.adapter_in.shape[-2] == head.adapter_out.shape[-1] == 4
    assert not head.adapter_out.any()
    places = Places(torch.tensor([[90]]), torch.arange(0, 80, 8)[None], torch.full((1, 10), 8))
    scores, among = torch.zeros(1, HEADS, GROUP, 1, 10), torch.ones(1, 1, 1, 1, 10, dtype=torch.bool)

    def guess(seed: int) -> Tensor:
        return head.guesses(0, scores, scores, places, among, torch.Generator().manual_seed(seed))[0]

    assert torch.equal(guess(0), guess(0))
    assert not torch.equal(guess(0), guess(1))
    torch.testing.assert_close(guess(0).exp().sum(-1), torch.ones(1, HEADS, GROUP, 1))


def test_noise_is_as_warm_as_the_head() -> None:
    """Training draws one page by logits and Gumbel noise, both divided by the temperature of the query head."""
    head = OutputHead(SIZES)
    warmth = torch.arange(1.0, 1 + HEADS * GROUP)
    with torch.no_grad():
        head.log_temperature[0] = warmth.log()
    logits, among = torch.randn(1, HEADS, GROUP, 1, 10), torch.ones(1, 1, 1, 1, 10, dtype=torch.bool)
    by_head = warmth.view(1, HEADS, GROUP, 1, 1)
    places = Places(torch.tensor([[90]]), torch.arange(0, 80, 8)[None], torch.full((1, 10), 8))
    (guess,) = head.guesses(0, logits, logits / by_head, places, among, torch.Generator().manual_seed(5))
    uniform = torch.rand(logits.shape, generator=torch.Generator().manual_seed(5))
    gumbel = -(-uniform.log()).log()
    torch.testing.assert_close(guess, ((logits + gumbel) / by_head).log_softmax(-1))


def tiny_router(kind: type[LearnedRouter], model: Any, coarse: bool = False) -> LearnedRouter:
    return made(kind, ModelSizes.of(model), coarse=coarse)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_generates_with_it(kind: type[LearnedRouter]) -> None:
    """A left-padded batch says what its rows say alone, over contexts that grow."""
    model: Any = llama()
    config = OvalConfig(
        page_size=8, budget_pages=4, seal_tokens=1, router=tiny_router(kind, model), impl="reference", stats_every=1
    )
    long, short = prompt(90), prompt(41, seed=1)
    padded = torch.cat([torch.zeros(1, 49, dtype=torch.long), short], 1)
    ids, mask = torch.cat([long, padded]), torch.ones(2, 90, dtype=torch.long)
    mask[1, :49] = 0
    how = {"max_new_tokens": 12, "do_sample": False}
    with attach(model, config) as handle:
        both = model.generate(ids, attention_mask=mask, **how)
        stats = handle.stats()
        alone = [model.generate(text, **how)[0, -12:].tolist() for text in (long, short)]
    assert both[:, -12:].tolist() == alone
    assert set(stats["dense_steps"]) == {"empty cache"}
    assert 0 < stats["route_hit_rate"] < 1
    assert stats["read_ratio"] < 1


def test_they_are_off_by_default() -> None:
    assert not {kind.name for kind in ROUTERS} & {*[kind.name for kind in KINDS], "repaired"}
    assert OvalConfig().router == "auto"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_loaded(kind: type[LearnedRouter], tmp_path: Path) -> None:
    options: dict[str, Any] = {"width": 24} if kind is PositionMlpRouter else {}
    router, path = made(kind, coarse=True, **options), tmp_path / "new" / "router.safetensors"
    save_learned(path, router.head)
    loaded = kind.load(path)
    assert loaded.head.options == router.head.options
    assert not any(parameter.requires_grad for parameter in loaded.head.parameters())
    query, pages, _ = scene([0])
    assert torch.equal(loaded.score(query, pages), router.score(query, pages))
    assert loaded.metadata_bytes(10, 4, pages.basis, None) == 10 * (8 * 2 + pages.basis.coarse_bytes)
    assert made(kind).metadata_bytes(10, 4, pages.basis, None) == 10 * 8 * 2


def test_files_for_other_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "router.safetensors"
    model: Any = llama()
    save_learned(path, made(PositionMlpRouter).head)
    with pytest.raises(ValueError, match=r"position MLP is for another model: expected .*hidden_size=12.* got .*=64"):
        PositionMlpRouter.load(path, model)
    router = PositionMlpRouter.load(path)
    config = OvalConfig(page_size=8, budget_pages=4, seal_tokens=1, router=router, impl="reference")
    with (
        attach(model, config),
        pytest.raises(ValueError, match=r"expected KV heads, .* \(2, 3, 8, 12\) in 1 layers, got"),
    ):
        model.generate(prompt(60), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"format and kind .*'output head'\), got .*'position MLP'"):
        OutputHeadRouter.load(path)
    with pytest.raises(FileNotFoundError, match="expected a position MLP in"):
        PositionMlpRouter.load(tmp_path / "none")


def spoilt(**changes: str) -> Callable[[dict[str, str], dict[str, Tensor]], None]:
    return lambda metadata, tensors: metadata.update(changes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoilt(format="another"), "expected metadata format and kind"),
        (spoilt(about="{"), "metadata about cannot be read"),
        (spoilt(about="[]"), "expected metadata about to be a JSON object"),
        (spoilt(about=json.dumps({"sizes": {"layers": 0}})), "expected sizes and options of: output head"),
        (lambda metadata, tensors: tensors.pop("down"), "expected tensor down to be .* got None"),
        (lambda metadata, tensors: tensors.update(down=torch.zeros(3)), "expected tensor down to be"),
    ],
)
def test_spoilt_files_are_refused(spoil: Callable[..., None], message: str, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "router.safetensors"
    save_learned(path, OutputHead(SIZES))
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    spoil(metadata, tensors)
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=message):
        OutputHeadRouter.load(path)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"integers of at least 1, got \{'group': 0\}"):
        dataclasses.replace(SIZES, group=0)
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        OutputHead(SIZES, dim=0)


def test_missing_hidden_states_are_named() -> None:
    for router in (made(OutputHeadRouter), RepairedRouter(made(OutputHeadRouter), InputRepair(SIZES))):
        query, pages, _ = scene([0])
        with pytest.raises(ValueError, match="needs the hidden states of an attached model, got none"):
            router.select(query, dataclasses.replace(pages, hidden_states=None))


def test_a_repair_changes_what_the_router_sees(tmp_path: Path) -> None:
    inner, repair = made(PositionMlpRouter), InputRepair(SIZES)
    query, pages, _ = scene([0])
    assert torch.equal(RepairedRouter(inner, repair).score(query, pages), inner.score(query, pages)), "untrained"
    with torch.no_grad():
        repair.up.normal_()
    save_learned(tmp_path / "repair.safetensors", repair)
    router = RepairedRouter.load(inner, tmp_path / "repair.safetensors")
    assert pages.hidden_states is not None
    by_hand = dataclasses.replace(pages, hidden_states=repair(0, pages.hidden_states))
    assert torch.equal(router.score(query, pages), inner.score(query, by_hand))
    assert torch.equal(router.select(query, pages).pages, inner.select(query, by_hand).pages)
    assert not torch.equal(router.score(query, pages), inner.score(query, pages))
    assert router.metadata_bytes(10, 4, pages.basis, None) == inner.metadata_bytes(10, 4, pages.basis, None)
    with pytest.raises(ValueError, match=r"the repair must be for the router's model .* got"):
        RepairedRouter(inner, InputRepair(dataclasses.replace(SIZES, layers=2)))
    assert load_learned(tmp_path / "repair.safetensors", InputRepair).options == {"width": 16}


def test_what_a_router_asks_for_is_asked_for_behind_a_repair() -> None:
    class Curious(OutputHeadRouter):
        needs_bases = True

        def page_features(self, keys: Tensor, mask: Tensor | None) -> Tensor | None:
            return keys.amax(-2)

    inner = Curious(lively(OutputHead(SIZES, dim=8)))
    router, keys = RepairedRouter(inner, InputRepair(SIZES)), torch.randn(1, HEADS, 3, 8, DIM)
    assert router.needs_bases
    assert router.needs_hidden_states
    features = router.page_features(keys, None)
    assert features is not None
    assert torch.equal(features, keys.amax(-2))
    assert copy.deepcopy(router) is router


def test_a_cache_goes_on_under_another_handle() -> None:
    """The cache keeps its router, which wants hidden states that the new handle's router does not."""
    model, ids = llama(), prompt(60)
    few: dict[str, Any] = {"page_size": 8, "budget_pages": 4, "seal_tokens": 8, "impl": "reference"}
    router = OutputHeadRouter(OutputHead(ModelSizes.of(model)))
    found = []
    for going_on in ({"router": router}, {"router": "box"}):
        with attach(model, OvalConfig(**few, router=router)):
            cache = model(ids, use_cache=True).cache
        with attach(model, OvalConfig(**few, **going_on)):
            found.append(model(prompt(1), cache=cache).logits)
        assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(*found)
