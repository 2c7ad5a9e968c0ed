// A checked build: g++ -fsanitize=thread calls these for every access of a kernel, and nothing of the
// sanitizer's own is linked. Found are races of threads that no barrier orders, and reads of what nobody
// wrote; either ends the process with a line that says where.
//
// Shared memory, which is the image's thread-local storage, is judged here, the device's by the driver, which
// knows what was copied there. Everything else is a thread's own.
#pragma once
#include <link.h>

#define CUSIM_UNCHECKED __attribute__((no_sanitize("thread")))

namespace cusim {
namespace check {

// An access, for the driver: of the device's memory, to give a message if it is wrong; of that and of shared
// memory (by offset), to count what it takes. `pc` is what asks.
struct Access {
  uint64_t at;
  int bytes, write, thread;
  uint32_t block, epoch;
  uint64_t pc;
};
using Judge = const char *(*)(const Access *);
using Count = void (*)(const Access *, bool shared);

static Judge judge;
static Count count;
static uint64_t device_first, device_last;
static const char *kernel = "";
static uint32_t epoch = 1, began = 1;  // barriers that opened, and as the block began
static uint32_t meetings[32];                    // of each warp

// Who wrote or read a byte of shared memory last; `thread` -1 is several, -2 - w several of warp w.
struct Who { uint32_t epoch, meeting; int thread; };
struct Cell { Who wrote, read; };
static unsigned char *shared_first;
static size_t shared_bytes;
static Cell *shared;

CUSIM_UNCHECKED inline void barrier_opens() { epoch++; }
CUSIM_UNCHECKED inline void warp_met(int warp) { meetings[warp]++; }
CUSIM_UNCHECKED inline void block_begins() { began = ++epoch; }

[[noreturn]] CUSIM_UNCHECKED inline void wrong(const char *what, int other) {
  char text[256], of[32] = "";
  if (other >= 0) snprintf(of, sizeof of, ", as of thread %d", other);
  snprintf(text, sizeof text, "%s: %s%s", kernel, what, of);
  die(text);
}

CUSIM_UNCHECKED inline int warp_of(const Who &who) { return who.thread >= 0 ? who.thread / 32 : -2 - who.thread; }

// Whether a barrier, or a meeting of the warp, is between that and now.
CUSIM_UNCHECKED inline bool before(const Who &who) {
  if (who.epoch < epoch || who.thread == block.current) return true;
  int warp = block.current / 32;
  return warp_of(who) == warp && who.meeting < meetings[warp];
}

CUSIM_UNCHECKED inline void on_shared(size_t at, bool write) {
  Cell &cell = shared[at];
  if (cell.wrote.epoch >= began && !before(cell.wrote)) {
    wrong(write ? "two threads write to the same shared memory" : "shared memory is read while it is written",
          cell.wrote.thread);
  }
  Who me{epoch, meetings[block.current / 32], block.current};
  if (write) {
    if (cell.read.epoch >= began && !before(cell.read)) wrong("shared memory is written while it is read", cell.read.thread);
    cell.wrote = me;
    return;
  }
  if (cell.wrote.epoch < began) wrong("shared memory is read that nobody wrote", -1);
  bool others = cell.read.epoch == epoch && cell.read.thread != block.current;
  if (others && !before(cell.read)) me.thread = warp_of(cell.read) == me.thread / 32 ? -2 - me.thread / 32 : -1;
  cell.read = me;
}

CUSIM_UNCHECKED inline void access(void *p, int bytes, bool write, void *pc) {
  uint64_t at = (uint64_t)p;
  size_t offset = (size_t)((unsigned char *)p - shared_first);
  bool of_device = at >= device_first && at < device_last;
  if (!of_device && (shared == nullptr || offset >= shared_bytes)) return;
  uint32_t number = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  Access one{of_device ? at : offset, bytes, write, block.current, number, epoch, (uint64_t)pc};
  if (of_device) {
    if (const char *why = judge(&one)) wrong(why, -1);
    count(&one, false);
    return;
  }
  count(&one, true);
  for (int i = 0; i < bytes; i++) on_shared(offset + (size_t)i, write);
}

// This thread's block of the image's thread-local storage.
CUSIM_UNCHECKED inline int find_shared(dl_phdr_info *info, size_t, void *marker) {
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto &header = info->dlpi_phdr[i];
    unsigned char *first = (unsigned char *)info->dlpi_tls_data;
    if (header.p_type != PT_TLS || first == nullptr) continue;
    if ((unsigned char *)marker < first || (unsigned char *)marker >= first + header.p_memsz) continue;
    shared_first = first;
    if (shared_bytes < header.p_memsz) shared = (Cell *)calloc(header.p_memsz, sizeof(Cell));
    shared_bytes = header.p_memsz;
    return 1;
  }
  return 0;
}

CUSIM_UNCHECKED inline void launch_begins() {
  buf_dyn_shmem_ptr[0] = 0;  // there is a block of storage from here on
  dl_iterate_phdr(find_shared, buf_dyn_shmem_ptr);
}

}  // namespace check
}  // namespace cusim

extern "C" {
// What the driver calls when it loads the image.
__attribute__((visibility("default"))) CUSIM_UNCHECKED void cusim_connect(uint64_t first, uint64_t last,
                                                                           cusim::check::Judge judge,
                                                                           cusim::check::Count count) {
  cusim::check::device_first = first;
  cusim::check::device_last = last;
  cusim::check::judge = judge;
  cusim::check::count = count;
}

// The sanitizer's interface (gcc/sanitizer.def).
CUSIM_UNCHECKED void __tsan_init() {}
CUSIM_UNCHECKED void __tsan_func_entry(void *) {}
CUSIM_UNCHECKED void __tsan_func_exit() {}
CUSIM_UNCHECKED void __tsan_vptr_update(void **, void *) {}
CUSIM_UNCHECKED void __tsan_vptr_read(void **) {}
#define CUSIM_TELL(p, n, write) cusim::check::access(p, n, write, __builtin_return_address(0))
#define CUSIM_ACCESS(n)                                                                 \
  CUSIM_UNCHECKED void __tsan_read##n(void *p) { CUSIM_TELL(p, n, false); }            \
  CUSIM_UNCHECKED void __tsan_write##n(void *p) { CUSIM_TELL(p, n, true); }            \
  CUSIM_UNCHECKED void __tsan_unaligned_read##n(void *p) { CUSIM_TELL(p, n, false); }  \
  CUSIM_UNCHECKED void __tsan_unaligned_write##n(void *p) { CUSIM_TELL(p, n, true); }
CUSIM_ACCESS(1)
CUSIM_ACCESS(2)
CUSIM_ACCESS(4)
CUSIM_ACCESS(8)
CUSIM_ACCESS(16)
#undef CUSIM_ACCESS
CUSIM_UNCHECKED void __tsan_read_range(void *p, unsigned long n) { CUSIM_TELL(p, (int)n, false); }
CUSIM_UNCHECKED void __tsan_write_range(void *p, unsigned long n) { CUSIM_TELL(p, (int)n, true); }
#undef CUSIM_TELL
}
