"""Decoder layers of transformers as chains: which, how near, and what stays as it is."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8core
from fp8core import OperandError, recipe
from fp8core.chain.run import Stateful
from fp8core.chain.run import _captured as captured_links
from fp8core.chain.series import Chain
from fp8core.conversion import decoder
from fp8core.modules.sequences.rotary import apply_rotary_pos_emb
from fp8core.modules.splice import Splice
from tests.conversion.hugging_face import SIZES, TOKENS, llama, train
from tests.device import BACKEND

FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"head_dim": 8},
    "Gemma": {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"},
    "Mixtral": {"head_dim": 8, "num_local_experts": 4},
}


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 0.0 if family == "Gemma" else 1.0, 0.1)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, 0.0, 0.1)
    return model.to(dtype).train()


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each call of a chain adds whether it ran."""
    ran: list[bool] = []
    run = Splice.run

    def noting(self: Splice, *tensors: torch.Tensor) -> torch.Tensor | None:
        output = run(self, *tensors)
        ran.append(output is not None)
        return output

    monkeypatch.setattr(Splice, "run", noting)
    return ran


@pytest.mark.parametrize("family", FAMILIES)
def test_families_run_as_chains_and_train_alike(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, losses = count_runs(monkeypatch), []
    for fuse in (True, False):
        model = model_of(family)
        report = fp8core.convert(model, "delayed", fuse=fuse, rms_norms=True)
        names = [entry.name for entry in report.fused]
        assert names == (["model.layers.0", "model.layers.1"] if fuse else [])
        losses.append(train(model, 3, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert ran == [True] * (3 * 4)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("family", [*FAMILIES][:-1])  # torch has no experts in float64
def test_a_layer_is_as_near_to_float64_as_the_model_own(family: str) -> None:
    """In bfloat16, with the products of both in one and the same low precision."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 32, 32, generator=source).bfloat16()
    positions = torch.arange(32)[None]
    errors = []
    exact = model_of(family).double().model
    cos, sin = exact.rotary_emb(x.double(), positions)
    want = exact.layers[0](x.double(), position_embeddings=(cos, sin), attention_mask=None)
    for fuse in (True, False):
        model = model_of(family, torch.bfloat16)
        fp8core.convert(model, recipe.Float8CurrentScaling(), fuse=fuse)
        pair = model.model.rotary_emb(x, positions)
        y = model.model.layers[0](x, position_embeddings=pair, attention_mask=None)
        errors.append((y.double() - want).norm(dim=-1).max())
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.usefixtures("first_algorithms")
def test_a_token_rotates_queries_and_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of a forward with gradients, which rotates each by itself."""
    rotated: list[torch.Size] = []

    def noted(t: torch.Tensor, *given: Any) -> torch.Tensor:
        rotated.append(t.shape)
        return apply_rotary_pos_emb(t, *given)

    monkeypatch.setattr(decoder, "apply_rotary_pos_emb", noted)
    model = llama().eval()
    fp8core.convert(model, "rowwise", rms_norms=True)
    logits = model(TOKENS).logits
    heads = [shape[-2] for shape in rotated]
    rotated.clear()
    for no_gradients in (torch.no_grad(), torch.inference_mode()):
        with no_gradients:
            assert torch.equal(model(TOKENS).logits, logits)
    assert [shape[-2] for shape in rotated] == [sum(heads[:2])] * (2 * len(heads) // 2)


def test_sequences_at_positions_of_their_own_are_rotated_as_the_model_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the operation, whose results are rounded once."""
    positions = torch.stack((torch.arange(16), torch.arange(3, 19)))
    outputs = []
    for fuse in (True, False):
        model = llama().eval()
        fp8core.convert(model, "mxfp8", fuse=fuse, rms_norms=True)
        with torch.no_grad(), monkeypatch.context() as patch:
            patch.setattr(decoder, "turned", pytest.fail)
            outputs.append(model(TOKENS, position_ids=positions).logits)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_angles_of_inference_mode_serve_training() -> None:
    model, x = llama(), torch.randn(1, 16, 32)
    fp8core.convert(model, "current")
    layer, pair = model.model.layers[0], model.model.rotary_emb(x, torch.arange(16)[None])
    with torch.inference_mode():
        expected = layer(x, position_embeddings=pair, attention_mask=None)
    y = layer(x, position_embeddings=pair, attention_mask=None)
    y.sum().backward()
    assert torch.equal(y, expected)


CHANGES = ["cosines and sines in place", "other sines", "a capture", "two captures", "a replay"]


@pytest.mark.parametrize("change", CHANGES)
def test_angles_are_those_of_the_call(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``a replay`` of the graph that computes them, before layers that no graph has."""
    model, x = llama(), torch.randn(1, 16, 32)
    fp8core.convert(model, "current")
    layer, positions = model.model.layers[0], torch.arange(16)[None]
    pair = model.model.rotary_emb(x, positions)
    later = (
        [pair[0].clone(), -pair[1]]
        if change == "other sines"
        else model.model.rotary_emb(x, 3 * positions)
    )
    with torch.no_grad():
        expected = layer(x, position_embeddings=tuple(later), attention_mask=None)
        monkeypatch.setattr(decoder, "is_capturing", lambda: change == "two captures")
        layer(x, position_embeddings=pair, attention_mask=None)
        if change == "other sines":
            pair = pair[0], later[1]
        for held, value in zip(pair, later, strict=True):
            (held if change == CHANGES[0] else held.data).copy_(value)  # the others: no version
        monkeypatch.setattr(decoder, "is_capturing", lambda: "capture" in change)
        y = layer(x, position_embeddings=pair, attention_mask=None)
    assert torch.equal(y, expected)


def test_layers_that_are_captured_have_angles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in its graph, by cosines and sines that all of them get: a graph writes its memory in
    its own replay. In a forward without a graph layers share them."""
    model, x, made = llama(), torch.randn(1, 16, 32), []

    def noted(cos: torch.Tensor, sin: torch.Tensor) -> Any:
        made.append(cos)
        return turn_by(cos, sin)

    turn_by = decoder._turn_by
    monkeypatch.setattr(decoder, "_turn_by", noted)
    fp8core.convert(model, "current")
    pair = model.model.rotary_emb(x, torch.arange(16)[None])
    for is_capturing, count in ((False, 1), (True, 2), (False, 1)):
        made.clear()
        monkeypatch.setattr(decoder, "is_capturing", lambda captures=is_capturing: captures)
        with torch.no_grad():
            for layer in model.model.layers:
                layer(x, position_embeddings=pair, attention_mask=None)
        assert len(made) == count


@pytest.mark.parametrize("part", ["whole", "layers alone", "scaling of a kind of layers"])
def test_scaled_cosines_and_sines_stay_scaled(part: str) -> None:
    """Those of YaRN, whose rotary embedding may lie outside of what is converted."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    sizes = {**SIZES, "rope_parameters": {**yarn, "original_max_position_embeddings": 8}}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.q_proj.weight)  # by which attention tells positions apart
        nn.init.normal_(layer.self_attn.k_proj.weight)
    if part == "scaling of a kind of layers":
        embedding = model.model.rotary_emb
        embedding.full_attention_attention_scaling = embedding.attention_scaling
        embedding.attention_scaling = 1.0
        forward, scaling = embedding.forward, embedding.full_attention_attention_scaling
        embedding.forward = lambda *inputs, **keywords: tuple(
            each * scaling for each in forward(*inputs, **keywords)
        )
    outputs = []
    for fuse in (True, False):
        each = copy.deepcopy(model)
        converted = each.model.layers if part == "layers alone" else each
        fp8core.convert(converted, "mxfp8", fuse=fuse, rms_norms=True)
        with torch.no_grad():
            outputs.append(each(TOKENS).logits)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("change", ["attribute", "module", "class", "hook"])
def test_cosines_and_sines_that_are_scaled_later_stay_scaled(change: str, is_copied: bool) -> None:
    """As by another rotary embedding for a longer context; the former one is still referred to."""

    class Scaled(transformers.models.llama.modeling_llama.LlamaRotaryEmbedding):
        def forward(self, *inputs: Any, **keywords: Any) -> Any:
            return [1.5 * each for each in super().forward(*inputs, **keywords)]

    outputs = []
    for fuse in (True, False):
        model = llama().eval()
        for layer in model.model.layers:
            nn.init.normal_(layer.self_attn.q_proj.weight)
            nn.init.normal_(layer.self_attn.k_proj.weight)
        fp8core.convert(model, "mxfp8", fuse=fuse, rms_norms=True)
        with torch.no_grad():
            before = model(TOKENS).logits
            model = copy.deepcopy(model) if is_copied else model
            assert torch.equal(model(TOKENS).logits, before)
            embedding = model.model.rotary_emb
            if change == "attribute":
                embedding.attention_scaling = 1.5
            elif change == "module":
                model.model.rotary_emb = copy.deepcopy(embedding)
                model.model.rotary_emb.attention_scaling = 1.5
                del embedding  # the copy of a model does not know where it lies
            elif change == "class":
                embedding.__class__ = Scaled
            else:
                embedding.register_forward_hook(lambda *call: [1.5 * each for each in call[-1]])
            outputs.append(model(TOKENS).logits)
        assert (outputs[-1] - before).abs().max() > 5e-3
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_sines_alone_get_a_gradient() -> None:
    model, x = llama(), torch.randn(1, 16, 32)
    fp8core.convert(model, "current")
    cos, sin = model.model.rotary_emb(x, torch.arange(16)[None])
    sin.requires_grad_()
    model.model.layers[0](x, position_embeddings=(cos, sin), attention_mask=None).sum().backward()
    assert sin.grad is not None
    assert sin.grad.any()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_padded_batch_and_generation_with_a_cache(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, results = count_runs(monkeypatch), []
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    for fuse in (True, False):
        model = llama().eval()
        fp8core.convert(model, "mxfp8", fuse=fuse, rms_norms=True)
        with torch.no_grad():
            scores = model(TOKENS, attention_mask=mask).logits[:, 5:]
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
        options["cache_implementation"] = cache
        results.append((scores, model.generate(TOKENS, **options)))
    assert all(ran)
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("family", "name"), [("Llama", "current"), ("Qwen3", "mxfp8")])
def test_compiled_layers_run_as_the_chains_of_eager(family: str, name: str) -> None:
    """Also under a default device, a mode in which Dynamo traces the Python code of torch."""
    torch._dynamo.reset()
    counters.clear()
    model = model_of(family, torch.bfloat16)
    fp8core.convert(model, name)
    model.config.use_cache = False  # for which torch has a graph a layer
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    entries = len(captured_links)
    placement = torch.device(torch.get_default_device()) if name == "mxfp8" else nullcontext()
    for _ in range(2):
        for each in (model, other):
            each.zero_grad()
            with placement:
                each(TOKENS, labels=TOKENS).loss.backward()
        grads = [[own.grad for own in each.parameters()] for each in (model, other)]
        assert all(map(torch.equal, *grads))
    assert counters["stats"]["unique_graphs"] == 1
    chains = [links for links in captured_links[entries:] if isinstance(links, Chain)]
    # Norm, siblings; o, +, mlp. Where runs are recorded, two residual blocks are one chain.
    expected = [2] if BACKEND == "cuda" else [2, 3]
    assert [len(links) for links in chains if len(links) > 1] == expected
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("first_algorithms")
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "layers"])
def test_graphs_of_delayed_scaling_run_as_the_chains_of_eager(is_whole: bool) -> None:
    """Steps, an evaluation between them, and microbatches in an autocast around the graph.

    The graph of a whole model has other gradients than eager in bfloat16 on a CPU, converted or
    not: there the forward pass and its scales are equal.
    """
    torch._dynamo.reset()
    counters.clear()
    chosen = recipe.DelayedScaling(amax_history_len=2)
    model = model_of("Llama", torch.bfloat16)
    model.config.use_cache = False
    fp8core.convert(model, chosen)
    other: Any = copy.deepcopy(model)
    entries = len(captured_links)
    if is_whole:
        other.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    else:
        for layer in other.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    for number, batches in enumerate((1, 1, 1, 2, 1)):
        graphs = counters["stats"]["unique_graphs"]
        results = []
        for each in (model, other):
            each.zero_grad()
            around = nullcontext() if batches == 1 else fp8core.autocast(recipe=chosen)
            with around:
                for batch in range(batches):
                    logits = each(TOKENS.roll(number + batch)).logits
                    logits.float().square().mean().backward()
            tensors = {name: own.grad for name, own in each.named_parameters()}
            tensors |= {name: own.clone() for name, own in each.named_buffers()}
            if number == 2:
                with torch.no_grad():
                    tensors["evaluated_fwd"] = each.eval()(TOKENS).logits
                each.train()
            results.append(tensors | {"logits_fwd": logits.detach()})
        for name, tensor in results[0].items():
            if not is_whole or name.endswith(("_fwd", "_meta")):
                assert torch.equal(results[1][name], tensor), name
        assert number != 1 or counters["stats"]["unique_graphs"] == graphs
    groups = [
        [len(layers) for layers, _ in links.after.keywords["groups"]]
        for links in captured_links[entries:]
        if isinstance(links, Stateful) and links.after is not None
    ]
    # Of q, k and v, and of gate and up, which no module cast by itself; on CUDA of one chain, but
    # where transformers is traced, which then makes a mask.
    is_joined = BACKEND == "cuda" and not is_whole
    assert groups[:2] == ([[3, 2]] * 2 if is_joined else [[3], [2]])
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["mlp.act_fn", "input_layernorm"])
def test_a_module_replaced_after_its_graph_was_compiled_is_called(name: str) -> None:
    torch._dynamo.reset()
    model = llama(layers=1).eval()
    fp8core.convert(model, "current")
    model.config.use_cache = False
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        before = compiled(TOKENS).logits
        model.model.layers[0].set_submodule(name, nn.ReLU())
        after = compiled(TOKENS).logits
        torch._dynamo.reset()  # on a GPU eager's kernels add up in another order
        assert torch.equal(after, torch.compile(model, backend="aot_eager")(TOKENS).logits)
    assert not torch.equal(after, before)
    torch._dynamo.reset()


def test_a_hook_inside_has_its_module_run_by_itself() -> None:
    model, seen = llama(), []
    fp8core.convert(model, "current")
    layer = model.model.layers[0]
    want = model(TOKENS).logits
    for module in (layer.mlp, layer.self_attn.k_proj, layer.input_layernorm, layer.mlp.act_fn):
        hook = module.register_forward_hook(lambda module, *rest: seen.append(module))
        torch.testing.assert_close(model(TOKENS).logits, want, rtol=1e-3, atol=1e-3)
        assert seen.pop() is module
        hook.remove()
    assert not seen
    before = model(TOKENS, output_hidden_states=True)
    assert len(before.hidden_states) == 3


def test_what_stays_apart_is_in_the_report() -> None:
    model = llama()
    model.model.layers[0].mlp.register_forward_hook(lambda *arguments: None)
    report = fp8core.convert(model, "current", skip="layers.1.self_attn.o_proj")
    hooked = "its mlp has a hook, or a forward of its own"
    fused = {entry.name: entry.reason for entry in report.fused}
    reason = f"but its feed-forward block, as {hooked}"
    blocks = {"model.layers.0.mlp": "", "model.layers.1.mlp": ""}
    assert fused == {"model.layers.0": reason, **blocks}
    apart = {entry.name: entry.reason for entry in report.apart}
    assert apart == {"model.layers.1": "its self_attn.o_proj is not converted"}
    assert f"runs as chains: 1 LlamaDecoderLayer (model.layers.0): {reason}" in str(report)


def test_another_block_runs_behind_the_sum() -> None:
    report = fp8core.convert(model_of("Mixtral"), "current")
    reasons = {entry.reason for entry in report.fused}
    assert reasons == {"but its feed-forward block, as it is a MixtralSparseMoeBlock"}


def test_the_comparison_leaves_random_numbers_of_every_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seeds = llama(), []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = torch.get_rng_state()
    assert len(fp8core.convert(model, "current").fused) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeds


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_decides_about_no_layer(dtype: torch.dtype) -> None:
    model, before = llama(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        report = fp8core.convert(model, "current")
    finally:
        torch.set_default_dtype(before)
    assert len(report.fused) == 2


@pytest.mark.parametrize("family", ["GemmaForCausalLM", "GPT2LMHeadModel"])
def test_fake_models_are_compared_as_real_ones(family: str) -> None:
    """By real numbers; with fake ones the comparison ended in an error of torch."""
    reports = []
    for mode in (FakeTensorMode(), nullcontext()):
        with mode:
            kind = getattr(transformers, family)
            model = kind(kind.config_class(**SIZES))
            reports.append(str(fp8core.convert(model, "current")))
            logits = model(torch.zeros(1, 4, dtype=torch.int64)).logits
            assert type(logits) is (torch.Tensor if len(reports) == 2 else FakeTensor)
    assert reports[0] == reports[1]


@pytest.mark.parametrize("kernel", [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH])
def test_layers_are_compared_whatever_kernels_torch_may_attend_by(kernel: SDPBackend) -> None:
    with sdpa_kernel(kernel):  # the first leaves a CPU none
        report = fp8core.convert(llama(), "current")
        assert torch.backends.cuda.math_sdp_enabled() is (kernel is SDPBackend.MATH)
    assert not report.apart


def test_dropout_that_the_class_adds_in_training_is_noticed() -> None:
    model = llama()

    class Dropping(type(model.model.layers[0])):  # type: ignore[misc]  # a class
        def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
            y = super().forward(hidden_states, **keywords)
            return nn.functional.dropout(y, 0.5, self.training)

    model.model.layers[0].__class__ = Dropping
    report = fp8core.convert(model.eval(), "current")
    assert [entry.reason for entry in report.apart] == ["its class computes otherwise"]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Granite", [{"residual_multiplier": 1.0}, {"residual_multiplier": 0.2}]),
        ("SmolLM3", [{"no_rope_layers": [1, 0]}]),
    ],
)
def test_a_class_whose_objects_compute_otherwise_is_compared_with_each(
    family: str, options: list[dict[str, Any]]
) -> None:
    for own in options:
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **own})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        apart = copy.deepcopy(model)
        fp8core.convert(model, "current")
        fp8core.convert(apart, "current", fuse=False)
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS).logits, apart(TOKENS).logits)


