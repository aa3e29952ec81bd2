// Whether a plan belongs to a call: it may be older than the values in cu_seqlens, or built for other heads.
#pragma once

#include "core/fault.h"
#include "core/launch.cuh"
#include "ops/attention/cuda/plan.h"

namespace packing_ops::attention {

// Called by `count` threads of the grid, which share the entries of cu_seqlens. If the plan is of others, the kernel
// still runs, with the plan's documents (a forward of other tiles without them), and the fault flag reports
// it.
__device__ inline void check_plan(const PlanView& plan, const Documents& documents_q, const Documents& documents_k,
                                  const FaultFlag& fault, int64_t thread = thread_id(),
                                  int64_t count = thread_count()) {
  if (thread == 0 && plan.data[PlanView::kGeometry] != plan.geometry()) fault.raise(Fault::kPlanOfOtherHeads, 0);
  const int32_t* planned_cu_seqlens_q = plan.planned_cu_seqlens_q();
  const int32_t* planned_cu_seqlens_k = plan.planned_cu_seqlens_k();
  const bool pages = plan.pages.used;
  const int32_t* values_k = pages ? plan.pages.seqused_k : documents_k.cu_seqlens;
  for (int64_t i = thread; i <= plan.num_documents; i += count) {
    const bool same_keys = (pages && i == plan.num_documents) || values_k[i] == planned_cu_seqlens_k[i];
    if (documents_q.cu_seqlens[i] != planned_cu_seqlens_q[i] || !same_keys) {
      fault.raise(Fault::kPlanOfOtherDocuments, i);
    }
  }
}

// The same for visible_end, by its values.
__device__ inline void check_visible_end(const PlanView& plan, const int32_t* visible_end, const FaultFlag& fault,
                                         int64_t thread = thread_id(), int64_t count = thread_count()) {
  if (visible_end == nullptr) return;
  const int32_t end = plan.data[PlanView::kEndQ];
  for (int64_t i = thread; i < end; i += count) {
    if (visible_end[i] != plan.ends.end[i]) fault.raise(Fault::kPlanOfOtherVisibleEnd, i);
  }
}

}  // namespace packing_ops::attention
