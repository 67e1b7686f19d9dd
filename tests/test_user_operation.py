"""ops.BasicOperation: operations that users write, alone and between chains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, UnsupportedError, autocast, ops
from fp8core.ops import basic_operation


class Shift(ops.BasicOperation):
    """``(x + by) * factor``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.randn(size))

    def op_forward(self, ctx: Any, input_: torch.Tensor, *, factor: float = 2.0, **_: Any) -> Any:
        ctx.save_for_backward(input_)
        ctx.factor = factor
        self.seen = input_.shape, ctx.requires_grad
        return (input_ + self.by) * factor

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        (input_,) = ctx.saved_tensors
        assert input_.shape == grad_output.shape
        grad = grad_output * ctx.factor
        return grad, [grad.flatten(0, -2).sum(0)]


class Split(ops.BasicOperation):
    """Adds ``x`` to an extra input, and returns their difference too."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def fuser_forward(
        self, contexts: Any, input_: Any, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Any:
        (extra,) = basic_op_extra_inputs[0]
        return input_ + extra, [(input_ - extra,)]

    def fuser_backward(
        self, contexts: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        (grad,) = basic_op_grad_extra_outputs[0]
        return grad_output + grad, [()], [(grad_output - grad,)]


def test_both_directions_are_the_users() -> None:
    operation = Shift(8)
    x = torch.randn(2, 3, 8, requires_grad=True)
    y = operation(x, factor=3.0)
    y.sum().backward()
    assert torch.equal(y, (x + operation.by) * 3)
    assert torch.equal(x.grad, torch.full((2, 3, 8), 3.0))
    assert torch.equal(operation.by.grad, torch.full((8,), 18.0))
    assert operation.seen == ((2, 3, 8), True)


def test_without_gradients_it_is_told_so() -> None:
    operation = Shift(8)
    with torch.no_grad():
        operation(torch.randn(2, 8))
    assert operation.seen == ((2, 8), False)


@pytest.mark.parametrize("chosen", [None, "current", "delayed"])
def test_it_runs_between_chains_in_the_shape_of_the_input(chosen: Any) -> None:
    torch.manual_seed(0)
    operation = Shift(32)
    made = ops.Sequential(ops.Linear(32, 32), operation, ops.Linear(32, 16))
    x = torch.randn(4, 8, 32, requires_grad=True)
    for _ in range(2):
        with autocast(enabled=chosen is not None, recipe=chosen):
            y = made(x)
        y.square().sum().backward()
    assert operation.seen == ((4, 8, 32), True)
    assert all(parameter.grad is not None for parameter in made.parameters())
    assert not made.is_link
    exact = made(x)
    assert (y - exact).norm() < (0.1 if chosen else 1e-6) * exact.norm()


def test_extra_tensors_go_in_and_out() -> None:
    made = ops.Sequential(ops.Bias(4), Split(), ops.Bias(4))
    x, extra = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    y, difference = made(x, extra)
    assert torch.equal(y, x + extra)
    assert torch.equal(difference, x - extra)
    (y.sum() + 3 * difference.sum()).backward()
    assert torch.equal(x.grad, torch.full((2, 4), 4.0))
    assert torch.equal(extra.grad, torch.full((2, 4), -2.0))


def test_a_derivative_by_the_gradient_of_an_extra_output_is_refused() -> None:
    x, extra = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    grads = torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)
    grad = torch.autograd.grad(Split()(x, extra), x, grads, create_graph=True)[0]
    with pytest.raises(UnsupportedError, match="a second derivative is not offered"):
        torch.autograd.grad(grad.sum(), grads[1])


def test_channels_connect_them() -> None:
    made = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False),
        ops.Bias(4),
        Split().set_extra_input_channel(0, "skip").set_extra_output_channel(0, "difference"),
    )
    x = torch.randn(2, 4)
    y, difference = made(x)
    assert torch.equal(y, 2 * x)
    assert not difference.any()


def test_its_input_may_be_its_output() -> None:
    class Pass(ops.BasicOperation):
        def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> torch.Tensor:
            return input_

        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            return grad_output, ()

    x = torch.randn(3, requires_grad=True)
    y = Pass()(x)
    (2 * y).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("missing", ["op_forward", "op_backward"])
def test_a_direction_that_is_missing_is_named(missing: str) -> None:
    class Half(ops.BasicOperation):
        if missing == "op_backward":

            def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> torch.Tensor:
                return input_ * 2

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match=f"Half has no {missing}"):
        Half()(x).sum().backward()


def test_gradients_of_the_wrong_number_are_refused() -> None:
    class Loose(Shift):
        def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
            return grad_output, ()

    with pytest.raises(OperandError, match="returned 0 gradients of parameters; it has 1"):
        Loose(2)(torch.ones(1, 2, requires_grad=True)).sum().backward()


def test_extra_tensors_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(OperandError, match="Split: got 0 extra inputs; expected 1"):
        Split()(torch.ones(2))

    class Short(Split):
        num_extra_outputs = 2

    with pytest.raises(OperandError, match="returned 1 extra outputs; num_extra_outputs is 2"):
        Short()(torch.ones(2), torch.ones(2))


def test_a_recompute_repeats_it() -> None:
    made = ops.Sequential(ops.Linear(8, 8), Shift(8), ops.Linear(8, 8))
    x = torch.randn(4, 8)
    grads = []
    for run in (made, lambda t: fp8core.checkpoint(made, t, use_reentrant=False)):
        made.zero_grad()
        with autocast(recipe="current"):
            run(x).sum().backward()
        grads.append([parameter.grad.clone() for parameter in made.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("grad", [None, torch.ones(4, 8).requires_grad_()])
def test_a_second_derivative_is_refused(grad: torch.Tensor | None) -> None:
    x = torch.randn(4, 8).requires_grad_()
    y = ops.Sequential(Shift(8))(x)
    grad = torch.ones(4, 8) if grad is None else grad
    (first,) = torch.autograd.grad(y, x, grad, create_graph=True)
    with pytest.raises(UnsupportedError, match="Shift: a second derivative is not offered"):
        (first.square().sum() + x.sum()).backward()


def test_an_operation_that_returns_nothing_is_named() -> None:
    class Nothing(ops.BasicOperation):
        def op_forward(self, ctx: Any, input_: torch.Tensor, **quantizers: Any) -> Any:
            return None

    with pytest.raises(OperandError, match="Nothing: forward returned NoneType"):
        ops.Sequential(Nothing())(torch.ones(2))


# --- fusions ---


class Double(ops.BasicOperation):
    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ * 2

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return grad_output * 2, ()


class ShiftAndDouble(ops.FusedOperation):
    """``Shift`` and then ``Double``, at once."""

    calls = 0

    def fuser_forward(self, contexts: Any, input_: Any, **_: Any) -> Any:
        type(self).calls += 1
        shift, _double = self.basic_ops
        contexts[0].save_for_backward(input_)
        return (input_ + shift.by) * 4, [(), ()]

    def fuser_backward(self, contexts: Any, grad_output: Any, **_: Any) -> Any:
        assert contexts[0].saved_tensors[0].shape == grad_output.shape
        grad = grad_output * 4
        return grad, [[grad.flatten(0, -2).sum(0)], []], [(), ()]


@pytest.fixture
def no_fusions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_fusions", "_forward_fusions", "_backward_fusions"):
        monkeypatch.setattr(basic_operation, name, [])


def fuse(operations: list[torch.nn.Module], *, recipe: Any) -> list[torch.nn.Module]:
    changed: list[torch.nn.Module] = []
    for operation in operations:
        if changed and isinstance(changed[-1], Shift) and isinstance(operation, Double):
            operation = ShiftAndDouble([changed.pop(), operation])
        changed.append(operation)
    return changed


@pytest.mark.usefixtures("no_fusions")
@pytest.mark.parametrize("chosen", [None, "delayed"])
def test_a_fusion_replaces_operations_in_both_directions(chosen: Any) -> None:
    torch.manual_seed(0)
    made = ops.Sequential(ops.Linear(32, 32), Shift(32), Double(), ops.Linear(32, 8))
    x = torch.randn(32, 32)
    results = []
    for is_fused in (False, True):
        if is_fused:
            ops.register_forward_backward_fusion(fuse)
        made.zero_grad()
        made.reset_delayed_state()
        with autocast(enabled=chosen is not None, recipe=chosen):
            y = made(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in made.parameters())])  # type: ignore[union-attr]
    assert ShiftAndDouble.calls > 0
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("no_fusions")
def test_a_fusion_that_loses_an_operation_is_refused() -> None:
    ops.register_forward_backward_fusion(lambda operations, *, recipe: operations[1:])
    with pytest.raises(OperandError, match="returned other operations than it was given"):
        ops.Sequential(Double(), Double())(torch.ones(2))


@pytest.mark.usefixtures("no_fusions")
def test_a_fusion_is_told_the_recipe_and_comes_in_its_turn() -> None:
    seen: list[Any] = []
    for name, first in (("late", False), ("early", True)):
        ops.register_forward_backward_fusion(
            lambda operations, *, recipe, name=name: seen.append((name, recipe)) or operations,
            prepend=first,
        )
    made = ops.Sequential(Double())
    made(torch.ones(2))
    with autocast(recipe="mxfp8"):
        made(torch.ones(2))
    mxfp8 = fp8core.recipe.MXFP8BlockScaling()
    assert seen == [("early", None), ("late", None), ("early", mxfp8), ("late", mxfp8)]


class Scale(ops.BasicOperation):
    """Multiplies by a parameter; saves its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.randn(size))

    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        ctx.save_for_backward(input_)
        return input_ * self.by

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        grad = (grad_output * ctx.saved_tensors[0]).flatten(0, -2).sum(0)
        return grad_output * self.by, [grad]


