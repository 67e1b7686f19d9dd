"""Law 4 for norms, activations, rotary embedding, column sums, dequantization and scale updates:
results are within a few float32 roundings of the formula in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fp8core.backend_api import (
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    ColumnSumsDesc,
    DequantizeDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    PackedRotaryDesc,
    RotaryDesc,
    ScaleUpdateDesc,
)
from fp8core.conformance import inputs
from fp8core.conformance.calls import (
    POINTWISE,
    Case,
    OpCall,
    arguments,
    calls_of,
    exact,
    example,
)
from fp8core.conformance.checks import law
from fp8core.conformance.compare import (
    FUNCTION,
    ROUND,
    column_sums_within,
    require,
    same_bits,
    same_form,
    same_tensors,
    ulp,
    within,
)
from fp8core.conformance.operands import SEED, operand, up
from fp8core.conformance.subject import Size, Subject, on_cpu, storage_step

SIZES = ((9, 70), (64, 64), (4100, 24), (5, 4100))
EMPTY = ((0, 9), (9, 0), (0, 0))
VERY_LONG = ((66000, 6), (2, 66000))  # above 65535; in bfloat16 alone, which costs less


@example(DequantizeDesc)
def _dequantize(subject: Subject, desc: DequantizeDesc, case: Case) -> OpCall:
    step = storage_step(subject, desc.operand)
    rows, cols = case.size or (17, 70)
    x = inputs.matrix("holes", up(rows, step), up(cols, step), torch.float32, case.seed)
    quantized = operand(subject, desc.operand, subject.here(x), seed=SEED + case.seed)
    return OpCall(desc, (quantized,), {})


@example(ScaleUpdateDesc)
def _scale_update(subject: Subject, desc: ScaleUpdateDesc, case: Case) -> OpCall:
    sizes = ((4, 3), (1, 2), (4, 1))
    histories = [inputs.matrix("decades", *size, torch.float32, case.seed).abs() for size in sizes]
    histories[0] = torch.tensor([[0.0, torch.inf, 2.0], *[[3.0, 0.5, 8.0]] * 3]) * (1 + case.seed)
    scales = [torch.arange(1, size[1] + 1) * (0.5 + case.seed) for size in sizes]
    targets = [torch.full((size[1],), 448.0 - case.seed) for size in sizes]
    counts = [torch.full((1,), 3 + case.seed) for _ in sizes]
    states = subject.here((histories, scales, targets, counts))
    return OpCall(desc, tuple(states), {}, frozenset({0, 1, 3}))


@example(NormDesc)
def _norm(subject: Subject, desc: NormDesc, case: Case) -> OpCall:
    rows, cols = case.size or POINTWISE
    x = inputs.moderate(rows, cols, desc.dtype, case.seed_of(1))
    parameters = [inputs.moderate(1, cols, desc.dtype, case.seed_of(at))[0] / 4 for at in (2, 3)]
    return OpCall(
        desc, tuple(subject.here((x, *parameters[: 2 if desc.kind == "layernorm" else 1]))), {}
    )


@example(NormBackwardDesc)
def _norm_backward(subject: Subject, desc: NormBackwardDesc, case: Case) -> OpCall:
    forward = _norm(subject, desc.norm, case)
    x, weight, *_ = forward.arguments
    _, *saved = forward.judged(subject)
    grad = inputs.moderate(*x.shape, desc.norm.dtype, case.seed_of(4))
    return OpCall(desc, (subject.here(grad), x, weight, *saved), {})


@example(ActivationDesc)
def _activation(subject: Subject, desc: ActivationDesc, case: Case) -> OpCall:
    return OpCall(desc, (subject.here(_preactivation(desc, case)),), {})


@example(ActivationBackwardDesc)
def _activation_backward(subject: Subject, desc: ActivationBackwardDesc, case: Case) -> OpCall:
    grad = inputs.moderate(*(case.size or POINTWISE), desc.dtype, case.seed_of(4))
    return OpCall(desc, tuple(subject.here((grad, _preactivation(desc, case)))), {})


def _preactivation(desc: ActivationDesc | ActivationBackwardDesc, case: Case) -> torch.Tensor:
    rows, cols = case.size or POINTWISE
    wide = 2 * cols if desc.name in GATED else cols
    return inputs.moderate(rows, wide, desc.dtype, case.seed_of(1))


@example(ColumnSumsDesc)
def _column_sums(subject: Subject, desc: ColumnSumsDesc, case: Case) -> OpCall:
    x = inputs.moderate(*(case.size or POINTWISE), desc.dtype, case.seed_of(1))
    return OpCall(desc, (subject.here(x),), {})


@example(RotaryDesc)
def _rotary(subject: Subject, desc: RotaryDesc, case: Case) -> OpCall:
    sizes = (8, 8, 8, 8) if case.size else (5, 3, 2, 10)
    x = rotary_input(desc, sizes, case.seed_of(1))
    batch, size = sizes[1], sizes[3]
    keywords = {"start_positions": torch.arange(2, 2 + batch, dtype=torch.int32)}
    if desc.layout == "thd":
        bounds = torch.linspace(1, len(x) - 2, batch + 1).round()
        keywords["cu_seqlens"] = bounds.to(torch.int32)
    freqs = rotary_angles(sizes[0] * batch + 2 + batch, size - 2)
    return OpCall(desc, tuple(subject.here((x, freqs))), subject.here(keywords))


def rotary_input(desc: RotaryDesc, sizes: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return x of ``sizes`` (sequence, batch, heads, head size) in the layout of ``desc``, on the
    CPU: in thd the sequences one after the other."""
    length, batch, heads, size = sizes
    x = inputs.moderate(length * batch, heads * size, desc.dtype, seed)
    if desc.layout == "thd":
        return x.reshape(-1, heads, size)
    x = x.reshape(length, batch, heads, size)
    return x if desc.layout == "sbhd" else x.transpose(0, 1).contiguous()


