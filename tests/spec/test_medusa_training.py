import dataclasses
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import cross_entropy

from oval_core.training.state import StateFile
from oval_spec import MedusaDrafter, MedusaHeads, medusa_data, medusa_learning, medusa_training, speculative_generate
from oval_spec.cached_model import head_of, watch_head
from oval_spec.medusa_data import NOTHING, DataSettings, Frame, cut_prompts, go_on, read_lessons
from oval_spec.medusa_heads import IGNORED
from oval_spec.medusa_learning import Measured, conditional, drawn, learn
from oval_spec.medusa_training import RECORD_FILE, TrainingSettings, _frames, train_medusa
from tests.core.tiny_models import llama, prompt
from tests.spec.counting_model import CYCLE, FIRST, LAST, after, counted, counting_model
from tests.spec.test_medusa_heads import HIDDEN, random_heads
from tests.tiny_checkpoint import save_tiny_checkpoint

DATA = DataSettings(tokens=400, prompt_tokens=6, new_tokens=14, held_out=0.2, rows=4)
TRAINING = TrainingSettings(heads=3, steps=6, batch=32)
TEXTS = {"one": prompt(150)[0], "two": prompt(90, seed=1)[0]}


def _train(out: Path, texts: Mapping[str, Tensor] = TEXTS, **training: Any) -> Measured:
    return train_medusa(out, llama(), texts, DATA, dataclasses.replace(TRAINING, **training))


def test_heads_learn_the_token_that_is_as_far_ahead_as_they_look(tmp_path: Path) -> None:
    model, count = counting_model(), 3
    settings = TrainingSettings(heads=count, steps=80, batch=64, rate=2e-2)
    measured = train_medusa(tmp_path, model, {"counted": counted(200)}, DATA, settings)
    heads, ids = MedusaHeads.load(tmp_path), torch.arange(FIRST, LAST + 1)[None]
    seen: list[Tensor] = []
    with torch.no_grad(), watch_head(model, seen.append):
        model(ids)
    said = heads.logits(heads.states(seen[0][0]), head_of(model)).argmax(-1)
    assert said.tolist() == [[after(token, 2 + head) for token in ids[0].tolist()] for head in range(count)]
    assert measured.top1 == measured.top5 == [1.0] * count
    assert heads.accuracies == measured.accuracies
    assert [shares[0] for shares in measured.accuracies] == [1.0] * count
    out = speculative_generate(
        model, counted(CYCLE)[None], MedusaDrafter(heads), max_new_tokens=25, do_sample=False, adapt=False
    )
    assert out.stats is not None
    assert out.stats.accepted_mean == count


def _interrupt_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int) -> None:
    """Press Ctrl-C in a certain call of a function."""
    real: Callable[..., Any] = getattr(module, name)
    calls = iter(range(call + 1))

    def pressed(*arguments: Any) -> Any:
        if next(calls, None) == call:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(module, name, pressed)


def test_an_interrupted_training_comes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _train(tmp_path / "whole")
    for module, name, call in ((medusa_data, "_said_after", 2), (medusa_training, "learn", 3)):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            _interrupt_at(patched, module, name, call)
            _train(tmp_path / "parts")
    state = torch.load(tmp_path / "parts" / medusa_training.STATE_FILE, weights_only=True)
    assert state["content"]["step"] == 4
    assert _train(tmp_path / "parts") == whole
    both = [MedusaHeads.load(tmp_path / name).state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(tensor, both[1][name]) for name, tensor in both[0].items())
    assert both[0]["weight"].any()
    assert not (tmp_path / "parts" / medusa_training.STATE_FILE).exists()


def test_what_was_trained_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _train(tmp_path)
    monkeypatch.setattr(medusa_training, "learn", None)
    assert _train(tmp_path) == first
    with pytest.raises(ValueError, match="was made with steps=6, expected steps=7"):
        _train(tmp_path, steps=7)
    with pytest.raises(ValueError, match="was made with texts="):
        _train(tmp_path, {"one": TEXTS["two"]})


