// Products over cuBLASLt: the arguments are checked, then enqueued.
#include "fp8core/gemm.h"

namespace fp8core {
namespace {

constexpr std::uintptr_t kScaleAlignment = 16;  // bytes

void check_pointer(const char* name, const void* pointer, std::uintptr_t alignment,
                   const GemmDesc& desc) {
  FP8CORE_CHECK_ADDRESS(pointer, name, " of ", desc.text());
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  FP8CORE_CHECK(address % alignment == 0, name, " of ", desc.text(), " is at address ", address,
                "; expected a multiple of ", alignment, " bytes");
}

// A misaligned scale makes cublasLtMatmul fail; a misaligned operand can select a wrong kernel.
void check(const Gemm& gemm, std::size_t candidate, const GemmArguments& arguments) {
  const GemmDesc& desc = gemm.desc();
  const auto workspace_bytes = static_cast<std::int64_t>(gemm.workspace_bytes(candidate));
  FP8CORE_CHECK(arguments.workspace_bytes >= workspace_bytes, desc.text(), ": workspace of ",
                arguments.workspace_bytes, " bytes, the algorithm takes ", workspace_bytes);
  check_pointer("a", arguments.a, desc.alignment, desc);
  check_pointer("b", arguments.b, desc.alignment, desc);
  check_pointer("d", arguments.d, desc.alignment, desc);
  if (desc.a.scale != ScaleMode::kNone)
    check_pointer("a's scale_inv", arguments.a_scale_inv, kScaleAlignment, desc);
  if (desc.b.scale != ScaleMode::kNone)
    check_pointer("b's scale_inv", arguments.b_scale_inv, kScaleAlignment, desc);
  if (desc.has_bias) FP8CORE_CHECK_ADDRESS(arguments.bias, "bias of ", desc.text());
  if (arguments.workspace_bytes > 0)
    FP8CORE_CHECK_ADDRESS(arguments.workspace, "workspace of ", desc.text());
}

}  // namespace

std::shared_ptr<Gemm> plan_gemm(const GemmDesc& desc, int device, std::size_t max_workspace_bytes,
                                int max_candidates) {
  FP8CORE_CHECK(desc.m > 0 && desc.n > 0 && desc.k > 0, desc.text(), ": sizes must be positive");
  FP8CORE_CHECK(desc.d_leading >= desc.n, desc.text(), ": rows of d lie in one another");
  return std::make_shared<Gemm>(desc, device, max_workspace_bytes, max_candidates);
}

std::size_t add_candidate(Gemm& gemm, const std::string& algorithm) {
  constexpr std::size_t kBytes = sizeof(cublasLtMatmulAlgo_t);
  FP8CORE_CHECK(algorithm.size() == kBytes, "an algorithm has ", kBytes, " bytes, found ",
                algorithm.size());
  return gemm.add_candidate(algorithm);
}

void run_gemm(Gemm& gemm, std::size_t candidate, const GemmArguments& arguments,
              StreamHandle stream) {
  check(gemm, candidate, arguments);
  gemm.run(candidate, arguments, as_stream(stream));
}

float time_gemm(Gemm& gemm, std::size_t candidate, const GemmArguments& arguments, int repeats,
                StreamHandle stream) {
  check(gemm, candidate, arguments);
  return gemm.milliseconds(candidate, arguments, repeats, as_stream(stream));
}

}  // namespace fp8core
