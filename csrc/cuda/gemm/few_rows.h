// Products of few rows, whose time is that of reading b once.
#pragma once

#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "fp8core/gemm.h"
#include "fp8core/grouped_gemm.h"

namespace fp8core {

// The ways to run `desc`, the likely ones alone; none if it is not a product of few rows by codes
// of e4m3, or its operands do not lie in whole vectors.
std::vector<FewRowsWay> few_rows_ways(const GemmDesc& desc, int device);

// A way as the bytes of one of cuBLASLt's algorithms, and back: none where the bytes are of another
// kind, or of a way in which `desc` does not run.
std::string few_rows_algorithm(const FewRowsWay& way);
std::optional<FewRowsWay> few_rows_way(const GemmDesc& desc, const std::string& algorithm,
                                       int device);

// Of arguments that have been checked. The order of additions follows from the way alone.
void launch_few_rows(const GemmDesc& desc, const FewRowsWay& way, const GemmArguments& arguments,
                     int device, cudaStream_t stream);

// Products of groups by codes alone, of any number of rows: those of a group beyond the tile's read
// its b again. Rows of no group become zeros.
void launch_few_rows_of_groups(const GroupedGemmDesc& desc, const GroupedGemmArguments& arguments,
                               cudaStream_t stream);

namespace few_rows {

constexpr int kMostShared =
    227 << 10;  // bytes of a block on the devices that stages are chosen for

constexpr int kBlockK = 128;  // elements of k that a stage holds, and that a scale of blocks covers

// How a block of threads cuts its work: each of warps_n warps has 16 * column_tiles rows of b,
// warps_k such warps share the blocks of k. Stages are copied ahead, as many as fit.
struct Cut {
  int column_tiles, warps_n, warps_k, stages;

  constexpr int columns() const { return 16 * column_tiles * warps_n; }
};
constexpr Cut kCuts[] = {{1, 1, 4, 4}, {2, 1, 4, 3}, {2, 1, 8, 3}, {2, 2, 4, 3}, {2, 4, 2, 3}};
constexpr int kNumCuts = std::size(kCuts);
constexpr int kCutOfGroups = 1;

constexpr int kMostGroups = 128;  // of a launch

struct Params {
  const std::uint8_t* a;  // bytes of its elements
  const std::uint8_t* b;
  const float* a_scale;
  const float* b_scale;
  const void* bias;
  void* d;
  // Floats from the scale of one row or block of k to the next; rows that share a scale.
  std::int64_t a_row_stride, a_k_stride, b_row_stride, b_k_stride;
  int a_rows, b_rows;
  std::int64_t a_leading, b_leading, d_leading;  // elements from one row to the next
  int m, n, k;
  ElementType out, bias_type;
};

struct GroupsParams {
  Params product;  // without what differs between groups: a's and d's first row, b, its scale, bias
  const std::uint8_t* b[kMostGroups];
  const float* b_scale[kMostGroups];
  const void* bias[kMostGroups];
  const std::int64_t* offsets;  // [groups + 1]
  int rows, groups;             // of all launches
  int first_group, count;       // of this launch
  bool takes_tail;
};

// Bytes of shared memory of the kernel of a cut, and its launch; few_rows.cu compiles them for a
// type of a.
template <ElementType kA>
int shared_bytes(int cut, int m, bool has_blocks);
template <ElementType kA>
void launch(const FewRowsWay& way, bool has_blocks, const Params& params, int device,
            cudaStream_t stream);
// In tiles of `rows` rows, 64 at most; few_rows_groups.cu compiles it for 16 bits.
template <ElementType kA>
void launch_groups(int rows, int split, bool has_blocks, const GroupsParams& params, int device,
                   cudaStream_t stream);

}  // namespace few_rows
}  // namespace fp8core
