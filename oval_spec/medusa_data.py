"""What Medusa heads learn from: texts, how the target goes on with them, and its hidden states over both.

prompts cut from texts ── generate ──> rows ── one pass of the target ──> hidden states and labels
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from oval_core.checks import check_count
from oval_core.training.state import StateFile, interrupts_wait
from oval_spec.cached_model import watch_head
from oval_spec.medusa_heads import IGNORED, labels_for

NOTHING = -1  # in place of a token, where a text has ended


@dataclass(frozen=True)
class DataSettings:
    """How much text, and how the target goes on with it.

    Args:
        tokens: to learn from, about; prompts and what follows them.
        prompt_tokens: of each prompt, with what frames it.
        new_tokens: that the target says after each prompt, at most.
        temperature: of what it says to learn from; 0: greedily. What is held out is always greedy.
        held_out: share of every text that nothing is learned from, and of the prompts that come from there.
        rows: prompts at a time.
        seed: of what is drawn.

    Raises:
        TypeError, ValueError: one is out of range.
    """

    tokens: int = 150_000
    prompt_tokens: int = 64
    new_tokens: int = 128
    temperature: float = 0.0
    held_out: float = 0.05
    rows: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "prompt_tokens", "new_tokens", "rows"):
            check_count(name, getattr(self, name))
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be between 0 and 1, got {self.held_out}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")


class Lessons(NamedTuple):
    """Positions to learn from, or to measure on.

    Args:
        hidden: what the target's head got, `[N, hidden]`, in the target's dtype.
        labels: what each Medusa head should say, int64 `[N, heads]`; `IGNORED` where nothing is known.
    """

    hidden: Tensor
    labels: Tensor


class Frame(NamedTuple):
    """Token ids that stand before and after a passage: nothing, or a chat in which someone asks about it."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def cut_prompts(
    texts: Mapping[str, Tensor], settings: DataSettings, frames: Sequence[Frame] = (Frame(),)
) -> tuple[Tensor, Tensor]:
    """Prompts to learn from, and held-out ones from the ends of the texts, evenly spread over them.

    Args:
        texts: token ids `[t]` by name.
        settings: how many, and how long.
        frames: what passages are put into, in turn.

    Returns: int64 `[N, prompt_tokens]`, and the same with another N.

    Raises:
        ValueError: no texts, one too short for a prompt on both sides, or frames that leave no room for a passage.
    """
    if not texts:
        raise ValueError("texts must hold at least one text, got none")
    window, learned, kept = settings.prompt_tokens, [], []
    longest = max(len(frame.before) + len(frame.after) for frame in frames)
    if longest >= window:
        raise ValueError(f"prompt_tokens must be more than the {longest} of the longest frame, got {window}")
    for name, text in texts.items():
        held = max(window, round(settings.held_out * len(text)))
        if len(text) < held + window:
            raise ValueError(f"{name}: expected at least {held + window} tokens for two prompts, got {len(text)}")
        learned.append(text[:-held])
        kept.append(text[-held:])
    count = math.ceil(settings.tokens / (window + settings.new_tokens))
    return _windows(learned, count, window, frames), _windows(kept, round(settings.held_out * count), window, frames)


def _windows(texts: Sequence[Tensor], count: int, window: int, frames: Sequence[Frame]) -> Tensor:
    """About `count` windows, at least one of each text."""
    total, found = sum(map(len, texts)), []
    for text in texts:
        starts = torch.linspace(0, len(text) - window, max(1, round(count * len(text) / total))).long()
        found.append(text.unfold(0, window, 1)[starts])
    rows = torch.cat(found)
    for number, (before, after) in enumerate(frames):
        framed = rows[number :: len(frames)]  # a view
        framed[:, : len(before)] = torch.tensor(before, dtype=torch.long)
        framed[:, window - len(after) :] = torch.tensor(after, dtype=torch.long)
    return rows


