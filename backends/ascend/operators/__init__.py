"""torch_npu's operators, as this backend calls them; nothing else here touches torch_npu.

Every argument is given, as torch_npu's defaults are often not the ones for FP8: without
``output_dtype`` a product is int8, without ``dst_type`` an MX cast is FP4. What the documents of
Ascend 950's operators demand and torch_npu does not check is checked here, before the call.

Codes are uint8 outside of this package. torch_npu holds E4M3 and E5M2 in torch's dtypes and
HiFloat8 in bytes, which its dtype argument tells apart.

Source: torch_npu 2.13.0's schemas; the ``aclnn`` documents of CANN's operator repositories.
"""
