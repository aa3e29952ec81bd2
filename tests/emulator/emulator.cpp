#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

// Dynamic shared memory of the block that this thread runs.
alignas(128) static __thread uint8_t shared[256 << 10];

__thread dim3 threadIdx, blockIdx;
dim3 gridDim, blockDim;

namespace emulator {

int late_copies = 0;
int device = 0;
unsigned seed = 0;

namespace {

constexpr size_t kStack = 256 << 10;

struct Copy {
  uint8_t* to;
  const void* from;
  int bytes;
  bool valid;
  int group;
  uint64_t* barrier = nullptr;  // which is told of the copies before, and nothing is copied
};

struct Fiber {
  ucontext_t start;
  jmp_buf place;  // where it gave way: swapcontext would ask the system for the signal mask each time
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool started = false;
  bool done = false;
  std::vector<Copy> copies;
  int groups = 0;
};

// Where some threads meet. Two slots: a thread may arrive again before all have taken what they came for.
struct Meeting {
  int arrived = 0;
  uint64_t times = 0;
  Words in[2][32];
  Words out[2][32];
  int sum[2] = {0, 0};
};

// Of a block.
thread_local std::vector<Fiber> fibers;
thread_local std::map<std::pair<int, uint32_t>, Meeting> warps;  // by warp and lanes
thread_local Meeting whole_block;
thread_local jmp_buf scheduler;
thread_local int current = 0;
thread_local uint64_t progress = 0;  // of threads that waited for each other
const std::function<void()>* body = nullptr;

// One of the blocks that run at once has the word; whose turn it is next is drawn.
class Turns {
 public:
  Turns(std::mt19937& order, std::vector<unsigned> blocks) : order_(order), running_(std::move(blocks)) { draw(); }
  void wait(unsigned block) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return at_ == block; });
  }
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    draw();
    changed_.notify_all();
  }
  void end(unsigned block) {
    std::erase(running_, block);
    pass();
  }

 private:
  // Under odd seeds mostly the same again, so that one block gets far ahead of the other.
  void draw() {
    const bool same = seed % 2 == 1 && order_() % 256 > 0;
    if (same && std::find(running_.begin(), running_.end(), at_) != running_.end()) return;
    if (!running_.empty()) at_ = running_[order_() % running_.size()];
  }

  std::mt19937& order_;
  std::vector<unsigned> running_;
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned at_ = UINT32_MAX;
};

void begin() {
  (*body)();
  wait_for_copies(0);
  fibers[current].done = true;
  give_way();
}

// Until it gives way.
[[gnu::noinline]] void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.start);
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

void run_block(std::mt19937& order, unsigned block, Turns& turns) {
  turns.wait(block);
  blockIdx = dim3(block);
  fibers.resize(blockDim.x);
  std::memset(shared_memory(), 0xff, sizeof(shared));  // NaN
  std::vector<std::vector<int>> left;                  // fibers of each warp
  for (int i = 0; i < static_cast<int>(fibers.size()); ++i) {
    Fiber& fiber = fibers[i];
    fiber.started = fiber.done = false;
    fiber.copies.clear();
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStack;
    makecontext(&fiber.start, begin, 0);
    if (i % 32 == 0) left.emplace_back();
    left.back().push_back(i);
  }
  // A warp runs for a while, mostly until it waits for the others: the further apart they are, the more a missing
  // barrier shows.
  while (!left.empty()) {
    const size_t warp = order() % left.size();
    std::vector<int>& lanes = left[warp];
    for (unsigned patience = order() % 1024; !lanes.empty(); --patience) {
      const uint64_t before = progress;
      std::shuffle(lanes.begin(), lanes.end(), order);
      for (const int i : lanes) {
        current = i;
        threadIdx = dim3(i);
        resume(fibers[i]);
      }
      std::erase_if(lanes, [](int i) { return fibers[i].done; });
      if (progress == before || patience == 0) break;
    }
    if (lanes.empty()) left.erase(left.begin() + static_cast<std::ptrdiff_t>(warp));
    if (order() % 4 == 0) {
      turns.pass();
      turns.wait(block);
    }
  }
  turns.end(block);
}

}  // namespace

