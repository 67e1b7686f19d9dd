// Products by the kernels of few_rows.h, and by cuBLASLt, which is column-major, so it is asked for
// the transposed product
//     d.T [n, m] = b [n, k] @ a[m, k].T
// where cuBLASLt's A is our b (transposed: rows of k are its columns) and its B is our a.
// Source: cuBLAS 13 documentation, 3.4 cublasLtMatmul(), "To use FP8 kernels" (layout TN, 16-byte
// alignment of pointers and leading dimensions), and 3.1.4 for the layouts of scales.

#include <algorithm>
#include <map>
#include <memory>

#include "cold_cache.h"
#include "few_rows.h"
#include "fp8core/gemm.h"
#include "fp8core/microscaling.h"

#define FP8CORE_CUBLAS(call)                                                                  \
  do {                                                                                        \
    const cublasStatus_t status_ = (call);                                                    \
    if (status_ != CUBLAS_STATUS_SUCCESS)                                                     \
      throw std::runtime_error(fp8core::join(#call, ": ", cublasLtGetStatusString(status_))); \
  } while (false)

namespace fp8core {
namespace {

// Stands in for pointers that are known only when the GEMM runs: without them, the heuristic
// proposes no algorithm for scales that are vectors, and none with a bias.
const void* const kSomewhere = reinterpret_cast<const void*>(std::uintptr_t{16});

cudaDataType_t data_type(ElementType type) {
  switch (type) {
    case ElementType::kE4M3: return CUDA_R_8F_E4M3;
    case ElementType::kE5M2: return CUDA_R_8F_E5M2;
    case ElementType::kE2M1: return CUDA_R_4F_E2M1;
    case ElementType::kBFloat16: return CUDA_R_16BF;
    case ElementType::kFloat16: return CUDA_R_16F;
    case ElementType::kFloat32: return CUDA_R_32F;
  }
  throw std::invalid_argument("unknown element type");
}

const char* name(ElementType type) {
  switch (type) {
    case ElementType::kE4M3: return "e4m3";
    case ElementType::kE5M2: return "e5m2";
    case ElementType::kE2M1: return "e2m1";
    case ElementType::kBFloat16: return "bfloat16";
    case ElementType::kFloat16: return "float16";
    case ElementType::kFloat32: return "float32";
  }
  return "?";
}

cublasLtMatmulMatrixScale_t scale_mode(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kNone:
    case ScaleMode::kTensor: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    case ScaleMode::kRow: return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case ScaleMode::kVec128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScaleMode::kBlock128: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case ScaleMode::kMx32: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case ScaleMode::kNv16: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
  }
  throw std::invalid_argument("unknown scale mode");
}

const char* name(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kNone: return "none";
    case ScaleMode::kTensor: return "tensor";
    case ScaleMode::kRow: return "row";
    case ScaleMode::kVec128: return "1x128";
    case ScaleMode::kBlock128: return "128x128";
    case ScaleMode::kMx32: return "mx32";
    case ScaleMode::kNv16: return "nv16";
  }
  return "?";
}

// One handle a device, for the life of the process: cublasLtCreate takes milliseconds.
cublasLtHandle_t handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) FP8CORE_CUBLAS(cublasLtCreate(&handle));
  return handle;
}

template <typename T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  FP8CORE_CUBLAS(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
}

