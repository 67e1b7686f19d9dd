"""Attention of one query a sequence in converted layers: by whom, of which calls, and how near."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, LlamaModel, StaticCache

import fp8core
from fp8core import use_backend
from fp8core.backend_api import (
    API_VERSION,
    Alignment,
    AttentionDesc,
    BackendSpec,
    GemmDesc,
    OpDesc,
    SingleQueryDesc,
)
from fp8core.conversion import single_query
from fp8core.conversion.layers import RECORD
from fp8core.conversion.single_query import Operands, attended
from fp8core.dispatch import plugins
from tests.backends.cuda.cuda_cases import backend
from tests.conversion.hugging_face import SIZES, TOKENS, llama

SDPA = transformers.integrations.sdpa_attention.sdpa_attention_forward
CACHE = (
    "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
)
RECIPE = "mxfp8"
PADDED = torch.ones_like(TOKENS)
PADDED[0, :5] = 0


class Reading:
    """A backend that reads another library's cache, by the reference."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if type(desc) is SingleQueryDesc and desc.head_dim == 64:
            return "heads of 64"
        return None if type(desc) in (AttentionDesc, SingleQueryDesc) else "no such attention"

    def alignment(self, desc: GemmDesc) -> Alignment:
        return Alignment()

    def bind(self, desc: Any, device: torch.device) -> Any:
        values = {f.name: getattr(desc, f.name) for f in dataclasses.fields(AttentionDesc)}
        run = backend("reference").bind(AttentionDesc(**values), device)
        if type(desc) is AttentionDesc:
            return run

        def read(q: Any, k: Any, v: Any, *, mask: torch.Tensor | None = None) -> Any:
            self.calls.append((desc, q, k, v, mask))
            assert (q.shape[1], desc.arbitrary) == (1, mask is not None)
            return run(q, k, v, **({} if mask is None else {"mask": mask}))

        return read


_backends: list[Reading] = []
_numbers = itertools.count()


def made() -> Reading:
    """The backend of this test, for the plug-in."""
    return _backends[-1]


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    name = f"reading_{next(_numbers)}"  # what was bound by a name stays
    _backends.append(Reading())
    spec = BackendSpec(name, ("cpu",), f"{__name__}:made", priority=-1, api_version=API_VERSION)
    monkeypatch.setitem(plugins.load().backends, name, spec)
    with use_backend(attention=name):
        yield _backends[-1]
    _backends.clear()


