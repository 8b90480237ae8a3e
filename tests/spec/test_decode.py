"""Greedy text with drafts is that of `model.generate`, whatever ends, pads or processes it."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GPT2Config, PreTrainedModel, PreTrainedTokenizerFast

from oval_core import OvalCache, OvalConfig, attach
from oval_core.attach import binding_of
from oval_spec import (
    Drafter,
    ModelDrafter,
    PromptLookupDrafter,
    SparseSelfDrafter,
    SpeculativeOutput,
    speculative_decoding,
    speculative_generate,
)
from tests.core import tiny_models
from tests.core.tiny_models import PAD, VOCAB, llama, prompt
from tests.spec.drafts import SMALL, LineDrafter, Streamer, TreeDrafter, longer, padded_batch, plain, speculative, state

EOS_AT = 9  # new tokens of the first row when a token in the midst of a draft ends it
DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "prompt lookup": lambda model: PromptLookupDrafter(ngram_tokens=2),
    "another model": lambda model: ModelDrafter(llama(seed=1), min_confidence=0.0),
    "itself": lambda model: ModelDrafter(model, most_tokens=5, min_confidence=0.0),
    "sparse self": lambda model: SparseSelfDrafter(budget_pages=3, most_tokens=4, min_confidence=0.0),
}
every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def answers(model: PreTrainedModel) -> Tensor:
    """The texts of the padded batch."""
    return plain(model, padded_batch())


def make(drafter: str, model: PreTrainedModel) -> Drafter:
    return DRAFTERS[drafter](model)


def end_of_first_row(answers: Tensor) -> int:
    """A token that the first row says in the midst of a draft, and not before."""
    new = answers[0, 40:].tolist()
    return next(token for at, token in enumerate(new) if at >= EOS_AT and token not in new[:at])


@every_drafter
@pytest.mark.parametrize("tokens", [1, 17, 40])
def test_one_row(model: PreTrainedModel, drafter: str, tokens: int) -> None:
    text = prompt(tokens)
    out = speculative(model, text, make(drafter, model), max_new_tokens=19)
    assert out.sequences.tolist() == plain(model, text, max_new_tokens=19).tolist()
    assert out.stats.tokens == 19


@every_drafter
def test_rows_that_end_at_different_times(model: PreTrainedModel, answers: Tensor, drafter: str) -> None:
    """Left-padded; the first row ends inside a draft."""
    end = end_of_first_row(answers)
    expected = plain(model, padded_batch(), eos_token_id=end)
    out = speculative(model, padded_batch(), make(drafter, model), eos_token_id=end)
    assert (expected[0] == PAD).sum() > (padded_batch()["input_ids"][0] == PAD).sum()
    assert out.sequences.tolist() == expected.tolist()
    lengths = [length + 1 for length in out.cache.layers[0].store.lengths]
    assert lengths == [next((at + 1 for at in range(40, 64) if row[at] == end), 64) for row in expected.tolist()]


@pytest.mark.parametrize("seed", range(4))
def test_trees(model: PreTrainedModel, answers: Tensor, seed: int) -> None:
    end = end_of_first_row(answers)
    drafter = TreeDrafter(answers, seed=seed)
    out = speculative(model, padded_batch(), drafter, eos_token_id=end if seed % 2 else None)
    assert out.sequences.tolist() == plain(model, padded_batch(), eos_token_id=end if seed % 2 else None).tolist()
    assert out.stats.accepted_mean > 0.5
    assert out.stats.steps < 24


@pytest.mark.parametrize("limit", [{"max_new_tokens": 1}, {"max_new_tokens": 7}, {"max_length": 45}], ids=str)
def test_the_limit_is_reached_in_mid_draft(model: PreTrainedModel, answers: Tensor, limit: dict[str, int]) -> None:
    options = {"max_new_tokens": None, **limit}
    expected = plain(model, padded_batch(), **options)
    for drafter in (ModelDrafter(model, most_tokens=5, min_confidence=0.0), TreeDrafter(answers)):
        out = speculative(model, padded_batch(), drafter, **options)
        assert out.sequences.tolist() == expected.tolist()
        assert out.stats.tokens == 3 * (expected.shape[1] - 40)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 15, "eos_token_id": [*range(2, 60)]},
        {"bad_words_ids": [[word] for word in range(5, 50)]},
        {"suppress_tokens": [*range(5, 50)], "exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 3},
        {"forced_eos_token_id": 3, "eos_token_id": 3},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("drafter", ["itself", "prompt lookup"])
def test_logits_processors(model: PreTrainedModel, drafter: str, options: dict[str, Any]) -> None:
    expected = plain(model, padded_batch(), **options)
    assert expected.tolist() != plain(model, padded_batch()).tolist()
    assert speculative(model, padded_batch(), make(drafter, model), **options).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("how", [{"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 1}, {}], ids=str)
def test_processors_that_know_their_row(model: PreTrainedModel, how: dict[str, Any]) -> None:
    def allowed(row: int, text: Tensor) -> list[int]:
        return [*range(2 + 30 * row, 32 + 30 * row)]

    options = how or {"prefix_allowed_tokens_fn": allowed}
    expected = plain(model, padded_batch(), **options)
    assert expected.tolist() != plain(model, padded_batch()).tolist()
    out = speculative(model, padded_batch(), TreeDrafter(expected), **options)
    assert out.sequences.tolist() == expected.tolist()
    assert out.stats.accepted_mean > 0.5


def test_guidance(model: PreTrainedModel) -> None:
    """It remembers its own cache: right for one row, refused for several."""
    expected = plain(model, prompt(20), guidance_scale=1.5)
    out = speculative(model, prompt(20), TreeDrafter(expected), guidance_scale=1.5)
    assert out.sequences.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="GuidanceLogitsProcessor can only be used with one row, got 3"):
        speculative(model, padded_batch(), PromptLookupDrafter(), guidance_scale=1.5)


class TestStopStrings:
    """Over a byte-level tokenizer and a model that says letters."""

    @pytest.fixture
    def tokenizer(self) -> PreTrainedTokenizerFast:
        alphabet = sorted(ByteLevel.alphabet())
        backend = Tokenizer(BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    @pytest.fixture
    def speaker(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        model: Any = llama(vocab_size=256)
        letters = tokenizer(string.ascii_letters)["input_ids"]
        model.generation_config.suppress_tokens = sorted({*range(256)} - {*letters})
        return model

    @pytest.mark.parametrize("at", [4, 5, 6, 7, 11])
    def test_across_the_border_of_a_draft(self, speaker: Any, tokenizer: PreTrainedTokenizerFast, at: int) -> None:
        """Drafts of nine tokens, and of fewer: some of these strings begin in one and end in the next."""
        text = prompt(20)
        answer = plain(speaker, text)
        ends = {"stop_strings": tokenizer.decode(answer[0, 20 + at : 23 + at]), "tokenizer": tokenizer}
        expected = plain(speaker, text, **ends)
        assert expected.shape[1] == 23 + at
        for drafter in (LineDrafter(answer), TreeDrafter(answer, seed=at)):
            out = speculative(speaker, text, drafter, **ends)
            assert out.sequences.tolist() == expected.tolist()
            assert out.stats.accepted_mean > 0.5

    def test_of_a_generation_config(self, speaker: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        text = prompt(20)
        stop = tokenizer.decode(plain(speaker, text)[0, 26:28])
        config = GenerationConfig(stop_strings=[stop], max_new_tokens=24, pad_token_id=PAD)
        expected = speaker.generate(text, generation_config=config, tokenizer=tokenizer)
        out = speculative_generate(speaker, text, PromptLookupDrafter(), generation_config=config, tokenizer=tokenizer)
        assert expected.shape[1] == 28
        assert out.sequences.tolist() == expected.tolist()
        assert config.stop_strings == [stop]


def test_a_stopping_criterion_of_ones_own(model: PreTrainedModel) -> None:
    def is_long(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 31)

    out = speculative(model, prompt(20), ModelDrafter(model, min_confidence=0.0), stopping_criteria=[is_long])
    assert out.sequences.tolist() == plain(model, prompt(20), stopping_criteria=[is_long]).tolist()
    assert out.sequences.shape[1] == 31


class TestStreamers:
    @pytest.mark.parametrize("new_tokens", [1, 2, 13])
    @pytest.mark.parametrize("drafter", ["itself", "prompt lookup"])
    def test_same_tokens(self, model: PreTrainedModel, drafter: str, new_tokens: int) -> None:
        expected, got = Streamer(), Streamer()
        plain(model, prompt(20), streamer=expected, max_new_tokens=new_tokens)
        speculative(model, prompt(20), make(drafter, model), streamer=got, max_new_tokens=new_tokens)
        assert got.put_tokens == expected.put_tokens
        assert got.shapes == expected.shapes
        assert got.ends == expected.ends == 1

    def test_the_end_inside_a_draft(self, model: PreTrainedModel) -> None:
        end = int(plain(model, prompt(20))[0, 27])
        expected, got = Streamer(), Streamer()
        plain(model, prompt(20), streamer=expected, eos_token_id=end)
        speculative(model, prompt(20), make("itself", model), streamer=got, eos_token_id=end)
        assert got.put_tokens == expected.put_tokens
        assert got.ends == 1

    def test_several_rows(self, model: PreTrainedModel) -> None:
        streamer = Streamer()
        with pytest.raises(ValueError, match="streamer needs a single row, got 3"):
            speculative(model, padded_batch(), PromptLookupDrafter(), streamer=streamer)
        assert not streamer.put_tokens


class TestReturns:
    def test_custom_generate(self, model: Any) -> None:
        options = {"custom_generate": speculative_decoding, "drafter": PromptLookupDrafter(), "do_sample": False}
        expected = plain(model, padded_batch())
        only = model.generate(**padded_batch(), **options, max_new_tokens=24)
        assert isinstance(only, Tensor)
        assert only.dtype == torch.int64
        assert only.tolist() == expected.tolist()
        out = model.generate(**padded_batch(), **options, max_new_tokens=24, return_dict_in_generate=True)
        assert isinstance(out, SpeculativeOutput)
        assert out.sequences.tolist() == expected.tolist()
        assert out["sequences"] is out.sequences

    @pytest.mark.parametrize("wanted", [True, False])
    def test_always_an_output(self, model: PreTrainedModel, wanted: bool) -> None:
        out = speculative(model, prompt(20), PromptLookupDrafter(), return_dict_in_generate=wanted)
        assert out.sequences.tolist() == plain(model, prompt(20)).tolist()

    def test_stats(self, model: PreTrainedModel) -> None:
        out = speculative(model, prompt(20), ModelDrafter(model, most_tokens=5, min_confidence=0.0), adapt=False)
        stats = out.stats
        assert (stats.tokens, stats.steps) == (24, 4)  # 1, then three times 5 drafted and one chosen, then 4 and one
        assert stats.accepted == {5: 3, 4: 1}
        assert stats.accept_rate == dict.fromkeys(range(1, 6), 1.0)
        assert stats.accepted_mean == pytest.approx(19 / 4)
        assert set(stats.seconds) == {"prefill", "draft", "verify"}
        assert min(stats.seconds.values()) > 0

    def test_a_token_that_ends_the_text_is_accepted_too(self, model: PreTrainedModel) -> None:
        end = int(plain(model, prompt(20))[0, 27])
        drafter = ModelDrafter(model, most_tokens=5, min_confidence=0.0)
        stats = speculative(model, prompt(20), drafter, adapt=False, eos_token_id=end).stats
        assert stats.tokens == 8
        assert stats.accepted == {5: 1, 1: 1}
        assert stats.accept_rate == dict.fromkeys(range(1, 6), 1.0)

    def test_several_samples_of_a_prompt(self, model: PreTrainedModel) -> None:
        out = speculative(model, prompt(20), PromptLookupDrafter(), do_sample=True, num_return_sequences=3)
        assert out.sequences.shape == (3, 44)
        assert len({tuple(row) for row in out.sequences.tolist()}) == 3
        assert (out.sequences[:, :20] == prompt(20)).all()


class TestTheModelIsLeftAsItWas:
    @every_drafter
    def test_not_attached(self, drafter: str) -> None:
        model = llama()
        before = state(model)
        speculative(model, prompt(20), make(drafter, model))
        assert state(model) == before

    def test_attached(self) -> None:
        model = llama()
        expected = plain(model, padded_batch())
        with attach(model, SMALL) as handle:
            before = state(model)
            for drafter in DRAFTERS:
                assert speculative(model, padded_batch(), make(drafter, model)).sequences.tolist() == expected.tolist()
                assert state(model) == before
            assert binding_of(model) is not None
            plain(model, prompt(90))
            assert handle.stats()["pages_read_mean"] == 3
        assert binding_of(model) is None

    @pytest.mark.parametrize("calls", [0, 2])
    def test_when_the_drafter_fails(self, model: PreTrainedModel, calls: int) -> None:
        class Failing(ModelDrafter):
            left = calls

            def draft(self, *args: Any) -> Any:
                self.left -= 1
                if self.left < 0:
                    raise RuntimeError("no more drafts")
                return super().draft(*args)

        other = llama(seed=1)
        before = state(model), state(other)
        with pytest.raises(RuntimeError, match="no more drafts"):
            speculative(model, prompt(20), Failing(other))
        assert (state(model), state(other)) == before

    def test_when_the_model_fails(self, model: PreTrainedModel) -> None:
        before = state(model)
        with pytest.raises(IndexError):
            speculative(model, prompt(20) + VOCAB, PromptLookupDrafter())
        assert state(model) == before


class TestCaches:
    """A second turn over the cache of the first."""

    def turns(self, say: Callable[..., Any], cache: Any = None) -> list[list[int]]:
        first = say(prompt(90), cache=cache, return_dict_in_generate=True)
        second = say(longer(first.sequences), cache=first.cache, return_dict_in_generate=True)
        assert second.cache.get_seq_length() == second.sequences.shape[1] - 1
        assert second.cache is first.cache
        return second.sequences.tolist()

    @every_drafter
    @pytest.mark.parametrize("config", [None, SMALL], ids=["default", "small pages"])
    def test_a_returned_cache(self, model: PreTrainedModel, drafter: str, config: OvalConfig | None) -> None:
        def say(text: Tensor, **options: Any) -> Any:
            return speculative(model, text, make(drafter, model), max_new_tokens=12, config=config, **options)

        assert self.turns(say) == self.turns(lambda *args, **options: plain(model, *args, max_new_tokens=12, **options))

    @pytest.mark.parametrize("order", [(SMALL, None), (None, SMALL)], ids=["small first", "small second"])
    def test_a_second_turn_of_another_config(self, model: PreTrainedModel, order: Any) -> None:
        """The pages stay as they are; how they are read is up to the turn."""
        configs = itertools.cycle(order)
        drafter = SparseSelfDrafter(budget_pages=90, most_tokens=4, min_confidence=0.0)
        rates = []

        def say(text: Tensor, **options: Any) -> Any:
            out = speculative(model, text, drafter, max_new_tokens=12, config=next(configs), adapt=False, **options)
            rates.append(out.stats.accept_rate)
            return out

        assert self.turns(say) == self.turns(lambda *args, **options: plain(model, *args, max_new_tokens=12, **options))
        assert [set(rate.values()) for rate in rates] == [{1.0}, {1.0}]  # a draft that reads every page is right

    def test_pages_of_a_second_turn_are_read_as_it_says(self) -> None:
        model = llama()
        with attach(model, SMALL) as handle:
            first = speculative(model, prompt(90), PromptLookupDrafter())
            turn = longer(first.sequences, 3)
            speculative(model, turn, PromptLookupDrafter(), mode="pages", config=SMALL, cache=first.cache)
            assert handle.stats()["read_ratio"] < 1

    def test_a_cache_that_generate_filled(self, model: Any) -> None:
        first: Any = plain(model, prompt(30), return_dict_in_generate=True)
        turn = longer(first.sequences)
        out = speculative(model, turn, PromptLookupDrafter(), cache=first.cache)
        assert out.sequences.tolist() == plain(model, turn).tolist()
        after = longer(out.sequences, 5)
        again = plain(model, after, cache=out.cache)  # and generate goes on from ours
        assert again.tolist() == plain(model, after).tolist()

    @pytest.mark.parametrize("kind", [DynamicCache, OvalCache])
    def test_an_empty_cache_is_filled(self, model: Any, kind: Any) -> None:
        cache = kind(config=model.config)
        out = speculative(model, prompt(30), PromptLookupDrafter(), cache=cache)
        assert out.cache is cache
        assert cache.get_seq_length() == 53

    def test_a_batch(self, model: Any, answers: Tensor) -> None:
        inputs = padded_batch()
        first = speculative(model, inputs, TreeDrafter(answers))
        turn = longer(first.sequences, 6)
        turn["attention_mask"][:, :40] = inputs["attention_mask"]
        expected = plain(model, turn)
        for drafter in (TreeDrafter(expected), ModelDrafter(model)):
            first = speculative(model, inputs, TreeDrafter(answers))
            second = speculative(model, turn, drafter, cache=first.cache)
            assert second.sequences.tolist() == expected.tolist()

    def test_rows_of_different_lengths(self, model: Any, answers: Tensor) -> None:
        """Their columns are not those of the longer texts any more."""
        first = speculative(model, padded_batch(), TreeDrafter(answers), eos_token_id=end_of_first_row(answers))
        with pytest.raises(ValueError, match=r"rows of the cache .* \[\d+, \d+, \d+\] tokens"):
            speculative(model, longer(first.sequences), PromptLookupDrafter(), cache=first.cache)

    def test_nothing_new_to_read(self, model: Any) -> None:
        first = speculative(model, prompt(30), PromptLookupDrafter())
        with pytest.raises(
            ValueError, match="the prompt has 30 tokens and the cache holds 53: nothing is left to read"
        ):
            speculative(model, prompt(30), PromptLookupDrafter(), cache=first.cache)


class TestEmbeddings:
    @pytest.mark.parametrize("drafter", ["prompt lookup", "sparse self"])
    def test_instead_of_tokens(self, model: Any, drafter: str) -> None:
        inputs = {"inputs_embeds": model.get_input_embeddings()(prompt(40, rows=2)).detach()}
        out = speculative(model, inputs, make(drafter, model))
        assert out.sequences.shape == (2, 24)
        assert out.sequences.tolist() == plain(model, inputs).tolist()

    def test_beside_tokens(self, model: Any) -> None:
        inputs = {"input_ids": prompt(40), "inputs_embeds": model.get_input_embeddings()(prompt(40)).detach()}
        for drafter in DRAFTERS:
            assert speculative(model, inputs, make(drafter, model)).sequences.tolist() == plain(model, inputs).tolist()

    def test_a_draft_model_needs_tokens(self, model: Any) -> None:
        before = state(model)
        embedded = model.get_input_embeddings()(prompt(40)).detach()
        with pytest.raises(ValueError, match="a draft model reads token ids"):
            speculative(model, {"inputs_embeds": embedded}, ModelDrafter(llama(seed=1)))
        assert state(model) == before


def gpt2() -> PreTrainedModel:
    """Learned positions."""
    settings = {**tiny_models.COMMON, "num_hidden_layers": 2, "n_positions": 512}
    return tiny_models.build("GPT2LMHeadModel", GPT2Config(**settings))


def opt() -> PreTrainedModel:
    """Learned positions that begin at 2."""
    return tiny_models.decoder("OPT", ffn_dim=96, word_embed_proj_dim=64)


class TestArchitectures:
    @pytest.mark.parametrize("build", [tiny_models.qwen3, tiny_models.phi3, gpt2, opt, tiny_models.deepseek_v3])
    def test_same_text(self, build: Callable[[], PreTrainedModel]) -> None:
        model = build()
        expected = plain(model, padded_batch())
        for drafter in (TreeDrafter(expected), ModelDrafter(model, most_tokens=5, min_confidence=0.0)):
            out = speculative(model, padded_batch(), drafter)
            assert out.sequences.tolist() == expected.tolist()
            assert out.stats.accepted_mean > 0.5

    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (tiny_models.gpt_oss, "GptOssForCausalLM: DynamicSlidingWindowLayer cannot take back"),
            (tiny_models.gemma2, "DynamicSlidingWindowLayer"),
            (tiny_models.mistral, "DynamicSlidingWindowLayer"),
            (tiny_models.qwen3_next, "LinearAttentionLayer"),
            (tiny_models.t5, "must be a decoder, got the encoder-decoder model T5For"),
            (tiny_models.bart, "must be a decoder, got the encoder-decoder model BartFor"),
            (lambda: tiny_models.decoder("Bloom"), "takes no position_ids"),
            (lambda: tiny_models.decoder("Falcon", alibi=True), "does not let its attention implementation be set"),
        ],
    )
    def test_refused(self, build: Callable[[], PreTrainedModel], message: str) -> None:
        model = build()
        before = state(model)
        with pytest.raises((ValueError, TypeError), match=message):
            speculative(model, prompt(20), PromptLookupDrafter())
        assert state(model) == before

    def test_a_model_in_training(self, model: PreTrainedModel) -> None:
        """Without dropout, training changes nothing but that no page is sealed."""
        training = llama().train()
        out = speculative(training, padded_batch(), PromptLookupDrafter())
        assert out.sequences.tolist() == plain(model, padded_batch()).tolist()
        assert training.training
