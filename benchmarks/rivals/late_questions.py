"""Questions that come late: a long passage hides two facts and is read before anybody asks about them.

What a cache loses while the passage is read cannot be brought back when the question comes. Both environments make
the same prompts here, so this module needs nothing but torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.facts import Fact
from demos.texts import load_text

Encode = Callable[[str], list[int]]
DEPTHS = (0.25, 0.70)
PARAGRAPH = "\n\n"


FACTS = (
    Fact("The parrot that lives in the mill is called", "Bartholomew", "What is the parrot in the mill called?"),
    Fact("The number on the door of the observatory is", "48213", "Which number is on the observatory's door?"),
    Fact("The harbour master's clock was made in", "Lisbon", "Where was the harbour master's clock made?"),
    Fact("The blind fiddler's favourite dish is", "pickled herring", "What does the blind fiddler like to eat best?"),
    Fact("The bridge behind the tannery was built by", "Ottilie Krantz", "Who built the bridge behind the tannery?"),
    Fact("The ferry to the salt islands leaves at", "twenty past nine", "When does the ferry to the islands leave?"),
    Fact("The beekeeper hides his savings in a", "copper kettle", "Where does the beekeeper hide his savings?"),
    Fact("The lighthouse lamp burns oil from", "walnuts", "What is the oil of the lighthouse lamp made from?"),
)
MAX_PROMPTS = len(FACTS)


@dataclass(frozen=True)
class LateQuestions:
    """One passage and two questions about it, the answers included.

    Attributes:
        prefix: tokens of the passage, read before the questions are known.
        suffix: tokens of both questions and answers, read one by one.
        facts: where the two facts stand in `prefix`.
        answers: where the tokens of the two answers stand in `suffix`.
    """

    prefix: list[int]
    suffix: list[int]
    facts: tuple[range, range]
    answers: tuple[range, range]

    @property
    def digest(self) -> str:
        """Short hash of all tokens: equal if two runs read the same prompt."""
        return hashlib.sha256(repr(self.prefix + self.suffix).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class AnswerScore:
    """How well the answers were known, one figure for each of the two questions.

    Attributes:
        nll: mean negative log-likelihood of an answer token, in nats.
        greedy: whether greedy decoding would have written the answer.
    """

    nll: tuple[float, float]
    greedy: tuple[bool, bool]


def make_prompt(encode: Encode, index: int, context: int) -> LateQuestions:
    """Hide two facts in a passage of the novel and ask for them, first the earlier one.

    Args:
        encode: gives the tokens of a string, no special ones added.
        index: which facts, and which passage: 0 to `MAX_PROMPTS - 1`.
        context: tokens of the passage.

    Raises:
        ValueError: if there is no such prompt, or `context` leaves no room for a fact behind its depth.
    """
    if not 0 <= index < MAX_PROMPTS:
        raise ValueError(f"unknown prompt {index}: expected 0 to {MAX_PROMPTS - 1}")
    pair = (FACTS[index], FACTS[(index + 1) % len(FACTS)])
    prefix, places = _passage(encode, pair, index, context)
    suffix: list[int] = []
    answers = tuple(_ask(encode, fact, suffix) for fact in pair)
    return LateQuestions(prefix, suffix, (places[0], places[1]), (answers[0], answers[1]))


def score_answers(logits: Tensor, prompt: LateQuestions) -> AnswerScore:
    """Judge the answers by `logits [len(suffix), vocabulary]`; row i is what was predicted after token i."""
    nll, greedy = [], []
    for span in prompt.answers:
        rows = logits[span.start - 1 : span.stop - 1].log_softmax(-1)
        truth = rows.new_tensor(prompt.suffix[span.start : span.stop]).long()
        nll.append(-rows.gather(-1, truth[:, None]).mean().item())
        greedy.append(bool((rows.argmax(-1) == truth).all()))
    return AnswerScore((nll[0], nll[1]), (greedy[0], greedy[1]))


def _passage(encode: Encode, pair: tuple[Fact, Fact], index: int, context: int) -> tuple[list[int], list[range]]:
    """Paragraphs of the novel and the facts, each a paragraph behind the first one that reaches its depth."""
    tokens: list[int] = []
    places: list[range] = []
    for paragraph in _paragraphs(index):
        if len(places) < len(pair) and len(tokens) >= DEPTHS[len(places)] * context:
            begin = len(tokens)
            tokens += encode(pair[len(places)].sentence + PARAGRAPH)
            places.append(range(begin, len(tokens)))
        tokens += encode(paragraph + PARAGRAPH)
        if len(tokens) >= context:
            break
    if len(places) < len(pair) or places[-1].stop > context:
        raise ValueError(f"context must leave room for two facts among whole paragraphs, got {context} tokens")
    return tokens[:context], places


def _paragraphs(index: int) -> list[str]:
    """The novel from another place for every prompt, round and round."""
    paragraphs = load_text("novel").split(PARAGRAPH)
    start = len(paragraphs) * (index + 1) // (MAX_PROMPTS + 1)
    return paragraphs[start:] + paragraphs[:start]


def _ask(encode: Encode, fact: Fact, suffix: list[int]) -> range:
    """Append question and answer to `suffix`; return where the value stands. The opening is given, not scored."""
    suffix += encode(f"{PARAGRAPH}Question: {fact.question}\nAnswer: {fact.opening}")
    begin = len(suffix)
    suffix += encode(f" {fact.answer}")
    answer = range(begin, len(suffix))
    suffix += encode(".")
    return answer
