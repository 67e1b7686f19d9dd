// The only folder that knows Python: it registers descriptors, and the entries that apis/
// implements. Addresses and streams cross as integers, the arguments of a call as one tuple
// (arguments.h). The entries check what Python passes. No call waits for the device, except
// Gemm.milliseconds.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "arguments.h"
#include "fp8core/activation.h"
#include "fp8core/attention.h"
#include "fp8core/column_sums.h"
#include "fp8core/cross_entropy.h"
#include "fp8core/dequantize.h"
#include "fp8core/gemm.h"
#include "fp8core/grouped_gemm.h"
#include "fp8core/microscaling.h"
#include "fp8core/norm.h"
#include "fp8core/origin.h"
#include "fp8core/permutation.h"
#include "fp8core/quantize.h"
#include "fp8core/rotary.h"
#include "fp8core/router.h"
#include "fp8core/scale_update.h"
#include "fp8core/step.h"
#include "fp8core/transpose.h"
#include "repeat.h"

namespace py = pybind11;

namespace fp8core {
namespace {

using bindings::recorded;

void register_quantize(py::module_& module) {
  module.attr("MAX_PARTIALS") = kMaxPartials;
  py::enum_<InputType>(module, "InputType")
      .value("float32", InputType::kFloat32)
      .value("bfloat16", InputType::kBFloat16)
      .value("float16", InputType::kFloat16);
  py::enum_<Format>(module, "Format").value("e4m3", Format::kE4M3).value("e5m2", Format::kE5M2);
  py::enum_<Granularity>(module, "Granularity")
      .value("delayed", Granularity::kDelayed)
      .value("tensor", Granularity::kTensor)
      .value("row", Granularity::kRow)
      .value("vec128", Granularity::kVec128)
      .value("block128", Granularity::kBlock128);
  py::class_<ScaleRule>(module, "ScaleRule").def(py::init<float, float, float, bool>());
  py::class_<QuantizeDesc>(module, "Quantize")
      .def(py::init<Granularity, Format, InputType, ScaleRule, int>())
      .def("tile_sums_floats", &QuantizeDesc::tile_sums_floats)
      .def("and_sum", recorded<&quantize_and_sum>)
      .def("__call__", recorded<&quantize>);
  module.def("store_group_offsets", &store_group_offsets);
  py::class_<AmaxDesc>(module, "Amax")
      .def(py::init<Granularity, InputType, int>())
      .def("__call__", recorded<&amax>)
      .def("partials", recorded<&partial_amaxes>);
}

void register_activation(py::module_& module) {
  py::enum_<ActivationFunction>(module, "ActivationFunction")
      .value("swish", ActivationFunction::kSwish)
      .value("gelu", ActivationFunction::kGelu)
      .value("erf_gelu", ActivationFunction::kErfGelu)
      .value("sigmoid", ActivationFunction::kSigmoid)
      .value("relu", ActivationFunction::kRelu)
      .value("squared_relu", ActivationFunction::kSquaredRelu)
      .value("clamped_swish", ActivationFunction::kClampedSwish);
  py::class_<ActivationDesc>(module, "Activation")
      .def(py::init<ActivationFunction, bool, bool, float, float, float, InputType, InputType,
                    int>())
      .def("__call__", recorded<&activation>);
  py::class_<QuantizeActivationDesc>(module, "QuantizeActivation")
      .def(py::init<ActivationDesc, QuantizeDesc>())
      .def("tile_sums_floats", &QuantizeActivationDesc::tile_sums_floats)
      .def("halves", recorded<&quantize_halves>)
      .def("__call__", recorded<&quantize_activation>);
  py::class_<QuantizeActivationMxfp8Desc>(module, "QuantizeActivationMxfp8")
      .def(py::init<ActivationDesc, Mxfp8Desc>())
      .def("tile_sums_floats", &QuantizeActivationMxfp8Desc::tile_sums_floats)
      .def("__call__", recorded<&quantize_activation_mxfp8>);
  py::class_<QuantizeActivationNvfp4Desc>(module, "QuantizeActivationNvfp4")
      .def(py::init<ActivationDesc, Nvfp4Desc>())
      .def("tile_sums_floats", &QuantizeActivationNvfp4Desc::tile_sums_floats)
      .def("__call__", recorded<&quantize_activation_nvfp4>);
}

void register_microscaling(py::module_& module) {
  py::class_<Mxfp8Desc>(module, "QuantizeMxfp8")
      .def(py::init<Format, InputType, bool, double, int>())
      .def("__call__", recorded<&quantize_mxfp8>);
  py::class_<Nvfp4Desc>(module, "QuantizeNvfp4")
      .def(py::init<InputType, bool, double, bool, bool, bool, int>())
      .def("__call__", recorded<&quantize_nvfp4>);
  module.def("tile_bytes", &tile_bytes);
  module.def("arrange_scales", recorded<&arrange_scales>);
}

void register_scale_update(py::module_& module) {
  py::class_<ScaleUpdate>(module, "ScaleUpdate")
      .def(py::init<std::vector<DelayedState>, bool, int>())
      .def("__call__", &scale_update);
}

void register_dequantize(py::module_& module) {
  py::enum_<ScaleFormat>(module, "ScaleFormat")
      .value("float32", ScaleFormat::kFloat32)
      .value("e8m0", ScaleFormat::kE8M0)
      .value("e4m3", ScaleFormat::kE4M3);
  py::class_<DequantizeDesc>(module, "Dequantize")
      .def(py::init<ElementType, ElementType, ScaleFormat, int, int, int>())
      .def("__call__", recorded<&dequantize>);
}

void register_column_sums(py::module_& module) {
  py::class_<ColumnSumsDesc>(module, "ColumnSums")
      .def(py::init<InputType, int>())
      .def("workspace_floats", &ColumnSumsDesc::workspace_floats)
      .def("__call__", recorded<&column_sums>);
  module.def("add_tile_sums", recorded<&add_tile_sums>);
}

void register_transpose(py::module_& module) {
  py::class_<TransposeDesc>(module, "Transpose")
      .def(py::init<int>())
      .def("__call__", recorded<&transpose>);
}

void register_norm(py::module_& module) {
  module.attr("MOST_TWICE_PASSED") = kMostTwicePassed;
  py::enum_<NormKind>(module, "NormKind")
      .value("layernorm", NormKind::kLayerNorm)
      .value("rmsnorm", NormKind::kRmsNorm);
  py::class_<NormDesc>(module, "Norm")
      .def(py::init<NormKind, bool, float, InputType, InputType, int>())
      .def("__call__", recorded<&norm>)
      .def("backward", recorded<&norm_backward>)
      .def("backward_partials", &norm_backward_partials);
  py::class_<PanelChoice>(module, "PanelChoice").def(py::init<int, int, int, int>());
  py::class_<QuantizeNormDesc>(module, "QuantizeNorm")
      .def(py::init<NormDesc, QuantizeDesc, PanelChoice>(), py::arg("norm"), py::arg("cast"),
           py::arg("panel") = PanelChoice{})
      .def("__call__", recorded<&quantize_norm>);
}

void register_rotary(py::module_& module) {
  py::enum_<RotaryLayout>(module, "RotaryLayout")
      .value("sbhd", RotaryLayout::kSbhd)
      .value("bshd", RotaryLayout::kBshd)
      .value("thd", RotaryLayout::kThd);
  py::class_<RotaryDesc>(module, "Rotary")
      .def(py::init<RotaryLayout, bool, bool, InputType, int>())
      .def("__call__", recorded<&rotary>);
}

void register_attention(py::module_& module) {
  py::class_<SingleQueryDesc>(module, "SingleQuery")
      .def(py::init<InputType, int, int, int, float, int, int, bool, int>())
      .def("__call__", recorded<&single_query_attention>);
}

void register_gemm(py::module_& module) {
  py::enum_<ElementType>(module, "ElementType")
      .value("e4m3", ElementType::kE4M3)
      .value("e5m2", ElementType::kE5M2)
      .value("e2m1", ElementType::kE2M1)
      .value("bfloat16", ElementType::kBFloat16)
      .value("float16", ElementType::kFloat16)
      .value("float32", ElementType::kFloat32);
  py::enum_<ScaleMode>(module, "ScaleMode")
      .value("none", ScaleMode::kNone)
      .value("tensor", ScaleMode::kTensor)
      .value("row", ScaleMode::kRow)
      .value("vec128", ScaleMode::kVec128)
      .value("block128", ScaleMode::kBlock128)
      .value("mx32", ScaleMode::kMx32)
      .value("nv16", ScaleMode::kNv16);
  py::class_<OperandDesc>(module, "OperandDesc")
      .def(py::init<ElementType, ScaleMode, bool, std::int64_t>())
      .def("__str__", &OperandDesc::text);
  py::class_<GemmDesc>(module, "GemmDesc")
      .def(py::init<std::int64_t, std::int64_t, std::int64_t, OperandDesc, OperandDesc, ElementType,
                    bool, ElementType, bool, bool, std::uint32_t, std::int64_t>())
      .def("__str__", &GemmDesc::text);
  py::class_<Gemm, std::shared_ptr<Gemm>>(module, "Gemm")
      .def(py::init(&plan_gemm))
      .def_property_readonly("num_candidates", &Gemm::num_candidates)
      .def_property_readonly("is_of_few_rows", &Gemm::is_of_few_rows)
      .def_property_readonly("library_version", &Gemm::library_version)
      .def("workspace_bytes", &Gemm::workspace_bytes)
      .def("algorithm",
           [](const Gemm& gemm, std::size_t at) { return py::bytes(gemm.algorithm(at)); })
      .def("add_candidate", &add_candidate)
      .def("run", recorded<&run_gemm>)
      .def("milliseconds", &time_gemm, py::call_guard<py::gil_scoped_release>());
}

void register_grouped_gemm(py::module_& module) {
  py::class_<GroupedGemmDesc>(module, "GroupedGemm")
      .def(py::init<ElementType, ElementType, ScaleMode, ScaleMode, ElementType, bool, bool, bool,
                    int>())
      .def("__call__", recorded<&grouped_gemm>);
}

void register_permutation(py::module_& module) {
  module.attr("MOST_SLOTS") = kMostSlots;
  module.def("route_workspace_ints", &route_workspace_ints);
  module.def("route_by_mask", &route_by_mask);
  module.def("route_by_rows", &route_by_rows);
  py::class_<RowsDesc>(module, "Rows")
      .def(py::init<InputType, int>())
      .def("dispatch", &dispatch_rows)
      .def("combine", &combine_rows)
      .def("combine_backward", &combine_rows_backward);
}

void register_router(py::module_& module) {
  py::enum_<ScoreFunction>(module, "ScoreFunction")
      .value("softmax", ScoreFunction::kSoftmax)
      .value("sigmoid", ScoreFunction::kSigmoid)
      .value("sqrtsoftplus", ScoreFunction::kSqrtSoftplus);
  module.attr("MOST_EXPERTS") = kMostExperts;
  module.attr("MOST_EXPERT_GROUPS") = kMostExpertGroups;
  py::class_<RouterDesc>(module, "Router")
      .def(py::init<InputType, int, ScoreFunction, bool, int, int, float, bool, int>())
      .def("__call__", &router)
      .def("backward", &router_backward);
}

void register_cross_entropy(py::module_& module) {
  py::class_<CrossEntropyDesc>(module, "CrossEntropy")
      .def(py::init<InputType, float, std::int64_t, int>())
      .def("__call__", &cross_entropy)
      .def("backward", &cross_entropy_backward);
}

void register_steps(py::module_& module) {
  py::enum_<MasterKind>(module, "MasterKind")
      .value("none", MasterKind::kNone)
      .value("float32", MasterKind::kFloat32)
      .value("remainder", MasterKind::kRemainder);
  py::class_<AdamDesc>(module, "Adam")
      .def(py::init<InputType, InputType, InputType, MasterKind, bool, int>())
      .def("__call__", &adam);
}

}  // namespace
}  // namespace fp8core

PYBIND11_MODULE(fp8core_cuda, module) {
  const std::string kernels = fp8core::source_hash();
  if (kernels != FP8CORE_SOURCE_HASH)
    throw py::import_error(fp8core::join("the bindings are of sources ", FP8CORE_SOURCE_HASH,
                                         ", the library of kernels beside them of ", kernels));
  module.attr("SOURCE_HASH") = kernels;
  module.attr("ARCHITECTURES") = fp8core::architectures();
  fp8core::register_quantize(module);
  fp8core::register_activation(module);
  fp8core::register_microscaling(module);
  fp8core::register_scale_update(module);
  fp8core::register_norm(module);
  fp8core::register_rotary(module);
  fp8core::register_attention(module);
  fp8core::register_gemm(module);
  fp8core::register_dequantize(module);
  fp8core::register_column_sums(module);
  fp8core::register_transpose(module);
  fp8core::register_grouped_gemm(module);
  fp8core::bindings::register_repeat(module);
  fp8core::register_permutation(module);
  fp8core::register_router(module);
  fp8core::register_cross_entropy(module);
  fp8core::register_steps(module);
}
