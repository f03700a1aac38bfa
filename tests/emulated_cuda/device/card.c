/* Which card is emulated. build.py writes cards.h from conf/data_sheets: {option, driver's name, capability, bytes, SMs}. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

typedef struct { const char *option, *name; int capability; size_t num_bytes; int num_sms; } card;
static const card cards[] = {
#include "cards.h"
};

/* Limits of an architecture, from the table "Technical Specifications per Compute Capability" of the CUDA programming
   guide; L2 and bus of its largest card. */
typedef struct { int capability, shared_per_block, shared_per_sm, threads_per_sm, blocks_per_sm, l2_bytes, bus_bits; } architecture;
static const architecture architectures[] = {
    {75, 65536, 65536, 1024, 16, 4 << 20, 256},     {80, 166912, 167936, 2048, 32, 40 << 20, 5120},
    {86, 101376, 102400, 1536, 16, 6 << 20, 384},   {89, 101376, 102400, 1536, 24, 72 << 20, 384},
    {90, 232448, 233472, 2048, 32, 50 << 20, 5120}, {100, 232448, 233472, 2048, 32, 126 << 20, 8192},
    {120, 101376, 102400, 1536, 24, 96 << 20, 512},
};

static const card *chosen(void) {
  static const card *found;
  if (found) return found;
  const char *option = getenv("EMULATED_CARD");
  if (!option || !*option) option = "h100";
  for (size_t i = 0; i < sizeof cards / sizeof *cards; i++)
    if (!strcmp(cards[i].option, option)) return found = &cards[i];
  emu_log("EMULATED_CARD=%s: conf/data_sheets has no such card with CUDA\n", option);
  exit(2);
}

static const architecture *of_card(void) {
  for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++)
    if (architectures[i].capability == emu_card_capability()) return &architectures[i];
  emu_log("no limits are known of compute capability %d\n", emu_card_capability());
  exit(2);
}

const char *emu_card_name(void) { return chosen()->name; }
int emu_card_capability(void) { return chosen()->capability; }
size_t emu_card_bytes(void) { return emu_setting_bytes("EMULATED_BYTES", chosen()->num_bytes); }

int emu_all_cards(void) { return (int)emu_setting("EMULATED_DEVICES", 1); }

/* As CUDA does it: the first entry that names no card ends the list. */
int emu_num_cards(void) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  int visible = 0;
  if (!list) return emu_all_cards();
  while (*list && *list != '-' && visible < emu_all_cards()) {
    if (*list >= '0' && *list <= '9' && atoi(list) >= emu_all_cards()) break;
    visible++;
    list += strcspn(list, ",");
    list += *list == ',';
  }
  return visible;
}

static __thread int current;
int emu_current_card(void) { return current; }
void emu_use_card(int card) { current = card; }

int emu_card_attribute(int attribute) {
  const architecture *limits = of_card();
  switch (attribute) {
  case 1: return 1024;        /* threads per block */
  case 2: case 3: return 1024; /* block x, y */
  case 4: return 64;          /* block z */
  case 5: return 2147483647;  /* grid x */
  case 6: case 7: return 65535; /* grid y, z */
  case 8: return 49152;       /* shared memory per block */
  case 9: return 65536;       /* constant memory */
  case 10: return 32;         /* warp */
  case 11: return 2147483647; /* pitch */
  case 12: return 65536;      /* registers per block */
  case 13: return 1980000;    /* clock, kHz */
  case 14: return 512;        /* texture alignment */
  case 16: return chosen()->num_sms;
  case 33: return 1 + emu_current_card(); /* PCI bus */
  case 36: return 2619000;    /* memory clock, kHz */
  case 37: return limits->bus_bits;
  case 38: return limits->l2_bytes;
  case 39: return limits->threads_per_sm;
  case 40: return 3;          /* copy engines */
  case 75: return emu_card_capability() / 10;
  case 76: return emu_card_capability() % 10;
  case 81: return limits->shared_per_sm;
  case 82: return 65536;      /* registers per multiprocessor */
  case 87: return 2;          /* single to double precision */
  case 97: return limits->shared_per_block; /* opted in */
  case 106: return limits->blocks_per_sm;
  case 111: return 1024;      /* shared memory that the system keeps per block */
  case 120: return emu_card_capability() >= 90; /* clusters */
  /* overlap, mapped host memory, concurrent kernels, unified addressing, stream priorities, both L1 caches, managed
     memory, preemption, cooperative launch, host registration, virtual memory, memory pools */
  case 15: case 19: case 31: case 32: case 41: case 78: case 79: case 80: case 83: case 86: case 89: case 90: case 91:
  case 92: case 93: case 94: case 95: case 98: case 99: case 102: case 103: case 115: return 1;
  default: return 0;
  }
}
