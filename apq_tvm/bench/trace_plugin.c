/* A plugin of qemu-user that counts executions of every translated block between two functions:
   -plugin trace.so,out=FILE,begin=0xADDRESS,end=0xADDRESS. FILE gets lines "start size count" with
   the address of a block's first instruction, its instructions, and how often it ran.
   The few declarations are from QEMU's include/qemu/qemu-plugin.h: the same in every version of its
   API so far. QEMU up to 8 wants API 1, later ones want 2 or more. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
extern void qemu_plugin_register_vcpu_tb_trans_cb(
    plugin_id id, void (*translated)(plugin_id, struct qemu_plugin_tb *));
extern void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb,
                                                 void (*run)(unsigned, void *), int flags,
                                                 void *data);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb);

EXPORT int qemu_plugin_version = API;

/* QEMU may translate a block again; the two records are added up by who reads the file. */
typedef struct block {
  struct block *next;
  uint64_t start, size, count;
} block;

static block *blocks;
static uint64_t begin, end;
static const char *out;

static void start(unsigned cpu, void *data) {
  (void)cpu, (void)data;
  for (block *b = blocks; b != NULL; b = b->next) b->count = 0;
}

static void stop(unsigned cpu, void *data) {
  (void)cpu, (void)data;
  FILE *file = fopen(out, "w");
  if (file == NULL) return;
  for (block *b = blocks; b != NULL; b = b->next)
    if (b->count != 0)
      fprintf(file, "%llu %llu %llu\n", (unsigned long long)b->start, (unsigned long long)b->size,
              (unsigned long long)b->count);
  fclose(file);
}

static void count(unsigned cpu, void *data) {
  (void)cpu;
  ((block *)data)->count++;
}

static void translated(plugin_id id, struct qemu_plugin_tb *tb) {
  (void)id;
  uint64_t address = qemu_plugin_tb_vaddr(tb);
  if (address == begin || address == end) {
    qemu_plugin_register_vcpu_tb_exec_cb(tb, address == begin ? start : stop, 0, NULL);
    return;
  }
  block *b = calloc(1, sizeof *b);
  if (b == NULL) abort();
  b->next = blocks, b->start = address, b->size = qemu_plugin_tb_n_insns(tb);
  blocks = b;
  qemu_plugin_register_vcpu_tb_exec_cb(tb, count, 0, b);
}

EXPORT int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv) {
  (void)info;
  for (int i = 0; i < argc; i++) {
    if (strncmp(argv[i], "out=", 4) == 0) out = strdup(argv[i] + 4);
    if (strncmp(argv[i], "begin=", 6) == 0) begin = strtoull(argv[i] + 6, NULL, 0);
    if (strncmp(argv[i], "end=", 4) == 0) end = strtoull(argv[i] + 4, NULL, 0);
  }
  if (out == NULL || begin == 0 || end == 0) return 1;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  return 0;
}
