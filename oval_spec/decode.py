"""Speculative decoding: a drafter proposes, the target reads that in one pass and keeps what it would have said.

texts ── draft ──> trees ── read ──> logits ── walk ──> accepted paths ── keep ──> cache
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.utils.generic import ModelOutput

from oval_core import OvalConfig, attach
from oval_core.attach import binding_of
from oval_spec.cached_model import DENSE, CachedModel
from oval_spec.drafters.base import Drafter
from oval_spec.generation import Generation, Wanted
from oval_spec.pace import Pace
from oval_spec.short_linears import quick_short_linears
from oval_spec.stats import SpeculativeStats
from oval_spec.text import Text
from oval_spec.verification import ReadingPlan, Verification

ONE_ROW = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)  # they remember rows


@dataclass
class SpeculativeOutput(ModelOutput):
    """What `speculative_generate` returns.

    Attributes:
        sequences: int64 `[B, t]`, prompts and new tokens as from `generate`, padded on the right.
        stats: what happened.
        cache: the keys and values of all but the last token of each row.
    """

    sequences: Tensor = None  # type: ignore[assignment] # what a ModelOutput asks for
    stats: SpeculativeStats = None  # type: ignore[assignment]
    cache: Any = None


def speculative_generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any],
    drafter: Drafter,
    mode: str = "exact",
    *,
    config: OvalConfig | None = None,
    reads: str = "own",
    check_every: int | None = None,
    look_every: int | None = None,
    adapt: bool = True,
    **generate: Any,
) -> SpeculativeOutput:
    """`model.generate` with drafts.

    Args:
        model: a causal or vision-language model whose layers all have full attention; attached to OVAL or not.
        inputs: token ids `[B, t]`, or what a tokenizer or processor returns; prompts are padded on the left.
        drafter: proposes how the texts go on.
        mode: "exact": the target reads its whole cache, so that greedy text is that of `model.generate` and sampled
            text has its distribution. "pages": it reads few pages, see `reads`.
        config: how the target's cache is paged and, in mode "pages", read; default `OvalConfig()`. A `cache` that is
            paged already keeps its pages and their router.
        reads: in mode "pages", what a verification reads exactly. D are the pages that the drafter expects the target
            to need, T those that the target's router chooses for its last state. "agreed": D & T, and D | T where that
            leaves too much of the attention uncovered; "union": D | T; "own": what the router chooses for the drafted
            tokens themselves.
        check_every: in mode "pages", greedy only: read densely again what was said since the last check after so many
            tokens, and at the end, and take back everything from the first difference on; the text is that of mode
            "exact" then. None: never.
        look_every: measure D and T, and what they cover, at every n-th verification, which costs a dense read; in mode
            "exact" that verification reads D & T first, then the rest of D | T, then everything else. None: never.
        adapt: draft as much as pays most, and nothing for a while where nothing pays. That is measured by the
            clock, except where the text depends on the sizes of drafts: in mode "pages", and for sampled rows that
            share a random generator.
        generate: any argument of `model.generate` but beams, scores, attentions and hidden states. A `streamer` needs
            a single row, and so do logits processors that remember the steps of all rows.

    Raises:
        TypeError, ValueError: naming what was expected and what came, before anything is generated.
    """
    if not isinstance(inputs, Tensor | Mapping):
        raise TypeError(f"inputs must be a tensor of token ids or a mapping of tensors, got {type(inputs).__name__}")
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {"inputs": inputs}
    generate = _stop_at_strings({**arguments, **generate})
    drafting = sorted({*generate} & {"assistant_model", "prompt_lookup_num_tokens"})
    if drafting:
        raise ValueError(f"speculative_generate drafts with its drafter: leave out {', '.join(drafting)}")
    method = partial(
        speculative_decoding,
        streamer=generate.pop("streamer", None),  # `generate` hands neither of these on
        synced_gpus=bool(generate.pop("synced_gpus", False)),
        drafter=drafter,
        mode=mode,
        config=config,
        reads=reads,
        check_every=check_every,
        look_every=look_every,
        adapt=adapt,
    )
    decode: Any = model.generate
    out = decode(**{**generate, "return_dict_in_generate": True, "custom_generate": method})
    assert isinstance(out, SpeculativeOutput)
    return out


def _stop_at_strings(generate: dict[str, Any]) -> dict[str, Any]:
    """Stop strings and tokenizer as a criterion: `generate` hands no tokenizer on to a `custom_generate`."""
    others = {**generate}
    tokenizer, strings = others.pop("tokenizer", None), others.pop("stop_strings", None)
    given = others.get("generation_config")
    if given is not None and given.stop_strings is not None:
        strings = given.stop_strings if strings is None else strings
        others["generation_config"] = copy.deepcopy(given)
        others["generation_config"].stop_strings = None
    if strings is None:
        return others
    if tokenizer is None:
        raise ValueError("stop_strings needs tokenizer=..., got None")
    criteria = [*(others.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
    return {**others, "stopping_criteria": criteria}


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
    reads: str = "own",
    check_every: int | None = None,
    look_every: int | None = None,
    adapt: bool = True,
    **model_kwargs: Any,
) -> SpeculativeOutput | Tensor:
    """For `model.generate(..., custom_generate=speculative_decoding, drafter=...)`; arguments as there and above.

    transformers 5.24 gives neither `streamer` nor `stop_strings` to such a function: `speculative_generate` does.

    Returns: a `SpeculativeOutput`, or only its `sequences` unless `return_dict_in_generate`.
    """
    plan = ReadingPlan(mode, reads, check_every, look_every)
    _check(model, generation_config, drafter, plan, config, synced_gpus)
    _check_rows(len(input_ids), logits_processor, streamer)
    wanted = Wanted(logits_processor, stopping_criteria, generation_config.do_sample, streamer)
    config = config or (OvalConfig() if mode == "pages" else drafter.paging or DENSE)
    attached = nullcontext() if binding_of(model) else attach(model, config)
    with torch.no_grad(), attached, quick_short_linears(model):
        target = CachedModel(model, config.for_device(model.device), model_kwargs.pop("cache", None))
        model_inputs = _prompt(model, input_ids, target, model_kwargs)
        with target.watch_hidden() if drafter.needs_hidden else nullcontext():
            by_clock = mode == "exact" and not (wanted.do_sample and len(input_ids) > 1)
            verification, pace = Verification(target, drafter, plan), Pace(drafter.most_tokens, adapt, by_clock)
            run = Generation(verification, pace, wanted, [Text(row) for row in input_ids])
            run.through(model_inputs)
    sequences = _padded([text.tokens for text in run.texts], generation_config, input_ids)
    out = SpeculativeOutput(sequences=sequences, stats=run.stats, cache=target.cache)
    return out if generation_config.return_dict_in_generate else sequences


def _check(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    drafter: Any,
    plan: ReadingPlan,
    config: Any,
    synced_gpus: bool,
) -> None:
    """Refuse what cannot work."""
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter must be an oval_spec Drafter, got {type(drafter).__name__}")
    if config is not None and not isinstance(config, OvalConfig):
        raise TypeError(f"config must be an OvalConfig or None, got {type(config).__name__}")
    if plan.check_every is not None and generation_config.do_sample:
        raise ValueError("check_every compares greedy texts, got do_sample=True")
    if model.config.is_encoder_decoder:
        raise ValueError(f"the target must be a decoder, got the encoder-decoder model {type(model).__name__}")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__}.forward takes no position_ids, which a tree of tokens needs")
    _check_generation(generation_config, synced_gpus)
    drafter.check(model)


def _check_rows(rows: int, processors: Any, streamer: Any) -> None:
    """Refuse what cannot be done for several rows, each of which goes its own way."""
    bound = sorted({type(processor).__name__ for processor in processors if isinstance(processor, ONE_ROW)})
    if rows > 1 and bound:
        raise ValueError(f"{', '.join(bound)} can only be used with one row, got {rows}")
    if rows > 1 and streamer is not None:
        raise ValueError(f"a streamer needs a single row, got {rows}")


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
    if held and len(set(target.lengths)) > 1:
        raise ValueError(f"the rows of the cache hold {target.lengths} tokens: such rows can only go on alone")
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
