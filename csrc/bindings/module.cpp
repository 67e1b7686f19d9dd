// The only file that knows Python. Pointers and streams cross as integers; what Python passes is
// checked by the entries. No call waits for the device, except Gemm.milliseconds.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "fp8core/device.h"
#include "fp8core/gemm.h"
#include "fp8core/grouped_gemm.h"
#include "fp8core/microscaling.h"
#include "fp8core/quantize.h"
#include "fp8core/scale_update.h"

namespace py = pybind11;

namespace fp8core {
namespace {

using Address = std::uintptr_t;

// A descriptor bound to a device: what stays the same from call to call.
class BoundQuantize {
 public:
  BoundQuantize(Granularity granularity, Format format, InputType input, float target,
                float epsilon, float largest, bool power_of_two, int device)
      : desc_{granularity, format, {target, epsilon, largest, power_of_two}},
        input_(input),
        device_(device) {}

  void operator()(Address x, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                  Address row_codes, Address row_scale_inv, std::int64_t row_pitch,
                  Address column_codes, Address column_scale_inv, std::int64_t column_pitch,
                  Address scale, Address amax_out, Address nonfinite, Address workspace,
                  Address stream) const {
    run(gather(x, rows, cols, stride, row_codes, row_scale_inv, row_pitch, column_codes,
               column_scale_inv, column_pitch, scale, amax_out, nonfinite, workspace, rows, {}, 0),
        stream);
  }

  // A whole tensor with one scale_inv for both orientations: x, rows, columns, rowwise and
  // columnwise codes, scale_inv, scale, amax_out, nonfinite_out, workspace.
  using Place = std::tuple<Address, std::int64_t, std::int64_t, Address, Address, Address, Address,
                           Address, Address, Address>;

  void whole(const Place& place, Address stream) const { run(gather(place), stream); }

  static void pair(const BoundQuantize& one, const Place& x, const BoundQuantize& other,
                   const Place& y, Address stream) {
    quantize_pair(one.desc_, one.gather(x), other.desc_, other.gather(y), one.device_,
                  as_stream(stream));
  }

  // x is some rows of a tensor, whose columnwise codes have `code_pitch` bytes between rows.
  void part(Address x, std::int64_t rows, std::int64_t cols, std::int64_t stride, Address row_codes,
            Address row_scale_inv, std::int64_t row_pitch, Address column_codes,
            Address column_scale_inv, std::int64_t column_pitch, Address scale, Address amax_out,
            Address nonfinite, Address workspace, std::int64_t code_pitch, int num_partials,
            Address stream) const {
    run(gather(x, rows, cols, stride, row_codes, row_scale_inv, row_pitch, column_codes,
               column_scale_inv, column_pitch, scale, amax_out, nonfinite, workspace, code_pitch,
               {}, num_partials),
        stream);
  }

  // `code_pitch`: bytes between the rows of the columnwise codes; `offsets` [groups + 1].
  void in_groups(Address x, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                 Address row_codes, Address row_scale_inv, std::int64_t row_pitch,
                 Address column_codes, Address column_scale_inv, std::int64_t column_pitch,
                 Address scale, Address amax_out, Address nonfinite, Address workspace,
                 std::int64_t code_pitch, Address offsets, std::int64_t groups,
                 std::int64_t scale_stride, std::int64_t amax_stride, Address stream) const {
    run(gather(x, rows, cols, stride, row_codes, row_scale_inv, row_pitch, column_codes,
               column_scale_inv, column_pitch, scale, amax_out, nonfinite, workspace, code_pitch,
               {as_pointer<const std::int64_t>(offsets), groups, scale_stride, amax_stride}, 0),
        stream);
  }

