// SPDX-License-Identifier: Apache-2.0
// Threads that allocate and free on a small card, against threads that put the
// same segments to sleep, wake them, hold them and list them; first without
// faults, then while calls to the driver fail. Ends with 0 if nothing leaked
// and the driver saw nothing that it must not see.
//
//   stress_{address,thread} SECONDS [SEED]
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "allocator.h"
#include "fake_driver.h"

namespace {

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kCardMiB = 96;
constexpr std::size_t kKeep = 12;  // segments that one worker keeps at most

std::atomic<bool> stop{false};
std::atomic<int> failures{0};

void expect(bool condition, const std::string& what) {
  if (condition) return;
  failures += 1;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

struct Tally {
  std::atomic<std::uint64_t> allocated{0}, refused{0}, freed{0}, slept{0},
      woken{0}, held{0}, snapshots{0};
};

Tally tally;

// Like PyTorch: allocates for its stream, launches kernels, frees.
void allocate_and_free(int number, unsigned seed) {
  std::mt19937 random(seed);
  const int device = number % 2;
  fake_set_current(number % 3 == 0 ? -1 : (number + 1) % 2);
  const int current_before = fake_current();
  auto* stream = reinterpret_cast<CUstream>(std::uintptr_t(number * 16));
  cumem::scope().tag = cumem::table().intern("worker" + std::to_string(number));
  std::vector<void*> mine;
  while (!stop || !mine.empty()) {
    const bool grow = !stop && mine.size() < kKeep && random() % 2 == 0;
    if (grow || mine.empty()) {
      cumem::scope().generation += 1;
      void* pointer =
          cumem::allocate((1 + random() % 9) * kMiB, device, stream);
      (pointer ? tally.allocated : tally.refused) += 1;
      if (pointer) mine.push_back(pointer);
      if (stop && mine.empty()) break;
      continue;
    }
    const std::size_t index = random() % mine.size();
    void* pointer = mine[index];
    mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(index));
    cumem::deallocate(pointer, stream);
    tally.freed += 1;
  }
  expect(fake_current() == current_before, "the current context changed");
}

// Like sleep(): walks over a snapshot that is out of date at once.
void sleep_and_wake(unsigned seed) {
  std::mt19937 random(seed);
  while (!stop) {
    for (const cumem::Segment& segment : cumem::table().snapshot()) {
      const bool hold = random() % 2 == 0;
      if (hold && !cumem::table().hold(segment.address, segment.serial)) {
        continue;
      }
      const bool slept = cumem::put_segment_to_sleep(
                             segment.device, segment.size, segment.address)
                             .ok();
      tally.slept += slept;
      if (hold) {
        expect(fake_is_reserved(segment.address), "a held segment went away");
      }
      if (random() % 4 != 0) {
        tally.woken +=
            cumem::wake_segment(segment.device, segment.size, segment.address)
                .ok();
      }
      if (hold) {
        tally.held += 1;
        expect(cumem::unhold_segment(segment.address), "a hold was lost");
      }
    }
  }
}

void look() {
  while (!stop) {
    std::uint64_t previous_end = 0;
    for (const cumem::Segment& segment : cumem::table().snapshot()) {
      expect(segment.address >= previous_end, "segments overlap");
      expect(segment.asleep == (segment.handle == 0), "a handle while asleep");
      expect(segment.tag->rfind("worker", 0) == 0, "a tag is wrong");
      previous_end = segment.address + segment.size;
    }
    const cumem::Counters now = cumem::table().counters();
    expect(now.mapped_bytes <= now.reserved_bytes, "more mapped than reserved");
    expect(now.mapped_bytes <= now.peak_mapped_bytes, "a peak is too low");
    expect(now.mallocs - now.frees == now.segments, "segments do not add up");
    cumem::table().take_errors();
    if (tally.snapshots++ % 64 == 0) cumem::table().reset_peak();
    std::this_thread::yield();
  }
}

void inject(const std::vector<const char*>& functions, unsigned seed) {
  std::mt19937 random(seed);
  while (!stop) {
    fake_fail(functions[random() % functions.size()], 1 + random() % 5,
              1 + random() % 3, CUDA_ERROR_UNKNOWN);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// One run; `faulty` names the functions whose calls fail now and then.
void run(const char* name, double seconds, unsigned seed,
         const std::vector<const char*>& faulty) {
  fake_reset(kCardMiB);
  stop = false;
  std::vector<std::thread> threads;
  for (int number = 1; number <= 4; ++number) {
    threads.emplace_back(allocate_and_free, number, seed + number);
  }
  threads.emplace_back(sleep_and_wake, seed + 100);
  threads.emplace_back(sleep_and_wake, seed + 101);
  threads.emplace_back(look);
  if (!faulty.empty()) threads.emplace_back(inject, faulty, seed + 200);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  for (const char* function : faulty) fake_fail(function, 0, 0, 0);
  // Each pass takes back all that it can; the first one already must.
  const std::uint64_t leftovers = cumem::table().counters().leftovers;
  cumem::offer_leftovers();

  expect(fake_count("violations") == 0,
         std::string(name) + ": the driver saw " + fake_violations());
  const cumem::Counters now = cumem::table().counters();
  expect(now.segments == 0 && now.mapped_bytes == 0 && now.reserved_bytes == 0,
         std::string(name) + ": the table is not empty");
  const std::uint64_t left = fake_count("handles") + fake_count("mappings") +
                             fake_count("reservations");
  expect(left == 0 && now.leftovers == 0,
         std::string(name) + ": " + std::to_string(left) + " things leaked");
  expect(tally.allocated && tally.refused && tally.freed && tally.slept &&
             tally.woken && tally.held && tally.snapshots,
         std::string(name) + ": some thread did nothing");
  expect(faulty.empty() || fake_count("injected"), "no fault was injected");
  std::printf(
      "%s: %llu allocated, %llu refused, %llu slept, %llu woken, %llu held, "
      "%llu faults, %llu leftovers at the end\n",
      name, static_cast<unsigned long long>(tally.allocated.exchange(0)),
      static_cast<unsigned long long>(tally.refused.exchange(0)),
      static_cast<unsigned long long>(tally.slept.exchange(0)),
      static_cast<unsigned long long>(tally.woken.exchange(0)),
      static_cast<unsigned long long>(tally.held.exchange(0)),
      static_cast<unsigned long long>(fake_count("injected")),
      static_cast<unsigned long long>(leftovers));
  tally.freed = 0;
  tally.snapshots = 0;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 3;
  const unsigned seed = argc > 2 ? std::atoi(argv[2]) : std::random_device{}();
  std::printf("seed %u\n", seed);
  const std::vector<const char*> releasing = {"cuMemUnmap", "cuMemRelease",
                                              "cuMemAddressFree"};
  run("no faults", seconds / 4, seed, {});
  run("faults that are undone", seconds / 4, seed,
      {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess",
       "cuDevicePrimaryCtxRetain", "cuStreamIsCapturing",
       "cuStreamSynchronize"});
  run("faults of releasing", seconds / 4, seed, releasing);
  run("faults of mapping and of undoing it", seconds / 4, seed,
      {"cuMemSetAccess", "cuMemSetAccess", "cuMemMap", "cuMemUnmap",
       "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"});
  return failures == 0 ? 0 : 1;
}
