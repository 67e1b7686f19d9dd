"""Which layers are converted, what the report says of the others, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fp8core
from fp8core import ConversionReport, OperandError, RecipeError, UnsupportedError, recipe


class Decoder(nn.Module):
    """Two blocks of a gated MLP with a router, an embedding and a head; nothing is called."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(self._block() for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 100, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    @staticmethod
    def _block() -> nn.ModuleDict:
        moe = nn.ModuleDict({"gate": nn.Linear(16, 4), "experts": nn.Linear(16, 32)})
        return nn.ModuleDict({"output": nn.Linear(16, 24), "gate": nn.Linear(16, 8), "moe": moe})


CONVERTED = [f"blocks.{i}.{name}" for i in range(2) for name in ("output", "gate", "moe.experts")]


def names(report: ConversionReport) -> list[str]:
    return [entry.name for entry in report.converted]


def reasons(report: ConversionReport) -> dict[str, str]:
    return {entry.name: entry.reason for entry in report.skipped}


def test_default_leaves_head_and_routers_and_says_so() -> None:
    own = Decoder()
    report = fp8core.convert(own, "mxfp8")
    assert names(report) == [*CONVERTED, "norm"]
    assert reasons(report) == {
        "embed": "class is neither torch.nn.Linear, LayerNorm nor RMSNorm",
        "blocks.0.moe.gate": "router of experts",
        "blocks.1.moe.gate": "router of experts",
        "lm_head": "output head; convert it with a filter that names it",
    }
    assert type(own.lm_head) is nn.Linear


def test_shares_equal_those_counted_by_hand() -> None:
    report = fp8core.convert(Decoder(), "mxfp8")
    # a block: output 16x24 + 24, gate 16x8 + 8, experts 16x32 + 32; norm 16 + 16
    converted = 2 * (16 * 24 + 24 + 16 * 8 + 8 + 16 * 32 + 32) + 32
    others = 100 * 16 + 2 * (16 * 4 + 4) + 16 * 100
    flops = 2 * 2 * 16 * (24 + 8 + 32)
    other_flops = 2 * 2 * 16 * 4 + 2 * 16 * 100
    assert report.num_converted_parameters == converted
    assert report.num_parameters == converted + others
    assert report.parameter_share == converted / (converted + others)
    assert report.flop_share == flops / (flops + other_flops)
    assert f"{flops / (flops + other_flops):.1%} of their FLOPs a token" in str(report)
    assert "6 of 9 linear layers converted" in str(report)


def test_the_head_is_found_by_its_place_not_its_word_alone() -> None:
    own = nn.ModuleDict({"0": nn.ModuleDict({"head": nn.Linear(4, 4)}), "head": nn.Linear(4, 4)})
    assert names(fp8core.convert(own)) == ["0.head"]


def test_the_head_that_a_model_names_is_left() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.to_words = nn.Linear(4, 4), nn.Linear(4, 9)

        def get_output_embeddings(self) -> nn.Module:
            return self.to_words

    report = fp8core.convert(Named())
    assert names(report) == ["body"]
    assert reasons(report)["to_words"].startswith("output head")


def test_a_weight_tied_to_an_embedding_makes_a_head() -> None:
    own = Decoder(tied=True)
    own.anything, own.lm_head = own.lm_head, nn.Linear(2, 2)
    report = fp8core.convert(own)
    assert reasons(report)["anything"] == "output head: its weight is that of the embedding 'embed'"
    assert own.anything.weight is own.embed.weight


def test_a_filter_can_have_the_tied_head_and_the_report_says_it_is_shared() -> None:
    own = Decoder(tied=True)
    report = fp8core.convert(own, filter="lm_head")
    assert names(report) == ["lm_head"]
    assert any("another layer's too" in note and "lm_head" in note for note in report.notes)
    assert own.lm_head.weight is own.embed.weight


@pytest.mark.parametrize(
    ("chosen", "want"),
    [
        ("experts", ["blocks.0.moe.experts", "blocks.1.moe.experts"]),
        (["blocks.1.moe.*", "lm_head"], ["blocks.1.moe.gate", CONVERTED[5], "lm_head"]),
        ("blocks.?.output", [CONVERTED[0], CONVERTED[3]]),
        (lambda module, path: path.endswith("norm"), ["norm"]),
        (lambda module, path: isinstance(module, nn.Linear) and module.in_features == 16 and
            "head" in path, ["lm_head"]),
    ],
)  # fmt: skip
def test_filter(chosen: Any, want: list[str]) -> None:
    report = fp8core.convert(Decoder(), "current", filter=chosen)
    assert names(report) == want
    assert reasons(report)["blocks.0.gate"] == "the filter leaves it out"


