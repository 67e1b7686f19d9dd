"""A linear layer in any recipe, with Transformer Engine's constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from fp8core.chain.boundary import QuantizeShape
from fp8core.chain.shape import LinkShape
from fp8core.errors import RecipeError, UnsupportedError
from fp8core.modules.calls.parameters import (
    InitMethod,
    check_size,
    default_init_method,
    refuse_arguments,
)
from fp8core.modules.layers.parallel import LinearParameters, Parallel, ParallelModule
from fp8core.tensors.quantized_tensor import QuantizedTensor

NOT_OFFERED = (
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "ub_name",
    "symmetric_ar_type",
)


class Linear(ParallelModule):
    """``y = x w^T + b`` with its three GEMMs in the precision of the active ``autocast``.

    Input ``[..., in_features]`` and output ``[..., out_features]`` in bfloat16, float16 or float32;
    any number of rows, none included. ``weight [out_features, in_features]``, ``bias
    [out_features]``, or, with ``parameters_split``, one ``NAME_weight`` and ``NAME_bias`` for each
    part of ``out_features``. Without a recipe it computes as ``torch.nn.Linear``, to any order of
    derivative and under the transforms of ``torch.func``, which low precision refuses.

    Args:
        in_features: size of each input row, of all ranks together.
        out_features: size of each output row, of all ranks together.
        parallel_mode: ``"column"``: each rank of the group has its share of ``out_features``;
            ``"row"``: of ``in_features``, and the results are summed over the ranks before the bias
            is added. None: the layer is the same on all ranks.
        tp_group: the ranks, a torch.distributed process group; or ``tp_size`` of them, which get
            their group by ``set_tensor_parallel_group``.
        sequence_parallel: the input of a column-parallel layer and the output of a row-parallel one
            are split over the ranks along the first dimension. Each rank casts its rows by the
            recipe, and codes and scales travel.
        get_rng_state_tracker, rng_tracker_name: a function that returns a tracker of random states,
            in whose ``fork(name)`` weights are filled.
        init_method: fills each weight; the default is normal with standard deviation 0.023.
        bias: whether there is a bias, zero at first.
        return_bias: return ``(y, bias)`` with the bias not added.
        fuse_wgrad_accumulation: add the weight's gradient to ``weight.main_grad``, a float32 tensor
            of the weight's shape that must exist in backward; ``weight.grad`` stays None.
        params_dtype: dtype of the parameters; torch's default dtype if None.
        parameters_split: names of equal parts, or a mapping of names to sizes along out_features;
            the parts are quantized as one tensor.
        device: of the parameters; None takes the selected backend's. ``"meta"`` allocates later.
        delay_wgrad_compute: backward leaves the gradients of the weights to ``backward_dw()``.
        save_original_input: hold the input as it is for backward, which casts it again, instead of
            its codes: for an input that another module holds too.
        name: the layer's name in messages and PerLayer patterns; see :func:`fp8core.prepare`.

    The other arguments belong to features that are not offered: a value that asks for one raises
    UnsupportedError.

    Raises:
        UnsupportedError: an argument that is not offered, or a recipe that the device cannot run.
        OperandError: an input that does not fit, see
            :func:`fp8core.modules.calls.inputs.check_input`.
    """

    kind = "linear"
    shape_fields = (*ParallelModule.shape_fields, "use_bias")
    # Whether its parameters may be split over ranks after it was made.
    can_be_spread = True

    def __init__(
        self,
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
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        refuse_arguments(Linear.__init__, locals(), NOT_OFFERED)
        owner, arguments = type(self).__name__, (tp_group, tp_size, sequence_parallel)
        self._set_parallel(parallel_mode, arguments, get_rng_state_tracker, rng_tracker_name)
        self.in_features = check_size(owner, "in_features", in_features)
        self.out_features = check_size(owner, "out_features", out_features)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.save_original_input = save_original_input
        self.use_bias = bias
        self._init_method = init_method or default_init_method
        self._parts = split_sizes(parameters_split, out_features)
        if parallel_mode == "row":
            self.in_features = self.parallel.part_of(owner, "in_features", in_features)
        elif parallel_mode == "column":
            self.out_features = self.parallel.part_of(owner, "out_features", out_features)
            self._parts = [
                (prefix, self.parallel.part_of(owner, "parameters_split", rows))
                for prefix, rows in self._parts
            ]
        if fuse_wgrad_accumulation and len(self._parts) > 1:
            raise UnsupportedError(
                "fuse_wgrad_accumulation=True with parameters_split is not offered: the gradient "
                "of the whole weight would have to be added to the main_grad of each part."
            )
        self._init_parameters(device, params_dtype, delay_wgrad_compute)

    def _make_parameters(self, device: torch.device, dtype: torch.dtype | None) -> None:
        super()._make_parameters(device, dtype)
        names = [prefix for prefix, _ in self._parts]
        if len(names) > 1 and isinstance(self._parameters[f"{names[0]}weight"], QuantizedTensor):
            raise UnsupportedError(
                f"Linear(parameters_split={names}) under quantized_model_init is not offered: the "
                f"parts would have to share their scales. Leave it out (fuse_qkv_params=True in "
                f"MultiheadAttention and TransformerLayer), or make this layer inside "
                f"quantized_model_init(enabled=False)."
            )

    @override
    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Set a parameter; with a bias of None, or another, the layer adds none, or that."""
        super().register_parameter(name, param)
        if name in self._linears()[0].biases:
            self.use_bias = param is not None

    @override
    def _linears(self) -> tuple[LinearParameters]:
        prefixes, rows = zip(*self._parts, strict=True)
        return (
            LinearParameters(
                tuple(map("{}weight".format, prefixes)),
                tuple(map("{}bias".format, prefixes)),
                rows,
                self.in_features,
                self._init_method,
                self.parallel_mode,
                adds_bias=self.use_bias and not self.return_bias,
            ),
        )

    @property
    def parts(self) -> list[tuple[str, int]]:
        """The prefix of the parameters and the output features of each part of the weight."""
        return self._parts

    def set_share(
        self,
        mode: str,
        parallel: Parallel,
        features: int,
        parts: list[tuple[str, int]] | None = None,
    ) -> None:
        """Compute with this rank's share from now on: ``features`` of the output, in ``parts``, in
        the mode ``"column"``, and of the input in ``"row"``. The parameters are the caller's."""
        self.parallel_mode, self.parallel = mode, parallel
        if mode == "column":
            self.out_features = features
            self._parts = self._parts if parts is None else parts
        else:
            self.in_features = features
        self.unbind()

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the shape of the one linear, between the links of its parallel mode."""
        return self._links_of(*self._linears())

    def forward(
        self,
        input: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Compute ``[..., out_features]`` from ``[..., in_features]``; see the class.

        ``is_first_microbatch`` None quantizes the weight; True also stores the quantized weight,
        and False computes with the stored one, or stores it if there is none of this recipe; it is
        refused after a write to the weight that torch counted. Without a recipe it has no effect.

        ``fp8_output``: the output is a :class:`~fp8core.QuantizedTensor` as the recipe casts an
        input, which a next layer takes as it is; ``fp8_grad``: so is the gradient of the input, as
        the recipe casts gradients. Both are rounded to the nearest by scales of their own, and
        plain tensors without a recipe, where its blocks do not divide the sizes, and in graphs that
        torch captures.
        """
        shapes = self._call_shapes(fp8_output, fp8_grad) if fp8_output or fp8_grad else None
        output: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
        output = self._compute(input, is_first_microbatch, self.in_features, shapes)
        return output

    def _call_shapes(self, fp8_output: bool, fp8_grad: bool) -> tuple[LinkShape, ...]:
        """Return the chain of a call with one of these arguments."""
        first = (QuantizeShape(False, True),) if fp8_grad else ()
        last = (QuantizeShape(True, False),) if fp8_output else ()
        return (*first, *self.link_shapes(), *last)


