import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oval_core.training.state import (
    StateFile,
    interrupts_wait,
    make_accelerator,
    require_same,
    share_of_rate,
    write_whole,
)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    about = {"steps": 3, "sizes": {"width": 8}}
    state = StateFile(tmp_path / "new" / "state.pt", about)
    assert state.load() is None
    state.save({"step": 2, "weights": torch.arange(3)})
    loaded = StateFile(state.path, about).load()
    assert loaded is not None
    assert loaded["step"] == 2
    assert loaded["weights"].tolist() == [0, 1, 2]
    assert [file.name for file in state.path.parent.iterdir()] == ["state.pt"]
    state.remove()
    state.remove()
    assert state.load() is None


def test_the_state_of_another_training_is_refused(tmp_path: Path) -> None:
    StateFile(tmp_path / "state.pt", {"seed": 0, "steps": 3}).save({})
    with pytest.raises(ValueError, match=r"state\.pt was made with steps=3, expected steps=4"):
        StateFile(tmp_path / "state.pt", {"seed": 0, "steps": 4}).load()
    with pytest.raises(ValueError, match="was made with rate=None, expected rate=1"):
        require_same({"rate": 1}, {}, tmp_path)


@pytest.mark.parametrize("content", [b"", b"junk", b"[]"])
def test_what_is_no_state_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "training.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"training.pt: expected the state of a training, got something else"):
        StateFile(path, {}).load()


def test_saving_is_due_when_the_time_is_up(tmp_path: Path) -> None:
    assert StateFile(tmp_path / "state.pt", {}, every_s=0).is_due()
    assert not StateFile(tmp_path / "state.pt", {}, every_s=60).is_due()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("ha")
        raise OSError("disk full")

    path = tmp_path / "file"
    write_whole(path, lambda unfinished: unfinished.write_text("whole"))
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, fail)
    assert path.read_text() == "whole"


@pytest.fixture(name="interruptible")
def _interruptible() -> Iterator[None]:
    """Also where the tests run as a background job, which ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_first_interrupt_waits_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts_wait() as interrupted:  # noqa: PT012
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_may_train_too() -> None:
    seen: list[bool] = []

    def train() -> None:
        with interrupts_wait() as interrupted:
            seen.append(interrupted())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [False]


def test_bfloat16_is_used_only_where_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr("oval_core.training.state.Accelerator", lambda mixed_precision: made.append(mixed_precision))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        make_accelerator()
    assert made == ["bf16", "no"]


def test_the_rate_rises_and_falls() -> None:
    shares = [share_of_rate(step, 100) for step in range(100)]
    assert shares[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert 0 < shares[-1] < 0.01
    assert share_of_rate(0, 1) == 1
