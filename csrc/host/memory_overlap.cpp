#include "host/memory_overlap.h"

#include <algorithm>

#include "host/tensor_check.h"

namespace packing_ops {

namespace {

// How far apart two rows (of the last dimension) are: `steps` times `stride` for each dimension, first to last steps.
struct Distance {
  int64_t stride;  // elements
  int64_t first;
  int64_t last;
};

// Whether start + sum of steps * stride is between -below and above, for any steps: how far a row of that width starts
// from one of width `above` that it overlaps. Exact; quick since the largest stride is first and what the others can
// make up for leaves it few steps.
bool comes_near(int64_t start, const Distance* distance, const Distance* end, int64_t below, int64_t above) {
  if (distance == end) return -below < start && start < above;
  int64_t lowest = 0;
  int64_t highest = 0;
  for (const Distance* d = distance + 1; d < end; ++d) {
    lowest += d->first * d->stride;
    highest += d->last * d->stride;
  }
  // -below < start + step * stride + (lowest to highest) < above
  const int64_t stride = distance->stride;
  const auto floor_div = [](int64_t a, int64_t b) { return a / b - (a % b < 0); };
  const int64_t first = std::max(distance->first, floor_div(-below - highest - start, stride) + 1);
  const int64_t last = std::min(distance->last, -floor_div(-above + lowest + start, stride) - 1);
  for (int64_t step = first; step <= last; ++step) {
    if (comes_near(start + step * stride, distance + 1, end, below, above)) return true;
  }
  return false;
}

// Steps of one tensor and those of another with the same stride are one entry.
void add(std::vector<Distance>& distances, int64_t stride, int64_t first, int64_t last) {
  if (first == last || stride == 0) return;
  for (Distance& d : distances) {
    if (d.stride != stride) continue;
    d.first += first;
    d.last += last;
    return;
  }
  distances.push_back({stride, first, last});
}

void sort(std::vector<Distance>& distances) {
  std::sort(distances.begin(), distances.end(),
            [](const Distance& a, const Distance& b) { return a.stride > b.stride; });
}

}  // namespace

void check_no_overlap(const Tensor& t, const char* name) {
  if (t.numel() == 0) return;
  const int64_t rank = t.dim() - 1;
  const int64_t width = t.size(rank);
  std::vector<Distance> outer;
  bool overlap = false;
  for (int64_t i = 0; i < rank; ++i) {
    if (t.size(i) == 1) continue;
    overlap = overlap || t.stride(i) == 0;
    outer.push_back({t.stride(i), 1 - t.size(i), t.size(i) - 1});
  }
  sort(outer);
  // Two different rows: they differ in some dimension, the first one forward, and in those after it as they like.
  for (auto d = outer.begin(); d != outer.end() && !overlap; ++d) {
    const Distance full = *d;
    *d = {full.stride, 1, full.last};
    overlap = comes_near(0, &*d, outer.data() + outer.size(), width, width);
    *d = full;
  }
  if (!overlap) return;
  std::string strides;
  for (int64_t i = 0; i <= rank; ++i) strides += (i ? ", " : "") + std::to_string(t.stride(i));
  fail(name, ": expected memory of its own for every element (it is changed in place), got strides [", strides, "] of ",
       describe(t));
}

void check_no_overlap(const Tensor& t, const char* name, const Tensor& other, const char* other_name) {
  if (t.numel() == 0 || other.numel() == 0) return;
  const int64_t apart = reinterpret_cast<intptr_t>(t.data_ptr()) - reinterpret_cast<intptr_t>(other.data_ptr());
  const auto size = static_cast<int64_t>(t.element_size());
  const auto other_size = static_cast<int64_t>(other.element_size());
  std::vector<Distance> distances;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) add(distances, t.stride(i) * size, 0, t.size(i) - 1);
  for (int64_t i = 0; i + 1 < other.dim(); ++i) add(distances, other.stride(i) * other_size, 1 - other.size(i), 0);
  sort(distances);
  const int64_t width = size * t.size(t.dim() - 1);
  const int64_t other_width = other_size * other.size(other.dim() - 1);
  if (!comes_near(apart, distances.data(), distances.data() + distances.size(), width, other_width)) return;
  fail(name, ": expected memory of its own (it is changed in place), got some of ", other_name, "'s");
}

}  // namespace packing_ops
