"""Layers of GPT-2, ViT, CLIP, BERT and T5 as chains: which, how near, and what stays as it is."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

import fp8core
from fp8core import recipe
from fp8core.chain.linear.siblings import SiblingsLink
from fp8core.chain.run import _captured as captured_links
from fp8core.chain.series import Chain
from fp8core.modules import splice
from tests.conversion.test_decoder import count_runs
from tests.device import DEVICE

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TOKENS = torch.arange(3, 35).reshape(2, 16)
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
SIZES |= {"intermediate_size": 48}
IMAGES = {"image_size": 16, "patch_size": 4}


class Family(NamedTuple):
    """A model of a family, its inputs, and how its config names dropouts and the activation."""

    model: str
    config: str
    sizes: dict[str, Any]
    inputs: dict[str, Any]
    dropouts: tuple[str, ...]
    activation: str
    fused: tuple[str, ...]
    runs: int
    """Calls of chains in a forward without dropout."""


TEXT = {"input_ids": TOKENS}
FAMILIES = {
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, **IDS},
        TEXT | {"labels": TOKENS},
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "activation_function",
        ("transformer.h.0", "transformer.h.1"),
        4,
    ),
    "ViT": Family(
        "ViTForImageClassification",
        "ViTConfig",
        SIZES | IMAGES,
        {"pixel_values": PIXELS, "labels": torch.tensor([0, 1])},
        ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "hidden_act",
        ("vit.layers.0", "vit.layers.1"),
        4,
    ),
    "CLIP": Family(
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        SIZES | IMAGES | {"projection_dim": 16},
        {"pixel_values": PIXELS},
        ("attention_dropout",),
        "hidden_act",
        ("vision_model.encoder.layers.0", "vision_model.encoder.layers.1"),
        4,
    ),
    "BERT": Family(
        "BertForMaskedLM",
        "BertConfig",
        SIZES | {"vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0},
        TEXT | {"labels": TOKENS, "attention_mask": torch.ones_like(TOKENS).tril(13)},
        ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "hidden_act",
        ("bert.encoder.layer.0", "bert.encoder.layer.1"),
        4,
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1},
            **{"num_heads": 4, "decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
        },
        TEXT | {"labels": TOKENS},
        ("dropout_rate",),
        "feed_forward_proj",
        ("encoder.block.0.layer.1", "decoder.block.0.layer.2"),
        2,
    ),
}
FAMILIES["T5 v1.1"] = FAMILIES["T5"]._replace(
    sizes=FAMILIES["T5"].sizes | {"feed_forward_proj": "gated-gelu"}
)


def model_of(family: str, dropout: float = 0.0, **others: Any) -> Any:
    row = FAMILIES[family]
    torch.manual_seed(0)
    options = row.sizes | dict.fromkeys(row.dropouts, dropout) | others
    model = getattr(transformers, row.model)(getattr(transformers, row.config)(**options))
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() or "ln_" in name:
            nn.init.normal_(parameter, 0.0 if name.endswith("bias") else 1.0, 0.1)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, 0.0, 0.1)
    return model.train()


def output_of(model: Any, family: str) -> torch.Tensor:
    """Return a number that depends on all of the model's output, from seed 0."""
    torch.manual_seed(0)
    result = model(**FAMILIES[family].inputs)
    loss: torch.Tensor | None = getattr(result, "loss", None)
    return result[0].float().square().mean() if loss is None else loss


def trained(model: Any, family: str) -> list[torch.Tensor]:
    """Return a loss and all gradients."""
    loss = output_of(model, family)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES][:-1])  # a gated activation rounds
