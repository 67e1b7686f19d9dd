"""A call like the last one runs as that did; any other call runs as in a layer without a past.

tests/test_ways.py compares the bits of remembered calls with those of others.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

import fp8core
from fp8core import recipe
from fp8core.errors import Fp8CoreError, UnsupportedError
from fp8core.modules import attention
from fp8core.modules import run as module_run
from fp8core.modules.layers.operation import DropPath
from fp8core.torch_ops.private import lazily_negated, lazy_zeros
from tests import ways
from tests.device import DEVICE
from tests.pairs import pairs, turns
from tests.ways import HEADS, HIDDEN, LENGTH

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
RECIPES = ("delayed", "current", "block", "nvfp4", "none")
ONE_WEIGHT = {"fuse_qkv_params": True}
OPTIONS: dict[str, ways.Options] = {
    "MultiheadAttention": ONE_WEIGHT,
    "TransformerLayer": {**ONE_WEIGHT, "hidden_dropout": 0.0},
}


def active(name: str) -> fp8core.autocast:
    chosen = None if name == "none" else recipe.by_name(name)
    return fp8core.autocast(enabled=chosen is not None, recipe=chosen)


class Story:
    """A layer that trains under a recipe, always from the same inputs."""

    def __init__(self, kind: str, name: str, **options: Any) -> None:
        options = {"params_dtype": torch.float32, **OPTIONS.get(kind, {}), **options}
        self.kind, self.name, self.layer = kind, name, ways.make(kind, name, options)

    def inputs(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        drawn = [torch.randn(shape, generator=generator) for shape in ways.LAYERS[self.kind].shapes]
        dtype = next((own.dtype for own in self.layer.parameters()), torch.bfloat16)
        return [x.to(dtype).requires_grad_() for x in drawn]

    def call(self, *inputs: torch.Tensor, name: str | None = None, **arguments: Any) -> Any:
        with active(name or self.name):
            return self.layer(*inputs, **arguments)

    def train(self, *inputs: torch.Tensor, **arguments: Any) -> list[torch.Tensor | None]:
        """Run forward and, if something needs a gradient, backward; return all results."""
        inputs = inputs or tuple(self.inputs())
        self.layer.zero_grad()
        outputs = ways.tensors(self.call(*inputs, **arguments))
        if outputs[0].requires_grad:
            outputs[0].backward(torch.ones_like(outputs[0]) / 3)
        grads = [one.grad for one in (*inputs, *self.layer.parameters()) if one.is_leaf]
        return [*(y.detach() for y in outputs), *grads]

    def weight(self) -> torch.Tensor:
        return next(own for own in self.layer.parameters() if own.dim() == 2)


Other = Callable[[Story], Any]


def on(change: Callable[[torch.Tensor], torch.Tensor]) -> Other:
    """Train on inputs that are changed."""
    return lambda story: story.train(*(change(x.detach()).requires_grad_() for x in story.inputs()))


def within(context: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> Other:
    def train(story: Story) -> Any:
        with context(story.layer):
            return story.train()

    return train


def given(**arguments: Any) -> Other:
    return lambda story: story.train(**arguments)


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


@contextlib.contextmanager
def freed_weight(layer: torch.nn.Module) -> Iterator[None]:
    weight = next(own for own in layer.parameters() if own.dim() == 2)
    storage, values = weight.untyped_storage(), weight.detach().clone()
    storage.resize_(0)
    try:
        yield
    finally:
        storage.resize_(values.nbytes)
        weight.data.copy_(values)


@contextlib.contextmanager
def evaluating(layer: torch.nn.Module) -> Iterator[None]:
    layer.eval()
    yield
    layer.train()


@contextlib.contextmanager
def frozen_parameters(layer: torch.nn.Module) -> Iterator[None]:
    layer.requires_grad_(False)
    try:
        yield
    finally:
        layer.requires_grad_(True)


def frozen_weights(story: Story) -> Any:
    with fp8core.frozen_weights(story.layer):
        return [*story.train(), *story.train()]


def written_in_frozen_weights(story: Story) -> Any:
    with fp8core.frozen_weights(story.layer), torch.no_grad():
        story.call(*story.inputs())
        story.weight().add_(0.0)
        return story.train()


def checkpointed(story: Story) -> Any:
    inputs = story.inputs()
    with active(story.name):
        y = fp8core.checkpoint(story.layer, *inputs)
    y.sum().backward()
    return [y.detach(), *(x.grad for x in inputs)]


def checkpointed_after_evaluation(story: Story) -> Any:
    within(lambda layer: torch.no_grad())(story)
    return checkpointed(story)


def in_torch_checkpoint(story: Story, *, is_reentrant: bool = False) -> Any:
    """A reentrant forward runs without gradients, and its recompute drops what forward dropped."""
    inputs = story.inputs()
    y = torch.utils.checkpoint.checkpoint(
        lambda *x: torch.nn.functional.dropout(story.call(*x)), *inputs, use_reentrant=is_reentrant
    )
    y.sum().backward()
    return [y.detach(), *(x.grad for x in inputs)]


def in_a_hook_of_backward(story: Story) -> Any:
    results: list[torch.Tensor] = []
    inputs = story.inputs()
    y = story.call(*inputs)
    y.register_hook(lambda grad: results.append(story.call(*story.inputs()).detach()))
    y.sum().backward()
    return [*results, *(x.grad for x in inputs)]


def vmapped(story: Story) -> Any:
    batches = [torch.stack((x, x)).detach() for x in story.inputs()]
    return [torch.func.vmap(lambda *x: story.call(*x))(*batches)]


def forward_mode(story: Story) -> Any:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, torch.ones_like(x)) for x in story.inputs()]
        primal, tangent = forward_ad.unpack_dual(story.call(*duals))
    return [primal.detach(), None if tangent is None else tangent.detach()]


def other_weights(story: Story) -> Any:
    named = {key: value.detach() * 2 for key, value in story.layer.named_parameters()}
    with active(story.name):
        return [torch.func.functional_call(story.layer, named, (*story.inputs(),)).detach()]


def observing(story: Story) -> Any:
    with fp8core.autocast(enabled=False, calibrating=True, recipe=recipe.by_name("delayed")):
        y = story.layer(*story.inputs())
    return [y.detach(), *(buffer.clone().float() for buffer in story.layer.buffers())]


def reset(story: Story) -> Any:
    for module in story.layer.modules():
        if isinstance(module, fp8core.Linear | fp8core.LayerNormMLP | fp8core.GroupedLinear):
            module.reset_delayed_state()
    return story.train()


def converted(story: Story) -> Any:
    story.layer.bfloat16()
    return story.train()


def copied(story: Story) -> Any:
    original, story.layer = story.layer, copy.deepcopy(story.layer)
    remembered = [getattr(module, "_bindings", None) for module in story.layer.modules()]
    assert not any(own.memo for own in remembered if own is not None)
    with torch.no_grad():
        for own in story.layer.parameters():
            own.mul_(2)
    results = story.train()
    story.layer = original
    return results


def in_a_failing_step(story: Story) -> Any:
    with contextlib.suppress(ZeroDivisionError), active(story.name):
        story.layer(*(x * 100 for x in story.inputs()))
        raise ZeroDivisionError
    return [buffer.clone().float() for buffer in story.layer.buffers()]


def in_another_thread(story: Story) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(story.train(name="none")))
    thread.start()
    thread.join()
    return results


OTHERS: dict[str, Other] = {
    "negated": on(lazily_negated),
    "zeros": on(lambda x: lazy_zeros(tuple(x.shape), dtype=x.dtype)),
    "freed": on(freed),
    "other rows": on(lambda x: x[:9]),
    "no rows": on(lambda x: x[:0]),
    "other dimensions": on(lambda x: x.unflatten(0, (2, -1))),
    "transposed": on(lambda x: x.mT.contiguous().mT),
    "strided": on(lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]]),
    "wrong columns": on(lambda x: x[..., :-1]),
    "another dtype": on(torch.Tensor.half),
    "on meta": on(lambda x: x.to("meta")),
    "no input gradient": lambda story: story.train(*(x.detach() for x in story.inputs())),
    "freed weight": within(freed_weight),
    "torch autocast": within(lambda layer: torch.autocast(DEVICE.type, dtype=torch.bfloat16)),
    "no gradients": within(lambda layer: torch.no_grad()),
    "inference mode": within(lambda layer: torch.inference_mode()),
    "other backend": within(lambda layer: fp8core.use_backend("reference")),
    "evaluating": within(evaluating),
    "frozen parameters": within(frozen_parameters),
    "another recipe": lambda story: story.train(
        name="current" if story.name == "block" else "block"
    ),
    "no autocast": given(name="none"),
    "first microbatch": given(is_first_microbatch=True),
    "reentrant checkpoint": lambda story: in_torch_checkpoint(story, is_reentrant=True),
    **{
        other.__name__.replace("_", " "): other
        for other in (
            *(frozen_weights, written_in_frozen_weights, checkpointed, in_torch_checkpoint),
            *(checkpointed_after_evaluation, in_a_hook_of_backward, vmapped, forward_mode),
            *(other_weights, observing, reset, converted, copied, in_a_failing_step),
            in_another_thread,
        )
    },
}

# --- what DotProductAttention and TransformerLayer are given besides ---

ENTRIES = LENGTH, LENGTH
BIAS = torch.randn(1, HEADS, *ENTRIES, generator=torch.Generator().manual_seed(5)).bfloat16()
MASK = torch.rand(1, 1, *ENTRIES, generator=torch.Generator().manual_seed(6)) > 0.5
WHOLE = torch.ones(*ways.MAIN["DotProductAttention"].shapes[0][:2], 3, HEADS, ways.HEAD).bfloat16()


def modified(change: Callable[[Any], Any]) -> Other:
    """Train the layer after a change that stays."""

    def train(story: Story) -> Any:
        change(story.layer)
        return story.train()

    return train


def having(path: str, value: Any) -> Other:
    """Train with another attribute of the layer or of one within."""
    module, _, name = path.rpartition(".")
    return modified(lambda layer: setattr(layer.get_submodule(module), name, value))


ATTENTION: dict[str, Other] = {
    "one gradient": lambda story: story.train(
        *(x if not at else x.detach() for at, x in enumerate(story.inputs()))
    ),
    "the same tensor": lambda story: story.train(*story.inputs()[:1] * 3),
    "packed": given(qkv_layer=WHOLE),
    **{
        f"{name}={value if isinstance(value, str) else at}": given(**{name: value}, **more)
        for at, (name, value, more) in enumerate(
            [
                *(("qkv_format", "bshd", {}), ("qkv_format", "thd", {}), ("softcap", 0.5, {})),
                *(("attn_mask_type", "no_mask", {}), ("attn_mask_type", "no mask", {})),
                *(("window_size", (2, 0), {}), ("bottom_right_diagonal", True, {})),
                *(("checkpoint_core_attention", True, {}), ("core_attention_bias", BIAS, {})),
                ("core_attention_bias_type", "alibi", {}),
                ("core_attention_bias_type", "post_scale_bias", {"core_attention_bias": BIAS}),
                ("attn_mask_type", "arbitrary", {"attention_mask": MASK}),
                ("cu_seqlens_q", torch.tensor([0, 3], dtype=torch.int32), {}),
                *(("fp8_output", True, {}), ("num_splits", 2, {}), ("score_mod", print, {})),
            ]
        )
    },
    **{
        f"attribute {name}": having(name, value)
        for name, value in {
            **{"attn_mask_type": "no_mask", "softmax_scale": 1.0, "softcap": 0.5},
            **{"window_size": (1, 0), "qkv_format": "bshd", "return_max_logit": True},
        }.items()
    },
}


class TwiceProjected(torch.nn.Module):
    def __init__(self, proj: torch.nn.Module) -> None:
        super().__init__()
        self.proj = proj
        self.return_bias = False

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        return 2 * self.proj(x, is_first_microbatch)


class Doubled(fp8core.Linear):
    def forward(self, *arguments: Any, **more: Any) -> Any:
        return 2 * super().forward(*arguments, **more)


class Noise(torch.nn.Module):
    """A parametrization that draws numbers each time that it is computed."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + torch.rand_like(weight) / 64


