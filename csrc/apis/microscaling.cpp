// Casts with byte scales, and their tiles: the arguments are checked, then launched.
#include "fp8core/microscaling.h"

#include "../cuda/gemm/scale_layout.h"
#include "../cuda/quantize/casts.h"
#include "check_cast.h"

namespace fp8core {
namespace {

void check(const char* name, const ScaleTiles& from) {
  FP8CORE_CHECK(from.rows > 0 && from.blocks > 0 && from.rows_per_scale > 0, "scales of ", name,
                " cover ", from.rows, " rows x ", from.blocks, " blocks");
  FP8CORE_CHECK_ADDRESS(from.scales, "scales of ", name);
  FP8CORE_CHECK_ADDRESS(from.to, "tiles of ", name);
  const auto address = reinterpret_cast<std::uintptr_t>(from.to);
  FP8CORE_CHECK(address % 16 == 0, "tiles of ", name, " are at address ", address,
                "; expected a multiple of 16 bytes");
}

}  // namespace

void quantize_mxfp8(const Mxfp8Desc& desc, const Mxfp8Arguments& arguments, StreamHandle stream) {
  const Matrix& x = arguments.x;
  check(x);
  if (is_empty(x)) return;
  check_results(desc, arguments);
  check_grid("quantize", num_tiles(x, {}));
  launch_mxfp8(desc, arguments, as_stream(stream));
}

void quantize_nvfp4(const Nvfp4Desc& desc, const Nvfp4Arguments& arguments, StreamHandle stream) {
  check(arguments.x);
  if (is_empty(arguments.x)) return;
  check_results(desc, arguments);
  check_grid("quantize", num_tiles(arguments.x, {}));
  launch_nvfp4(desc, arguments, as_stream(stream));
}

void arrange_scales(const ArrangeScalesArguments& arguments, int device, StreamHandle stream) {
  const ScaleTiles &a = arguments.a, &b = arguments.b;
  check("a", a);
  check("b", b);
  FP8CORE_CHECK((a.global_scale_inv == nullptr) == (b.global_scale_inv == nullptr),
                "one operand has a global scale, the other has none");
  launch_arrange_scales(arguments, device, as_stream(stream));
}

}  // namespace fp8core
