/* Sessions of decoders: the tokens so far and the caches of their keys and values, which runs append to.
 *
 * The graph is that of other runs. Its inputs for caches are not read, since the tokens that a cache holds
 * already are not written (apq_symbol); the outputs that give caches back have no memory, and what makes
 * them is left out. Caches have tokens outermost, so that one of full capacity begins with the present.
 * What stays from run to run lies where kernels read it: in the GPU's memory, where they run on one. */
#include <stdlib.h>
#include <string.h>

#include "apq_context.h"


/* ---- the dimensions of a run ---- */

/* Axis `axis` of input `input` where `tokens` come behind `past`. */
static int64_t axis_of(const apq_session *s, int32_t input, int32_t axis, int64_t past, int64_t tokens) {
  const apq_module *m = s->context->handle->module;
  int last = axis == m->inputs[input].ndim - 1;
  const int64_t *given = s->fed_dims;
  switch (m->kept->feeds[input]) {
    case APQ_FEED_PAST:
      return axis == m->kept->past_axis ? past : s->batch;
    case APQ_FEED_IDS:
    case APQ_FEED_POSITIONS:
      return last ? tokens : s->batch;
    case APQ_FEED_MASK:
      return last ? past + tokens : s->batch;
    case APQ_FEED_GIVEN:
      for (int32_t i = 0; i < input; i++) given += m->inputs[i].ndim;
      return given[axis];
    default:
      return axis == 0 ? s->batch : 1;
  }
}

static int plan_for(apq_session *s, int64_t past, int64_t tokens, int64_t asked, plan **p) {
  apq_context *c = s->context;
  const apq_module *m = c->handle->module;
  c->given[0] = past;
  c->given[1] = asked;
  for (int32_t i = 0; i < m->num_symbols; i++) {
    const apq_symbol *symbol = &m->symbols[i];
    c->symbols[i] =
        symbol->input < 0 ? c->given[symbol->axis] : axis_of(s, symbol->input, symbol->axis, past, tokens);
  }
  return apq_plan_symbols(c, 0, m->num_stages, p);
}

int apq_leave_caches(apq_context *c, size_t *bytes) {
  const apq_kept *kept = c->handle->module->kept;
  for (int32_t i = 0; i < kept->num_buffers; i++) {
    size_t *mine = &bytes[kept->buffers[i]];
    region *r = &c->session->kept[i];
    if (r->data == NULL) r->bytes = *mine > r->bytes ? *mine : r->bytes; /* how much it will need */
    if (*mine > r->bytes) return apq_fail(APQ_BAD_INPUT, "the session's caches have no room for this run");
    *mine = 0;
  }
  return APQ_OK;
}

void apq_place_caches(apq_context *c) {
  const apq_kept *kept = c->handle->module->kept;
  for (int32_t i = 0; i < kept->num_buffers; i++) c->buffers[kept->buffers[i]] = c->session->kept[i].data;
}

/* ---- what goes to inputs ---- */

static int put_integer(unsigned char *to, DLDataType type, int64_t index, int64_t value) {
  if (type.bits == 64) {
    memcpy(to + 8 * index, &value, 8);
  } else {
    int32_t narrow = (int32_t)value;
    memcpy(to + 4 * index, &narrow, 4);
  }
  return APQ_OK;
}

/* Ones of any type that masks have; -1 for another. */
static int put_ones(unsigned char *to, DLDataType type, int64_t count) {
  static const float one = 1.0f;
  size_t item = type.bits / 8;
  unsigned char text[8] = {1};
  if (type.code == kDLFloat && type.bits == 32) {
    memcpy(text, &one, sizeof one);
  } else if (type.code == kDLFloat && type.bits == 16) {
    text[0] = 0, text[1] = 0x3c;
  } else if (type.code == kDLFloat || item > sizeof text) {
    return -1;
  }
  for (int64_t i = 0; i < count; i++) memcpy(to + item * (size_t)i, text, item);
  return 0;
}

/* Ones for all tokens, where runs read them. */
static int fill_mask(apq_session *s, const apq_value *input, region *to, size_t bytes) {
  region ones = {NULL, 0};
  int rc = apq_reserve(&ones, bytes, "a session's mask");
  if (rc == APQ_OK && put_ones(ones.data, input->dtype, s->batch * s->capacity) != 0) {
    rc = apq_fail(APQ_BAD_INPUT, "input '%s' has a type that sessions cannot fill", input->name);
  }
  if (rc == APQ_OK) {
    DLTensor all = apq_tensor(ones.data, input->dtype, 1, (int64_t[]){s->batch * s->capacity});
    rc = apq_put_resident(s->context, to, &all, bytes);
  }
  free(ones.data);
  return rc;
}

