#include "emulator.h"

#include <cuda.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <utility>
#include <vector>

dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulator {

uint8_t* shared = nullptr;
uint8_t* unfenced = nullptr;
uint64_t progress = 0;
Meeting* of_warps = nullptr;
int late_copies = 0;
int device = 0;
unsigned seed = 0;

namespace {

constexpr size_t kStack = 256 << 10;
constexpr size_t kStackStep = 7 * 64;        // their tops are in different sets of the cache
constexpr int kDeadlock = 200'000;           // turns of warps without a meeting, a barrier or an end
constexpr size_t kStaticShared = 512 << 10;  // of all kernels together, each at a separate place

// Of __builtin_setjmp: swapcontext would ask the system for the signal mask each time. Its longjmp must be in another
// function, which the compiler does not look into.
using Place = void* [5];
[[gnu::noipa]] void go_to(Place& place) {
  __builtin_longjmp(place, 1);
}

struct Copy {
  uint8_t* to;
  const void* from;
  int bytes;
  bool valid;
  int group;
  uint64_t* barrier = nullptr;  // which is informed of the copies before, and nothing is copied
};

struct Fiber {
  alignas(64) Place place;  // where it gave way
  bool started = false;     // once: each block's thread begins where the one before it ended
  bool done = false;
  ucontext_t start;
  std::unique_ptr<char[]> stack{new char[kStack]};
  std::vector<Copy> copies;
  int groups = 0;
  std::vector<std::pair<int, std::function<void()>>> products;  // with their group
  int product_groups = 0;
  std::vector<std::function<void()>> stores;
  std::vector<uint32_t> written;  // 16 bytes each
};

struct SharedMemory {
  alignas(1024) uint8_t bytes[kSharedBytes + kStaticShared];
  uint8_t unfenced[kSharedBytes / 16];
};

struct Block {
  unsigned index;
  std::vector<Fiber> fibers;           // they keep their stacks from block to block
  std::vector<std::vector<int>> left;  // fibers of each warp that are not done
  std::vector<Meeting> warps;
  std::map<std::pair<int, uint32_t>, Meeting> some_lanes;  // by warp and lanes
  Meeting whole;
  std::vector<BoxCopy> loads;  // under way
  std::unique_ptr<SharedMemory> memory{new SharedMemory};
};

// Draws the order of threads: PCG, which is far cheaper than the standard library's.
struct Order {
  uint64_t state;
  uint32_t below(uint32_t end) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto mixed = static_cast<uint32_t>((state >> 18 ^ state) >> 27);
    const auto turned = static_cast<int>(state >> 59);
    const uint32_t drawn = mixed >> turned | mixed << (-turned & 31);
    return static_cast<uint32_t>(static_cast<uint64_t>(drawn) * end >> 32);
  }
  void shuffle(std::vector<int>& some) {
    for (size_t i = some.size(); i > 1; --i) std::swap(some[i - 1], some[below(static_cast<uint32_t>(i))]);
  }
};

Block* here = nullptr;   // whose fiber runs
Fiber* fiber = nullptr;  // that fiber
uint64_t ended = 0;      // fibers
Place scheduler;
const std::function<void()>* body = nullptr;

Fiber& this_fiber() {
  return *fiber;
}

void begin() {
  for (;;) {
    (*body)();
    wait_for_copies(0);
    Fiber& fiber = this_fiber();
    if (!fiber.stores.empty() || !fiber.products.empty()) std::abort();  // nobody waited
    fiber.done = true;
    ++ended;
    ++progress;
    give_way();
  }
}

// Fibers that are still to run before the scheduler does.
const int* turn = nullptr;
const int* last_turn = nullptr;

[[gnu::noinline]] void go_on() {
  if (turn == last_turn) go_to(scheduler);
  threadIdx.x = *turn++;
  fiber = &here->fibers[threadIdx.x];
  if (fiber->started) go_to(fiber->place);
  fiber->started = true;
  setcontext(&fiber->start);
}

// Each until it gives way.
[[gnu::noinline]] void run_each(const std::vector<int>& fibers) {
  turn = fibers.data();
  last_turn = turn + fibers.size();
  if (__builtin_setjmp(scheduler) == 0) go_on();
}

void perform(const Copy& copy) {
  if (copy.barrier != nullptr) {
    barrier_at(copy.barrier).arrive();
  } else if (copy.valid) {
    std::memcpy(copy.to, copy.from, copy.bytes);
  } else {
    std::memset(copy.to, 0, copy.bytes);
  }
}

void start_block(Block& block, unsigned index) {
  block.index = index;
  if (block.fibers.size() < blockDim.x) block.fibers.resize(blockDim.x);
  block.left.clear();
  block.warps.assign(blockDim.x / 32, {});
  block.some_lanes.clear();
  block.whole = {};
  std::memset(block.memory.get(), 0xff, sizeof(SharedMemory));  // NaN
  std::memset(block.memory->unfenced, 0, sizeof(block.memory->unfenced));
  for (int i = 0; i < static_cast<int>(blockDim.x); ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.done = false;
    fiber.copies.clear();
    fiber.written.clear();
    if (!fiber.started) {
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get();
      fiber.start.uc_stack.ss_size = kStack - i % 128 * kStackStep;
      makecontext(&fiber.start, begin, 0);
    }
    if (i % 32 == 0) block.left.emplace_back();
    block.left.back().push_back(i);
  }
}

// A warp runs for a while, mostly until it waits for the others: the further apart they are, the more a missing barrier
// shows.
void run_some_warp(Block& block, Order& order) {
  here = &block;
  of_warps = block.warps.data();
  shared = block.memory->bytes;
  unfenced = block.memory->unfenced;
  blockIdx = dim3(block.index % gridDim.x, block.index / gridDim.x, 0);
  const size_t warp = order.below(block.left.size());
  std::vector<int>& lanes = block.left[warp];
  for (unsigned patience = order.below(1024); !lanes.empty(); --patience) {
    const uint64_t before = progress;
    const uint64_t ended_before = ended;
    order.shuffle(lanes);
    run_each(lanes);
    if (ended != ended_before) std::erase_if(lanes, [&](int i) { return block.fibers[i].done; });
    if (progress == before || patience == 0) break;
  }
  if (lanes.empty()) block.left.erase(block.left.begin() + static_cast<std::ptrdiff_t>(warp));
  if (block.left.empty() && !block.loads.empty()) std::abort();  // nobody waits for them
}

// A row's 16-byte chunks are permuted by the row, which the address tells.
uint32_t swizzled(uint32_t address) {
  return address ^ (address >> 3 & 0x70);
}

// f(address in shared memory, element or null outside of the tensor) for each element.
template <class F>
void for_each_element(const BoxCopy& copy, F&& f) {
  const BoxMap& map = *copy.map;
  if (copy.shared % 128 != 0) std::abort();
  uint32_t to = copy.shared;
  uint32_t i[5];
  for (i[4] = 0; i[4] < map.box[4]; ++i[4])
    for (i[3] = 0; i[3] < map.box[3]; ++i[3])
      for (i[2] = 0; i[2] < map.box[2]; ++i[2])
        for (i[1] = 0; i[1] < map.box[1]; ++i[1])
          for (i[0] = 0; i[0] < map.box[0]; ++i[0], to += 2) {
            bool inside = true;
            uint64_t element = reinterpret_cast<uint64_t>(map.data);
            for (int d = 0; d < 5; ++d) {
              const int64_t at = copy.start[d] + static_cast<int64_t>(i[d]);
              inside &= at >= 0 && at < static_cast<int64_t>(map.sizes[d]);
              element += static_cast<uint64_t>(at) * map.strides[d];
            }
            f(swizzled(to), inside ? reinterpret_cast<uint8_t*>(element) : nullptr);
          }
}

void perform_load(const BoxCopy& copy) {
  int bytes = 0;
  for_each_element(copy, [&](uint32_t to, const uint8_t* from) {
    from != nullptr ? std::memcpy(shared + to, from, 2) : std::memset(shared + to, 0, 2);
    bytes += 2;
  });
  barrier_at(copy.barrier).received(bytes);
}

void perform_store(const BoxCopy& copy) {
  for_each_element(copy, [&](uint32_t from, uint8_t* to) {
    check_fenced(from);
    if (to != nullptr) std::memcpy(to, shared + from, 2);
  });
}

}  // namespace

