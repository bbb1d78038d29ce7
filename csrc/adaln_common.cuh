// What all kernels share: element types, where a row lies and which group it belongs to, sums over a warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "adaln.h"

namespace adaln {

constexpr int kWarp = 32;

// ---- element types ---------------------------------------------------------------------------------------------
// A typed kernel moves 16 bytes at a time: Width elements. The fp32 values of a vector exist only while in use.

// A type of 2 bytes: `two(word, low, high)` and `pair(low, high)` are its own.
template <class T>
struct TwoBytes {
  static constexpr int kBytes = 2, kWidth = 8;
  static __device__ __forceinline__ void unpack(const uint4& v, float (&f)[8]) {
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) T::two(word[i], f[2 * i], f[2 * i + 1]);
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[8]) {
    return make_uint4(T::pair(f[0], f[1]), T::pair(f[2], f[3]), T::pair(f[4], f[5]), T::pair(f[6], f[7]));
  }
};

struct Bf16 : TwoBytes<Bf16> {
  static constexpr AdalnDtype kDtype = ADALN_BF16;
  static __device__ __forceinline__ void two(uint32_t word, float& low, float& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&h);
  }
};

struct Fp16 : TwoBytes<Fp16> {
  static constexpr AdalnDtype kDtype = ADALN_F16;
  static __device__ __forceinline__ void two(uint32_t word, float& low, float& high) {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&word));
    low = both.x;
    high = both.y;
  }
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const __half2 h = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&h);
  }
};

struct F32 {
  static constexpr AdalnDtype kDtype = ADALN_F32;
  static constexpr int kBytes = 4, kWidth = 4;
  static __device__ __forceinline__ void unpack(const uint4& v, float (&f)[4]) {
    f[0] = __uint_as_float(v.x);
    f[1] = __uint_as_float(v.y);
    f[2] = __uint_as_float(v.z);
    f[3] = __uint_as_float(v.w);
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[4]) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
  }
};

// Four elements of a row, 8 or 16 bytes: what a lane takes at a time where it meets fp32 modulation, so that both are
// read without gaps between lanes.
template <class T>
struct Four {
  using Packed = std::conditional_t<T::kBytes == 4, uint4, uint2>;
  static __device__ __forceinline__ void unpack(const Packed& v, float (&f)[4]) {
    if constexpr (T::kBytes == 4) {
      T::unpack(v, f);
    } else {
      float eight[8];
      T::unpack(make_uint4(v.x, v.y, 0, 0), eight);
#pragma unroll
      for (int i = 0; i < 4; ++i) f[i] = eight[i];
    }
  }
  static __device__ __forceinline__ Packed pack(const float (&f)[4]) {
    if constexpr (T::kBytes == 4) return T::pack(f);
    else return make_uint2(T::pair(f[0], f[1]), T::pair(f[2], f[3]));
  }
};

__host__ __device__ constexpr int element_bytes(AdalnDtype dtype) { return dtype == ADALN_F32 ? 4 : 2; }

// ---- streaming accesses ----------------------------------------------------------------------------------------
// Rows pass through once: neither their loads nor their stores displace the modulation from L1.