/* Whether a run reads what a session was made with, or what this run brings. */
static int is_resident(apq_feed feed) {
  return feed == APQ_FEED_PAST || feed == APQ_FEED_MASK || feed == APQ_FEED_GIVEN;
}

/* Memory of all that a session feeds, for full caches; masks are filled once. */
static int prepare_feeds(apq_session *s, const DLTensor *given) {
  const apq_module *m = s->context->handle->module;
  int64_t *dims = s->fed_dims;
  for (int32_t i = 0; i < m->num_inputs; dims += m->inputs[i].ndim, i++) {
    const apq_value *input = &m->inputs[i];
    apq_feed feed = m->kept->feeds[i];
    size_t item = input->dtype.bits / 8, bytes = 8 * (size_t)s->batch;
    int rc;
    if (feed == APQ_FEED_PAST) continue;
    if (feed == APQ_FEED_GIVEN) {
      const DLTensor *t = given == NULL ? NULL : &given[i];
      if (t == NULL || t->data == NULL || t->shape == NULL || t->ndim != input->ndim ||
          memcmp(&t->dtype, &input->dtype, sizeof t->dtype) != 0 || t->strides != NULL) {
        return apq_fail(APQ_BAD_INPUT, "a session of %s needs input '%s', contiguous and of its type", m->name,
                        input->name);
      }
      if ((rc = apq_bytes(&bytes, input->name, item, t->ndim, t->shape)) != APQ_OK) return rc;
      if ((rc = apq_check_place(s->context->handle, "input", input->name, t)) != APQ_OK) return rc;
      memcpy(dims, t->shape, 8 * (size_t)t->ndim);
    } else if (feed != APQ_FEED_LENGTHS && feed != APQ_FEED_TOTAL) {
      int64_t tokens[] = {s->batch, s->capacity};
      if ((rc = apq_bytes(&bytes, input->name, item, 2, tokens)) != APQ_OK) return rc;
    }
    if (is_resident(feed)) {
      rc = apq_reserve_resident(s->context, &s->fed[i], bytes, "a session's inputs");
      if (rc == APQ_OK && feed == APQ_FEED_GIVEN) rc = apq_put_resident(s->context, &s->fed[i], &given[i], bytes);
      if (rc == APQ_OK && feed == APQ_FEED_MASK) rc = fill_mask(s, input, &s->fed[i], bytes);
    } else {
      rc = apq_reserve(&s->fed[i], bytes, "a session's inputs");
    }
    if (rc != APQ_OK) return rc;
  }
  return APQ_OK;
}

/* The inputs of a run of `tokens` behind `past`; `first` is where the caller's ids begin, of which each
 * sequence has `count`. */
static int feed_inputs(apq_session *s, const plan *p, const int64_t *first, int64_t count, int64_t past,
                       int64_t tokens) {
  const apq_module *m = s->context->handle->module;
  int64_t *dims = p->in_dims;
  for (int32_t i = 0; i < m->num_inputs; dims += m->inputs[i].ndim, i++) {
    const apq_value *input = &m->inputs[i];
    int resident = is_resident(m->kept->feeds[i]);
    unsigned char *to = m->kept->feeds[i] == APQ_FEED_PAST ? s->kept[0].data : s->fed[i].data;
    int64_t rows = 1, at = 0;
    size_t bytes;
    int rc = apq_bytes(&bytes, input->name, input->dtype.bits / 8, input->ndim, dims);
    if (rc != APQ_OK) return rc;
    s->inputs[i] = apq_tensor(to, input->dtype, input->ndim, dims);
    if (resident) s->inputs[i].device = apq_resident_device(s->context);
    if (m->kept->feeds[i] == APQ_FEED_PAST) continue;
    if (bytes > s->fed[i].bytes) {
      return apq_fail(APQ_BAD_INPUT, "input '%s' has more elements than a session feeds", input->name);
    }
    for (int32_t j = 0; j + 1 < input->ndim; j++) rows *= dims[j];
    switch (m->kept->feeds[i]) {
      case APQ_FEED_IDS:
        for (int64_t b = 0; b < rows; b++) {
          for (int64_t j = 0; j < tokens; j++) put_integer(to, input->dtype, at++, first[b * count + j]);
        }
        break;
      case APQ_FEED_POSITIONS:
        for (int64_t b = 0; b < rows; b++) {
          for (int64_t j = 0; j < tokens; j++) put_integer(to, input->dtype, at++, past + j);
        }
        break;
      case APQ_FEED_LENGTHS:
        for (int64_t b = 0; b < s->batch; b++) put_integer(to, input->dtype, b, past + tokens - 1);
        break;
      case APQ_FEED_TOTAL:
        put_integer(to, input->dtype, 0, past + tokens);
        break;
      default:
        break;
    }
  }
  return APQ_OK;
}

