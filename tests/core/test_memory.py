import pytest
import torch

from oval_core.memory import lasting, on_device, take


@pytest.mark.parametrize("rest", [(), (5,), (3, 5)])
@pytest.mark.parametrize("count", [7, 4])
def test_take_copies_rows_also_out_of_a_narrowed_tensor(rest: tuple[int, ...], count: int) -> None:
    tensor = torch.randn(2, 3, 7, *rest)[:, :, :count]
    index = torch.randint(0, count, (2, 3, 6))
    taken = take(tensor, index)
    for row in range(2):
        for head in range(3):
            assert torch.equal(taken[row, head], tensor[row, head][index[row, head]])


def test_take_of_one_row_out_of_several() -> None:
    tensor = torch.randn(4, 3, 7, 2)[1:2]
    index = torch.randint(0, 7, (1, 3, 2))
    assert torch.equal(take(tensor, index)[0, 1], tensor[0, 1][index[0, 1]])


def test_lasting_memory_may_be_written_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        made = lasting(lambda: torch.zeros(3))()
    made += 1
    assert made.tolist() == [1, 1, 1]


def test_numbers_start_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        numbers = on_device([[1, 2], [3, 4]], torch.device("cpu"))
    assert numbers.tolist() == [[1, 2], [3, 4]]


def test_a_graph_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert on_device([1], torch.device("cpu")).tolist() == [1]
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        on_device([1], torch.device("cuda"))
