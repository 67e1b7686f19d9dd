"""What a layer refuses to load: by name, and without changing anything of it."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp8core
from fp8core import GroupedLinear, Linear, autocast, ops, recipe
from fp8core.modules.layers.linear import Linear as Base
from tests.modules.layers import snapshot, train, trained
from tests.pairs import turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

MXFP8 = recipe.MXFP8BlockScaling()


def stored_in_mxfp8() -> Linear:
    with fp8core.quantized_model_init(recipe=MXFP8):
        return Linear(32, 64, params_dtype=torch.bfloat16)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[key], wanted[key]) for key in wanted
    )


def without_memory(own: torch.Tensor) -> torch.Tensor:
    own = own.clone()
    own.untyped_storage().resize_(0)
    return own


def behind_memory(own: torch.Tensor) -> torch.Tensor:
    longer = torch.cat((own, own))[len(own) :]
    longer.untyped_storage().resize_(own.nbytes)
    return longer


def with_value(at: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(own: torch.Tensor) -> torch.Tensor:
        own = own.clone()
        own.view(-1)[at] = value
        return own

    return change


def encoded(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def meta(**changes: Any) -> torch.Tensor:
    formats = ["e4m3", "e4m3", None, "e5m2", None]
    return encoded(json.dumps({"formats": formats, "history_len": 4, **changes}))


class Subclass(torch.Tensor):
    pass


ABSENT = object()
NOT_FP8CORES = "delayed_meta is not fp8core's"
BAD_SCALE = "scale_.wd holds scales that are NaN, infinite, zero or negative"
BAD_AMAX = "amax_history_.wd holds amaxes that are NaN, infinite or negative"
WRONG: dict[str, tuple[str, Callable[[torch.Tensor], Any], str]] = {
    **{
        f"{name} {value}": (name, with_value(0, value), BAD_SCALE)
        for name in ("scale_fwd", "scale_bwd")
        for value in (math.nan, math.inf, -math.inf, 0.0, -1.0)
    },
    **{
        f"{name} {value}": (name, with_value(-1, value), BAD_AMAX)
        for name in ("amax_history_fwd", "amax_history_bwd")
        for value in (math.nan, math.inf, -1.0)
    },
    "scale of another shape": ("scale_fwd", lambda own: torch.ones(6), r"scale_fwd is .* \[6\]"),
    "history of another length": (
        *("amax_history_bwd", lambda own: torch.zeros(3, 2), "amax_history_bwd is"),
    ),
    "scale in another dtype": ("scale_fwd", torch.Tensor.bfloat16, "scale_fwd is torch.bfl"),
    "half of a state": ("scale_bwd", lambda own: ABSENT, "lacks scale_bwd"),
    "no meta": ("delayed_meta", lambda own: ABSENT, "lacks delayed_meta"),
    "meta of another origin": ("delayed_meta", torch.zeros_like, NOT_FP8CORES),
    "weight of another shape": (
        *("weight", lambda own: own[:, 1:], r"weight is \[16, 31\] in the"),
    ),
    "newest amax nan": ("amax_history_fwd", with_value(0, math.nan), BAD_AMAX),
    "newest amax negative": ("amax_history_fwd", with_value(0, -1.0), BAD_AMAX),
    "scale is a number": ("scale_fwd", lambda own: 1.0, "scale_fwd is float .*expected a tensor"),
    "scale is a list": ("scale_fwd", lambda own: own.tolist(), "scale_fwd is list"),
    "scale of no dimension": ("scale_fwd", lambda own: own[0], r"scale_fwd is .* \[\]"),
    "scale is bool": ("scale_fwd", lambda own: own > 0, "scale_fwd is torch.bool"),
    "scale is sparse": ("scale_fwd", lambda own: own.to_sparse(), "scale_fwd is torch.sparse_coo"),
    "scale on meta": ("scale_fwd", lambda own: own.to("meta"), "scale_fwd is on the meta device"),
    "scale of a subclass": ("scale_fwd", lambda own: own.as_subclass(Subclass), "is a Subclass"),
    "scale is expanded": (
        "scale_fwd",
        lambda own: torch.ones(1).expand(3),
        "scale_fwd is expanded",
    ),
    "history is nested": (
        "amax_history_fwd",
        lambda own: torch.nested.nested_tensor(list(own)),
        "amax_history_fwd is nested",
    ),
    "meta is a string": ("delayed_meta", lambda own: "{}", "delayed_meta is str"),
    "meta on meta": ("delayed_meta", lambda own: own.to("meta"), "delayed_meta is on the meta"),
    "meta is deeply nested": ("delayed_meta", lambda own: encoded("[" * 3000), NOT_FP8CORES),
    "meta is very long": ("delayed_meta", lambda own: encoded("[" * 10**6), NOT_FP8CORES),
    "meta is a matrix": ("delayed_meta", lambda own: own[None], NOT_FP8CORES),
    "meta of no dimension": ("delayed_meta", lambda own: own[0], NOT_FP8CORES),
    "meta is float": ("delayed_meta", lambda own: own.float(), NOT_FP8CORES),
    "meta is empty": ("delayed_meta", lambda own: own[:0], NOT_FP8CORES),
    "meta is no object": ("delayed_meta", lambda own: encoded("[1]"), NOT_FP8CORES),
    "meta is no text": ("delayed_meta", lambda own: own | 0x80, NOT_FP8CORES),
    "meta is missing a key": ("delayed_meta", lambda own: encoded('{"formats": []}'), NOT_FP8CORES),
    "length is true": ("delayed_meta", lambda own: meta(history_len=True), NOT_FP8CORES),
    "length is a float": ("delayed_meta", lambda own: meta(history_len=4.0), NOT_FP8CORES),
    "length is negative": ("delayed_meta", lambda own: meta(history_len=-4), NOT_FP8CORES),
    "length is nan": ("delayed_meta", lambda own: meta(history_len=math.nan), NOT_FP8CORES),
    "length is huge": ("delayed_meta", lambda own: meta(history_len=2**62), "amax_history_fwd is"),
    "length is endless": ("delayed_meta", lambda own: meta(history_len=10**3000), "history_fwd is"),
    "formats are a string": ("delayed_meta", lambda own: meta(formats="e4m3"), NOT_FP8CORES),
    "formats are numbers": ("delayed_meta", lambda own: meta(formats=[1]), NOT_FP8CORES),
    "weight is a number": ("weight", lambda own: 3, "weight is int .*expected a tensor"),
    "weight is integer": ("weight", lambda own: own.to(torch.int8), "weight is torch.int8"),
    "weight is bool": ("weight", lambda own: own > 0, "weight is torch.bool"),
    "weight is complex": ("weight", lambda own: own.to(torch.complex64), "weight is torch.complex"),
    "weight is sparse": ("weight", lambda own: own.to_sparse(), "weight is torch.sparse_coo"),
    "weight on meta": ("weight", lambda own: own.to("meta"), "weight is on the meta device"),
    "weight is nested": ("weight", lambda own: torch.nested.nested_tensor([own]), "weight is nest"),
    "weight without memory": ("weight", without_memory, "weight has no memory for its elements"),
    "bias without memory": ("bias", without_memory, "bias has no memory for its elements"),
    "scale without memory": ("scale_fwd", without_memory, "scale_fwd has no memory"),
    "scale behind its memory": ("scale_fwd", behind_memory, "scale_fwd has no memory"),
    "bias is nothing": ("bias", lambda own: None, "bias is NoneType .*expected a tensor"),
    "bias of no dimension": ("bias", lambda own: own[0], r"bias is \[\] in the checkpoint"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing() -> None:
    for case, is_used in turns(WRONG, [False, True]):
        name, change, message = WRONG[case]
        saved: dict[str, Any] = dict(trained().state_dict())
        saved[name] = change(saved[name])
        saved = {key: own for key, own in saved.items() if own is not ABSENT}
        layer = trained() if is_used else Linear(32, 16)
        before = snapshot(layer)
        with pytest.raises(RuntimeError, match=f"Linear.32, 16.: .*{message}"):
            layer.load_state_dict(saved)
        assert same(snapshot(layer), before)


def test_a_history_that_claims_more_rows_than_it_has_memory_is_refused() -> None:
    saved = dict(trained().state_dict())
    saved["amax_history_fwd"] = torch.zeros(1, 3).expand(2**40, 3)
    saved["delayed_meta"] = meta(history_len=2**40)
    with pytest.raises(RuntimeError, match="amax_history_fwd is expanded"):
        Linear(32, 16).load_state_dict(saved)


def test_a_step_in_progress_may_have_met_infinity() -> None:
    saved = dict(trained().state_dict())
    saved["amax_history_fwd"] = with_value(0, math.inf)(saved["amax_history_fwd"])
    layer = Linear(32, 16)
    layer.load_state_dict(saved)
    train(layer, torch.randn(4, 32))
    assert layer.amax_history_fwd.isfinite().all()


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
def test_equal_metadata_in_another_order_loads(is_used: bool) -> None:
    saved = dict(trained().state_dict())
    stored = json.loads(bytes(saved["delayed_meta"].tolist()))
    saved["delayed_meta"] = encoded(json.dumps(dict(reversed(stored.items())), indent=1))
    layer = trained() if is_used else Linear(32, 16)
    layer.load_state_dict(saved)
    assert torch.equal(layer.scale_fwd, saved["scale_fwd"])
    train(layer, torch.full((4, 32), 7.0))
    assert torch.equal(layer.amax_history_fwd[-2], saved["amax_history_fwd"][-1])
    assert layer.amax_history_fwd[-1, 0] == 7.0


def test_a_history_of_any_strides_is_stored_row_by_row() -> None:
    saved = dict(trained().state_dict())
    saved["amax_history_fwd"] = saved["amax_history_fwd"].t().contiguous().t()
    layer = Linear(32, 16)
    layer.load_state_dict(saved)
    assert layer.amax_history_fwd.is_contiguous()


def test_a_quantized_weight_with_a_nan_scale_is_refused() -> None:
    for is_quantized in [False, True]:
        saved = stored_in_mxfp8().state_dict()
        saved["weight"]._rowwise_scale_inv[3, 0] = 0xFF
        layer = stored_in_mxfp8() if is_quantized else Linear(32, 64)
        layer.weight.data.zero_()
        with pytest.raises(
            RuntimeError, match=r"weight cannot be loaded: _rowwise_scale_inv holds"
        ):
            layer.load_state_dict(saved)
        assert not layer.weight.float().any()


def test_a_quantized_weight_whose_parts_were_exchanged_is_refused() -> None:
    saved = stored_in_mxfp8().state_dict()
    saved["weight"]._rowwise_scale_inv = saved["weight"]._rowwise_scale_inv[:1]
    with pytest.raises(RuntimeError, match=r"weight cannot be loaded: .*expected torch.uint8 \[64"):
        stored_in_mxfp8().load_state_dict(saved)


def test_delayed_state_for_a_layer_without_gemms_is_unexpected() -> None:
    saved = {**ops.GELU().state_dict(), **dict(trained().state_dict())}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*scale_fwd"):
        ops.GELU().load_state_dict(saved)


class Model(torch.nn.Module):
    """Layers of torch before and behind those of fp8core, with delayed scales of two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 32)
        self.layers = torch.nn.ModuleList()
        self.layers.append(Linear(32, 32))
        self.layers.append(GroupedLinear(2, 32, 32))
        self.head = torch.nn.Linear(32, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        y: torch.Tensor = self.head(second(first(self.embed(tokens)), [2, 2]))
        return y


def used_model() -> Model:
    model = Model()
    train(model, torch.tensor([0, 3, 5, 7]))
    return model


def as_extra_state(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# What is wrong with the second layer of fp8core, and how a model is asked to load it.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a weight": ({"layers.1.weight1": "weights"}, {}),
    "a scale": ({"layers.1.scale_fwd": torch.zeros(6)}, {"strict": False}),
    "a damaged state": ({"layers.1._extra_state": as_extra_state(b"\x80\x04}")}, {"assign": True}),
    "its first byte": ({"layers.1._extra_state": as_extra_state(b"\x81\x04}.")}, {}),
    "its dtype": ({"layers.1._extra_state": torch.ones(4, dtype=torch.int8)}, {"strict": False}),
}


def test_a_wrong_entry_of_one_layer_leaves_the_whole_model_as_it_was() -> None:
    for case, at in turns(REFUSED, ["", "layers"]):
        wrong, options = REFUSED[case]
        model = used_model()
        saved: dict[str, Any] = {key: own + 1 for key, own in used_model().state_dict().items()}
        saved.update({key: own for key, own in used_model().state_dict().items() if "_meta" in key})
        saved.update(wrong)
        part, prefix = model.get_submodule(at), f"{at}." if at else ""
        before, parameters = snapshot(model), [*model.parameters()]
        with pytest.raises(RuntimeError, match=r"GroupedLinear.*(\n.*)*Nothing was loaded"):
            part.load_state_dict(
                {
                    key.removeprefix(prefix): own
                    for key, own in saved.items()
                    if key.startswith(prefix)
                },
                **options,
            )
        assert same(snapshot(model), before)
        assert all(map(operator.is_, model.parameters(), parameters))


def test_a_wrong_entry_within_a_checkpoint_wrapper_leaves_the_model_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), checkpoint_wrapper(Linear(32, 32)))
    before = snapshot(model)
    for wrong in ({"1.weight": torch.ones(3)}, {"1._extra_state": as_extra_state(b"\x81.")}):
        saved = {key: own + 1 for key, own in before.items()} | wrong
        with pytest.raises(RuntimeError, match="Nothing was loaded"):
            model.load_state_dict(saved)
        assert same(snapshot(model), before)