def make_noisy(layer: torch.nn.Module) -> None:
    name = next(name for name, own in layer.named_parameters() if own.dim() == 2)
    parametrize.register_parametrization(layer, name, Noise())


CORE = "self_attention.core_attention"
TRANSFORMER: dict[str, Other] = {
    "mask type": given(self_attn_mask_type="no_mask"),
    "window": given(window_size=(2, 0)),
    "core attention again": given(checkpoint_core_attention=True),
    "rotation": given(
        rotary_pos_emb=torch.randn(
            LENGTH, 1, 1, ways.HEAD, generator=torch.Generator().manual_seed(7)
        )
    ),
    "alibi": given(core_attention_bias_type="alibi"),
    "cap": given(softcap=2.0),
    "attribute mask": having(f"{CORE}.attn_mask_type", "no_mask"),
    "attribute scale": having(f"{CORE}.softmax_scale", 1.0),
    "unbound": modified(lambda layer: layer.layernorm_mlp.unbind()),
    "a hook": modified(
        lambda layer: layer.self_attention.proj.register_forward_hook(
            lambda module, args, output: output * 2
        )
    ),
    "a hook of attention": modified(
        lambda layer: layer.self_attention.register_forward_pre_hook(lambda module, args: None)
    ),
    "a hook of the gradient": modified(
        lambda layer: layer.layernorm_mlp.register_full_backward_hook(
            lambda module, grad_input, grad_output: (grad_input[0] * 2, *grad_input[1:])
        )
    ),
    "a forward of its own": having(
        f"{CORE}.forward", lambda query, key, value, mask, **arguments: value.flatten(-2)
    ),
    "a module of another class": modified(
        lambda layer: setattr(
            layer.self_attention, "proj", TwiceProjected(layer.self_attention.proj)
        )
    ),
    "a module of another class of the same fields": modified(
        lambda layer: setattr(layer.self_attention.proj, "__class__", Doubled)
    ),
    "a noisy weight within": modified(lambda layer: make_noisy(layer.self_attention.proj)),
    "norms of heads": modified(
        lambda layer: vars(layer.self_attention).update(
            q_norm=fp8core.ops.L2Normalization(), k_norm=fp8core.ops.L2Normalization()
        )
    ),
    "dropout": having("hidden_dropout", 0.5),
    "dropped paths": having("drop_path", DropPath(0.5, "sbhd")),
    "dropout of attention": having(f"{CORE}.attention_dropout", 0.5),
    "a delayed weight gradient": modified(
        lambda layer: (layer.layernorm_mlp._delay_wgrads(), layer.layernorm_mlp.unbind())
    ),
    "a frozen part": modified(lambda layer: layer.layernorm_mlp.requires_grad_(False)),
    "a loaded state": modified(
        lambda layer: layer.load_state_dict(
            {name: 2 * own.detach() for name, own in layer.named_parameters()}, strict=False
        )
    ),
}
NOISY = {"a noisy weight": modified(lambda layer: make_noisy(layer))}
LACKING = {"first microbatch", "written in frozen weights"}  # attention has no weight
JOINED = (
    *("other rows", "no rows", "no input gradient", "no gradients", "evaluating", "copied"),
    *("frozen parameters", "first microbatch", "another recipe", "in torch checkpoint"),
)
CASES = [
    *turns(["Linear"], RECIPES, OTHERS),
    *turns(["GroupedLinear", "LayerNormMLP", "stored Linear"], ["none", *RECIPES[:-1]], OTHERS),
    *turns(["LayerNormLinear"], ["delayed", "none"], ["negated", "other rows", "freed weight"]),
    *turns(
        ["DotProductAttention"],
        ["none", "current"],
        [*(other for other in OTHERS if other not in LACKING), *ATTENTION],
    ),
    *turns(["TransformerLayer"], ["delayed", "current", "block"], [*JOINED, *TRANSFORMER]),
    ("TransformerLayer", "delayed", "reset"),
    *turns(KINDS, RECIPES, NOISY),
]


