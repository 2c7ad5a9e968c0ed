/* Tokens of a compiled decoder, in C: what `chat.py --program` runs.
 *
 *   cc -O2 -DMODULE=smollm2_w8 -Ismollm2_w8 examples/generate.c -Lsmollm2_w8 -lsmollm2_w8 -lm \
 *      -Wl,-rpath,$PWD/smollm2_w8 -o generate
 *   echo 1 9906 28 | ./generate smollm2_w8/weights.safetensors 40
 *
 * Arguments: weights, tokens at most, then temperature, top-k, top-p, min-p and tokens to stop behind.
 * Ids come from standard input; every new token is a line, as soon as it is computed. */
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)
#define API(name) JOIN(MODULE, name)
#define HEADER2(a) <a.h>
#define HEADER(a) HEADER2(a)
#include HEADER(MODULE)

enum { MOST = 1 << 16 };

typedef struct {
  double temperature, top_p, min_p;
  long top_k;
} limits;

typedef struct {
  double p;
  int64_t token;
} candidate;

static int by_p(const void *a, const void *b) {
  double x = ((const candidate *)a)->p, y = ((const candidate *)b)->p;
  return (x < y) - (x > y);
}

/* The limits are those of codegen/templates/generate.py, in its order. */
static int64_t choose(const float *logits, int64_t width, limits l, candidate *all) {
  int64_t best = 0, count = width;
  for (int64_t i = 1; i < width; i++) best = logits[i] > logits[best] ? i : best;
  if (l.temperature <= 0) return best;
  double sum = 0, before = 0, kept = 0;
  for (int64_t i = 0; i < width; i++) {
    all[i].p = exp((logits[i] - logits[best]) / l.temperature);
    all[i].token = i;
  }
  qsort(all, (size_t)width, sizeof *all, by_p);
  if (l.top_k > 0 && l.top_k < count) count = l.top_k;
  for (int64_t i = 0; i < count; i++) sum += all[i].p;
  int64_t end = 0;
  for (; end < count && (end == 0 || (before < l.top_p * sum && all[end].p >= l.min_p * all[0].p)); end++) {
    before += all[end].p;
  }
  kept = before;
  double at = kept * (rand() / (RAND_MAX + 1.0));
  for (int64_t i = 0; i < end; i++) {
    at -= all[i].p;
    if (at < 0) return all[i].token;
  }
  return all[0].token;
}

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, API(_last_error)());
  return 1;
}

int main(int argc, char **argv) {
  static int64_t ids[MOST];
  int64_t count = 0, most = argc > 2 ? atoll(argv[2]) : 0;
  long long id;
  if (argc < 3 || most < 1 || most > MOST) {
    fprintf(stderr, "usage: %s WEIGHTS TOKENS [TEMPERATURE TOP_K TOP_P MIN_P [STOP ...]]\n", argv[0]);
    return 2;
  }
  limits l = {argc > 3 ? atof(argv[3]) : 0, argc > 5 ? atof(argv[5]) : 1, argc > 6 ? atof(argv[6]) : 0,
              argc > 4 ? atol(argv[4]) : 0};
  while (count < MOST && scanf("%lld", &id) == 1) ids[count++] = id;
  srand((unsigned)time(NULL));
  API(_handle) * handle;
  API(_session) * session;
  if (API(_open)(argv[1], &handle) != 0) return failed(argv[1]);
  if (API(_session_create)(handle, 1, count + most, NULL, &session) != 0) return failed(TEXT(MODULE));
  int64_t width = API(_session_width)(session);
  float *logits = malloc((size_t)width * sizeof *logits);
  candidate *all = malloc((size_t)width * sizeof *all);
  int rc = logits == NULL || all == NULL;
  const int64_t *next = ids;
  int64_t token = 0, fresh = count;
  for (int64_t made = 0; rc == 0 && made < most; made++) {
    if (API(_session_run)(session, next, fresh, 1, logits, 0) != 0) {
      rc = failed("a token");
      break;
    }
    token = choose(logits, width, l, all);
    printf("%lld\n", (long long)token);
    fflush(stdout);
    int stop = 0;
    for (int i = 7; i < argc; i++) stop = stop || atoll(argv[i]) == token;
    if (stop) break;
    next = &token;
    fresh = 1;
  }
  free(all);
  free(logits);
  API(_session_destroy)(session);
  API(_close)(handle);
  return rc;
}