def test_a_damaged_state_under_a_key_that_a_compiled_model_lacks_is_not_read() -> None:
    model = torch.nn.ModuleDict({"_orig_mod": trained()})  # as torch.compile's wrapper names it
    model.load_state_dict({"_extra_state": as_extra_state(b"\x81.")}, strict=False)


Entries = dict[str, Any]


def repair(entries: Entries, prefix: str) -> None:
    """Give the bias, saved with another length, and the scales, saved under another name."""
    entries[f"{prefix}bias"] = entries[f"{prefix}bias"][:32]
    entries[f"{prefix}scale_fwd"] = entries.pop(f"{prefix}forward_scale")
    entries.pop(f"{prefix}_extra_state")


def repair_first(module: torch.nn.Module, entries: Entries, prefix: str, *_: object) -> None:
    repair(entries, prefix if isinstance(module, Linear) else f"{prefix}layers.0.")


class RepairingModel(Model):
    def _load_from_state_dict(self, state_dict: Entries, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        repair(state_dict, f"{prefix}layers.0.")


class RepairingLayer(Linear):
    def _load_from_state_dict(self, state_dict: Entries, prefix: str, *args: Any) -> None:
        repair(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def with_hook(at: str) -> Model:
    model = Model()
    model.get_submodule(at).register_load_state_dict_pre_hook(repair_first)
    return model


def with_layer() -> Model:
    model = Model()
    model.layers[0] = RepairingLayer(32, 32)
    return model


REPAIRED: dict[str, Callable[[], Model]] = {
    "a hook of the model": lambda: with_hook(""),
    "a hook of the layer": lambda: with_hook("layers.0"),
    "a method of the model": RepairingModel,
    "a method of the layer": with_layer,
}


def old_format(saved: Entries) -> Entries:
    saved["layers.0.forward_scale"] = saved.pop("layers.0.scale_fwd")
    saved["layers.0.bias"] = torch.cat((saved["layers.0.bias"], torch.zeros(4)))
    saved["layers.0._extra_state"] = as_extra_state(b"\x81.")
    return saved


def test_what_a_users_hook_or_method_repairs_is_loaded() -> None:
    for case in REPAIRED:
        saved, model = used_model(), REPAIRED[case]()
        model.load_state_dict(old_format(snapshot(saved)))
        assert same(snapshot(model), snapshot(saved)), case


def test_another_layer_is_asked_first_where_a_users_hook_repairs_one() -> None:
    for case in ["a hook of the layer", "a method of the layer"]:
        model = REPAIRED[case]()
        before, saved = snapshot(model), old_format(snapshot(used_model()))
        with pytest.raises(RuntimeError, match=r"GroupedLinear.*(\n.*)*Nothing was loaded"):
            model.load_state_dict({**saved, "layers.1.bias0": torch.ones(3)})
        assert same(snapshot(model), before), case


class WithExtraState(Base):
    def __init__(self, extra: Any = None) -> None:
        super().__init__(32, 16)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_subclass_with_an_extra_state_loads_its_own_state_dict() -> None:
    saved, loaded = WithExtraState({"step": 3}), WithExtraState()
    loaded.load_state_dict(saved.state_dict())
    assert loaded.extra == {"step": 3}


@pytest.mark.parametrize(
    ("name", "mode"), turns(recipe.names(), [torch.inference_mode, torch.no_grad])
)
def test_a_state_dict_taken_in_inference_mode_loads(name: str, mode: type) -> None:
    with fp8core.quantized_model_init(recipe=name):
        saved, loaded = (Linear(64, 64, params_dtype=torch.bfloat16) for _ in range(2))
    with mode():
        state = saved.state_dict()
        values = {key: own.clone() for key, own in state.items()}
    loaded.load_state_dict(state)
    assert torch.equal(loaded.weight.dequantize(), saved.weight.dequantize())
    loaded.load_state_dict(values)
    step_in = torch.randn(32, 64, dtype=torch.bfloat16)
    with autocast(recipe=name):
        loaded(step_in).sum().backward()
    with mode():
        loaded.load_state_dict(saved.state_dict())
    assert loaded.weight.grad.isfinite().all()


def test_a_partial_checkpoint_without_weights_keeps_the_delayed_state() -> None:
    for names in [[], ["bias"]]:
        layer = trained()
        before = snapshot(layer)
        layer.load_state_dict({name: before[name] for name in names}, strict=False)
        assert same(snapshot(layer), before), names


def test_a_refusal_of_keys_that_are_missing_keeps_the_delayed_state() -> None:
    layer = trained()
    before = snapshot(layer)
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})
    assert same(snapshot(layer), before)


def test_a_quantized_weight_without_memory_is_refused() -> None:
    for part in ["_rowwise_data", "_rowwise_scale_inv"]:
        saved = dict(stored_in_mxfp8().state_dict())
        saved["weight"] = saved["weight"].clone()
        getattr(saved["weight"], part).untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=f"weight cannot be loaded: {part} has no memory"):
            stored_in_mxfp8().load_state_dict(saved)