__device__ __forceinline__ void load_stream(const void* from, uint4& v) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
}
__device__ __forceinline__ void load_stream(const void* from, uint2& v) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
}
__device__ __forceinline__ void store_stream(void* to, const uint4& v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_stream(void* to, const uint2& v) {
  asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}

// ---- accesses to any type ----------------------------------------------------------------------------------------

// One element of any type at any alignment that the type itself allows.
__device__ __forceinline__ float load_one(const void* data, AdalnDtype dtype, int64_t i) {
  if (dtype == ADALN_F32) return static_cast<const float*>(data)[i];
  if (dtype == ADALN_F16) return __half2float(static_cast<const __half*>(data)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}

__device__ __forceinline__ void store_one(void* data, AdalnDtype dtype, int64_t i, float value) {
  if (dtype == ADALN_F32) static_cast<float*>(data)[i] = value;
  else if (dtype == ADALN_F16) static_cast<__half*>(data)[i] = __float2half_rn(value);
  else static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
}

__device__ __forceinline__ float round_to(AdalnDtype dtype, float value) {
  if (dtype == ADALN_F32) return value;
  if (dtype == ADALN_F16) return __half2float(__float2half_rn(value));
  return __bfloat162float(__float2bfloat16_rn(value));
}

// W (4 or 8) elements of any type, aligned to their own size: 8, 16 or 32 bytes. The branch on the type is uniform.
template <int W>
__device__ __forceinline__ void load_some(const void* data, AdalnDtype dtype, int64_t i, float (&f)[W]) {
  if (dtype == ADALN_F32) {
    const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(data) + i);
#pragma unroll
    for (int k = 0; k < W / 4; ++k) {
      const float4 v = __ldg(p + k);
      f[4 * k] = v.x;
      f[4 * k + 1] = v.y;
      f[4 * k + 2] = v.z;
      f[4 * k + 3] = v.w;
    }
    return;
  }
  uint4 v = make_uint4(0, 0, 0, 0);
  const uint16_t* p = static_cast<const uint16_t*>(data) + i;
  if constexpr (W == 8) {
    v = __ldg(reinterpret_cast<const uint4*>(p));
  } else {
    const uint2 half = __ldg(reinterpret_cast<const uint2*>(p));
    v.x = half.x;
    v.y = half.y;
  }
  float eight[8];
  if (dtype == ADALN_F16) Fp16::unpack(v, eight);
  else Bf16::unpack(v, eight);
#pragma unroll
  for (int k = 0; k < W; ++k) f[k] = eight[k];
}

// The norm's own weight and bias, where it has them, on W normalised values from a column on.
template <int W, class Op>
__device__ __forceinline__ void apply_affine(const Op& op, int64_t column, float (&h)[W]) {
  float p[W];
  if (op.weight.data) {
    load_some<W>(op.weight.data, op.weight.dtype, column, p);
#pragma unroll
    for (int i = 0; i < W; ++i) h[i] *= p[i];
  }
  if (op.bias.data) {
    load_some<W>(op.bias.data, op.bias.dtype, column, p);
#pragma unroll
    for (int i = 0; i < W; ++i) h[i] += p[i];
  }
}

template <int W>
__device__ __forceinline__ void store_some(void* data, AdalnDtype dtype, int64_t i, const float (&f)[W]) {
  if (dtype == ADALN_F32) {
    float4* p = reinterpret_cast<float4*>(static_cast<float*>(data) + i);
#pragma unroll
    for (int k = 0; k < W / 4; ++k) p[k] = make_float4(f[4 * k], f[4 * k + 1], f[4 * k + 2], f[4 * k + 3]);
    return;  // not store_stream(): where W == 8 only L1 joins the two halves of each 32 bytes
  }
  uint32_t word[W / 2];
#pragma unroll
  for (int k = 0; k < W / 2; ++k)
    word[k] = dtype == ADALN_F16 ? Fp16::pair(f[2 * k], f[2 * k + 1]) : Bf16::pair(f[2 * k], f[2 * k + 1]);
  uint16_t* p = static_cast<uint16_t*>(data) + i;
  if constexpr (W == 8) store_stream(p, make_uint4(word[0], word[1], word[2], word[3]));
  else store_stream(p, make_uint2(word[0], word[1]));
}

// Marks a kernel whose parameters (modulation, weight, bias) and row outputs have types known only at run time.
struct Any {};

template <class P>
__device__ __forceinline__ constexpr AdalnDtype type_of(AdalnDtype dtype) {
  if constexpr (std::is_same_v<P, Any>) return dtype;
  else return P::kDtype;
}
// Element `i` of a row whose type is P, or `dtype` where P is Any; W elements from there.
template <class P>
__device__ __forceinline__ void* at(void* row, P, AdalnDtype dtype, int i) {
  return static_cast<char*>(row) + i * element_bytes(type_of<P>(dtype));
}
template <class P, int W>
__device__ __forceinline__ void load_parameter(const void* row, AdalnDtype dtype, int i, float (&f)[W]) {
  load_some<W>(row, type_of<P>(dtype), i, f);
}
template <class P, int W>
__device__ __forceinline__ void store_parameter(void* row, AdalnDtype dtype, int i, const float (&f)[W]) {
  store_some<W>(row, type_of<P>(dtype), i, f);
}
template <class P, class T>
using row_type = std::conditional_t<std::is_same_v<P, Any>, Any, T>;  // of rows that share T in the typed kernels

// ---- rows and groups -------------------------------------------------------------------------------------------

// Division by a number fixed at launch: a multiply and a shift below 2^31, a real division above.
struct Divider {
  int64_t divisor;
  uint32_t multiplier, shift;

  static Divider of(int64_t divisor) {
    Divider d{divisor, 0, 0};
    if (divisor < 1 || divisor > INT32_MAX) return d;
    while ((uint64_t{1} << d.shift) < static_cast<uint64_t>(divisor)) ++d.shift;
    const uint64_t excess = (uint64_t{1} << d.shift) - static_cast<uint64_t>(divisor);
    d.multiplier = static_cast<uint32_t>((excess << 32) / static_cast<uint64_t>(divisor) + 1);
    return d;
  }
  __device__ __forceinline__ int64_t divide(int64_t n) const {
    if (n > INT32_MAX || divisor > INT32_MAX) return n / divisor;
    const uint32_t small = static_cast<uint32_t>(n);
    return (__umulhi(small, multiplier) + small) >> shift;
  }
};

struct Place {
  int64_t sample, token, group;  // group: inside the sample
};

// Rows are numbered sample-major: row = sample * tokens + token, whatever the layout in memory.
struct Geometry {
  int64_t rows, samples, tokens, groups_per_sample, tokens_per_group, token_offset;
  int features;
  AdalnGroupMode mode;
  const int32_t* cu_seqlens;
  Divider by_tokens, by_group;

  template <class Op>
  static Geometry of(const Op& op) {
    Geometry g{};
    g.rows = op.samples * op.tokens;
    g.samples = op.samples;
    g.tokens = op.tokens;
    g.features = static_cast<int>(op.features);
    g.mode = op.grouping.mode;
    g.groups_per_sample = g.mode == ADALN_GROUP_NONE ? 1 : op.grouping.groups;
    g.tokens_per_group = g.mode == ADALN_PER_GROUP ? op.grouping.tokens_per_group : op.tokens;
    g.token_offset = g.mode == ADALN_PER_GROUP ? op.grouping.token_offset : 0;
    g.cu_seqlens = op.grouping.cu_seqlens;
    g.by_tokens = Divider::of(op.tokens);
    g.by_group = Divider::of(g.tokens_per_group);
    return g;
  }
  __device__ __forceinline__ Place place(int64_t row) const {
    Place p;
    p.sample = row < tokens ? 0 : by_tokens.divide(row);
    p.token = row - p.sample * tokens;
    p.group = mode == ADALN_PACKED ? packed_group(p.token)
              : groups_per_sample == 1 ? 0
                                       : by_group.divide(p.token + token_offset);
    return p;
  }
  // Number of the group in the whole tensor. Without modulation all rows form one group.
  __device__ __forceinline__ int64_t group_index(const Place& p) const {
    return mode == ADALN_GROUP_NONE ? 0 : p.sample * groups_per_sample + p.group;
  }
  // First row after `row` that lies in another sample or group: up to there addresses grow by one stride.
  __device__ __forceinline__ int64_t run_end(int64_t row, const Place& p) const {
    int64_t left = tokens - p.token;
    if (mode == ADALN_PACKED) {
      if (p.group + 1 < groups_per_sample) left = min(left, cu_seqlens[p.group + 1] - p.token);
    } else if (groups_per_sample > 1) {
      left = min(left, (p.group + 1) * tokens_per_group - token_offset - p.token);
    }
    return row + max(left, int64_t{1});
  }
  // Tokens of the place's sample and group that come before it.
  __device__ __forceinline__ int64_t tokens_before(const Place& p) const {
    if (mode == ADALN_PACKED) return p.token - __ldg(cu_seqlens + p.group);
    if (groups_per_sample == 1) return p.token;
    return min(p.token, p.token + token_offset - p.group * tokens_per_group);
  }
  // Rows [first, last) of a group; empty when a shard holds none of its rows.
  __device__ __forceinline__ void group_rows(int64_t index, int64_t& first, int64_t& last) const {
    first = 0;
    last = rows;
    if (mode == ADALN_GROUP_NONE) return;
    const int64_t sample = index / groups_per_sample, group = index - sample * groups_per_sample;
    if (mode == ADALN_PACKED) {
      first = group == 0 ? 0 : cu_seqlens[group];
      last = group + 1 == groups_per_sample ? tokens : cu_seqlens[group + 1];
      return;
    }
    first = min(max(group * tokens_per_group - token_offset, int64_t{0}), tokens) + sample * tokens;
    last = min(max((group + 1) * tokens_per_group - token_offset, int64_t{0}), tokens) + sample * tokens;
    if (groups_per_sample == 1) {
      first = sample * tokens;
      last = first + tokens;
    }
  }
  int64_t group_count() const { return mode == ADALN_GROUP_NONE ? 1 : groups_per_sample * samples; }

 private:
  __device__ __forceinline__ int64_t packed_group(int64_t token) const {  // last g with cu_seqlens[g] <= token
    int64_t low = 0, high = groups_per_sample - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (__ldg(cu_seqlens + middle) <= token) low = middle;
      else high = middle - 1;
    }
    return low;
  }
};

