/* Whether this machine has the instructions that a module's code is made of. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "apq_context.h"

#if defined(__aarch64__)

#include <sys/auxv.h>

/* Bits of AT_HWCAP (word 0) and AT_HWCAP2 (word 1), by their names in /proc/cpuinfo: Linux,
 * arch/arm64/include/uapi/asm/hwcap.h. The kernel sets a bit only if every core has the feature. The
 * text of /proc/cpuinfo is no source here: under an emulator it is the host's. */
typedef struct {
  const char *name;
  int word, bit;
} hwcap;

static const hwcap HWCAPS[] = {
    {"asimd", 0, 1},    {"atomics", 0, 8},     {"asimdhp", 0, 10}, {"asimdrdm", 0, 12},
    {"fcma", 0, 14},    {"sha3", 0, 17},       {"asimddp", 0, 20}, {"sve", 0, 22},
    {"asimdfhm", 0, 23}, {"sve2", 1, 1},       {"svebitperm", 1, 4}, {"i8mm", 1, 13},
    {"bf16", 1, 14},
};

typedef struct {
  unsigned long words[2];
} machine;

static int read_machine(machine *this, const apq_module *m) {
  (void)m;
  this->words[0] = getauxval(AT_HWCAP);
  this->words[1] = getauxval(AT_HWCAP2);
  return APQ_OK;
}

static int has(const machine *this, const char *name) {
  for (size_t i = 0; i < sizeof HWCAPS / sizeof *HWCAPS; i++) {
    if (strcmp(HWCAPS[i].name, name) == 0) return (this->words[HWCAPS[i].word] >> HWCAPS[i].bit) & 1;
  }
  return 0;
}

#else

typedef struct {
  char text[16384]; /* the first CPU's entry is about 1.5 KB */
  const char *flags;
} machine;

static int read_machine(machine *this, const apq_module *m) {
  FILE *file = fopen("/proc/cpuinfo", "re");
  size_t got = file == NULL ? 0 : fread(this->text, 1, sizeof this->text - 1, file);
  if (file != NULL) fclose(file);
  this->text[got] = '\0';
  char *flags = strstr(this->text, "\nflags");
  if (flags == NULL) {
    return apq_fail(APQ_BAD_MACHINE, "lib%s: /proc/cpuinfo does not tell this CPU's features", m->name);
  }
  flags[1 + strcspn(flags + 1, "\n")] = '\0';
  this->flags = flags;
  return APQ_OK;
}

static int has(const machine *this, const char *name) {
  if (strcmp(name, "amx_tile") == 0 && !apq_ask_for_tiles()) return 0;
  size_t length = strlen(name);
  for (const char *at = this->flags; (at = strstr(at, name)) != NULL; at += length) {
    char before = at[-1], after = at[length];
    if ((before == ' ' || before == '\t' || before == ':') && (after == ' ' || after == '\0')) return 1;
  }
  return 0;
}

#endif

int32_t apq_num_devices(const apq_module *m) {
  (void)m;
  return 1;
}

int apq_device_name(const apq_module *m, int32_t device, char *name, int32_t size) {
  if (device != 0) return apq_fail(APQ_BAD_MACHINE, "lib%s: there is no device %d, only the processor, 0", m->name, (int)device);
  snprintf(name, (size_t)size, "processor (%s)", m->target);
  return APQ_OK;
}

int apq_choose(const apq_module *const *modules, int32_t device, const apq_module **chosen) {
  machine this;
  char name[128];
  int rc = apq_device_name(modules[0], device, name, sizeof name);
  if (rc != APQ_OK) return rc;
  for (const apq_module *const *at = modules; *at != NULL; at++) {
    const apq_module *m = *at;
    const char *const *want = m->cpu_flags;
    if (*want != NULL && (rc = read_machine(&this, m)) != APQ_OK) return rc;
    while (*want != NULL && has(&this, *want)) want++;
    if (*want == NULL) {
      *chosen = m;
      return APQ_OK;
    }
    rc = apq_fail(APQ_BAD_MACHINE,
                  "lib%s needs the CPU feature %s, which this machine lacks: it was compiled for %s; "
                  "compile the model for this machine (--target host) or run it on one that has it",
                  m->name, *want, m->target);
  }
  return rc;
}
