/* Runs of batches whose images do not depend on each other, where all their working memory would leave the
 * caches: each thread takes images of its own, and each stage of the graph as many at once as stay near the
 * processor, or as many as make reading its weights worth it. */
#include <stdlib.h>

#include "apq_images.h"

/* Images of which weights are read once, at most: what goes from stage to stage is kept for all of them. */
enum { MOST_AT_ONCE = 16 };

/* A byte of weights comes from behind the caches, one of activations mostly out of the second: ResNet-50 at
 * batch 8 is 1 % faster with 4 than with 1, on a Zen 5, and the same with 8 and 16. */
enum { WEIGHTS_COST = 4 };

static const size_t ELSEWHERE = SIZE_MAX;

/* Buffers that outlive the stages which make them, for all images of a turn. */
typedef struct {
  size_t offset, step; /* of the first image, ELSEWHERE for other buffers; of one image */
} kept;

struct apq_images {
  region memory; /* of kept buffers */
  size_t live;   /* bytes of it in the last run */
  uint64_t since; /* number of the last run's first plan; UINT64_MAX for a thread that had no share in it */
  int64_t image; /* which of the turn's images a part begins with; -1 where nothing is kept */
  int32_t num_helpers;
  apq_context **helpers; /* of all threads but this one */
  int32_t *at_once;      /* of this turn: a plan's may be replaced by those of parts */
  kept buffers[];
};

static apq_images *images_of(apq_context *c) {
  const apq_module *m = c->handle->module;
  if (c->images != NULL) return c->images;
  size_t bytes = sizeof(kept) * (size_t)m->num_buffers + sizeof(int32_t) * (size_t)m->num_stages;
  c->images = calloc(1, sizeof *c->images + bytes);
  if (c->images == NULL) {
    (void)apq_fail(APQ_NO_MEMORY, "lib%s: no memory for a context", m->name);
  } else {
    c->images->image = -1;
    c->images->at_once = (int32_t *)(c->images->buffers + m->num_buffers);
  }
  return c->images;
}

void apq_images_close(apq_context *c) {
  apq_images *all = c->images;
  if (all == NULL) return;
  for (int32_t i = 0; i < all->num_helpers; i++) apq_context_destroy(all->helpers[i]);
  free(all->helpers);
  free(all->memory.data);
  free(all);
}

int apq_images_memory(apq_context *c, uint64_t *arena_bytes, uint64_t *live_bytes) {
  const apq_module *m = c->handle->module;
  const apq_images *all = c->images;
  size_t most = 0;
  int rc = APQ_OK;
  if (all == NULL) return APQ_OK;
  for (int32_t i = 0; i < PLANS; i++) {
    const plan *p = &c->plans[i];
    size_t live = p->ready && p->ran >= all->since ? apq_live_bytes(m->num_buffers, m->lifetimes, p->bytes) : 0;
    if (live > most) most = live;
  }
  *arena_bytes += all->memory.bytes;
  *live_bytes = most + all->live;
  for (int32_t i = 0; rc == APQ_OK && i < all->num_helpers; i++) {
    uint64_t arena, live;
    rc = apq_memory(all->helpers[i], &arena, &live);
    *arena_bytes += arena;
    *live_bytes += live;
  }
  return rc;
}

void apq_place_kept(const apq_context *c) {
  const apq_images *all = c->images;
  if (all == NULL || all->image < 0) return;
  for (int32_t i = 0; i < c->handle->module->num_buffers; i++) {
    const kept *k = &all->buffers[i];
    if (k->offset != ELSEWHERE) c->buffers[i] = apq_past(all->memory.data, k->offset + (size_t)all->image * k->step);
  }
}

/* ---- how many images at once ---- */

static int32_t end_of(const apq_module *m, int32_t stage) {
  return stage < m->num_stages ? m->stages[stage].first : INT32_MAX;
}

static int touches(apq_lifetime life, int32_t first, int32_t end) { return life.first < end && first <= life.last; }

/* Bytes that a stage has alive at most, and those it touches. */
static void stage_bytes(const apq_module *m, const plan *p, int32_t stage, size_t *alive, size_t *touched) {
  int32_t first = m->stages[stage].first, end = end_of(m, stage + 1);
  *alive = *touched = 0;
  for (int32_t i = 0; i < m->num_buffers; i++) {
    if (!touches(m->lifetimes[i], first, end)) continue;
    int32_t call = m->lifetimes[i].first < first ? first : m->lifetimes[i].first;
    size_t now = 0;
    for (int32_t j = 0; j < m->num_buffers; j++) now += touches(m->lifetimes[j], call, call + 1) ? p->bytes[j] : 0;
    if (now > *alive) *alive = now;
    *touched += p->bytes[i];
  }
}