/* ---- making and ending ---- */

static apq_session *allocate(const apq_module *m) {
  size_t inputs = (size_t)m->num_inputs, outputs = (size_t)m->num_outputs;
  size_t kept = (size_t)m->kept->num_buffers * sizeof(region), fed = inputs * sizeof(region);
  size_t tensors = (inputs + outputs) * sizeof(DLTensor), dims = 8 * (size_t)m->input_dims;
  apq_session *s = calloc(1, sizeof *s + kept + fed + tensors + dims);
  if (s == NULL) return NULL;
  unsigned char *at = (unsigned char *)(s + 1);
  s->kept = (region *)(void *)at;
  s->fed = (region *)(void *)(at += kept);
  s->inputs = (DLTensor *)(void *)(at += fed);
  s->outputs = s->inputs + inputs;
  s->fed_dims = (int64_t *)(void *)(at + tensors);
  atomic_flag_clear(&s->busy);
  return s;
}

/* Plans of one token and of as many as are taken at once, behind full caches: they have room for all
 * others. The first one measures the caches. */
static int prepare_plans(apq_session *s) {
  int64_t most = s->capacity < apq_together() ? s->capacity : apq_together();
  plan *p;
  int rc = plan_for(s, s->capacity - 1, 1, 1, &p);
  if (rc == APQ_OK) rc = plan_for(s, s->capacity - most, most, 1, &p);
  for (int32_t i = 0; rc == APQ_OK && i < s->context->handle->module->kept->num_buffers; i++) {
    size_t bytes = s->kept[i].bytes;
    s->kept[i].bytes = 0;
    rc = apq_reserve_resident(s->context, &s->kept[i], bytes, "a session's caches");
  }
  return rc;
}

int apq_session_create(const apq_handle *h, int64_t batch, int64_t max_tokens, const DLTensor *given,
                       apq_session **out) {
  if (out == NULL) return apq_null("where the session is to be written");
  *out = NULL;
  if (h == NULL) return apq_null("the handle");
  const apq_module *m = h->module;
  if (m->kept == NULL) return apq_fail(APQ_BAD_INPUT, "%s has no caches that a session could keep", m->name);
  if (batch < 1 || batch > APQ_LARGEST_DIM || max_tokens < 1 || max_tokens > APQ_LARGEST_DIM) {
    return apq_fail(APQ_BAD_INPUT, "a session of %lld sequences of %lld tokens: both must be 1 to %d",
                    (long long)batch, (long long)max_tokens, APQ_LARGEST_DIM);
  }
  apq_session *s = allocate(m);
  if (s == NULL) return apq_fail(APQ_NO_MEMORY, "lib%s: no memory for a session", m->name);
  s->batch = batch;
  s->capacity = max_tokens;
  int rc = apq_context_create(h, &s->context);
  if (rc == APQ_OK) {
    s->context->session = s;
    rc = prepare_feeds(s, given);
  }
  if (rc == APQ_OK) rc = prepare_plans(s);
  if (rc != APQ_OK) {
    apq_session_destroy(s);
    return rc;
  }
  *out = s;
  return APQ_OK;
}

void apq_session_destroy(apq_session *s) {
  if (s == NULL) return;
  if (s->context != NULL) {
    const apq_module *m = s->context->handle->module;
    for (int32_t i = 0; i < m->kept->num_buffers; i++) apq_free_resident(s->context, &s->kept[i]);
    apq_free_resident(s->context, &s->unwanted);
    for (int32_t i = 0; i < m->num_inputs; i++) {
      if (is_resident(m->kept->feeds[i])) {
        apq_free_resident(s->context, &s->fed[i]);
      } else {
        free(s->fed[i].data);
      }
    }
  }
  free(s->aside.data);
  apq_context_destroy(s->context);
  free(s);
}

/* ---- one at a time ---- */

