"""Speculative decoding: a drafter proposes, the target reads that in one pass and keeps what it would have said.

texts ── draft ──> trees ── read ──> logits ── walk ──> accepted paths ── keep ──> cache
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StopStringCriteria
from transformers.utils.generic import ModelOutput

from oval_core import OvalConfig, attach
from oval_core.attach import is_attached
from oval_spec.cached_model import DENSE, CachedModel, dense
from oval_spec.drafters.base import Drafter, Seen, check_count
from oval_spec.pace import Pace
from oval_spec.stats import SpeculativeStats
from oval_spec.text import Text
from oval_spec.tree import Tree
from oval_spec.verify import Choose, Stop, Walk, make_choose, make_stop, walk

MODES = ("exact", "pages")


@dataclass
class SpeculativeOutput(ModelOutput):
    """What `speculative_generate` returns.

    Attributes:
        sequences: int64 `[B, t]`, prompts and new tokens as from `generate`, padded on the right.
        stats: what happened.
        cache: the keys and values of all but the last token of each row.
    """

    sequences: Tensor | None = None
    stats: SpeculativeStats | None = None
    cache: Any = None


def speculative_generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    drafter: Drafter,
    mode: str = "exact",
    *,
    config: OvalConfig | None = None,
    check_every: int | None = None,
    adapt: bool = True,
    **generate: Any,
) -> SpeculativeOutput:
    """`model.generate` with drafts.

    Args:
        model: a causal or vision-language model whose layers all have full attention; attached to OVAL or not.
        inputs: token ids `[B, t]`, or what a tokenizer or processor returns; prompts are padded on the left.
        drafter: proposes how the texts go on.
        mode: "exact": the target reads its whole cache, so that greedy text is that of `model.generate` and sampled
            text has its distribution. "pages": it reads the pages that `config` grants.
        config: how the target's cache is paged and, in mode "pages", read; default `OvalConfig()`.
        check_every: in mode "pages", greedy only: read densely again what was said since the last check after so many
            tokens, and at the end, and take back everything from the first difference on; the text is that of mode
            "exact" then. None: never.
        adapt: draft less, and then nothing for a while, where drafts keep being refused.
        generate: any argument of `model.generate` but beams, scores, attentions and hidden states.

    Raises:
        TypeError, ValueError: naming what was expected and what came, before anything is generated.
    """
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {"inputs": inputs}
    generate = {**arguments, **generate}
    tokenizer, stop_strings = generate.pop("tokenizer", None), generate.pop("stop_strings", None)
    if stop_strings is not None:  # `generate` hands neither them nor a streamer to a `custom_generate`
        if tokenizer is None:
            raise ValueError("stop_strings needs tokenizer=..., got None")
        criterion = StopStringCriteria(tokenizer, stop_strings)
        generate["stopping_criteria"] = [*(generate.get("stopping_criteria") or []), criterion]
    method = partial(
        speculative_decoding,
        streamer=generate.pop("streamer", None),
        drafter=drafter,
        mode=mode,
        config=config,
        check_every=check_every,
        adapt=adapt,
    )
    decode: Any = model.generate
    out = decode(**generate, return_dict_in_generate=True, custom_generate=method)
    assert isinstance(out, SpeculativeOutput)
    return out


def speculative_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    drafter: Drafter,
    mode: str = "exact",
    config: OvalConfig | None = None,
    check_every: int | None = None,
    adapt: bool = True,
    **model_kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """For `model.generate(..., custom_generate=speculative_decoding, drafter=...)`; arguments as there and above.

    transformers 5.24 gives neither `streamer` nor `stop_strings` to such a function: `speculative_generate` does.

    Returns: a `SpeculativeOutput`, or only its `sequences` unless `return_dict_in_generate`.
    """
    _check(model, generation_config, drafter, mode, config, check_every, synced_gpus)
    config = config or (OvalConfig() if mode == "pages" else drafter.paging or DENSE)
    cache = model_kwargs.pop("cache", None)
    with torch.no_grad(), ExitStack() as undo:
        if not is_attached(model):
            undo.enter_context(attach(model, config))
        target = CachedModel(model, config.for_device(model.device), cache)
        if drafter.needs_hidden:
            undo.enter_context(target.watch_hidden())
        if streamer is not None:
            streamer.put(input_ids.cpu())
        model_inputs = _prompt(model, input_ids, target, model_kwargs)
        pace, checks = Pace(drafter.most_tokens, adapt), check_every
        settings = _Settings(logits_processor, make_stop(stopping_criteria), generation_config.do_sample, mode, checks)
        run = _Generation(target, drafter, pace, settings, [Text(row) for row in input_ids], streamer)
        run.begin(model_inputs, getattr(stopping_criteria, "max_length", None), undo)
        run.to_the_end()
    sequences = _padded([text.tokens for text in run.texts], generation_config, input_ids)
    out = SpeculativeOutput(sequences=sequences, stats=run.stats, cache=target.cache)
    return out if generation_config.return_dict_in_generate else sequences


@dataclass(frozen=True)
class _Settings:
    processors: Any
    stop: Stop
    do_sample: bool
    mode: str
    check_every: int | None


class _Generation:
    """The texts on their way.

    A running row's cache holds all of its text but the root, its last token.
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter,
        pace: Pace,
        settings: _Settings,
        texts: list[Text],
        streamer: Any,
    ) -> None:
        self.target, self.drafter, self.pace, self.settings = target, drafter, pace, settings
        self.texts, self.running, self.stats = texts, [True] * len(texts), SpeculativeStats()
        self._streamer, self._streamed = streamer, len(texts[0])
        self._hidden: Tensor | None = None
        self._most_tokens: int | None = None
        self._checked = [len(text) for text in texts]  # tokens of each text that will not be taken back
        self._uncached = 0  # tokens that the cache holds and the texts do not, when the prompt is embeddings

    def begin(self, model_inputs: dict[str, Any], most_tokens: int | None, undo: ExitStack) -> None:
        """Read the prompt, start the drafter, choose the first token."""
        self._most_tokens = most_tokens
        with self.stats.timed("prefill"):
            logits = self.target.prefill(model_inputs)
            undo.enter_context(self.drafter.begin(self.target, model_inputs, self.texts))
        self._uncached = self.target.lengths[0] - len(self.texts[0])
        self._follow([Tree()] * len(self.texts), logits[:, None])
        self._checked = [len(text) for text in self.texts]

    def to_the_end(self) -> None:
        """All steps."""
        while any(self.running):
            self._step(self._draft())
            if self._check_is_due():
                self._check()
            self._stream()
        if self._streamer is not None:
            self._streamer.end()

    def _draft(self) -> list[Tree]:
        """The next trees, no deeper than a text may become longer."""
        size = self.pace.next_size()
        none = [Tree()] * len(self.texts)
        if not size:
            return none
        with self.stats.timed("draft"):
            trees = self.drafter.draft(Seen(self.texts, self.running, self._hidden), size)
        if self._most_tokens is not None:
            room = [self._most_tokens - len(text) - 1 for text in self.texts]
            trees = [tree.down_to(left) for tree, left in zip(trees, room, strict=True)]
        return [tree.truncated(size) if goes_on else Tree() for tree, goes_on in zip(trees, self.running, strict=True)]

    def _step(self, trees: list[Tree]) -> None:
        """One pass of the target; the texts grow."""
        sparse = self.settings.mode == "pages"
        paths = self._verify(trees, nullcontext() if sparse else self._densely(), "verify")
        drafted = [(tree, path) for tree, path in zip(trees, paths, strict=True) if path is not None and len(tree)]
        for tree, path in drafted:
            self.stats.count(tree, path)
        if drafted:
            self.pace.record(sum(len(path) for _, path in drafted) / len(drafted))

    def _verify(self, trees: list[Tree], how: AbstractContextManager[Any], phase: str) -> list[list[int] | None]:
        """Read the trees, follow them, keep the paths; those, None for a row that had ended before."""
        with self.stats.timed(phase), how:
            logits = self.target.read([text.tokens[-1] for text in self.texts], trees)
            paths = self._follow(trees, logits)
            self.target.keep(max(map(len, trees)), paths)
        self.stats.steps += 1
        return paths

    def _follow(self, trees: Sequence[Tree], logits: Tensor) -> list[list[int] | None]:
        """Let every running text grow along its tree."""
        walks: list[Walk | None] = []
        for row, (tree, text) in enumerate(zip(trees, self.texts, strict=True)):
            before = len(text)
            walks.append(walk(tree, text, self._choose(logits[row]), self.settings.stop) if self.running[row] else None)
            self.stats.tokens += len(text) - before
        self.running = [found is not None and not found.stopped for found in walks]
        if self.target.hidden is not None:
            last = torch.tensor([0 if found is None else 1 + found.last for found in walks], device=logits.device)
            self._hidden = self.target.hidden[torch.arange(len(walks), device=logits.device), last]
        return [None if found is None else found.path for found in walks]

    def _choose(self, logits: Tensor) -> Choose:
        return make_choose(logits, self.settings.processors, self.settings.do_sample)

    def _densely(self) -> AbstractContextManager[None]:
        return self.target.reading(dense(self.target.config))

    def _check_is_due(self) -> bool:
        every = self.settings.check_every
        if every is None:
            return False
        unchecked = [len(text) - checked for text, checked in zip(self.texts, self._checked, strict=True)]
        ended = [count for count, goes_on in zip(unchecked, self.running, strict=True) if not goes_on]
        return max(unchecked) >= every or any(ended)

    def _check(self) -> None:
        """Read densely what was said since the last check: the draft is what the pages made the target say."""
        trees, self.running = (
            [],
            [
                len(text) > checked or goes_on
                for text, checked, goes_on in zip(self.texts, self._checked, self.running, strict=True)
            ],
        )
        for text, checked in zip(self.texts, self._checked, strict=True):
            trees.append(Tree.chain(text.tokens[checked:]))
            self.stats.tokens -= len(text) - checked
            text.crop(checked)
        self.target.crop(
            [
                self._uncached + checked - 1 if goes_on else have
                for checked, goes_on, have in zip(self._checked, self.running, self.target.lengths, strict=True)
            ]
        )
        paths = self._verify(trees, self._densely(), "check")
        for tree, path in zip(trees, paths, strict=True):
            self.stats.checked += len(tree)
            self.stats.retracted += len(tree) - len(path or [])
        self._checked = [len(text) for text in self.texts]

    def _stream(self) -> None:
        """Hand over the tokens that are going to stay."""
        if self._streamer is None:
            return
        settled = self._checked[0] if self.settings.check_every is not None else len(self.texts[0])
        for token in self.texts[0].tokens[self._streamed : settled]:
            self._streamer.put(torch.tensor([token]))
        self._streamed = settled