template <class Pointer>
__host__ __device__ __forceinline__ Pointer* offset_elements(Pointer* data, AdalnDtype dtype, int64_t elements) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  return reinterpret_cast<Pointer*>(reinterpret_cast<Byte*>(data) + elements * element_bytes(dtype));
}
__device__ __forceinline__ void* row_of(const AdalnRows& t, const Place& p) {
  return offset_elements(t.data, t.dtype, p.sample * t.sample_stride + p.token * t.token_stride);
}
__device__ __forceinline__ void* row_of(const AdalnModulation& m, const Place& p) {
  return offset_elements(m.data, m.dtype, p.sample * m.sample_stride + p.group * m.group_stride);
}

// ---- sums ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(~0u, v, lane);
  return v;
}

// The same sum in every thread of a block of at most 1,024 threads.
__device__ __forceinline__ float block_sum(float v) {
  __shared__ float warps[kWarp];
  v = warp_sum(v);
  __syncthreads();  // the previous sum has been read
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = v;
  __syncthreads();
  return warp_sum(threadIdx.x % kWarp < blockDim.x / kWarp ? warps[threadIdx.x % kWarp] : 0.f);
}

// Sums N values over a warp with N - 1 + log2(32 / N) shuffles: each step halves what a lane carries. Lane l ends up
// with the sum of value l / (32 / N).
template <int N>
__device__ __forceinline__ float warp_sums(float (&v)[N]) {
  const int lane = threadIdx.x % kWarp;
  int reach = kWarp / 2;
#pragma unroll
  for (int n = N / 2; n >= 1; n /= 2) {
    const bool upper = lane & reach;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float keep = upper ? v[n + i] : v[i];
      const float send = upper ? v[i] : v[n + i];
      v[i] = keep + __shfl_xor_sync(~0u, send, reach);
    }
    reach /= 2;
  }
  float sum = v[0];
