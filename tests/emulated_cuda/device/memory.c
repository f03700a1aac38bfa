/* Device memory is memory of the host, counted against the card's size. It isn't committed before it is written, so a
   card of 80 GB fits into any machine as long as what runs is small, or all zeros. */
#define _GNU_SOURCE
#include "device.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MAX_CARDS = 16, PAGE = 4096, CHUNK = 1 << 16 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static emu_range *ranges; /* by address */
static size_t num_ranges, capacity;
static uint64_t next_id = 1;
static size_t used_bytes[MAX_CARDS];

static size_t rounded_up(size_t number, size_t unit) { return (number + unit - 1) / unit * unit; }

/* What the CUDA context of a process takes of a card: a setting; scripts/emulated_gpu takes what plans count. */
static size_t context_bytes(void) { return (size_t)emu_setting("EMULATED_CONTEXT_MIB", 426) << 20; }

size_t emu_free_bytes(int card) {
  pthread_mutex_lock(&lock);
  size_t total = emu_card_bytes(), used = used_bytes[card] + context_bytes();
  pthread_mutex_unlock(&lock);
  return used < total ? total - used : 0;
}

int emu_charge(int card, size_t num_bytes) {
  pthread_mutex_lock(&lock);
  int is_full = used_bytes[card] + num_bytes + context_bytes() > emu_card_bytes();
  if (!is_full) used_bytes[card] += num_bytes;
  pthread_mutex_unlock(&lock);
  return is_full ? 2 : 0;
}

void emu_refund(int card, size_t num_bytes) {
  pthread_mutex_lock(&lock);
  used_bytes[card] -= num_bytes;
  pthread_mutex_unlock(&lock);
}

void *emu_map(size_t num_bytes, size_t alignment) {
  if (alignment < PAGE) alignment = PAGE;
  size_t whole = num_bytes + alignment;
  char *start = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return NULL;
  char *aligned = (char *)rounded_up((uintptr_t)start, alignment);
  char *end = (char *)rounded_up((uintptr_t)aligned + num_bytes, PAGE);
  if (aligned > start) munmap(start, aligned - start);
  if (start + whole > end) munmap(end, start + whole - end);
  return aligned;
}

void emu_unmap(void *start, size_t num_bytes) { munmap(start, rounded_up(num_bytes, PAGE)); }

/* The place of the first range that starts above an address. */
static size_t place_above(uintptr_t address) {
  size_t low = 0, high = num_ranges;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (ranges[middle].base <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

void emu_remember(void *start, size_t num_bytes, enum emu_kind kind, int card) {
  pthread_mutex_lock(&lock);
  if (num_ranges == capacity) {
    capacity = capacity ? capacity * 2 : 256;
    ranges = realloc(ranges, capacity * sizeof *ranges);
  }
  size_t place = place_above((uintptr_t)start);
  memmove(ranges + place + 1, ranges + place, (num_ranges - place) * sizeof *ranges);
  num_ranges++;
  ranges[place] = (emu_range){(uintptr_t)start, num_bytes, kind, card, next_id++};
  pthread_mutex_unlock(&lock);
}

int emu_forget(void *start, emu_range *range) {
  pthread_mutex_lock(&lock);
  size_t place = place_above((uintptr_t)start);
  int is_known = place && ranges[place - 1].base == (uintptr_t)start;
  if (is_known) {
    if (range) *range = ranges[place - 1];
    memmove(ranges + place - 1, ranges + place, (num_ranges - place) * sizeof *ranges);
    num_ranges--;
  }
  pthread_mutex_unlock(&lock);
  return is_known;
}

int emu_look_up(const void *inside, emu_range *range) {
  uintptr_t address = (uintptr_t)inside;
  pthread_mutex_lock(&lock);
  size_t place = place_above(address);
  int is_known = place && address < ranges[place - 1].base + ranges[place - 1].num_bytes;
  if (is_known && range) *range = ranges[place - 1];
  pthread_mutex_unlock(&lock);
  return is_known;
}

int emu_is_on_card(const void *inside) {
  emu_range range;
  return emu_look_up(inside, &range) && (range.kind == EMU_DEVICE || range.kind == EMU_RESERVED);
}

static int is_all_zero(const char *start, size_t num_bytes) {
  return !num_bytes || (!*start && !memcmp(start, start + 1, num_bytes - 1));
}

/* The card's own pages are given back to the kernel instead of being written: they are zero when they come again. */
static void zero(char *start, size_t num_bytes, int is_on_card) {
  if (is_on_card && num_bytes >= CHUNK) {
    char *first = (char *)rounded_up((uintptr_t)start, PAGE), *end = start + num_bytes;
    char *last = (char *)((uintptr_t)end / PAGE * PAGE);
    memset(start, 0, first - start);
    madvise(first, last - first, MADV_DONTNEED);
    memset(last, 0, end - last);
  } else if (!is_all_zero(start, num_bytes)) {
    memset(start, 0, num_bytes);
  }
}

/* Whether no page of a piece of the card's memory was ever written. */
static int is_untouched(const char *start, size_t num_bytes) {
  unsigned char resident[CHUNK / PAGE + 2];
  char *first = (char *)((uintptr_t)start / PAGE * PAGE);
  size_t length = start + num_bytes - first;
  if (mincore(first, length, resident)) return 0;
  for (size_t page = 0; page < rounded_up(length, PAGE) / PAGE; page++)
    if (resident[page] & 1) return 0;
  return 1;
}

void emu_copy(void *to, const void *from, size_t num_bytes) {
  int to_card = emu_is_on_card(to), from_card = emu_is_on_card(from);
  if (num_bytes < CHUNK || (!to_card && !from_card)) {
    memmove(to, from, num_bytes);
    return;
  }
  for (size_t at = 0; at < num_bytes; at += CHUNK) {
    size_t length = num_bytes - at < CHUNK ? num_bytes - at : CHUNK;
    const char *source = (const char *)from + at;
    char *target = (char *)to + at;
    if ((from_card && is_untouched(source, length)) || is_all_zero(source, length)) zero(target, length, to_card);
    else memmove(target, source, length);
  }
}

void emu_set(void *to, int byte, size_t num_bytes) {
  if (!num_bytes) return;
  if (byte & 255) memset(to, byte, num_bytes);
  else zero(to, num_bytes, emu_is_on_card(to));
}