@pytest.mark.usefixtures("first_algorithms")
def test_chains_compute_what_the_layers_do_bit_for_bit(
    family: str, dtype: torch.dtype, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an activation that rounds nothing: loss and gradients of a step with the same dropout,
    and an evaluation. BERT has the gradients of q, k and v added up before that of the sum. What
    products add to is rounded less often than torch's sums, so no product adds here."""
    monkeypatch.setattr(splice, "siblings", lambda links, _: SiblingsLink((*links,)))
    ran, results = count_runs(monkeypatch), []
    row = FAMILIES[family]
    for fuse in (True, False):
        model = model_of(family, dropout, **{row.activation: "relu"}).to(dtype)
        inputs = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in row.inputs.items()
        }
        monkeypatch.setitem(FAMILIES, family, row._replace(inputs=inputs))
        report = fp8core.convert(model, "current", fuse=fuse, rms_norms=True)
        assert tuple(entry.name for entry in report.fused) == (row.fused if fuse else ())
        result = trained(model, family)
        if fuse and not dropout:
            # A layer is one chain where a backend records attention, here that of a GPU.
            assert ran == [True] * len(ran)
            assert len(ran) in {row.runs, len(row.fused)}
        elif fuse:
            assert ran
            assert all(ran)
        with torch.no_grad():
            results.append([*result, output_of(model.eval(), family)])
    forward = [[each[0], each[-1]] for each in results]
    assert all(map(torch.equal, *forward))
    # On a GPU embeddings and attention add gradients up in any order.
    is_exact = family != "BERT" and DEVICE.type == "cpu"
    bound = 0.0 if is_exact else 4 * torch.finfo(dtype).eps
    largest = max(each.norm() for each in results[1])
    for pair in zip(*results, strict=True):
        assert (pair[0] - pair[1]).norm() <= bound * largest


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_alike(family: str, name: str) -> None:
    losses: list[list[float]] = []
    for fuse in (True, False):
        model = model_of(family, 0.1)
        fp8core.convert(model, name, fuse=fuse, rms_norms=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            loss = output_of(model, family)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=3e-3)
    assert losses[0][2] < losses[0][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_as_near_to_float64_as_the_model_own(family: str) -> None:
    """In bfloat16, with the products of both in one and the same low precision.

    A code of a cast that rounds the other way moves the error of a row, so that the worst of them
    is up to a quarter larger or smaller from one input to the next: of inputs 0 to 23 the norms of
    all errors differ by 4 % at most.
    """
    source = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, 32, generator=source).bfloat16()
    path = FAMILIES[family].fused[0]
    keywords = {} if family.startswith("T5") else {"attention_mask": None}
    exact = model_of(family).bfloat16().double().get_submodule(path)
    want = exact(x.double(), **keywords)
    errors = []
    for fuse in (True, False):
        model = model_of(family).bfloat16()
        fp8core.convert(model, recipe.Float8CurrentScaling(), fuse=fuse)
        y = model.get_submodule(path)(x, **keywords)
        errors.append((y.double() - want).norm(dim=-1))
    assert errors[0].norm() <= 1.05 * errors[1].norm()
    assert errors[0].max() <= 1.3 * errors[1].max()