def _check(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    drafter: Any,
    mode: str,
    config: Any,
    check_every: int | None,
    synced_gpus: bool,
) -> None:
    """Refuse what cannot work."""
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter must be an oval_spec Drafter, got {type(drafter).__name__}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    if config is not None and not isinstance(config, OvalConfig):
        raise TypeError(f"config must be an OvalConfig or None, got {type(config).__name__}")
    if check_every is not None:
        check_count("check_every", check_every)
        if mode != "pages" or generation_config.do_sample:
            raise ValueError(
                "check_every compares greedy text of mode 'pages' with a dense read: "
                f"got mode={mode!r}, do_sample={generation_config.do_sample}"
            )
    if model.config.is_encoder_decoder:
        raise ValueError(f"the target must be a decoder, got the encoder-decoder model {type(model).__name__}")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__}.forward takes no position_ids, which a tree of tokens needs")
    _check_generation(generation_config, synced_gpus)
    drafter.check(model)


def _check_generation(generation_config: GenerationConfig, synced_gpus: bool) -> None:
    if generation_config.num_beams > 1:
        raise ValueError(f"speculative decoding needs num_beams=1, got {generation_config.num_beams}")
    if synced_gpus:
        raise ValueError("speculative decoding cannot run with synced_gpus: devices accept different numbers of tokens")
    if not generation_config.use_cache:
        raise ValueError("speculative decoding needs use_cache=True, got False")
    wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = [name for name in wanted if getattr(generation_config, name)]
    if asked:
        raise ValueError(f"speculative decoding does not return {', '.join(asked)}")


def _prompt(
    model: PreTrainedModel, input_ids: Tensor, target: CachedModel, model_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of the first pass. What a filled cache holds already is left out."""
    held = target.cache.get_seq_length()
    new = input_ids.shape[1] - held if held else None
    if new is not None and new < 1:
        raise ValueError(
            f"the prompt has {input_ids.shape[1]} tokens and the cache holds {held}: nothing is left to read"
        )
    prepare: Any = model.prepare_inputs_for_generation
    inputs: dict[str, Any] = prepare(
        input_ids, next_sequence_length=new, is_first_iteration=True, cache=target.cache, **model_kwargs
    )
    return inputs


def _padded(texts: Sequence[Sequence[int]], generation_config: GenerationConfig, like: Tensor) -> Tensor:
    """Rows as long as the longest, filled up with the padding token."""
    longest = max(map(len, texts))
    pad = getattr(generation_config, "_pad_token_tensor", None)
    filler = generation_config.pad_token_id if pad is None else int(pad)
    rows = [[*text, *[filler or 0] * (longest - len(text))] for text in texts]
    return torch.tensor(rows, dtype=like.dtype, device=like.device)
