/* Checks candidates and times them in turns:
 *
 *   program DATA [check=1] [loose=F] [rounds=N] [sample_ns=N] [only=3,5] [limit=SECONDS]
 *
 * DATA (apq_tvm/tune/program.py writes it) holds tensors, the calls of every candidate, and for each set of
 * inputs the expected result. Candidate 0 is the default. It prints, each line flushed:
 *
 *   apq-tune 1 CANDIDATES     the first line
 *   at check C | at time C    what is about to run: a crash or an alarm (`limit`) belongs to it
 *   checked C ERROR           largest error over its tolerance in any set: right up to 1; nan is wrong
 *   failed C TEXT             the kernel reported an error
 *   t C NANOSECONDS           a sample: of one pass over the candidate's calls
 *   done                      the last line
 *
 * In a round every candidate has one sample, between two of the default: a moment in which the machine is slow
 * takes a sample from several candidates, not all samples from one. In the first round each is checked before its
 * sample, so that something is known of it before the next one is looked at; the order of the others is another one
 * each time. Weights are copied until they fill `cold_bytes`, and every pass takes the next copy. */
#define _GNU_SOURCE
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "apq_context.h"
#include "apq_runtime.h"

int apq_tune_main(int argc, char **argv);
void apq_tune_print(const char *line);

/* A program prints; a library that is loaded elsewhere may have another one. */
__attribute__((weak)) void apq_tune_print(const char *line) {
  puts(line);
  fflush(stdout);
}

extern const apq_kernel apq_tune_functions[];
extern const int32_t apq_tune_num_functions;

enum { INPUT = 0, WEIGHTS = 1, SCRATCH = 2, LINE = 512, MOST_ARGS = 64 };

typedef struct {
  int32_t kind;
  DLTensor tensor;
  size_t bytes;
  unsigned char **copies; /* an input's sets; copies of weights */
} operand;

typedef struct {
  int32_t function, num_args;
  double work; /* nanoseconds on one thread, roughly: whether it is worth a team */
  int32_t *args;
} call;

typedef struct {
  int32_t num_calls, result, first, end; /* of the calls that are timed */
  int32_t reference;                     /* which results it must have */
  call *calls;
} candidate;

typedef struct {
  float *want, *tolerance; /* per element; per row */
} expected;

typedef struct {
  int32_t threads, num_operands, num_candidates, num_references, num_sets, num_copies;
  int64_t rows, columns;
  operand *operands;
  candidate *candidates;
  expected *expected; /* of every set, for every reference */
  apq_handle handle;
  int32_t copy;
} bench;

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...) {
  char line[LINE];
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  for (char *c = line; *c; c++) {
    if (*c == '\n') *c = ' ';
  }
  apq_tune_print(line);
}

static int get(void *data, size_t bytes, FILE *file) { return fread(data, 1, bytes, file) == bytes ? 0 : 1; }

static void *room(size_t bytes) {
  void *data = NULL;
  return posix_memalign(&data, APQ_ALIGNMENT, bytes + APQ_ALIGNMENT) == 0 ? data : NULL;
}

static int read_operand(bench *b, operand *o, FILE *file) {
  uint64_t bytes;
  o->tensor.device.device_type = kDLCPU;
  if (get(&o->kind, 4, file) || get(&o->tensor.dtype, 4, file) || get(&o->tensor.ndim, 4, file)) return 1;
  if (o->tensor.ndim < 0 || o->tensor.ndim > 16) return 1;
  o->tensor.shape = calloc((size_t)o->tensor.ndim + 1, sizeof(int64_t));
  if (o->tensor.shape == NULL || get(o->tensor.shape, (size_t)o->tensor.ndim * 8, file)) return 1;
  if (get(&bytes, 8, file)) return 1;
  o->bytes = bytes;
  int32_t stored = o->kind == INPUT ? b->num_sets : 1, held = o->kind == WEIGHTS ? b->num_copies : stored;
  o->copies = calloc((size_t)held, sizeof *o->copies);
  if (o->copies == NULL) return 1;
  for (int32_t i = 0; i < held; i++) {
    if ((o->copies[i] = room(o->bytes)) == NULL) return 2;
    if (o->kind == SCRATCH) {
      memset(o->copies[i], 0xff, o->bytes);
    } else if (i < stored) {
      if (get(o->copies[i], o->bytes, file)) return 1;
    } else {
      memcpy(o->copies[i], o->copies[0], o->bytes);
    }
  }
  o->tensor.data = o->copies[0];
  return 0;
}