def told(story: Story, other: Other) -> list[torch.Tensor | str | None]:
    """Train, make another call, train again; return every result, an error as its text."""
    results: list[torch.Tensor | str | None] = []
    torch.manual_seed(3)  # every call draws as often as in a layer that remembers none
    for step in (Story.train, Story.train, other, Story.train, Story.train):
        try:
            results.extend(step(story))
        except (Fp8CoreError, RuntimeError) as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def assert_same(
    got: Iterable[torch.Tensor | str | None], want: Iterable[torch.Tensor | str | None]
) -> None:
    for mine, theirs in zip(got, want, strict=True):
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
            assert mine.stride() == theirs.stride()
        else:
            assert mine == theirs


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients:UserWarning")
@pytest.mark.parametrize(("kind", "name", "other"), CASES)
def test_calls_after_another_one_are_those_of_a_layer_that_remembers_none(
    kind: str, name: str, other: str
) -> None:
    is_stored = kind.startswith("stored ")
    name, kind = "current" if is_stored else name, kind.removeprefix("stored ")
    change = {**OTHERS, **ATTENTION, **TRANSFORMER, **NOISY}[other]
    got = told(Story(kind, name, is_stored=is_stored), change)
    plain = Story(kind, name, is_stored=is_stored)
    with ways.plain(plain.layer):
        assert_same(got, told(plain, change))