def test_a_layer_without_a_part_is_no_such_layer() -> None:
    model = llama()
    model.model.layers[0].mlp = None
    model.model.layers[1].self_attn.o_proj = None
    report = fp8core.convert(model, "current")
    assert [entry.name for entry in report.fused] == ["model.layers.1.mlp"]
    assert not report.apart


def test_an_interrupted_comparison_leaves_the_model_as_it_was() -> None:
    model = llama()

    class Interrupted(type(model.model.layers[0])):  # type: ignore[misc]  # a class
        def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            raise KeyboardInterrupt

    model.model.layers[1].__class__ = Interrupted
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(KeyboardInterrupt):
        fp8core.convert(model, "current")
    assert [type(module) for module in model.modules()] == kinds


def test_a_class_that_computes_otherwise_stays_apart() -> None:
    model = llama()

    class Parallel(type(model.model.layers[0])):  # type: ignore[misc]  # a class
        def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
            normalized = self.input_layernorm(hidden_states)
            attended, _ = self.self_attn(normalized, **keywords)
            y: torch.Tensor = hidden_states + attended + self.mlp(normalized)
            return y

    model.model.layers[1].__class__ = Parallel
    report = fp8core.convert(model, "current")
    assert [entry.name for entry in report.fused] == ["model.layers.0", "model.layers.1.mlp"]
    assert [entry.reason for entry in report.apart] == ["its class computes otherwise"]