static int read_candidate(bench *b, candidate *c, FILE *file) {
  if (get(&c->num_calls, 4, file) || get(&c->result, 4, file) || get(&c->first, 4, file)) return 1;
  if (get(&c->end, 4, file) || c->first < 0 || c->first >= c->end || c->end > c->num_calls) return 1;
  if (get(&c->reference, 4, file) || c->reference < 0 || c->reference >= b->num_references) return 1;
  if (c->num_calls < 1 || c->result < 0 || c->result >= b->num_operands) return 1;
  c->calls = calloc((size_t)c->num_calls, sizeof *c->calls);
  for (int32_t i = 0; c->calls != NULL && i < c->num_calls; i++) {
    call *k = &c->calls[i];
    if (get(&k->function, 4, file) || get(&k->num_args, 4, file) || get(&k->work, 8, file)) return 1;
    if (k->function < 0 || k->function >= apq_tune_num_functions || k->num_args < 1 || k->num_args > MOST_ARGS) return 1;
    k->args = calloc((size_t)k->num_args, 4);
    if (k->args == NULL || get(k->args, (size_t)k->num_args * 4, file)) return 1;
    for (int32_t a = 0; a < k->num_args; a++) {
      if (k->args[a] < 0 || k->args[a] >= b->num_operands) return 1;
    }
  }
  return c->calls == NULL;
}

/* 0, 1 for a damaged file, 2 where there is no memory. */
static int read_all(bench *b, const char *path) {
  FILE *file = fopen(path, "rb");
  char magic[8];
  int rc = 1;
  if (file == NULL) return 1;
  if (get(magic, 8, file) || memcmp(magic, "APQTUNE1", 8) != 0) goto end;
  if (get(&b->threads, 4, file) || get(&b->num_operands, 4, file) || get(&b->num_candidates, 4, file)) goto end;
  if (get(&b->num_references, 4, file) || get(&b->num_sets, 4, file) || get(&b->num_copies, 4, file)) goto end;
  if (get(&b->rows, 8, file) || get(&b->columns, 8, file)) goto end;
  if (b->num_operands < 1 || b->num_candidates < 1 || b->num_sets < 1 || b->num_copies < 1) goto end;
  if (b->num_references < 1) goto end;
  size_t results = (size_t)b->num_references * (size_t)b->num_sets;
  b->operands = calloc((size_t)b->num_operands, sizeof *b->operands);
  b->candidates = calloc((size_t)b->num_candidates, sizeof *b->candidates);
  b->expected = calloc(results, sizeof *b->expected);
  if (b->operands == NULL || b->candidates == NULL || b->expected == NULL) goto end;
  for (int32_t i = 0; i < b->num_operands; i++) {
    if ((rc = read_operand(b, &b->operands[i], file)) != 0) goto end;
  }
  rc = 1;
  for (int32_t i = 0; i < b->num_candidates; i++) {
    if (read_candidate(b, &b->candidates[i], file)) goto end;
  }
  size_t rows = (size_t)b->rows, columns = (size_t)b->columns;
  for (size_t s = 0; s < results; s++) {
    expected *e = &b->expected[s];
    e->want = malloc(rows * columns * sizeof(float) + 1);
    e->tolerance = malloc(rows * sizeof(float) + 1);
    if (e->want == NULL || e->tolerance == NULL) goto end;
    if (get(e->want, rows * columns * sizeof(float), file) || get(e->tolerance, rows * sizeof(float), file)) goto end;
  }
  rc = 0;
end:
  fclose(file);
  return rc;
}

