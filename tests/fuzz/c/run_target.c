/* `run` on tensors of every shape, stride, type and alignment: a return code, never more. The memory
 * that a tensor describes is there, to the byte, unless its shape cannot be right. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "fuzzed.h"

enum { MOST = 1 << 22 };
static const int64_t ODD[] = {-1,        0,         INT64_MAX, INT64_MIN, 1LL << 31, 1LL << 32,
                              1LL << 60, 999999999, 1000000000, 1LL << 62, 1LL << 40, -8};

static fuzzed_handle *handle;

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
  for (size_t i = 0; i < size; i++) m.block[t->byte_offset + i] = item == 8 && byte(b) < 250 ? 0 : (uint8_t)byte(b);
  t->data = byte(b) > 252 ? NULL : m.block;
  return m;
}

static void release(memory m) {
  free(m.shape);
  free(m.strides);
  free(m.block);
}

static void run_once(bytes *b, fuzzed_context *context) {
  static const int out_rank[] = {2, 2, 2, 2, 1, 0, 2, 3, 1, 1, 0};
  int64_t batch = 1 + byte(b) % 5, length = 1 + byte(b) % 5;
  DLTensor in[2], out[FUZZED_NUM_OUTPUTS];
  memory mine[2 + FUZZED_NUM_OUTPUTS];
  DLDataType floats = {kDLFloat, 32, 1}, ids = {kDLInt, 64, 1}, integers = {kDLInt, 32, 1};
  mine[0] = describe(b, &in[0], 2, (int64_t[]){batch, 8}, floats);
  mine[1] = describe(b, &in[1], 2, (int64_t[]){batch, length}, ids);
  int good = 1;
  for (int i = 0; i < FUZZED_NUM_OUTPUTS; i++) {
    int64_t shape[FUZZED_MAX_RANK] = {0};
    size_t size = i == 2 ? 4 : 4;
    if (fuzzed_output_shape(context, in, i, shape) != 0) {
      good = 0;
    } else {
      for (int j = 0; j < out_rank[i]; j++) size *= (size_t)shape[j];
    }
    memory *m = &mine[2 + i];
    m->shape = malloc(8 * FUZZED_MAX_RANK);
    m->strides = NULL;
    memcpy(m->shape, shape, sizeof shape);
    if (byte(b) > 250) m->shape[0] = extent(b, shape[0]);
    size_t shift = byte(b) < 200 ? 0 : byte(b) % 64;
    void *data = NULL;
    if (size > MOST || posix_memalign(&data, 64, size + shift) != 0) good = 0;
    m->block = data;
    out[i] = (DLTensor){data, {kDLCPU, 0}, out_rank[i], i == 2 ? integers : floats, m->shape, NULL, shift};
  }
  if (good || byte(b) > 128) {
    for (int i = 0; i < FUZZED_NUM_OUTPUTS && !good; i++) out[i].data = NULL;
    (void)fuzzed_run(context, in, out);
  }
  for (int i = 0; i < 2 + FUZZED_NUM_OUTPUTS; i++) release(mine[i]);
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
