"""Layers of transformers as one chain, attention included: which calls, and with which bits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fp8core
from fp8core.chain.repeated import Repeated
from fp8core.conversion import decoder
from fp8core.modules.splice import Splice
from tests import recording_backend
from tests.conversion.hugging_face import SIZES, TOKENS, gpt2, llama
from tests.conversion.test_decoder import model_of

pytestmark = pytest.mark.usefixtures("first_algorithms")


@pytest.fixture(autouse=True)
def _recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a backend that records runs compute what the program does not choose otherwise."""
    recording_backend.install(monkeypatch)
    recording_backend.RECORDER.problems.clear()
    with fp8core.use_backend(recording_backend.NAME):
        yield


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list to which each call of a chain with attention adds whether it ran."""
    ran: list[bool] = []
    run = Splice.run

    def noting(self: Splice, *tensors: torch.Tensor) -> torch.Tensor | None:
        output = run(self, *tensors)
        if self.attention is not None:
            ran.append(output is not None)
        return output

    monkeypatch.setattr(Splice, "run", noting)
    return ran


OTHERWISE: dict[str, Callable[[Any], Any]] = {
    "a mask": lambda model: model(TOKENS, attention_mask=(TOKENS != 5).long(), use_cache=False),
    "a cache": lambda model: model(TOKENS, use_cache=True),
    "positions of each sequence": lambda model: model(
        TOKENS,
        position_ids=torch.stack((torch.arange(16), torch.arange(3, 19))),
        use_cache=False,
    ),
}


@contextmanager
def changed(what: str, model: Any, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have calls of ``model`` be those of ``what`` inside."""
    attention, context = model.model.layers[0].self_attn, ExitStack()
    if what == "one of torch's kernels":
        context.enter_context(sdpa_kernel(SDPBackend.MATH))
    elif what == "deterministic algorithms":
        torch.use_deterministic_algorithms(True)
        context.callback(torch.use_deterministic_algorithms, False)
    elif what == "another backend of attention":
        context.enter_context(fp8core.use_backend(attention="reference"))
    elif what == "no recorder":
        context.enter_context(fp8core.use_backend("reference"))
    elif what == "a function in the place of torch's":
        own = functional.scaled_dot_product_attention
        patch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: own(*a, **k))
    elif what == "another sdpa":
        own_sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        patch.setitem(
            ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **k: own_sdpa(*a, **k)
        )
    elif what == "dropout":
        attention.attention_dropout = 0.5
    elif what == "a hook inside":
        context.callback(attention.register_forward_hook(lambda *_: None).remove)
    elif what == "no causal mask":
        attention.is_causal = False
    elif what == "another scale":
        attention.scaling *= 2
    elif what == "an adapter":
        attention.o_proj = torch.nn.Sequential(attention.o_proj)
    elif what == "torch.autocast":
        context.enter_context(torch.autocast("cpu", torch.bfloat16))
    elif what == "frozen weights":
        context.enter_context(fp8core.frozen_weights(model))
    with context:
        yield


CHANGES = [
    *("one of torch's kernels", "deterministic algorithms", "another backend of attention"),
    *("no recorder", "a function in the place of torch's", "another sdpa", "dropout"),
    *("a hook inside", "no causal mask", "another scale", "an adapter", "torch.autocast"),
    "frozen weights",
]


