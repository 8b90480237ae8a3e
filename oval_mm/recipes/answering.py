"""What a LLaVA answers to packs of questions, and how often it is right.

`python -m oval_mm.recipes.answering --model DIR --split validation` writes a table as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from oval_mm.recipes.llava_batches import SOURCES, Asked, Batch, Pack, make_batch, packs
from oval_mm.recipes.question_packing import IGNORED, packed_outputs
from oval_mm.recipes.scenes import SPLITS
from oval_mm.recipes.tiny_llava import load_llava

ALL = "all"
LONGEST_ANSWER = 8  # tokens; the data has up to 2 words and an end
ROWS = 4  # packs that run together


@dataclass(frozen=True)
class Answer:
    """What was asked and what came, in words."""

    asked: Asked
    given: str

    @property
    def is_right(self) -> bool:
        """Whether it is the expected answer, word for word."""
        return self.given == self.asked.answer


def packed_answers(model: Any, processor: Any, packs: Sequence[Pack]) -> list[Answer]:
    """Greedy answers to everything in packs of as many images each, in order.

    Every token is chosen after the expected ones before it. Of a wrong answer only the first wrong token is therefore
    what `generate` would say; which answers are right is the same, but for second turns: they know the right first one.

    Args:
        model: a `LlavaForConditionalGeneration`.
        processor: its `LlavaProcessor`.
        packs: at least one.
    """
    return answers_in(model, processor, packs, lambda some: make_batch(some, processor))


def answers_in(
    model: Any, processor: Any, packs: Sequence[Pack], make: Callable[[Sequence[Pack]], Batch]
) -> list[Answer]:
    """The same where `make` decides what of some packs the model sees."""
    answers: list[Answer] = []
    for start in range(0, len(packs), ROWS):
        some = packs[start : start + ROWS]
        asked = [turn for one in some for talk in one.dialogues for turn in talk]
        given = _given(model, processor, make(some))
        answers += [Answer(turn, text) for turn, text in zip(asked, given, strict=True)]
    return answers


@torch.no_grad()
def _given(model: Any, processor: Any, batch: Batch) -> Iterator[str]:
    """The words of one answer after the other."""
    chosen = packed_outputs(model, *batch.to(model.device)).logits.argmax(-1)[:, :-1].cpu()
    is_answer = batch.packed.labels[:, 1:] != IGNORED
    for row, flags in zip(chosen.tolist(), is_answer.tolist(), strict=True):
        for is_answered, tokens in itertools.groupby(zip(row, flags, strict=True), key=lambda pair: pair[1]):
            if is_answered:
                yield _words(processor, [token for token, _ in tokens])


def _words(processor: Any, tokens: Sequence[int]) -> str:
    """What stands before the end token, or that there is none."""
    end = processor.tokenizer.eos_token_id
    before = list(itertools.takewhile(lambda token: token != end, tokens))
    text: str = processor.tokenizer.decode(before)
    return text if end in tokens else f"{text} ..."


def generated_answers(model: Any, processor: Any, packs: Iterable[Pack]) -> Iterator[Answer]:
    """The same through `model.generate`, one prompt after the other; a later turn knows the answers that were given."""
    for pack in packs:
        images = pack.images()
        for talk in pack.dialogues:
            shown: list[dict[str, str]] = [{"type": "image"} for _ in images]
            messages: list[dict[str, Any]] = []
            for turn in talk:
                messages.append({"role": "user", "content": [*shown, {"type": "text", "text": turn.question}]})
                answer = Answer(turn, generate_answer(model, processor, images, messages))
                messages.append({"role": "assistant", "content": answer.given})
                shown = []
                yield answer


def generate_answer(model: Any, processor: Any, images: Sequence[Any], messages: Sequence[dict[str, Any]]) -> str:
    """The greedy answer to the last of the chat messages."""
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(images=images, text=prompt, return_tensors="pt").to(model.device)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=LONGEST_ANSWER)[0]
    return _words(processor, tokens[inputs.input_ids.shape[1] :].tolist())


def accuracy(answers: Iterable[Answer]) -> dict[str, float]:
    """The share of right answers by kind of question, and of ALL."""
    right: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        for kind in (answer.asked.kind, ALL):
            right[kind].append(answer.is_right)
    return {kind: sum(flags) / len(flags) for kind, flags in right.items()}


def majority_baseline(asked: Iterable[Asked]) -> dict[str, float]:
    """The accuracy of giving the most frequent answer: of its kind to each kind of question, one to ALL."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for turn in asked:
        for kind in (turn.kind, ALL):
            counts[kind][turn.answer] += 1
    return {kind: max(answers.values()) / answers.total() for kind, answers in counts.items()}


def main(arguments: list[str] | None = None) -> None:
    """Write how often a model is right; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m oval_mm.recipes.answering", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the LLaVA")
    parser.add_argument("--split", choices=SPLITS, default="validation", help="default: %(default)s")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES), help="default: all")
    parser.add_argument("--packs", type=int, default=200, help="images or sets of images each (default: %(default)s)")
    options = parser.parse_args(arguments)
    model, processor = load_llava(options.model)
    size_px = processor.image_processor.crop_size["height"]
    table = {}
    for source in options.sources:
        chosen = list(itertools.islice(packs(source, options.split, size_px), options.packs))
        bar = tqdm(range(0, len(chosen), ROWS), desc=source, unit="batch")
        answers = [answer for start in bar for answer in packed_answers(model, processor, chosen[start : start + ROWS])]
        baseline = majority_baseline(answer.asked for answer in answers)
        table[source] = {"answers": len(answers), "accuracy": accuracy(answers), "majority_baseline": baseline}
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
