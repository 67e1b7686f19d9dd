"""What DotProductAttention refuses, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core import OperandError, UnsupportedError
from tests.device import DEVICE, VALUES_ARE_READ
from tests.modules.attention_calls import (
    SIZE,
    cu,
    layer,
    qkv,
)

# torch.func.jvp compiles decompositions.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

CONSTRUCTED = {
    "heads are no multiple of the groups; expected one of 1, 2, 4": {"num_gqa_groups": 3},
    r"Did you mean 'causal'": {"attn_mask_type": "causl"},
    r"qkv_format='hsbd'\): expected one of 'sbhd', 'bshd', 'thd'": {"qkv_format": "hsbd"},
    "window_size=\\(1,\\); expected \\(left, right\\)": {"window_size": (1,)},
    "window_size=\\(-2, 0\\)": {"window_size": (-2, 0)},
    "Put the window into attention_mask": {"window_size": (2, 2), "attn_mask_type": "arbitrary"},
    "Ask for 'causal_bottom_right'": {"window_size": (-1, 0), "attn_mask_type": "padding"},
    "expected 0 <= attention_dropout <= 1": {"attention_dropout": 1.1},
    "softcap=-1.0; expected a finite number": {"softcap": -1.0},
    "softmax_scale=nan": {"softmax_scale": float("nan")},
    "softmax_scale='x'": {"softmax_scale": "x"},
    "attention_dropout='x'": {"attention_dropout": "x"},
    "softcap='x'": {"softcap": "x"},
    "attn_mask_type=\\['causal'\\]": {"attn_mask_type": ["causal"]},
    "softmax_type='sink'": {"softmax_type": "sink"},
    "attention_type='both'": {"attention_type": "both"},
    "num_attention_heads=4.: the 3 ranks of its group do not divide it": {"tp_size": 3},
    "tp_size=0.: expected an integer >= 1": {"tp_size": 0},
    "cp_group": {"cp_group": object()},
}


def test_constructor_refuses() -> None:
    for message in CONSTRUCTED:
        with pytest.raises((OperandError, UnsupportedError), match=message):
            layer(**CONSTRUCTED[message])


MASK = torch.zeros(2, 1, 1, 5, dtype=torch.bool)


INNER = MASK.clone()
INNER[0, ..., 1] = True


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"query_layer \[4, 2, 3, 8\]; expected \[s, b, 4, 8\]": (
        {},
        {"query_layer": torch.randn(4, 2, 3, 8)},
    ),
    r"key_layer \[5, 2, 4, 8\]; expected \[s, b, 2, 8\]": (
        {},
        {"key_layer": torch.randn(5, 2, 4, 8)},
    ),
    "value_layer is torch.float64": ({}, {"value_layer": torch.randn(5, 2, 2, 8).double()}),
    "expected as many values as keys": ({}, {"value_layer": torch.randn(4, 2, 2, 8)}),
    "has batch 3, key_layer": ({}, {"query_layer": torch.randn(5, 3, 4, 8)}),
    "value_layer is None": ({}, {"value_layer": None}),
    "key_layer is list": ({}, {"key_layer": [1.0]}),
    "qkv_layer holds queries, keys and values": ({}, {"qkv_layer": torch.randn(5, 2, 3, 4, 8)}),
    "kv_layer holds keys and values": ({}, {"kv_layer": torch.randn(5, 2, 2, 2, 8)}),
    "padding mask type needs attention_mask": ({"attn_mask_type": "padding"}, {}),
    "True behind the end of a sequence": (
        {"attn_mask_type": "padding"},
        {"attention_mask": MASK[..., :4]},
    ),
    "Padding is behind the end": ({"attn_mask_type": "padding"}, {"attention_mask": INNER}),
    "one tensor in cross attention": (
        {"attn_mask_type": "padding", "attention_type": "cross"},
        {"attention_mask": MASK},
    ),
    "cu_seqlens_kv is NoneType": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": cu([5, 5])},
    ),
    "cu_seqlens_q is torch.int64": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": torch.tensor([0, 5, 10]), "cu_seqlens_kv": cu([5, 5])},
    ),
    "expected one number of sequences": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": cu([5, 5]), "cu_seqlens_kv": cu([5])},
    ),
    "for a batch of 2; expected 3": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": cu([5]), "cu_seqlens_kv": cu([5])},
    ),
    "sequences of at most 5 tokens": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": cu([5, 6]), "cu_seqlens_kv": cu([5, 5])},
    ),
    "cu_seqlens_q has 2 entries for a batch of 2": ({}, {"cu_seqlens_q": cu([5])}),
    "cu_seqlens_kv_padded is torch.int64": ({}, {"cu_seqlens_kv_padded": cu([5, 5]).long()}),
    "qkv_format='thd', whose sequences have lengths": (
        {"qkv_format": "thd"},
        {
            "query_layer": torch.randn(5, 4, 8),
            "key_layer": torch.randn(5, 2, 8),
            "value_layer": torch.randn(5, 2, 8),
        },
    ),
    "needs a bool tensor": ({"attn_mask_type": "arbitrary"}, {}),
    r"broadcasts to \[2, 4, 5, 5\]": (
        {"attn_mask_type": "arbitrary"},
        {"attention_mask": torch.zeros(2, 3, 5, 5, dtype=torch.bool)},
    ),
    "core_attention_bias is None": ({}, {"core_attention_bias_type": "post_scale_bias"}),
    "core_attention_bias is given": ({}, {"core_attention_bias": torch.zeros(1, 4, 5, 5)}),
    "core_attention_bias_type='bias'": ({}, {"core_attention_bias_type": "bias"}),
    r"core_attention_bias \[1, 4, 5, 4\]; expected": (
        {},
        {
            "core_attention_bias_type": "pre_scale_bias",
            "core_attention_bias": torch.zeros(1, 4, 5, 4),
        },
    ),
    "alibi_slopes with core_attention_bias_type='no_bias'": ({}, {"alibi_slopes": torch.ones(4)}),
    rf"alibi_slopes \[3\] on {DEVICE}; expected \[4\]": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3)},
    ),
    rf"alibi_slopes \[3, 4\] on {DEVICE}; expected \[4\] or \[2, 4\]": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3, 4)},
    ),
    "alibi_slopes is list": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": [1.0] * 4},
    ),
    "alibi_slopes .4. is torch.complex64": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(4).to(torch.complex64)},
    ),
    "alibi_slopes requires a gradient": (
        {},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(4, requires_grad=True)},
    ),
    "attention_mask is int": ({"attn_mask_type": "padding"}, {"attention_mask": 3}),
    "attention_mask is tuple of NoneType, NoneType": (
        {"attn_mask_type": "padding"},
        {"attention_mask": (None, None)},
    ),
    "qkv_layer is int": (
        {},
        {"query_layer": None, "key_layer": None, "value_layer": None, "qkv_layer": 3},
    ),
    "cu_seqlens_q is .2147483647, -2147483648, -2147483647": (
        {"attn_mask_type": "padding"},
        {
            "cu_seqlens_q": torch.tensor([2**31 - 1, -(2**31), 1 - 2**31], dtype=torch.int32),
            "cu_seqlens_kv": cu([5, 5]),
        },
    ),
    "pad_between_seqs=True needs": ({}, {"pad_between_seqs": True}),
    "score_mod=function is not offered": ({}, {"score_mod": lambda *given: given}),
    "thd_attention_policies=list": ({}, {"thd_attention_policies": []}),
    "num_splits=2": ({}, {"num_splits": 2}),
    "fp8_output=True": ({}, {"fp8_output": True}),
}


# Those of CALLS that are refused for values.
READING = {
    "Padding is behind the end",
    "sequences of at most 5 tokens",
    "cu_seqlens_q is .2147483647, -2147483648, -2147483647",
}


def test_call_refuses() -> None:
    for message, (options, changed) in CALLS.items():
        if message in READING and DEVICE.type == "cuda":
            continue  # the values of tensors on a GPU are not read: that would wait
        call: dict[str, Any] = {
            name: torch.randn(5, 2, n, SIZE)
            for name, n in (("query_layer", 4), ("key_layer", 2), ("value_layer", 2))
        }
        with pytest.raises((OperandError, UnsupportedError), match=message) as caught:
            layer(name="block.attention", **options)(**{**call, **changed})
        assert "block.attention" in str(caught.value)


@VALUES_ARE_READ
@pytest.mark.parametrize("side", ["q", "kv"])
@pytest.mark.parametrize("starts", [[0, 4, 8], [0, 6, 8]])
def test_sequences_that_do_not_fit_between_their_padding_are_refused(
    side: str, starts: list[int]
) -> None:
    q, k, v = qkv(8)
    lengths, name = cu([5, 3]), f"cu_seqlens_{side}_padded"
    attend = layer(qkv_format="thd", attn_mask_type="padding")
    padded = {name: torch.tensor(starts, dtype=torch.int32)}
    with pytest.raises(OperandError, match=f"{name} leaves . tokens to sequence ., which has"):
        attend(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, **padded)


def test_a_longest_sequence_that_is_no_number_of_tokens_is_refused() -> None:
    for longest in [-1, 8.0, "8"]:
        q, k, v = qkv(8)
        none = cu([])
        attend = layer(qkv_format="thd", attn_mask_type="padding")
        with pytest.raises(OperandError, match=f"max_seqlen_q={longest!r}; expected an integer"):
            attend(q, k, v, cu_seqlens_q=none, cu_seqlens_kv=none, max_seqlen_q=longest)


@VALUES_ARE_READ
def test_packed_sequences_longer_than_said_are_refused() -> None:
    q, k, v = qkv(8)
    lengths = cu([5, 3])
    attend = layer(qkv_format="thd", attn_mask_type="padding")
    with pytest.raises(OperandError, match="max_seqlen_q=4, but a sequence has 5 tokens"):
        attend(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=4)
    with pytest.raises(OperandError, match="offsets of at most 8 tokens"):
        attend(q, k, v, cu_seqlens_q=cu([5, 4]), cu_seqlens_kv=lengths)


def test_a_context_parallel_group_has_to_be_a_process_group() -> None:
    attend = layer()
    attend.set_context_parallel_group(None, None, None)
    with pytest.raises(OperandError, match="cp_group"):
        attend.set_context_parallel_group(object(), [0, 1], None)


def test_a_way_of_context_parallelism_has_to_be_known() -> None:
    with pytest.raises(OperandError, match="expected one of 'p2p'"):
        layer().set_context_parallel_group(None, cp_comm_type="p2")