@pytest.mark.parametrize("limit", [0.01, 10.0])
def test_a_block_whose_class_computes_otherwise_runs_by_itself(limit: float) -> None:
    outputs = []
    for fuse in (True, False):
        model = llama().eval()
        nn.init.normal_(model.model.layers[1].mlp.down_proj.weight, 0.0, 50.0)

        class Clamped(type(model.model.layers[0].mlp)):  # type: ignore[misc]  # a class
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y: torch.Tensor = super().forward(x).clamp(-limit, limit)
                return y

        model.model.layers[1].mlp.__class__ = Clamped
        report = fp8core.convert(model, "mxfp8", fuse=fuse, rms_norms=True)
        if fuse:
            reason = "but its feed-forward block, as its Clamped computes otherwise"
            assert [entry.reason for entry in report.fused] == ["", reason]
        with torch.no_grad():
            outputs.append(model(TOKENS).logits)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_gated_blocks_of_other_layers_are_a_chain_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, losses = count_runs(monkeypatch), []
    for fuse in (True, False):
        torch.manual_seed(0)
        sizes = {**SIZES, "head_dim": 8, "attn_implementation": "eager"}
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes)).train()
        report = fp8core.convert(model, "delayed", fuse=fuse, rms_norms=True)
        names = [entry.name for entry in report.fused]
        assert names == (["model.layers.0.mlp", "model.layers.1.mlp"] if fuse else [])
        losses.append(train(model, 3, torch.optim.SGD(model.parameters(), lr=0.1)))
        if fuse:
            fp8core.unconvert(model)
            assert type(model.model.layers[0].mlp).__module__.startswith("transformers.")
    assert ran == [True] * (3 * 2)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_an_adapter_added_later_is_not_passed_over() -> None:
    peft = pytest.importorskip("peft")
    model = llama()
    fp8core.convert(model, "current")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
    factors = [p for name, p in adapted.named_parameters() if "lora_A" in name]
    assert factors
    assert all(factor.grad is not None and factor.grad.any() for factor in factors)