/* One pass over a candidate's calls from `first` up to `end`. */
static int pass(bench *b, const candidate *c, int32_t first, int32_t end) {
  apq_any args[MOST_ARGS], result;
  b->copy = (b->copy + 1) % b->num_copies;
  for (int32_t i = first; i < end; i++) {
    const call *k = &c->calls[i];
    for (int32_t a = 0; a < k->num_args; a++) {
      operand *o = &b->operands[k->args[a]];
      if (o->kind == WEIGHTS) o->tensor.data = o->copies[b->copy];
      args[a] = apq_arg(&o->tensor);
    }
    memset(&result, 0, sizeof result);
    apq_set_work(k->work);
    int rc = apq_tune_functions[k->function](NULL, args, k->num_args, &result);
    if (rc != 0) return rc;
  }
  return 0;
}

static int passes(bench *b, const candidate *c, int32_t first, int32_t end, int64_t count) {
  apq_crew before = apq_threads_begin(&b->handle, apq_usable_threads(b->threads));
  int rc = 0;
  for (int64_t i = 0; i < count && rc == 0; i++) rc = pass(b, c, first, end);
  apq_threads_end(&before);
  return rc;
}

static void use_set(bench *b, int32_t set) {
  for (int32_t i = 0; i < b->num_operands; i++) {
    operand *o = &b->operands[i];
    if (o->kind == INPUT) o->tensor.data = o->copies[set];
    if (o->kind == SCRATCH) memset(o->copies[0], 0xff, o->bytes); /* what is not written is NaN */
  }
}

static expected *expected_of(const bench *b, const candidate *c, int32_t set) {
  return &b->expected[(size_t)c->reference * (size_t)b->num_sets + (size_t)set];
}

/* Largest error over its tolerance; infinite for what is no number. */
static double error_of(const bench *b, const candidate *c, int32_t set) {
  const float *got = (const float *)b->operands[c->result].copies[0];
  const expected *e = expected_of(b, c, set);
  double worst = 0;
  for (int64_t r = 0; r < b->rows; r++) {
    for (int64_t n = 0; n < b->columns; n++) {
      double error = fabs((double)got[r * b->columns + n] - (double)e->want[r * b->columns + n]);
      if (!(error <= 1e30)) return INFINITY;
      if (error > worst * (double)e->tolerance[r]) worst = error / (double)e->tolerance[r];
    }
  }
  return worst;
}

/* Whether a candidate is right. Where kernels approximate (tables of int8), the default may miss what is expected
 * by `loose` tolerances, and its own results are what others are compared with. */
