"""Backends with a fault in the amax apart from the cast, or in the cast by a given amax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8core.backend_api import (
    AmaxDesc,
    OpDesc,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    amax_extent,
    split_amax,
)
from fp8core_backends.reference.quantize import amax, quantize
from tests.conformance.broken import Sound, caught_by, fault


@fault("amax", "law4_amax_is_exact")
def gives_one_amax_for_all_groups(
    desc: AmaxDesc, x: torch.Tensor, *groups: torch.Tensor
) -> torch.Tensor:
    """Takes the amax over all groups, and hands it out for each."""
    found = amax(desc, x, *groups)
    is_of_tensors = amax_extent(desc.quantize.rowwise) == "tensor"
    return found.max().expand_as(found).clone() if groups and is_of_tensors else found


@fault("amax", "law4_amax_is_exact")
def gives_nan_as_amax(desc: AmaxDesc, x: torch.Tensor, *groups: torch.Tensor) -> torch.Tensor:
    found = amax(desc, x, *groups)
    return torch.where(x.isnan().any(), torch.nan, found)


@fault("amax", "law4_amax_is_exact")
def gives_the_amax_before_the_transform(
    desc: AmaxDesc, x: torch.Tensor, *groups: torch.Tensor
) -> torch.Tensor:
    found = amax(desc, x, *groups)
    column = desc.quantize.columnwise
    if column is None or column.transform is None:
        return found
    plain = replace(desc.quantize, columnwise=replace(column, transform=None))
    rowwise = amax(AmaxDesc(plain), x, *groups)
    return rowwise.repeat(len(found) // len(rowwise))


@fault("amax", "law4_amax_leaves_out_rows_of_no_group")
def counts_rows_behind_the_last_group(
    desc: AmaxDesc, x: torch.Tensor, *groups: torch.Tensor
) -> torch.Tensor:
    """Has the last group reach to the last row."""
    if groups and len(groups[0]) < 10:
        offsets = groups[0].clone()
        offsets[-1] = len(x)
        groups = (offsets,)
    return amax(desc, x, *groups)


@caught_by("law2_amax_of_either_half_is_supported")
class GivesNoAmaxOfAHalf(Sound):
    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if type(desc) is AmaxDesc and desc.quantize.rowwise is None:
            return "columns alone are not written"
        return super().unsupported(desc, device)


@fault("amax", "law3_amax_of_both_orientations_equals_two_calls")
def puts_columns_first(desc: AmaxDesc, x: torch.Tensor, *groups: torch.Tensor) -> torch.Tensor:
    """Gives the amaxes of the columns, then those of the rows."""
    found = amax(desc, x, *groups)
    return found if groups else found.roll(len(found) - len(x)) if len(found) > 1 else found


@fault("quantize", "law6_quantize_by_the_amaxes_of_the_whole_gives_its_part")
def looks_at_x(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    """Ignores the amax that it is given."""
    return quantize(desc, x, *groups, **{**given, "amax": None})


@fault("quantize", "law1_quantize_by_amax_takes_no_amax_from_x")
def takes_the_larger(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    """Takes the amax of x where that is larger than the given one."""
    if given.get("amax") is not None:
        assert isinstance(desc, QuantizeByAmaxDesc)
        own = amax(AmaxDesc(desc.plain()), x, *groups)
        given["amax"] = torch.maximum(own, given["amax"])
    return quantize(desc, x, *groups, **given)


@fault("quantize", "law6_quantize_by_its_amaxes_equals_quantize")
def takes_one_amax_for_both(desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
    """Quantizes the columnwise orientation by the first of the rowwise amaxes."""
    if given.get("amax") is not None and not groups:
        given["amax"] = given["amax"].clone()
        rowwise, columnwise = split_amax(desc, given["amax"], *x.shape)
        if rowwise is not None and columnwise is not None:
            columnwise.copy_(rowwise[:1].expand_as(columnwise))
    return quantize(desc, x, *groups, **given)


@fault("quantize", "law6_quantize_by_the_amaxes_of_the_whole_gives_its_part")
def derives_the_outer_scale_from_x(
    desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any
) -> Any:
    """Ignores the amax that it is given for two levels of scales."""
    specs = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    if all(spec.scale_format == "e4m3" for spec in specs):
        given["amax"] = None
    return quantize(desc, x, *groups, **given)


@caught_by("law2_quantize_by_amax_is_supported_besides_quantize")
class QuantizesByAmaxBothWaysAlone(Sound):
    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if isinstance(desc, QuantizeByAmaxDesc) and None in (desc.rowwise, desc.columnwise):
            return "one orientation alone is not written"
        return super().unsupported(desc, device)