def test_a_word_of_a_pattern_is_a_whole_word() -> None:
    own = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
    assert names(fp8core.convert(own, filter="1")) == ["1"]


def test_skip_is_in_addition_to_the_default() -> None:
    report = fp8core.convert(Decoder(), "current", skip=["blocks.0", "norm"])
    assert names(report) == CONVERTED[3:]
    assert reasons(report)["norm"] == "named in skip"
    assert reasons(report)["lm_head"].startswith("output head")


class Own(nn.Linear):
    pass


def weight_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer)


def patched(layer: nn.Module) -> nn.Module:
    layer.forward = layer.forward  # type: ignore[method-assign]  # as accelerate's hooks do it
    return layer


OBSTACLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Own(8, 8), "a subclass of torch.nn.Linear"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "parametrized"),
    "weight_norm": (lambda: weight_norm(nn.Linear(8, 8)), "its weight is computed by a hook"),
    "patched": (lambda: patched(nn.Linear(8, 8)), "its forward was replaced on the object"),
    "float64": (lambda: nn.Linear(8, 8).double(), "its weight is torch.float64"),
    "lazy": (lambda: nn.LazyLinear(8), "not known before its first batch"),
    "two dimensions": (lambda: nn.LayerNorm((4, 8)), "normalizes 2 dimensions"),
    "no weight": (lambda: nn.LayerNorm(8, elementwise_affine=False), "it has no weight"),
    "no bias": (lambda: nn.LayerNorm(8, bias=False), "a LayerNorm without a bias"),
    "no eps": (lambda: nn.RMSNorm(8), "its eps is None"),
    "convolution": (lambda: nn.Conv1d(8, 8, 1), "class is neither"),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_cannot_be_converted_is_left_with_a_reason(case: str) -> None:
    make, reason = OBSTACLES[case]
    layer = make()
    kind = type(layer)
    own = nn.ModuleDict({"it": layer, "other": nn.Linear(8, 8)})
    report = fp8core.convert(own, "current")
    assert names(report) == ["other"]
    assert reason in reasons(report)["it"]
    assert f"{kind.__name__} (it)" in str(report)
    assert type(layer) is kind
    fp8core.unconvert(own)
    with pytest.raises(UnsupportedError, match="'it' cannot be converted: "):
        fp8core.convert(own, "current", filter=["other", "it"])
    assert type(own["other"]) is nn.Linear


def test_attention_of_torch_is_left_and_its_flops_are_counted() -> None:
    own = nn.TransformerEncoderLayer(16, 2, 32)
    report = fp8core.convert(own, "mxfp8")
    assert names(report) == ["linear1", "linear2", "norm1", "norm2"]
    assert "reads its weight" in reasons(report)["self_attn.out_proj"]
    assert report.flop_share == 2 * 16 * 32 / (2 * 16 * 32 + 3 * 16 * 16 + 16 * 16)
    assert any("set_fastpath_enabled(False)" in note for note in report.notes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_left() -> None:
    scripted = torch.jit.script(nn.Linear(8, 8))
    report = fp8core.convert(nn.ModuleList([scripted, nn.Linear(8, 8)]))
    assert "TorchScript" in reasons(report)["0"]


def test_a_layer_at_two_paths_is_converted_once_under_the_first() -> None:
    layer = nn.Linear(8, 8)
    report = fp8core.convert(nn.ModuleDict({"a": layer, "b": layer}))
    assert names(report) == ["a"]
    assert reasons(report) == {"b": "the same layer as 'a'"}
    assert report.parameter_share == report.flop_share == 1
    assert layer.name == "a"


def test_layers_of_fp8core_take_the_recipe_and_their_path() -> None:
    own = nn.Sequential(fp8core.LayerNormLinear(32, 32, name="mine"), nn.Linear(32, 32))
    x = torch.randn(32, 32)
    report = fp8core.convert(own, "mxfp8")
    assert [entry.name for entry in report.native] == ["0"]
    assert report.flop_share == 1
    own(x)
    assert "last run: MXFP8BlockScaling on reference" in str(own[0])
    assert own[0].name == "0"
    fp8core.unconvert(own)
    own(x)
    assert "last run: high precision" in str(own[0])
    assert own[0].name == "mine"


def test_names_leave_out_what_wrappers_add() -> None:
    own = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="eager")
    assert names(fp8core.convert(own)) == ["0"]


