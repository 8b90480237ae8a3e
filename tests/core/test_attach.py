"""Putting OVAL on a model and taking it off: what changes, what is restored, what is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.testing import assert_close
from transformers import PreTrainedModel, PreTrainedTokenizerFast, pipeline

from oval_core import OvalCache, OvalConfig, attach
from tests.core import tiny_models
from tests.core.tiny_models import COMMON, PAD, VOCAB, generate, prompt

FULL = OvalConfig(page_size=8, budget_ratio=1.0, always_paged=True)
SPARSE = OvalConfig(page_size=8, budget_pages=4)
ROOT = Path(__file__).parents[2]


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that attaching could change: attributes and hooks of every module, attention of every config."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            is_hooks = "hook" in key
            state[f"{name}.{key}"] = list(value) if is_hooks and value is not None else id(value)
        config = getattr(module, "config", None)
        if config is not None:
            state[f"{name} attention"] = attention_of(config)
    return state


def attention_of(config: Any) -> dict[str, Any]:
    below = {key: attention_of(getattr(config, key)) for key in config.sub_configs if getattr(config, key) is not None}
    return {"own": config._attn_implementation, **below}


def llava() -> PreTrainedModel:
    """A vision tower in front of a Llama."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7
    )
    text = transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 2})
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=VOCAB - 1, vision_feature_layer=-1
    )
    return tiny_models.build("LlavaForConditionalGeneration", config)