def rotary_angles(positions: int, size: int) -> torch.Tensor:
    """Return angles ``[positions, 1, 1, size]`` that are all different, from thousandths of a turn
    to many turns; also those of one pair differ."""
    factors = 10000.0 ** (-torch.arange(size, dtype=torch.float32) / size)
    return (torch.arange(positions)[:, None] * factors)[:, None, None, :]


def _calls(subject: Subject, desc: OpDesc, dtype: torch.dtype, *empty: Size) -> Iterator[OpCall]:
    """Yield calls of few, many and equally many rows and columns, then calls of ``empty`` sizes."""
    yield from calls_of(subject, desc, *SIZES, *(VERY_LONG if dtype == torch.bfloat16 else ()))
    for size in empty:
        yield arguments(subject, desc, Case(size=size))


@law(4, "dequantize", is_core=True)
def dequantize_rounds_once(subject: Subject, desc: DequantizeDesc) -> Iterator[float]:
    """The result is element times scale in float32, rounded once to the output's dtype."""
    for call in _calls(subject, desc, desc.dtype):
        x = call.run(subject)
        expected = subject.values(desc.operand, *call.arguments)
        same_form("x", x, torch.empty(expected.shape, dtype=desc.dtype))
        bound = ulp(expected, desc.dtype) / 2 + 4 * ROUND * expected.abs()
        yield within(f"x {list(x.shape)}", x, expected, bound)


@law(4, "scale_update", is_core=True)
def scale_update_equals_the_reference(subject: Subject, desc: ScaleUpdateDesc) -> None:
    """Histories roll and scales follow, bit for bit; an amax of 0, inf or NaN is not recorded."""
    few_states = arguments(subject, desc)
    many_states = few_states._replace(arguments=subject.here(_many_states()))
    for call in (few_states, many_states):
        expected = on_cpu(call.arguments)
        subject.judging(desc)(*expected)
        call.run(subject)
        same_tensors(f"{len(expected[0])} states", _named(call.arguments), _named(expected))


