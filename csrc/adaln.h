// The fused AdaLN operators as a C interface: raw pointers, strides in elements, a stream; no torch headers.
//
//   r = x + gate * branch                 (only with a branch; rounded to residual_out's dtype)
//   y = LN(r) * (1 + scale) + shift       LN(r) = (r - mean) * rstd * weight + bias over the last dimension
//
// One pair of functions serves the three operators:
//   adaln           branch.data == nullptr
//   residual_adaln  branch.data and y.data given
//   gated_residual  branch.data given, y.data == nullptr (forward); dy.data == nullptr (backward)
// A null `data` means "absent": an input that is not part of the operator, or a gradient nobody asked for.
#pragma once

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { ADALN_F32 = 0, ADALN_F16 = 1, ADALN_BF16 = 2 } AdalnDtype;
typedef enum { ADALN_LAYER_NORM = 0, ADALN_RMS_NORM = 1 } AdalnNorm;
typedef enum { ADALN_ONE_PASS = 0, ADALN_DTILE = 1 } AdalnBackwardKind;

// Which rows share a modulation row ("group").
//   NONE       no shift, scale or gate (weight and bias may still be there)
//   PER_GROUP  group = (token + token_offset) / tokens_per_group inside the row's own sample; groups rows a sample.
//              Per sample: groups = 1, tokens_per_group = tokens. Per token: groups = tokens, tokens_per_group = 1.
//              Needs token_offset + tokens <= groups * tokens_per_group.
//   PACKED     samples == 1; sequence g owns the tokens cu_seqlens[g] <= token < cu_seqlens[g + 1].
//              groups = number of sequences; cu_seqlens: int32, on the device, groups + 1 entries, from 0 to tokens.
typedef enum { ADALN_GROUP_NONE = 0, ADALN_PER_GROUP = 1, ADALN_PACKED = 2 } AdalnGroupMode;

typedef struct {
  AdalnGroupMode mode;
  int64_t groups;
  int64_t tokens_per_group;
  int64_t token_offset;
  const int32_t* cu_seqlens;
} AdalnGrouping;

// [samples, tokens, features] with the last dimension contiguous. Both layouts are strides of this one view:
// bsd contiguous has strides (tokens * features, features), sbd has (features, samples * features). Stride 0
// (an expanded gradient) is fine for an input. Any alignment that the dtype itself needs.
typedef struct {
  void* data;
  AdalnDtype dtype;
  int64_t sample_stride;
  int64_t token_stride;
} AdalnRows;

// shift, scale or gate: row (sample, group) starts at data + sample * sample_stride + group * group_stride.
typedef struct {
  void* data;
  AdalnDtype dtype;
  int64_t sample_stride;
  int64_t group_stride;
} AdalnModulation;

// weight or bias: `features` contiguous elements.
typedef struct {
  void* data;
  AdalnDtype dtype;
} AdalnVector;

typedef struct {
  int64_t samples, tokens, features;  // samples * tokens may be 0; features >= 1
  AdalnGrouping grouping;
  AdalnNorm norm;
  float eps;
  AdalnRows x;  // `residual` when there is a branch
  AdalnRows branch;
  AdalnModulation shift, scale, gate;  // each may be absent
  AdalnVector weight, bias;
  AdalnRows residual_out;  // needed with a branch
  AdalnRows y;
  float* mean;  // [samples * tokens], sample-major; absent with rstd when no backward follows
  float* rstd;  // (RMS norm writes no mean)
} AdalnForward;

// Inputs as given to the forward, which saves nothing else: with a branch r is formed again from x and branch.
typedef struct {
  int64_t samples, tokens, features;
  AdalnGrouping grouping;
  AdalnNorm norm;
  AdalnBackwardKind kind;
  AdalnRows x, branch;
  AdalnDtype residual_dtype;  // dtype residual_out had in the forward
  AdalnRows dy;               // absent: y was not used, or gated_residual
  AdalnRows dresidual_out;    // absent: residual_out was not used further, or plain adaln
  AdalnModulation scale, gate;
  AdalnVector weight, bias;
  const float* mean;  // not read with RMS norm
  const float* rstd;
  AdalnRows dx, dbranch;  // dx: gradient of x (= `residual`)
  AdalnModulation dshift, dscale, dgate;  // every row is written, zeros for a group without rows
  AdalnVector dweight, dbias;
  void* workspace;  // adaln_backward_workspace() bytes, 256-byte aligned; contents undefined before and after
} AdalnBackward;

// All launches go to `stream` on the current device; nothing synchronises, allocates or reads device memory from
// the host. A wrong argument returns cudaErrorInvalidValue without a launch.
cudaError_t adaln_forward(const AdalnForward* op, cudaStream_t stream);
cudaError_t adaln_backward(const AdalnBackward* op, cudaStream_t stream);

// Bytes of scratch memory that adaln_backward() needs for this op (its `workspace` field is ignored here); may be 0.
size_t adaln_backward_workspace(const AdalnBackward* op);

#ifdef __cplusplus
}
#endif