# `activation_checkpointing_enable` is its name from transformers 5 on.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_layers_repeat_their_bits(family: str) -> None:
    results = []
    for is_checkpointed in (False, True):
        model = model_of(family, 0.2)
        model.config.use_cache = False  # with one sdpa gets other memory
        fp8core.convert(model, "delayed")
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        results.append(trained(model, family))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_classes_and_files_are_those_of_the_model(family: str, tmp_path: Any) -> None:
    model, plain = model_of(family).eval(), model_of(family).eval()
    fp8core.convert(model, "current")
    assert model.state_dict().keys() == plain.state_dict().keys()
    expected = output_of(model, family)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(output_of(again, family), expected)
    assert torch.equal(output_of(copy.deepcopy(model), family), expected)
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).eval()
    assert torch.equal(output_of(loaded, family), output_of(plain, family))
    fp8core.unconvert(model)
    kinds = [[type(module) for module in each.modules()] for each in (model, plain)]
    assert kinds[0] == kinds[1]
    path = FAMILIES[family].fused[0]
    attributes = [vars(each.get_submodule(path)).keys() for each in (model, plain)]
    assert attributes[0] == attributes[1]
    assert torch.equal(output_of(model, family), output_of(plain, family))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_hook_inside_a_layer_is_called(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of modules for dropout, and with the tensors that the model passes."""
    model = model_of(family).eval()
    fp8core.convert(model, "current")
    want = output_of(model, family)
    layer = model.get_submodule(FAMILIES[family].fused[0])
    seen: list[nn.Module] = []
    for path, module in layer.named_modules():
        if not path or path.endswith(UNUSED):
            continue
        hook = module.register_forward_hook(lambda module, *rest: seen.append(module))
        torch.testing.assert_close(output_of(model, family), want, rtol=2e-3, atol=2e-3)
        assert seen == [module] * (2 if family == "ViT" and path == "dropout" else 1), path
        seen.clear()
        hook.remove()
    ran = count_runs(monkeypatch)
    assert torch.equal(output_of(model, family), want)
    assert ran
    assert all(ran)


def tensor_of(model: Any, family: str) -> torch.Tensor:
    """Return logits, or embeddings."""
    result = model(**FAMILIES[family].inputs)
    tensor: torch.Tensor = result["logits" if "logits" in result else "image_embeds"]
    return tensor.detach()


def times(factor: float, output: Any) -> Any:
    """Return what a module returned, its first tensor multiplied."""
    if isinstance(output, tuple):
        return (factor * output[0], *output[1:])
    return factor * output


def of_subclass(module: nn.Module) -> type[nn.Module]:
    """Return a subclass of the class of ``module`` that computes otherwise."""
    kind = type(module)

    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return times(1.5, kind.forward(self, *arguments, **keywords))

    return type(f"My{kind.__name__}", (kind,), {"forward": forward})


class Within(nn.Module):
    """What a user may put in the place of a module, without the names of modules in that."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.weight = getattr(module, "weight", None)  # whose dtype T5 asks for

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return times(1.5, self.module(*arguments, **keywords))


UNUSED = ("attn_dropout", "attention.self.dropout")
"""Modules whose probability alone is read."""


@pytest.mark.parametrize("activation", ["relu6", "gelu_10"])
def test_an_activation_with_a_limit_is_no_other(activation: str) -> None:
    """Within the limit it computes what ReLU or GELU does."""
    model = model_of("GPT-2", activation_function=activation)
    report = fp8core.convert(model, "current")
    name = type(model.transformer.h[0].mlp.act).__name__
    reason = f"but its feed-forward block, as its activation is {name}"
    assert [entry.reason for entry in report.fused] == [reason] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_another_module_inside_is_called(family: str) -> None:
    """Of another class since the conversion, or in the place of the former one."""
    models = [model_of(family).eval() for _ in range(2)]
    for model, fuse in zip(models, (True, False), strict=True):
        fp8core.convert(model, "mxfp8", fuse=fuse, rms_norms=True)
    before = tensor_of(models[0], family)
    layers = [model.get_submodule(FAMILIES[family].fused[0]) for model in models]
    for path, _ in [*layers[0].named_modules()][1:]:
        if path.endswith(UNUSED):
            continue
        owner, _, name = path.rpartition(".")
        pair = [layer.get_submodule(path) for layer in layers]
        kinds = [*map(type, pair)]
        for each in pair:
            each.__class__ = of_subclass(each)
        others = [tensor_of(model, family) for model in models]
        assert (others[0] - before).abs().max() > 1e-4, path
        torch.testing.assert_close(*others, rtol=1e-4, atol=1e-5, msg=path)
        for each, kind, layer in zip(pair, kinds, layers, strict=True):
            each.__class__ = kind
            setattr(layer.get_submodule(owner), name, Within(each))
        others = [tensor_of(model, family) for model in models]
        assert (others[0] - before).abs().max() > 1e-4, path
        torch.testing.assert_close(*others, rtol=1e-4, atol=1e-5, msg=path)
        for each, layer in zip(pair, layers, strict=True):
            setattr(layer.get_submodule(owner), name, each)
    assert torch.equal(tensor_of(models[0], family), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_subclass_inside_computes_what_it_says(family: str) -> None:
    """Before the conversion, which decides whether the layer is one of its row."""
    layer = model_of(family).get_submodule(FAMILIES[family].fused[0])
    for path, module in [*layer.named_modules()][1:]:
        if path.endswith(UNUSED) or isinstance(module, nn.Linear | nn.LayerNorm):
            continue  # a subclass of which is not converted
        outputs = []
        for fuse in (True, False):
            model = model_of(family).eval()
            module = model.get_submodule(f"{FAMILIES[family].fused[0]}.{path}")
            module.__class__ = of_subclass(module)
            fp8core.convert(model, "mxfp8", fuse=fuse, rms_norms=True)
            outputs.append(tensor_of(model, family))
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5, msg=path)


@pytest.mark.parametrize("family", ["GPT-2", "T5"])
def test_generation_gives_the_tokens_of_the_model(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
    options["attention_mask"][0, :3] = 0
    model = model_of(family).eval()
    plain = model.generate(TOKENS, **options)
    for name in (None, "mxfp8"):
        tokens = []
        for fuse in (True, False):
            fp8core.convert(model, name, fuse=fuse)
            ran = count_runs(monkeypatch)
            tokens.append(model.generate(TOKENS, **options))
            assert (True in ran) is (fuse and name is not None)
            monkeypatch.undo()
            fp8core.unconvert(model)
        assert torch.equal(*tokens)
        assert name is not None or torch.equal(tokens[0], plain)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize(
    ("family", "target"), [("GPT-2", "c_attn"), ("BERT", "value"), ("T5", "wi"), ("ViT", "fc2")]
)
def test_an_adapter_is_not_passed_over(family: str, target: str) -> None:
    """Added before the conversion or behind it, with the gradients of both."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=[target], init_lora_weights=False)
    results = []
    for is_first in (True, False):
        model = model_of(family)
        if not is_first:
            fp8core.convert(model, "current")
        torch.manual_seed(5)
        adapted = peft.get_peft_model(model, config)
        if is_first:
            fp8core.convert(adapted, "current")
        output_of(adapted, family).backward()
        results.append([p.grad for name, p in adapted.named_parameters() if "lora_A" in name])
    assert results[0]
    assert all(map(torch.Tensor.any, results[0]))
    for first, later in zip(*results, strict=True):
        torch.testing.assert_close(first, later, rtol=1e-2, atol=1e-3)


def test_dropout_that_is_switched_on_later_is_active() -> None:
    model = model_of("BERT")
    fp8core.convert(model, "current")
    before = output_of(model, "BERT")
    model.bert.encoder.layer[0].output.dropout.p = 0.5
    assert output_of(model, "BERT") != before
    assert torch.equal(output_of(model.eval(), "BERT"), before)


def test_another_attention_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = count_runs(monkeypatch)
    model = model_of("BERT", attn_implementation="eager")
    fp8core.convert(model, "current")
    model(TOKENS, output_attentions=True)
    assert not ran


def test_what_stays_apart_is_in_the_report() -> None:
    model = model_of("GPT-2", add_cross_attention=True)
    report = fp8core.convert(model, "current")
    assert {entry.reason for entry in report.apart} == {"it has a crossattention besides"}
    assert [entry.name for entry in report.fused] == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    model = model_of("BERT", hidden_act="tanh")
    report = fp8core.convert(model, "current")
    assert {entry.reason for entry in report.apart} == {"its activation is Tanh"}
    model = model_of("BERT")

    class Scaled(type(model.bert.encoder.layer[0])):  # type: ignore[misc]  # a class
        def feed_forward_chunk(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = 2 * super().feed_forward_chunk(x)
            return y

    model.bert.encoder.layer[0].__class__ = Scaled
    report = fp8core.convert(model, "current")
    assert [entry.reason for entry in report.apart] == ["its class computes otherwise"]
    assert "1 Scaled (bert.encoder.layer.0)" in str(report)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("family", ["GPT-2", "BERT"])
def test_compiled_layers_run_as_the_chains_of_eager(family: str) -> None:
    torch._dynamo.reset()
    model = model_of(family, **{FAMILIES[family].activation: "relu"})
    fp8core.convert(model, "current")
    model.config.use_cache = False
    expected = trained(model, family)
    entries = len(captured_links)
    for path in FAMILIES[family].fused:
        model.get_submodule(path).compile(backend="aot_eager", fullgraph=True, dynamic=False)
    assert all(map(torch.equal, trained(model, family), expected))
    chains = [links for links in captured_links[entries:] if isinstance(links, Chain)]
    lengths = [2, 3] if family == "GPT-2" else [5]  # q, k and v of BERT are one link
    assert [len(links) for links in chains if len(links) > 1] == lengths
    torch._dynamo.reset()