def test_the_target_stays_as_it_is(tmp_path: Path) -> None:
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train_medusa(tmp_path, model, TEXTS, DATA, TRAINING)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("own_heads", [False, True])
@pytest.mark.parametrize("with_words", [False, True])
def test_the_loss_and_its_gradients_are_those_of_all_logits_at_once(
    own_heads: bool, with_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(medusa_learning, "MOST_LOGITS", 7 * 96)
    lm_head = head_of(llama().requires_grad_(False))
    heads = random_heads(own_heads=own_heads).requires_grad_(True)
    hidden, labels = torch.randn(30, HIDDEN), torch.randint(0, 48, (30, 3)) * 2
    labels[20:, 2], labels[5, 0] = IGNORED, IGNORED
    words = labels[labels != IGNORED].unique() if with_words else None
    loss = learn(heads, lm_head, hidden, labels, Accelerator(mixed_precision="no"), words)
    found = {name: parameter.grad for name, parameter in heads.named_parameters()}
    heads.zero_grad()
    logits = heads.logits(heads.states(hidden), lm_head)
    if with_words:
        absent = torch.tensor([token not in {*labels.flatten().tolist()} for token in range(96)])
        logits = logits.masked_fill(absent, -torch.inf)
    each = [cross_entropy(logits[head], labels[:, head], ignore_index=IGNORED) for head in range(3)]
    expected = (each[0] + 0.8 * each[1] + 0.64 * each[2]) / 2.44
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in heads.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_every_lesson_comes_once_an_epoch() -> None:
    steps = [drawn(step, 11, 5, seed=3).tolist() for step in range(4)]
    assert len({*steps[0], *steps[1]}) == len({*steps[2], *steps[3]}) == 10
    assert steps[:2] != steps[2:]
    assert steps == [drawn(step, 11, 5, seed=3).tolist() for step in range(4)]
    assert len(drawn(0, 3, 5, seed=0)) == 3


def test_accuracies_are_conditional_on_the_heads_before() -> None:
    first = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 0]]).bool()
    second = torch.tensor([[1, 0], [0, 1], [0, 0], [1, 0]]).bool()
    assert conditional(torch.stack([first, second])) == [[0.5, 0.25], [1 / 3, 1 / 3]]
    assert conditional(torch.zeros(2, 4, 3).bool()) == [[0.0] * 3] * 2


def test_prompts_are_cut_and_held_out_ones_come_from_the_ends() -> None:
    texts = {"long": torch.arange(100, 300), "short": torch.arange(1000, 1050)}
    learned, held_out = cut_prompts(texts, DATA)
    assert learned.shape == (20, 6)
    assert held_out.shape == (4, 6)
    assert (learned[:, 1:] - learned[:, :-1] == 1).all(), "windows of the text"
    assert {row[0] for row in learned.tolist()} >= {100, 254, 1000, 1034}
    assert {row[-1] for row in held_out.tolist()} >= {299}
    assert not set(learned.flatten().tolist()) & set(held_out.flatten().tolist())


def test_prompts_are_framed_in_turn() -> None:
    texts = {"long": torch.arange(100, 300)}
    bare, _ = cut_prompts(texts, DATA)
    learned, _ = cut_prompts(texts, DATA, [Frame(), Frame((7, 8), (9,))])
    assert torch.equal(learned[::2], bare[::2])
    assert torch.equal(learned[1::2, 2:-1], bare[1::2, 2:-1])
    assert {tuple(row) for row in learned[1::2, [0, 1, -1]].tolist()} == {(7, 8, 9)}
    with pytest.raises(ValueError, match="more than the 6 of the longest frame, got 6"):
        cut_prompts(texts, DATA, [Frame((1, 2, 3), (4, 5, 6))])


class ByteTokenizer:
    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> str:
        return f"<user>{chat[0]['content']}<bot>"


def test_an_instruction_becomes_a_chat() -> None:
    frames = _frames(ByteTokenizer(), ["Why?"])
    assert frames[0] == Frame()
    assert [bytes(side).decode() for side in frames[1]] == ["<user>", "\n\nWhy?<bot>"]


def test_labels_are_the_text_inside_of_prompts_and_the_target_behind(tmp_path: Path) -> None:
    model, tokens = counting_model(), counted(CYCLE)
    tokens[1] = FIRST  # what the target would not say
    rows = torch.cat([tokens, torch.tensor([50, 50, 50])])[None]  # nor what was drawn
    settings = dataclasses.replace(DATA, prompt_tokens=CYCLE, new_tokens=3)
    lessons = read_lessons(model, rows, 2, settings)
    own = [*tokens.tolist(), after(LAST), model(rows).logits[0, CYCLE].argmax().item()]
    assert lessons.labels[: CYCLE - 2, 0].tolist() == own[2:CYCLE]
    assert lessons.labels[CYCLE - 2, 0] == FIRST
    assert lessons.labels[:, 1].tolist() == [*lessons.labels[1:, 0].tolist(), IGNORED]
    assert len(read_lessons(model, rows, 2, settings, held_out=True).labels) == 1


