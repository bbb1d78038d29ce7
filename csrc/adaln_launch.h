// Host side: which kernel takes an operator and how it is launched. All heuristics live here, with their reasons.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "adaln_common.cuh"

namespace adaln {

cudaError_t forward(const AdalnForward& op, cudaStream_t stream);

struct Device {
  int multiprocessors, compute_capability, shared_bytes;  // shared memory of a multiprocessor
};
inline const Device& current_device() {
  static Device known[64] = {};
  int id = 0;
  if (cudaGetDevice(&id) != cudaSuccess || id >= 64) id = 0;
  Device& device = known[id];
  if (device.multiprocessors == 0) {
    int major = 0, minor = 0, count = 0;
    cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, id);
    device.compute_capability = 10 * major + minor;
    device.multiprocessors = count;
  }
  return device;
}

// Starts a kernel whose blocks may be set up while the previous kernel of the stream still drains (sm_90 and later);
// the kernel itself waits, wait_for_previous(), before it touches memory.
template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared_bytes,
                         cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = current_device().compute_capability >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// A typed kernel moves `width` elements at a time: every row of every tensor has to start on such a boundary (its own
// type's: 8 fp32 values are 32 bytes, but only 16-byte accesses are made).
template <class Tensor>
bool aligned(const Tensor& t, int width, std::initializer_list<int64_t> strides) {
  if (!t.data) return true;
  const int64_t bytes = std::min(16, width * element_bytes(t.dtype));
  if (reinterpret_cast<uintptr_t>(t.data) % bytes != 0) return false;
  return std::all_of(strides.begin(), strides.end(),
                     [&](int64_t stride) { return stride * element_bytes(t.dtype) % bytes == 0; });
}
inline bool all_aligned(int width, std::initializer_list<AdalnRows> rows,
                        std::initializer_list<AdalnModulation> modulation,
                        std::initializer_list<AdalnVector> vectors) {
  return std::all_of(rows.begin(), rows.end(),
                     [&](auto& t) { return aligned(t, width, {t.sample_stride, t.token_stride}); }) &&
         std::all_of(modulation.begin(), modulation.end(),
                     [&](auto& t) { return aligned(t, width, {t.sample_stride, t.group_stride}); }) &&
         std::all_of(vectors.begin(), vectors.end(), [&](auto& t) { return aligned(t, width, {}); });
}

// ---- a team of warps a row -------------------------------------------------------------------------------------

struct RowPlan {
  int vectors;     // of a row in each lane
  int team_warps;  // warps that share a row
  unsigned blocks, threads;
};

// Vectors a lane that the kernels are built for (fours of elements in the forward), and threads of a block at most:
// more vectors put more bytes in flight a warp and leave fewer warps to join; 1,024 threads leave 64 registers each, 512
// leave 128.
inline std::initializer_list<int> forward_fours(int element_bytes, bool branch) {
  static constexpr std::initializer_list<int> kFew = {2, 4}, kSome = {4, 6, 8}, kMany = {4, 8, 10, 12};
  return element_bytes == 4 ? kFew : branch ? kSome : kMany;
}
constexpr std::initializer_list<int> kBackwardVectors = {2, 4};
constexpr std::initializer_list<int> kBackwardBranchVectors = {2};
constexpr int kForwardThreads = 1024, kBackwardThreads = 512;

// vectors == 0: the row is too long, or there are too many rows for one launch.
inline RowPlan plan_rows(const Geometry& geometry, int width, std::initializer_list<int> choices, int max_threads) {
  RowPlan plan{};
  for (const int vectors : choices) {
    const int warps = (geometry.features + vectors * kWarp * width - 1) / (vectors * kWarp * width);
    if (warps * kWarp > max_threads) continue;
    // The fewest warps to a row, then the fewest idle lanes: bytes in flight a warp matter more than lanes (D = 5120,
    // forward: 4 warps of 6 vectors, a sixth of them idle, 0.95 of the copy rate; 5 of 4, none idle, 0.88).
    if (plan.vectors == 0 || warps < plan.team_warps) {
      plan.vectors = vectors;
      plan.team_warps = warps;
    }
  }
  if (plan.vectors == 0) return plan;
  // Small blocks start and end on their own. A team of one warp is a block: 32 of them fill an SM.
  int teams = plan.team_warps == 1 ? 1 : std::max(1, 4 / plan.team_warps);
  plan.threads = teams * plan.team_warps * kWarp;
  const int64_t blocks = (geometry.rows + teams - 1) / teams;
  if (blocks > INT32_MAX) return RowPlan{};
  plan.blocks = static_cast<unsigned>(blocks);
  return plan;
}

// What the forward does before its time.
// Groups: when every SM comes to a new one at the same time, all wait for the same few lines of modulation. Either the
// blocks walk several runs of rows side by side (log2 here), so that most go on meanwhile; then L1 has to hold the
// modulation of all runs. Or, with a branch, the first rows of a group are announced: a block that comes `ahead` turns
// before one of them reads the group's modulation into its SM's L1; `announced` rows do so, a few for each SM. That
// wins wherever groups are longer than the way ahead (D = 3072, 42 groups: 0.94; runs at most 0.88).
// Rows: those of the first wave of blocks start on their way from memory to L2 before the previous kernel has ended,
// and from each block the row that is `ahead` turns further on. It pays with a branch (3%) and where groups change. Two
// waves ahead are more than L2 holds beside the rows just written, and cost a third of the speed.
// One stream whose groups last for waves is faster without any of this: 2 to 4%.
struct Ahead {
  int run_bits, first_blocks, ahead, announced;
};
constexpr int kRunBits = 3;
constexpr int kAheadPercent = 50;             // of a wave
constexpr int kResidentThreads = 1024;        // of a multiprocessor, at 64 registers
constexpr int kAnnouncedRows = 3;             // a multiprocessor
constexpr int kModulationBytes = 200 * 1024;  // that L1 holds beside all else
constexpr int kLongWaves = 2;
inline Ahead plan_ahead(const Geometry& geometry, const RowPlan& plan, bool branch, bool announces,
                        int64_t modulation_bytes) {
  const int multiprocessors = current_device().multiprocessors;
  const int blocks = multiprocessors * (kResidentThreads / static_cast<int>(plan.threads));
  const int wave = blocks * (static_cast<int>(plan.threads) / kWarp / plan.team_warps);
  const bool grouped = geometry.group_count() > 1 && geometry.groups_per_sample < geometry.tokens;
  const int64_t group_rows = geometry.rows / std::max<int64_t>(geometry.group_count(), 1);
  if (!branch && (!grouped || group_rows >= kLongWaves * wave)) return {};
  Ahead early{0, blocks, wave * kAheadPercent / 100, 0};
  if (!grouped) return early;
  if (announces && group_rows >= early.ahead) {
    early.announced = std::min(early.ahead, kAnnouncedRows * multiprocessors);
    return early;
  }
  early.run_bits = kRunBits;
  while (early.run_bits > 1 && modulation_bytes << early.run_bits > kModulationBytes) --early.run_bits;
  return early;
}

// The kernels for any type: a block a row, no wider than the row, striding over the rows if there are too many.
inline unsigned any_blocks(const Geometry& geometry) {
  return static_cast<unsigned>(std::min<int64_t>(geometry.rows, INT32_MAX));
}
inline unsigned any_threads(const Geometry& geometry) {
  return std::min(256, (geometry.features + kWarp - 1) / kWarp * kWarp);
}

}  // namespace adaln