static int take(apq_session *s) {
  if (s == NULL) return apq_null("the session");
  if (!atomic_flag_test_and_set(&s->busy)) return APQ_OK;
  return apq_fail(APQ_BAD_INPUT, "the session is in use by another thread; fork it, or make one for each");
}

static int give_back(apq_session *s, int rc) {
  atomic_flag_clear(&s->busy);
  return rc;
}

int64_t apq_session_length(const apq_session *s) { return s == NULL ? apq_null("the session") : s->length; }

int64_t apq_session_width(const apq_session *s) {
  if (s == NULL) return apq_null("the session");
  const apq_module *m = s->context->handle->module;
  const int64_t *dims = s->context->plans[0].out_dims;
  for (int32_t i = 0; i <= m->kept->logits; i++) dims += m->outputs[i].ndim;
  return dims[-1];
}

apq_context *apq_session_context(apq_session *s) {
  if (s != NULL) return s->context;
  (void)apq_null("the session");
  return NULL;
}

int apq_session_memory(const apq_session *s, uint64_t *cache_bytes, uint64_t *arena_bytes) {
  if (s == NULL) return apq_null("the session");
  if (cache_bytes == NULL || arena_bytes == NULL) return apq_null("where bytes are to be written");
  uint64_t live;
  *cache_bytes = 0;
  for (int32_t i = 0; i < s->context->handle->module->kept->num_buffers; i++) *cache_bytes += s->kept[i].bytes;
  return apq_memory(s->context, arena_bytes, &live);
}

int apq_session_rewind(apq_session *s, int64_t tokens) {
  int rc = take(s);
  if (rc != APQ_OK) return rc;
  if (tokens < 0 || tokens > s->length) {
    rc = apq_fail(APQ_BAD_INPUT, "the session has %lld tokens, of which %lld cannot be taken back",
                  (long long)s->length, (long long)tokens);
  } else {
    s->length -= tokens;
  }
  return give_back(s, rc);
}

static int copy_caches(apq_session *to, const apq_session *from) {
  const apq_module *m = from->context->handle->module;
  apq_context *c = to->context;
  if (from->length == 0) return APQ_OK;
  size_t *bytes = c->offsets; /* scratch, as long as there are buffers */
  plan *p;
  int rc = plan_for(to, from->length - 1, 1, 1, &p);
  if (rc == APQ_OK) rc = m->shapes(p->symbols, p->in_dims, p->out_dims, bytes);
  for (int32_t i = 0; rc == APQ_OK && i < m->kept->num_buffers; i++) {
    rc = apq_copy_resident(c, to->kept[i].data, from->kept[i].data, bytes[m->kept->buffers[i]]);
  }
  to->length = from->length;
  return rc;
}

int apq_session_fork(apq_session *s, apq_session **out) {
  if (out == NULL) return apq_null("where the session is to be written");
  *out = NULL;
  int rc = take(s);
  if (rc != APQ_OK) return rc;
  const apq_handle *h = s->context->handle;
  const apq_module *m = h->module;
  DLTensor *given = calloc((size_t)m->num_inputs + 1, sizeof *given);
  if (given == NULL) return give_back(s, apq_fail(APQ_NO_MEMORY, "no memory for a session"));
  int64_t *dims = s->fed_dims;
  for (int32_t i = 0; i < m->num_inputs; dims += m->inputs[i].ndim, i++) {
    given[i] = apq_tensor(s->fed[i].data, m->inputs[i].dtype, m->inputs[i].ndim, dims);
    if (is_resident(m->kept->feeds[i])) given[i].device = apq_resident_device(s->context);
  }
  apq_session *made;
  rc = apq_session_create(h, s->batch, s->capacity, given, &made);
  free(given);
  if (rc == APQ_OK && (rc = copy_caches(made, s)) != APQ_OK) apq_session_destroy(made);
  if (rc == APQ_OK) *out = made;
  return give_back(s, rc);
}

/* ---- running ---- */

/* Runs `tokens` behind `past` and writes logits of the last `asked` of them. */
static int run_some(apq_session *s, const int64_t *first, int64_t count, int64_t past, int64_t tokens,
                    int64_t asked, void *logits, DLDevice place) {
  const apq_module *m = s->context->handle->module;
  plan *p;
  int rc = plan_for(s, past, tokens, asked, &p);
  if (rc == APQ_OK) rc = feed_inputs(s, p, first, count, past, tokens);
  if (rc != APQ_OK) return rc;
  int64_t *dims = p->out_dims;
  for (int32_t i = 0; i < m->num_outputs; dims += m->outputs[i].ndim, i++) {
    void *data = i == m->kept->logits ? logits : NULL;
    s->outputs[i] = apq_tensor(data, m->outputs[i].dtype, m->outputs[i].ndim, dims);
    s->outputs[i].device = place;
  }
  s->context->threads = apq_num_threads(s->context->handle);
  return apq_run_plan(s->context, p, s->inputs, s->outputs);
}

