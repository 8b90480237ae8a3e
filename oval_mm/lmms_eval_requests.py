"""What a request of lmms-eval asks for, in terms of transformers; needs no lmms-eval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

PLACEHOLDER = "<image>"  # how tasks write the place of a picture
DEFAULTS: dict[str, Any] = {"max_new_tokens": 1024, "num_beams": 1}
ALWAYS = (*DEFAULTS, "repetition_penalty")
SAMPLING = ("temperature", "top_p", "top_k")
UNDERSTOOD = {"until", "do_sample", *ALWAYS, *SAMPLING}


def pictures_of(visuals: Any) -> list[Image.Image]:
    """What `doc_to_visual` returned, as RGB; None or nothing: no picture. Raises TypeError for videos and sounds."""
    for visual in visuals or ():
        if not isinstance(visual, Image.Image):
            raise TypeError(f"doc_to_visual must return PIL images, got {type(visual).__name__}: {visual!r:.80}")
    return [picture.convert("RGB") for picture in visuals or ()]


def user_message(context: str, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    """A message for a chat template.

    The pictures stand where `context` says `<image>`, if it says so once a picture; otherwise in front of it, and
    `<image>` is left out, for a processor would take it for one more picture.
    """
    texts = context.split(PLACEHOLDER)
    if len(texts) != len(pictures) + 1:
        texts = [*("" for _ in pictures), "".join(texts)]
    parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
    for picture, text in zip(pictures, texts[1:], strict=True):
        parts += [{"type": "image", "image": picture}, {"type": "text", "text": text}]
    return {"role": "user", "content": [part for part in parts if part.get("text") != ""]}


def generation_settings(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` for the generation kwargs of a task.

    A task samples if `do_sample` is true or, where it does not say, `temperature` is above 0; a temperature of 0 never
    samples. What shapes sampling is left out otherwise.
    """
    given = {key: value for key, value in asked.items() if value is not None}
    temperature = given.get("temperature")
    wanted = given.get("do_sample", temperature is not None)
    samples = bool(wanted) and temperature != 0
    keys = (*ALWAYS, *SAMPLING) if samples else ALWAYS
    return {**DEFAULTS, "do_sample": samples, **{key: given[key] for key in keys if key in given}}


def stop_strings(until: Any) -> list[str]:
    """`until` of a task: a string, several, or None. Raises TypeError for anything else."""
    strings = [until] if isinstance(until, str) else list(until or ())
    if not all(isinstance(string, str) for string in strings):
        raise TypeError(f"until must be a string or a list of strings, got {until!r}")
    return [string for string in strings if string]


def text_before(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of `stops` in it, without white space around it."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text.strip()


def stopping_criteria(tokenizer: Any, stops: Sequence[str], prompt_tokens: int) -> StoppingCriteriaList:
    """End `generate` once a row of it says one of `stops` after its prompt."""
    return StoppingCriteriaList([_Said(tokenizer, stops, prompt_tokens)] if stops else [])


class _Said(StoppingCriteria):
    """True for every row whose end says one of `stops`."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt_tokens: int) -> None:
        self.tokenizer, self.stops, self.prompt_tokens = tokenizer, stops, prompt_tokens
        self.most_tokens = 1 + max(len(stop.encode()) for stop in stops)  # a token is a byte or more

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """`input_ids` [rows, T]; returns bool [rows]."""
        start = max(self.prompt_tokens, input_ids.shape[1] - self.most_tokens)
        texts = self.tokenizer.batch_decode(input_ids[:, start:], skip_special_tokens=True)
        said = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(said, device=input_ids.device)