class ForwardOfTwo(ops.FusedOperation):
    """The forward of two scales, which leaves what the backward of each one needs."""

    calls = 0

    def fuser_forward(self, contexts: Any, input_: torch.Tensor, **_: Any) -> Any:
        type(self).calls += 1
        middle = input_ * self.basic_ops[0].by
        contexts[0].save_for_backward(input_)
        contexts[1].save_for_backward(middle)
        return middle * self.basic_ops[1].by, [(), ()]


class BackwardOfTwo(ops.FusedOperation):
    """The backward of two scales, from what the forward of each one left."""

    calls = 0

    def fuser_backward(self, contexts: Any, grad_output: torch.Tensor, **_: Any) -> Any:
        type(self).calls += 1
        between = grad_output * self.basic_ops[1].by
        saved = [context.saved_tensors[0] for context in contexts]
        grads = [(g * x).sum(0) for g, x in zip((between, grad_output), saved, strict=True)]
        return between * self.basic_ops[0].by, [[grad] for grad in grads], [(), ()]


class BothOfTwo(ForwardOfTwo, BackwardOfTwo):
    """Both directions of two scales."""


def pair_at(start: int, kind: type[ops.FusedOperation]) -> Any:
    """Return a fusion of two operations from ``start``."""

    def fusion(operations: list[torch.nn.Module], *, recipe: Any) -> list[torch.nn.Module]:
        end = start + 2
        return [*operations[:start], kind(operations[start:end]), *operations[end:]]

    return fusion