/* As many as have their working memory near the processor, but so many that they touch `WEIGHTS_COST` bytes for
 * one of the weights, which every part reads anew; of what fits without stages a power of two times as many, and
 * never more than a later stage takes: so there are few groups, whose plans a context keeps. */
static void measure(const apq_context *c, plan *p) {
  const apq_module *m = c->handle->module;
  size_t images = (size_t)p->symbols[m->batch], near = m->near_bytes * (size_t)c->threads;
  if (p->measured == c->threads) return;
  size_t all = near / (p->arena / images + 1); /* that fit without stages */
  int32_t least = all < 1 ? 1 : all > MOST_AT_ONCE ? MOST_AT_ONCE : (int32_t)all, later = MOST_AT_ONCE;
  /* Where reading all weights anew is cheap: MobileNetV3's 2.5 MB cost 6 % more in stages. */
  int near_weights = c->handle->weights.bytes <= 2 * near;
  for (int32_t s = m->num_stages - 1; s >= 0; s--) {
    size_t alive, touched;
    stage_bytes(m, p, s, &alive, &touched);
    size_t fit = near / (alive / images + 1);
    size_t worth = WEIGHTS_COST * m->stages[s].weight_bytes / (touched / images + 1);
    size_t most = near_weights ? 0 : fit > worth ? fit : worth;
    p->at_once[s] = least;
    while (2 * p->at_once[s] <= later && 2 * (size_t)p->at_once[s] <= most) p->at_once[s] *= 2;
    later = p->at_once[s];
  }
  p->measured = c->threads;
}

/* ---- parts ---- */

/* The images of a tensor from `first` on, whose dimensions are written to `dims`. */
static DLTensor part_of(const DLTensor *t, int64_t first, int64_t count, int64_t *dims) {
  DLTensor part = *t;
  int64_t step = t->strides != NULL ? t->strides[0] : 1;
  for (int32_t i = 1; i < t->ndim && t->strides == NULL; i++) step *= t->shape[i];
  memcpy(dims, t->shape, 8 * (size_t)t->ndim);
  dims[0] = count;
  part.shape = dims;
  part.data = apq_past(t->data, (size_t)(first * step) * (t->dtype.bits / 8));
  return part;
}

/* What a batch is given, and where its results go. */
typedef struct {
  const DLTensor *inputs, *outputs;
} batch;

static int find_part(apq_context *c, const batch *of, int64_t first, int64_t count, int32_t first_stage,
                     int32_t end_stage, plan **p) {
  const apq_module *m = c->handle->module;
  DLTensor *in = c->parts, *out = c->parts + m->num_inputs;
  int64_t *dims = c->part_dims;
  for (int32_t i = 0; i < m->num_inputs; dims += m->inputs[i].ndim, i++) {
    in[i] = m->inputs[i].cut ? part_of(&of->inputs[i], first, count, dims) : of->inputs[i];
  }
  for (int32_t i = 0; i < m->num_outputs; dims += m->outputs[i].ndim, i++) {
    out[i] = part_of(&of->outputs[i], first, count, dims);
  }
  return apq_find_plan(c, in, first_stage, end_stage, p);
}

static int run_part(apq_context *c, const batch *of, int64_t first, int64_t count, int32_t first_stage,
                    int32_t end_stage) {
  plan *p;
  int rc = find_part(c, of, first, count, first_stage, end_stage, &p);
  return rc == APQ_OK ? apq_run_plan(c, p, c->parts, c->parts + c->handle->module->num_inputs) : rc;
}

/* The end of the stages from `first` on that take as many images at once. */
static int32_t group_end(const apq_module *m, const int32_t *at_once, int32_t first) {
  int32_t end = first + 1;
  while (end < m->num_stages && at_once[end] == at_once[first]) end++;
  return end;
}

/* Memory for what goes from group to group of stages, of so many images. */
static int keep(apq_context *c, const plan *p, int64_t images) {
  const apq_module *m = c->handle->module;
  apq_images *all = c->images;
  size_t bytes = 0;
  for (int32_t i = 0; i < m->num_buffers; i++) all->buffers[i].offset = ELSEWHERE;
  for (int32_t s = group_end(m, p->at_once, 0); s < m->num_stages; s = group_end(m, p->at_once, s)) {
    int32_t first = m->stages[s].first;
    for (int32_t i = 0; i < m->num_buffers; i++) {
      kept *k = &all->buffers[i];
      if (m->lifetimes[i].first >= first || m->lifetimes[i].last < first || k->offset != ELSEWHERE) continue;
      k->step = p->bytes[i] / (size_t)p->symbols[m->batch];
      k->offset = bytes;
      bytes += (k->step * (size_t)images + APQ_ALIGNMENT - 1) / APQ_ALIGNMENT * APQ_ALIGNMENT;
    }
  }
  if (bytes > all->live) all->live = bytes;
  return apq_reserve(&all->memory, bytes, "what goes from stage to stage");
}