def test_nothing_is_learned_behind_the_end_of_a_text(tmp_path: Path) -> None:
    model: Any = counting_model()
    model.generation_config.eos_token_id = [LAST, 90]
    state = StateFile(tmp_path / "said.pt", {})
    rows = go_on(model, torch.stack([counted(6), counted(6, first=7)]), DATA, 0.0, state)
    assert rows[0, : CYCLE + 1].tolist() == [*range(FIRST, LAST + 1), NOTHING]
    assert rows[1].tolist() == [*range(7, LAST + 1), *[NOTHING] * 13]
    lessons = read_lessons(model, rows[:1], 2, DATA)
    assert lessons.labels.tolist()[-2:] == [[LAST - 1, LAST], [LAST, IGNORED]]
    with pytest.raises(ValueError, match="the model ends its texts before 3 tokens"):
        read_lessons(model, rows[1:], 2, DATA, held_out=True)


def test_what_is_drawn_follows_the_seed_and_labels_stay_greedy(tmp_path: Path) -> None:
    model, prompts = llama(), prompt(6, rows=4)
    texts = [
        go_on(model, prompts, dataclasses.replace(DATA, seed=seed), 1.0, StateFile(tmp_path / f"{number}.pt", {}))
        for number, seed in enumerate((0, 0, 1))
    ]
    assert texts[0].tolist() == texts[1].tolist() != texts[2].tolist()
    said = model(texts[0]).logits.argmax(-1)
    labels = read_lessons(model, texts[0], 1, DATA).labels.view(4, 18, 1)
    assert labels[:, 4:, 0].tolist() == said[:, 5:-1].tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataSettings(tokens=0), "tokens must be an integer >= 1, got 0"),
        (lambda: DataSettings(held_out=1), "held_out must be between 0 and 1, got 1"),
        (lambda: DataSettings(temperature=-1), "temperature must be >= 0, got -1"),
        (lambda: TrainingSettings(heads=0), "heads must be an integer >= 1, got 0"),
        (lambda: TrainingSettings(rate=0), "rate must be a finite number > 0, got 0"),
        (lambda: TrainingSettings(rate=float("inf")), "rate must be a finite number > 0, got inf"),
        (lambda: TrainingSettings(rate=float("nan")), "rate must be a finite number > 0, got nan"),
        (lambda: cut_prompts({}, DATA), "at least one text, got none"),
        (lambda: cut_prompts({"one": torch.arange(11)}, DATA), "one: expected at least 12 tokens .* got 11"),
        (lambda: _train(Path("never"), heads=14), "14 heads need new_tokens > 14, got 14"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_command_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text = save_tiny_checkpoint(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 8)
    command = ["--model", str(model), "--text", str(text), "--out", str(tmp_path / "out"), "--heads", "2"]
    command += ["--steps", "2", "--tokens", "200", "--prompt-tokens", "8", "--new-tokens", "12", "--held-out", "0.1"]
    medusa_training.main(command)
    assert "Medusa heads after 2 steps, held out: loss" in capsys.readouterr().out
    heads = MedusaHeads.load(tmp_path / "out")
    assert (heads.num_heads, heads.hidden_size, heads.model) == (2, 32, "model"), "no path of this machine"
    assert [*json.loads((tmp_path / "out" / RECORD_FILE).read_text())["about"]["texts"]] == ["text.txt"]


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (None, [], "No such file or directory"),
        ("  \n", [], "expected a text, got an empty file"),
        ("text", ["--heads", "0"], "heads must be an integer >= 1, got 0"),
        ("text", ["--text", "text.txt", "a/text.txt"], "expected text files of different names, got text.txt, a/text"),
    ],
)
def test_the_command_names_what_is_wrong(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    more: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    if content is not None:
        for file in (text, tmp_path / "a" / "text.txt"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(content)
    with pytest.raises(SystemExit):
        medusa_training.main(["--model", "none", "--text", str(text), "--out", str(tmp_path / "out"), *more])
    assert message in capsys.readouterr().err
