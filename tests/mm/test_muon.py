import pytest
import torch

from oval_mm.recipes.muon import SMALLER, WEIGHT_DECAY, Muon, make_optimizers, orthogonal


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 5)])
def test_an_orthogonal_matrix_has_the_same_directions(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.T @ orthogonal(matrix) @ right.T
    assert torch.linalg.svdvals(orthogonal(matrix)).sub(1).abs().max() < 0.35
    torch.testing.assert_close(inside, inside.diagonal().diag(), atol=1e-4, rtol=0)
    assert inside.diagonal().min() > 0.6
    torch.testing.assert_close(orthogonal(100 * matrix), orthogonal(matrix))


def test_a_step_is_as_long_whatever_the_gradient() -> None:
    weight = torch.nn.Parameter(torch.zeros(16, 3, 4))
    optimizer = Muon([weight], lr=0.1)
    for scale in (1e-3, 1e3):
        weight.data.zero_()
        optimizer.state.clear()
        weight.grad = scale * torch.randn(16, 3, 4, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        assert weight.detach().square().mean().sqrt().item() == pytest.approx(0.1 * 0.2, rel=0.25)
        assert (weight * weight.grad).sum() < 0


def test_weights_decay() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.zeros(4, 4)
    Muon([weight], lr=0.5, weight_decay=0.2).step()
    torch.testing.assert_close(weight.detach(), torch.full((4, 4), 0.9))


def test_it_goes_on_from_its_state() -> None:
    torch.manual_seed(0)
    gradients, start = torch.randn(4, 5, 5), torch.randn(5, 5)
    whole, parts = (torch.nn.Parameter(start.clone()) for _ in range(2))
    one = Muon([whole], lr=0.1)
    two = Muon([parts], lr=0.1)
    for step, gradient in enumerate(gradients):
        if step == 2:
            saved, two = two.state_dict(), Muon([parts], lr=7.0)
            two.load_state_dict(saved)
        for weight, optimizer in ((whole, one), (parts, two)):
            weight.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(whole, parts)


def test_it_finds_a_minimum() -> None:
    torch.manual_seed(0)
    goal, weight = torch.randn(6, 6), torch.nn.Parameter(torch.zeros(6, 6))
    optimizer = Muon([weight], lr=0.1)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - step / 200)
        optimizer.zero_grad()
        (weight - goal).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), goal, atol=0.02, rtol=0)


def test_each_weight_has_its_rate_and_decay() -> None:
    shapes = {"embed.weight": (9, 4), "layer.weight": (4, 4), "conv.weight": (4, 3, 2, 2), "layer.bias": (4,)}
    first, second = ({name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()} for _ in range(2))
    muon, adamw = make_optimizers([(0.1, first), (0.2, second)])
    found = {
        id(one): (optimizer, group["highest_lr"], group["lr"], group["weight_decay"])
        for optimizer in (muon, adamw)
        for group in optimizer.param_groups
        for one in group["params"]
    }
    assert len(found) == 8
    for rate, parameters in ((0.1, first), (0.2, second)):
        assert found[id(parameters["layer.weight"])] == (muon, rate, rate, WEIGHT_DECAY)
        for name, decay in (("embed.weight", WEIGHT_DECAY), ("conv.weight", WEIGHT_DECAY), ("layer.bias", 0.0)):
            assert found[id(parameters[name])] == (adamw, SMALLER * rate, SMALLER * rate, decay)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"Muon takes matrices, got a parameter of shape \[3\]"):
        Muon([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="closure"):
        Muon([torch.nn.Parameter(torch.zeros(3, 3))]).step(lambda: 0.0)