def test_per_layer_sees_the_paths_and_the_report_what_it_leaves() -> None:
    own = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 24)})
    mixed = recipe.PerLayer({"b": None, "*.typo": None}, default=recipe.MXFP8BlockScaling())
    report = fp8core.convert(own, mixed)
    own["a"](torch.randn(2, 8))
    own["b"](torch.randn(2, 8))
    assert own["a"]._bindings.last[1].plan.fprop.a is not None
    assert own["b"]._bindings.last[1].plan.fprop.a is None
    assert "by the recipe these compute in high precision: b" in report.notes
    assert "the recipe's rule '*.typo' matches no converted layer" in report.notes
    assert [entry.is_low_precision for entry in report.converted] == [True, False]
    assert (report.flop_share, report.low_precision_flop_share) == (1, 8 / 32)
    assert (
        "in low precision by the recipe: 1 of 2 linear layers, 25.0% of their FLOPs a token"
        in str(report).splitlines()
    )


def test_without_a_recipe_nothing_is_counted_as_low_precision() -> None:
    report = fp8core.convert(nn.Sequential(nn.Linear(8, 8)))
    assert (report.flop_share, report.low_precision_flop_share) == (1, 0)
    assert "in low precision by the recipe" not in str(report)


def test_layers_too_small_to_gain_are_noted_and_converted() -> None:
    for chosen, size, is_small in (
        ("current", (1024, 1024), True),
        ("current", (1024, 1025), False),
        ("current", (4097, 1024), False),
        ("rowwise", (4096, 2048), True),
        ("rowwise", (1024, 8192), True),
        ("rowwise", (2048, 4096), True),
        ("rowwise", (2049, 4096), False),
        ("mxfp8", (64, 64), False),
        (None, (64, 64), False),
    ):
        own = nn.Sequential(nn.Linear(*size, device="meta"))
        report = fp8core.convert(own, chosen)
        assert names(report) == ["0"]
        is_noted = any("too small to gain" in note for note in report.notes)
        assert is_noted == is_small, (chosen, size)


def test_report_is_text_and_json() -> None:
    report = fp8core.convert(Decoder(), recipe.DelayedScaling(amax_history_len=4))
    loaded = json.loads(json.dumps(report.as_dict()))
    assert loaded["recipe"] == "DelayedScaling(amax_history_len=4)"
    assert loaded["converted"][0]["flops"] == 2 * 16 * 24
    assert loaded["flop_share"] == report.flop_share
    assert loaded["low_precision_flop_share"] == report.low_precision_flop_share
    assert "recipe: DelayedScaling(amax_history_len=4)" in str(report)
    assert "(0, 1, 2 and 4 more)" in str(
        fp8core.convert(nn.ModuleList(nn.Linear(2, 2) for _ in "1234567"))
    )


WRONG: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "recipe name": (RecipeError, {"recipe": "mxpf8"}, "Did you mean 'mxfp8'"),
    "recipe class": (RecipeError, {"recipe": recipe.DelayedScaling}, "expected a Recipe"),
    "filter word": (RecipeError, {"filter": ["outptu"]}, "Did you mean 'output'"),
    "filter type": (RecipeError, {"filter": 3}, "expected a function or patterns"),
    "filter item": (RecipeError, {"filter": [3]}, "3 is no pattern"),
    "filter not matching": (OperandError, {"filter": lambda *_: False}, "the filter leaves it out"),
    "filter of another class": (UnsupportedError, {"filter": "embed"}, "'embed' cannot be"),
    "skip word": (RecipeError, {"skip": "lm_haed"}, "Did you mean 'lm_head'"),
    "skip type": (RecipeError, {"skip": None}, "expected patterns"),
    "skip of all": (OperandError, {"skip": ["blocks"]}, "no torch.nn.Linear is left"),
    "recipe that cannot plan": (
        RecipeError, {"recipe": recipe.CustomRecipe(qfactory=lambda role: 3)}, "qfactory returned"
    ),
}  # fmt: skip


def test_bad_input_is_an_error_and_changes_nothing() -> None:
    own = Decoder()
    before = [(type(module), dict(vars(module))) for module in own.modules()]
    for case, (kind, arguments, message) in WRONG.items():
        with pytest.raises(kind, match=message.replace("(", r"\(")):
            fp8core.convert(own, **arguments)
        assert [(type(module), vars(module)) for module in own.modules()] == before, case


def test_an_error_of_the_filter_passes_and_changes_nothing() -> None:
    own = Decoder()

    def broken(module: nn.Module, path: str) -> bool:
        if path == "norm":
            raise KeyError(path)
        return True

    with pytest.raises(KeyError):
        fp8core.convert(own, "mxfp8", filter=broken)
    assert type(own.blocks[0]["output"]) is nn.Linear


