"""Train Medusa heads on a frozen target by letting it teach them what it says itself.

    python -m oval_spec.medusa_training --model NAME --text FILE [FILE ...] --out DIR

The target goes on with prompts cut from the texts; heads learn the prompts and, above all, what follows them, and
choose among the tokens that occur there. The loss is the cross-entropy of the target's tokens, mean over the heads with
weights 1, 0.8, 0.64, ... An interrupted run goes on where it stopped if the same command is given again. What is
printed at the end is measured where the target goes on greedily with held-out ends of the texts:

    loss    that loss
    top-1   by head, how often its best candidate is what the target says
    top-5   by head, how often that is among its five best
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from oval_core.checks import check_count, check_positive
from oval_core.training.state import (
    Content,
    StateFile,
    interrupts_wait,
    make_accelerator,
    require_same,
    settings_from,
    share_of_rate,
    write_whole,
)
from oval_core.training.texts import read_texts, tokens_of
from oval_spec.cached_model import head_of
from oval_spec.medusa_data import DataSettings, Frame, Lessons, cut_prompts, go_on, read_lessons, words_of
from oval_spec.medusa_heads import MedusaHeads, name_of
from oval_spec.medusa_learning import Measured, drawn, learn, measure

RECORD_FILE, STATE_FILE = "training.json", "training.pt"
LARGEST_GRADIENT = 1.0
PASSAGE = "{a passage}"  # stands for it while the chat template is taken apart


@dataclass(frozen=True)
class TrainingSettings:
    """Which heads, and how long they learn.

    Args:
        heads: how many.
        blocks: residual blocks of each.
        own_heads: with output heads of their own.
        steps: of the optimizer.
        batch: positions a step.
        rate: highest learning rate.

    Raises:
        TypeError, ValueError: one is out of range.
    """

    heads: int = 4
    blocks: int = 1
    own_heads: bool = False
    steps: int = 1000
    batch: int = 512
    rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("heads", "blocks", "steps", "batch"):
            check_count(name, getattr(self, name))
        check_positive("rate", self.rate)


def train_medusa(
    out: Path,
    model: PreTrainedModel,
    texts: Mapping[str, Tensor],
    data: DataSettings | None = None,
    training: TrainingSettings | None = None,
    frames: Sequence[Frame] = (Frame(),),
) -> Measured:
    """Train heads, or finish training them, and leave them in `out`; what they can do.

    Nothing is done where `out` already holds them. After an interruption the same call goes on where it stopped and
    comes to the same weights.

    Args:
        out: folder for the heads, and for the state of the training until then.
        model: the target, in eval mode; left as it is.
        texts: token ids `[t]` by name.
        data, training: default settings if None.
        frames: what passages of the texts are put into, in turn, to make prompts.

    Raises:
        ValueError: a text is too short, `new_tokens` are too few for the heads, or `out` holds a training with other
            settings.
        KeyboardInterrupt: Ctrl-C; what was reached is saved.
    """
    data, training = data or DataSettings(), training or TrainingSettings()
    if data.new_tokens <= training.heads:
        raise ValueError(f"{training.heads} heads need new_tokens > {training.heads}, got {data.new_tokens}")
    source: Content = {"model": name_of(model), "texts": _digests(texts)}
    source |= {"frames": [[*map(list, frame)] for frame in frames], **dataclasses.asdict(data)}
    about, record = source | dataclasses.asdict(training), out / RECORD_FILE
    if record.exists():
        found = json.loads(record.read_text())
        require_same(about, found["about"], out)
        return Measured(**found["measured"])
    with _frozen(model):
        run = _Run(model, training, data.seed, StateFile(out / STATE_FILE, about))
        learned, held_out, words = _lessons(out, model, cut_prompts(texts, data, frames), data, training.heads, source)
        run.through(learned, words)
        measured = measure(run.heads, head_of(model), held_out, words)
    run.finish(record, measured, words)
    return measured


def _digests(texts: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16] for name, text in texts.items()}


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """No parameter of the model has a gradient, inside the `with` block."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()


def _lessons(
    out: Path,
    model: PreTrainedModel,
    prompts: tuple[Tensor, Tensor],
    data: DataSettings,
    heads: int,
    source: Content,
) -> tuple[Lessons, Lessons, Tensor]:
    """To learn from, held out, and the tokens that occur; what the target said is kept in `out`."""
    rows = [
        go_on(model, some, data, temperature, StateFile(out / f"{name}.pt", source, every_s=30))
        for some, name, temperature in zip(prompts, ("said", "said_held_out"), (data.temperature, 0.0), strict=True)
    ]
    learned = read_lessons(model, rows[0], heads, data)
    return learned, read_lessons(model, rows[1], heads, data, held_out=True), words_of(rows[0])


