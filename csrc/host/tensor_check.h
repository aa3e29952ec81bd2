// Argument checks. Every message names the argument, what was wanted and what was given.
#pragma once

#include <initializer_list>
#include <string>

#include "core/error.h"
#include "host/tensor_view.h"

namespace packing_ops {

// As Python names it, without "torch.".
const char* dtype_name(torch::headeronly::ScalarType dtype);
// "float32 [2, 3] on cpu"
std::string describe(const Tensor& t);

void check_dtype(const Tensor& t, const char* name, std::initializer_list<DType> allowed);
void check_rank(const Tensor& t, const char* name, int64_t rank);
// `wanted` says the shape in the caller's words, for example "[batch, seqlen] like attention_mask".
void check_shape(const Tensor& t, const char* name, const std::vector<int64_t>& shape, const char* wanted);
void check_same_device(const Tensor& t, const char* name, const Tensor& other, const char* other_name);
void check_same_dtype(const Tensor& t, const char* name, const Tensor& other, const char* other_name);
// An integer that is written into `t` (int32 or int64).
void check_fits(int64_t value, const char* name, const Tensor& t, const char* t_name);
void check_last_dim_contiguous(const Tensor& t, const char* name);

// Slots of a packed row: cu_seqlens are int32, so it is never longer than they can tell.
void check_total(int64_t total, const char* name);

// int32 or int64 [num_documents + 1] on the device of `other`; int64 become int32, so keep the tensor until the launch.
// On the CPU the values are checked too: they start at 0, never decrease and end at most at `total`; a CUDA kernel that
// reads them calls flag_cu_seqlens instead.
void take_cu_seqlens(Tensor& cu_seqlens, const char* name, int64_t total, const Tensor& other, const char* other_name);

}  // namespace packing_ops
