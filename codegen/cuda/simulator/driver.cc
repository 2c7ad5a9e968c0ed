// A libcuda.so.1 that runs images made by g++ (cusim.h), for tests without a GPU. What a package does with
// the driver it does with this one, and cannot tell.
//
// Device memory is PROT_NONE but while a copy or a kernel runs: a host that touches it faults. By
// environment: CUSIM_SM (86), CUSIM_DEVICES (1), CUSIM_MEMORY (bytes, 1 GiB), CUSIM_VERSION (13000),
// CUSIM_LOG (a file that receives a line per call), CUSIM_FAULT (a kernel whose launch ends in
// CUDA_ERROR_ILLEGAL_ADDRESS, at the stream's next synchronization and ever after).
//
// Images of a checked build (cusim_check.h) tell of each access of theirs: two that nothing orders, and a read
// of what nobody wrote, end the process. CUSIM_COUNTS is a file that receives a line of JSON for each of their
// launches: what it asks of memory (cusim_count.h).
//
// Functions and results: CUDA Driver API reference.
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "include/cusim_count.h"

namespace {

enum Result {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  NO_BINARY_FOR_GPU = 209,
  NOT_FOUND = 500,
  ILLEGAL_ADDRESS = 700,
  CAPTURE_INVALIDATED = 901,
  UNKNOWN = 999,
};
enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76, SHARED_OPTIN = 97, DYNAMIC_SHARED = 8 };

struct dim3 { unsigned x, y, z; };
struct Module { void *library; };
struct Function {
  void (*run)(dim3, dim3, unsigned, void **);
  std::string name;
  std::vector<int> sizes;
  int dynamic_shared = 49152;
};
// One captured call: a launch, a copy between device memory, or a fill.
struct Node {
  Function *function = nullptr;
  dim3 grid, threads;
  unsigned shared = 0;
  std::vector<std::vector<unsigned char>> arguments;
  uint64_t to = 0, from = 0;
  size_t bytes = 0;
  unsigned word = 0;
};
struct Graph { std::vector<Node> nodes; };
struct Stream { Graph *capturing = nullptr; };

constexpr size_t kSpace = size_t{1} << 36, kPage = 4096;
std::recursive_mutex lock;
unsigned char *space;
size_t top;                               // where fresh blocks begin
std::map<size_t, size_t> live, free_;     // offset → bytes
size_t used;
int fault;                                // result of all that follows a fault
int owner;                                // process that initialized
FILE *log_;
thread_local std::vector<void *> contexts;  // current last

// What checked images tell of their accesses, as in cusim_check.h, and what is known of a byte of memory.
struct Access {
  uint64_t at;
  int bytes, write, thread;
  uint32_t block, epoch;
  uint64_t pc;
};
struct Who { uint32_t launch, block, epoch; int thread; };  // block and thread: kMany for several
struct Cell { Who wrote, read; bool defined; };
constexpr int kMany = -1;
bool checked;              // an image of a checked build was loaded
uint32_t launches;
std::vector<Cell> cells;   // by offset
cusim_count::Counter counter;

void say(const char *format, ...) {
  if (log_ == nullptr) return;
  va_list list;
  va_start(list, format);
  vfprintf(log_, format, list);
  va_end(list);
  fputc('\n', log_);
  fflush(log_);
}