CHANGED: dict[str, tuple[Callable[[], torch.nn.Module], str, Any]] = {
    "eps": (lambda: fp8core.RMSNorm(HIDDEN), "eps", 1.0),
    "the factor": (lambda: fp8core.LayerNorm(HIDDEN), "zero_centered_gamma", True),
    "the factor within": (
        lambda: fp8core.LayerNormLinear(HIDDEN, HIDDEN),
        "zero_centered_gamma",
        True,
    ),
    "a bias": (lambda: fp8core.Linear(HIDDEN, HIDDEN), "return_bias", True),
    "the norm's result": (
        lambda: fp8core.LayerNormMLP(HIDDEN, HIDDEN),
        "return_layernorm_output",
        True,
    ),
    "the first norm of a layer": (
        lambda: fp8core.TransformerLayer(
            *(HIDDEN, HIDDEN, HEADS), hidden_dropout=0.0, attention_dropout=0.0, **ONE_WEIGHT
        ),
        "self_attention.layernorm_qkv.zero_centered_gamma",
        True,
    ),
    "a probability": (lambda: fp8core.ops.Dropout(0.5), "p", 0.0),
    "a scale": (lambda: fp8core.ops.ConstantScale(2.0), "scale", 0.5),
    "an operation of a chain": (
        lambda: fp8core.ops.Sequential(fp8core.ops.L2Normalization(), fp8core.ops.GELU()),
        "0.eps",
        1.0,
    ),
    "an operation of an inner chain": (
        lambda: fp8core.ops.Sequential(
            fp8core.ops.Sequential(fp8core.ops.GELU(), fp8core.ops.GELU()), fp8core.ops.GELU()
        ),
        "0.1",
        fp8core.ops.ReLU(),
    ),
}