def test_converting_twice_names_what_is_converted() -> None:
    own = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    fp8core.convert(own["b"], "mxfp8")
    with pytest.raises(OperandError, match=r"converted already: b\. Call fp8core\.unconvert"):
        fp8core.convert(own, "mxfp8")
    assert type(own["a"]) is nn.Linear
    fp8core.unconvert(own)
    assert type(own["b"]) is nn.Linear
    with pytest.raises(OperandError, match="nothing in it is converted"):
        fp8core.unconvert(own)


@pytest.mark.parametrize("change", [fp8core.convert, fp8core.unconvert])
def test_something_else_than_a_module_is_refused(change: Callable[[Any], Any]) -> None:
    with pytest.raises(OperandError, match=r"expected a torch\.nn\.Module"):
        change([nn.Linear(8, 8)])


class Adapted(nn.Module):
    """A linear layer with low-rank factors beside it, with PEFT's names."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = nn.Linear(32, 64)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, 64, bias=False)})
        self.encoder = nn.ModuleList([nn.Linear(rank, rank)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down, up = self.lora_A["default"], self.lora_B["default"]
        return self.base_layer(x) + up(self.encoder[0](down(x)))


FACTOR = "low-rank factor of an adapter; convert it with a filter that names it"


def test_factors_of_adapters_are_left_and_the_report_says_so() -> None:
    own = nn.ModuleDict({"q_proj": Adapted(), "o_proj": Adapted(rank=64)})
    report = fp8core.convert(own, "mxfp8")
    assert names(report) == ["q_proj.base_layer", "o_proj.base_layer"]
    factors = ("lora_A.default", "lora_B.default", "encoder.0")
    wanted = {f"{part}.{name}": FACTOR for part in own for name in factors}
    assert reasons(report) == wanted
    assert FACTOR in str(report)


def test_factors_of_adapters_are_left_in_the_adapted_layer_itself() -> None:
    assert names(fp8core.convert(Adapted(), "mxfp8")) == ["base_layer"]


@pytest.mark.parametrize("word", ["lora_a", "lora_down", "LoRA_B", "vision_lora_A", "lora"])
def test_a_word_of_the_path_says_adapter(word: str) -> None:
    own = nn.ModuleDict({"fc": nn.Linear(32, 32), word: nn.Linear(32, 32)})
    assert reasons(fp8core.convert(own, "mxfp8")) == {word: FACTOR}


@pytest.mark.parametrize("word", ["explorations", "floral", "loras", "lora_model"])
def test_a_word_that_only_contains_it_says_nothing(word: str) -> None:
    own = nn.ModuleDict({word: nn.Linear(32, 32)})
    assert names(fp8core.convert(own, "mxfp8")) == [word]


def test_a_model_called_lora_is_converted() -> None:
    own = nn.ModuleDict({"lora": nn.ModuleDict({"block": nn.Sequential(nn.Linear(32, 32))})})
    assert names(fp8core.convert(own, "mxfp8")) == ["lora.block.0"]


def test_a_filter_can_have_the_factors_of_adapters() -> None:
    own = nn.ModuleDict({"q_proj": Adapted()})
    assert names(fp8core.convert(own, "mxfp8", filter="lora_A")) == ["q_proj.lora_A.default"]


def test_an_adapted_head_is_left_too() -> None:
    own = nn.ModuleDict({"fc": nn.Linear(32, 32), "lm_head": Adapted()})
    report = fp8core.convert(own, "mxfp8")
    assert names(report) == ["fc"]
    assert reasons(report)["lm_head.base_layer"].startswith("output head")


def test_an_adapted_model_trains() -> None:
    own = nn.Sequential(Adapted())
    fp8core.convert(own, "mxfp8")
    own(torch.randn(32, 32)).sum().backward()
    assert all(own.grad.isfinite().all() for own in own.parameters())


def test_a_report_used_as_the_model_says_that_the_model_was_converted_in_place() -> None:
    report = fp8core.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "current")
    said = "changed the model in place and returned this report"
    for name in ("train", "parameters", "to", "generate"):
        with pytest.raises(AttributeError, match=f"^a ConversionReport has no '{name}': .*{said}"):
            getattr(report, name)
    with pytest.raises(OperandError, match=f"cannot be called: .*{said}"):
        report(torch.ones(2, 32))
    for function in (fp8core.convert, fp8core.unconvert, fp8core.quantize_):
        name = function.__name__
        with pytest.raises(OperandError, match=rf"^{name}\(model\) got a Conv.*{said}"):
            function(report)  # type: ignore[arg-type]


def test_a_report_is_copied_pickled_and_compared_as_any_value() -> None:
    report = fp8core.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "current")
    assert copy.deepcopy(report) == pickle.loads(pickle.dumps(report)) == report
    assert not hasattr(report, "__torch_function__")