void tma_load(const BoxCopy& copy) {
  late_copies ? here->loads.push_back(copy) : perform_load(copy);
}

void load_boxes_of(uint64_t* barrier) {
  std::erase_if(here->loads, [&](const BoxCopy& copy) {
    const bool due = copy.barrier == barrier;
    if (due) perform_load(copy);
    return due;
  });
}

void start_store(std::function<void()> store) {
  late_copies ? store() : this_fiber().stores.push_back(std::move(store));
}

void tma_store(const BoxCopy& copy) {
  start_store([copy] { perform_store(copy); });
}

void store_words(float* to, uint32_t from, int bytes, bool add) {
  if (from % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0) std::abort();
  start_store([=] {
    for (int i = 0; i < bytes / 4; ++i) {
      check_fenced(from + 4 * i);
      float word;
      std::memcpy(&word, shared + from + 4 * i, 4);
      to[i] = add ? to[i] + word : word;
    }
  });
}

void bulk_wait_group_read() {
  for (const auto& store : std::exchange(this_fiber().stores, {})) store();
}

// What reads shared memory is late where what writes it is not.
void start_products(std::function<void()> work) {
  Fiber& fiber = this_fiber();
  if (late_copies) return work();
  fiber.products.emplace_back(fiber.product_groups, std::move(work));
}