long number(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

size_t capacity() { return (size_t)number("CUSIM_MEMORY", 1 << 30); }

// While it lives, device memory can be touched.
struct Open {
  Open() { if (top) mprotect(space, top, PROT_READ | PROT_WRITE); }
  ~Open() { if (top) mprotect(space, top, PROT_NONE); }
};

bool on_device(uint64_t p) { return p >= (uint64_t)space && p < (uint64_t)space + kSpace; }

// Whether all of these bytes are of one live block.
bool within(uint64_t p, size_t bytes) {
  if (!on_device(p)) return false;
  size_t at = p - (uint64_t)space;
  auto next = live.upper_bound(at);
  if (next == live.begin()) return false;
  --next;
  return at + bytes <= next->first + next->second;
}

int ready() {
  if (space == nullptr) return NOT_INITIALIZED;
  if (owner != (int)getpid()) return NOT_INITIALIZED;  // CUDA does not survive a fork
  if (contexts.empty()) return INVALID_CONTEXT;
  return fault;
}

void define(uint64_t at, size_t bytes, bool defined = true) {
  size_t first = at - (uint64_t)space;
  if (cells.size() < first + bytes) cells.resize(first + bytes);
  for (size_t i = 0; i < bytes; i++) cells[first + i].defined = defined;
}

// Whether something between them orders an access of this launch and that one.
bool ordered(const Who &who, const Access &a) {
  if (who.launch != launches) return true;
  return who.block == a.block && (who.epoch < a.epoch || who.thread == a.thread);
}

const char *judge(const Access *access) {
  const Access &a = *access;
  size_t first = a.at - (uint64_t)space;
  if (!within(a.at, (size_t)a.bytes)) return "an access outside of all blocks of memory";
  if (cells.size() < first + (size_t)a.bytes) cells.resize(first + (size_t)a.bytes);
  for (size_t i = first; i < first + (size_t)a.bytes; i++) {
    Cell &cell = cells[i];
    Who me{launches, a.block, a.epoch, a.thread};
    if (!ordered(cell.wrote, a)) return a.write ? "two threads write to the same memory" : "memory is read while it is written";
    if (a.write) {
      if (!ordered(cell.read, a)) return "memory is written while it is read";
      cell.wrote = me;
      cell.defined = true;
      continue;
    }
    if (!cell.defined) return "memory is read that nobody wrote";
    bool same = cell.read.launch == launches;
    if (same && cell.read.block != a.block) me.block = (uint32_t)kMany;
    if (same && cell.read.epoch == a.epoch && cell.read.thread != a.thread) me.thread = kMany;
    cell.read = me;
  }
  return nullptr;
}

void count(const Access *a, bool shared) {
  if (counter.active) counter.note({a->pc, a->at, a->bytes, a->thread, a->block, shared});
}

void run(Node &n) {
  if (n.function == nullptr) {
    if (checked) {
      define(n.to, n.bytes);
      for (size_t i = 0; n.from != 0 && i < n.bytes; i++) {
        size_t from = n.from - (uint64_t)space + i;
        cells[n.to - (uint64_t)space + i].defined = from < cells.size() && cells[from].defined;
      }
    }
    if (n.from != 0) memmove((void *)n.to, (void *)n.from, n.bytes);
    else for (size_t i = 0; i < n.bytes / 4; i++) ((unsigned *)n.to)[i] = n.word;
    return;
  }
  const char *bad = getenv("CUSIM_FAULT");
  if (bad != nullptr && n.function->name == bad) fault = ILLEGAL_ADDRESS;
  if (fault) return;
  std::vector<void *> pointers;
  for (auto &argument : n.arguments) pointers.push_back(argument.data());
  launches++;
  const char *counts = checked ? getenv("CUSIM_COUNTS") : nullptr;
  if (counts != nullptr) counter.begin();
  n.function->run(n.grid, n.threads, n.shared, pointers.data());
  if (counts == nullptr) return;
  if (FILE *file = fopen(counts, "ae")) {
    counter.end(file, n.function->name.c_str(), &n.grid.x, &n.threads.x);
    fclose(file);
  }
}

int submit(Stream *s, Node node) {
  if (s != nullptr && s->capturing != nullptr) {
    s->capturing->nodes.push_back(std::move(node));
    return SUCCESS;
  }
  Open open;
  run(node);
  return SUCCESS;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int
#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock)
#define READY LOCKED; if (int rc = ready()) return rc

API cuGetErrorName(int result, const char **name) {
  switch (result) {
    case SUCCESS: *name = "CUDA_SUCCESS"; break;
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
    case INVALID_IMAGE: *name = "CUDA_ERROR_INVALID_IMAGE"; break;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case NO_BINARY_FOR_GPU: *name = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
    case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
    case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    default: *name = "CUDA_ERROR_UNKNOWN"; return INVALID_VALUE;
  }
  return SUCCESS;
}

API cuInit(unsigned) {
  LOCKED;
  if (number("CUSIM_DEVICES", 1) == 0) return NO_DEVICE;
  if (space != nullptr) return owner == (int)getpid() ? SUCCESS : NOT_INITIALIZED;
  void *mapped = mmap(nullptr, kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return OUT_OF_MEMORY;
  space = (unsigned char *)mapped;
  owner = (int)getpid();
  if (const char *path = getenv("CUSIM_LOG")) log_ = fopen(path, "we");
  return SUCCESS;
}
// NVRTC looks for a driver's private tables, and calls this without asking whether it is there.
API cuGetExportTable(const void **table, const void *) { *table = nullptr; return NOT_FOUND; }
API cuDriverGetVersion(int *version) { *version = (int)number("CUSIM_VERSION", 13000); return SUCCESS; }
API cuDeviceGetCount(int *count) { *count = (int)number("CUSIM_DEVICES", 1); return SUCCESS; }
API cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < number("CUSIM_DEVICES", 1) ? SUCCESS : INVALID_DEVICE;
}
API cuDeviceGetName(char *name, int size, int device) {
  snprintf(name, (size_t)size, "simulated GPU %d", device);
  return SUCCESS;
}
API cuDeviceGetAttribute(int *value, int attribute, int) {
  int sm = (int)number("CUSIM_SM", 86);
  switch (attribute) {
    case MAJOR: *value = sm / 10; break;
    case MINOR: *value = sm % 10; break;
    case MULTIPROCESSORS: *value = 4; break;
    case SHARED_OPTIN: *value = sm == 75 ? 65536 : 101376; break;
    default: return INVALID_VALUE;
  }
  return SUCCESS;
}

API cuDevicePrimaryCtxRetain(void **context, int device) {
  LOCKED;
  if (owner != (int)getpid()) return NOT_INITIALIZED;
  *context = (void *)(uintptr_t)(device + 1);
  say("retain %d", device);
  return SUCCESS;
}
API cuDevicePrimaryCtxRelease_v2(int device) { LOCKED; say("release %d", device); return SUCCESS; }
API cuCtxPushCurrent_v2(void *context) {
  if (owner != (int)getpid()) return NOT_INITIALIZED;
  contexts.push_back(context);
  return SUCCESS;
}
API cuCtxPopCurrent_v2(void **context) {
  if (contexts.empty()) return INVALID_CONTEXT;
  *context = contexts.back();
  contexts.pop_back();
  return SUCCESS;
}

// ---- memory ----

API cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
  READY;
  if (bytes == 0) return INVALID_VALUE;
  size_t size = (bytes + kPage - 1) / kPage * kPage;
  if (used + size > capacity()) return OUT_OF_MEMORY;
  size_t at = top;
  for (auto &[offset, length] : free_) {
    if (length != size) continue;
    at = offset;
    free_.erase(offset);
    break;
  }
  if (at == top) top += size + kPage;  // a page that nobody may touch behind each block
  live[at] = bytes;
  used += size;
  *pointer = (uint64_t)space + at;
  Open open;
  memset(space + at, 0xff, size);  // NaN: reading what nobody wrote shows
  define(*pointer, checked ? size : 0, false);
  say("alloc %zu", bytes);
  return SUCCESS;
}
API cuMemFree_v2(uint64_t pointer) {
  READY;
  auto found = live.find(pointer - (uint64_t)space);
  if (found == live.end()) return INVALID_VALUE;
  size_t size = (found->second + kPage - 1) / kPage * kPage;
  say("free %zu", found->second);
  free_[found->first] = size;
  used -= size;
  live.erase(found);
  return SUCCESS;
}
API cuMemGetInfo_v2(size_t *left, size_t *total) {
  LOCKED;
  *total = capacity();
  *left = capacity() - used;
  return SUCCESS;
}
API cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *) {
  READY;
  if (!within(to, bytes) || on_device((uint64_t)from)) return INVALID_VALUE;
  Open open;
  memcpy((void *)to, from, bytes);
  define(to, checked ? bytes : 0);
  say("upload %zu", bytes);
  return SUCCESS;
}
API cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *) {
  READY;
  if (!within(from, bytes) || on_device((uint64_t)to)) return INVALID_VALUE;
  Open open;
  memcpy(to, (void *)from, bytes);
  say("download %zu", bytes);
  return SUCCESS;
}
API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
  READY;
  if (!within(to, bytes) || !within(from, bytes)) return INVALID_VALUE;
  Node node;
  node.to = to, node.from = from, node.bytes = bytes;
  say("copy %zu", bytes);
  return submit((Stream *)stream, node);
}
API cuMemsetD32Async(uint64_t to, unsigned word, size_t count, void *stream) {
  READY;
  if (!within(to, 4 * count)) return INVALID_VALUE;
  Node node;
  node.to = to, node.word = word, node.bytes = 4 * count;
  return submit((Stream *)stream, node);
}