@pytest.mark.usefixtures("no_fusions")
@pytest.mark.parametrize(
    ("forward", "backward"), [(1, None), (None, 1), (1, 1), (1, 2), (2, 1), (1, 3)]
)
def test_fusions_of_one_direction_share_contexts(forward: int | None, backward: int | None) -> None:
    torch.manual_seed(0)
    scales = [Scale(32) for _ in range(4)]
    model = ops.Sequential(ops.Linear(32, 32), *scales, ops.Linear(32, 8))
    x, results = torch.randn(16, 32, requires_grad=True), []
    for is_fused in (False, True):
        if is_fused and forward is not None:
            ops.register_forward_fusion(pair_at(forward, ForwardOfTwo))
        if is_fused and backward is not None:
            ops.register_backward_fusion(pair_at(backward, BackwardOfTwo))
        ForwardOfTwo.calls = BackwardOfTwo.calls = 0
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.square().sum().backward()
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])  # type: ignore[union-attr]
    assert (ForwardOfTwo.calls, BackwardOfTwo.calls) == (forward is not None, backward is not None)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.usefixtures("no_fusions")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # likewise
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", ["apart", "tied", "twice"])
@pytest.mark.parametrize("direction", ["forward_backward", "forward", "backward"])
def test_fused_operations_may_share_parameters(
    direction: str, kind: str, is_compiled: bool
) -> None:
    first, second = Scale(8), Scale(8)
    if kind == "tied":
        second.by = first.by
    model = ops.Sequential(first, first if kind == "twice" else second)
    x, results = torch.randn(4, 8, requires_grad=True), []
    for is_fused in (False, True):
        if is_fused:
            getattr(ops, f"register_{direction}_fusion")(pair_at(0, BothOfTwo))
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager") if is_fused and is_compiled else model
        model.zero_grad()
        x.grad = None
        y = run(x)
        y.square().sum().backward()
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])  # type: ignore[union-attr]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("no_fusions")
@pytest.mark.parametrize("direction", ["forward_backward", "forward", "backward"])
def test_a_fusion_with_a_parameter_of_its_own_is_refused(direction: str) -> None:
    """Which would get no gradient."""

    class Owning(BothOfTwo):
        def __init__(self, basic_ops: Any) -> None:
            super().__init__(basic_ops)
            self.own = torch.nn.Parameter(torch.ones(8))

    getattr(ops, f"register_{direction}_fusion")(pair_at(0, Owning))
    with pytest.raises(OperandError, match="Owning has a parameter of its own"):
        ops.Sequential(Scale(8), Scale(8))(torch.ones(4, 8))


@pytest.mark.usefixtures("no_fusions")
@pytest.mark.parametrize("register", ["register_forward_fusion", "register_backward_fusion"])
def test_one_direction_of_a_layer_is_refused_by_name(register: str) -> None:
    getattr(ops, register)(pair_at(0, ForwardOfTwo))
    with pytest.raises(OperandError, match="Linear saves nothing that"):
        ops.Sequential(ops.Linear(32, 32), Scale(32))(torch.randn(4, 32))