void commit_products() {
  ++this_fiber().product_groups;
}

void wait_for_products(int pending) {
  Fiber& fiber = this_fiber();
  std::erase_if(fiber.products, [&](const auto& product) {
    const bool due = product.first < fiber.product_groups - pending;
    if (due) product.second();
    return due;
  });
}

void written(uint32_t address) {
  if (address % 16 != 0 || address >= kSharedBytes) std::abort();
  unfenced[address / 16] = 1;
  this_fiber().written.push_back(address);
}

void fence_written() {
  for (const uint32_t address : this_fiber().written) unfenced[address / 16] = 0;
  this_fiber().written.clear();
}

uint32_t place_in_static_shared(size_t bytes, size_t alignment) {
  static size_t used = 0;
  const size_t place = (used + alignment - 1) / alignment * alignment;
  used = place + bytes;
  if (used > kStaticShared) std::abort();
  return static_cast<uint32_t>(kSharedBytes + place);
}

[[gnu::noinline]] void give_way() {
  if (__builtin_setjmp(this_fiber().place) == 0) go_on();
}

void run(dim3 grid, dim3 block, const std::function<void()>& thread) {
  static Block multiprocessors[2];  // each runs one block
  Order order{seed};
  order.below(1);  // seeds are small
  threadIdx = dim3(0, 0, 0);
  gridDim = grid;
  blockDim = block;
  body = &thread;
  const unsigned blocks = grid.x * grid.y;
  for (unsigned first = 0; first < blocks; first += 2) {
    std::vector<Block*> running;
    for (unsigned i = first; i < std::min(first + 2, blocks); ++i) {
      running.push_back(&multiprocessors[i - first]);
      start_block(*running.back(), i);
    }
    // Whose turn it is next is drawn. Under odd seeds mostly the same again: one block gets far ahead of the other.
    Block* next = nullptr;
    uint64_t before = progress;
    for (int idle = 0; !running.empty(); idle = progress == before ? idle + 1 : 0) {
      if (idle > kDeadlock) {
        std::fputs("emulator: every thread waits for another\n", stderr);
        std::abort();
      }
      before = progress;
      if (next == nullptr || (order.below(4) == 0 && (seed % 2 == 0 || order.below(256) == 0)))
        next = running[order.below(running.size())];
      run_some_warp(*next, order);
      if (next->left.empty()) std::erase(running, std::exchange(next, nullptr));
    }
  }
}