 private:
  QuantizeArguments gather(Address x, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                           Address row_codes, Address row_scale_inv, std::int64_t row_pitch,
                           Address column_codes, Address column_scale_inv,
                           std::int64_t column_pitch, Address scale, Address amax_out,
                           Address nonfinite, Address workspace, std::int64_t code_pitch,
                           Groups groups, int num_partials) const {
    return {
        {as_pointer<const void>(x), rows, cols, stride, input_},
        {as_pointer<std::uint8_t>(row_codes), as_pointer<float>(row_scale_inv), row_pitch},
        {as_pointer<std::uint8_t>(column_codes), as_pointer<float>(column_scale_inv), column_pitch},
        as_pointer<const float>(scale),
        as_pointer<float>(amax_out),
        as_pointer<float>(workspace),
        code_pitch,
        groups,
        num_partials,
        as_pointer<unsigned long long>(nonfinite)};
  }

  QuantizeArguments gather(const Place& place) const {
    const auto& [x, rows, cols, row_codes, column_codes, scale_inv, scale, amax_out, nonfinite,
                 workspace] = place;
    return gather(x, rows, cols, cols, row_codes, scale_inv, 1, column_codes, scale_inv, 1, scale,
                  amax_out, nonfinite, workspace, rows, {}, 0);
  }

  void run(const QuantizeArguments& arguments, Address stream) const {
    quantize(desc_, arguments, device_, as_stream(stream));
  }

  QuantizeDesc desc_;
  InputType input_;
  int device_;
};

void register_quantize(py::module_& module) {
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
  py::class_<BoundQuantize>(module, "Quantize")
      .def(py::init<Granularity, Format, InputType, float, float, float, bool, int>())
      .def("__call__", &BoundQuantize::operator())
      .def("whole", &BoundQuantize::whole)
      .def("part", &BoundQuantize::part)
      .def("in_groups", &BoundQuantize::in_groups);
  module.attr("MAX_PARTIALS") = kMaxPartials;
  module.def("quantize_pair", &BoundQuantize::pair);
  module.def("partial_amaxes",
             [](Address x, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                InputType type, Address workspace, int device, Address stream) {
               return partial_amaxes({as_pointer<const void>(x), rows, cols, stride, type},
                                     as_pointer<float>(workspace), device, as_stream(stream));
             });
  module.def("amax",
             [](Address x, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                InputType type, Address out, Address workspace, int device, Address stream) {
               amax({as_pointer<const void>(x), rows, cols, stride, type}, as_pointer<float>(out),
                    as_pointer<float>(workspace), device, as_stream(stream));
             });
}

class BoundMxfp8 {
 public:
  BoundMxfp8(Format format, bool is_square, double target, InputType input, int device)
      : desc_{format, is_square, target}, input_(input), device_(device) {}

  void operator()(Address x, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                  Address row_codes, Address row_scales, std::int64_t row_pitch,
                  Address column_codes, Address column_scales, std::int64_t column_pitch,
                  Address nonfinite, Address stream) const {
    quantize_mxfp8(desc_, {as_pointer<const void>(x), rows, cols, stride, input_},
                   byte_scaled(row_codes, row_scales, row_pitch),
                   byte_scaled(column_codes, column_scales, column_pitch),
                   as_pointer<unsigned long long>(nonfinite), device_, as_stream(stream));
  }

  static ByteScaled byte_scaled(Address codes, Address scales, std::int64_t pitch) {
    return {as_pointer<std::uint8_t>(codes), as_pointer<std::uint8_t>(scales), pitch};
  }

 private:
  Mxfp8Desc desc_;
  InputType input_;
  int device_;
};

class BoundNvfp4 {
 public:
  BoundNvfp4(bool is_square, double target, bool transforms, bool row_stochastic,
             bool column_stochastic, InputType input, int device)
      : desc_{is_square, target, transforms, row_stochastic, column_stochastic},
        input_(input),
        device_(device) {}

