// The specification. A thread takes some channels through all documents, row by row, so that the sums of dweight and
// dbias have one order whatever the number of threads.
#include <algorithm>

#include "core/accumulate.h"
#include "core/macros.h"
#include "host/fast_exp.h"
#include "host/parallel.h"
#include "host/scalar.h"
#include "ops/conv/conv.h"

namespace packing_ops {

namespace {

constexpr int64_t kSumRows = 64;
constexpr int64_t kLanes = 64;  // channels at a time, the last ones padded: no result depends on a loop's remainder

template <class Real>
struct Row {
  alignas(64) Real at[kLanes];
};

// Rows of the last `width` positions of a document, those before its first too.
template <class Real>
struct Rows {
  Row<Real> rows[kMaxConvWidth];
  int64_t width;
  Row<Real>& operator[](int64_t position) { return rows[(position + width) % width]; }
};

template <class T, class Real>
PACKING_OPS_INLINE void load(const T* from, int64_t step, int64_t count, Row<Real>& row) {
  for (int64_t c = 0; c < count; ++c) row.at[c] = static_cast<Real>(from[c * step]);
  for (int64_t c = count; c < kLanes; ++c) row.at[c] = Real(0);
}

template <class T, class Real>
PACKING_OPS_INLINE void store(const Row<Real>& row, int64_t step, int64_t count, T* to) {
  for (int64_t c = 0; c < count; ++c) to[c * step] = static_cast<T>(row.at[c]);
}

template <class Real>
PACKING_OPS_INLINE void add_product(const Row<Real>& a, const Row<Real>& b, Row<Real>& sum) {
  for (int64_t c = 0; c < kLanes; ++c) sum.at[c] += a.at[c] * b.at[c];
}

template <class Real>
PACKING_OPS_INLINE void sigmoid(const Row<Real>& x, Row<Real>& gate) {
  Row<Real> power;
  const Real most = sizeof(Real) == 8 ? 700 : 88;  // whose power there is
  for (int64_t c = 0; c < kLanes; ++c) power.at[c] = -x.at[c] < most ? -x.at[c] : most;
  fast_exp(power.at, kLanes, gate.at);
  for (int64_t c = 0; c < kLanes; ++c) gate.at[c] = Real(1) / (Real(1) + gate.at[c]);
}

// Some channels on their way through the documents.
template <class T>
struct Channels {
  using Real = accumulate_t<T>;
  const CausalConvParams& p;
  int64_t first, count;
  Row<Real> taps[kMaxConvWidth] = {};  // by distance: taps[0] is of the row itself
  Row<Real> bias = {};
  Rows<Real> x = {};

  Channels(const CausalConvParams& params, int64_t begin, int64_t end) : p(params), first(begin), count(end - begin) {
    x.width = p.width;
    for (int64_t i = 0; i < p.width; ++i) {
      load(static_cast<const T*>(p.weight) + first * p.width + p.width - 1 - i, p.width, count, taps[i]);
    }
    if (p.bias) load(static_cast<const T*>(p.bias) + first, 1, count, bias);
  }

  int64_t state(int64_t document) const { return (document * p.channels + first) * (p.width - 1); }

  PACKING_OPS_INLINE void begin(int64_t document) {
    for (int64_t j = 0; j + 1 < p.width; ++j) {
      Row<Real>& row = x[j - (p.width - 1)];
      row = {};
      if (p.initial_state) {
        load(static_cast<const T*>(p.initial_state) + state(document) + j, p.width - 1, count, row);
      }
    }
  }

  // Takes the row at `position` of a document in, and makes its sum before the activation.
  PACKING_OPS_INLINE void step(int64_t t, int64_t position, Row<Real>& sum) {
    load(static_cast<const T*>(p.x) + t * p.x_row + first, 1, count, x[position]);
    sum = bias;
    const int64_t reach = p.initial_state ? p.width - 1 : std::min(p.width - 1, position);
    for (int64_t i = reach; i >= 0; --i) add_product(taps[i], x[position - i], sum);
  }
};

template <class T>
PACKING_OPS_INLINE void zero_rows(T* to, int64_t begin, int64_t end, int64_t channels, int64_t first, int64_t count) {
  for (int64_t t = begin; t < end; ++t) std::fill_n(to + t * channels + first, count, T(0));
}

template <class T>
PACKING_OPS_MULTIVERSION void forward(const CausalConvParams& p, int64_t first, int64_t end) {
  using Real = accumulate_t<T>;
  Channels<T> channels(p, first, end);
  Row<Real> sum;
  T* out = static_cast<T*>(p.out);
  for (int64_t d = 0; d < p.documents.num_documents; ++d) {
    const Interval<int64_t> document = p.documents[d];
    channels.begin(d);
    for (int64_t t = document.begin; t < document.end; ++t) {
      channels.step(t, t - document.begin, sum);
      if (p.silu) {
        Row<Real> gate;
        sigmoid(sum, gate);
        for (int64_t c = 0; c < kLanes; ++c) sum.at[c] *= gate.at[c];
      }
      store(sum, 1, end - first, out + t * p.channels + first);
    }
    for (int64_t j = 0; p.final_state && j + 1 < p.width; ++j) {
      T* state = static_cast<T*>(p.final_state) + channels.state(d) + j;
      store(channels.x[document.size() - (p.width - 1) + j], p.width - 1, end - first, state);
    }
  }
  zero_rows(out, p.documents.end(), p.documents.total, p.channels, first, end - first);
}

// dx[s] = sum over i < width of taps[i] * dsum[s + i], from s = 1 - width on: those before 0 are dinitial_state.
template <class T>
struct Gradients {
  using Real = accumulate_t<T>;
  const CausalConvBackwardParams& p;
  Channels<T> channels;
  Rows<Real> dsum = {};
  Row<Real> sums[kMaxConvWidth + 1] = {};   // of dtaps, and after them of dbias
  Row<Real> parts[kMaxConvWidth + 1] = {};  // of the last rows: long sums in float32 would lose too much
  int64_t rows_of_parts = 0;