WINDOW = 6
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"head_dim": 8, "sliding_window": WINDOW},
    "Gemma": {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"},
}


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose attention tells keys apart."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            nn.init.normal_(getattr(layer.self_attn, name).weight, 0.0, 0.5)
    return model.to(dtype).eval()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_generates_the_same_tokens(
    family: str, cache: str, reading: Reading
) -> None:
    """Also where a window is shorter than the prompt."""
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    options |= {"attention_mask": PADDED, "cache_implementation": cache, "output_logits": True}
    results = []
    for fuse in (True, False):
        model = model_of(family)
        fp8core.convert(model, RECIPE, rms_norms=True, fuse=fuse)
        results.append(model.generate(TOKENS, eos_token_id=None, **options))
    assert len(reading.calls) == 2 * 7  # layers, and the tokens behind the prompt's
    assert torch.equal(results[0].sequences, results[1].sequences)
    for ours, theirs in zip(results[0].logits, results[1].logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
APART: dict[str, dict[str, Any]] = {
    "Cohere": {"use_qk_norm": True},
    "Cohere2": MIXED,  # without rotation where it attends to all
    "Exaone4": {**MIXED, "head_dim": 8, "sliding_window_pattern": 2},
    "GPTNeoX": {},  # projections in one, a part of each head rotated
    "Gemma3": {**MIXED, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Glm4": {"head_dim": 8},
    "Olmo2": {},  # norms of whole queries and keys
    "Olmo3": MIXED,
    "Phi": {"qk_layernorm": True},
    "Phi3": {"pad_token_id": 0},
    "StableLm": {"qk_layernorm": True},
}


def apart(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose layers are no chains, and whose attention tells keys apart."""
    torch.manual_seed(0)
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**SIZES, **APART[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and ("attn" in name or "attention" in name):
            nn.init.normal_(parameter, 0.0, 0.5)
    return model.to(dtype).eval()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", APART)
def test_layers_that_are_no_chains_attend_by_it(family: str, cache: str, reading: Reading) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    options |= {"attention_mask": PADDED, "cache_implementation": cache, "output_logits": True}
    results = []
    for fuse in (True, False):
        model = apart(family)
        report = fp8core.convert(model, RECIPE, rms_norms=True, fuse=fuse)
        assert [entry.reason for entry in report.decoding] == ["", ""] * fuse
        results.append(model.generate(TOKENS, eos_token_id=None, **options))
    assert len(reading.calls) == 2 * 5  # layers, and the tokens behind the prompt's
    assert torch.equal(results[0].sequences, results[1].sequences)
    for ours, theirs in zip(results[0].logits, results[1].logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_such_an_attention_keeps_its_config_and_goes_back(reading: Reading) -> None:
    model, tokens = apart("Olmo2"), TOKENS[:, :1]
    kind, config = type(model.model.layers[0].self_attn), model.config
    fp8core.convert(model, RECIPE)
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        attention = copied.model.layers[0].self_attn
        assert isinstance(attention, kind)
        assert type(attention).__name__ == kind.__name__
        assert attention.config._config is copied.config
        assert attention.config.hidden_size == config.hidden_size
        with torch.no_grad():
            copied(tokens)
        assert len(reading.calls) == 2
        reading.calls.clear()
        copied.set_attn_implementation("eager")
        with torch.no_grad():
            copied(tokens)
        assert not reading.calls
        attention.config._attn_implementation = "sdpa"  # the model's own
        assert copied.config._attn_implementation == "sdpa"
    with torch.no_grad():
        want = model(tokens).logits
    fp8core.unconvert(model)
    reading.calls.clear()
    assert type(model.model.layers[0].self_attn) is kind
    fp8core.convert(model, RECIPE, fuse=False)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, want, rtol=1e-4, atol=1e-4)
    assert not reading.calls


def test_a_config_that_is_set_stays_and_an_earlier_pickle_has_its_own(reading: Reading) -> None:
    model = apart("Olmo2")
    fp8core.convert(model, RECIPE)
    attention = model.model.layers[0].self_attn
    earlier = vars(attention).copy()
    earlier[RECORD] = dataclasses.replace(earlier[RECORD], hidden={})
    unpickled = copy.copy(attention)
    unpickled.__setstate__({**earlier, "config": model.config})
    assert unpickled.config._config is model.config
    attention.config = other = copy.deepcopy(model.config)
    assert attention.config._config is other
    fp8core.unconvert(model)
    assert attention.config is other


def test_an_attention_of_no_converted_layer_stays(reading: Reading) -> None:
    model = apart("Olmo2")
    report = fp8core.convert(model, RECIPE, filter=["mlp"])
    assert not report.decoding
    with torch.no_grad():
        model(TOKENS[:, :1])
    assert not reading.calls


def test_its_report_says_what_an_attention_lacks() -> None:
    model = apart("Olmo2")
    model.set_attn_implementation("eager")
    report = fp8core.convert(model, RECIPE)
    assert {entry.reason for entry in report.decoding} == {"once it attends by sdpa, now by eager"}
    line = "attends to one query by a kernel, where there is one: 2 Olmo2Attention"
    assert line in str(report)


def test_a_registered_sdpa_is_called_by_layers_that_are_no_chains(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def mine(module: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(module)
        return SDPA(module, *arguments, **keywords)

    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._global_mapping, "sdpa", mine)
    model = apart("Olmo2")
    fp8core.convert(model, RECIPE)
    with torch.no_grad():
        model(TOKENS[:, :1])
    assert len(calls) == 2
    assert not reading.calls


@pytest.mark.parametrize("family", ["Gemma3", "Phi"])
def test_one_graph_serves_layers_that_are_no_chains(family: str, reading: Reading) -> None:
    model, plain = apart(family), apart(family)
    fp8core.convert(model, RECIPE, rms_norms=True)
    fp8core.convert(plain, RECIPE, rms_norms=True, fuse=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got = compiled(TOKENS[:, :1], use_cache=False).logits
        want = plain(TOKENS[:, :1], use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_keys_and_values_are_read_where_the_cache_has_them(reading: Reading) -> None:
    model, cache, _ = prompted()
    with torch.no_grad():
        model(TOKENS[:, :1], **{CACHE: cache})
    assert len(reading.calls) == 2
    for layer, (desc, q, k, v, mask) in zip(cache.layers, reading.calls, strict=True):
        assert (desc.heads, desc.groups, desc.head_dim) == (4, 2, 8)
        assert (k.data_ptr(), v.data_ptr()) == (layer.keys.data_ptr(), layer.values.data_ptr())
        assert (q.shape, k.shape) == ((2, 1, 4, 8), (2, 24, 2, 8))
        assert mask[:, 0, 0].sum(1).tolist() == [24 - 17] * 2  # excluded


def prompted(model: Any = None) -> tuple[Any, StaticCache, Any]:
    """A converted model behind a prompt, the cache, and the model whose layers run as they say."""
    plain = llama().eval() if model is None else model
    model = copy.deepcopy(plain)
    fp8core.convert(model, RECIPE, rms_norms=True)
    fp8core.convert(plain, RECIPE, rms_norms=True, fuse=False)
    cache = StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        model(TOKENS, **{CACHE: cache})
    return model, cache, plain


def test_the_result_is_as_near_to_float64_as_the_model_own(reading: Reading) -> None:
    """In bfloat16, the worst row."""
    exact = model_of("Qwen3").double()
    errors = []
    inputs = {"input_ids": TOKENS, "attention_mask": PADDED}
    for kind in ("exact", "ours", "own"):
        model = copy.deepcopy(exact) if kind == "exact" else model_of("Qwen3", torch.bfloat16)
        if kind != "exact":
            fp8core.convert(model, RECIPE, rms_norms=True)
        outer = use_backend(attention="reference") if kind == "own" else nullcontext()
        cache = StaticCache(config=model.config, max_cache_len=24)
        with torch.no_grad(), outer:
            model(**inputs, **{CACHE: cache})
            mask = torch.nn.functional.pad(PADDED, (0, 1), value=1)
            y = model(TOKENS[:, -1:], attention_mask=mask, **{CACHE: cache}).logits
        errors.append(y.double())
    assert len(reading.calls) == 2
    ours, own = ((x - errors[0]).norm(dim=-1).max() for x in errors[1:])
    assert 0 < ours <= 1.2 * own


CHANGES: dict[str, Any] = {
    "a mask of numbers": {"attention_mask": torch.zeros(2, 1, 1, 24)},
    "a mask of each head": {"attention_mask": torch.ones(2, 4, 1, 24, dtype=torch.bool)},
    "a bias of positions": {"position_bias": torch.zeros(2, 4, 1, 24)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_call_is_the_model_s_own(change: str, reading: Reading) -> None:
    model, cache, plain = prompted()
    other = copy.deepcopy(cache)
    with torch.no_grad():
        y = model(TOKENS[:, :1], **{CACHE: cache}, **CHANGES[change]).logits
        want = plain(TOKENS[:, :1], **{CACHE: other}, **CHANGES[change]).logits
    assert not reading.calls
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


def test_a_gradient_goes_through_the_model_s_own(reading: Reading) -> None:
    model = llama().eval()
    fp8core.convert(model, RECIPE, rms_norms=True)
    model(TOKENS[:, :1]).logits.sum().backward()
    assert not reading.calls
    with torch.no_grad():
        model(TOKENS[:, :1])
    assert len(reading.calls) == 2
    assert all(mask is None for *_, mask in reading.calls)


def test_dropout_in_training_is_the_model_s_own(reading: Reading) -> None:
    config = transformers.LlamaConfig(**SIZES, attention_dropout=0.5)
    model = transformers.LlamaForCausalLM(config).train()
    fp8core.convert(model, RECIPE, rms_norms=True)
    with torch.no_grad():
        model(TOKENS[:, :1])
        assert not reading.calls
        model.eval()(TOKENS[:, :1])
    assert len(reading.calls) == 2


def test_an_attention_that_the_user_registered_is_called(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache, _ = prompted()
    functions, seen = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS, []

    def noting(*given: Any, **named: Any) -> Any:
        seen.append(named)
        return SDPA(*given, **named)

    monkeypatch.setitem(functions._local_mapping, "sdpa", noting)
    with torch.no_grad():
        model(TOKENS[:, :1], **{CACHE: cache})
    assert (len(seen), reading.calls) == (2, [])


def test_an_attention_in_the_place_of_torch_s_is_called(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other libraries bring theirs, by assignment to torch.nn.functional."""
    model, cache, _ = prompted()
    own, seen = nn.functional.scaled_dot_product_attention, []

    def noting(*given: Any, **named: Any) -> torch.Tensor:
        seen.append(named)
        return own(*given, **named)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noting)
    with torch.no_grad():
        model(TOKENS[:, :1], **{CACHE: cache})
    assert (len(seen), reading.calls) == (2, [])


@pytest.mark.parametrize("batch", [0, 2])
def test_a_kernel_is_asked_for_no_batch_of_none(batch: int, reading: Reading) -> None:
    attention = llama().eval().model.layers[0].self_attn
    q, k = torch.randn(batch, 4, 1, 8), torch.randn(batch, 2, 5, 8)
    y = attended(attention, Operands(q, k, k, None), attention.scaling, {}, SDPA)
    assert (y is None, len(reading.calls)) == (not batch, min(batch, 1))


def test_a_hook_on_attention_sees_it(reading: Reading) -> None:
    model, cache, _ = prompted()
    seen: list[nn.Module] = []
    model.model.layers[1].self_attn.register_forward_hook(lambda module, *_: seen.append(module))
    with torch.no_grad():
        model(TOKENS[:, :1], **{CACHE: cache})
    assert (len(seen), len(reading.calls)) == (1, 1)


def test_heads_that_no_kernel_has_are_the_model_s_own(reading: Reading) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "head_dim": 64})
    model, cache, plain = prompted(transformers.LlamaForCausalLM(config).eval())
    other = copy.deepcopy(cache)
    with torch.no_grad():
        y = model(TOKENS[:, :1], **{CACHE: cache}).logits
        want = plain(TOKENS[:, :1], **{CACHE: other}).logits
    assert not reading.calls
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_one_graph_of_torch_compile_serves_all_tokens(reading: Reading) -> None:
    """As transformers compiles it on CUDA by itself, here without a code generator."""
    model = model_of("Llama")
    fp8core.convert(model, RECIPE, rms_norms=True)
    compiled = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    options = {"attention_mask": PADDED, "max_new_tokens": 6, "do_sample": False}
    options |= {"cache_implementation": "static", "eos_token_id": None}
    want = model.generate(TOKENS, **options, disable_compile=True)
    assert len(reading.calls) == 2 * 5
    tokens = model.generate(TOKENS, **options, compile_config=compiled)
    assert torch.equal(tokens, want)
    assert len(reading.calls) == 2 * 2 * 5
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


