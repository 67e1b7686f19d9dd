"""``explain``: who runs an operation or a model's layers, and why nobody else; and its command."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import OPS, OPTIONAL_OPS, OpDesc, QuantizeDesc
from fp8core.errors import OperandError, RecipeError
from tests.chain import fused_toy
from tests.device import DEVICE
from tests.dispatch import toys
from tests.pairs import pairs

MX = recipe.MXFP8BlockScaling()
GEMMS = ["fprop", "dgrad", "wgrad"]
BIAS = "bias gradient"
TENSORS = ["input", "weight", "grad_output"]
OF_GROUPS = ["input of groups", "grad_output of groups"]


Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("isolated")


def backends(explanation: object) -> list[str | None]:
    return [line.choice and line.choice.backend for line in explanation.lines]


def steps(explanation: object) -> list[str]:
    return [line.step for line in explanation.lines]


def test_explanation_of_an_operation_holds_its_descriptors_alone() -> None:
    found = {op: fp8core.explain(op, recipe.DelayedScaling()) for op in OPS}
    assert {op: set(backends(explanation)) for op, explanation in found.items()} == {
        op: {"reference"} for op in OPS
    }
    assert {op: {line.choice.desc.op for line in found[op].lines if line.choice} for op in OPS} == {
        op: {op} for op in OPS
    }


def test_each_use_of_an_operation_has_a_line() -> None:
    expected = {"gemm": GEMMS, "grouped_gemm": GEMMS, "quantize": TENSORS + OF_GROUPS, "amax": []}
    assert {op: steps(fp8core.explain(op, MX)) for op in expected} == expected


def test_lines_print_what_runs_where_and_why() -> None:
    assert str(fp8core.explain("scale_update")) == (
        "ScaleUpdateDesc(max) on cpu: reference (device and priority)\n"
        "  kernel: fp8core_backends.reference.scaling.scale_update"
    )


def test_amaxes_are_asked_for_where_scales_follow_from_them() -> None:
    assert steps(fp8core.explain("amax", "rowwise")) == TENSORS


def test_kernel_is_what_the_backend_calls_it() -> None:
    def bind(self: toys.ToyBackend, desc: OpDesc, device: torch.device) -> Callable[..., None]:
        return toys.named_kernel("sm90_update")

    toys.register(toys.backend("toy", priority=1, bind=bind))
    (line,) = fp8core.explain("scale_update").lines
    assert line.kernel == "sm90_update"


def test_other_kernels_of_the_backend_are_said_with_reasons() -> None:
    def bind(self: toys.ToyBackend, desc: OpDesc, device: torch.device) -> Callable[..., None]:
        run = toys.named_kernel("sm90_update")
        run.other_kernels = (("sm80_update", "sm90_update comes first"),)  # type: ignore[attr-defined]
        return run

    toys.register(toys.backend("toy", priority=1, bind=bind))
    said = str(fp8core.explain("scale_update"))
    assert "  kernel: sm90_update\n  not sm80_update: sm90_update comes first" in said


def test_backend_whose_bind_fails_runs_nothing() -> None:
    def bind(self: toys.ToyBackend, desc: OpDesc, device: torch.device) -> Callable[..., None]:
        raise OSError("no compiler")

    toys.register(toys.backend("toy", priority=1, bind=bind))
    explanation = fp8core.explain("scale_update")
    assert explanation.refused
    assert (
        "toy says that it runs ScaleUpdateDesc(max), but its bind() failed: OSError: no compiler"
        in (str(explanation))
    )


def test_alternative_that_could_run_it_says_what_it_lost_to() -> None:
    toys.register(toys.backend("toy", priority=-1, device_types=("cpu",)))
    assert "toy: could run it, but reference comes first (device and priority)" in str(
        fp8core.explain("amax")
    )


def test_fusion_that_nobody_offers_is_no_refusal() -> None:
    for op in OPTIONAL_OPS:
        explanation = fp8core.explain(op, MX)
        assert not explanation.refused, op
        assert explanation.lines, op
        assert all("NOT OFFERED, the pair runs" in str(line) for line in explanation.lines), op


def test_default_is_the_default_recipe() -> None:
    default = recipe.get_default_recipe()
    assert fp8core.explain("gemm") == fp8core.explain("gemm", default)


def test_recipe_of_high_precision_quantizes_nothing() -> None:
    assert fp8core.explain("quantize", recipe.PerLayer({})).lines == ()


@pytest.mark.parametrize("user", ["amax_compute_algo", "scaling_factor_compute_algo"])
def test_users_own_scale_update_runs_on_no_backend(user: str) -> None:
    delayed = recipe.DelayedScaling(**{user: lambda *args: args[0]})
    assert fp8core.explain("scale_update", delayed).lines == ()


def test_refusal_is_a_line_with_the_remedy() -> None:
    explanation = fp8core.explain("gemm", MX, device="cuda:0")
    assert explanation.refused
    assert backends(explanation) == [None, None, None]
    assert str(explanation).startswith("fprop: REFUSED: no backend runs GemmDesc(a=e4m3")
    assert "choose it with FP8CORE_BACKEND=reference" in str(explanation)


def test_policy_counts_for_the_explanation() -> None:
    with fp8core.use_backend("reference"):
        explanation = fp8core.explain("gemm", MX, device="cuda:0")
    assert not explanation.refused
    assert "reference (use_backend())" in str(explanation)


def test_substitution_is_shown() -> None:
    toys.register(toys.backend("toy", refuse=lambda desc: f"no {desc.op} here"))
    with fp8core.use_backend("toy"):
        text = str(fp8core.explain("amax"))
    assert "reference (device and priority)" in text
    assert "substitution: use_backend() asks for toy, but no amax here" in text


def test_device_is_the_selected_backends() -> None:
    toys.register(toys.backend("toy", device_types=("meta",)))
    with fp8core.use_backend("toy"):
        (line,) = fp8core.explain("scale_update").lines
    assert line.choice is not None
    assert line.choice.device == torch.device("meta")


def test_unknown_operation_gets_the_list_and_the_nearest() -> None:
    with pytest.raises(RecipeError) as caught:
        fp8core.explain("gem")
    message = str(caught.value)
    assert "explain() names the operation 'gem'" in message
    assert ", ".join(OPS) in message
    assert "Did you mean 'gemm'?" in message


def test_recipe_may_be_given_by_name() -> None:
    assert fp8core.explain("gemm", "mxfp8") == fp8core.explain("gemm", MX)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_activations_are_of_the_dtype_of_the_layer(dtype: torch.dtype) -> None:
    layer = fp8core.Linear(32, 32, params_dtype=dtype)
    assert fp8core.explain(layer, MX) == fp8core.explain(layer, MX, dtype=dtype)
    assert fp8core.explain(layer, MX) != fp8core.explain(layer, MX, dtype=torch.bfloat16)


@pytest.mark.parametrize("wrong", [3, recipe.MXFP8BlockScaling], ids=["number", "class"])
def test_what_is_no_recipe_is_refused(wrong: object) -> None:
    with pytest.raises(RecipeError, match=r"explain\(recipe=.*expected a Recipe"):
        fp8core.explain("gemm", wrong)


def test_target_that_is_neither_is_refused() -> None:
    with pytest.raises(OperandError, match="expected an operation's name or a model"):
        fp8core.explain(3)


def test_model_without_our_layers_is_refused() -> None:
    with pytest.raises(OperandError, match="Sequential holds no fp8core layer"):
        fp8core.explain(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        fp8core.Linear(32, 32), torch.nn.ReLU(), fp8core.GroupedLinear(2, 32, 32)
    )


def test_model_has_a_line_for_each_operation_of_each_layer() -> None:
    lines = fp8core.explain(model(), MX).lines
    assert [(line.layer, line.step) for line in lines] == [
        (layer, step) for layer in ("0", "2") for step in (*GEMMS, *TENSORS, BIAS)
    ]


def test_delayed_scaling_of_a_model_has_a_line_for_its_update() -> None:
    lines = fp8core.explain(model(), recipe.DelayedScaling()).lines
    assert sum(line.choice.desc.op == "scale_update" for line in lines if line.choice) == 2


def test_model_in_high_precision_has_no_casts() -> None:
    assert steps(fp8core.explain(model(), recipe.PerLayer({}))) == [*GEMMS, BIAS] * 2


def test_layer_alone_is_called_by_its_label() -> None:
    lines = fp8core.explain(fp8core.Linear(32, 16), MX).lines
    assert {line.layer for line in lines} == {"Linear(32, 16)"}


def test_rules_by_name_need_a_prepared_model() -> None:
    with pytest.raises(RecipeError, match=r"fp8core\.prepare\(model\)"):
        fp8core.explain(model(), recipe.PerLayer({"0": MX}))


def test_rules_by_name_count_for_each_layer() -> None:
    rules = recipe.PerLayer({"0": None}, default=MX)
    lines = fp8core.explain(fp8core.prepare(model()), rules).lines
    quantized = {line.layer for line in lines if line.step in TENSORS}
    assert quantized == {"2"}


def test_model_on_meta_is_asked_on_meta() -> None:
    (line, *_) = fp8core.explain(fp8core.Linear(32, 32, device="meta"), MX).lines
    assert line.choice is not None
    assert line.choice.device == torch.device("meta")


def test_model_may_be_asked_for_another_device() -> None:
    assert fp8core.explain(model(), MX, device="cuda:0").refused


def test_cast_that_is_substituted_in_a_model_is_shown() -> None:
    def refuse(desc: OpDesc) -> str | None:
        return "no casts here" if isinstance(desc, QuantizeDesc) else None

    toys.register(toys.backend("toy", refuse=refuse))
    with fp8core.use_backend("toy"):
        explanation = fp8core.explain(fp8core.Linear(32, 32), MX)
    assert backends(explanation) == ["toy"] * 3 + ["reference"] * 3 + ["toy"]


@pytest.mark.parametrize(
    ("layer_type", "dtype", "name"),
    pairs(
        ["linear", "grouped_linear"],
        [torch.float32, torch.bfloat16],
        ["current", "mxfp8", "nvfp4", "delayed"],
    ),
)
def test_explanation_asks_what_the_layer_asks(
    layer_type: str, dtype: torch.dtype, name: str
) -> None:
    asked: set[OpDesc] = set()

    def note(desc: OpDesc) -> None:
        asked.add(desc)

    toys.register(toys.backend("toy", refuse=note))
    is_grouped = layer_type == "grouped_linear"
    layer = fp8core.GroupedLinear(2, 32, 32) if is_grouped else fp8core.Linear(32, 32)
    x = torch.randn(64, 32, dtype=dtype, requires_grad=True)
    splits = ([32, 32],) if is_grouped else ()
    mixed = torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype != torch.float32)
    with mixed, fp8core.autocast(recipe=recipe.by_name(name)):
        layer(x, *splits).sum().backward()
    ran = {desc for desc in asked if not _is_half(desc)}
    asked.clear()
    fp8core.explain(layer, recipe.by_name(name), dtype=dtype)
    assert {desc for desc in asked if not _is_half(desc)} == ran


def _is_half(desc: OpDesc) -> bool:
    return isinstance(desc, QuantizeDesc) and (desc.rowwise is None or desc.columnwise is None)


def fused_lines(offered: tuple[str, ...], layer: torch.nn.Module) -> dict[str, str | None]:
    """The kernel of each fused step of ``layer``, by the step."""
    with fused_toy.installed(*offered):
        lines = fp8core.explain(layer, MX).lines
    return {line.step: line.kernel for line in lines if line.is_optional}


def test_layer_has_a_line_for_each_fusion_that_it_binds() -> None:
    layer = fp8core.LayerNormMLP(32, 64)
    found = fused_lines(("norm_quantize", "activation_backward_quantize"), layer)
    assert found.keys() == {"norm with cast", "gelu backward with cast"}
    assert all(kernel and "FusedToy" in kernel for kernel in found.values())


def test_layer_has_no_line_for_a_fusion_that_is_not_offered() -> None:
    assert fused_lines((), fp8core.LayerNormMLP(32, 64)) == {}
    assert fused_lines(("norm_quantize",), fp8core.Linear(32, 64)) == {}


def test_command_prints_the_explanation(cli: Command) -> None:
    status, out, _ = cli("explain", "--op", "gemm", "--recipe", "mxfp8")
    assert (status, out) == (0, f"{fp8core.explain('gemm', MX)}\n")


def test_command_fails_when_nothing_runs_a_line(
    cli: Command,
) -> None:
    status, out, _ = cli("explain", "--op", "gemm", "--device", "cuda:0")
    assert status == 1
    assert "REFUSED" in out


def test_wrong_backend_in_the_environment_is_bad_usage(
    cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8CORE_BACKEND", "refrence")
    status, _, err = cli("explain", "--op", "gemm")
    assert status == 2
    assert "Did you mean 'reference'?" in err


def test_command_explains_high_precision(
    cli: Command,
) -> None:
    status, out, _ = cli("explain", "--op", "gemm", "--recipe", "none", "--device", "cuda:0")
    assert status == 0
    assert "GemmDesc(a=None, b=None, out=bfloat16) on cuda:0: reference" in out


def test_command_says_that_a_recipe_has_no_use_for_an_operation(
    cli: Command,
) -> None:
    status, out, _ = cli("explain", "--op", "quantize", "--recipe", "none")
    assert status == 0
    assert out.endswith("has no use for it\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "gem"), "Did you mean 'gemm'?"),
        (("--op", "gemm", "--recipe", "mxpf8"), "Did you mean 'mxfp8'?"),
        (("--op", "gemm", "--device", "gpu9"), "'gpu9' is no torch device; devices are cpu, cuda"),
    ],
    ids=["op", "recipe", "device"],
)
def test_command_with_a_wrong_name_is_bad_usage(
    arguments: tuple[str, ...],
    message: str,
    cli: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli("explain", *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_command_without_an_operation_is_bad_usage(
    cli: Command,
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli("explain")
    assert caught.value.code == 2


def test_a_converted_model_is_explained_by_its_own_recipe() -> None:
    own = torch.nn.Sequential(torch.nn.Linear(32, 32))
    fp8core.convert(own, recipe.MXFP8BlockScaling())
    assert str(fp8core.explain(own)) == str(fp8core.explain(own, recipe.MXFP8BlockScaling()))
    assert str(fp8core.explain(own)) != str(fp8core.explain(own, recipe.NVFP4BlockScaling()))


def blocks(count: int) -> torch.nn.Module:
    with torch.device("cpu"):  # whose lines are those that the tests expect
        block = {"up": torch.nn.Linear(32, 64), "down": torch.nn.Linear(64, 32)}
    return torch.nn.ModuleList(torch.nn.ModuleDict(copy.deepcopy(block)) for _ in range(count))


def test_equal_layers_of_a_model_are_explained_together_and_in_brief() -> None:
    texts = []
    for count in (2, 32):
        own = blocks(count)
        fp8core.convert(own, "current")
        texts.append(str(fp8core.explain(own, device="cpu")))
    assert texts[1].replace("0-31", "0-1").replace("64 layers", "4 layers") == texts[0]
    first, *lines, last = texts[1].splitlines()
    assert first == "64 layers, 0-31.up, 0-31.down:"
    assert lines[0].startswith("  fprop: GemmDesc(a=e4m3 block=(0,0)")
    assert [line[:9] for line in lines if "holds" in line] == ["0-31.up: ", "0-31.down"]
    assert "runs on cuda, not on" not in texts[1]
    assert last == "each layer by itself: explain(...).details()"


def test_details_are_those_of_each_layer() -> None:
    own = blocks(2)
    fp8core.convert(own, "current")
    details = fp8core.explain(own, device="cpu").details()
    for name in ("0.up", "0.down", "1.up", "1.down"):
        assert details.count(f"{name} fprop: ") == details.count(f"{name}: holds ") == 1
        alone = fp8core.explain(own.get_submodule(name), device="cpu")
        assert str(alone) == alone.details()


def test_a_layer_that_differs_has_lines_of_its_own() -> None:
    own = blocks(3)
    mixed = recipe.PerLayer({"1.up": recipe.MXFP8BlockScaling()}, default="current")
    fp8core.convert(own, mixed)
    text = str(fp8core.explain(own, device="cpu"))
    assert "5 layers, 0,2.up, 0-2.down:" in text
    assert "1.up fprop: GemmDesc(a=e4m3 block=(1,32) e8m0" in text


def test_a_refusal_is_in_the_brief_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    own = blocks(2)
    fp8core.convert(own, "current")
    text = str(fp8core.explain(own, "mxfp8", device="xpu"))
    assert "4 layers, 0-1.up, 0-1.down:" in text
    assert "  fprop: REFUSED: no backend runs GemmDesc(" in text