def out_of(model: Any, call: Callable[[Any], Any]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    y = call(model)[0]
    y.float().sin().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("what", [*OTHERWISE, *CHANGES])
def test_other_calls_run_as_they_would(
    what: str, whole: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind calls that ran as one chain, with the bits of a layer that never did."""
    call = OTHERWISE.get(what, lambda model: model(TOKENS, use_cache=False))
    results = []
    for is_whole in (True, False):
        model = llama().train()
        fp8core.convert(model, "current", rms_norms=True)
        for layer in [] if is_whole else model.model.layers:
            attributes = vars(layer)
            attributes[decoder._CHAINS] = attributes[decoder._CHAINS]._replace(whole=None)
        for _ in range(3):
            step(model, TOKENS)
        assert whole == ([True] * 6 if is_whole else [])
        whole.clear()
        with monkeypatch.context() as patch, changed(what, model, patch):
            results.append(out_of(model, call))
        # The layer that was changed alone.
        first, second = (whole[:1], whole[1:]) if len(whole) > 1 else ([], whole)
        assert True not in first, what
        assert second in ([], [True], [False]), what
        whole.clear()
    if what not in ("dropout", "no causal mask", "another scale", "a hook inside", "an adapter"):
        assert_same(*results)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_groups_that_are_set_later_are_those_of_sdpa(whole: list[bool]) -> None:
    model = converted(llama().train())
    step(model, TOKENS)
    model.model.layers[0].self_attn.num_key_value_groups = 1  # which do not fit
    with pytest.raises(RuntimeError, match="must match the size"):
        step(model, TOKENS)
    assert whole == [True] * 2


# `activation_checkpointing_enable` is its name from transformers 5 on.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_repeats_the_chain(use_reentrant: bool, whole: list[bool]) -> None:
    results = []
    for has_checkpoint in (False, True):
        model = llama().train()
        if has_checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        # Delayed scales of a forward are not known to a reentrant recompute.
        fp8core.convert(model, "current" if use_reentrant else "delayed", rms_norms=True)
        steps = [step(model, TOKENS + number) for number in range(4)]
        # The other recompute ends within the chain, as soon as all that it saves is there.
        assert whole == [True] * (4 * 2 * (1 + (has_checkpoint and use_reentrant)))
        whole.clear()
        results.append(steps)
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)


def test_no_gradients_and_copies(whole: list[bool]) -> None:
    model = llama()
    fp8core.convert(model, "current", rms_norms=True)
    expected = step(model, TOKENS)[0]
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(TOKENS, use_cache=False).logits, expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        whole.clear()
        assert torch.equal(step(other, TOKENS)[0], expected)
        assert whole == [True] * 2


def test_a_layer_is_one_node_of_autograd(whole: list[bool]) -> None:
    model = converted(llama(1).train())
    layer, x = model.model.layers[0], torch.randn(2, 16, 32).requires_grad_()
    pair = model.model.rotary_emb(x, torch.arange(16)[None])
    for _ in range(4):
        y = layer(x, position_embeddings=pair, attention_mask=None)
        names = [node.name() for node, _ in y.grad_fn.next_functions if node is not None]
        assert names == ["torch::autograd::AccumulateGrad"] * (1 + len([*layer.parameters()]))
        y.sum().backward()
    assert whole == [True] * 4


def test_layers_of_an_earlier_version_run_as_two_chains(whole: list[bool]) -> None:
    chains = vars(converted(llama()).model.layers[0])[decoder._CHAINS]
    earlier = decoder.LayerChains(*chains[:-1])
    assert earlier.whole is None


def converted(model: Any) -> Any:
    fp8core.convert(model, "current", rms_norms=True)
    return model


def by_the_backend(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **keywords: Any
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' ``sdpa``, by the backend of fp8core that a whole chain takes."""
    assert mask is None
    causal = keywords.get("is_causal", getattr(module, "is_causal", True))
    heads, groups, size = q.shape[1], k.shape[1], q.shape[3]
    attend = fp8core.DotProductAttention(
        heads,
        size,
        num_gqa_groups=groups,
        qkv_format="bshd",
        attn_mask_type="causal" if causal else "no_mask",
        softmax_scale=keywords["scaling"],
        attention_dropout=0.0,
    )
    with fp8core.autocast(enabled=False), fp8core.use_backend("reference"):
        out = attend(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.unflatten(-1, (heads, size)), None


def step(model: Any, tokens: torch.Tensor, **keywords: Any) -> list[torch.Tensor]:
    """Return output, gradients and delayed states of a step."""
    model.zero_grad()
    output = model(tokens, use_cache=False, **keywords)[0]
    output.sin().sum().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters()), *model.buffers()]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": llama,
    "Qwen2": lambda: model_of("Qwen2"),
    "Mixtral": lambda: model_of("Mixtral"),
    "bfloat16": lambda: model_of("Llama", torch.bfloat16),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_steps_equal_those_of_two_chains_around_attention(
    kind: str, recipe: str, whole: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded and repeated, at lengths that change."""
    models = [MODELS[kind]().train() for _ in range(2)]
    for model in models:
        fp8core.convert(model, recipe, rms_norms=True)
    for number in range(7):
        tokens = (TOKENS + number)[:, : 16 if number % 3 else 12]
        ours = step(models[0], tokens)
        assert whole == [True] * 2
        with monkeypatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", by_the_backend)
            assert_same(ours, step(models[1], tokens))
        assert whole == [True] * 2
        whole.clear()
    layer = models[0].model.layers[0]
    ((chain, *_),) = vars(layer)[decoder._CHAINS].whole._chains.values()
    programs = [each for each in chain._programs.values() if isinstance(each, Repeated)]
    assert [program.is_recorded for program in programs] == [(True, True)] * 2
    assert not recording_backend.RECORDER.problems


def of_gpt2() -> Any:
    model = gpt2()
    for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop"):
        setattr(model.config, name, 0.0)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(model.config)


def of_bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size")},
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertModel(config)


FAMILIES: dict[str, Callable[[], Any]] = {"GPT-2": of_gpt2, "BERT": of_bert}


@pytest.mark.parametrize("kind", FAMILIES)
def test_layers_without_a_rotation_equal_those_of_two_chains(
    kind: str, whole: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [FAMILIES[kind]().train() for _ in range(2)]
    for model in models:
        fp8core.convert(model, "current")
        model.pooler = None
    for number in range(4):
        ours = step(models[0], TOKENS + number)
        assert whole == [True] * 2 * (number + 1)
        with monkeypatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", by_the_backend)
            assert_same(ours, step(models[1], TOKENS + number))