class _Run:
    """Heads on their way, and what is needed to go on with them."""

    def __init__(self, model: PreTrainedModel, settings: TrainingSettings, seed: int, state: StateFile) -> None:
        self.settings, self.seed, self.state, self.step = settings, seed, state, 0
        self.accelerator, self.lm_head = make_accelerator(), head_of(model)
        heads = MedusaHeads.for_target(model, settings.heads, settings.blocks, settings.own_heads)
        self.heads = heads.to(model.device)
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=settings.rate, weight_decay=0.0)
        saved = state.load()
        if saved:
            self.step = saved["step"]
            self.heads.load_state_dict(saved["heads"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def through(self, lessons: Lessons, words: Tensor) -> None:
        """Take all steps that are left, among the tokens `words`."""
        bar = tqdm(total=self.settings.steps, initial=self.step, desc="Medusa heads", unit="step")
        with bar, interrupts_wait() as interrupted:
            while self.step < self.settings.steps:
                chosen = drawn(self.step, len(lessons.hidden), self.settings.batch, self.seed)
                loss = self._advance(Lessons(lessons.hidden[chosen], lessons.labels[chosen]), words)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update()
                self.state.after_step(self._content, interrupted())

    def finish(self, record: Path, measured: Measured, words: Tensor) -> None:
        """Leave heads and record beside each other, and no state."""
        self.heads.accuracies, self.heads.words = measured.accuracies, words
        self.heads.save(record.parent)
        content = {"about": self.state.about, "measured": dataclasses.asdict(measured)}
        write_whole(record, lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))
        self.state.remove()
        print(f"Medusa heads after {self.step} steps, held out: {measured}")

    def _advance(self, lessons: Lessons, words: Tensor) -> float:
        """One step; its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate * share_of_rate(self.step, self.settings.steps)
        device = self.heads.weight.device
        hidden, labels, words = (tensor.to(device) for tensor in (*lessons, words))
        loss = learn(self.heads, self.lm_head, hidden, labels, self.accelerator, words)
        self.accelerator.clip_grad_norm_(self.heads.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss

    def _content(self) -> Content:
        return {"step": self.step, "heads": self.heads.state_dict(), "optimizer": self.optimizer.state_dict()}


def main(arguments: list[str] | None = None) -> None:
    """Train; see `--help`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _train(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on where this one stopped")


def _train(options: argparse.Namespace) -> None:
    data, training = settings_from(DataSettings, options), settings_from(TrainingSettings, options)
    texts = read_texts(options.text)
    device = make_accelerator().device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = tokens_of(texts, tokenizer)
    train_medusa(options.out, model, tokens, data, training, _frames(tokenizer, options.instruction))


def _frames(tokenizer: Any, instructions: Sequence[str]) -> list[Frame]:
    """Bare passages, and chats in which a passage is followed by an instruction."""
    frames = [Frame(before=tuple(tokenizer("")["input_ids"]))]
    for instruction in instructions:
        words = f"{PASSAGE}\n\n{instruction}"
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": words}], tokenize=False, add_generation_prompt=True
        )
        sides = [tokenizer(side, add_special_tokens=False)["input_ids"] for side in chat.split(PASSAGE)]
        frames.append(Frame(*map(tuple, sides)))
    return frames


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m oval_spec.medusa_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data, training, add = DataSettings(), TrainingSettings(), parser.add_argument
    shown = "(default: %(default)s)"
    add("--model", required=True, help="folder or name of the target")
    add("--text", type=Path, nargs="+", required=True, help="text files, UTF-8")
    add("--instruction", nargs="+", default=[], help="to put after passages, as chats, in turn with bare passages")
    add("--out", type=Path, required=True, help="folder to write into")
    add("--heads", type=int, default=training.heads, help=f"how many {shown}")
    add("--blocks", type=int, default=training.blocks, help=f"residual blocks of each {shown}")
    add("--own-heads", action="store_true", help="output heads of their own instead of the target's")
    add("--steps", type=int, default=training.steps, help=f"of the optimizer {shown}")
    add("--batch", type=int, default=training.batch, help=f"positions a step {shown}")
    add("--rate", type=float, default=training.rate, help=f"highest learning rate {shown}")
    add("--tokens", type=int, default=data.tokens, help=f"to learn from, prompts included {shown}")
    add("--prompt-tokens", type=int, default=data.prompt_tokens, help=f"of each prompt {shown}")
    add("--new-tokens", type=int, default=data.new_tokens, help=f"that the target says after each {shown}")
    add("--temperature", type=float, default=data.temperature, help=f"of what it says; 0: greedy {shown}")
    add("--held-out", type=float, default=data.held_out, help=f"share of the texts to measure on {shown}")
    add("--rows", type=int, default=data.rows, help=f"prompts at a time {shown}")
    add("--seed", type=int, default=data.seed, help=shown)
    return parser


if __name__ == "__main__":
    main()