@pytest.mark.parametrize("name", ["delayed", "none"])
@pytest.mark.parametrize("case", CHANGED)
def test_an_attribute_takes_effect_after_the_first_call(case: str, name: str) -> None:
    make, path, value = CHANGED[case]
    torch.manual_seed(4)
    layer = make().to(DEVICE)
    x = torch.randn(LENGTH, 2, HIDDEN, device=DEVICE)
    fresh = copy.deepcopy(layer)
    with active(name), torch.no_grad():
        for _ in range(2):
            layer(x)
        module, _, attribute = path.rpartition(".")
        for each in (layer, fresh):
            setattr(each.get_submodule(module), attribute, value)
        for _ in range(2):
            assert_same(ways.tensors(layer(x)), ways.tensors(fresh(x)))


def test_a_layer_whose_attribute_changes_in_each_call_keeps_one_chain() -> None:
    dropout, x = fp8core.ops.Dropout(0.0), torch.ones(4, 4, device=DEVICE)
    for step in range(9):
        dropout.p = step / 9
        dropout(x)
    assert len(dropout._bindings.table) == 1


# --- what is repeated ---


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note of each call of a layer whether it ran as the one before."""
    notes: list[bool] = []

    def noted(call: Callable[..., Any], is_repeated: bool) -> Callable[..., Any]:
        def noting(*arguments: Any, **more: Any) -> Any:
            output = call(*arguments, **more)
            if not is_repeated or output is not None:
                notes.append(is_repeated)
            return output

        return noting

    for module in (module_run, attention):
        monkeypatch.setattr(module, "replay", noted(module.replay, True))
    for module in (module_run, attention):
        monkeypatch.setattr(module, "run_links", noted(module.run_links, False))
    return notes


@pytest.mark.parametrize("kind", [*KINDS, "DotProductAttention"])
def test_a_call_like_the_last_one_is_repeated(kind: str, repeats: list[bool]) -> None:
    calls = [(name, False, torch.enable_grad) for name in ("delayed", "current", "none")]
    if kind in KINDS:
        modes = torch.enable_grad, torch.no_grad, torch.inference_mode
        calls += [("current", True, mode) for mode in modes]
    for name, is_stored, mode in calls:
        story = Story(kind, name, is_stored=is_stored)
        repeats.clear()
        with mode():
            for call in (Story.train, Story.train, OTHERS["other rows"]):
                call(story)
        takes_any_size = kind not in ("GroupedLinear", "DotProductAttention")
        assert repeats == [False, True, takes_any_size], (name, is_stored, mode)


SEQUENCES_OF_CALLS: dict[str, list[tuple[Other, bool]]] = {
    "recipes": [
        (given(name=name), is_repeated)
        for name, is_repeated in (
            *(("current", False), ("block", False), ("block", True), ("current", False)),
            ("current", True),
        )
    ],
    "backends and modes": [
        *((Story.train, False), (OTHERS["other backend"], False)),
        *((OTHERS["other backend"], True), (Story.train, False), (OTHERS["evaluating"], False)),
    ],
}


@pytest.mark.parametrize("case", SEQUENCES_OF_CALLS)
def test_a_call_that_is_unlike_the_last_one_is_forgotten_with_it(
    case: str, repeats: list[bool]
) -> None:
    story = Story("Linear", "current")
    for call, _ in SEQUENCES_OF_CALLS[case]:
        call(story)
    assert repeats == [is_repeated for _, is_repeated in SEQUENCES_OF_CALLS[case]]


def test_a_watched_layer_runs_the_links_of_its_watch(repeats: list[bool]) -> None:
    story = Story("Linear", "current")
    story.train()
    with fp8core.monitor(story.layer) as watch:
        story.train()
        watch.step()
        assert watch.rows
    assert repeats == [False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_with_stored_weights_that_were_freed_is_no_repetition(
    kind: str, repeats: list[bool]
) -> None:
    story = Story(kind, "current", is_stored=True)
    story.train()
    weight = story.weight()
    assert isinstance(weight, fp8core.QuantizedTensor)
    weight.tensors()[0].untyped_storage().resize_(0)
    with pytest.raises((Fp8CoreError, RuntimeError)):
        story.train()
    assert not any(repeats)


@pytest.mark.parametrize(
    "options",
    [{"softmax_type": "learnable"}, {"attention_dropout": 0.5}, {"return_max_logit": True}],
)
def test_attention_to_more_than_queries_keys_and_values_is_not_remembered(
    options: ways.Options,
) -> None:
    story = Story("DotProductAttention", "none", **options)
    for _ in range(2):
        story.train()
    assert story.layer._bindings.memo is None


OTHER_LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "LayerNorm": lambda: fp8core.LayerNorm(HIDDEN),
    "operations": lambda: fp8core.ops.Sequential(
        fp8core.ops.Linear(HIDDEN, ways.FFN), fp8core.ops.GELU()
    ),
    "converted": lambda: torch.nn.Sequential(
        torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, ways.FFN)
    ),
}


def front_end_calls(run: Callable[[], object]) -> list[str]:
    """Return the functions of the front end that ``run`` calls, each as often as it does."""
    seen: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("fp8core."):
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize(
    ("kind", "name", "is_stored", "mode"),
    [
        (kind, name, *how)
        for (kind, how), name in turns(
            pairs(
                [*KINDS, *OPTIONS, "DotProductAttention", *OTHER_LAYERS],
                [
                    *pairs([False, True], [torch.no_grad, torch.inference_mode]),
                    *(
                        [(False, torch.enable_grad)] if DEVICE.type == "cpu" else []
                    ),  # others record
                ],
            ),
            ["none", *recipe.names()],
        )
    ],
)
def test_later_calls_are_neither_checked_nor_bound(
    kind: str, name: str, is_stored: bool, mode: Callable[[], Any]
) -> None:
    is_stored = is_stored and name != "none"
    if kind in OTHER_LAYERS:
        with fp8core.quantized_model_init(
            enabled=is_stored, recipe=recipe.by_name(name) if is_stored else None
        ):
            layer = OTHER_LAYERS[kind]()
        inputs = [torch.randn(*ways.ROWS)]
    else:
        story = Story(kind, name, is_stored=is_stored)
        layer, inputs = story.layer, [x.detach() for x in story.inputs()]
    if kind == "converted":
        fp8core.convert(layer)
        if is_stored:
            store(layer[1], recipe.by_name(name))

    def run() -> None:
        with mode(), active(name):
            layer(*inputs)

    first, *later = (front_end_calls(run) for _ in range(4))
    assert "bind" in first
    assert later[0] == later[1] == later[2]
    assert not {"bind", "check_input", "note", "checked_qkv"}.intersection(later[0])


def store(linear: torch.nn.Linear, chosen: recipe.Recipe) -> None:
    """Have ``linear`` hold its weight as fp8core's own layer does under ``chosen``."""
    with fp8core.quantized_model_init(recipe=chosen):
        own = fp8core.Linear(linear.in_features, linear.out_features)
    linear.weight = own.weight