static int check(bench *b, int32_t number, double loose) {
  const candidate *c = &b->candidates[number];
  double worst = 0;
  say("at check %d", (int)number);
  for (int32_t s = 0; s < b->num_sets; s++) {
    use_set(b, s);
    int rc = passes(b, c, 0, c->num_calls, 1);
    if (rc != 0) {
      say("failed %d %s", (int)number, apq_last_error());
      return 0;
    }
    double error = error_of(b, c, s);
    if (error > worst) worst = error;
    if (number == 0 && loose > 1 && error <= loose) {
      memcpy(expected_of(b, c, s)->want, b->operands[c->result].copies[0],
             (size_t)(b->rows * b->columns) * sizeof(float));
    }
  }
  say("checked %d %.6g", (int)number, number == 0 ? worst / loose : worst);
  return worst <= (number == 0 ? loose : 1);
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* A sample, in nanoseconds of one pass; 0 if the kernel failed. */
static double sample(bench *b, int32_t number, int64_t count) {
  const candidate *c = &b->candidates[number];
  int64_t start = now();
  if (passes(b, c, c->first, c->end, count) != 0) return 0;
  return (double)(now() - start) / (double)count;
}

static uint64_t state = 88172645463325252ull;

static uint64_t random_number(void) { /* Marsaglia's xorshift */
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

typedef struct {
  int checked; /* before their first samples */
  double loose;
  int32_t rounds;
  int64_t sample_ns;
  unsigned limit;
  int64_t *repeats; /* passes of a sample of each candidate, 0 where that is not known yet */
} turns;

static void find_repeats(bench *b, int32_t number, const turns *how) {
  say("at time %d", (int)number);
  alarm(how->limit);
  (void)passes(b, &b->candidates[number], 0, b->candidates[number].num_calls, 1);
  double once = sample(b, number, 1);
  how->repeats[number] = once > 0 && once < (double)how->sample_ns ? (int64_t)((double)how->sample_ns / once) : 1;
}

/* A sample of the default, and one of a candidate unless `number` is 0. */
static void turn(bench *b, int32_t number, const turns *how) {
  alarm(how->limit);
  say("t 0 %.1f", sample(b, 0, how->repeats[0]));
  if (number == 0) return;
  say("at time %d", (int)number);
  alarm(how->limit);
  say("t %d %.1f", (int)number, sample(b, number, how->repeats[number]));
}

/* The first round; returns how many of `order` are right, which it keeps there. */
static int32_t first_turns(bench *b, int32_t *order, int32_t count, const turns *how) {
  int32_t kept = 0;
  for (int32_t i = 0; i < count; i++) {
    alarm(how->limit);
    if (how->checked && !check(b, order[i], how->loose)) continue;
    use_set(b, 0);
    if (how->rounds > 0) {
      find_repeats(b, order[i], how);
      turn(b, order[i], how);
      turn(b, 0, how); /* what comes next is not beside it */
    }
    order[kept++] = order[i];
  }
  return kept;
}

static void time_in_turns(bench *b, int32_t *order, int32_t count, const turns *how) {
  if (how->rounds > 0) find_repeats(b, 0, how);
  count = first_turns(b, order, count, how);
  for (int32_t r = 1; r < how->rounds && count > 0; r++) {
    for (int32_t i = count - 1; i > 0; i--) {
      int32_t j = (int32_t)(random_number() % (uint64_t)(i + 1)), kept = order[i];
      order[i] = order[j];
      order[j] = kept;
    }
    for (int32_t i = 0; i < count; i++) turn(b, order[i], how);
  }
  if (how->rounds > 1 && count > 0) turn(b, 0, how);
  alarm(0);
}

static const char *option(int argc, char **argv, const char *name, const char *otherwise) {
  size_t length = strlen(name);
  for (int i = 2; i < argc; i++) {
    if (strncmp(argv[i], name, length) == 0 && argv[i][length] == '=') return argv[i] + length + 1;
  }
  return otherwise;
}

int apq_tune_main(int argc, char **argv) {
  static bench b;
  if (argc < 2) return 2;
  int rc = read_all(&b, argv[1]);
  if (rc != 0) {
    fprintf(stderr, rc == 2 ? "no memory for the copies of weights\n" : "%s cannot be read\n", argv[1]);
    return 2;
  }
  (void)apq_usable_threads(1);
  (void)apq_ask_for_tiles(); /* not given: kernels that use them are ended by SIGILL, which is told of them */
  int32_t count = 0;
  turns how = {.checked = atoi(option(argc, argv, "check", "0")),
               .loose = atof(option(argc, argv, "loose", "1")),
               .rounds = atoi(option(argc, argv, "rounds", "0")),
               .sample_ns = atoll(option(argc, argv, "sample_ns", "1000000")),
               .limit = (unsigned)atoi(option(argc, argv, "limit", "20"))};
  const char *only = option(argc, argv, "only", "");
  int32_t *order = calloc((size_t)b.num_candidates + strlen(only) + 1, sizeof *order);
  how.repeats = calloc((size_t)b.num_candidates, sizeof *how.repeats);
  if (order == NULL || how.repeats == NULL) return 2;
  for (const char *at = only; *at != '\0';) {
    char *end = NULL;
    long number = strtol(at, &end, 10);
    if (end == at || number < 1 || number >= b.num_candidates) return 2;
    order[count++] = (int32_t)number;
    at = *end == ',' ? end + 1 : end;
  }
  for (int32_t i = 1; *only == '\0' && i < b.num_candidates; i++) order[count++] = i;
  say("apq-tune 1 %d", (int)b.num_candidates);
  alarm(how.limit);
  if (how.checked && !check(&b, 0, how.loose)) count = 0; /* there is nothing to compare with */
  use_set(&b, 0);
  if (count > 0) time_in_turns(&b, order, count, &how);
  say("done");
  free(order);
  free(how.repeats);
  return 0;
}