  void operator()(Address x, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                  Address row_codes, Address row_scales, std::int64_t row_pitch, Address row_global,
                  Address column_codes, Address column_scales, std::int64_t column_pitch,
                  Address column_global, std::int64_t seed, std::int64_t offset, Address nonfinite,
                  Address workspace, Address stream) const {
    const Nvfp4Arguments arguments{
        {as_pointer<const void>(x), rows, cols, stride, input_},
        BoundMxfp8::byte_scaled(row_codes, row_scales, row_pitch),
        BoundMxfp8::byte_scaled(column_codes, column_scales, column_pitch),
        as_pointer<float>(row_global),
        as_pointer<float>(column_global),
        static_cast<std::uint64_t>(seed),
        static_cast<std::uint64_t>(offset),
        as_pointer<float>(workspace),
        as_pointer<unsigned long long>(nonfinite)};
    quantize_nvfp4(desc_, arguments, device_, as_stream(stream));
  }

 private:
  Nvfp4Desc desc_;
  InputType input_;
  int device_;
};

// Address, strides of rows and blocks in bytes, rows, blocks, rows a scale, global scale or 0.
using ScaleSource =
    std::tuple<Address, std::int64_t, std::int64_t, std::int64_t, std::int64_t, int, Address>;

void register_microscaling(py::module_& module) {
  py::class_<BoundMxfp8>(module, "QuantizeMxfp8")
      .def(py::init<Format, bool, double, InputType, int>())
      .def("__call__", &BoundMxfp8::operator());
  py::class_<BoundNvfp4>(module, "QuantizeNvfp4")
      .def(py::init<bool, double, bool, bool, bool, InputType, int>())
      .def("__call__", &BoundNvfp4::operator());
  module.def("tile_bytes", &tile_bytes);
  module.def("arrange_scales", [](const ScaleSource& a, const ScaleSource& b, Address to_a,
                                  Address to_b, int device, Address stream) {
    const auto tiles = [](const ScaleSource& from, Address to) {
      const auto& [scales, row_stride, block_stride, rows, blocks, rows_per_scale, global] = from;
      return ScaleTiles{as_pointer<const std::uint8_t>(scales),
                        row_stride,
                        block_stride,
                        rows,
                        blocks,
                        rows_per_scale,
                        as_pointer<const float>(global),
                        as_pointer<std::uint8_t>(to)};
    };
    arrange_scales(tiles(a, to_a), tiles(b, to_b), device, as_stream(stream));
  });
}

// The same states, updated again and again.
class BoundScaleUpdate {
 public:
  using Row = std::tuple<Address, Address, Address, Address, int, int>;

  BoundScaleUpdate(const std::vector<Row>& rows, bool takes_window_maximum, int device)
      : takes_window_maximum_(takes_window_maximum), device_(device) {
    states_.reserve(rows.size());
    for (const auto& [history, scale, target, nonfinite, length, slots] : rows)
      states_.push_back({as_pointer<float>(history), as_pointer<float>(scale),
                         as_pointer<const float>(target), as_pointer<unsigned long long>(nonfinite),
                         length, slots});
  }

  void operator()(Address stream) const {
    scale_update(states_, takes_window_maximum_, device_, as_stream(stream));
  }

