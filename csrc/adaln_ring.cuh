// The ring: tiles of rows on their way from memory to shared memory. Stage s holds kRows rows of every stream, each
// row padded to the block's width. full[s] counts a tile in; the block barrier at the end of each tile says that a
// stage may be filled again. On sm_90 and later rows come by bulk copies, before that by cp.async.
#pragma once

#include "adaln_common.cuh"

namespace adaln {

constexpr int kColumns = 8;  // columns a thread owns
constexpr int kMaxStages = 8;
constexpr int kMaxStreams = 4;  // x, dy, branch, dresidual_out
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define ADALN_BULK_COPY 1  // cp.async.bulk onto an mbarrier; otherwise cp.async by every thread
#else
#define ADALN_BULK_COPY 0
#endif

struct Stream {
  const char* data;
  int64_t sample_bytes, token_bytes;  // strides
};

struct Ring {
  Stream streams[kMaxStreams];
  int stream_count, stages;
  int row_bytes;               // in memory
  int row_pitch, stage_bytes;  // in the ring

  __device__ __forceinline__ const char* source(int stream, int sample, int token) const {
    const Stream& from = streams[stream];
    return from.data + sample * from.sample_bytes + token * from.token_bytes;
  }
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again%=:\n"
#if ADALN_BULK_COPY
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
      "@!done bra again%=;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Ordinary writes to the ring and to its barriers come before later bulk copies into them.
__device__ __forceinline__ void copy_fence() {
#if ADALN_BULK_COPY
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// Starts rows on their way to L2; a lane of the first warp takes a row of a stream.
template <int kRows>
__device__ __forceinline__ void prefetch_tile(const Ring& ring, int sample, int token, int rows) {
  const int stream = threadIdx.x / kRows, row = threadIdx.x % kRows;
  if (stream < ring.stream_count && row < rows)
    prefetch_to_l2(ring.source(stream, sample, token + row), ring.row_bytes);
}

// Brings up to kRows rows of every stream into one stage. On sm_90 a lane starts one bulk copy of a whole row;
// before, every thread copies its own columns.
template <int kBytes, int kRows>
__device__ __forceinline__ void fill_stage(const Ring& ring, char* stage, uint64_t* full, int sample, int token,
                                           int rows) {
#if ADALN_BULK_COPY
  if (threadIdx.x >= kWarp) return;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(full)),
                 "r"(ring.row_bytes * rows * ring.stream_count)
                 : "memory");
  }
  __syncwarp();
  const int stream = threadIdx.x / kRows, row = threadIdx.x % kRows;
  if (stream >= ring.stream_count || row >= rows) return;
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(stage + (stream * kRows + row) * ring.row_pitch)),
               "l"(ring.source(stream, sample, token + row)), "r"(ring.row_bytes), "r"(shared_address(full))
               : "memory");
#else
  const int offset = threadIdx.x * kColumns * kBytes;
  if (offset < ring.row_bytes) {
    for (int stream = 0; stream < ring.stream_count; ++stream) {
      for (int row = 0; row < rows; ++row) {
        const char* source = ring.source(stream, sample, token + row) + offset;
        const uint32_t target = shared_address(stage + (stream * kRows + row) * ring.row_pitch + offset);
#pragma unroll
        for (int i = 0; i < kColumns * kBytes; i += 16)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + i), "l"(source + i) : "memory");
      }
    }
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(full)) : "memory");
#endif
}

}  // namespace adaln