void give_way() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

void run(dim3 grid, dim3 block, const std::function<void()>& thread) {
  constexpr unsigned kAtOnce = 2;  // multiprocessors
  std::mt19937 order(seed);
  gridDim = grid;
  blockDim = block;
  body = &thread;
  for (unsigned first = 0; first < grid.x; first += kAtOnce) {
    std::vector<unsigned> blocks;
    for (unsigned i = first; i < std::min(first + kAtOnce, grid.x); ++i) blocks.push_back(i);
    Turns turns(order, blocks);
    std::vector<std::thread> running;
    for (const unsigned i : blocks) running.emplace_back([&, i] { run_block(order, i, turns); });
    for (std::thread& thread : running) thread.join();
  }
}

Words with_warp(uint32_t lanes, const Words& in, const Together& together) {
  Meeting& meeting = warps[{current / 32, lanes}];
  const uint64_t time = meeting.times;
  const int slot = time & 1;
  const int lane = current & 31;
  if (!(lanes >> lane & 1)) std::abort();
  meeting.in[slot][lane] = in;
  if (++meeting.arrived == __builtin_popcount(lanes)) {
    together(meeting.in[slot], meeting.out[slot]);
    meeting.arrived = 0;
    ++meeting.times;
    ++progress;
  }
  while (meeting.times == time) give_way();
  return meeting.out[slot][lane];
}

int with_block(int value, bool count) {
  const uint64_t time = whole_block.times;
  const int slot = time & 1;
  if (whole_block.arrived == 0) whole_block.sum[slot] = 0;
  whole_block.sum[slot] += value != 0;
  if (++whole_block.arrived == static_cast<int>(fibers.size())) {
    whole_block.arrived = 0;
    ++whole_block.times;
    ++progress;
  }
  while (whole_block.times == time) give_way();
  return count ? whole_block.sum[slot] : whole_block.sum[slot] > 0;
}

uint8_t* shared_memory() {
  return shared;
}

// Addresses are offsets from the dynamic shared memory; static variables lie within 2 GiB of it.
void copy_to_shared(uint32_t to, const void* from, int bytes, bool valid) {
  if (to % bytes != 0 || (valid && reinterpret_cast<uintptr_t>(from) % bytes != 0)) std::abort();
  const Copy copy{shared_memory() + static_cast<int32_t>(to), from, bytes, valid, fibers[current].groups};
  late_copies ? fibers[current].copies.push_back(copy) : perform(copy);
}

void arrive_after_copies(uint64_t* barrier) {
  const Copy copy{nullptr, nullptr, 0, false, fibers[current].groups, barrier};
  late_copies ? fibers[current].copies.push_back(copy) : perform(copy);
}

void end_some_copies() {
  std::vector<Copy>& copies = fibers[current].copies;
  const auto told =
      std::find_if(copies.begin(), copies.end(), [](const Copy& copy) { return copy.barrier != nullptr; });
  if (told == copies.end()) return;
  std::for_each(copies.begin(), told + 1, perform);
  copies.erase(copies.begin(), told + 1);
}

void commit_copies() {
  ++fibers[current].groups;
}

void wait_for_copies(int pending) {
  Fiber& fiber = fibers[current];
  std::erase_if(fiber.copies, [&](const Copy& copy) {
    const bool due = copy.group < fiber.groups - pending;
    if (due) perform(copy);
    return due;
  });
}

}  // namespace emulator

extern "C" {

// GPUs of two multiprocessors, one block each: with the shared memory of sm_90, of sm_80 and of sm_89.
constexpr int kSharedMemory[] = {227 << 10, 163 << 10, 99 << 10};

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "";
}
cudaError_t cudaGetDevice(int* device) {
  *device = emulator::device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? 2
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? kSharedMemory[device]
                                                                  : 9;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  properties->major = 9;
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

void emulator_configure(int device, int late_copies, unsigned seed) {
  emulator::device = device;
  emulator::late_copies = late_copies;
  emulator::seed = seed;
}
}
