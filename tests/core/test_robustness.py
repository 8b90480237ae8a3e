"""What once broke: copies, shared configs, other default dtypes, masks that change, odd masks, mixed gradient modes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from oval_core import OvalCache, OvalConfig, attach
from oval_core.routers import Pages, Router
from tests.core import tiny_models
from tests.core.tiny_models import prompt

FULL = OvalConfig(page_size=8, seal_tokens=1, budget_ratio=1.0, always_paged=True)
SPARSE = OvalConfig(page_size=8, seal_tokens=1, budget_pages=4)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_models.llama()


def steps(model: PreTrainedModel, cache: Any, tokens: Tensor, **options: Any) -> Tensor:
    """Logits of reading `tokens [B, n]` one by one."""
    logits = [model(token, cache=cache, **options).logits[:, -1] for token in tokens.split(1, dim=1)]
    return torch.stack(logits, 1)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copied_cache_goes_on_by_itself(model: PreTrainedModel, twin_of: Callable[[Any], Any]) -> None:
    text = prompt(80)
    with attach(model, FULL):
        cache = model(text[:, :60]).cache
        steps(model, cache, text[:, 60:64])
        twin = twin_of(cache)
        assert_close(steps(model, twin, text[:, 64:]), steps(model, cache, text[:, 64:]))


def test_models_that_share_a_config_are_not_both_attached(model: PreTrainedModel) -> None:
    other: Any = type(model)(model.config)
    with attach(model), pytest.raises(RuntimeError, match="shares its config object with a model that is attached"):
        attach(other)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    plain = tiny_models.generate(model, prompt(80))
    torch.set_default_dtype(dtype)
    try:
        with attach(model, FULL):
            paged = tiny_models.generate(model, prompt(80))
    finally:
        torch.set_default_dtype(torch.float32)
    assert paged.sequences.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("hidden", [slice(0, 5), slice(16, 24), slice(18, 21)])
@pytest.mark.parametrize("later", ["ones", "none"])
def test_a_mask_that_shows_what_it_hid_is_dense(model: PreTrainedModel, hidden: slice, later: str) -> None:
    text, mask = prompt(64), torch.ones(1, 60, dtype=torch.long)
    mask[:, hidden] = 0

    def run() -> Tensor:
        cache = model(text[:, :60], attention_mask=mask, use_cache=True).cache
        return torch.stack(
            [
                model(
                    text[:, i : i + 1],
                    cache=cache,
                    attention_mask=torch.ones(1, i + 1, dtype=torch.long) if later == "ones" else None,
                    position_ids=torch.tensor([[i]]),
                ).logits
                for i in range(60, 64)
            ]
        )

    plain = run()
    with attach(model, SPARSE) as handle:
        assert_close(run(), plain, atol=1e-4, rtol=1e-5)
        assert handle.stats()["dense_steps"]["attention mask shows tokens that it hid before"] == 4


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 4), (1, 4)])
def test_bool_masks_are_broadcast_as_sdpa_does(model: PreTrainedModel, shape: tuple[int, int]) -> None:
    text = prompt(84, rows=2)
    tree = torch.ones(*shape, 4, 84, dtype=torch.bool).tril(80)

    def run() -> Tensor:
        cache = model(text[:, :80], use_cache=True).cache
        return model(text[:, 80:], cache=cache, attention_mask=tree).logits

    plain = run()
    with attach(model, FULL):
        assert_close(run(), plain, atol=1e-4, rtol=1e-5)


def test_statistics_survive_a_change_of_gradient_mode(model: PreTrainedModel) -> None:
    text = prompt(84)
    with attach(model, SPARSE) as handle:
        with torch.inference_mode():
            cache = model(text[:, :80]).cache
            steps(model, cache, text[:, 80:82])
        steps(model, cache, text[:, 82:])
        assert handle.stats()["steps"] == 5


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_crop_into_the_padding(model: PreTrainedModel, impl: str) -> None:
    text, mask = prompt(63, rows=2), torch.ones(2, 63, dtype=torch.long)
    mask[1, :55] = 0
    config = OvalConfig(page_size=8, budget_pages=4, impl=impl)
    with attach(model, config):
        cache = OvalCache(model.config, config)
        model(text[:, :62], attention_mask=mask[:, :62], cache=cache)
        steps(model, cache, text[:, 62:], attention_mask=mask)
        cache.crop_rows([62, 30])
        assert steps(model, cache, text[:, 62:]).isfinite().all()
        tables = cache.layers[0].tables  # type: ignore[union-attr]
        assert [table.length for table in tables] == [63, 31]


def test_flex_attention_is_dense_through_sdpa(model: PreTrainedModel) -> None:
    plain = tiny_models.read(model, [prompt(40)])
    model.set_attn_implementation("flex_attention")
    with attach(model, FULL):
        assert_close(tiny_models.read(model, [prompt(40)]), plain, atol=1e-4, rtol=1e-5)
    assert model.config._attn_implementation == "flex_attention"


class _Odd(Router):
    def __init__(self, scores: Callable[[Tensor, Pages], Any]) -> None:
        self.scores = scores

    def score(self, query: Tensor, pages: Pages) -> Any:
        return self.scores(query, pages)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (lambda query, pages: None, r"_Odd.score must return .* got NoneType"),
        (lambda query, pages: torch.zeros(3), r"_Odd.score must return .* got \(3,\)"),
        (lambda query, pages: torch.full((*query.shape[:4], len(pages.index)), torch.nan), "_Odd.score returned NaN"),
    ],
)
def test_a_faulty_router_is_named(model: PreTrainedModel, scores: Callable[..., Any], message: str) -> None:
    with (
        attach(model, OvalConfig(page_size=8, budget_pages=4, router=_Odd(scores))),
        pytest.raises(ValueError, match=message),
    ):
        tiny_models.generate(model, prompt(80))


def test_two_caches_take_turns_in_one_model(model: PreTrainedModel) -> None:
    """The shorter one has room for fewer pages than the statistics have seen."""
    with attach(model, SPARSE) as handle:
        caches = [model(prompt(count)).cache for count in (300, 80)]
        for cache in (*caches, *caches):
            steps(model, cache, prompt(70))
        assert 0 < handle.stats()["page_utilization"] <= 1


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_rows_of_different_length_are_cropped(model: PreTrainedModel, impl: str) -> None:
    """Of the shorter row, pages remain in the tensors that begin beyond its end."""
    text, mask = prompt(120, rows=2), torch.ones(2, 120, dtype=torch.long)
    mask[0, :50] = 0
    config = OvalConfig(page_size=8, seal_tokens=1, budget_pages=4, impl=impl, stats_every=1)
    with attach(model, config):
        cache = model(text[:, :110], attention_mask=mask[:, :110]).cache
        model(text[:, 110:111], attention_mask=mask[:, :111], cache=cache)
        cache.crop(-40)
        batch = model(text[:, 71:72], attention_mask=mask[:, :72], cache=cache).logits
        alone = model(text[1:, :71]).cache
        steps(model, alone, text[1:, 71:72])
    assert batch.isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_a_row_does_not_depend_on_its_neighbours(model: PreTrainedModel, impl: str) -> None:
    """Rows reach `seal_tokens` at different steps; each seals when it is alone with that."""
    text, mask = prompt(170, rows=2), torch.ones(2, 170, dtype=torch.long)
    mask[0, :21] = 0
    with attach(model, OvalConfig(page_size=8, budget_pages=4, impl=impl)):
        cache = model(text[:, :100], attention_mask=mask[:, :100], position_ids=_positions(mask)[:, :100]).cache
        rows = [
            model(
                text[:, end - 1 : end],
                attention_mask=mask[:, :end],
                position_ids=_positions(mask)[:, end - 1 : end],
                cache=cache,
            ).logits[1]
            for end in range(101, 171)
        ]
        alone = steps(model, model(text[1:, :100]).cache, text[1:, 100:])
    assert_close(torch.cat(rows), alone[0], atol=1e-4, rtol=1e-5)


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


@pytest.mark.parametrize("router", ["box", "basis"])
def test_a_cache_that_moved_into_shared_memory_goes_on(model: PreTrainedModel, router: str) -> None:
    """Queues between processes move the memory of tensors in place; the compiled code keeps addresses."""
    text = prompt(150)
    with attach(model, OvalConfig(page_size=8, seal_tokens=1, budget_pages=4, router=router, impl="cpu")):
        expected = steps(model, model(text[:, :140]).cache, text[:, 140:])
        cache: Any = model(text[:, :140]).cache
        before = steps(model, cache, text[:, 140:145])
        for layer in cache.layers:
            for tensor in (*layer.store.storage, *layer.pages.basis.tensors().values(), layer.pages.starts):
                tensor.share_memory_()
        assert_close(torch.cat([before, steps(model, cache, text[:, 145:])], 1), expected)