def encoder() -> PreTrainedModel:
    sizes = {key: COMMON[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    return tiny_models.build("BertForMaskedLM", transformers.BertConfig(**sizes, num_hidden_layers=2))


def mamba() -> PreTrainedModel:
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, bos_token_id=1, eos_token_id=None
    )
    return tiny_models.build("MambaForCausalLM", config)


class TestRestores:
    @pytest.mark.parametrize(
        "build",
        [tiny_models.llama, tiny_models.gemma2, tiny_models.gpt_oss, tiny_models.qwen3_next, tiny_models.bart, llava],
    )
    def test_detached_model_is_as_it_was(self, build: Callable[[], PreTrainedModel]) -> None:
        model = build()
        before = snapshot(model)
        handle = attach(model, SPARSE)
        assert snapshot(model) != before
        handle.detach()
        assert snapshot(model) == before
        handle.detach()  # a second time does nothing
        assert snapshot(model) == before

    def test_with_block_detaches_and_can_be_repeated(self) -> None:
        model, text = tiny_models.llama(), prompt(80)
        before, plain = snapshot(model), generate(model, text)
        for _ in range(2):
            with attach(model, SPARSE) as handle:
                sparse = generate(model, text)
                assert handle.stats()["read_ratio"] < 1
            assert snapshot(model) == before
        assert_close(torch.stack(generate(model, text).logits), torch.stack(plain.logits), rtol=0, atol=0)
        assert (torch.stack(sparse.logits) != torch.stack(plain.logits)).any()

    def test_with_block_detaches_after_an_error(self) -> None:
        model = tiny_models.llama()
        before = snapshot(model)
        with pytest.raises(KeyboardInterrupt), attach(model):
            raise KeyboardInterrupt
        assert snapshot(model) == before

    @pytest.mark.parametrize(
        ("breaks", "too_late"), [("set_attn_implementation", True), ("register_forward_pre_hook", False)]
    )
    def test_failure_in_the_middle(self, breaks: str, too_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_models.llama()
        before = snapshot(model)
        works = getattr(type(model), breaks)

        def fails_once(*arguments: Any, **options: Any) -> None:
            monkeypatch.undo()
            if too_late:
                works(*arguments, **options)
            raise OSError("out of luck")

        monkeypatch.setattr(type(model), breaks, fails_once)
        with pytest.raises(OSError, match="out of luck"):
            attach(model)
        assert snapshot(model) == before
        attach(model).detach()

    def test_an_attached_cache_works_on_after_detaching(self) -> None:
        model, text = tiny_models.llama(), prompt(60)
        plain = generate(model, text)
        with attach(model, FULL):
            first = generate(model, text, max_new_tokens=4)
        rest = generate(model, first.sequences, max_new_tokens=4, cache=first.cache)
        assert rest.sequences.tolist() == plain.sequences.tolist()


class TestRefuses:
    @pytest.mark.parametrize(
        ("build", "config", "error", "says"),
        [
            (encoder, None, TypeError, "BertForMaskedLM does not generate with a KV attention cache"),
            (mamba, None, TypeError, "MambaForCausalLM does not generate with a KV attention cache"),
            (lambda: tiny_models.llama().base_model, None, TypeError, "LlamaModel does not generate"),
            (tiny_models.llama, OvalConfig(rank=17), ValueError, "head dimension 16, got 17"),
            (tiny_models.llama, {"budget_pages": 8}, TypeError, "OvalConfig, got dict"),
        ],
        ids=["encoder", "state space model", "headless model", "rank", "config"],
    )
    def test_what_cannot_work(
        self, build: Callable[[], PreTrainedModel], config: Any, error: type[Exception], says: str
    ) -> None:
        model = build()
        before = snapshot(model)
        with pytest.raises(error, match=says):
            attach(model, config)
        assert snapshot(model) == before

    def test_what_is_no_model(self) -> None:
        not_a_model: Any = nn.Linear(2, 2)
        with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
            attach(not_a_model)

    @pytest.mark.parametrize("second", ["the model", "a part of it"])
    def test_attaching_twice(self, second: str) -> None:
        model = tiny_models.llama()
        with attach(model):
            before, part = snapshot(model), cast(PreTrainedModel, model.base_model)
            with pytest.raises(RuntimeError, match="already attached"):
                attach(model if second == "the model" else part)
            assert snapshot(model) == before

    @pytest.mark.parametrize(("field", "names"), [("router", "quest"), ("impl", "reference")])
    def test_unknown_names_list_what_there_is(self, field: str, names: str) -> None:
        wrong: dict[str, Any] = {field: "best"}
        with pytest.raises(ValueError, match=f"{field} must be .*{names}.*got 'best'"):
            OvalConfig(**wrong)


def test_a_copy_of_an_attached_model_works_by_itself() -> None:
    model, text = tiny_models.llama(), prompt(80)
    with attach(model, SPARSE):
        paged = generate(model, text)
        twin = copy.deepcopy(model)
    assert generate(twin, text).sequences.tolist() == paged.sequences.tolist()


def test_an_explicit_cache_brings_its_own_router_and_budget() -> None:
    model, text = tiny_models.llama(), prompt(80)
    with attach(model, OvalConfig(page_size=8, budget_pages=6, router="quest")) as handle:
        generate(model, text)
        expected = handle.stats()["read_ratio"]
    with attach(model, SPARSE) as handle:
        generate(model, text, cache=OvalCache(model.config, OvalConfig(page_size=8, budget_pages=6, router="quest")))
        assert handle.stats()["read_ratio"] == expected


class TestModes:
    def test_two_models_do_not_disturb_each_other(self) -> None:
        one, two, text = tiny_models.llama(), tiny_models.qwen3(seed=1), prompt(80)
        with attach(one, SPARSE) as handle:
            alone = generate(one, text), handle.stats()["pages_read_mean"]
        with attach(two, FULL) as handle:
            other = generate(two, text), handle.stats()["pages_read_mean"]

        with attach(one, SPARSE) as first, attach(two, FULL) as second:
            cache_one = cache_two = None
            for step in range(8):  # token by token in turns
                ids_one = text if cache_one is None else alone[0].sequences[:, 79 + step : 80 + step]
                ids_two = text if cache_two is None else other[0].sequences[:, 79 + step : 80 + step]
                with torch.no_grad():
                    out_one, out_two = one(ids_one, cache=cache_one), two(ids_two, cache=cache_two)
                cache_one, cache_two = out_one.cache, out_two.cache
                assert_close(out_one.logits[:, -1], alone[0].logits[step])
                assert_close(out_two.logits[:, -1], other[0].logits[step])
            assert first.stats()["pages_read_mean"] == alone[1]
            assert second.stats()["pages_read_mean"] == other[1]

    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
    def test_gradient_modes(self, mode: Callable[[], Any]) -> None:
        model, text = tiny_models.llama(), prompt(80)
        plain = generate(model, text)
        with attach(model, FULL) as handle:
            cache, ids, logits = None, text, []
            with mode():
                for _ in range(8):
                    out = model(ids, cache=cache, use_cache=True)
                    cache, ids = out.cache, out.logits[:, -1:].argmax(-1)
                    logits.append(out.logits[:, -1])
            assert handle.stats()["pages_read_mean"] is not None
        assert_close(torch.stack(logits).detach(), torch.stack(plain.logits), atol=1e-4, rtol=1e-5)

    def test_a_cache_made_in_inference_mode_is_used_outside_of_it(self) -> None:
        model, text = tiny_models.llama(), prompt(80)
        plain = generate(model, text)
        with attach(model, FULL):
            with torch.inference_mode():
                cache = model(text).cache
            with torch.no_grad():
                out = model(plain.sequences[:, 80:81], cache=cache)
        assert_close(out.logits[:, -1], plain.logits[1], atol=1e-4, rtol=1e-5)

    def test_training_is_dense_and_gradients_are_the_models_own(self) -> None:
        model, text = tiny_models.llama(attention_dropout=0.0).train(), prompt(80, rows=2)

        def gradients() -> list[torch.Tensor]:
            model.zero_grad()
            model(text, labels=text).loss.backward()
            return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

        plain = gradients()
        with attach(model, SPARSE) as handle:
            attached = gradients()
            stats = handle.stats()
        assert len(attached) == len(plain) == len(list(model.parameters()))
        assert_close(attached, plain)
        assert stats["dense_steps"] == {"training": 1}
        assert stats["pages_read_mean"] is None

    def test_gradients_in_eval_mode_flow_through_the_first_pass(self) -> None:
        model, text = tiny_models.llama(), prompt(80)
        model(text, labels=text).loss.backward()
        plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        with attach(model, SPARSE):
            model(text, labels=text).loss.backward()
        assert_close([parameter.grad for parameter in model.parameters()], plain)

    def test_another_attention_implementation_set_later_is_dense(self) -> None:
        model, text = tiny_models.llama(), prompt(60)
        expected = generate(model, text).sequences
        before = snapshot(model)
        with attach(model, SPARSE) as handle:
            model.set_attn_implementation("eager")
            assert torch.equal(generate(model, text).sequences, expected)
            assert handle.stats()["dense_steps"] == {"attention implementation eager was set after attach": 8}
        assert snapshot(model) == before

    def test_generate_in_training_mode_is_dense(self) -> None:
        model, text = tiny_models.llama().train(), prompt(80)
        plain = generate(model, text)
        with attach(model, SPARSE) as handle:
            attached = generate(model, text)
            assert handle.stats()["dense_steps"] == {"training": 8}
        assert attached.sequences.tolist() == plain.sequences.tolist()

    def test_text_generation_pipeline(self) -> None:
        words = {f"w{i}": i for i in range(1, VOCAB)} | {"<pad>": PAD}
        backend = Tokenizer(models.WordLevel(words, unk_token="w1"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", padding_side="left")
        model = tiny_models.llama()
        write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        texts = [" ".join(f"w{i}" for i in row) for row in (prompt(80)[0].tolist(), prompt(50)[0].tolist())]
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False, "batch_size": 2}
        plain = write(texts, **options)
        with attach(model, FULL) as handle:
            assert write(texts, **options) == plain
            assert handle.stats()["pages_read_mean"] is not None


class TestComposite:
    def test_only_the_text_model_is_switched(self) -> None:
        model = llava()
        with attach(model):
            assert attention_of(model.config) == {
                "own": "sdpa",
                "text_config": {"own": "oval"},
                "vision_config": {"own": "sdpa"},
            }

    def test_images_and_text_give_the_same_answer(self) -> None:
        model, text = llava(), prompt(60)
        text[text == VOCAB - 1] = 2
        text[:, 10:26] = VOCAB - 1  # 16 image tokens
        pixels = torch.randn(1, 3, 28, 28)
        plain = generate(model, text, pixel_values=pixels)
        with attach(model, FULL) as handle:
            paged = generate(model, text, pixel_values=pixels)
            assert handle.stats()["pages_read_mean"] is not None
        assert paged.sequences.tolist() == plain.sequences.tolist()
        assert_close(torch.stack(paged.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-5)


def run_python(program: str) -> str:
    """Run a program in a fresh interpreter with warnings as errors; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestImport:
    def test_registers_one_name_and_patches_nothing(self) -> None:
        program = """
import json, torch, transformers
from transformers import AttentionInterface, cache_utils, masking_utils, modeling_utils
from transformers.generation import utils
def names():
    places = [torch, torch.nn, torch.nn.Module, torch.nn.functional, torch.Tensor, transformers.PreTrainedModel,
              transformers.PretrainedConfig, cache_utils, cache_utils.Cache, cache_utils.DynamicCache,
              cache_utils.DynamicLayer, masking_utils, modeling_utils, utils, utils.GenerationMixin]
    return {f"{place} {key}": id(value) for place in places for key, value in list(vars(place).items())
            if callable(value)}
def registered():
    return set(AttentionInterface().keys()), set(masking_utils.AttentionMaskInterface().keys()), \\
        set(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.items())
before, names_before = registered(), names()
import oval_core
after, names_after = registered(), names()
print(json.dumps([[sorted(map(str, new - old)) for new, old in zip(after, before)],
                  [key for key in names_before if names_after.get(key) != names_before[key]]]))
"""
        new, changed = json.loads(run_python(program))
        assert new == [["oval"], ["oval"], []]
        assert changed == []

    def test_works_without_optional_packages(self) -> None:
        program = """
import sys
for name in ("triton", "flash_attn", "numba", "gguf", "matplotlib", "PIL", "rich"):
    sys.modules[name] = None
from oval_core import OvalCache, OvalConfig, attach
from tests.core.tiny_models import generate, llama, prompt
model = llama()
with attach(model, OvalConfig(page_size=8, budget_pages=4)) as handle:
    generate(model, prompt(80))
    print(handle.stats()["pages_read_mean"])
"""
        assert float(run_python(program)) == 4.0