def go_on(
    model: PreTrainedModel, prompts: Tensor, settings: DataSettings, temperature: float, state: StateFile
) -> Tensor:
    """What the target says after every prompt; kept in `state`, from which an interrupted call goes on.

    Args:
        model: the target.
        prompts: int64 `[N, p]`.
        settings: see there.
        temperature: 0: greedily.
        state: where to keep it.

    Returns: int64 `[N, p + new_tokens]`, prompts included, `NOTHING` behind the end of a text.

    Raises:
        ValueError: `state` belongs to other settings.
        KeyboardInterrupt: Ctrl-C; what was said is saved.
    """
    batches, saved = prompts.split(settings.rows), state.load()
    done: list[Tensor] = list(saved["batches"]) if saved else []
    if len(done) == len(batches):
        return torch.cat(done)
    bar = tqdm(total=len(prompts), initial=sum(map(len, done)), desc=state.path.stem, unit="text")
    with bar, interrupts_wait() as interrupted:
        for number in range(len(done), len(batches)):
            done.append(_said_after(model, batches[number], settings, temperature, settings.seed + number))
            bar.update(len(batches[number]))
            state.after_step(lambda: {"batches": done}, interrupted())
    state.save({"batches": done})
    return torch.cat(done)


def _said_after(
    model: PreTrainedModel, prompts: Tensor, settings: DataSettings, temperature: float, seed: int
) -> Tensor:
    """One batch of `go_on`."""
    config: Any = model.generation_config
    ends = torch.tensor([] if config.eos_token_id is None else config.eos_token_id, dtype=torch.long).reshape(-1)
    filler = next((token for token in (config.pad_token_id, *ends.tolist()) if token is not None), 0)
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    generate: Any = model.generate
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found = generate(
            prompts.to(model.device),
            attention_mask=torch.ones_like(prompts).to(model.device),
            max_new_tokens=settings.new_tokens,
            pad_token_id=filler,
            **how,
        ).cpu()
    rows = torch.full((len(prompts), prompts.shape[1] + settings.new_tokens), NOTHING)
    rows[:, : found.shape[1]] = found
    is_end = torch.isin(rows[:, prompts.shape[1] :], ends).long()
    rows[:, prompts.shape[1] :][is_end.cumsum(1) > is_end] = NOTHING
    return rows


def words_of(rows: Tensor) -> Tensor:
    """The tokens of such rows, int64 `[W]` in ascending order."""
    return rows[rows != NOTHING].unique()


@torch.no_grad()
def read_lessons(
    model: PreTrainedModel, rows: Tensor, heads: int, settings: DataSettings, held_out: bool = False
) -> Lessons:
    """Let the target read whole rows. Labels are the text itself inside of prompts, and what the target would say
    greedily behind them.

    Args:
        model: the target.
        rows: as `go_on` makes them.
        heads: how many.
        settings: those that the rows were made with.
        held_out: only positions at which the target speaks and every head has a label.

    Returns: `[N, ..]`, on the CPU.

    Raises:
        ValueError: no position is left.
    """
    hidden, labels, seen = list[Tensor](), list[Tensor](), list[Tensor]()
    begin = rows.shape[1] - settings.new_tokens
    bar = tqdm(rows.split(settings.rows), desc="read held-out" if held_out else "read", unit="batch")
    with watch_head(model, seen.append):
        for batch in bar:
            logits = model(input_ids=batch.clamp_min(0).to(model.device), use_cache=False).logits
            found = _labels(batch, logits.argmax(-1).cpu(), begin, heads)
            known = found != IGNORED
            wanted = known.all(-1) if held_out else known.any(-1)
            wanted[:, : begin - 1 if held_out else 0] = False
            hidden.append(seen.pop().cpu()[wanted])
            labels.append(found[wanted])
    if not sum(map(len, labels)):
        raise ValueError(f"the model ends its texts before {heads + 1} tokens: nothing is left to learn from")
    return Lessons(torch.cat(hidden), torch.cat(labels))


def _labels(rows: Tensor, said: Tensor, begin: int, heads: int) -> Tensor:
    """What each head should say at every position, int64 `[B, t, heads]`.

    Args:
        rows: `[B, t]`.
        said: the target's choice of the next token at every position `[B, t]`.
        begin: tokens of the prompts.
        heads: how many.
    """
    own = rows.clone()
    own[:, begin:] = said[:, begin - 1 : -1]
    own[rows == NOTHING] = IGNORED
    return torch.stack([labels_for(own, head) for head in range(heads)], dim=-1)