def split_sizes(
    split: Sequence[str] | Mapping[str, int] | None, out_features: int
) -> list[tuple[str, int]]:
    """Return ``(parameter prefix, rows)`` of each part; trailing underscores are ignored.

    Raises:
        RecipeError: sizes that do not add up to ``out_features``, or names that clash.
    """
    if split is None:
        return [("", out_features)]
    argument = f"Linear(parameters_split={split!r})"
    if not isinstance(split, Sequence | Mapping) or not all(isinstance(n, str) for n in split):
        raise RecipeError(f"{argument}: expected names, or names with their sizes.")
    names = [name.rstrip("_") for name in split]
    if isinstance(split, Mapping):
        sizes = list(split.values())
    else:
        sizes = [out_features // max(len(names), 1)] * len(names)
    is_whole = all(isinstance(size, int) for size in sizes)
    if not is_whole or sum(sizes) != out_features or min(sizes, default=0) < 1:
        raise RecipeError(
            f"{argument}: sizes {sizes} do not add up to out_features={out_features}, as integers "
            f"from 1 on."
        )
    if len(set(names)) != len(names) or "" in names or any("." in name for name in names):
        raise RecipeError(f"{argument}: names must be unique, not empty, and without a dot.")
    return [(f"{name}_", size) for name, size in zip(names, sizes, strict=True)]
