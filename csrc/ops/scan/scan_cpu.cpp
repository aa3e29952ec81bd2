// The specification: the recurrence of scan.h, token by token.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/accumulate.h"
#include "core/macros.h"
#include "host/parallel.h"
#include "host/scalar.h"
#include "ops/scan/scan.h"
#include "ops/scan/scan_gates.h"

namespace packing_ops {

namespace {

// a [rows, columns] matrix; sums[j] += factors[i] * a[i, j], in order of i.
template <class Real>
PACKING_OPS_INLINE void add_rows(const Real* a, const Real* factors, int64_t rows, int64_t columns, Real* sums) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) sums[j] += factors[i] * a[i * columns + j];
  }
}

template <class Real>
PACKING_OPS_INLINE void add_outer(const Real* rows_of, const Real* columns_of, int64_t rows, int64_t columns, Real* a) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) a[i * columns + j] += rows_of[i] * columns_of[j];
  }
}

template <class Real>
PACKING_OPS_INLINE Real dot(const Real* a, const Real* b, int64_t size) {
  constexpr int64_t kLanes = 16;
  Real lanes[kLanes] = {};
  for (int64_t i = 0; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  Real sum = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  for (int64_t i = size / kLanes * kLanes; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

struct Sizes {
  int64_t k, v;
  bool corrects;
  int64_t state() const { return k * v; }
};

// What a token and a head bring.
template <class Real>
struct Token {
  const Real *q, *k, *v;
  Real decay, beta;
  const Real* skip;
};

// Takes `state` past a token. residual = v - S^T k before the correction, v where nothing is corrected.
template <class Real>
PACKING_OPS_MULTIVERSION void advance(const Sizes& n, const Token<Real>& token, Real* state, Real* residual) {
  for (int64_t i = 0; i < n.state(); ++i) state[i] *= token.decay;
  std::fill_n(residual, n.v, Real(0));
  if (n.corrects) add_rows(state, token.k, n.k, n.v, residual);
  for (int64_t j = 0; j < n.v; ++j) residual[j] = token.v[j] - residual[j];
  for (int64_t i = 0; i < n.k; ++i) {
    const Real factor = token.beta * token.k[i];
    for (int64_t j = 0; j < n.v; ++j) state[i * n.v + j] += factor * residual[j];
  }
}

template <class Real>
PACKING_OPS_MULTIVERSION void read(const Sizes& n, const Token<Real>& token, Real scale, const Real* state, Real* out) {
  std::fill_n(out, n.v, Real(0));
  add_rows(state, token.q, n.k, n.v, out);
  for (int64_t j = 0; j < n.v; ++j) out[j] *= scale;
  for (int64_t j = 0; token.skip && j < n.v; ++j) out[j] += *token.skip * token.v[j];
}

// The gradients of a token, dk and dq added to what other heads have left there.
template <class Real>
struct TokenGradients {
  Real *dq, *dk, *dv;
  Real dg, dbeta, dskip;
};

// dout is times scale. `before` and `after` are the states around the token; dstate goes from the gradient of `after`
// to the state `before`.
template <class Real>
PACKING_OPS_MULTIVERSION void retreat(const Sizes& n, const Token<Real>& token, const Real* dout, const Real* before,
                                      const Real* after, const Real* residual, Real* dstate,
                                      TokenGradients<Real>& out) {
  add_outer(token.q, dout, n.k, n.v, dstate);
  for (int64_t i = 0; i < n.k; ++i) out.dq[i] += dot(after + i * n.v, dout, n.v);
  // Of the correction beta * residual, which has been added times k.
  std::fill_n(out.dv, n.v, Real(0));
  add_rows(dstate, token.k, n.k, n.v, out.dv);
  out.dbeta = dot(out.dv, residual, n.v);
  for (int64_t j = 0; j < n.v; ++j) out.dv[j] *= token.beta;
  if (!n.corrects) out.dskip = dot(dout, token.v, n.v);
  Real dg = 0;
  for (int64_t i = 0; i < n.k; ++i) {
    Real* row = dstate + i * n.v;
    const Real of_correction = token.beta * dot(row, residual, n.v);
    out.dk[i] += of_correction;
    if (n.corrects) {
      out.dk[i] -= token.decay * dot(before + i * n.v, out.dv, n.v);
      for (int64_t j = 0; j < n.v; ++j) row[j] -= token.k[i] * out.dv[j];
    }
    dg += dot(row, before + i * n.v, n.v);
  }
  out.dg = token.decay * dg;
  for (int64_t i = 0; i < n.state(); ++i) dstate[i] *= token.decay;
  for (int64_t j = 0; token.skip && j < n.v; ++j) out.dv[j] += *token.skip * dout[j];
}

// One head of k and the heads of v that share it, in one document.
template <class T>
struct Group {
  using Real = accumulate_t<T>;

  const ScanParams& p;
  const int64_t document, k_head;
  const Interval<int64_t> rows = p.documents[document];
  const Sizes n{p.head_dim, p.head_dim_v, p.corrects};
  const int64_t heads = p.num_v_heads / p.num_k_heads;
  std::vector<Real> q_norms{}, k_norms{};  // what rows of q and k are multiplied with
  std::vector<Real> q = unit_rows(p.q, q_norms), k = unit_rows(p.k, k_norms);

  void load_rows(const HeadRows& from, int64_t head, int64_t dim, std::vector<Real>& to) const {
    to.resize(rows.size() * dim);
    for (int64_t t = 0; t < rows.size(); ++t) {
      const T* row = static_cast<const T*>(from.data) + (rows.begin + t) * from.token + head * from.head;
      for (int64_t j = 0; j < dim; ++j) to[t * dim + j] = static_cast<Real>(row[j]);
    }
  }

  std::vector<Real> unit_rows(const HeadRows& from, std::vector<Real>& norms) const {
    std::vector<Real> to;
    load_rows(from, k_head, n.k, to);
    norms.assign(rows.size(), Real(1));
    for (int64_t t = 0; p.l2norm && t < rows.size(); ++t) {
      Real* row = to.data() + t * n.k;
      norms[t] = Real(1) / std::sqrt(dot(row, row, n.k) + static_cast<Real>(kNormEpsilon));
      for (int64_t i = 0; i < n.k; ++i) row[i] *= norms[t];
    }
    return to;
  }

  Token<Real> token(int64_t t, int64_t head, const std::vector<Real>& v) const {
    const Gates<Real> gates = gates_of<Real>(p, p.corrects, (rows.begin + t) * p.num_v_heads + head, head);
    const Real* skip = p.skip ? static_cast<const Real*>(p.skip) + head : nullptr;
    return {q.data() + t * n.k, k.data() + t * n.k, v.data() + t * n.v, std::exp(gates.g), gates.beta, skip};
  }

  int64_t state_offset(int64_t head) const { return (document * p.num_v_heads + head) * n.state(); }

  // f(number of a state [head_dim, head_dim_v], number of a tensor of states)
  template <class Number, class F>
  void for_state(Number* states, int64_t head, std::vector<Real>& state, const F& f) const {
    Number* in_memory = states + state_offset(head);
    for (int64_t i = 0; i < n.k; ++i) {
      for (int64_t j = 0; j < n.v; ++j) f(state[i * n.v + j], in_memory[i * p.state_row() + j * p.state_column()]);
    }
  }

  std::vector<Real> first_state(const void* given, int64_t head) const {
    std::vector<Real> state(n.state());
    if (given) for_state(static_cast<const Real*>(given), head, state, [](Real& to, const Real& from) { to = from; });
    return state;
  }

  void keep_state(std::vector<Real>& state, int64_t head, void* to) const {
    if (to) for_state(static_cast<Real*>(to), head, state, [](Real& from, Real& kept) { kept = from; });
  }
};

template <class T, class Real>
PACKING_OPS_INLINE void store(const Real* from, int64_t count, T* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = static_cast<T>(from[j]);
}

template <class T>
void forward(const ScanParams& p, int64_t document, int64_t k_head) {
  using Real = accumulate_t<T>;
  const Group<T> group{p, document, k_head};
  std::vector<Real> v, residual(p.head_dim_v), out(p.head_dim_v);
  for (int64_t i = 0; i < group.heads; ++i) {
    const int64_t head = k_head * group.heads + i;
    group.load_rows(p.v, head, p.head_dim_v, v);
    std::vector<Real> state = group.first_state(p.initial_state, head);
    for (int64_t t = 0; t < group.rows.size(); ++t) {
      const Token<Real> token = group.token(t, head, v);
      advance(group.n, token, state.data(), residual.data());
      read(group.n, token, static_cast<Real>(p.scale), state.data(), out.data());
      const int64_t row = (group.rows.begin + t) * p.num_v_heads + head;
      store(out.data(), p.head_dim_v, static_cast<T*>(p.out) + row * p.head_dim_v);
    }
    group.keep_state(state, head, p.final_state);
  }
}

// The states before each token of a chunk and after its last, made again from the one that was kept at its start.
template <class T>
class Replay {
 public:
  using Real = accumulate_t<T>;

  Replay(const Group<T>& group, int64_t head, const std::vector<Real>& v)
      : group_(group), head_(head), v_(v), residuals_(kScanChunk * group.n.v) {
    std::vector<Real> state = group.first_state(group.p.initial_state, head);
    for (int64_t t = 0; t < group.rows.size(); ++t) {
      if (t % kScanChunk == 0) kept_.insert(kept_.end(), state.begin(), state.end());
      advance(group.n, group.token(t, head, v), state.data(), residuals_.data());
    }
    states_.resize((kScanChunk + 1) * group.n.state());
  }

  void run(int64_t chunk) {
    const int64_t size = group_.n.state(), first = chunk * kScanChunk;
    std::copy_n(kept_.data() + chunk * size, size, states_.data());
    for (int64_t i = 0; i < std::min(kScanChunk, group_.rows.size() - first); ++i) {
      std::copy_n(state(i), size, states_.data() + (i + 1) * size);
      advance(group_.n, group_.token(first + i, head_, v_), states_.data() + (i + 1) * size,
              residuals_.data() + i * group_.n.v);
    }
  }

  const Real* state(int64_t i) const { return states_.data() + i * group_.n.state(); }
  const Real* residual(int64_t i) const { return residuals_.data() + i * group_.n.v; }

 private:
  const Group<T>& group_;
  int64_t head_;
  const std::vector<Real>& v_;
  std::vector<Real> kept_, states_, residuals_;
};

template <class Real>
void store_gates(const ScanBackwardParams& p, int64_t row, int64_t head, TokenGradients<Real>& out) {
  if (!p.corrects) {
    const Gates<Real> of_step = gradients_of_step(p, gates_of<Real>(p, p.corrects, row, head), head, out.dg, out.dbeta);
    out.dg = of_step.g;
    out.dbeta = of_step.beta;
    static_cast<Real*>(p.dskip)[row] = out.dskip;
  }
  static_cast<Real*>(p.dg)[row] = out.dg;
  static_cast<Real*>(p.dbeta)[row] = out.dbeta;
}

template <class T>
void backward_head(const ScanBackwardParams& p, const Group<T>& group, int64_t head, std::vector<accumulate_t<T>>& dq,
                   std::vector<accumulate_t<T>>& dk) {
  using Real = accumulate_t<T>;
  std::vector<Real> v, dout, dv(p.head_dim_v);
  group.load_rows(p.v, head, p.head_dim_v, v);
  group.load_rows(p.dout, head, p.head_dim_v, dout);
  for (Real& x : dout) x *= static_cast<Real>(p.scale);
  Replay<T> replay(group, head, v);
  std::vector<Real> dstate = group.first_state(p.dfinal_state, head);
  for (int64_t t = group.rows.size() - 1, chunk = -1; t >= 0; --t) {
    if (t / kScanChunk != chunk) replay.run(chunk = t / kScanChunk);
    const int64_t i = t % kScanChunk;
    TokenGradients<Real> out{dq.data() + t * p.head_dim, dk.data() + t * p.head_dim, dv.data(), 0, 0, 0};
    retreat(group.n, group.token(t, head, v), dout.data() + t * p.head_dim_v, replay.state(i), replay.state(i + 1),
            replay.residual(i), dstate.data(), out);
    const int64_t row = (group.rows.begin + t) * p.num_v_heads + head;
    store(dv.data(), p.head_dim_v, static_cast<T*>(p.dv) + row * p.head_dim_v);
    store_gates(p, row, head, out);
  }
  group.keep_state(dstate, head, p.dinitial_state);
}

// Through the division by the norm: of y = x / |x| the gradient is (dy - y (y . dy)) / |x|.
template <class T>
void store_rows(const Group<T>& group, const std::vector<accumulate_t<T>>& units,
                const std::vector<accumulate_t<T>>& norms, std::vector<accumulate_t<T>>& gradients, void* to) {
  using Real = accumulate_t<T>;
  const int64_t dim = group.n.k;
  for (int64_t t = 0; t < group.rows.size(); ++t) {
    Real* row = gradients.data() + t * dim;
    const Real* unit = units.data() + t * dim;
    const Real along = group.p.l2norm ? dot(unit, row, dim) : Real(0);
    for (int64_t i = 0; i < dim; ++i) row[i] = norms[t] * (row[i] - unit[i] * along);
    store(row, dim, static_cast<T*>(to) + ((group.rows.begin + t) * group.p.num_k_heads + group.k_head) * dim);
  }
}

template <class T>
void backward(const ScanBackwardParams& p, int64_t document, int64_t k_head) {
  using Real = accumulate_t<T>;
  const Group<T> group{p, document, k_head};
  std::vector<Real> dq(group.q.size()), dk(group.k.size());
  for (int64_t i = 0; i < group.heads; ++i) backward_head<T>(p, group, k_head * group.heads + i, dq, dk);
  store_rows(group, group.q, group.q_norms, dq, p.dq);
  store_rows(group, group.k, group.k_norms, dk, p.dk);
}

template <class T>
void zero_padding(const Documents& documents, int64_t row, void* to) {
  T* rows = static_cast<T*>(to);
  std::fill(rows + documents.end() * row, rows + documents.total * row, T(0));
}

template <class Call>
void for_groups(const ScanParams& p, const Call& call) {
  const int64_t groups = p.documents.num_documents * p.num_k_heads;
  parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) call(i / p.num_k_heads, i % p.num_k_heads);
  });
}

}  // namespace

void launch_scan_cpu(const ScanParams& p) {
  dispatch_float(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_groups(p, [&](int64_t document, int64_t k_head) { forward<T>(p, document, k_head); });
    zero_padding<T>(p.documents, p.num_v_heads * p.head_dim_v, p.out);
  });
}

void launch_scan_backward_cpu(const ScanBackwardParams& p) {
  dispatch_float(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    for_groups(p, [&](int64_t document, int64_t k_head) { backward<T>(p, document, k_head); });
    for (void* to : {p.dq, p.dk}) zero_padding<T>(p.documents, p.num_k_heads * p.head_dim, to);
    zero_padding<T>(p.documents, p.num_v_heads * p.head_dim_v, p.dv);
    for (void* to : {p.dg, p.dbeta, p.dskip}) {
      if (to) zero_padding<accumulate_t<T>>(p.documents, p.num_v_heads, to);
    }
  });
}

}  // namespace packing_ops