/* Where a run's logits go that are not the caller's as they are: to those of one of several sequences. */
static void spread(const apq_session *s, unsigned char *to, int64_t asked, int64_t before, int64_t rows,
                   size_t row_bytes) {
  for (int64_t b = 0; b < s->batch; b++) {
    memcpy(to + (size_t)(b * asked + before) * row_bytes, s->aside.data + (size_t)(b * rows) * row_bytes,
           (size_t)rows * row_bytes);
  }
}

static int run_all(apq_session *s, const int64_t *ids, int64_t tokens, int64_t asked, unsigned char *logits) {
  const apq_module *m = s->context->handle->module;
  size_t row_bytes = (size_t)apq_session_width(s) * (m->outputs[m->kept->logits].dtype.bits / 8);
  int64_t done = 0, written = 0;
  while (done < tokens) {
    int64_t now = tokens - done < apq_together() ? tokens - done : apq_together();
    int64_t wanted = asked - (tokens - done - now); /* of the rows asked for, those up to here ... */
    wanted = wanted < written ? 0 : wanted - written; /* ... that were not written before */
    int64_t rows = wanted > 0 ? wanted : 1;
    int aside = wanted > 0 && s->batch > 1 && now < tokens;
    size_t bytes = (size_t)(s->batch * rows) * row_bytes;
    DLDevice host = {kDLCPU, 0};
    void *to = logits + (size_t)written * row_bytes;
    int rc = APQ_OK;
    if (aside) rc = apq_reserve(&s->aside, bytes, "logits");
    if (wanted == 0) rc = apq_reserve_resident(s->context, &s->unwanted, bytes, "logits");
    if (rc == APQ_OK && aside) to = s->aside.data;
    if (rc == APQ_OK && wanted == 0) to = s->unwanted.data;
    DLDevice place = wanted == 0 ? apq_resident_device(s->context) : host;
    if (rc == APQ_OK) rc = run_some(s, ids + done, tokens, s->length + done, now, rows, to, place);
    if (rc != APQ_OK) return rc;
    if (aside) spread(s, logits, asked, written, wanted, row_bytes);
    done += now;
    written += wanted;
  }
  s->length += tokens; /* only now: what failed half way left the session as it was */
  return APQ_OK;
}

/* Tokens count from 0: what looks up their rows would take a negative one from the end of its table. */
static int check_ids(const apq_session *s, const int64_t *ids, int64_t tokens) {
  for (int64_t i = 0; i < s->batch * tokens; i++) {
    if (ids[i] < 0) {
      return apq_fail(APQ_BAD_INPUT, "id %lld (token %lld of sequence %lld) is no token: they count from 0",
                      (long long)ids[i], (long long)(i % tokens), (long long)(i / tokens));
    }
  }
  return APQ_OK;
}

int apq_session_run(apq_session *s, const int64_t *ids, int64_t tokens, int64_t asked, void *logits,
                    int32_t bits) {
  if (ids == NULL) return apq_null("the ids");
  if (logits == NULL && asked > 0) return apq_null("where logits are to be written");
  int rc = take(s);
  if (rc != APQ_OK) return rc;
  if (tokens < 1 || asked < 0 || asked > tokens) {
    return give_back(s, apq_fail(APQ_BAD_INPUT, "%lld tokens, logits of the last %lld: wanted one at least, and no more than there are",
                                 (long long)tokens, (long long)asked));
  }
  if (tokens > s->capacity - s->length) {
    return give_back(s, apq_fail(APQ_BAD_INPUT,
                                 "the session has %lld of at most %lld tokens, no room for %lld more; make one "
                                 "with more, or take some back by _session_rewind",
                                 (long long)s->length, (long long)s->capacity, (long long)tokens));
  }
  rc = check_ids(s, ids, tokens);
  if (rc == APQ_OK) rc = apq_take_bits(s->context, bits);
  if (rc == APQ_OK) rc = run_all(s, ids, tokens, asked, logits);
  return give_back(s, rc);
}
