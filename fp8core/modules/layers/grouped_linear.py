"""A linear layer for each group of rows, all in one call: experts of a mixture; their padding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import index
from typing import Any

import torch
from typing_extensions import override

from fp8core.chain.alone import plain
from fp8core.chain.call import Call
from fp8core.chain.shape import LinkShape
from fp8core.context.autocast import active
from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.bound import Bound, new_seed
from fp8core.modules.calls.parameters import (
    InitMethod,
    check_size,
    default_init_method,
    refuse_arguments,
)
from fp8core.modules.layers.operation import ExtraTensors
from fp8core.modules.layers.parallel import LinearParameters, ParallelModule
from fp8core.modules.run import run_layer
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.tensors.quantized_tensor import QuantizedTensor

KINDS = ("weight", "bias")
"""The prefixes of the names of parameters; the number of a group follows."""

_NOT_OFFERED = (
    "ub_overlap_rs",
    "ub_overlap_ag",
    "ub_name",
    "use_grouped_tensor",
)


class GroupedLinear(ParallelModule, ExtraTensors):
    """``num_gemms`` linear layers, each over a group of the rows of one input.

    Input ``[..., in_features]``, the groups' rows one after the other; output ``[...,
    out_features]``. Parameters ``weight0 [out_features, in_features], bias0 [out_features],
    weight1, bias1, ...``, in that order. Each group is quantized as a separate tensor. Arguments as
    in :class:`fp8core.Linear`, which also refuses those that are not offered.

    With ``parallel_mode`` each rank has its share of the features. The collectives are the
    caller's, who exchanges tokens between ranks anyway: the input of a column-parallel layer has
    to be whole, and the outputs of a row-parallel one are to be summed.

    The sizes of the groups may be a tensor on the accelerator. The host does not wait for it: a
    router's counts go in as they are, and a CUDA graph reads the sizes at each replay.

    With ``single_grouped_weight`` the weights are one parameter ``weight [num_gemms, out_features,
    in_features]``, with ``single_grouped_bias`` the biases one ``bias [num_gemms, out_features]``:
    plain parameters, of which each group computes with its slice. A ``state_dict`` of either kind
    loads into a layer of the other. ``use_grouped_tensor`` is refused: it is a class of Transformer
    Engine's.

    Raises:
        UnsupportedError: ``single_grouped_weight`` inside of ``quantized_model_init``, or with
            ``fuse_wgrad_accumulation`` or ``delay_wgrad_compute``.
    """

    kind = "grouped_linear"
    num_extra_inputs = 1  # the sizes of the groups, in an ops.Sequential
    is_link = False
    first_group = 0  # the number that the names of the parameters begin with
    single: Collection[str] = ()  # those of KINDS of which one parameter has all groups

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: object | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(name)
        refuse_arguments(GroupedLinear.__init__, locals(), _NOT_OFFERED)
        arguments = (tp_group, tp_size, sequence_parallel)
        self._set_parallel(parallel_mode, arguments, get_rng_state_tracker, rng_tracker_name)
        self.num_gemms = check_size("GroupedLinear", "num_gemms", num_gemms)
        in_features = check_size("GroupedLinear", "in_features", in_features)
        out_features = check_size("GroupedLinear", "out_features", out_features)
        if parallel_mode == "row":
            in_features = self.parallel.part_of("GroupedLinear", "in_features", in_features)
        elif parallel_mode == "column":
            out_features = self.parallel.part_of("GroupedLinear", "out_features", out_features)
        if bias and self.tp_size > 1 and parallel_mode == "row":
            raise UnsupportedError(
                "GroupedLinear(bias=True) in a row-parallel layer is not offered: the caller sums "
                "over the ranks, and each of them would add the bias. Pass bias=False, and add it "
                "after the sum."
            )
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.save_original_input = save_original_input
        self._init_method = init_method or default_init_method
        singles = (single_grouped_weight, single_grouped_bias)
        self.single = [kind for kind, is_single in zip(KINDS, singles, strict=True) if is_single]
        if single_grouped_weight:
            self._refuse_single_weight(
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                delay_wgrad_compute=delay_wgrad_compute,
            )
        self._init_parameters(device, params_dtype, delay_wgrad_compute)

    @property
    def adds_bias(self) -> bool:
        """Whether the products add the biases, which are returned otherwise."""
        return self.use_bias and not self.return_bias

    @override
    def _linears(self) -> list[LinearParameters]:
        sizes = (self.out_features,), self.in_features
        method, mode = self._init_method, self.parallel_mode
        return [
            LinearParameters((f"weight{i}",), (f"bias{i}",), *sizes, method, mode, self.adds_bias)
            for i in self.numbers
        ]

    def _refuse_single_weight(self, **arguments: bool) -> None:
        for name, value in arguments.items():
            if value:
                raise UnsupportedError(
                    f"GroupedLinear(single_grouped_weight=True, {name}=True) is not offered: the "
                    f"products of the groups would write to parts of one gradient. Leave one out."
                )

    @override
    def _make_parameters(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Create the parameters of the groups, and where they are single those of all."""
        super()._make_parameters(device, dtype)
        if not self.single:
            return
        groups = dict(self._parameters)
        self._parameters.clear()
        for kind in KINDS:
            names = self._names_of(kind)
            if kind not in self.single:
                self._parameters.update({name: groups[name] for name in names})
                continue
            first = groups[names[0]]
            if isinstance(first, QuantizedTensor):
                raise UnsupportedError(
                    "GroupedLinear(single_grouped_weight=True) is not offered inside of "
                    "quantized_model_init: each group is stored by itself. Leave one out."
                )
            whole = None
            if first is not None:
                whole = torch.nn.Parameter(first.new_empty(self.num_gemms, *first.shape))
                vars(whole).update(vars(first))
                if kind == "weight":
                    vars(whole)["partition_dim"] += 1
            self.register_parameter(kind, whole)

    def _mark_parameters(self, linear: LinearParameters) -> None:
        """Mark the weight alone: the caller computes what follows with biases."""
        super()._mark_parameters(linear._replace(biases=()))

    def number_groups(self, first: int, total: int) -> None:
        """Name the parameters ``weight{first}``, ``bias{first}`` and so on, in their order; the
        parameters of the other groups, of ``total``, are None.

        Raises:
            OperandError: a parametrization computes one of the parameters, under its name.
        """
        if total == self.num_gemms:
            return
        names = self._names_of("weight") + self._names_of("bias")
        computed = [name for name in names if name not in self._parameters]
        if computed:
            raise OperandError(
                f"{self.label}: {computed[0]} is computed by a parametrization and cannot be "
                f"renamed. Register it after the layer became one of fp8core.distributed.Experts."
            )
        self.first_group = first
        renamed = dict(zip(names, self._names_of("weight") + self._names_of("bias"), strict=True))
        parameters = {renamed[name]: parameter for name, parameter in self._parameters.items()}
        self._parameters.clear()
        self._parameters.update(parameters)
        for number in {*range(total)} - {*self.numbers}:
            for kind in KINDS:
                self.register_parameter(f"{kind}{number}", None)

    @override
    def link_shapes(self) -> tuple[LinkShape, ...]:
        return self._links_of(self._linears()[0]._replace(mode=None), self.num_gemms)

    @override
    def weight_names(self) -> list[tuple[str, ...]]:
        return [] if "weight" in self.single else super().weight_names()

    @override
    def dtype_of(self, name: str) -> torch.dtype:
        kind = name.rstrip("0123456789")
        return super().dtype_of(kind if kind in self.single else name)

    @override
    def _stored(self, name: str) -> torch.Tensor | None:
        kind = name.rstrip("0123456789")
        if kind not in self.single:
            return super()._stored(name)
        whole = self._parameters[kind]
        return None if whole is None else whole.detach()[int(name.removeprefix(kind))]

    @override
    def link_params(self) -> list[torch.Tensor]:
        if not self.single:
            return super().link_params()
        return self._all("weight") + (self._all("bias") if self.adds_bias else [])

    @override
    def link_names(self) -> list[tuple[str, ...]] | None:
        if self.single:
            return None
        names = self._names_of("weight") + (self._names_of("bias") if self.adds_bias else [])
        return list(zip(names, strict=True))

    def forward(
        self,
        input: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Compute ``[..., out_features]``; group ``i`` has ``m_splits[i]`` rows, perhaps none.

        ``m_splits`` is a list, or an integer tensor ``[num_gemms]``; one on the CPU counts as a
        list. The host never reads a tensor on the input's accelerator, so its values are not
        checked: a negative size counts as 0, groups end at the last row of the input, and rows
        after the last group belong to none. Their output and ``grad_input`` are zeros. Some
        backends and recipes refuse such a tensor. While torch compiles, each list of values gets a
        graph, a tensor on the accelerator one for all; one on the CPU is refused.

        The output is written to ``out [..., out_features]``, the gradient of the input to
        ``dgrad_out [..., in_features]``, where they are given: contiguous memory of the activation
        dtype, which nothing else may read or write until it has been used. Not while torch
        compiles.

        Raises:
            OperandError: ``m_splits`` has not one entry for each group, is no integer tensor or on
                another device; or, as a list, is negative or does not add up to the rows of the
                input.
            UnsupportedError: sizes on a device whose backend does not take them, or under a
                monitor, which would have to read them.
        """
        is_alone = is_first_microbatch is None and out is None and dgrad_out is None
        (output,) = run_layer(
            self,
            input,
            is_first_microbatch,
            columns=self.in_features,
            prepare=partial(self._prepare, m_splits, is_first_microbatch, out, dgrad_out),
            arguments=_sizes(m_splits) if is_alone else None,
        )
        return (output, self._all("bias")) if self.return_bias else output

    def _prepare(
        self,
        m_splits: Sequence[int] | torch.Tensor,
        first_microbatch: bool | None,
        out: torch.Tensor | None,
        dgrad_out: torch.Tensor | None,
        input: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[Bound, Call]:
        """Bind the layer for ``input``, which fits it, and return what its call brings besides."""
        output_rows = self._buffer("out", out, self.out_features, input, dtype)
        grad_rows = self._buffer("dgrad_out", dgrad_out, self.in_features, input, dtype)
        splits, offsets = self._offsets(m_splits, input.numel() // self.in_features, input.device)
        bound = bind(self, input.device, dtype, offsets_on_device=not splits)
        if isinstance(bound.parts[0], int) and not (out is None and dgrad_out is None):
            raise UnsupportedError(
                f"{self.label}: out and dgrad_out are not offered under torch.compile and "
                f"torch.export, whose graphs place results themselves. Leave them out."
            )
        rng = new_seed() if bound.needs_rng else None
        call = Call(
            (offsets,), splits, rng, first_microbatch, output=output_rows, grad_input=grad_rows
        )
        return bound, call

    def _buffer(
        self,
        name: str,
        buffer: torch.Tensor | None,
        columns: int,
        input: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Return the rows of ``buffer``, memory for a result, without its history."""
        if buffer is None:
            return None
        shape = (*input.shape[:-1], columns)
        expected = (shape, dtype, input.device)
        if (
            (tuple(buffer.shape), buffer.dtype, buffer.device) != expected
            or not buffer.is_contiguous()
            or buffer.requires_grad
        ):
            state = ", which requires a gradient" if buffer.requires_grad else ""
            order = "contiguous" if buffer.is_contiguous() else f"strides {buffer.stride()}"
            raise OperandError(
                f"{self.label}: {name} is {buffer.dtype} {list(buffer.shape)} on {buffer.device}, "
                f"{order}{state}; expected {dtype} {list(shape)} on {input.device}, contiguous, "
                f"without a gradient."
            )
        return buffer.detach().view(-1, columns)

    def _offsets(
        self, m_splits: Sequence[int] | torch.Tensor, rows: int, device: torch.device
    ) -> tuple[tuple[int, ...], torch.Tensor]:
        """Return the sizes of the groups, none if the host cannot read them or would have to wait
        for that, and their bounds, int64 ``[num_gemms + 1]``, from 0 to ``rows`` or less."""
        if isinstance(m_splits, torch.Tensor):
            self._check_tensor(m_splits, device)
            if stays_on_device(m_splits):
                ends = m_splits.to(torch.int64).clamp(0, rows).cumsum(0).clamp(max=rows)
                return (), torch.nn.functional.pad(ends, (1, 0))
        splits = _integers(m_splits)
        is_valid = splits is not None and len(splits) == self.num_gemms and min(splits) >= 0
        if splits is None or not is_valid or sum(splits) != rows:
            raise OperandError(
                f"{self.label}: m_splits={m_splits if splits is None else splits!r} for {rows} "
                f"rows; expected {self.num_gemms} integers >= 0 that add up to {rows}."
            )
        # Known on the host, so they stay there: reading them back would wait for the device.
        return tuple(splits), torch.tensor((0, *splits), device="cpu").cumsum(0)

    def _check_tensor(self, sizes: torch.Tensor, device: torch.device) -> None:
        """Refuse ``sizes`` that are no integers, or lie where a call on ``device`` cannot use
        them."""
        if torch.compiler.is_compiling() and not stays_on_device(sizes):
            raise OperandError(
                "m_splits must be a list of integers, or on the accelerator, while torch compiles "
                "or exports: the host's sizes are of the graph, and cannot come from a tensor's "
                "values. Call m_splits.tolist() outside of it."
            )
        is_integer = not (sizes.is_floating_point() or sizes.is_complex())
        if sizes.shape != (self.num_gemms,) or not is_integer or sizes.dtype == torch.bool:
            raise OperandError(
                f"{self.label}: m_splits is {sizes.dtype} {list(sizes.shape)}; expected an integer "
                f"tensor [{self.num_gemms}], or a list of {self.num_gemms} integers."
            )
        if not stays_on_device(sizes):
            return
        if sizes.device != device:
            raise OperandError(
                f"{self.label}: m_splits is on {sizes.device}, the input on {device}. Give it on "
                f"the input's device, on the CPU, or as a list of integers."
            )
        if sizes.is_meta:
            raise OperandError(
                f"{self.label}: m_splits is on meta, where it has no values. Give a list."
            )
        if self._bindings.watch is not None:
            raise UnsupportedError(
                f"{self.label}: a monitor has to read m_splits, which is on {device}. Give it as a "
                f"list of integers, or close the monitor."
            )

    @property
    def numbers(self) -> range:
        """The numbers of the groups, in the names of their parameters."""
        return range(self.first_group, self.first_group + self.num_gemms)

    def _names_of(self, kind: str) -> list[str]:
        return list(map(f"{kind}{{}}".format, self.numbers))

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the tensors of all groups also from those of each, and the other way round."""
        for kind in KINDS:
            whole, names = prefix + kind, [prefix + name for name in self._names_of(kind)]
            sizes = {tuple(getattr(state_dict.get(name), "shape", ())) for name in names}
            groups = tuple(getattr(state_dict.get(whole), "shape", ()))[:1]
            has_groups = len(sizes) == 1 and () not in sizes
            if kind in self.single and whole not in state_dict and has_groups:
                state_dict[whole] = torch.stack([state_dict.pop(name) for name in names])
            elif kind not in self.single and groups == (len(names),):
                state_dict.update(zip(names, state_dict.pop(whole).unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _all(self, kind: str) -> list[torch.Tensor]:
        if kind in self.single:
            whole = self.parameter(kind)
            return [] if whole is None else list(whole.unbind(0))
        named = (self.parameter(name) for name in self._names_of(kind))
        return [parameter for parameter in named if parameter is not None]


def _integers(sizes: Any) -> list[int] | None:
    """Return ``sizes`` as integers, also from numpy or one-element tensors; None if one is none."""
    try:
        items = list(sizes)
        return None if any(isinstance(size, bool) for size in items) else [*map(index, items)]
    except TypeError:
        return None


def _sizes(m_splits: Any) -> tuple[int, ...] | None:
    """Return the sizes of a call, None if they are not a list, or torch compiles."""
    if torch.compiler.is_compiling() or not isinstance(m_splits, Sequence):
        return None
    splits = _integers(m_splits)
    return None if splits is None else tuple(splits)


def stays_on_device(sizes: torch.Tensor) -> bool:
    """Return whether the host would have to wait for a device to read ``sizes``, or cannot."""
    return sizes.device.type != "cpu"


class _Padding(torch.nn.Module):
    """The numbers of groups, and the multiple that the rows of each are padded to."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if align_size is not None and align_size < 1:
            raise OperandError(
                f"{type(self).__name__}(align_size={align_size!r}): expected an integer >= 1, or "
                f"None for what the recipe needs."
            )
        self.num_gemms = num_gemms
        self.align_size = align_size

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        """Return the rows of each group with the padding.

        Raises:
            OperandError: another number of groups than the layer has, or a negative number of rows.
        """
        sizes = list(m_splits)
        if len(sizes) != self.num_gemms or min(sizes, default=0) < 0:
            raise OperandError(
                f"{type(self).__name__}: m_splits {sizes}; expected {self.num_gemms} numbers of "
                f"rows, 0 or above."
            )
        if self.align_size is None:
            self.align_size = _align_size()
        return [size + -size % self.align_size for size in sizes]

    def _groups(self, input: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return the rows of each group of ``input [..., hidden]``."""
        rows = plain(input, f"input of {type(self).__name__}").reshape(-1, input.shape[-1])
        if sum(sizes) != rows.shape[0]:
            raise OperandError(
                f"{type(self).__name__}: input {list(input.shape)} has {rows.shape[0]} rows; "
                f"expected {sum(sizes)}, those of the groups {list(sizes)}."
            )
        return torch.split(rows, list(sizes))

    def extra_repr(self) -> str:
        """Return the number of groups and the multiple."""
        return f"{self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Padding):
    """Adds zero rows to each group, up to a multiple.

    :class:`fp8core.GroupedLinear` pads for its blocks without this module.

    Args:
        num_gemms: the number of groups.
        align_size: the multiple. None: what the active recipe needs when the layer is first
            called, 32 for MXFP8, 128 for NVFP4, 16 for the others, and
            ``CustomRecipe.quantization_alignment``; outside of ``autocast``, the default recipe's.

    Raises:
        OperandError: ``align_size`` below 1.
    """

    def forward(
        self, input: torch.Tensor, m_splits: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int]]:
        """Return the padded rows ``[rows, hidden]``, and how many each group has.

        Args:
            input: ``[..., hidden]``, the rows of group 0, then those of group 1, and so on.
            m_splits: how many rows each group has. Where none needs padding, both are returned.

        Raises:
            OperandError: ``m_splits`` of another number, or that do not add up to the rows.
        """
        padded = self.padded(m_splits)
        groups = self._groups(input, m_splits)
        if padded == list(m_splits):
            return input, m_splits
        missing = [size - rows for size, rows in zip(padded, m_splits, strict=True)]
        zeros = groups[0].new_zeros(max(missing), groups[0].shape[1])
        parts = [
            part
            for group, count in zip(groups, missing, strict=True)
            for part in (group, zeros[:count])
        ]
        return torch.cat(parts), padded


class Fp8Unpadding(_Padding):
    """Removes the rows that :class:`Fp8Padding` added.

    Args:
        num_gemms, align_size: those of the :class:`Fp8Padding`.
    """

    def forward(self, input: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """Return the rows ``[rows, hidden]`` without the padding.

        Args:
            input: ``[..., hidden]``, the padded rows.
            m_splits: how many rows each group has without the padding.

        Raises:
            OperandError: ``m_splits`` of another number, or that do not fit the padded rows.
        """
        padded = self.padded(m_splits)
        groups = self._groups(input, padded)
        if padded == list(m_splits):
            return input
        return torch.cat([group[:size] for group, size in zip(groups, m_splits, strict=True)])


def _align_size() -> int:
    """Return the multiple that the active recipe needs, as Transformer Engine chooses it."""
    request = active()
    recipe: Recipe = request.quantize or request.observe or get_default_recipe()
    return recipe.quantization_alignment
