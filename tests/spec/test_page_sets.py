"""Sets of pages that draft and target expect, and reading by them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oval_core import OvalConfig, attach
from oval_core.attach import binding_of
from oval_core.page_table import PageTable
from oval_core.page_view import view_pages
from oval_core.routers import Pages, make_router
from oval_spec import MedusaDrafter, ModelDrafter, PromptLookupDrafter, SparseSelfDrafter, speculative_generate
from oval_spec.cached_model import CachedModel
from oval_spec.page_sets import AgreementRouter, _tokens_of
from oval_spec.predicted_queries import PredictedQueries
from oval_spec.tree import Tree
from tests.core.tiny_models import llama
from tests.spec.test_medusa_heads import random_heads

CONFIG = OvalConfig(page_size=8, budget_pages=6, seal_tokens=1, router="box", impl="reference", stats_every=0)
TREES = [Tree((5, 6, 7, 8), (-1, 0, -1, 2)), Tree((9,), (-1,))]


def nothing(layer_idx: int, ask: Any) -> None:
    return None


def span(start: int, stop: int) -> Callable[..., Tensor]:
    tokens = torch.zeros(2, 1, stop, dtype=torch.bool)
    tokens[0, 0, start:] = True
    return lambda layer_idx, ask: tokens


def padded() -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, 90, (2, 150))
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    return ids, mask


def read(config: OvalConfig, router: AgreementRouter | None) -> tuple[Tensor, CachedModel]:
    """Logits of a tree a row after a padded prompt, with a router for that pass."""
    model = llama()
    ids, mask = padded()
    with torch.no_grad(), attach(model, config):
        target = CachedModel(model, config)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        target.prefill({"input_ids": ids, "attention_mask": mask, "position_ids": positions})
        with target.reading(replace(config, always_paged=router is not None), router):
            return target.read([3, 4], TREES), target


def real_nodes(logits: Tensor) -> Tensor:
    return torch.cat([logits[row, : 1 + len(tree)] for row, tree in enumerate(TREES)])


@pytest.mark.parametrize("expects", [nothing, span(40, 70)])
@pytest.mark.parametrize("name", ["box", "basis"])
def test_reading_everything_in_order_is_dense(name: str, expects: Any) -> None:
    config = replace(CONFIG, router=name)
    dense, _ = read(replace(config, min_context_tokens=10_000), None)
    router = AgreementRouter(make_router(config), "all", expects)
    ordered, _ = read(config, router)
    torch.testing.assert_close(real_nodes(ordered), real_nodes(dense), rtol=1e-4, atol=1e-4)
    assert router.stats.looks == 2 * 2 * 2  # layers, rows, KV heads
    few, _ = read(config, AgreementRouter(make_router(config), "union", expects))
    assert (real_nodes(few) - real_nodes(dense)).abs().max() > 1e-3


def naive_counts(table: PageTable, chosen: list[bool], tokens: tuple[int, int]) -> Counter[str]:
    """Sizes of the sets of one row and KV head; `tokens` are those that the drafter expects."""
    pages = range(table.num_pages)
    drafted = {
        page
        for page in pages
        if table.starts[page] < tokens[1] and table.starts[page] + table.lengths[page] > tokens[0]
    }
    target, forced = {page for page in pages if chosen[page]}, {0, pages[-1]}
    agreed, union = (drafted & target) | forced, drafted | target | forced
    return Counter({"D": len(drafted), "T": len(target), "D & T": len(agreed), "D | T": len(union)})


def test_sets_and_what_they_cover() -> None:
    router = AgreementRouter(make_router(CONFIG), "union", span(40, 70))
    seen: list[tuple[Pages, Tensor]] = []
    select = router.base.select

    def spy(query: Tensor, pages: Pages) -> Any:
        seen.append((pages, query))
        return select(query, pages)

    router.base.select = spy  # type: ignore[method-assign]
    _, target = read(CONFIG, router)
    counts = Counter[str]()
    for layer, (pages, query) in zip(target.layers, seen, strict=True):
        assert query.shape[3] == 1, "the first pass has no last state: the root stands for it"
        chosen = select(query, pages).mask(len(pages.index))
        for row, table in enumerate(layer.tables):
            for head in range(2):
                counts += naive_counts(table, chosen[row, head].tolist(), (40, 70) if row == 0 else (0, 0))
    assert {name: router.stats.pages[name] for name in counts} == counts
    assert router.stats.covered["D & T"] < router.stats.covered["D | T"] <= router.stats.looks
    assert router.stats.covered["D | T"] >= max(router.stats.covered["D"], router.stats.covered["T"])


def test_the_target_is_asked_with_its_last_accepted_state() -> None:
    router = AgreementRouter(make_router(CONFIG), "union", nothing)
    first = torch.randn(2, 2, 2, 5, 16)
    assert torch.equal(router._own_query(first, 0), first[..., :1, :])
    router.passed(torch.tensor([3, 0]))
    own = router._own_query(torch.randn(2, 2, 2, 2, 16), 0)
    assert torch.equal(own[0], first[0, :, :, 3:4])
    assert torch.equal(own[1], first[1, :, :, :1])
    router.passed(torch.tensor([0, 0]))
    router.passed(torch.tensor([1, 1]))  # a pass that the router did not see
    third = torch.randn(2, 2, 2, 4, 16)
    assert torch.equal(router._own_query(third, 0), third[..., :1, :])


def test_tokens_of_pages_with_rows_of_different_length() -> None:
    _, target = read(CONFIG, AgreementRouter(make_router(CONFIG), "union", nothing))
    layer, binding = target.layers[0], None
    with attach(target.model, CONFIG):
        binding = binding_of(target.model)
        assert binding is not None
        pages = view_pages(binding, layer, 1, None, 0.25, None)
    mask = (torch.rand(2, 2, len(pages.index)) < 0.5) & pages.present()
    tokens = _tokens_of(mask, pages)
    for row, table in enumerate(layer.tables):
        for head in range(2):
            expected = {
                token
                for page in range(table.num_pages)
                if mask[row, head, page]
                for token in range(table.starts[page], table.starts[page] + table.lengths[page])
            }
            assert {*tokens[row, head].nonzero().flatten().tolist()} == expected


@pytest.mark.parametrize("reads", ["agreed", "union"])
@pytest.mark.parametrize("name", ["box", "basis"])
def test_texts_by_page_sets_are_checked_to_be_exact(reads: str, name: str) -> None:
    model, ids = llama(), torch.randint(2, 90, (1, 130))
    exact = model.generate(ids, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    config = replace(CONFIG, router=name)
    small = ModelDrafter(llama(layers=1, seed=3), min_confidence=0, config=config)
    for drafter in (PromptLookupDrafter(), SparseSelfDrafter(budget_pages=4, min_confidence=0), small):
        how: dict[str, Any] = {"mode": "pages", "reads": reads, "config": config, "max_new_tokens": 12}
        out = speculative_generate(model, ids, drafter, check_every=6, do_sample=False, **how)
        assert torch.equal(out.sequences, exact)


@pytest.mark.parametrize(
    "drafter",
    [
        PromptLookupDrafter(),
        SparseSelfDrafter(budget_pages=4, min_confidence=0),
        MedusaDrafter(random_heads(), most_tokens=6),
    ],
)
def test_looking_does_not_change_an_exact_text(drafter: Any) -> None:
    model, ids = llama(), torch.randint(2, 12, (1, 130))
    exact = model.generate(ids, max_new_tokens=24, do_sample=False)  # type: ignore[operator]
    out = speculative_generate(
        model, ids, drafter, look_every=2, config=CONFIG, adapt=False, max_new_tokens=24, do_sample=False
    )
    assert torch.equal(out.sequences, exact)
    sets = out.stats.page_sets
    assert sets is not None
    assert out.stats.bytes_read["verify"] > 0
    assert (out.stats.bytes_read["draft"] > 0) == isinstance(drafter, SparseSelfDrafter)
    assert 0 < sets.means()["covered"]["D | T"] <= 1
    assert len(sets.overlap) == len(sets.steps) > 1
    assert sum(sets.steps.values(), start=type(sets.pages)()) == sets.pages


class Spy(AgreementRouter):
    """Remembers what every layer asked last."""

    def __init__(self, config: OvalConfig) -> None:
        super().__init__(make_router(config), "union", nothing)
        self.asked: dict[int, Tensor] = {}

    def select(self, query: Tensor, pages: Pages) -> Any:
        self.asked[pages.layer_idx] = query.flatten(1, 2)
        return super().select(query, pages)


def test_queries_are_predicted_right_where_layers_change_nothing() -> None:
    """Layers that add nothing leave the residual stream as it is: the top's state is that of every layer."""
    model, config = llama(layers=3), replace(CONFIG, always_paged=True)
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 2)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        torch.nn.init.uniform_(layer.input_layernorm.weight, 0.5, 2)
    spy = Spy(config)
    with torch.no_grad(), attach(model, config):
        target = CachedModel(model, config)
        with target.watch_hidden(), target.reading(config, spy):
            target.prefill({"input_ids": torch.randint(2, 90, (2, 60))})
            target.read([3, 4], [Tree.chain([5, 6])] * 2)
        assert target.hidden is not None
        for layer_idx, asked in spy.asked.items():
            positions = torch.arange(60, 63).expand(2, -1)
            predicted = PredictedQueries(model).of_layer(layer_idx, target.hidden, positions)
            torch.testing.assert_close(predicted, asked, rtol=1e-4, atol=1e-4)
    assert len(spy.asked) == 3


def test_queries_of_other_architectures_are_not_predicted() -> None:
    from tests.core.tiny_models import phi3

    with pytest.raises(ValueError, match="not built like Llama"):
        PredictedQueries(phi3())


def test_reads_must_be_known() -> None:
    with pytest.raises(ValueError, match="reads must be one of"):
        AgreementRouter(make_router(CONFIG), "most", nothing)


def test_all_pages_cover_everything() -> None:
    router = AgreementRouter(make_router(CONFIG), "all", span(0, 10_000))
    read(CONFIG, router)
    assert router.stats.covered["D"] == pytest.approx(router.stats.looks / 2, abs=1e-3)  # row 0 expects everything