#pragma unroll
  for (int step = kWarp / 2 / N; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// Makes the compiler unpack a vector again instead of keeping its fp32 values, twice the registers, between two uses.
__device__ __forceinline__ void keep_packed(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}
__device__ __forceinline__ void keep_packed(uint2& v) { asm volatile("" : "+r"(v.x), "+r"(v.y)); }

// ---- launches that overlap (csrc/adaln_launch.h, launch_early) ---------------------------------------------------

// Before the first access to memory: everything the previous kernel of the stream wrote is there. Only
// prefetch_to_l2() may come before it: that moves bytes, whatever they are by then, and nothing is read.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may set up its blocks as soon as every block of this one has got here. Called after
// wait_for_previous(), so that whatever this kernel was given is there for the next one too.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Reads a piece of a row, 4-byte aligned, into L1, a word of every sector: by copies to a word of shared memory, the
// thread's own, that nobody looks at and no register waits for. (prefetch.global.L1 costs more than it saves.)
// wait_for_l1() before the block ends.
__device__ __forceinline__ void read_to_l1(const char* from, int bytes, uint32_t* own) {
  const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(own));
  constexpr int kSector = 32;
#pragma unroll 1
  for (int i = threadIdx.x % kWarp * kSector; i < bytes; i += kWarp * kSector)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(from + i) : "memory");
}
__device__ __forceinline__ void wait_for_l1() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Starts moving a piece of a row, 16-byte aligned, from memory to L2 (sm_90 and later; before, nothing happens).
__device__ __forceinline__ void prefetch_to_l2(const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

}  // namespace adaln