// ---- code ----

// What stands for PTX is an image in base64 (simulator/__init__.py).
static std::string decoded(const char *text) {
  static const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  unsigned bits = 0, count = 0;
  for (; digits.find(*text) != std::string::npos; text++) {
    bits = bits << 6 | (unsigned)digits.find(*text);
    if (++count % 4 != 1) out += (char)(bits >> (6 - 2 * ((count - 1) % 4)));
  }
  return out;
}
API cuModuleLoadData(void **module, const void *image) {
  READY;
  std::string text;
  if (strncmp((const char *)image, "// cusim\n", 9) == 0) {
    text = decoded((const char *)image + 9);
    image = text.data();
  }
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
  if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return INVALID_IMAGE;
  if (header->e_machine == 190 || header->e_type != ET_DYN) return NO_BINARY_FOR_GPU;  // EM_CUDA
  size_t bytes = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
  int file = memfd_create("cusim", 0);
  if (write(file, image, bytes) != (ssize_t)bytes) return UNKNOWN;
  // The loader takes two libraries of one path for one, and numbers of files come again.
  static size_t images;
  std::string path = "/proc/self/fd/";
  for (size_t i = 0; i < images; i++) path += "./";
  images++;
  path += std::to_string(file);
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  close(file);
  if (library == nullptr) {
    say("%s", dlerror());
    return INVALID_IMAGE;
  }
  using Connect = void (*)(uint64_t, uint64_t, const char *(*)(const Access *), void (*)(const Access *, bool));
  if (auto connect = (Connect)dlsym(library, "cusim_connect")) {
    connect((uint64_t)space, (uint64_t)space + kSpace, judge, count);
    checked = true;
  }
  *module = new Module{library};
  say("load %zu", bytes);
  return SUCCESS;
}
API cuModuleUnload(void *module) {
  READY;
  dlclose(((Module *)module)->library);
  delete (Module *)module;
  return SUCCESS;
}
API cuModuleGetFunction(void **function, void *module, const char *name) {
  READY;
  void *library = ((Module *)module)->library;
  Function *made = new Function;
  made->name = name;
  *(void **)&made->run = dlsym(library, ("cusim_" + made->name).c_str());
  auto sizes = (int (*)(int *))dlsym(library, ("cusim_sizes_" + made->name).c_str());
  if (made->run == nullptr || sizes == nullptr) return NOT_FOUND;
  int each[256];
  made->sizes.assign(each, each + sizes(each));
  *function = made;
  return SUCCESS;
}
API cuFuncSetAttribute(void *function, int attribute, int value) {
  if (attribute == DYNAMIC_SHARED) ((Function *)function)->dynamic_shared = value;
  return SUCCESS;
}
API cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **) {
  READY;
  Function *f = (Function *)function;
  size_t threads = (size_t)bx * by * bz;
  if (gx == 0 || gy == 0 || gz == 0 || gx > 2147483647u || gy > 65535 || gz > 65535 || threads == 0 ||
      threads > 1024 || bx > 1024 || by > 1024 || bz > 64 || (int)shared > f->dynamic_shared) {
    return INVALID_VALUE;
  }
  Node node;
  node.function = f, node.grid = {gx, gy, gz}, node.threads = {bx, by, bz}, node.shared = shared;
  for (size_t i = 0; i < f->sizes.size(); i++) {
    unsigned char *bytes = (unsigned char *)params[i];
    node.arguments.emplace_back(bytes, bytes + f->sizes[i]);
  }
  Stream *s = (Stream *)stream;
  say("launch %s grid %u,%u,%u block %u,%u,%u shared %u%s", f->name.c_str(), gx, gy, gz, bx, by, bz, shared,
      s && s->capturing ? " captured" : "");
  return submit(s, std::move(node));
}

