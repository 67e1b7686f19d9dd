// Quantization of x [rows, cols] to codes [rows, cols] and, transposed, [cols, rows].
// docs/numerics.md defines every bit of the results; all arithmetic is float32.
//
// An entry takes a descriptor, which is bound once (formats, sizes of blocks, the device), and the
// arguments of a call. Python writes arguments as one flat tuple, in the order of `fields()`; the
// last kOptional values may be left out.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "fp8core/device.h"

namespace fp8core FP8CORE_EXPORTED {

enum class InputType { kFloat32, kBFloat16, kFloat16 };
enum class Format { kE4M3, kE5M2 };

// The elements that one scale covers, along the rows of the operand.
enum class Granularity {
  kDelayed,  // the tensor; the scale is an argument, the amax a result
  kTensor,   // the tensor
  kRow,      // a row
  kVec128,   // 128 elements of a row
  kBlock128  // 128 x 128
};

// In each group, codes along k begin at a multiple of so many: the copy engine reads no others.
constexpr int kGroupStep = 32;

// Offsets that a launch carries: parameters of kernels have 4096 bytes.
constexpr int kOffsetsAtOnce = 256;

// Floats that the amax of a tensor takes in a workspace.
constexpr int kMaxPartials = 1024;

struct Matrix {
  const void* data = nullptr;
  std::int64_t rows = 0, cols = 0, stride = 0;  // stride: elements between rows; columns adjacent

  auto fields() { return std::tie(data, rows, cols, stride); }
};

// scale = target / max(amax, epsilon); `largest` where that overflows, 1 where amax is 0 or inf;
// rounded down to a power of two on request.
struct ScaleRule {
  float target;
  float epsilon;
  float largest;
  bool power_of_two;
};

struct QuantizeDesc {
  Granularity granularity;
  Format format;
  InputType input;
  ScaleRule rule;
  int device;

  // As the function of this name.
  std::int64_t tile_sums_floats(std::int64_t rows, std::int64_t cols) const;
};

// Null codes: that orientation is not wanted. scale_inv: see ScaleMode in gemm.h for the layouts;
// `pitch` is the number of floats between its rows. Of one scale for the whole tensor, both
// orientations name the same address, wanted or not.
struct QuantizeOutput {
  std::uint8_t* codes = nullptr;
  float* scale_inv = nullptr;
  std::int64_t pitch = 0;

  auto fields() { return std::tie(codes, scale_inv, pitch); }
};

// Groups of rows, each quantized as a tensor; where they end is known on the device alone. Operands
// then have one scale a group (kDelayed, kTensor; kRow columnwise: [groups, pitch]), or one for
// every 128 rows of each group (kVec128 columnwise, kBlock128), whose memory holds
// rows / 128 + groups. Columnwise codes begin at a multiple of kGroupStep in each group, with zeros
// between and behind: rows of kGroupStep * (rows / kGroupStep + groups) codes. Scales beyond the
// last group are 1.
struct Groups {
  const std::int64_t* offsets = nullptr;  // [count + 1], null: x is one tensor
  std::int64_t count = 0;
  std::int64_t scale_stride = 0, amax_stride = 0;  // floats between the entries of two groups

  auto fields() { return std::tie(offsets, count, scale_stride, amax_stride); }
};

// Offsets that the host knows, for `Groups` to read on the device.
struct GroupOffsets {
  std::int64_t* to = nullptr;
  std::vector<std::int64_t> offsets;

  static constexpr int kOptional = 0;
  auto fields() { return std::tie(to, offsets); }
};

// Stores them, in one launch for each kOffsetsAtOnce of them, which carries them: nothing is copied
// from the host's memory, so that a captured graph stores them too.
void store_group_offsets(const GroupOffsets& arguments, int device, StreamHandle stream);

struct QuantizeArguments {
  Matrix x;
  QuantizeOutput rowwise, columnwise;
  const float* scale = nullptr;  // kDelayed
  float* amax_out = nullptr;  // kDelayed, or null: max(amax_out, amax(x)) is kept; NaN is ignored
  // Grows by the number of NaN and inf in x, those of rows of no group left out; or null.
  unsigned long long* nonfinite = nullptr;
  // The amaxes of kTensor and kRow: kMaxPartials floats for a tensor, else as many as num_amaxes.
  float* workspace = nullptr;