template <typename T>
void prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
            const T& value) {
  FP8CORE_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

void describe(Layout& layout, const OperandDesc& operand, std::int64_t rows, std::int64_t k) {
  const auto type = data_type(operand.type);
  // Rows of k, seen as columns: [k, rows]. Columns of rows elements: [rows, k].
  if (operand.k_contiguous)
    FP8CORE_CUBLAS(cublasLtMatrixLayoutCreate(layout.out(), type, k, rows, operand.leading));
  else
    FP8CORE_CUBLAS(cublasLtMatrixLayoutCreate(layout.out(), type, rows, k, operand.leading));
}

class Event {
 public:
  Event() { FP8CORE_CUDA(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

std::string OperandDesc::text() const {
  return join(name(type), "/", name(scale), k_contiguous ? "" : "/transposed", "/", leading);
}

std::string GemmDesc::text() const {
  return join("gemm m=", m, " n=", n, " k=", k, " a=", a.text(), " b=", b.text(),
              " out=", name(out), has_bias ? join(" bias=", name(bias)) : std::string(),
              accumulate ? " accumulate" : "", fast_accumulation ? " fast" : "", " aligned ",
              alignment, d_leading == n ? std::string() : join(" d/", d_leading));
}

Gemm::Gemm(const GemmDesc& desc, int device, std::size_t max_workspace_bytes, int max_candidates)
    : desc_(desc), device_(device) {
  const DeviceGuard guard(device);
  handle_ = handle_of(device);
  FP8CORE_CUBLAS(cublasLtMatmulDescCreate(operation_.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set(operation_, CUBLASLT_MATMUL_DESC_TRANSA, desc.b.k_contiguous ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation_, CUBLASLT_MATMUL_DESC_TRANSB, desc.a.k_contiguous ? CUBLAS_OP_N : CUBLAS_OP_T);
  if (desc.a.scale != ScaleMode::kNone) {
    set(operation_, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(desc.a.scale));
    set(operation_, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, kSomewhere);
  }
  if (desc.b.scale != ScaleMode::kNone) {
    set(operation_, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(desc.b.scale));
    set(operation_, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, kSomewhere);
  }
  if (desc.a.scale == ScaleMode::kNv16)
    set(operation_, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
  if (desc.fast_accumulation) set(operation_, CUBLASLT_MATMUL_DESC_FAST_ACCUM, std::int8_t{1});
  if (desc.has_bias) {
    set(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(operation_, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(desc.bias));
    set(operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, kSomewhere);
  }
  describe(a_, desc.a, desc.m, desc.k);
  describe(b_, desc.b, desc.n, desc.k);
  FP8CORE_CUBLAS(
      cublasLtMatrixLayoutCreate(d_.out(), data_type(desc.out), desc.n, desc.m, desc.d_leading));

  Preference preference;
  FP8CORE_CUBLAS(cublasLtMatmulPreferenceCreate(preference.out()));
  prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, max_workspace_bytes);
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, desc.alignment);
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, desc.alignment);
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, desc.alignment);
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, desc.alignment);
  std::vector<cublasLtMatmulHeuristicResult_t> results(max_candidates);
  int num_found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle_, operation_, b_, a_, d_, d_, preference, max_candidates, results.data(), &num_found);
  results.resize(std::max(num_found, 0));
  for (const auto& result : results)
    if (result.state == CUBLAS_STATUS_SUCCESS)
      candidates_.push_back({result.algo, result.workspaceSize, std::nullopt});
  for (const FewRowsWay& way : few_rows_ways(desc, device)) candidates_.push_back({{}, 0, way});
  if (candidates_.empty())
    throw std::domain_error(join("cuBLASLt ", cublasLtGetVersion(), " has no algorithm for ",
                                 desc.text(), " (", cublasLtGetStatusString(status), ")"));
}

bool Gemm::is_of_few_rows() const { return !few_rows_ways(desc_, device_).empty(); }

std::size_t Gemm::workspace_bytes(std::size_t candidate) const {
  return candidates_.at(candidate).workspace_bytes;
}

std::string Gemm::algorithm(std::size_t candidate) const {
  const Candidate& chosen = candidates_.at(candidate);
  if (chosen.few_rows) return few_rows_algorithm(*chosen.few_rows);
  return std::string(reinterpret_cast<const char*>(&chosen.library), sizeof chosen.library);
}

std::size_t Gemm::add_candidate(const std::string& algorithm) {
  Candidate added;
  added.few_rows = few_rows_way(desc_, algorithm, device_);
  if (!added.few_rows) {
    cublasLtMatmulHeuristicResult_t result = {};
    std::copy(algorithm.begin(), algorithm.end(), reinterpret_cast<char*>(&result.algo));
    const DeviceGuard guard(device_);
    FP8CORE_CUBLAS(
        cublasLtMatmulAlgoCheck(handle_, operation_, b_, a_, d_, d_, &result.algo, &result));
    added.library = result.algo, added.workspace_bytes = result.workspaceSize;
  }
  candidates_.push_back(added);
  return candidates_.size() - 1;
}

void Gemm::enqueue(std::size_t candidate, const GemmArguments& arguments, cudaStream_t stream) {
  const Candidate& chosen = candidates_.at(candidate);
  if (chosen.few_rows) return launch_few_rows(desc_, *chosen.few_rows, arguments, device_, stream);
  const GemmFactors host{1.0f, 0.0f, 1.0f};
  const GemmFactors* factors = &host;
  if (desc_.a.scale == ScaleMode::kNv16) {  // CUBLASLT_POINTER_MODE_DEVICE
    const auto* tiles = reinterpret_cast<const std::uint8_t*>(arguments.a_scale_inv);
    factors =
        reinterpret_cast<const GemmFactors*>(tiles + tile_bytes(desc_.m, (desc_.k + 15) / 16));
  }
  const float* beta = desc_.accumulate ? &factors->one : &factors->zero;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (desc_.a.scale != ScaleMode::kNone)
    set(operation_, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, arguments.a_scale_inv);
  if (desc_.b.scale != ScaleMode::kNone)
    set(operation_, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, arguments.b_scale_inv);
  if (desc_.has_bias) set(operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, arguments.bias);
  const cublasStatus_t status =
      cublasLtMatmul(handle_, operation_, &factors->alpha, arguments.b, b_, arguments.a, a_, beta,
                     arguments.d, d_, arguments.d, d_, &chosen.library, arguments.workspace,
                     static_cast<std::size_t>(arguments.workspace_bytes), stream);
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(
        join("cublasLtMatmul of ", desc_.text(), ": ", cublasLtGetStatusString(status)));
}

void Gemm::run(std::size_t candidate, const GemmArguments& arguments, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  enqueue(candidate, arguments, stream);
}

float Gemm::milliseconds(std::size_t candidate, const GemmArguments& arguments, int repeats,
                         cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const int at_once = is_of_few_rows() ? 1 : repeats;  // between two events
  const Event start, end;
  enqueue(candidate, arguments, stream);  // the first run loads the kernel
  float total = 0.0f;
  for (int done = 0; done < repeats; done += at_once) {
    if (is_of_few_rows())
      fill_cache(arguments.workspace, arguments.workspace_bytes, device_, stream);
    FP8CORE_CUDA(cudaEventRecord(start.get(), stream));
    for (int i = 0; i < at_once; ++i) enqueue(candidate, arguments, stream);
    FP8CORE_CUDA(cudaEventRecord(end.get(), stream));
    FP8CORE_CUDA(cudaEventSynchronize(end.get()));
    float elapsed = 0.0f;
    FP8CORE_CUDA(cudaEventElapsedTime(&elapsed, start.get(), end.get()));
    total += elapsed;
  }
  return total / static_cast<float>(repeats);
}

}  // namespace fp8core