@law(4, "scale_update")
def a_prepared_update_equals_the_calls(subject: Subject, desc: ScaleUpdateDesc) -> None:
    """With ``prepared``, if offered, the update has the bits of the call in each step."""
    prepare = subject.variant(desc, prepared=True)
    if prepare is None:
        return
    ours, theirs = (subject.here(_many_states()) for _ in range(2))
    update = prepare(*ours)
    for step in range(3):
        for history in (*ours[0], *theirs[0]):
            history[0] = 2.0**step  # an amax of 0 would change nothing
        update()
        subject.run(desc, *theirs)
        same_tensors(f"step {step}", _named(ours), _named(theirs))


def _named(states: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("histories", "scales", "targets", "counts"), states, strict=True))


def _many_states() -> tuple[list[torch.Tensor], ...]:
    """Return the arguments of an update of 70 states, with histories of up to 1024 entries."""
    lengths = [(1, 2, 3, 16, 1024)[at % 5] for at in range(70)]
    sizes = [(length, 1 + at % 7) for at, length in enumerate(lengths)]
    histories = [
        inputs.matrix("decades", *size, torch.float32, at % 8).abs()
        for at, size in enumerate(sizes)
    ]
    histories[3] = torch.full_like(histories[3], torch.inf)
    histories[9] = torch.zeros_like(histories[9])
    histories[12][0], histories[13][0] = torch.nan, 1e-45  # 1e-45 is subnormal
    scales = [torch.arange(1, size[1] + 1) * 0.5 for size in sizes]
    targets = [torch.full((size[1],), 448.0) for size in sizes]
    return histories, scales, targets, [torch.full((1,), at) for at in range(70)]


@law(4, "norm", is_core=True)
def norm_is_within_the_bound(subject: Subject, desc: NormDesc) -> float:
    """The result is computed in float32 for any dtypes and rounded once; statistics are float32."""
    return max(_norm_within(subject, desc, call) for call in _calls(subject, desc, desc.dtype))


@law(4, "norm")
def norm_is_exact_where_the_mean_is_large(subject: Subject, desc: NormDesc) -> Iterator[float]:
    """Rows close to their mean keep the bound; E[x^2] - E[x]^2 would lose every digit of them."""
    for rows, cols in subject.sizes(desc.op, (33, 16), (33, 70)):
        _, *parameters = arguments(subject, desc, Case(size=(rows, cols))).arguments
        x = subject.here(inputs.far_from_zero(rows, cols, desc.dtype))
        yield _norm_within(subject, desc, OpCall(desc, (x, *parameters), {}))


