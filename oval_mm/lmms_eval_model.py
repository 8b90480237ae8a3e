"""lmms-eval on a vision-language model with OVAL: `python -m lmms_eval --model oval --model_args pretrained=NAME ...`.

lmms-eval finds `manifest` by itself: it is the entry point `oval` of the group `lmms_eval.models` in `pyproject.toml`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from oval_core import OvalConfig
from oval_mm.attach import IMAGE_CONFIG, attach
from oval_mm.lmms_eval_requests import (
    UNDERSTOOD,
    generation_settings,
    pictures_of,
    stop_strings,
    stopping_criteria,
    text_before,
    user_message,
)

try:
    from lmms_eval.api.instance import GenerationResult, TokenCounts
    from lmms_eval.api.model import lmms
    from loguru import logger
except ImportError as error:
    raise ImportError('this model is run by lmms-eval: pip install "lmms-eval>=0.7.3"') from error

DTYPES = ("auto", "float32", "bfloat16", "float16")


def manifest() -> Any:
    """What lmms-eval registers: `OvalVlm` under the name `oval`."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="oval", simple_class_path=f"{__name__}.{OvalVlm.__name__}")


class OvalVlm(lmms):
    """A model of `oval_mm.models.FAMILIES` that answers the requests of lmms-eval, one at a time.

    Prompts are written by the processor's chat template. They are read dense, as `generate` does it: OVAL selects pages
    from the second token of an answer on.

    Args:
        pretrained: a local path or a hub id.
        device: default: a GPU if there is one.
        dtype: one of `DTYPES`; default: float32 on a CPU, elsewhere "auto", as the weights were stored.
        batch_size: 1.
        oval: False: the model stays dense; what concerns OVAL is checked and not used.
        block: see `oval_mm.attach`.
        settings: `router`, `budget_pages`, `budget_ratio` and all other fields of `OvalConfig`; by default router,
            shortlist and budget are those of `oval_mm.IMAGE_CONFIG`, and `stats_every` is 0: hit rates are not
            reported here.

    Attributes:
        bytes_read, bytes_dense, dense_steps: of `handle.stats()`, summed over all requests.

    Raises:
        TypeError, ValueError, OSError: an argument that is unknown or cannot work, a model that is not supported, or
            whose processor has no chat template.
    """

    is_simple = True  # requests carry `doc_to_visual`, not messages

    def __init__(
        self,
        pretrained: str,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str = 1,
        oval: bool = True,
        block: int | Literal["auto"] | None = "auto",
        **settings: Any,
    ) -> None:
        super().__init__()
        config = _config(settings)
        if str(batch_size) != "1":
            raise ValueError(f"batch_size must be 1, for requests are answered one at a time; got {batch_size!r}")
        if not isinstance(oval, bool):
            raise TypeError(f"oval must be true or false, got {oval!r}")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        weights = _dtype(dtype, self.device)
        self.processor: Any = AutoProcessor.from_pretrained(pretrained)
        if getattr(self.processor, "chat_template", None) is None:
            raise ValueError(f"the processor of {pretrained} has no chat template: how to ask is not known")
        model: Any = AutoModelForImageTextToText.from_pretrained(pretrained, dtype=weights)
        self.model: Any = model.eval().to(self.device)
        self._handle = attach(self.model, self.processor, config, block) if oval else None
        self.bytes_read = self.bytes_dense = 0
        self.dense_steps: Counter[str] = Counter()

    @property
    def read_ratio(self) -> float | None:
        """Bytes read over those that dense attention reads, all requests; None: OVAL is off or nothing was decoded."""
        return self.bytes_read / self.bytes_dense if self.bytes_dense else None

    def generate_until(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests with the arguments `(context, generation_kwargs, doc_to_visual, doc_id, task, split)`.

        The read ratio is logged at the end; in lmms-eval's results it is `throughput.avg_read_ratio`. Generation kwargs
        that are not used, because they are not in `UNDERSTOOD`, are named in a warning.

        Returns: a `GenerationResult` each, with the text before the first string of `until` and the tokens counted.

        Raises:
            TypeError: a picture is not an image, or `until` is not made of strings.
        """
        if unused := {key for request in requests for key in request.args[1]} - UNDERSTOOD:
            logger.warning(f"generation kwargs that are not used: {', '.join(sorted(unused))}")
        begin = time.perf_counter()
        results = [self._answer(*request.args) for request in tqdm(requests, desc="oval", disable=self.rank != 0)]
        self._report(time.perf_counter() - begin, sum(result.token_counts.output_tokens for result in results))
        return results

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Not supported: lmms-eval 0.7.3 turns the pairs of any model into text and then fails to score them."""
        raise NotImplementedError(
            "lmms-eval 0.7.3 cannot score log-likelihoods, the model oval gives none: choose a task with output_type "
            "generate_until"
        )

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Not supported."""
        raise NotImplementedError("the model oval answers in one round: choose a task with output_type generate_until")

    def clean(self) -> None:
        """Take OVAL off and let go of the model; lmms-eval calls this after the last request."""
        if self._handle is not None:
            self._handle.detach()
        self._handle = None
        super().clean()

    def _answer(self, context: str, asked: Mapping[str, Any], doc_to_visual: Any, doc_id: int, *where: str) -> Any:
        task, split = where
        message = user_message(context, pictures_of(doc_to_visual(self.task_dict[task][split][doc_id])))
        inputs = self.processor.apply_chat_template(
            [message], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        inputs = inputs.to(self.device, self.model.dtype)
        tokenizer, prompt_tokens = self.processor.tokenizer, inputs["input_ids"].shape[1]
        stops = stop_strings(asked.get("until"))
        criteria = stopping_criteria(tokenizer, stops, prompt_tokens)
        output = self.model.generate(**inputs, **generation_settings(asked), stopping_criteria=criteria)
        self._count()
        tokens = output[0, prompt_tokens:].tolist()
        text = text_before(tokenizer.decode(tokens, skip_special_tokens=True), stops)
        return GenerationResult(text, TokenCounts(input_tokens=prompt_tokens, output_tokens=len(tokens)))

    def _count(self) -> None:
        """Add what the last answer read."""
        if self._handle is not None:
            stats = self._handle.stats()
            self.bytes_read += stats["bytes_read"]
            self.bytes_dense += stats["bytes_dense"]
            self.dense_steps.update(stats["dense_steps"])

    def _report(self, elapsed_s: float, tokens: int) -> None:
        from lmms_eval.models.model_utils.gen_metrics import log_metrics  # loads the manifest: not while this is loaded

        read: dict[str, Any] = {} if self.read_ratio is None else {"read_ratio": self.read_ratio}
        if self._handle is not None:
            read["dense_steps"] = dict(self.dense_steps)
        log_metrics(elapsed_s, tokens, tokens / elapsed_s if elapsed_s else 0.0, read or None)


def _config(settings: Mapping[str, Any]) -> OvalConfig:
    """Of the arguments that are not the model's own."""
    known = [field.name for field in fields(OvalConfig)]
    if unknown := settings.keys() - set(known):
        own = ["pretrained", "device", "dtype", "batch_size", "oval", "block"]
        raise TypeError(f"unknown model_args: {', '.join(sorted(unknown))}; known are {', '.join(own + known)}")
    budget = {} if "budget_pages" in settings else {"budget_ratio": IMAGE_CONFIG.budget_ratio}
    usual = {"router": IMAGE_CONFIG.router, "shortlist_ratio": IMAGE_CONFIG.shortlist_ratio, "stats_every": 0}
    return OvalConfig(**{**usual, **budget, **settings})


def _dtype(name: str | None, device: torch.device) -> Any:
    """What `from_pretrained` takes."""
    if name is None:
        name = "float32" if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return name if name == "auto" else getattr(torch, name)
