/* Whether a team's helpers pay.
 *
 * Beside busy processes a helper may lose its CPU in the middle of a task, and the run waits for it as
 * long as the scheduler lets others have it: milliseconds, in which the run would have been done twice.
 * Or the helpers and the thread that runs share a CPU. No thread sees this coming. So what helpers gain
 * is weighed against what the thread loses while it has them: time that it spins for them, and time
 * that it has no CPU. Where they do not pay, it runs alone for several times the loss, which bounds the
 * share of all time that is lost, and longer each time that helpers had not earned before what was
 * lost then: a helper that has just been woken works well for the milliseconds of its slice. */
#define _GNU_SOURCE
#include "apq_threads.h"

enum {
  STRETCH = 1000000,       /* nanoseconds that are weighed at once */
  LONGEST = 250000000,     /* alone: the machine may have become idle */
  FORGOTTEN = 2 * LONGEST, /* since the last loss: the machine is another */
  LEAST_SENTENCE = 8,      /* for each nanosecond lost: most of a short prompt; a neighbour that stays doubles it soon */
  MOST_SENTENCE = 512
};

int apq_worth_alone(const apq_worth *w, int64_t now) { return now < w->alone_until; }

void apq_worth_begin(apq_worth *w, int64_t now) {
  if (w->since != 0) return;
  w->since = now;
  w->cpu_since = apq_clock(CLOCK_THREAD_CPUTIME_ID);
}

static void judge(apq_worth *w, int64_t now) {
  if (w->lost > w->gained / 2 && w->lost > STRETCH / 10) {
    if (now - w->lost_at > FORGOTTEN) w->sentence = 0;
    w->lost_at = now;
    w->sentence = w->earned > w->lost ? w->sentence / 2 : 2 * w->sentence;
    if (w->sentence < LEAST_SENTENCE) w->sentence = LEAST_SENTENCE;
    if (w->sentence > MOST_SENTENCE) w->sentence = MOST_SENTENCE;
    int64_t alone = w->lost * w->sentence;
    w->alone_until = now + (alone < LONGEST ? alone : LONGEST);
    w->earned = 0;
  } else {
    w->alone_until = 0; /* no need to look at the clock */
    w->earned += w->gained - w->lost;
  }
  w->wall = w->gained = w->lost = 0;
}

void apq_worth_end(apq_worth *w, int64_t now) {
  if (w->since == 0) return;
  int64_t wall = now - w->since, ran = apq_clock(CLOCK_THREAD_CPUTIME_ID) - w->cpu_since;
  w->since = 0;
  w->wall += wall;
  if (wall > ran) w->lost += wall - ran;
  if (w->wall >= STRETCH) judge(w, now);
}

void apq_worth_note(apq_worth *w, int64_t now, int64_t gained, int64_t spun) {
  w->gained += gained;
  w->lost += spun;
  if (w->wall + now - w->since < STRETCH) return;
  apq_worth_end(w, now);
}