  // Optional from here on.
  // Bytes between the rows of the columnwise codes; in groups also their number. 0: x.rows.
  std::int64_t column_pitch = 0;
  // 0: the amaxes of x are taken first. Else the workspace holds amaxes already, of a tensor that x
  // is a part of, and is only read: so many for a tensor (kTensor without groups), all for rows and
  // groups.
  int num_partials = 0;
  Groups groups;

  static constexpr int kOptional = 6;
  auto fields() {
    return std::tie(x, rowwise, columnwise, scale, amax_out, nonfinite, workspace, column_pitch,
                    num_partials, groups);
  }
};

// How many amaxes x has: kTensor one, or one a group; kRow one a row, then one a column, or one a
// column of each group, group by group.
inline std::int64_t num_amaxes(Granularity granularity, const Matrix& x, const Groups& groups) {
  const std::int64_t count = groups.offsets == nullptr ? 1 : groups.count;
  return granularity == Granularity::kRow ? x.rows + count * x.cols : count;
}

// What one of two halves of a tensor's columns is cast by, and records in; as in QuantizeArguments.
struct CastSlots {
  float* scale_inv = nullptr;  // one scale for the half; null for kVec128
  const float* scale = nullptr;
  float* amax_out = nullptr;
  unsigned long long* nonfinite = nullptr;
  float* workspace = nullptr;  // kTensor: kMaxPartials floats

  auto fields() { return std::tie(scale_inv, scale, amax_out, nonfinite, workspace); }
};

// Launches: kDelayed, kVec128 and kBlock128 one, kTensor two (in groups also a memset), kRow two
// and a memset; one where amaxes are given. An empty x launches nothing, but for the scales of
// groups that are all empty.
void quantize(const QuantizeDesc& desc, const QuantizeArguments& arguments, StreamHandle stream);

// Floats of the tile_sums of a tensor [rows, cols]: a row of them for each 128 rows.
std::int64_t tile_sums_floats(std::int64_t rows, std::int64_t cols);

// A cast, and the column sums of x as column_sums.h has them: in float32, in one order.
struct QuantizeAndSumArguments {
  float* sums = nullptr;       // [cols]; null: the tile_sums of x alone, a part of a tensor
  float* tile_sums = nullptr;  // tile_sums_floats
  QuantizeArguments cast;      // from kBFloat16 or kFloat16, not in groups

  static constexpr int kOptional = QuantizeArguments::kOptional;
  auto fields() { return std::tie(sums, tile_sums, cast); }
};

// Launches: those of quantize, and one for sums. Casts by any granularity but kBlock128.
void quantize_and_sum(const QuantizeDesc& desc, const QuantizeAndSumArguments& arguments,
                      StreamHandle stream);

struct AmaxDesc {
  Granularity granularity;  // kTensor or kRow
  InputType input;
  int device;
};

struct AmaxArguments {
  Matrix x;
  float* workspace = nullptr;  // kTensor without groups: kMaxPartials floats

  // Optional from here on.
  float* amax_out = nullptr;  // [num_amaxes]; `amax` alone writes it
  Groups groups;

  static constexpr int kOptional = 5;
  auto fields() { return std::tie(x, workspace, amax_out, groups); }
};

// Writes the amaxes of x to amax_out: in two launches for a tensor, in one and a memset for rows
// and groups.
void amax(const AmaxDesc& desc, const AmaxArguments& arguments, StreamHandle stream);

// Writes amaxes whose largest is that of the tensor x to the workspace, and returns how many.
int partial_amaxes(const AmaxDesc& desc, const AmaxArguments& arguments, StreamHandle stream);

}  // namespace fp8core FP8CORE_EXPORTED
