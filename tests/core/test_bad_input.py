"""Input that is wrong or unusual: a clear error, or a fallback that is exact and counted in the stats."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from oval_core import OvalCache, OvalConfig, attach
from oval_core.attach import binding_of
from oval_core.layer import OvalLayer
from oval_core.routers import Pages, Router, Selection
from oval_core.routers.box import BoxRouter
from tests.core import tiny_models
from tests.core.tiny_models import MAX_POSITIONS, SLIDING_WINDOW, generate, llama, one_by_one, prompt, read

FULL = OvalConfig(page_size=8, seal_tokens=1, budget_ratio=1.0, always_paged=True)
SPARSE = OvalConfig(page_size=8, seal_tokens=1, budget_pages=4)
EXACT: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}


@pytest.fixture
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture
def warnings_again() -> Iterator[None]:
    """transformers warns once a process; forget what it has said."""
    transformers_logging.warning_once.cache_clear()
    yield
    transformers_logging.warning_once.cache_clear()


@torch.no_grad()
def filled(model: Any, text: Tensor, cache: Any = None) -> Any:
    """The cache after `model` has read `text`."""
    return model(text, cache=cache, use_cache=True).cache


class TestPrompts:
    def test_empty(self, model: PreTrainedModel) -> None:
        with attach(model):
            with pytest.raises(ValueError, match=r"input_ids is empty: .* at least one token, got shape \[1, 0\]"):
                generate(model, prompt(0))
            with pytest.raises(ValueError, match="input_ids is empty"):
                filled(model, prompt(0), cache=filled(model, prompt(20)))

    def test_longer_than_the_models_positions(
        self, model: PreTrainedModel, warnings_again: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        text = prompt(MAX_POSITIONS - 2)
        plain = generate(model, text)
        said = caplog.messages.copy()
        caplog.clear()
        transformers_logging.warning_once.cache_clear()
        with attach(model, FULL):
            paged = generate(model, text)
        assert any("maximum length" in message for message in said)
        assert caplog.messages == said
        assert paged.sequences.tolist() == plain.sequences.tolist()

    def test_one_token(self, model: PreTrainedModel) -> None:
        plain = generate(model, prompt(1), max_new_tokens=12)
        with attach(model, FULL) as handle:
            paged = generate(model, prompt(1), max_new_tokens=12)
            assert handle.stats()["dense_steps"] == {"empty cache": 1, "no sealed page yet": 7}
        assert paged.sequences.tolist() == plain.sequences.tolist()

    def test_embeddings_instead_of_tokens(self) -> None:
        model: Any = llama()
        embedded = model.get_input_embeddings()(prompt(80)).detach()
        plain = model.generate(inputs_embeds=embedded, max_new_tokens=8, do_sample=False)
        with attach(model, FULL) as handle:
            paged = model.generate(inputs_embeds=embedded, max_new_tokens=8, do_sample=False)
            assert handle.stats()["dense_steps"] == {"empty cache": 1}
        assert paged.tolist() == plain.tolist()

    def test_a_row_that_is_all_padding(self, model: PreTrainedModel) -> None:
        text = prompt(80, rows=2)
        mask = torch.ones_like(text)
        mask[0] = 0
        plain = generate(model, text, attention_mask=mask)
        with attach(model, FULL):
            paged = generate(model, text, attention_mask=mask)
        assert_close(torch.stack(paged.logits)[:, 1], torch.stack(plain.logits)[:, 1], **EXACT)
        assert torch.stack(paged.logits).isfinite().all()


class TestBudgets:
    @pytest.mark.parametrize("budget", [2, 0, -1])
    def test_too_small(self, budget: int) -> None:
        with pytest.raises(ValueError, match=rf"budget_pages must be an integer >= 3 .*got {budget}"):
            OvalConfig(budget_pages=budget)

    def test_smallest(self, model: PreTrainedModel) -> None:
        with attach(model, OvalConfig(page_size=8, budget_pages=3)) as handle:
            generate(model, prompt(80))
            assert handle.stats()["pages_read_mean"] == 3

    def test_below_min_context_tokens(self, model: PreTrainedModel) -> None:
        with attach(model, OvalConfig(page_size=8, budget_pages=3, min_context_tokens=84)) as handle:
            generate(model, prompt(80))
            stats = handle.stats()
        assert stats["dense_steps"] == {"empty cache": 1, "context below min_context_tokens": 3}
        assert stats["pages_read_mean"] == 3

    def test_covering_every_page_is_dense(self, model: PreTrainedModel) -> None:
        plain = generate(model, prompt(80))
        with attach(model) as handle:
            dense = generate(model, prompt(80))
            stats = handle.stats()
        assert stats["dense_steps"] == {"empty cache": 1, "budget covers every page": 7}
        assert stats["read_ratio"] == 1
        assert_close(torch.stack(dense.logits), torch.stack(plain.logits), rtol=0, atol=0)

    @pytest.mark.parametrize(("queries", "is_paged"), [(16, True), (17, False)])
    def test_query_chunks_at_the_border(self, model: PreTrainedModel, queries: int, is_paged: bool) -> None:
        text = prompt(80 + queries)
        chunks = [text[:, :80], text[:, 80:]]
        plain = read(model, chunks)
        config = OvalConfig(page_size=8, budget_ratio=1.0, always_paged=True, max_sparse_query_tokens=16)
        with attach(model, config) as handle:
            paged = read(model, chunks)
            stats = handle.stats()
        assert_close(paged, plain, **EXACT)
        assert (stats["pages_read_mean"] is not None) == is_paged
        too_long = {} if is_paged else {"query chunk longer than max_sparse_query_tokens": 1}
        assert stats["dense_steps"] == {"empty cache": 1, **too_long}


class TestCaches:
    @pytest.mark.parametrize("build", [llama, tiny_models.gemma2, tiny_models.gpt_oss, tiny_models.bart])
    def test_tokens_read_before_attaching_are_taken_over(self, build: Any) -> None:
        model, text, start = build(), prompt(80), tiny_models.empty_cache(build())
        rest = one_by_one(prompt(20, seed=1), 1)
        plain = read(model, [text, *rest])
        read(model, [text], cache=start)
        with attach(model, FULL) as handle:
            paged = read(model, rest, cache=start)
            stats = handle.stats()
        assert_close(paged, plain[:, 1:], **EXACT)
        assert stats["dense_steps"] == {"tokens not paged yet": 1}
        assert stats["pages_read_mean"] > 8

    def test_padded_tokens_are_taken_over(self, model: PreTrainedModel) -> None:
        text = prompt(80, rows=2)
        mask = torch.ones(2, 90, dtype=torch.long)
        mask[0, :13] = 0
        steps = one_by_one(prompt(10, rows=2, seed=1), 1)
        plain = read(model, [text, *steps], mask)
        start = DynamicCache(config=model.config)
        read(model, [text], mask, start)
        with attach(model, FULL):
            logits = []
            for count, step in enumerate(steps, 81):
                positions = mask[:, :count].sum(-1, keepdim=True) - 1
                with torch.no_grad():
                    out = model(step, cache=start, attention_mask=mask[:, :count], position_ids=positions)
                logits.append(out.logits)
        assert_close(torch.cat(logits, dim=1), plain[:, 1:], **EXACT)

    def test_full_layers_over_a_sliding_window_obey_their_mask(self) -> None:
        model, text = tiny_models.mistral(), prompt(80)
        rest = one_by_one(prompt(20, seed=1), 1)
        plain = read(model, [text, *rest])
        start = filled(model, text, DynamicCache())  # without a config it keeps more than the window
        with attach(model, FULL) as handle:
            paged = read(model, rest, cache=start)
            assert handle.stats()["pages_read_mean"] <= SLIDING_WINDOW / 8 + 2
        assert_close(paged, plain[:, 1:], **EXACT)

    @pytest.mark.parametrize("with_config", [True, False])
    def test_an_empty_cache_of_the_user_stays_the_users(self, model: PreTrainedModel, with_config: bool) -> None:
        mine = DynamicCache(config=model.config) if with_config else DynamicCache()
        plain = generate(model, prompt(80))
        with attach(model, FULL) as handle:
            for step, chunk in enumerate(one_by_one(plain.sequences, 80)):
                with torch.no_grad():
                    out = model(chunk, cache=mine)
                assert out.cache is mine
                assert mine.get_seq_length() == 80 + step
            assert handle.stats()["pages_read_mean"] is not None
        lengths = [layer.store.lengths for layer in mine.layers if isinstance(layer, OvalLayer)]
        assert lengths == [[88], [88]]

    @pytest.mark.parametrize(
        ("args", "kwargs"), [((), {"cache": None}), ((), {"past_key_values": None}), ((None, None, None), {})]
    )
    def test_none_is_replaced_however_it_is_passed(self, model: PreTrainedModel, args: Any, kwargs: Any) -> None:
        with attach(model), torch.no_grad():
            assert isinstance(model(prompt(20), *args, **kwargs).cache, OvalCache)

    def test_the_old_name_and_the_position_work(self, model: PreTrainedModel) -> None:
        plain = read(model, one_by_one(prompt(82), 80))
        with attach(model, FULL), torch.no_grad():
            cache = filled(model, prompt(82)[:, :80])
            with pytest.warns(FutureWarning, match="past_key_values"):
                named = model(prompt(82)[:, 80:81], past_key_values=cache).logits
            placed = model(prompt(82)[:, 81:], None, None, cache).logits
        assert_close(torch.cat([named, placed], dim=1), plain[:, 1:], **EXACT)

    def test_an_explicit_cache_keeps_its_own_config(self, model: PreTrainedModel) -> None:
        with attach(model, FULL) as handle:
            generate(model, prompt(80), cache=OvalCache(model.config, SPARSE))
            assert handle.stats()["pages_read_mean"] == 4

    @pytest.mark.parametrize(
        ("other", "says"),
        [
            ({"layers": 3}, "3 layers, LlamaForCausalLM has 2"),
            ({"layers": 1}, "1 layers, LlamaForCausalLM has 2"),
            ({"num_key_value_heads": 4}, "(1, 4, 16) as in the cache, got (1, 2, 16)"),
            ({"head_dim": 32}, "(1, 2, 32) as in the cache, got (1, 2, 16)"),
        ],
        ids=["more layers", "fewer layers", "heads", "head dimension"],
    )
    def test_of_another_model(self, model: PreTrainedModel, other: dict[str, Any], says: str) -> None:
        cache = filled(llama(**other), prompt(40))
        with attach(model), pytest.raises(ValueError, match=re.escape(says)):
            model(prompt(1), cache=cache)

    def test_of_another_batch(self, model: PreTrainedModel) -> None:
        with attach(model), pytest.raises(ValueError, match=r"\(1, 2, 16\) as in the cache, got \(3, 2, 16\)"):
            model(prompt(1, rows=3), cache=filled(model, prompt(40)))

    def test_of_another_dtype(self, model: PreTrainedModel) -> None:
        rounded: Any = llama()
        cache = filled(rounded.to(torch.bfloat16), prompt(40))
        with attach(model), pytest.raises(ValueError, match=r"bfloat16 on cpu as in the cache, got torch.float32"):
            model(prompt(1), cache=cache)

    def test_of_another_device(self, model: PreTrainedModel) -> None:
        elsewhere: Any = llama()
        cache = filled(elsewhere.to("meta"), prompt(40).to("meta"))
        with attach(model), pytest.raises(ValueError, match=r"on meta as in the cache, got torch.float32 on cpu"):
            model(prompt(1), cache=cache)

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"cache_implementation": "static"}, "StaticCache"),
            ({"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}, "QuantizedCache"),
        ],
    )
    def test_other_kinds_are_left_alone(self, model: PreTrainedModel, options: dict[str, Any], reason: str) -> None:
        plain = generate(model, prompt(80), **options)
        with attach(model, SPARSE) as handle:
            dense = generate(model, prompt(80), **options)
            assert handle.stats()["dense_steps"] == {reason: 8}
        assert dense.sequences.tolist() == plain.sequences.tolist()

    def test_offloaded(self, model: PreTrainedModel) -> None:
        class Offloaded(DynamicCache):
            """As far as a machine without an accelerator can tell."""

            def __init__(self) -> None:
                super().__init__(config=model.config)
                self.offloading = True

            def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
                self.offloading = False  # there is no stream to wait for
                keys, values = super().update(*args, **kwargs)
                self.offloading = True
                return keys, values

        plain = generate(model, prompt(80))
        with attach(model, SPARSE) as handle:
            dense = generate(model, prompt(80), cache=Offloaded())
            assert handle.stats()["dense_steps"] == {"offloaded Offloaded": 8}
        assert dense.sequences.tolist() == plain.sequences.tolist()

    def test_none_at_all(self, model: PreTrainedModel) -> None:
        plain = generate(model, prompt(80), use_cache=False)
        with attach(model, SPARSE) as handle:
            dense = generate(model, prompt(80), use_cache=False)
            assert handle.stats()["dense_steps"] == {"no cache": 8}
        assert_close(torch.stack(dense.logits), torch.stack(plain.logits), rtol=0, atol=0)

    def test_an_unattached_model_is_dense_and_says_so_once(
        self, model: PreTrainedModel, warnings_again: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        plain = generate(model, prompt(80))
        with caplog.at_level(logging.WARNING):
            dense = generate(model, prompt(80), cache=OvalCache(model.config, SPARSE))
        assert_close(torch.stack(dense.logits), torch.stack(plain.logits), rtol=0, atol=0)
        assert sum("not attached" in message for message in caplog.messages) == 1


class TestMasks:
    def test_additive_is_dense(self, model: PreTrainedModel) -> None:
        text, more = prompt(80), prompt(6, seed=1)
        with torch.no_grad():
            plain = model(torch.cat([text, more], dim=1)).logits[:, 80:]
        additive = torch.full((1, 1, 6, 86), -torch.inf).triu(81)
        with attach(model, SPARSE) as handle:
            cache = filled(model, text)
            with torch.no_grad():
                dense = model(more, cache=cache, attention_mask=additive).logits
            stats = handle.stats()
        assert_close(dense, plain, **EXACT)
        assert stats["dense_steps"] == {"empty cache": 1, "additive attention mask": 1}
        assert stats["pages_read_mean"] is None

    def test_tree(self, model: PreTrainedModel) -> None:
        text, nodes, parents = prompt(80), prompt(6, seed=1), [-1, 0, 0, 1, 1, 2]
        sees = torch.eye(6, dtype=torch.bool)
        for node, parent in enumerate(parents[1:], 1):
            sees[node] |= sees[parent]
        mask = torch.cat([torch.ones(6, 80, dtype=torch.bool), sees], dim=1)[None, None]
        arguments = {"attention_mask": mask, "position_ids": 79 + sees.sum(-1)[None]}
        with torch.no_grad():
            plain = model(nodes, cache=filled(model, text), **arguments).logits
            with attach(model, FULL) as handle:
                paged = model(nodes, cache=filled(model, text), **arguments).logits
                assert handle.stats()["dense_steps"] == {"empty cache": 1}
        assert_close(paged, plain, **EXACT)

    def test_tokens_hidden_in_the_middle(self, model: PreTrainedModel) -> None:
        text, rest = prompt(80), prompt(10, seed=1)
        mask = torch.ones(1, 90, dtype=torch.long)
        mask[:, 30:51] = 0
        chunks = [text, *one_by_one(rest, 1)]
        plain = read(model, chunks, mask)
        with attach(model, FULL) as handle:
            paged = read(model, chunks, mask)
            assert handle.stats()["dense_steps"] == {"empty cache": 1}
        assert_close(paged, plain, **EXACT)


class WitnessRouter(BoxRouter):
    """Remembers what it was shown."""

    needs_hidden_states = True

    def __init__(self) -> None:
        self.shown: list[tuple[int, Tensor]] = []

    def select(self, query: Tensor, pages: Pages) -> Selection:
        assert pages.hidden_states is not None
        self.shown.append((pages.layer_idx, pages.hidden_states))
        return super().select(query, pages)


class TestRouters:
    @pytest.mark.parametrize(
        ("build", "attention"),
        [
            (llama, "model.layers.{}.self_attn"),
            (tiny_models.gemma3, "model.layers.{}.self_attn"),
            (tiny_models.bart, "model.decoder.layers.{}.self_attn"),
            (tiny_models.whisper, "model.decoder.layers.{}.self_attn"),
        ],
    )
    def test_hidden_states_are_those_of_the_layer(self, build: Any, attention: str) -> None:
        model, router = build(), WitnessRouter()
        seen: dict[int, Tensor] = {}
        layer_idx = 1  # sliding layers come first

        def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            seen[layer_idx] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        watched = model.get_submodule(attention.format(layer_idx))
        with attach(model, OvalConfig(page_size=8, budget_pages=4, router=router)):
            watched.register_forward_pre_hook(look, with_kwargs=True)
            for chunk in (prompt(1, seed=1), prompt(5, seed=1)):
                router.shown.clear()
                read(model, [prompt(80, rows=2), chunk.expand(2, -1)])
                shown = dict(router.shown)
                assert shown[layer_idx].shape == (2, chunk.shape[1], 64)
                assert_close(shown[layer_idx], seen[layer_idx], rtol=0, atol=0)

    def test_hidden_states_are_kept_without_gradients_and_not_of_a_prompt(self) -> None:
        model = llama()
        with attach(model, OvalConfig(page_size=8, budget_pages=4, router=WitnessRouter())):
            binding = binding_of(model)
            assert binding is not None
            output = model(prompt(80), use_cache=True)
            assert output.logits.requires_grad
            assert binding.hidden_states == {}
            model(prompt(1), cache=output.cache)
            kept = list(binding.hidden_states.values())
            assert [tuple(hidden.shape) for hidden in kept] == [(1, 1, 64)] * 2
            assert not any(hidden.requires_grad for hidden in kept)

    def test_a_router_without_a_method_says_what_to_override(self, model: PreTrainedModel) -> None:
        class Unfinished(Router):
            pass

        with (
            attach(model, OvalConfig(page_size=8, budget_pages=4, router=Unfinished())),
            pytest.raises(NotImplementedError, match="Unfinished must override score or select"),
        ):
            generate(model, prompt(80))
