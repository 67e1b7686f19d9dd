// d[m, n] = a[m, k] @ b[n, k].T over cuBLASLt: one object a shape, with descriptors created once.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fp8core/device.h"

namespace fp8core FP8CORE_EXPORTED {

enum class ElementType { kE4M3, kE5M2, kE2M1, kBFloat16, kFloat16, kFloat32 };

// The elements that one scale of an operand covers, and the layout of scales that cuBLASLt reads.
enum class ScaleMode {
  kNone,      // high precision
  kTensor,    // float32 [1]
  kRow,       // float32 [rows]
  kVec128,    // float32 [ceil(k / 128), round_up(rows, 4)]
  kBlock128,  // float32 [ceil(rows / 128), round_up(ceil(k / 128), 4)]
  kMx32,      // e8m0, tiles of 128 x 4 scales (arrange_scales); compute capability 10.0
  kNv16,      // e4m3, likewise; behind a's tiles GemmFactors
};

// Scales of blocks along k, of which one covers 128 elements.
constexpr bool has_blocks(ScaleMode mode) {
  return mode == ScaleMode::kVec128 || mode == ScaleMode::kBlock128;
}

struct OperandDesc {
  ElementType type;
  ScaleMode scale;
  bool k_contiguous;     // rows of k elements; else columns, high precision only
  std::int64_t leading;  // elements from one row (or column) to the next

  std::string text() const;
};

struct GemmDesc {
  std::int64_t m, n, k;
  OperandDesc a, b;
  ElementType out;
  bool has_bias;
  ElementType bias;
  bool accumulate;          // add to d
  bool fast_accumulation;   // FP8 only
  std::uint32_t alignment;  // bytes that the addresses of a, b, d and bias are multiples of
  std::int64_t d_leading;   // elements from one row of d to the next

  std::string text() const;
};

struct GemmArguments {
  const void* a = nullptr;
  const float* a_scale_inv = nullptr;
  const void* b = nullptr;
  const float* b_scale_inv = nullptr;
  const void* bias = nullptr;
  void* d = nullptr;

  // Optional from here on: for an algorithm that takes a workspace.
  void* workspace = nullptr;
  std::int64_t workspace_bytes = 0;

  static constexpr int kOptional = 2;
  auto fields() {
    return std::tie(a, a_scale_inv, b, b_scale_inv, bias, d, workspace, workspace_bytes);
  }
};

// How a kernel of fp8core runs a product of few rows: a cut of the work by number, and how many
// blocks of threads share a sum.
struct FewRowsWay {
  int cut, split;
};

// Owns one of cuBLASLt's descriptors.
template <typename Handle, cublasStatus_t (*kDestroy)(Handle)>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (handle_ != nullptr) kDestroy(handle_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Handle* out() { return &handle_; }
  operator Handle() const { return handle_; }  // NOLINT: stands for the handle everywhere

 private:
  Handle handle_ = nullptr;
};

using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// The algorithms for one problem: cuBLASLt's, with its descriptors, then kernels of fp8core for few
// rows. It checks nothing: the entries below do.
class Gemm : public std::enable_shared_from_this<Gemm> {
 public:
  Gemm(const GemmDesc& desc, int device, std::size_t max_workspace_bytes, int max_candidates);
  const GemmDesc& desc() const { return desc_; }
  std::size_t library_version() const { return cublasLtGetVersion(); }
  std::size_t num_candidates() const { return candidates_.size(); }
  std::size_t workspace_bytes(std::size_t candidate) const;
  // Whether reading the operands decides how long it takes: then timed runs find none in a cache.
  bool is_of_few_rows() const;
  std::string algorithm(std::size_t candidate) const;
  std::size_t add_candidate(const std::string& algorithm);
  void run(std::size_t candidate, const GemmArguments& arguments, cudaStream_t stream);
  float milliseconds(std::size_t candidate, const GemmArguments& arguments, int repeats,
                     cudaStream_t stream);

 private:
  struct Candidate {
    cublasLtMatmulAlgo_t library = {};
    std::size_t workspace_bytes = 0;
    std::optional<FewRowsWay> few_rows;  // instead of the library's
  };

  void enqueue(std::size_t candidate, const GemmArguments& arguments, cudaStream_t stream);

  GemmDesc desc_;
  int device_;
  cublasLtHandle_t handle_ = nullptr;
  Operation operation_;
  Layout a_, b_, d_;
  std::vector<Candidate> candidates_;
  std::mutex mutex_;  // pointers of scales and bias live in operation_
};

// Throws std::domain_error with cuBLASLt's answer where there is no algorithm for `desc`.
std::shared_ptr<Gemm> plan_gemm(const GemmDesc& desc, int device, std::size_t max_workspace_bytes,
                                int max_candidates);

// Takes an algorithm's opaque bytes back, as Gemm::algorithm gave them for a cache of the same
// cuBLASLt version. Returns the candidate's index, or throws where they do not run this problem.
std::size_t add_candidate(Gemm& gemm, const std::string& algorithm);

// Enqueues on `stream`. Not during a capture: `time_gemm`, which waits for the device, and for few
// rows reads all of the workspace before each run, so that what is in the cache is that.
void run_gemm(Gemm& gemm, std::size_t candidate, const GemmArguments& arguments,
              StreamHandle stream);
float time_gemm(Gemm& gemm, std::size_t candidate, const GemmArguments& arguments, int repeats,
                StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