@law(4, "norm", "norm_backward")
def norm_takes_parameters_of_any_float_dtype(
    subject: Subject, desc: NormDesc | NormBackwardDesc
) -> Iterator[float]:
    """Weight and bias may have another float dtype than the input."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        call = arguments(subject, desc)
        if isinstance(desc, NormDesc):
            x, *parameters = call.arguments
            call = call._replace(arguments=(x, *(parameter.to(dtype) for parameter in parameters)))
            yield _norm_within(subject, desc, call)
        else:
            grad, x, weight, *rest = call.arguments
            call = call._replace(arguments=(grad, x, weight.to(dtype), *rest))
            yield _norm_backward_within(subject, desc, call)


@law(4, "norm")
def norm_keeps_nan_and_inf_in_their_rows(subject: Subject, desc: NormDesc) -> None:
    """A row with NaN or inf has the reference's NaN, and all other rows keep their bits."""
    for size in subject.sizes(desc.op, *SIZES[:2]):
        x, *parameters = arguments(subject, desc, Case(size=size)).arguments
        before = on_cpu(subject.run(desc, x, *parameters))
        odd = torch.zeros(len(x), dtype=torch.bool)
        for at, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            row = (2 * at + 1) % len(x)
            odd[row] = True
            x[row, x.shape[1] // 2] = value
        after, theirs = (
            on_cpu(subject.run(desc, x, *parameters)),
            subject.judged(desc, x, *parameters),
        )
        for name, result, was, want in zip(
            ("y", "mean", "rstd"), after, before, theirs, strict=True
        ):
            if want is not None:
                same_bits(f"{name} {list(size)} of other rows", result[~odd], was[~odd])
                same_bits(f"NaN of {name} {list(size)}", result[odd].isnan(), want[odd].isnan())


@law(4, "norm", "norm_backward")
def norm_of_nothing_has_the_form_of_the_reference(
    subject: Subject, desc: NormDesc | NormBackwardDesc
) -> None:
    """Inputs may have no rows, no columns or neither; without rows, parameters' gradients are 0."""
    for size in ((0, 16), (16, 0), (0, 0)):
        call = arguments(subject, desc, Case(size=size))
        results, expected = call.run(subject), subject.judged(desc, *call.arguments)
        for at, (result, reference) in enumerate(zip(results, expected, strict=True)):
            require((result is None) == (reference is None), f"result {at} of {size}: None or not")
            if reference is not None:
                same_form(f"result {at} of {size}", result, reference)
        if isinstance(desc, NormBackwardDesc) and not size[0]:
            sums = [result for result in results[1:] if result is not None]
            require(not any(bool(total.any()) for total in sums), "a sum over no rows is not zero")


def _norm_within(subject: Subject, desc: NormDesc, call: OpCall) -> float:
    y, mean, rstd = call.run(subject)
    wide, (x, weight, *bias) = exact(subject, desc, *call.arguments)
    n = x.shape[1]
    gamma = weight + 1 if desc.zero_centered else weight
    center = x.new_zeros(len(x)) if wide[1] is None else wide[1]
    size = (x.abs() + center.abs()[:, None]) * wide[2][:, None] * gamma.abs()
    for addend in bias:
        size = size + addend.abs()
    rows = x.abs().amax(1)
    same_form("y", y, torch.empty(x.shape, dtype=desc.out_dtype))
    worst = [within("y", y, wide[0], (n + 16) * ROUND * size + ulp(wide[0], desc.out_dtype))]
    worst.append(within("rstd", rstd, wide[2], (n + 16) * ROUND * wide[2] * (1 + rows * wide[2])))
    if wide[1] is not None:
        worst.append(within("mean", mean, wide[1], (n + 16) * ROUND * rows))
    return max(worst)


@law(4, "norm_backward", is_core=True)
def norm_backward_is_within_the_bound(subject: Subject, desc: NormBackwardDesc) -> Iterator[float]:
    """Gradients are computed in float32; parameters' gradients are float32 sums over the rows."""
    for call in _calls(subject, desc, desc.norm.dtype):
        yield _norm_backward_within(subject, desc, call)


def _norm_backward_within(subject: Subject, desc: NormBackwardDesc, call: OpCall) -> float:
    results = call.run(subject)
    expected, (grad, x, weight, mean, rstd) = exact(subject, desc, *call.arguments)
    z = ((x if mean is None else x - mean[:, None]) * rstd[:, None]).abs()
    g = (grad * (weight + 1 if desc.norm.zero_centered else weight)).abs()
    size = rstd[:, None] * (g + z * (g * z).mean(-1, keepdim=True) + g.mean(-1, keepdim=True))
    sizes = (size, (grad.abs() * z).sum(0), grad.abs().sum(0))
    c = (sum(x.shape) + 32) * ROUND
    worst = 0.0
    dtypes = (desc.norm.dtype, torch.float32, torch.float32)
    for name, result, want, of, dtype in zip(
        ("grad_x", "grad_weight", "grad_bias"), results, expected, sizes, dtypes, strict=True
    ):
        if want is not None:
            same_form(name, result, torch.empty(want.shape, dtype=dtype))
            worst = max(worst, within(name, result, want, c * of + ulp(want, dtype)))
    return worst


@law(4, "norm_backward")
def a_norm_adds_gradients_as_the_pair(subject: Subject, desc: NormBackwardDesc) -> None:
    """The call with ``added``, if offered, gives the bits of the call followed by a sum."""
    run_added = subject.variant(desc, added=True)
    if run_added is None:
        return
    for call in calls_of(subject, desc, *SIZES):
        grad_x, *rest = call.run(subject)
        added = subject.here(inputs.normal(tuple(grad_x.shape), desc.norm.dtype, 5))
        results = run_added(*call.arguments, added=added)
        same_tensors(f"gradients of {list(grad_x.shape)}", results, (grad_x + added, *rest))


@law(4, "column_sums", is_core=True)
def column_sums_are_within_the_bound(subject: Subject, desc: ColumnSumsDesc) -> Iterator[float]:
    """Columns of any dtype are added in float32, for any number of rows and columns, also 0."""
    for call in _calls(subject, desc, desc.dtype, *EMPTY):
        x, sums = on_cpu(call.arguments)[0], call.run(subject)
        same_form("sums", sums, torch.empty(x.shape[1], dtype=torch.float32))
        yield column_sums_within(f"sums of {list(x.shape)}", sums, x)


@law(4, "column_sums")
def column_sums_pass_on_nan_and_inf(subject: Subject, desc: ColumnSumsDesc) -> None:
    """NaN and inf enter the sum of their column alone; the largest values do not overflow."""
    largest = torch.finfo(torch.float16).max
    for rows, cols in itertools.product((2, 700), (70, 264)):  # partial vectors, and whole vectors
        x = torch.ones(rows, cols, dtype=desc.dtype)
        x[0, 1], x[-1, 2], x[0, 9] = torch.nan, torch.inf, -torch.inf
        x[0, 64], x[-1, 64] = torch.inf, -torch.inf
        x[:, cols - 1] = largest
        sums = subject.run(desc, subject.here(x))
        column_sums_within(f"sums of {[rows, cols]}", sums, x)


def _error_size(desc: ActivationDesc | ActivationBackwardDesc, x: torch.Tensor) -> torch.Tensor:
    """Return the size to which an activation's rounding errors are proportional: ``1 + |x|``, or of
    a gated activation ``(1 + |a|) (2 + |b|)``."""
    if desc.name not in GATED:
        return 1 + x.abs()
    a, b = x.abs().chunk(2, -1)
    return (1 + a) * (2 + b)


@law(4, "activation", is_core=True)
def activation_is_within_the_bound(subject: Subject, desc: ActivationDesc) -> Iterator[float]:
    """The result is computed in float32 for any dtypes and rounded once; an empty input is fine."""
    for call in _calls(subject, desc, desc.dtype, *EMPTY):
        yield activation_within(subject, desc, call)


def activation_within(subject: Subject, desc: ActivationDesc, call: OpCall) -> float:
    """Require the result of a call to be within the bound of the formula in float64."""
    y = call.run(subject)
    expected, (x,) = exact(subject, desc, *call.arguments)
    same_form("y", y, torch.empty(expected.shape, dtype=desc.out_dtype))
    bound = FUNCTION * _error_size(desc, x) + ulp(expected, desc.out_dtype)
    return within("y", y, expected, bound)


@law(4, "activation_backward", is_core=True)
def activation_backward_is_within_the_bound(
    subject: Subject, desc: ActivationBackwardDesc
) -> Iterator[float]:
    """The result is computed in float32 for any dtypes and rounded once; an empty input is fine."""
    for call in _calls(subject, desc, desc.dtype, *EMPTY):
        yield activation_backward_within(subject, desc, call)


def activation_backward_within(
    subject: Subject, desc: ActivationBackwardDesc, call: OpCall
) -> float:
    """Require the gradient of a call to be within the bound of the formula in float64."""
    grad_x = call.run(subject)
    expected, (grad, x) = exact(subject, desc, *call.arguments)
    same_form("grad_x", grad_x, torch.empty(expected.shape, dtype=desc.out_dtype))
    size = grad.abs() * _error_size(desc, x) ** 2
    size = torch.cat((size, size), -1) if desc.name in GATED else size
    return within("grad_x", grad_x, expected, FUNCTION * size + ulp(expected, desc.out_dtype))


@law(4, "activation", "activation_backward", applies=lambda desc: desc.dtype == torch.bfloat16)
def activation_takes_every_bfloat16(
    subject: Subject, desc: ActivationDesc | ActivationBackwardDesc
) -> float:
    """Results are within the bound for each value whose square is finite, and for inf.

    Values go up to 1e15. Forward is also asked for NaN.
    """
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if isinstance(desc, ActivationBackwardDesc):
        values = values.nan_to_num(0.0, torch.inf, -torch.inf)
    x = torch.where(values.isfinite(), values.clamp(-1e15, 1e15), values).reshape(256, 256)
    x = torch.cat((x, inputs.moderate(256, 256, x.dtype)), 1) if desc.name in GATED else x
    if isinstance(desc, ActivationDesc):
        return activation_within(subject, desc, OpCall(desc, (subject.here(x),), {}))
    operands = subject.here((torch.ones(256, 256, dtype=torch.bfloat16), x))
    return activation_backward_within(subject, desc, OpCall(desc, operands, {}))


# Sequence, batch, heads, head size, and how many elements of a head are rotated.
ROTARY_SIZES = (
    (7, 3, 2, 10, 6),
    (4, 4, 4, 4, 4),
    (33, 2, 5, 64, 64),
    (5, 2, 3, 130, 32),
    (1, 1, 1, 2, 2),
)
UNROTATED = ((0, 3, 2, 8, 8), (5, 0, 2, 8, 8))
LONG = ((4100, 1, 1, 4, 2), (1, 1100, 1, 4, 4), (2, 2, 530, 4, 2))
LONGEST = ((70000, 1, 1, 2, 2),)  # above 65535; in bfloat16 alone, which costs less


@law(4, "rotary", is_core=True)
def rotary_is_within_the_bound(subject: Subject, desc: RotaryDesc) -> Iterator[float]:
    """Pairs are rotated in float32, also by angles of many turns; other elements are copied."""
    very_long = LONGEST if desc.dtype == torch.bfloat16 else ()
    for *sizes, rotated in subject.sizes("rotary", *ROTARY_SIZES, *UNROTATED, *LONG, *very_long):
        length, batch = sizes[:2]
        call = _Call(desc, tuple(sizes), rotated, length + 3)
        if desc.layout == "thd":
            call.keywords["cu_seqlens"] = torch.arange(batch + 1, dtype=torch.int32) * length
        yield call.within_the_bound(subject, f"{sizes}, {rotated} rotated")


@law(4, "rotary")
def rotary_starts_at_the_given_positions(subject: Subject, desc: RotaryDesc) -> Iterator[float]:
    """Each sequence begins at its own position, from the first to the last one with angles."""
    for *sizes, rotated in subject.sizes("rotary", *ROTARY_SIZES):
        length, batch = sizes[:2]
        call = _Call(desc, tuple(sizes), rotated, length + 2 * batch)
        starts = 2 * batch - torch.arange(batch, dtype=torch.int32).flip(0) * 2
        call.keywords["start_positions"] = starts
        if desc.layout == "thd":
            call.keywords["cu_seqlens"] = torch.arange(batch + 1, dtype=torch.int32) * length
        yield call.within_the_bound(subject, f"{sizes} from {starts.tolist()}")


@law(4, "rotary", applies=lambda desc: desc.layout == "thd")
def rotary_of_sequences_of_any_length(subject: Subject, desc: RotaryDesc) -> Iterator[float]:
    """Positions restart in each sequence; a token outside of all sequences gets zeros.

    Sequences may be empty.
    """
    for bounds in ([0, 0, 2, 2, 9, 12], [3, 4, 4, 11], [0], [5], [0, 12], [0, 1100, 1100, 1103]):
        tokens = max(12, bounds[-1])
        call = _Call(desc, (tokens, 1, 2, 8), 8, max(12, tokens) + 4)
        call.keywords["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        yield call.within_the_bound(subject, f"cu_seqlens {bounds}")
        starts = torch.arange(len(bounds) - 1, dtype=torch.int32).flip(0)
        call.keywords["start_positions"] = starts
        name = f"cu_seqlens {bounds} from {starts.tolist()}"
        yield call.within_the_bound(subject, name)


@law(4, "rotary")
def rotary_is_nan_at_positions_without_angles(
    subject: Subject, desc: RotaryDesc
) -> Iterator[float]:
    """A position below 0 or behind the last angle gives NaN; the rest of the head is copied."""
    far = torch.iinfo(torch.int32).max - 16
    for first in (-3, 5, -far, far):
        call = _Call(desc, (4, 2, 3, 10), 6, 8)
        call.keywords["start_positions"] = torch.tensor([first, 1], dtype=torch.int32)
        if desc.layout == "thd":
            call.keywords["cu_seqlens"] = torch.tensor([0, 4, 8], dtype=torch.int32)
        yield call.within_the_bound(subject, f"sequences from {first} and 1")


@law(4, "rotary")
def rotary_passes_on_nan_and_inf(subject: Subject, desc: RotaryDesc) -> None:
    """A NaN or inf of x stays in its pair, or in its element if that is not rotated."""
    for value in (torch.nan, torch.inf):
        call = arguments(subject, desc)
        x = call.arguments[0]
        plain = on_cpu(call.run(subject))
        for element in (1, x.shape[-1] - 1):
            spoilt = x.clone()
            spoilt[2, ..., 0, element] = value
            y = on_cpu(subject.run(desc, spoilt, *call.arguments[1:], **call.keywords))
            size = call.arguments[1].shape[-1]
            pair = {element}
            if element < size:
                pair = {0, 1} if desc.interleaved else {1, 1 + size // 2}
            outside = [at for at in range(x.shape[-1]) if at not in pair]
            name = f"{value} in element {element}"
            require(
                torch.equal(y[..., outside], plain[..., outside]), f"{name} changes other elements"
            )
            is_spoilt = ~y[2, ..., 0, sorted(pair)].isfinite()
            require(bool(is_spoilt.all()), f"{name} is lost")


@law(6, "rotary")
def rotary_of_packed_heads_equals_that_of_each(subject: Subject, desc: RotaryDesc) -> None:
    """Queries and keys beside values have the bits of a call for each, whatever the strides.

    The values are as they were, those of tokens of no sequence too.
    """
    if subject.refuses(PackedRotaryDesc.of(desc)) is not None:
        return
    packed = subject.bound(PackedRotaryDesc.of(desc))
    for *sizes, rotated in subject.sizes("rotary", *ROTARY_SIZES, *UNROTATED):
        length, batch, heads, size = sizes
        groups, keywords = max(1, heads // 2), {}
        if desc.layout == "thd":  # some tokens before and behind the sequences
            bounds = torch.linspace(1, max(1, length * batch - 2), batch + 1).round()
            keywords["cu_seqlens"] = bounds.to(torch.int32)
        keywords["start_positions"] = torch.arange(2, 2 + batch, dtype=torch.int32)
        rows = rotary_input(desc, (length, batch, heads + 3 * groups, size), 37)
        rows[..., -1, 0] = torch.nan
        freqs = rotary_angles(length * batch + 2 + batch, rotated)
        (rows, freqs), keywords = subject.here(((rows, freqs), keywords))
        q, k, _, v = rows.split_with_sizes([heads, groups, groups, groups], -2)
        for parts in ((q, k, v), tuple(x.contiguous() for x in (q, k, v))):
            y = packed(parts[0], freqs, k=parts[1], v=parts[2], **keywords)
            turned = [subject.run(desc, x, freqs, **keywords) for x in parts[:2]]
            require(y.is_contiguous(), f"y of {sizes} is not contiguous")
            expected = torch.cat((*turned, parts[2]), -2)
            same_bits(f"y of {sizes}, {rotated} rotated", y, expected)


class _Call:
    """A call of ``desc`` with x of ``sizes`` and angles of ``positions`` for ``rotated`` elements.

    Laws add keywords to ``keywords``; all tensors are on the CPU.
    """

    def __init__(
        self, desc: RotaryDesc, sizes: tuple[int, ...], rotated: int, positions: int
    ) -> None:
        self.desc = desc
        self.x = rotary_input(desc, sizes, 31)
        self.freqs = rotary_angles(positions, rotated)
        self.keywords: dict[str, Any] = {}

    def within_the_bound(self, subject: Subject, name: str) -> float:
        """Require the backend's result to be within the bound of the formula in float64."""
        positional, keywords = subject.here(((self.x, self.freqs), self.keywords))
        y = subject.run(self.desc, *positional, **keywords)
        same_form(f"y of {name}", y, self.x)
        require(y.is_contiguous(), f"y of {name} is not contiguous")
        expected, size = self._in_float64()
        # Copied elements and zeros are exact: their size is 0.
        bound = FUNCTION * size + ulp(expected, self.desc.dtype) * (size > 0)
        return within(f"y of {name}", y, expected, bound)

    def _in_float64(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated x, and the magnitudes to which its rounding errors are relative."""
        x, rotated = self.x.double(), self.freqs.shape[-1]
        is_token, positions = self._positions()
        table = self.freqs.double().reshape(-1, rotated)
        is_valid = (positions >= 0) & (positions < len(table))
        angles = table[torch.where(is_valid, positions, 0)]
        angles = torch.where(is_valid[..., None], angles, torch.nan)[..., None, :]
        first, second = self._pairs(rotated)
        a, b, at_a, at_b = x[..., first], x[..., second], angles[..., first], angles[..., second]
        y, size = x.clone(), torch.zeros_like(x)
        if self.desc.inverse:
            y[..., first] = a * at_a.cos() + b * at_b.sin()
            y[..., second] = b * at_b.cos() - a * at_a.sin()
        else:
            y[..., first] = a * at_a.cos() - b * at_a.sin()
            y[..., second] = b * at_b.cos() + a * at_b.sin()
        size[..., first] = size[..., second] = a.abs() + b.abs()
        is_token = is_token[..., None, None]
        return torch.where(is_token, y, 0), torch.where(is_token, size, 0)

    def _pairs(self, rotated: int) -> tuple[list[int], list[int]]:
        """Return the first and the second elements of the pairs."""
        if self.desc.interleaved:
            return [*range(0, rotated, 2)], [*range(1, rotated, 2)]
        return [*range(rotated // 2)], [*range(rotated // 2, rotated)]

    def _positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each token whether it is in a sequence, and its position there."""
        layout, sizes = self.desc.layout, self.x.shape[:-2]
        positions = torch.zeros(sizes, dtype=torch.int64)
        is_token = torch.ones(sizes, dtype=torch.bool)
        starts = self.keywords.get("start_positions")
        if layout != "thd":
            view, is_seen = (positions if layout == "bshd" else positions.t()), is_token
            view += torch.arange(view.shape[1])
            if starts is not None:
                view += starts[:, None]
            return is_seen, positions
        bounds = self.keywords["cu_seqlens"].tolist()
        is_token[:] = False
        for at, (begin, end) in enumerate(itertools.pairwise(bounds)):
            is_token[begin:end] = True
            first = 0 if starts is None else int(starts[at])
            positions[begin:end] = torch.arange(first, first + end - begin)
        return is_token, positions