def test_state_names_and_classes_are_those_of_the_model(tmp_path: Any) -> None:
    model, plain = llama(), llama()
    kind = type(plain.model.layers[0])
    fp8core.convert(model, "current")
    layer = model.model.layers[0]
    assert isinstance(layer, kind)
    assert type(layer).__name__ == kind.__name__
    assert model.state_dict().keys() == plain.state_dict().keys()
    again = pickle.loads(pickle.dumps(layer))
    assert type(again) is type(layer)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS).logits, model(TOKENS).logits)
    fp8core.unconvert(model)
    assert type(model.model.layers[0]) is kind
    assert vars(model.model.layers[0]).keys() == vars(plain.model.layers[0]).keys()
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


def test_a_layer_whose_forward_was_replaced_is_not_undone() -> None:
    model = llama()
    fp8core.convert(model, "current")
    layer = model.model.layers[0]
    layer.forward = layer.forward
    with pytest.raises(OperandError, match="has its forward replaced"):
        fp8core.unconvert(model)


def test_a_layer_called_alone_is_a_step_of_delayed_scaling() -> None:
    model = llama()
    fp8core.convert(model, "delayed")
    x = torch.randn(1, 16, 32)
    pair = model.model.rotary_emb(x, torch.arange(16)[None])
    model.model.layers[0](x, position_embeddings=pair, attention_mask=None)
    attention = model.model.layers[0].self_attn
    scales = [getattr(attention, name).scale_fwd[0] for name in ("q_proj", "k_proj", "v_proj")]
    assert scales[0] != 1
    assert scales[0] == scales[1] == scales[2]