Meeting& of_some_lanes(uint32_t lanes) {
  if (!(lanes >> (threadIdx.x & 31) & 1)) std::abort();
  return here->some_lanes[{threadIdx.x / 32, lanes}];
}

int with_block(int value, bool count) {
  Meeting& whole = here->whole;
  const uint64_t time = whole.times;
  const int slot = time & 1;
  if (whole.arrived == 0) whole.sum[slot] = 0;
  whole.sum[slot] += value != 0;
  if (++whole.arrived == static_cast<int>(blockDim.x)) {
    whole.arrived = 0;
    ++whole.times;
    ++progress;
  }
  while (whole.times == time) give_way();
  return count ? whole.sum[slot] : whole.sum[slot] > 0;
}

void copy_to_shared(uint32_t to, const void* from, int bytes, bool valid) {
  if (to % bytes != 0 || (valid && reinterpret_cast<uintptr_t>(from) % bytes != 0)) std::abort();
  const Copy copy{shared + to, from, bytes, valid, this_fiber().groups};
  late_copies ? this_fiber().copies.push_back(copy) : perform(copy);
}

void arrive_after_copies(uint64_t* barrier) {
  const Copy copy{nullptr, nullptr, 0, false, this_fiber().groups, barrier};
  late_copies ? this_fiber().copies.push_back(copy) : perform(copy);
}

void end_some_copies() {
  std::vector<Copy>& copies = this_fiber().copies;
  const auto told =
      std::find_if(copies.begin(), copies.end(), [](const Copy& copy) { return copy.barrier != nullptr; });
  if (told == copies.end()) return;
  std::for_each(copies.begin(), told + 1, perform);
  copies.erase(copies.begin(), told + 1);
}

void commit_copies() {
  ++this_fiber().groups;
}

void wait_for_copies(int pending) {
  Fiber& fiber = this_fiber();
  std::erase_if(fiber.copies, [&](const Copy& copy) {
    const bool due = copy.group < fiber.groups - pending;
    if (due) perform(copy);
    return due;
  });
}

}  // namespace emulator

extern "C" {

// GPUs of two multiprocessors, one block each: what is asked for of sm_90, sm_80, sm_89 and sm_100.
constexpr int kSharedMemory[] = {227 << 10, 163 << 10, 99 << 10, 227 << 10};
constexpr int kMajor[] = {9, 8, 8, 10};

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "";
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = emulator::device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? 2
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? kSharedMemory[device]
           : attribute == cudaDevAttrComputeCapabilityMajor       ? kMajor[device]
                                                                  : 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  properties->major = kMajor[device];
  properties->multiProcessorCount = 2;
  properties->sharedMemPerBlockOptin = kSharedMemory[device];
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}

CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                           const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const bool half = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  bool good = half && rank == 5 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] == 64 &&
              interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
              fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  emulator::BoxMap made{static_cast<uint8_t*>(data)};
  for (int d = 0; d < 5; ++d) {
    good &= sizes[d] >= 1 && sizes[d] <= uint64_t{1} << 32 && box[d] >= 1 && box[d] <= 256 && steps[d] == 1;
    if (d < 4) good &= strides[d] % 16 == 0 && strides[d] > 0 && strides[d] < uint64_t{1} << 40;
    made.sizes[d] = sizes[d];
    made.strides[d] = d == 0 ? 2 : strides[d - 1];
    made.box[d] = box[d];
  }
  std::memcpy(map, &made, sizeof(made));
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(encode_tensor_map);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

void emulator_configure(int device, int late_copies, unsigned seed) {
  emulator::device = device;
  emulator::late_copies = late_copies;
  emulator::seed = seed;
}
}