// ---- streams and graphs ----

API cuStreamCreate(void **stream, unsigned) { READY; *stream = new Stream; return SUCCESS; }
API cuStreamDestroy_v2(void *stream) { READY; delete (Stream *)stream; return SUCCESS; }
API cuStreamSynchronize(void *) { READY; return SUCCESS; }
API cuStreamBeginCapture_v2(void *stream, int) {
  READY;
  if (stream == nullptr) return INVALID_VALUE;
  ((Stream *)stream)->capturing = new Graph;
  say("capture");
  return SUCCESS;
}
API cuStreamEndCapture(void *stream, void **graph) {
  LOCKED;
  Stream *s = (Stream *)stream;
  if (s->capturing == nullptr) return CAPTURE_INVALIDATED;
  say("captured %zu", s->capturing->nodes.size());
  *graph = s->capturing;
  s->capturing = nullptr;
  return SUCCESS;
}
API cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long) {
  READY;
  *exec = new Graph(*(Graph *)graph);
  return SUCCESS;
}
API cuGraphLaunch(void *exec, void *) {
  READY;
  Graph *graph = (Graph *)exec;
  say("graph %zu", graph->nodes.size());
  Open open;
  for (Node &node : graph->nodes) run(node);
  return SUCCESS;
}
API cuGraphDestroy(void *graph) { LOCKED; delete (Graph *)graph; return SUCCESS; }
API cuGraphExecDestroy(void *exec) { LOCKED; delete (Graph *)exec; return SUCCESS; }
