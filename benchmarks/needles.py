"""Facts planted in a long text, and questions about them: what the dense model answers, does OVAL answer it too?

One document holds all facts, each at another depth, so one prefill serves all questions; in the next document every
fact moves on by one depth. OVAL reads the question token by token, as if it had written it itself: what it needs of the
fact it must find in the pages it reads. (`generate` on a whole prompt reads the question densely, which is easier.) The
answer's first words are given, those of the fact: without them a small model often tells another of the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.facts import Fact
from benchmarks.greedy import Advance, continue_greedily, predictions
from benchmarks.prompts import chat_frame, encode
from benchmarks.teacher_forcing import prefill, shared
from demos.texts import load_text
from oval_core import OvalConfig, attach

PARAGRAPH = "\n\n"
REQUEST = "Answer with the words of the text:"
ANSWER_TOKENS = 16
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


FACTS = (
    Fact("The secret word of the gardener is", "marzipan", "What is the secret word of the gardener?"),
    Fact("The number of the blue door is", "48213", "What is the number of the blue door?"),
    Fact("The builder of the old lighthouse is", "Zoltan Kovacs", "Who is the builder of the old lighthouse?"),
    Fact("The favourite food of the grey parrot is", "spinach", "What is the favourite food of the grey parrot?"),
    Fact("The train to Helsinki leaves at", "17:45", "When does the train to Helsinki leave?"),
)


@dataclass(frozen=True)
class Needle:
    """One question: the text's tokens before it, where the fact stood (0: first, 1: last), what was answered, whether
    that is right, and the share of the dense bytes that OVAL read for all questions about this text."""

    context: int
    tokens: int
    depth: float
    answer: str
    dense_text: str
    oval_text: str
    dense: bool
    oval: bool
    read_ratio: float | None


def needles(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    place: tuple[int, int],
    config: OvalConfig,
    advance: Advance,
) -> list[Needle]:
    """Ask about every fact in one document of about `context` tokens.

    Args:
        place: `(i, n)`: the i-th document of n, which lie evenly in the novel; facts are moved on by i depths.
    """
    facts = [FACTS[(depth + place[0]) % len(FACTS)] for depth in range(len(DEPTHS))]
    text, questions = _document(tokenizer, plant(passage(tokenizer, context, place), facts), facts)
    prefix = prefill(model, text, 0, advance)
    dense = _answers(model, shared(model, prefix.cache), text, questions, advance, slowly=False)
    with attach(model, config) as handle:
        oval = _answers(model, shared(model, prefix.cache), text, questions, advance, slowly=True)
        ratio = handle.stats()["read_ratio"]
    rows = []
    for depth, fact, *answers in zip(DEPTHS, facts, dense, oval, strict=True):
        words, own = (str(tokenizer.decode(answer, skip_special_tokens=True)).strip() for answer in answers)
        right = fact.is_answered(words), fact.is_answered(own)
        rows.append(Needle(context, text.shape[1], depth, fact.answer, words, own, *right, ratio))
    return rows


def _document(tokenizer: PreTrainedTokenizerBase, text: str, facts: Sequence[Fact]) -> tuple[Tensor, list[Tensor]]:
    """The tokens of a user's turn up to the end of `text`, and of each question that may follow it, `[1, n]`, with the
    words that an answer begins with."""
    before, after = chat_frame(tokenizer)
    questions = [f"{PARAGRAPH}{REQUEST} {fact.question}{after}{fact.opening}" for fact in facts]
    return encode(tokenizer, before + text), [encode(tokenizer, question) for question in questions]


def work_tokens(context: int) -> int:
    """Return about how many tokens `needles` reads and writes, questions aside."""
    return context + 2 * (1 + ANSWER_TOKENS * len(FACTS))


def passage(tokenizer: PreTrainedTokenizerBase, context: int, place: tuple[int, int]) -> str:
    """A piece of the novel that has `context` tokens when chat template and facts are added, roughly."""
    novel = encode(tokenizer, load_text("novel"))[0]
    others = chat_frame(tokenizer)[0] + "".join(PARAGRAPH + fact.sentence for fact in FACTS)
    length = max(context - encode(tokenizer, others).shape[1], 0)
    start = max(len(novel) - length, 0) * (place[0] + 1) // (place[1] + 1)
    return str(tokenizer.decode(novel[start : start + length]))


def plant(text: str, facts: Sequence[Fact]) -> str:
    """Put each fact, as a paragraph, behind the paragraph at its depth of `DEPTHS`; the first before everything."""
    parts, begin = [], 0
    for depth, fact in zip(DEPTHS, facts, strict=True):
        end = text.find(PARAGRAPH, int(depth * len(text))) if depth else 0
        end = len(text) if end < 0 else end
        parts += [text[begin:end].strip(), fact.sentence]
        begin = end
    return PARAGRAPH.join(part for part in parts if part)


def _answers(
    model: PreTrainedModel, cache: DynamicCache, text: Tensor, questions: list[Tensor], advance: Advance, slowly: bool
) -> list[list[int]]:
    """Ask each question `[1, n]`, read at once or (slowly) token by token, after the text `[1, T]`, of which `cache`
    holds all but the last token."""
    predictions(model, cache, text[:, -1:], advance)
    length = cache.get_seq_length()
    answers = []
    for question in questions:
        if slowly:
            predictions(model, cache, question[:, :-1], lambda tokens: None)
            question = question[:, -1:]
        answers.append(continue_greedily(model, cache, question, ANSWER_TOKENS, advance))
        with torch.inference_mode():
            cache.crop(length - cache.get_seq_length())
    return answers
