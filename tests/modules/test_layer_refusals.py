"""Arguments and inputs that layers refuse, by name, and those that ask for nothing."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fp8core import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    OperandError,
    RecipeError,
    RMSNorm,
    TransformerLayer,
    UnsupportedError,
    autocast,
)
from fp8core.backend_api import ACTIVATIONS
from fp8core.modules.layers.linear import NOT_OFFERED
from tests import forked
from tests.device import DEVICE
from tests.modules.transformer_oracle import FFN, HEADS, B, H, S, new_attention, new_layer, states
from tests.refusals import Refusal, unrefused

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

MAKERS: dict[str, Callable[..., Any]] = {
    "Linear": partial(Linear, 8, 8),
    "LayerNormLinear": partial(LayerNormLinear, 8, 8),
    "LayerNormMLP": partial(LayerNormMLP, 8, 8),
    "GroupedLinear": partial(GroupedLinear, 2, 8, 8),
    "MultiheadAttention": partial(MultiheadAttention, H, HEADS, device="meta"),
    "TransformerLayer": partial(TransformerLayer, H, FFN, HEADS, device="meta"),
}
RANKS = {"set_parallel_mode": True}
SPLITS: list[Any] = [("a", "b", "c"), {"a": 3}, {"a": 9, "b": -1}, ("a", "a_"), ("",), (), 2]
SPLITS += [("a.b", "c"), {"a": 4.0, "b": 4.0}, (1, 2)]
PARALLEL = {"parallel_attention_mlp": True}
ARGUMENTS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *(
        ("Linear", {name: value}, UnsupportedError, rf"Linear\({name}=.*not offered")
        for name, value in {
            **dict.fromkeys(
                (
                    *("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad"),
                    "ub_bulk_wgrad",
                ),
                True,
            ),
            "symmetric_ar_type": "multimem_all_reduce",
        }.items()
    ),
    *(("Linear", {"parameters_split": split}, RecipeError, "parameters_split") for split in SPLITS),
    *(
        (
            *("GroupedLinear", {"single_grouped_weight": True, name: True}, UnsupportedError),
            rf"GroupedLinear\(single_grouped_weight=True, {name}=True\) is not offered",
        )
        for name in ("fuse_wgrad_accumulation", "delay_wgrad_compute")
    ),
    (
        *("GroupedLinear", {"use_grouped_tensor": True}, UnsupportedError),
        r"GroupedLinear\(use_grouped_tensor=True\)",
    ),
    (
        *("GroupedLinear", {"tp_size": 2, "parallel_mode": "row"}, UnsupportedError),
        r"GroupedLinear\(bias=True\) in a row-parallel",
    ),
    ("LayerNormLinear", {"ub_bulk_wgrad": True}, UnsupportedError, "ub_bulk_wgrad"),
    ("LayerNormLinear", {"symmetric_ar_type": "multimem"}, UnsupportedError, "symmetric_ar_type"),
    (
        *("LayerNormLinear", {"normalization": "BatchNorm"}, RecipeError),
        r"'BatchNorm'.*'LayerNorm', 'RMSNorm'",
    ),
    *(
        (
            *("LayerNormLinear", {"bias": bias, "parameters_split": ["layer_norm_", "b"]}),
            *(RecipeError, "'layer_norm' is the norm's"),
        )
        for bias in (True, False)
    ),
    ("LayerNormMLP", {"ub_bulk_dgrad": True}, UnsupportedError, "ub_bulk_dgrad"),
    ("LayerNormMLP", {"ub_overlap_rs": True}, UnsupportedError, "ub_overlap_rs"),
    ("LayerNormMLP", {"activation": "gulu"}, RecipeError, rf"'gulu'.*{', '.join(ACTIVATIONS)}"),
    (
        *("LayerNormMLP", {"activation": "clamped_swiglu", "activation_params": {"beta": 1.0}}),
        *(RecipeError, r"'beta'.*limit, alpha, glu_linear_offset"),
    ),
    (
        *("LayerNormMLP", {"activation_params": {"limit": 1.0}}, RecipeError),
        r"gelu has no parameter 'limit'.*none",
    ),
    (
        *("LayerNormMLP", {"normalization": "layer_norm"}, RecipeError),
        r"'layer_norm'.*'LayerNorm', 'RMSNorm'",
    ),
    ("MultiheadAttention", {"attention_type": "croos"}, RecipeError, "'self', 'cross'"),
    *(
        ("MultiheadAttention", {name: True}, UnsupportedError, rf"MultiheadAttention\({name}=True")
        for name in ("ub_overlap_ag", "ub_bulk_wgrad")
    ),
    *(
        ("TransformerLayer", arguments, error, message)
        for arguments, error, message in [
            (
                {"ub_tp_comm_overlap": True},
                *(UnsupportedError, r"TransformerLayer\(ub_tp_comm_overlap="),
            ),
            (
                {"tp_group": object(), **RANKS},
                *(OperandError, r"tp_group=.*expected a torch.distributed process group"),
            ),
            (
                {"get_rng_state_tracker": object(), **RANKS},
                *(OperandError, "expected a function that returns a tracker"),
            ),
            (
                {"tp_size": 3, **RANKS},
                *(OperandError, "the 3 ranks of its group do not divide it"),
            ),
            ({"num_gqa_groups": 3}, OperandError, r"num_gqa_groups=3.*1, 2, 4"),
            ({"kv_channels": -1}, OperandError, r"kv_channels=-1"),
            ({"hidden_dropout": 1.1}, OperandError, r"hidden_dropout=1.1"),
            ({"attention_dropout": -0.1}, OperandError, r"attention_dropout=-0.1"),
            ({"drop_path_rate": 1.1}, OperandError, r"drop_path_rate=1.1"),
            ({"drop_path_rate": None}, OperandError, r"drop_path_rate=None"),
            (
                {"layer_type": "decode"},
                RecipeError,
                r"'encoder', 'decoder'.*Did you mean 'decoder'",
            ),
            ({"normalization": "rms"}, RecipeError, r"'LayerNorm', 'RMSNorm'"),
            ({"activation": "gulu"}, RecipeError, r"gelu"),
            ({"qk_norm_type": "L2"}, RecipeError, r"'L2Normalization', 'RMSNorm', 'LayerNorm'"),
            ({"self_attn_mask_type": "casual"}, OperandError, r"causal"),
            ({"attn_input_format": "bhsd"}, OperandError, r"bshd"),
            ({"softmax_type": "soft"}, OperandError, r"vanilla"),
            ({"fuse_wgrad_accumulation": True}, UnsupportedError, r"fuse_qkv_params=True"),
            ({**PARALLEL, "layer_type": "decoder"}, OperandError, r"layer_type"),
            ({**PARALLEL, "output_layernorm": True}, OperandError, r"output_"),
            (
                {**PARALLEL, "apply_residual_connection_post_layernorm": True},
                *(OperandError, r"apply_residual_connection_post_layernorm"),
            ),
        ]
    ),
]
X = torch.zeros(4, 8)
THD = {"drop_path_rate": 0.5, "attn_input_format": "thd", "self_attn_mask_type": "padding"}
CALLS: dict[str, Refusal] = {
    **{
        f"sizes {sizes}": (partial(Linear, *sizes), OperandError, "expected an integer >= 1")
        for sizes in ((0, 8), (8, 0), (-1, 8), (8.0, 8), ("8", 8))
    },
    "no hidden size": (partial(LayerNormMLP, 0, 8), OperandError, "hidden_size=0"),
    "no size within": (partial(LayerNormMLP, 8, 0), OperandError, "ffn_hidden_size=0"),
    "no groups": (partial(GroupedLinear, 0, 8, 8), OperandError, "num_gemms=0"),
    "heads": (
        partial(TransformerLayer, H, FFN, 5, device="meta"),
        *(OperandError, r"num_attention_heads=5.*kv_channels"),
    ),
    "no heads": (
        partial(TransformerLayer, H, FFN, 0, device="meta"),
        *(OperandError, r"num_attention_heads=0"),
    ),
    **{
        f"{maker.func.__name__} of a wrong input": (  # type: ignore[attr-defined]  # a partial
            lambda maker=maker: maker()(torch.zeros(2, 9)),
            *(OperandError, r"k=9.*\[\.\.\., 8\]"),
        )
        for maker in (
            *(MAKERS["LayerNormLinear"], MAKERS["LayerNormMLP"]),
            *(partial(LayerNorm, 8), partial(RMSNorm, 8)),
        )
    },
    "a Transformer layer of a wrong input": (
        lambda: new_layer()(states(S, B, H + 1)),
        *(OperandError, rf"k={H + 1}"),
    ),
    **{
        f"{kind.__name__} {name}": (partial(call, kind), OperandError, message)
        for kind in (LayerNorm, RMSNorm)
        for name, call, message in [
            ("of no size", lambda kind: kind(), "expected the sizes of the last dimensions"),
            (
                *("and another shape", lambda kind: kind(8)(X, residual=X[:3])),
                r"residual \[3, 8\].*input \[4, 8\]",
            ),
            ("and no tensor", lambda kind: kind(8)(X, residual=1), "residual is int"),
        ]
    },
    "a decoder alone": (
        lambda: new_layer(layer_type="decoder")(states()),
        *(OperandError, "encoder_output is None"),
    ),
    "cross attention alone": (
        lambda: new_attention(attention_type="cross")(states()),
        *(OperandError, "encoder_output is None"),
    ),
    **{
        f"an encoder and {name}": (
            lambda name=name: new_layer()(states(), **{name: states()}),
            *(OperandError, rf"{name} is given.*layer_type='decoder'"),
        )
        for name in ("encoder_output", "enc_dec_attn_mask")
    },
    "self attention to an encoder": (
        lambda: new_attention()(states(), encoder_output=states()),
        *(OperandError, "attention_type='cross'"),
    ),
    "paths of packed sequences": (
        lambda: new_layer(**THD).drop_path(states(S, H), None),
        *(OperandError, "cu_seqlens_q"),
    ),
    **{
        f"hidden states {value}": (
            lambda value=value: new_layer()(value),
            *(OperandError, r"hidden_states is .*; expected a torch\.Tensor"),
        )
        for value in (None, [1.0])
    },
    **{
        f"{number} angles": (
            lambda number=number: new_layer()(
                states(4, 2, 32), rotary_pos_emb=(torch.zeros(4, 1, 1, 8),) * number
            ),
            *(OperandError, f"rotary_pos_emb is a tuple of {number}; expected"),
        )
        for number in (1, 3)
    },
}


def test_arguments_that_do_not_fit_or_are_not_offered_are_refused() -> None:
    table: dict[str, Refusal] = {
        f"{kind}({arguments})": (partial(MAKERS[kind], **arguments), error, message)
        for kind, arguments, error, message in ARGUMENTS
    }
    assert len(table) == len(ARGUMENTS)
    assert unrefused(table) == {}


def test_sizes_and_inputs_that_do_not_fit_are_refused() -> None:
    assert unrefused(CALLS) == {}


IDLE: list[dict[str, Any]] = [{"ub_name": "qkv"}, {"symmetric_ar_type": False}]


def test_every_argument_that_is_not_offered_is_refused_or_asks_for_nothing() -> None:
    refused = {
        name
        for kind, own, error, _ in ARGUMENTS
        if (kind, error) == ("Linear", UnsupportedError)
        for name in own
    }
    assert {*refused, *(name for own in IDLE for name in own)} == set(NOT_OFFERED)


def test_what_asks_for_nothing_is_taken() -> None:
    defaults = inspect.signature(Linear).parameters
    for argument in [*IDLE, *({name: defaults[name].default} for name in NOT_OFFERED)]:
        torch.manual_seed(3)
        layer = Linear(8, 8, **argument)
        torch.manual_seed(3)
        assert torch.equal(layer.weight, Linear(8, 8).weight), argument
    MAKERS["GroupedLinear"](use_grouped_tensor=False)
    MAKERS["LayerNormMLP"](set_parallel_mode=True, return_layernorm_output_gathered=True)
    MAKERS["TransformerLayer"](**RANKS, ub_overlap_ag=False, tp_size=1)
    MAKERS["MultiheadAttention"](**RANKS)


@pytest.mark.usefixtures("group_of_one")
def test_a_tensor_parallel_group_of_one_rank_is_taken() -> None:
    Linear(8, 8, tp_group=torch.distributed.group.WORLD)


# --- the sizes of groups ---


@pytest.mark.parametrize(
    "splits",
    [[5, 3], [5, 0, 3, 0], [5, 0, 4], [9, -1, 0], [5.0, 0.0, 3.0], [[5, 0, 3]], []],
    ids=str,
)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_m_splits_that_do_not_fit_are_refused(splits: Any, as_tensor: bool) -> None:
    if as_tensor and DEVICE.type == "cuda" and splits in ([5, 0, 4], [9, -1, 0]):
        pytest.skip("sizes on a GPU are not read: groups end with the rows")
    given = torch.tensor(splits) if as_tensor else splits
    said = r"m_splits=.* for 8 rows; expected 3 integers|m_splits is .* an integer tensor \[3\]"
    with pytest.raises(OperandError, match=said):
        GroupedLinear(3, 32, 16)(torch.randn(8, 32), given)


def test_m_splits_that_are_no_sizes_are_refused() -> None:
    for splits in [None, 8, "508", [True, True, 6], [True, 5, 0, 3]]:
        with pytest.raises(OperandError, match="expected 3 integers"):
            GroupedLinear(3, 32, 16)(torch.randn(8, 32), splits)


def test_m_splits_on_meta_are_refused_by_name() -> None:
    layer = GroupedLinear(3, 32, 16, device="meta")
    with pytest.raises(OperandError, match="has no values"), autocast(recipe="current"):
        layer(torch.randn(8, 32, device="meta"), torch.tensor([5, 0, 3], device="meta"))


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cuda", "  cuda: torch .* is built without CUDA$"),
        ("npu", "  ascend: torch_npu is not installed$"),
        ("cpuu", "  torch: Expected one of cpu, cuda, "),
    ],
)
def test_a_device_that_torch_has_not_is_refused_with_the_reason(device: str, reason: str) -> None:
    if device != "cpuu" and hasattr(torch, device) and getattr(torch, device).is_available():
        pytest.skip(f"has a device of type {device}")
    said = f"^device='{device}' cannot be used here; devices of usable backends: .*cpu"
    ways = [f"fp8core.Linear(8, 8, device={device!r})"]
    if device == "cuda":  # torch refuses others as the default
        ways.append(f"torch.set_default_device({device!r}); fp8core.Linear(8, 8)")
    for way in ways:
        program = (
            f"import fp8core, torch\ntry: {way}\n"
            f"except fp8core.UnsupportedError as error: print(error)"
        )
        done = forked.run([sys.executable, "-c", program])
        assert re.search(f"{said}.*\n{reason}", done.stdout, re.MULTILINE), (way, done.stderr)
