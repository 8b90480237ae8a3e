"""Linear layers over a few rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from oval_spec.short_linears import MOST_ROWS, quick_short_linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 2), (5,), (), (1, 9), (3, 4), (0, 2)])
def test_products_are_the_same(shape: tuple[int, ...], bias: bool) -> None:
    layer, inputs = nn.Linear(48, 96, bias), torch.randn(*shape, 48)
    expected = linear(inputs, layer.weight, layer.bias)
    with torch.no_grad(), quick_short_linears(layer):
        found = layer(inputs)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)


def test_few_rows_go_the_quick_way_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, slow = nn.Linear(8, 8), list[int]()

    def noted(inputs: Tensor, *parameters: Tensor) -> Tensor:
        slow.append(len(inputs))
        return linear(inputs, *parameters)

    monkeypatch.setattr("oval_spec.short_linears.linear", noted)
    with torch.no_grad(), quick_short_linears(layer):
        for rows in range(1, 12):
            layer(torch.randn(rows, 8))
        assert slow == [*range(MOST_ROWS + 1, 12)]
        slow.clear()
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(2, 8)).dtype == torch.bfloat16
        with torch.enable_grad():
            layer(torch.randn(2, 8)).sum().backward()
        assert layer.weight.grad is not None


def test_layers_of_other_kinds_stay_and_all_are_restored() -> None:
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(8, 8)
    hooked.__dict__["forward"] = lambda inputs: inputs + 1
    model = nn.ModuleDict(
        {"plain": nn.Linear(8, 8), "own": Own(8, 8), "low": nn.Linear(8, 8).bfloat16(), "hooked": hooked}
    )

    def replaced() -> list[str]:
        return [name for name, layer in model.items() if "forward" in layer.__dict__]

    def fail() -> None:
        with quick_short_linears(model):
            assert replaced() == ["plain", "hooked"]
            assert torch.equal(hooked(torch.zeros(2, 8)), torch.ones(2, 8))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert replaced() == ["hooked"]


def test_two_at_once_leave_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    first, second = quick_short_linears(model), quick_short_linears(model)
    for step in (first.__enter__, second.__enter__):
        step()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    with quick_short_linears(model):
        del model[0].__dict__["forward"]  # somebody was quicker
    assert not any("forward" in layer.__dict__ for layer in model)
