/* `run` on tensors of every shape, stride, type and alignment: a return code, never more. The memory
 * that a tensor describes is there, to the byte, unless its shape cannot be right. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "fuzzed.h"

enum { MOST = 1 << 22, RANK = 8, SYMBOLS = 8 };

/* A dimension is a number, or ~symbol: of an output -1 if data say how large it is. */
typedef struct {
  int rank, code, bits;
  int64_t dims[RANK];
} spec;

#include "fuzz_specs.h" /* INPUTS, OUTPUTS; written by ../build_c.py */

enum { NUM_INPUTS = sizeof INPUTS / sizeof *INPUTS, NUM_OUTPUTS = sizeof OUTPUTS / sizeof *OUTPUTS };
static const int64_t ODD[] = {-1,        0,         INT64_MAX, INT64_MIN, 1LL << 31, 1LL << 32,
                              1LL << 60, 999999999, 1000000000, 1LL << 62, 1LL << 40, -8};

static fuzzed_handle *handle;

/* An id, a size or an axis: most are 0, and so are all once the bytes are used up. */
static int64_t integer(bytes *b) {
  unsigned pick = byte(b);
  if (pick < 160) return pick % 11;
  if (pick < 220) return -(int64_t)(pick % 11);
  return ODD[pick % (sizeof ODD / sizeof *ODD)];
}

typedef struct {
  int64_t *shape, *strides;
  unsigned char *block;
} memory;

static int64_t extent(bytes *b, int64_t right) {
  unsigned pick = byte(b);
  if (pick < 160) return right;
  if (pick < 220) return pick % 9;
  return ODD[pick % (sizeof ODD / sizeof *ODD)];
}

static memory describe(bytes *b, DLTensor *t, int rank, const int64_t *right, DLDataType type) {
  memory m;
  t->device.device_type = byte(b) < 250 ? kDLCPU : (int)byte(b);
  t->device.device_id = 0;
  t->ndim = byte(b) < 240 ? rank : (int)byte(b) % 6;
  t->dtype = type;
  if (byte(b) > 240) t->dtype.bits = (uint8_t)byte(b);
  if (byte(b) > 240) t->dtype.code = (uint8_t)byte(b);
  if (byte(b) > 240) t->dtype.lanes = (uint16_t)byte(b);
  size_t count = (size_t)t->ndim, item = type.bits / 8;
  m.shape = malloc(count * 8 + 1);
  m.strides = malloc(count * 8 + 1);
  int odd = 0;
  for (int i = 0; i < t->ndim; i++) {
    m.shape[i] = extent(b, i < rank ? right[i] : 1);
    odd |= m.shape[i] < 0 || m.shape[i] > 64;
  }
  unsigned kind = byte(b) % 4;
  int64_t last = 0, step = 1; /* last element's offset */
  for (int i = t->ndim - 1; i >= 0; i--) {
    int64_t dim = m.shape[i];
    int large = dim < 0 || dim > 64;
    m.strides[i] = large ? 0 : kind == 1 || odd ? (int64_t)(byte(b) % 4) : step;
    if (kind == 2 && !odd) m.strides[i] = 3 * step;
    if (!large && dim > 0) last += (dim - 1) * m.strides[i];
    if (!large && dim > 0) step *= dim;
  }
  t->shape = m.shape;
  t->strides = kind == 0 && !odd ? NULL : m.strides;
  t->byte_offset = byte(b) < 128 ? 0 : byte(b) % 65;
  size_t size = last < MOST ? ((size_t)last + 1) * item : 1;
  void *data = NULL;
  if (posix_memalign(&data, 64, size + t->byte_offset) != 0) abort();
  m.block = data;
  unsigned char *at = m.block + t->byte_offset;
  if (type.code == kDLInt && item == 8) {
    for (size_t i = 0; i < size / 8; i++) memcpy(at + 8 * i, &(int64_t){integer(b)}, 8);
  } else {
    for (size_t i = 0; i < size; i++) at[i] = (uint8_t)byte(b);
  }
  t->data = byte(b) > 252 ? NULL : m.block;
  return m;
}

static void release(memory m) {
  free(m.shape);
  free(m.strides);
  free(m.block);
}

