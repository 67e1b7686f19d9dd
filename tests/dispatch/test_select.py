"""Who runs a descriptor: the order of what is asked, substitution, refusal, and what is said.

A low-precision product that a backend declines and another runs is said in training, once.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

import fp8core
from fp8core.backend_api import DequantizeDesc, OpDesc
from fp8core.dispatch import policy, select, table
from fp8core.dispatch.registry import Registry
from fp8core.errors import RecipeError, UnsupportedError
from tests import forked
from tests.dispatch import toys
from tests.dispatch.toys import CPU, CUDA

# Everything that may name a backend, the strongest first; each names another one.
ORDER = {
    "explicit": "the argument backend=",
    "innermost": "use_backend()",
    "outer": "use_backend()",
    "per_op": "FP8CORE_OP_BACKEND",
    "everywhere": "FP8CORE_BACKEND",
    "site": "site policy",
    "priority": "device and priority",
}
MAY_BE_SUBSTITUTED = {
    "quantize": toys.QUANTIZE,
    "dequantize": DequantizeDesc(toys.E4M3),
    "amax": toys.AMAX,
    "scale_update": toys.SCALE_UPDATE,
    "plain_gemm": toys.PLAIN_GEMM,
}
NEVER_SUBSTITUTED = {"gemm": toys.GEMM, "grouped_gemm": toys.GROUPED_GEMM}


def refuses(desc: OpDesc) -> str | None:
    return f"no {desc.op} today"


def choose(desc: OpDesc, device: torch.device = CPU) -> select.Choice:
    return select.choose(desc, device, policy.current())


@pytest.mark.parametrize("strongest", ORDER)
def test_the_strongest_word_decides(strongest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(ORDER)
    spoken = names[names.index(strongest) :]
    backends = [toys.backend(name, priority=1 + (name == "priority")) for name in names]
    site = {"fp8core_select_backend": lambda candidates: "site"} if "site" in spoken else {}
    toys.register(*backends, **site)
    if "per_op" in spoken:
        monkeypatch.setenv("FP8CORE_OP_BACKEND", "gemm=per_op")
    if "everywhere" in spoken:
        monkeypatch.setenv("FP8CORE_BACKEND", "everywhere")
    outer = fp8core.use_backend("outer" if "outer" in spoken else None)
    inner = fp8core.use_backend(**({"gemm": "innermost"} if "innermost" in spoken else {}))
    with outer, inner:
        explicit = "explicit" if "explicit" in spoken else None
        choice = table.resolve(toys.GEMM, CPU, backend=explicit).choice
    assert (choice.backend, choice.because) == (strongest, ORDER[strongest])


def test_word_for_another_operation_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    toys.register(toys.backend("toy", priority=2), toys.backend("other"))
    monkeypatch.setenv("FP8CORE_OP_BACKEND", "quantize=other")
    with fp8core.use_backend(amax="other"):
        assert choose(toys.GEMM).backend == "toy"


def test_reference_comes_last_among_equals() -> None:
    toys.register(toys.backend("zebra"))
    assert choose(toys.GEMM).backend == "zebra"


def test_backend_of_lower_priority_comes_after_the_reference() -> None:
    toys.register(toys.backend("toy", priority=-1))
    assert choose(toys.GEMM).backend == "reference"


def test_equal_priorities_are_decided_by_name() -> None:
    toys.register(toys.backend("b", priority=3), toys.backend("a", priority=3))
    assert choose(toys.GEMM).backend == "a"


def test_backend_of_another_device_is_not_chosen() -> None:
    toys.register(toys.backend("toy", device_types=("cuda",), priority=9))
    choice = choose(toys.GEMM)
    assert choice.backend == "reference"
    assert select.Verdict("toy", "runs on cuda, not on cpu") in choice.verdicts


def test_backend_that_declines_leaves_it_to_the_next_without_a_substitution() -> None:
    toys.register(toys.backend("toy", refuse=refuses, priority=9))
    choice = choose(toys.GEMM)
    assert (choice.backend, choice.substitution) == ("reference", None)


def test_site_policy_sees_only_those_that_can() -> None:
    seen: list[tuple[str, ...]] = []

    def select_backend(candidates: tuple[str, ...]) -> None:
        seen.append(candidates)

    toys.register(
        toys.backend("can", priority=1),
        toys.backend("cannot", refuse=refuses, priority=2),
        fp8core_select_backend=select_backend,
    )
    assert choose(toys.GEMM).backend == "can"
    assert seen == [("can", "reference")]


def test_site_policy_that_picks_no_candidate_is_an_error() -> None:
    toys.register(fp8core_select_backend=lambda candidates: "nobody")
    with pytest.raises(UnsupportedError, match=r"site policy picks 'nobody'.*\['reference'\]"):
        choose(toys.GEMM)


def test_emulation_that_is_asked_for_is_no_substitution() -> None:
    with fp8core.use_backend("reference"):
        choice = choose(toys.GEMM, CUDA)
    assert (choice.backend, choice.substitution) == ("reference", None)
    assert choice.is_emulated
    assert not choose(toys.GEMM).is_emulated


def test_capability_is_asked_without_a_device() -> None:
    toys.register(toys.backend("toy", device_types=("cuda",)))
    assert choose(toys.GEMM, CUDA).backend == "toy"


def test_allowed_substitution_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    toys.register(toys.backend("toy", refuse=refuses))
    for desc in MAY_BE_SUBSTITUTED.values():
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="fp8core"), fp8core.use_backend("toy"):
            choice = table.resolve(desc, CPU).choice
            table._resolve.cache_clear()
            table.resolve(desc, CPU)
        assert choice.backend == "reference", desc
        assert caplog.messages == [
            f"{desc.op} on cpu runs on reference: use_backend() asks for toy, but "
            f"no {desc.op} today [{desc}]"
        ]


def test_substitution_is_an_error_under_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    toys.register(toys.backend("toy", refuse=refuses))
    monkeypatch.setenv("FP8CORE_STRICT", "1")
    monkeypatch.setenv("FP8CORE_BACKEND", "toy")
    for desc in MAY_BE_SUBSTITUTED.values():
        with pytest.raises(UnsupportedError) as caught:
            table.resolve(desc, CPU)
        message = str(caught.value)
        assert message.startswith("FP8CORE_STRICT=1: "), desc
        assert "would run on reference: FP8CORE_BACKEND asks for toy, but no " in message, desc


def test_strict_allows_what_is_not_substituted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_STRICT", "1")
    assert choose(toys.QUANTIZE).backend == "reference"


def test_emulated_cast_is_a_logged_substitution(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fp8core"):
        choice = table.resolve(toys.QUANTIZE, CUDA).choice
    assert (choice.backend, choice.substitution) == ("reference", "no native backend for cuda:0")
    (message,) = caplog.messages
    assert message.startswith("quantize on cuda:0 runs on reference: no native backend")


def test_emulated_cast_is_an_error_under_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_STRICT", "1")
    with pytest.raises(UnsupportedError, match="no native backend for cuda:0"):
        choose(toys.QUANTIZE, CUDA)


def test_high_precision_runs_anywhere_without_a_substitution() -> None:
    choice = choose(toys.PLAIN_GEMM, CUDA)
    assert (choice.backend, choice.substitution) == ("reference", None)


def test_explaining_a_substitution_does_not_use_up_its_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="fp8core"):
        choose(toys.QUANTIZE, CUDA)
        assert caplog.messages == []
        table.resolve(toys.QUANTIZE, CUDA)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("op", NEVER_SUBSTITUTED)
def test_low_precision_gemm_is_never_substituted(op: str) -> None:
    toys.register(toys.backend("toy", refuse=refuses))
    with fp8core.use_backend("toy"), pytest.raises(UnsupportedError) as caught:
        choose(NEVER_SUBSTITUTED[op])
    message = str(caught.value)
    assert f"(use_backend() asks for toy, but no {op} today)" in message
    assert f"\n  toy: no {op} today" in message
    assert "\n  reference: can run it, but was not asked for" in message


@pytest.mark.parametrize("op", NEVER_SUBSTITUTED)
def test_low_precision_gemm_is_not_emulated_unasked(op: str) -> None:
    toys.register(
        toys.backend("cannot", device_types=("cuda",), refuse=refuses),
        toys.backend("absent", device_types=("cuda",), probe=lambda: "there is no driver"),
        toys.backend("elsewhere", device_types=("xpu",)),
    )
    with pytest.raises(UnsupportedError) as caught:
        choose(NEVER_SUBSTITUTED[op], CUDA)
    first, *lines = str(caught.value).splitlines()
    assert first == f"no backend runs {NEVER_SUBSTITUTED[op]} on cuda:0"
    assert lines == [
        "  absent: there is no driver",
        f"  cannot: no {op} today",
        "  elsewhere: runs on xpu, not on cuda",
        "  reference: emulates it on any device; choose it with FP8CORE_BACKEND=reference "
        'or use_backend("reference")',
    ]


def test_the_remedy_that_a_refusal_names_works() -> None:
    with fp8core.use_backend("reference"):
        assert choose(toys.GEMM, CUDA).backend == "reference"


def test_refusal_names_plugins_that_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "reference")
    with pytest.raises(UnsupportedError) as caught:
        choose(toys.GEMM)
    assert "plug-in reference is not used: disabled by FP8CORE_DISABLE_PLUGINS" in str(caught.value)


@pytest.mark.parametrize("variable", ["FP8CORE_BACKEND", "FP8CORE_OP_BACKEND"])
def test_unknown_backend_in_the_environment_is_an_error(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "gemm=refrence" if variable == "FP8CORE_OP_BACKEND" else "refrence"
    monkeypatch.setenv(variable, value)
    with pytest.raises(RecipeError, match=rf"{variable} asks for .*Did you mean 'reference'\?"):
        choose(toys.GEMM)


def test_unknown_explicit_backend_is_an_error() -> None:
    with pytest.raises(RecipeError, match="the argument backend= asks for backend 'nobody'"):
        table.resolve(toys.GEMM, CPU, backend="nobody")


def fails(desc: OpDesc) -> str | None:
    raise LookupError("a bug of a third party")


def test_backend_that_breaks_when_asked_counts_as_unable() -> None:
    toys.register(toys.backend("toy", refuse=fails, priority=9))
    choice = choose(toys.GEMM)
    assert choice.backend == "reference"
    reason = "its unsupported() failed: LookupError: a bug of a third party"
    assert select.Verdict("toy", reason) in choice.verdicts


def test_choice_prints_who_and_why_none_of_the_others() -> None:
    toys.register(toys.backend("toy", refuse=refuses))
    with fp8core.use_backend("toy"):
        text = str(choose(toys.QUANTIZE))
    assert text.splitlines() == [
        f"{toys.QUANTIZE} on cpu: reference (device and priority)",
        "  substitution: use_backend() asks for toy, but no quantize today",
        "  toy: no quantize today",
    ]


def test_selected_backend_is_the_best_usable_one() -> None:
    toys.register(
        toys.backend("broken", priority=9, probe=lambda: "absent"), toys.backend("toy", priority=5)
    )
    assert select.selected_spec(policy.current()).name == "toy"


def test_no_usable_backend_names_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "unusable", lambda registry, spec: "no driver")
    with pytest.raises(UnsupportedError, match="`fp8core doctor` says why"):
        select.selected_spec(policy.current())


def test_new_layers_are_made_on_the_selected_backends_device() -> None:
    toys.register(toys.backend("toy", device_types=("meta", "cpu")))
    with fp8core.use_backend("toy"):
        assert fp8core.Linear(4, 4).weight.is_meta


def test_no_layer_is_made_for_a_backend_that_cannot_be_used() -> None:
    toys.register(toys.backend("toy", probe=lambda: "there is no driver"))
    with fp8core.use_backend("toy"), pytest.raises(UnsupportedError, match="there is no driver"):
        fp8core.Linear(4, 4)


def test_refused_layer_names_itself_in_the_error() -> None:
    toys.register(toys.backend("toy", refuse=refuses))
    layer = fp8core.Linear(32, 32, name="decoder.fc1")
    with (
        fp8core.use_backend("toy"),
        fp8core.autocast(recipe=fp8core.recipe.Float8CurrentScaling()),
        pytest.raises(UnsupportedError, match=r"^'decoder.fc1' \(Linear\(32, 32\)\): no backend"),
    ):
        layer(torch.zeros(32, 32))


def no_product(desc: OpDesc) -> str | None:
    return "no product of this kind" if "gemm" in desc.op else None


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "declines" in record.getMessage()
    ]


def train(name: str = "mxfp8", steps: int = 2) -> None:
    layer = fp8core.Linear(64, 64, device="cpu")
    for _ in range(steps):
        with fp8core.autocast(recipe=fp8core.recipe.by_name(name)):
            layer(torch.randn(32, 64)).sum().backward()


def test_it_is_said_once_by_name(caplog: pytest.LogCaptureFixture) -> None:
    toys.register(toys.backend("toy", refuse=no_product, priority=9))
    train()
    train()
    (line,) = said(caplog)
    assert line.startswith(
        "gemm on cpu runs on reference, as toy, which comes before it, declines: "
        "no product of this kind [GemmDesc("
    )


def test_each_reason_is_said(caplog: pytest.LogCaptureFixture) -> None:
    toys.register(
        toys.backend("one", refuse=no_product, priority=9),
        toys.backend("two", priority=8, probe=lambda: "there is no driver"),
        toys.backend("three", priority=7, refuse=lambda desc: f"{desc}: no"),
    )
    train("current")
    lines = said(caplog)
    assert sum("as one," in line for line in lines) == 1
    assert sum("as two," in line and "there is no driver" in line for line in lines) == 1
    assert sum("as three," in line for line in lines) == 2  # e4m3 with e4m3, and e5m2 with e4m3


def test_attention_is_said_in_high_precision_too(caplog: pytest.LogCaptureFixture) -> None:
    def no_attention(desc: OpDesc) -> str | None:
        return "no attention" if "attention" in desc.op else None

    toys.register(toys.backend("toy", refuse=no_attention, priority=9))
    q = torch.randn(4, 1, 2, 8, requires_grad=True)
    for _ in range(2):
        fp8core.DotProductAttention(2, 8)(q, q, q).sum().backward()
    forward, backward = said(caplog)
    assert forward.startswith("attention on cpu runs on reference, as toy,")
    assert backward.startswith("attention_backward on cpu runs on reference, as toy,")


def test_a_product_that_the_first_backend_runs_is_not_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    toys.register(
        toys.backend("toy", priority=9),
        toys.backend("later", priority=1, refuse=no_product),
        toys.backend("elsewhere", priority=10, device_types=("cuda",)),
    )
    train()
    assert said(caplog) == []


def test_what_somebody_decided_is_not_news(caplog: pytest.LogCaptureFixture) -> None:
    toys.register(toys.backend("toy", refuse=no_product, priority=9))
    with fp8core.use_backend("reference"):
        train()
    toys.plugins.register(
        toys.plugin(fp8core_select_backend=lambda candidates: "reference"), "policy"
    )
    train("current")
    assert said(caplog) == []


def test_high_precision_and_other_operations_are_not_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    toys.register(
        toys.backend("toy", refuse=lambda desc: None if desc.low_precision else "no", priority=9)
    )
    train()
    fp8core.Linear(16, 16, device="cpu")(torch.ones(4, 16))
    table.resolve(toys.AMAX, toys.CPU)
    assert said(caplog) == []


PLUGIN = """
from fp8core.backend_api import API_VERSION, BackendSpec, hookimpl
from fp8core_backends.reference.backend import ReferenceBackend

class Declining(ReferenceBackend):
    def unsupported(self, desc, device):
        return "needs rows of 64" if "gemm" in desc.op else super().unsupported(desc, device)

@hookimpl
def fp8core_register_backends(register):
    fields = {"priority": 9, "api_version": API_VERSION}
    register(BackendSpec("toy_fast", ("cpu",), "toy_declining:Declining", **fields))
"""
TRAINING = """
import torch, fp8core
layer = fp8core.Linear(32, 32, device="cpu")
for _ in range(3):
    with fp8core.autocast(recipe=fp8core.recipe.Float8CurrentScaling()):
        layer(torch.randn(32, 32)).sum().backward()
"""


def test_a_program_that_configures_no_logging_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_declining.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_declining")
    ran = forked.run([sys.executable, "-c", TRAINING], timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stderr.splitlines() if "declines" in line]
    assert len(lines) == 1
    assert "runs on reference, as toy_fast, which comes before it" in lines[0]
    assert "needs rows of 64" in lines[0]