static int64_t even(int64_t images, int64_t most) {
  int64_t parts = (images + most - 1) / most;
  return (images + parts - 1) / parts; /* parts of nearly one size */
}

/* Some images, group of stages by group: all of a turn before the next. */
static int run_share(apq_context *c, const batch *of, int64_t start, int64_t images) {
  const apq_module *m = c->handle->module;
  apq_images *all = c->images;
  plan *p;
  int32_t most = 1;
  int rc = find_part(c, of, start, images, 0, m->num_stages, &p);
  if (rc != APQ_OK) return rc;
  measure(c, p);
  for (int32_t s = 0; s < m->num_stages; s++) most = p->at_once[s] > most ? p->at_once[s] : most;
  memcpy(all->at_once, p->at_once, sizeof(int32_t) * (size_t)m->num_stages);
  int64_t turn = even(images, most);
  if ((rc = keep(c, p, turn)) != APQ_OK) return rc;
  for (int64_t first = 0; first < images; first += turn) {
    int64_t left = images - first < turn ? images - first : turn;
    for (int32_t s = 0, end; s < m->num_stages; s = end) {
      int64_t step = even(left, all->at_once[s]);
      end = group_end(m, all->at_once, s);
      for (int64_t i = 0; rc == APQ_OK && i < left; i += step) {
        all->image = i;
        rc = run_part(c, of, start + first + i, left - i < step ? left - i : step, s, end);
      }
    }
  }
  all->image = -1;
  return rc;
}

/* ---- threads ---- */

typedef struct {
  apq_context *context;
  const batch *of;
  int64_t each;
} shares;

static int run_one(int number, void *data) {
  const shares *s = data;
  apq_context *c = number == 0 ? s->context : s->context->images->helpers[number - 1];
  return run_share(c, s->of, number * s->each, s->each);
}

/* What a run has used is counted from here. */
static void begin(apq_images *all, uint64_t since) {
  all->since = since;
  all->live = 0;
}

/* Contexts of other threads, made once. */
static int find_helpers(apq_context *c, int32_t count) {
  apq_images *all = c->images;
  if (all->num_helpers < count) {
    apq_context **more = realloc(all->helpers, sizeof *more * (size_t)count);
    if (more == NULL) return apq_fail(APQ_NO_MEMORY, "no memory for contexts of %d threads", (int)count);
    all->helpers = more;
  }
  while (all->num_helpers < count) {
    apq_context *made;
    int rc = apq_context_create(c->handle, &made);
    if (rc != APQ_OK) return rc;
    if (images_of(made) == NULL) {
      apq_context_destroy(made);
      return APQ_NO_MEMORY;
    }
    all->helpers[all->num_helpers++] = made;
  }
  for (int32_t i = 0; i < count; i++) {
    apq_context *helper = all->helpers[i];
    memcpy(helper->bits, c->bits, sizeof(int32_t) * (size_t)c->handle->module->num_precisions);
    helper->threads = 1;
    begin(helper->images, helper->runs + 1);
  }
  return APQ_OK;
}

int apq_run_images(apq_context *c, plan *p, const DLTensor *inputs, const DLTensor *outputs) {
  const apq_module *m = c->handle->module;
  const batch all = {inputs, outputs};
  int64_t images = p->symbols[m->batch], done = 0;
  int32_t threads = c->threads;
  if (images_of(c) == NULL) return APQ_NO_MEMORY;
  begin(c->images, c->runs);
  for (int32_t i = 0; i < c->images->num_helpers; i++) begin(c->images->helpers[i]->images, UINT64_MAX);
  if (images < 2 || p->arena <= m->near_bytes * (size_t)threads) return apq_run_plan(c, p, inputs, outputs);
  int rc = APQ_OK;
  if (threads > 1 && images >= threads) {
    shares side = {c, &all, images / threads};
    rc = find_helpers(c, threads - 1);
    if (rc != APQ_OK) return rc;
    apq_crew before = apq_threads_begin(c->handle, threads);
    c->threads = 1;
    rc = apq_side_by_side(run_one, &side, threads);
    c->threads = threads;
    apq_threads_end(&before);
    done = threads * side.each;
  }
  if (rc == APQ_OK && done < images) rc = run_share(c, &all, done, images - done);
  if (rc != APQ_BAD_INPUT) return rc;
  /* What is wrong with the inputs is told of the whole batch, not of a part, whose plans took the place of p. */
  rc = find_part(c, &all, 0, images, 0, m->num_stages, &p);
  return rc == APQ_OK ? apq_run_plan(c, p, inputs, outputs) : rc;
}