@pytest.mark.usefixtures("no_fusions")
def test_a_fusion_of_one_direction_that_loses_an_operation_is_refused() -> None:
    ops.register_backward_fusion(lambda operations, *, recipe: operations[1:])
    with pytest.raises(OperandError, match="returned other operations than it was given"):
        ops.Sequential(Double(), Double())(torch.ones(2))


@pytest.mark.usefixtures("no_fusions")
@pytest.mark.parametrize("direction", ["forward_backward", "forward", "backward"])
def test_a_fusion_that_is_no_function_is_refused(direction: str) -> None:
    with pytest.raises(OperandError, match="fusion 3: expected a function"):
        getattr(ops, f"register_{direction}_fusion")(3)
    assert not basic_operation.has_fusions()


class Fork(ops.BasicOperation):
    """Twice the input; three times the input as an extra output."""

    num_extra_outputs = 1

    def fuser_forward(self, contexts: Any, input_: Any, **_: Any) -> Any:
        return input_ * 2, [(input_ * 3,)]

    def fuser_backward(self, contexts: Any, grad: Any, **extra: Any) -> Any:
        return grad * 2 + extra["basic_op_grad_extra_outputs"][0][0] * 3, [[]], [()]


class Join(ops.BasicOperation):
    """The input plus the extra input."""

    num_extra_inputs = 1

    def fuser_forward(self, contexts: Any, input_: Any, **extra: Any) -> Any:
        return input_ + extra["basic_op_extra_inputs"][0][0], [()]

    def fuser_backward(self, contexts: Any, grad: Any, **_: Any) -> Any:
        return grad, [[]], [(grad,)]


class ForkAndJoin(ops.FusedOperation):
    calls = 0

    def fuser_forward(self, contexts: Any, input_: Any, **extra: Any) -> Any:
        type(self).calls += 1
        assert [list(each) for each in extra["basic_op_extra_inputs"]] == [[], [None]]
        return input_ * 5, [(input_ * 3,), ()]

    def fuser_backward(self, contexts: Any, grad: Any, **_: Any) -> Any:
        return grad * 5, [[], []], [(), (None,)]


@pytest.mark.usefixtures("no_fusions")
@pytest.mark.parametrize("is_public", [False, True])
def test_a_fusion_may_have_both_ends_of_a_channel(is_public: bool) -> None:
    """The extra input is then None: the fused operation computes what the channel would bring."""
    fork = Fork().set_extra_output_channel(0, "skip", output_to_caller=is_public)
    made = ops.Sequential(ops.GELU(), fork, Join().set_extra_input_channel(0, "skip"), Double())
    x = torch.randn(4, 8).requires_grad_()

    def run() -> list[torch.Tensor]:
        y = made(x)
        y, *extra = y if is_public else (y,)
        return [y, *extra, *torch.autograd.grad(y.square().sum(), x)]

    def join(operations: list[torch.nn.Module], *, recipe: Any) -> list[torch.nn.Module]:
        return [operations[0], ForkAndJoin(operations[1:3]), operations[3]]

    want = run()
    ops.register_forward_backward_fusion(join)
    for got, expected in zip(run(), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert ForkAndJoin.calls > 0


@pytest.mark.usefixtures("no_fusions")
@pytest.mark.parametrize("direction", ["forward_backward", "forward", "backward"])
@pytest.mark.parametrize(
    "result",
    [lambda found: [*found, ops.FusedOperation([])], lambda _: None, ops.FusedOperation],
    ids=["empty", "none", "no list"],
)
def test_a_fusion_that_returns_no_list_of_operations_is_named(direction: str, result: Any) -> None:
    def odd(operations: Any, *, recipe: Any) -> Any:
        return result(operations)

    getattr(ops, f"register_{direction}_fusion")(odd)
    with pytest.raises(OperandError, match=r"fusion odd: it returned other operations.*a list of"):
        ops.Sequential(Scale(2), Scale(2))(torch.ones(2, 2))


@pytest.mark.usefixtures("no_fusions")
def test_a_fusion_of_another_signature_is_refused() -> None:
    with pytest.raises(
        OperandError, match=r"fusion <lambda>: expected .*keyword argument 'recipe'"
    ):
        ops.register_forward_fusion(lambda operations: operations)
    assert not basic_operation.has_fusions()


@pytest.mark.usefixtures("no_fusions")
def test_a_second_derivative_of_one_fused_direction_names_the_operations() -> None:
    ops.register_forward_fusion(pair_at(0, ForwardOfTwo))
    x = torch.ones(2, 8, requires_grad=True)
    y = ops.Sequential(Scale(8), Scale(8))(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"^Scale, Scale: a second derivative"):
        grad.sum().backward()