  Gradients(const CausalConvBackwardParams& params, int64_t first, int64_t end)
      : p(params), channels(params, first, end) {
    dsum.width = p.width;
  }

  PACKING_OPS_INLINE void step(int64_t t, int64_t position) {
    Row<Real> sum;
    Row<Real>& d = dsum[position];
    channels.step(t, position, sum);
    load(static_cast<const T*>(p.dout) + t * p.dout_row + channels.first, 1, channels.count, d);
    if (p.silu) {
      Row<Real> gate;
      sigmoid(sum, gate);
      for (int64_t c = 0; c < kLanes; ++c) {
        d.at[c] *= gate.at[c] * (Real(1) + sum.at[c] * (Real(1) - gate.at[c]));
      }
    }
    for (int64_t c = 0; c < kLanes; ++c) parts[p.width].at[c] += d.at[c];
    const int64_t reach = p.initial_state ? p.width - 1 : std::min(p.width - 1, position);
    for (int64_t i = 0; i <= reach; ++i) add_product(d, channels.x[position - i], parts[i]);
    if (++rows_of_parts == kSumRows) end_parts();
  }

  PACKING_OPS_INLINE void end_parts() {
    for (int64_t i = 0; i <= p.width; ++i) {
      for (int64_t c = 0; c < kLanes; ++c) sums[i].at[c] += parts[i].at[c];
      parts[i] = {};
    }
    rows_of_parts = 0;
  }

  // The row s of a document of `length` rows, once dsum has been made up to s + width - 1.
  PACKING_OPS_INLINE void finish(int64_t document, int64_t start, int64_t length, int64_t s) {
    Row<Real> sum = {};
    for (int64_t i = s < 0 ? -s : 0; i < p.width && s + i < length; ++i) {
      add_product(channels.taps[i], dsum[s + i], sum);
    }
    const int64_t state = channels.state(document), place = s - length + p.width - 1;
    if (p.dfinal_state && place >= 0) {
      Row<Real> more;
      load(static_cast<const T*>(p.dfinal_state) + state + place, p.width - 1, channels.count, more);
      for (int64_t c = 0; c < kLanes; ++c) sum.at[c] += more.at[c];
    }
    if (s >= 0) {
      store(sum, 1, channels.count, static_cast<T*>(p.dx) + (start + s) * p.channels + channels.first);
    } else if (p.dinitial_state) {
      store(sum, p.width - 1, channels.count, static_cast<T*>(p.dinitial_state) + state + s + p.width - 1);
    }
  }
};

template <class T>
PACKING_OPS_MULTIVERSION void backward(const CausalConvBackwardParams& p, int64_t first, int64_t end) {
  Gradients<T> gradients(p, first, end);
  for (int64_t d = 0; d < p.documents.num_documents; ++d) {
    const Interval<int64_t> document = p.documents[d];
    gradients.channels.begin(d);
    for (int64_t position = 0; position < document.size() + p.width - 1; ++position) {
      if (position < document.size()) gradients.step(document.begin + position, position);
      gradients.finish(d, document.begin, document.size(), position - (p.width - 1));
    }
  }
  zero_rows(static_cast<T*>(p.dx), p.documents.end(), p.documents.total, p.channels, first, end - first);
  gradients.end_parts();
  for (int64_t i = 0; i < p.width; ++i) {
    T* to = static_cast<T*>(p.dweight) + first * p.width + p.width - 1 - i;
    store(gradients.sums[i], p.width, end - first, to);
  }
  if (p.dbias) store(gradients.sums[p.width], 1, end - first, static_cast<T*>(p.dbias) + first);
}

template <class Params, class Call>
void for_channels(const Params& p, const Call& call) {
  const int64_t parts = (p.channels + kLanes - 1) / kLanes;
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) call(i * kLanes, std::min((i + 1) * kLanes, p.channels));
  });
}

}  // namespace

void launch_causal_conv1d_cpu(const CausalConvParams& p) {
  dispatch_float(p.dtype, [&](auto zero) {
    for_channels(p, [&](int64_t first, int64_t end) { forward<decltype(zero)>(p, first, end); });
  });
}

void launch_causal_conv1d_backward_cpu(const CausalConvBackwardParams& p) {
  dispatch_float(p.dtype, [&](auto zero) {
    for_channels(p, [&](int64_t first, int64_t end) { backward<decltype(zero)>(p, first, end); });
  });
}

}  // namespace packing_ops