# --- a token's keys and values in a static cache ---


class Operators(TorchDispatchMode):
    """The names of the operators that compute, not of views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names += [] if func.is_view else [name]
        return func(*args, **(kwargs or {}))


def filled(tokens: int) -> tuple[Any, list[torch.Tensor]]:
    config = transformers.LlamaConfig(**SIZES)
    cache = StaticCache(config=config, max_cache_len=8)
    source = torch.Generator().manual_seed(0)
    pair = [torch.randn(2, 2, tokens + 1, 8, generator=source) for _ in range(2)]
    for index in range(2):
        cache.update(*[x[:, :, :tokens] for x in pair], index)
    return cache, [x[:, :, tokens:] for x in pair]


def test_a_token_is_written_to_a_static_cache_by_three_operators() -> None:
    caches = [filled(3)[0] for _ in range(2)]
    token = filled(3)[1]
    single_query.updated(caches[0], *token, 0)  # compares once with the class
    caches[1].update(*token, 0)
    with Operators() as seen:
        got = single_query.updated(caches[0], *token, 0)
    assert seen.names == ["index_copy_", "index_copy_", "add_"]
    want = caches[1].update(*token, 0)
    assert all(map(torch.equal, got, want))
    assert got[0] is caches[0].layers[0].keys
    for mine, its in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(mine.cumulative_length, its.cumulative_length)


class OwnLayer(transformers.cache_utils.StaticLayer):
    pass


class OwnCache(StaticCache):
    pass


OTHER_CACHES = ["tokens", "cache", "layer", "update of the cache", "update of the layer", "patch"]


@pytest.mark.parametrize("change", [*OTHER_CACHES, "offloading", "dynamic"])
def test_another_cache_updates_itself(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, token = filled(3)
    if change == "tokens":
        token = [x.repeat(1, 1, 2, 1) for x in token]
    elif change == "cache":
        cache.__class__ = OwnCache
    elif change == "layer":
        cache.layers[0].__class__ = OwnLayer
    elif change == "offloading":
        cache.offloading = True
    elif change == "dynamic":
        cache = transformers.DynamicCache()
    calls: list[Any] = []
    holder = cache.layers[0] if change == "update of the layer" else cache
    if change == "patch":
        update = transformers.cache_utils.StaticLayer.update
        monkeypatch.setattr(
            transformers.cache_utils.StaticLayer,
            "update",
            lambda *arguments: calls.append(arguments) or update(*arguments),
        )
    elif change.startswith("update"):
        update = holder.update
        holder.update = lambda *arguments: calls.append(arguments) or update(*arguments)
    else:
        monkeypatch.setattr(type(cache), "update", lambda *arguments: calls.append(arguments))
        type(cache).update.__code__ = type(cache).update.__code__.replace(
            co_filename=transformers.cache_utils.__file__
        )
    single_query.updated(cache, *token, 0)
    assert len(calls) == 1


def test_an_update_that_writes_otherwise_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Any, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        self.keys.fill_(5.0)
        return self.keys, self.values

    update.__code__ = update.__code__.replace(co_filename=transformers.cache_utils.__file__)
    monkeypatch.setattr(transformers.cache_utils.StaticLayer, "update", update)
    cache, token = filled(3)
    keys, _ = single_query.updated(cache, *token, 0)
    assert (keys == 5.0).all()
