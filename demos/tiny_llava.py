"""A vision-language model to talk to: by default the small LLaVA of this project, dense or with OVAL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from oval_core import OvalConfig
from oval_core.layer import OvalLayer
from oval_mm import attach
from oval_mm.heatmap import View, answer_heat, image_share, prompt_spans, views
from oval_mm.models import family_of

FOLDER = Path(__file__).parent / "data" / "tiny-llava"


def load(name_or_path: str | Path | None = None) -> tuple[Any, Any]:
    """A model in evaluation mode, on a GPU if there is one, and its processor.

    Args:
        name_or_path: a local path or a hub id; None: the small LLaVA. Weights are float32 on a CPU, as they were
            stored on a GPU.

    Raises:
        FileNotFoundError: the small LLaVA has not been made yet.
        TypeError, ValueError, OSError: there is no such model, or OVAL does not support it.
    """
    if name_or_path is None and not (FOLDER / "config.json").is_file():
        raise FileNotFoundError(
            f"the small LLaVA is not in {FOLDER}: make it with `python -m oval_mm.recipes.train --out DIR` and move "
            "DIR/llava there, or name another model with `--model`"
        )
    has_gpu = torch.cuda.is_available()
    dtype: Any = "auto" if has_gpu else torch.float32
    model: Any = AutoModelForImageTextToText.from_pretrained(name_or_path or FOLDER, dtype=dtype)
    processor = AutoProcessor.from_pretrained(name_or_path or FOLDER)
    family_of(model, processor)
    return model.eval().to("cuda" if has_gpu else "cpu"), processor


@dataclass(frozen=True)
class Answer:
    """What came of one question.

    Args:
        words: the tokens of the text, one by one.
        read_ratio: bytes of keys, values and metadata that were read, over those that the dense model reads.
        image_pages: share of the image pages that was read exactly.
        views, heats: see `oval_mm.heatmap`; empty where every step was dense.
        dense_steps: how many steps read everything, by reason.
    """

    text: str
    words: list[str]
    read_ratio: float = 1.0
    image_pages: float = 1.0
    views: Sequence[View] = ()
    heats: Sequence[Tensor] = ()
    dense_steps: Mapping[str, int] = field(default_factory=dict)


class Reader:
    """A conversation about pictures. They are read once, before the first question; what was read stays in the cache.

    So no token of a question has seen an image page that its own step did not select.

    Args:
        model, processor: of `oval_mm.models.FAMILIES`, with a chat template.
        pictures: shown in the first message, RGB.
        config: of OVAL; None: dense.
        most_tokens: of an answer.
    """

    def __init__(
        self, model: Any, processor: Any, pictures: Sequence[Any], config: OvalConfig | None, most_tokens: int = 64
    ) -> None:
        self.model, self.processor, self.config, self.most_tokens = model, processor, config, most_tokens
        self.pictures = pictures
        self._cache: Any = None
        self._ids = torch.empty(0, dtype=torch.long)  # of the tokens in the cache

    def answer(self, turns: Sequence[tuple[str, str]], question: str) -> Answer:
        """Answer greedily.

        Args:
            turns: questions and answers before this one.
            question: asked now.

        Raises:
            ValueError: the question is empty, or the chat template is missing or leaves the pictures out.
        """
        inputs = self._inputs(turns, question)
        spans = prompt_spans(self.model, inputs)
        if not spans:
            raise ValueError("expected a prompt with image tokens, but the chat template leaves the pictures out")
        if self.config is None:
            self._read_pictures(inputs, spans[-1].stop)
            return Answer(*self._generate(inputs))
        with attach(self.model, self.processor, self.config) as handle:
            self._read_pictures(inputs, spans[-1].stop)
            before = handle.stats()
            with handle.trace() as trace:
                text, words = self._generate(inputs)
            after = handle.stats()
        steps = range(before["steps"] + 1, before["steps"] + 1 + max(1, len(words)))
        tables = {layer.layer_idx: layer.tables[0] for layer in self._cache.layers if isinstance(layer, OvalLayer)}
        read, dense = (after[name] - before[name] for name in ("bytes_read", "bytes_dense"))
        share = image_share(trace, tables, steps)
        shown = views(self.model, self.processor, inputs, spans, self.pictures) if trace else []
        return Answer(
            text,
            words,
            read / dense if dense else 1.0,
            1.0 if share is None else share,
            shown,
            answer_heat(trace, tables, spans, steps) if trace else [],
            Counter(after["dense_steps"]) - Counter(before["dense_steps"]),
        )

    def _inputs(self, turns: Sequence[tuple[str, str]], question: str) -> dict[str, Any]:
        """What the processor makes of the conversation."""
        if not question.strip():
            raise ValueError("expected a question, got nothing")
        if getattr(self.processor, "chat_template", None) is None:
            raise ValueError(f"{type(self.processor).__name__} has no chat template: how to ask is not known")
        messages: list[dict[str, Any]] = []
        for asked, answered in [*turns, (question.strip(), "")]:
            messages.append({"role": "user", "content": [{"type": "text", "text": asked}]})
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answered}]})
        messages[0]["content"][:0] = [{"type": "image", "image": picture} for picture in self.pictures]
        encoded = self.processor.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return dict(encoded.to(self.model.device))

    def _read_pictures(self, inputs: Mapping[str, Any], image_end: int) -> None:
        """Fill the cache with the prompt up to its last picture, or keep what it holds of the prompt."""
        ids = inputs["input_ids"][0].cpu()
        length = min(len(ids) - 1, len(self._ids))
        known = int((ids[:length] == self._ids[:length]).int().cumprod(0).sum())
        if known >= image_end:
            self._cache.crop(known - len(self._ids))
            self._ids = self._ids[:known]
            return
        cut = {
            name: value[:, :image_end] if getattr(value, "shape", ())[:2] == (1, len(ids)) else value
            for name, value in inputs.items()
        }
        output = self.model.generate(**cut, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
        self._cache, self._ids = output.past_key_values, ids[:image_end]

    def _generate(self, inputs: Mapping[str, Any]) -> tuple[str, list[str]]:
        """The answer and its tokens."""
        ids = inputs["input_ids"]
        rest = {name: value for name, value in inputs.items() if not name.startswith("pixel_")}
        settings = {"max_new_tokens": self.most_tokens, "do_sample": False, "return_dict_in_generate": True}
        output = self.model.generate(**rest, **settings, cache=self._cache)
        self._cache = output.past_key_values
        self._ids = output.sequences[0, : self._cache.get_seq_length()].cpu()
        tokenizer, tokens = self.processor.tokenizer, output.sequences[0, ids.shape[1] :].tolist()
        special = set(tokenizer.all_special_ids)
        words = [str(tokenizer.decode([token])) for token in tokens if token not in special]
        return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip(), words