/* Memory for an output, if it is not known to be wrong or for the module to give; whether it is there. */
static int room(bytes *b, fuzzed_context *context, const DLTensor *in, int i, memory *m, DLTensor *out) {
  int64_t shape[FUZZED_MAX_RANK] = {0};
  size_t size = (size_t)OUTPUTS[i].bits / 8, shift = byte(b) < 200 ? 0 : byte(b) % 64;
  int good = fuzzed_output_shape(context, in, i, shape) == 0, late = 0;
  for (int j = 0; good && j < OUTPUTS[i].rank; j++) {
    late |= shape[j] < 0;
    size *= shape[j] < 0 ? 0 : (size_t)shape[j];
  }
  *m = (memory){malloc(sizeof shape), NULL, NULL};
  memcpy(m->shape, shape, sizeof shape);
  if (byte(b) > 250) m->shape[0] = extent(b, shape[0]);
  void *data = NULL;
  if (!late && (size > MOST || posix_memalign(&data, 64, size + shift) != 0)) good = 0;
  m->block = data;
  DLDataType type = {(uint8_t)OUTPUTS[i].code, (uint8_t)OUTPUTS[i].bits, 1};
  *out = (DLTensor){data, {kDLCPU, 0}, OUTPUTS[i].rank, type, m->shape, NULL, shift};
  return good;
}

/* An output that the context holds can be read, and is as large as it says. */
static void look(fuzzed_context *context, int i) {
  DLTensor t;
  if (fuzzed_result(context, i, &t) != 0) return;
  size_t size = t.dtype.bits / 8;
  if (t.ndim != OUTPUTS[i].rank) abort();
  for (int j = 0; j < t.ndim; j++) {
    if (t.shape[j] < 0) abort();
    size *= (size_t)t.shape[j];
  }
  unsigned sum = 0;
  for (size_t j = 0; j < size; j++) sum += ((unsigned char *)t.data)[t.byte_offset + j];
  (void)*(volatile unsigned *)&sum;
}

static void run_once(bytes *b, fuzzed_context *context) {
  int64_t symbols[SYMBOLS];
  for (int i = 0; i < SYMBOLS; i++) symbols[i] = 1 + byte(b) % 5;
  DLTensor in[NUM_INPUTS], out[NUM_OUTPUTS];
  memory mine[NUM_INPUTS + NUM_OUTPUTS];
  for (int i = 0; i < NUM_INPUTS; i++) {
    int64_t dims[RANK];
    for (int j = 0; j < INPUTS[i].rank; j++) {
      dims[j] = INPUTS[i].dims[j] < 0 ? symbols[~INPUTS[i].dims[j]] : INPUTS[i].dims[j];
    }
    DLDataType type = {(uint8_t)INPUTS[i].code, (uint8_t)INPUTS[i].bits, 1};
    mine[i] = describe(b, &in[i], INPUTS[i].rank, dims, type);
  }
  int good = 1;
  for (int i = 0; i < NUM_OUTPUTS; i++) {
    if (!room(b, context, in, i, &mine[NUM_INPUTS + i], &out[i])) good = 0;
  }
  if (good || byte(b) > 128) {
    for (int i = 0; i < NUM_OUTPUTS && !good; i++) out[i].data = NULL;
    int rc = fuzzed_run(context, in, out);
    for (int i = 0; i < NUM_OUTPUTS && rc == 0; i++) look(context, i);
  }
  for (int i = 0; i < NUM_INPUTS + NUM_OUTPUTS; i++) release(mine[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  bytes b = {data, data + size};
  if (handle == NULL && fuzzed_open(getenv("FUZZ_WEIGHTS"), &handle) != 0) {
    fprintf(stderr, "%s\n", fuzzed_last_error());
    abort();
  }
  fuzzed_context *context;
  if (fuzzed_context_create(handle, &context) != 0) abort();
  (void)fuzzed_set_num_threads(handle, (int32_t)byte(&b) % 4);
  for (unsigned runs = 1 + byte(&b) % 3; runs > 0; runs--) {
    run_once(&b, context);
    uint64_t arena, live;
    if (fuzzed_memory(context, &arena, &live) != 0) abort();
  }
  fuzzed_context_destroy(context);
  return 0;
}