# --- a Transformer layer as one chain ---


def nodes_of(y: torch.Tensor) -> set[str]:
    """Return the names of the autograd nodes before ``y``."""
    seen, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def is_one_chain(layer: Any, chosen: recipe.Recipe | None, **context: Any) -> bool:
    dtype = layer.layernorm_mlp.fc1_weight.dtype
    x = torch.randn(*ways.SEQUENCES).to(dtype).requires_grad_()
    with fp8core.autocast(**{"recipe": chosen, **context}):
        return nodes_of(layer(x)) == {"_NodeBackward", "AccumulateGrad"}


def transformer_layer(**options: Any) -> Any:
    return Story("TransformerLayer", "current", **options).layer


def test_one_weight_makes_one_chain() -> None:
    """Else torch puts three weights together before it."""
    options: list[ways.Options] = [
        *({}, {"qkv_weight_interleaved": False}, {"num_gqa_groups": 2}),
        {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    ]
    for each, name in turns(options, ["none", "delayed", "current", "block", "mxfp8"]):
        is_low = name != "none"
        chosen = recipe.by_name(name) if is_low else None
        assert is_one_chain(transformer_layer(**each), chosen, enabled=is_low), (each, name)


@pytest.mark.parametrize(
    ("chosen", "context"),
    [
        (recipe.Float8CurrentScaling(fp8_dpa=True), {}),
        (recipe.Float8CurrentScaling(fp8_mha=True), {}),
        (recipe.DelayedScaling(), {"enabled": False, "calibrating": True}),
        (recipe.by_name("nvfp4"), {}),  # draws numbers
    ],
)
def test_what_needs_the_layers_one_by_one_has_them(chosen: Any, context: Any) -> None:
    layer = transformer_layer()
    for _ in range(2):
        assert not is_one_chain(layer, chosen, **context)
    if chosen == recipe.by_name("nvfp4"):
        assert layer._chain._alone is not None
    assert is_one_chain(layer, recipe.by_name("current"))


def test_a_monitor_sees_each_layer() -> None:
    ours, theirs = (Story("TransformerLayer", "current") for _ in range(2))
    ours.train()
    with fp8core.monitor(ours.layer) as report:
        ours.train()
    with ways.plain(theirs.layer), fp8core.monitor(theirs.layer) as expected:
        theirs.train()
    assert str(report) == str(expected)


def test_a_trace_and_a_transform_see_the_layers() -> None:
    layer, x = transformer_layer(), torch.randn(*ways.SEQUENCES)
    with active("current"):
        traced = make_fx(lambda x: layer(x))(x)
        with ways.plain(layer):
            expected = make_fx(lambda x: layer(x))(x)
        assert traced.code == expected.code
        assert layer._chain.memo is None
        assert not layer._chain._chains
        with pytest.raises(UnsupportedError, match=r"torch\.func\.vmap"):
            torch.func.vmap(layer)(x[None])
    assert is_one_chain(layer, recipe.by_name("current"))


def test_a_second_derivative_is_refused() -> None:
    layer, x = transformer_layer(), torch.randn(*ways.SEQUENCES, requires_grad=True)
    with active("current"):
        y = layer(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    refused = r"TransformerLayer\(64, 96\): a second derivative"
    with pytest.raises(UnsupportedError, match=refused):
        torch.autograd.backward(grad, torch.ones_like(grad))


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_a_shallow_copy_computes_with_its_own_parameters(kind: str) -> None:
    story = Story(kind, "current")
    (x,) = story.inputs()
    for _ in range(3):
        story.call(x)
    clone = copy.copy(story.layer)
    clone._parameters = {
        name: torch.nn.Parameter(own.detach() * 0.5) for name, own in clone._parameters.items()
    }
    fresh = copy.deepcopy(clone)
    with active("current"):
        assert torch.equal(clone(x), fresh(x))
