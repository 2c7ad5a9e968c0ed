// What a launch asks of memory, counted over the accesses that a checked build tells of (cusim_check.h).
//
// The n-th execution of one instruction (its address and size) by the lanes of a warp is one instruction of the
// warp. Lanes that skip one are counted with the wrong ones from there on: kernels whose lanes part and go on
// with the same instructions are counted too high. Atomics are not told of.
//
// Device memory: sectors are the aligned 32 bytes that a warp's instruction touches, ideally as many as its
// distinct bytes fill (CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"; Nsight Compute's
// l1tex__t_sectors and its derived ideal). Of the whole launch each sector is counted once more, as what memory
// itself must move if caches keep all that is read again.
//
// Shared memory: 32 banks of 4 bytes. An instruction of 8 bytes a lane is two of half a warp, one of 16 bytes
// four of a quarter; each takes as many waves as its fullest bank has distinct words, ideally one (CUDA C++
// Programming Guide, "Shared Memory"; Nsight Compute's l1tex__data_pipe_lsu_wavefronts_mem_shared).
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace cusim_count {

constexpr int kLanes = 32, kWidest = 16, kSector = 32, kBanks = 32, kWord = 4;

// An access of a thread; shared: `at` is an offset in the block's memory.
struct Touch {
  uint64_t pc, at;
  int bytes, thread;
  uint32_t block;
  bool shared;
};

// An instruction of a warp.
struct Issue {
  uint32_t lanes = 0;
  uint64_t at[kLanes];
};

struct Totals {
  uint64_t sectors = 0, ideal_sectors = 0, waves = 0, ideal_waves = 0;
};

class Counter {
 public:
  bool active = false;

  void begin() {
    active = true;
    totals_ = Totals{};
    moved_.clear();
  }

  void note(const Touch &touch) {
    if (touch.block != block_) end_block();
    block_ = touch.block;
    // What is wider than a lane can read at once is several instructions.
    for (int done = 0; done < touch.bytes; done += kWidest) {
      int bytes = std::min(kWidest, touch.bytes - done);
      add(Key{touch.pc, done, touch.thread / kLanes, bytes, touch.shared}, touch.thread % kLanes,
          touch.at + (uint64_t)done);
    }
  }

  void end(FILE *file, const char *kernel, const unsigned *grid, const unsigned *threads) {
    end_block();
    active = false;
    fprintf(file,
            "{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"threads\": [%u, %u, %u], \"dram_bytes\": %zu, "
            "\"sectors\": %llu, \"ideal_sectors\": %llu, \"shared_waves\": %llu, \"ideal_waves\": %llu}\n",
            kernel, grid[0], grid[1], grid[2], threads[0], threads[1], threads[2], kSector * moved_.size(),
            (unsigned long long)totals_.sectors, (unsigned long long)totals_.ideal_sectors,
            (unsigned long long)totals_.waves, (unsigned long long)totals_.ideal_waves);
  }

 private:
  struct Key {
    uint64_t pc;
    int part, warp, bytes;
    bool shared;
    bool operator==(const Key &o) const {
      return pc == o.pc && part == o.part && warp == o.warp && bytes == o.bytes && shared == o.shared;
    }
  };
  struct Hash {
    size_t operator()(const Key &k) const {
      uint64_t mixed = k.pc * 64 + (uint64_t)k.warp * 2 + k.shared;
      return (mixed + (uint64_t)k.part) * 0x9e3779b97f4a7c15ull >> 20;
    }
  };
  struct Site {
    uint32_t executed[kLanes] = {};
    std::vector<Issue> issues;
  };

  void add(const Key &key, int lane, uint64_t at) {
    Site &site = sites_[key];
    uint32_t n = site.executed[lane]++;
    if (site.issues.size() <= n) site.issues.resize(n + 1);
    site.issues[n].lanes |= 1u << lane;
    site.issues[n].at[lane] = at;
  }

  void end_block() {
    for (const auto &[key, site] : sites_) {
      for (const Issue &issue : site.issues) key.shared ? waves(issue, key.bytes) : sectors(issue, key.bytes);
    }
    sites_.clear();
  }

  void sectors(const Issue &issue, int bytes) {
    std::vector<uint64_t> starts, found;
    for (int lane = 0; lane < kLanes; lane++) {
      if (!(issue.lanes >> lane & 1)) continue;
      starts.push_back(issue.at[lane]);
      found.push_back(issue.at[lane] / kSector);
      found.push_back((issue.at[lane] + (uint64_t)bytes - 1) / kSector);  // no access is wider
    }
    distinct(starts);
    distinct(found);
    uint64_t asked = 0, last = 0;  // distinct bytes, and where they end so far
    for (uint64_t start : starts) {
      asked += start + (uint64_t)bytes - std::max(start, last);
      last = start + (uint64_t)bytes;
    }
    totals_.sectors += found.size();
    totals_.ideal_sectors += (asked + kSector - 1) / kSector;
    moved_.insert(found.begin(), found.end());
  }

  void waves(const Issue &issue, int bytes) {
    int together = bytes > 8 ? kLanes / 4 : bytes > kWord ? kLanes / 2 : kLanes;
    for (int first = 0; first < kLanes; first += together) {
      std::vector<uint64_t> words;
      for (int lane = first; lane < first + together; lane++) {
        if (!(issue.lanes >> lane & 1)) continue;
        uint64_t end = issue.at[lane] + (uint64_t)bytes;
        for (uint64_t word = issue.at[lane] / kWord; word * kWord < end; word++) words.push_back(word);
      }
      if (words.empty()) continue;
      distinct(words);
      int in_bank[kBanks] = {}, most = 0;
      for (uint64_t word : words) most = std::max(most, ++in_bank[word % kBanks]);
      totals_.waves += (uint64_t)most;
      totals_.ideal_waves++;
    }
  }

  static void distinct(std::vector<uint64_t> &values) {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
  }

  uint32_t block_ = 0;
  std::unordered_map<Key, Site, Hash> sites_;
  std::unordered_set<uint64_t> moved_;  // sectors of the launch
  Totals totals_;
};

}  // namespace cusim_count