 private:
  std::vector<DelayedState> states_;
  bool takes_window_maximum_;
  int device_;
};

void register_scale_update(py::module_& module) {
  py::class_<BoundScaleUpdate>(module, "ScaleUpdate")
      .def(py::init<const std::vector<BoundScaleUpdate::Row>&, bool, int>())
      .def("__call__", &BoundScaleUpdate::operator());
}

GemmArguments gemm_arguments(Address a, Address a_scale_inv, Address b, Address b_scale_inv,
                             Address bias, Address d, Address workspace, std::size_t bytes) {
  return {as_pointer<const void>(a),
          as_pointer<const void>(b),
          as_pointer<const float>(a_scale_inv),
          as_pointer<const float>(b_scale_inv),
          as_pointer<const void>(bias),
          as_pointer<void>(d),
          as_pointer<void>(workspace),
          bytes};
}

template <typename T>
std::vector<T> as_pointers(const std::vector<Address>& addresses) {
  std::vector<T> made;
  made.reserve(addresses.size());
  for (const Address address : addresses) made.push_back(reinterpret_cast<T>(address));
  return made;
}

// Codes' addresses, bytes between rows, scales' addresses, strides of rows and of k, blocks of k.
using PyOperand = std::tuple<std::vector<Address>, std::int64_t, std::vector<Address>, std::int64_t,
                             std::int64_t, std::int64_t>;

GroupedOperand grouped_operand(const PyOperand& given) {
  const auto& [data, pitch, scale_inv, row_stride, k_stride, blocks] = given;
  return {as_pointers<const void*>(data),
          pitch,
          as_pointers<const float*>(scale_inv),
          row_stride,
          k_stride,
          blocks};
}

void register_grouped_gemm(py::module_& module) {
  py::class_<GroupedGemmDesc>(module, "GroupedGemmDesc")
      .def(py::init<ElementType, ElementType, ScaleMode, ScaleMode, ElementType, bool, bool,
                    bool>());
  module.def("grouped_gemm",
             [](const GroupedGemmDesc& desc, std::int64_t m, std::int64_t n, std::int64_t k,
                const PyOperand& a, const PyOperand& b, const std::vector<Address>& bias,
                ElementType bias_type, const std::vector<Address>& d, Address offsets,
                std::int64_t groups, int device, Address stream) {
               grouped_gemm(desc,
                            {m, n, k, grouped_operand(a), grouped_operand(b),
                             as_pointers<const void*>(bias), bias_type, as_pointers<void*>(d),
                             as_pointer<const std::int64_t>(offsets), groups},
                            device, as_stream(stream));
             });
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
                    bool, ElementType, bool, bool, std::uint32_t>())
      .def("__str__", &GemmDesc::text);
  py::class_<Gemm>(module, "Gemm")
      .def(py::init<const GemmDesc&, int, std::size_t, int>())
      .def_property_readonly("num_candidates", &Gemm::num_candidates)
      .def_property_readonly("library_version", [](const Gemm&) { return cublasLtGetVersion(); })
      .def("workspace_bytes", &Gemm::workspace_bytes)
      .def("algorithm",
           [](const Gemm& gemm, std::size_t at) { return py::bytes(gemm.algorithm(at)); })
      .def("add_candidate",
           [](Gemm& gemm, const py::bytes& bytes) { return gemm.add_candidate(bytes); })
      .def("run",
           [](Gemm& gemm, std::size_t candidate, Address a, Address a_scale_inv, Address b,
              Address b_scale_inv, Address bias, Address d, Address workspace, std::size_t bytes,
              Address stream) {
             gemm.run(candidate,
                      gemm_arguments(a, a_scale_inv, b, b_scale_inv, bias, d, workspace, bytes),
                      as_stream(stream));
           })
      .def(
          "milliseconds",
          [](Gemm& gemm, std::size_t candidate, Address a, Address a_scale_inv, Address b,
             Address b_scale_inv, Address bias, Address d, Address workspace, std::size_t bytes,
             int repeats, Address stream) {
            return gemm.milliseconds(
                candidate,
                gemm_arguments(a, a_scale_inv, b, b_scale_inv, bias, d, workspace, bytes), repeats,
                as_stream(stream));
          },
          py::call_guard<py::gil_scoped_release>());  // it waits for the device
}

}  // namespace
}  // namespace fp8core

PYBIND11_MODULE(fp8core_cuda, module) {
  module.attr("SOURCE_HASH") = FP8CORE_SOURCE_HASH;
  module.attr("ARCHITECTURES") = FP8CORE_ARCHITECTURES;
  fp8core::register_quantize(module);
  fp8core::register_microscaling(module);
  fp8core::register_scale_update(module);
  fp8core::register_gemm(module);
  fp8core::register_grouped_gemm(module);
}
