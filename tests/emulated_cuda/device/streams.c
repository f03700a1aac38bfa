/* Streams that are late on purpose. Each stream is a queue; what is in it happens when somebody must wait for it, or when
   EMULATED_LATE says so: 0 at once, but for messages between ranks and what comes after them; 1 side streams are as late as
   may be; 2 the default one is; 3 all are; 4 by chance (EMULATED_SEED). A wait that the program forgot then shows as wrong
   values, or as memory that is used again too early. */
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LATE_SIDE = 1, LATE_DEFAULT = 2, LATE_ALL = 3, LATE_BY_CHANCE = 4 };
enum { LONGEST_QUEUE = 1000 };
enum work_kind { COPY, SET, FILL, CALL, RECORD, WAIT, MESSAGE };

typedef struct work {
  enum work_kind kind;
  void *to;
  const void *from;
  size_t num_bytes; /* of FILL: how many values */
  int byte;
  char value[16];
  size_t width;
  void (*call)(long);
  long argument;
  int (*advance)(void *); /* of MESSAGE; NULL once it has returned 1 */
  void *message;
  emu_event *event;
  uint64_t number; /* which record of the event */
  emu_queue *queue; /* of WAIT: where the record is */
  void *owned;      /* a copy of pageable memory */
  struct work *next;
} work;

struct emu_queue {
  void *stream;
  work *first, *last;
  size_t length;
  emu_queue *next;
};

int emu_late;
static emu_queue *queues;
static _Atomic size_t num_queued; /* in all queues */
static pthread_mutex_t lock;
static unsigned seed;
static unsigned long long num_forced; /* waits that had to run another queue */

/* What runs under the lock may be Python. So nobody waits for the lock who holds Python's own. */
static int (*holds_gil)(void);
static void *(*release_gil)(void);
static void (*take_gil)(void *);

__attribute__((constructor)) static void start(void) {
  emu_late = (int)emu_setting("EMULATED_LATE", 0);
  seed = (unsigned)emu_setting("EMULATED_SEED", 1);
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&lock, &attributes);
  holds_gil = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
  release_gil = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  take_gil = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
}

static void *enter(void) {
  void *python = NULL;
  if (!pthread_mutex_trylock(&lock)) return NULL;
  if (holds_gil && holds_gil()) python = release_gil();
  pthread_mutex_lock(&lock);
  return python;
}

static void leave(void *python) {
  pthread_mutex_unlock(&lock);
  if (python) take_gil(python);
}

static double now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

static emu_queue *queue_of(void *stream) {
  if ((uintptr_t)stream < 16) stream = NULL; /* the names of the default stream */
  for (emu_queue *queue = queues; queue; queue = queue->next)
    if (queue->stream == stream) return queue;
  emu_queue *queue = calloc(1, sizeof *queue);
  queue->stream = stream;
  queue->next = queues;
  return queues = queue;
}

int emu_is_queueing(void) { return emu_late || num_queued; }

static int has_arrived(work *item) {
  if (item->advance && item->advance(item->message)) item->advance = NULL;
  return !item->advance;
}

static void run_until(emu_queue *queue, emu_event *event, uint64_t number);

static void run_first(emu_queue *queue) {
  work *item = queue->first;
  if (!item) return;
  queue->first = item->next;
  if (!queue->first) queue->last = NULL;
  queue->length--;
  num_queued--;
  switch (item->kind) {
  case COPY: emu_copy(item->to, item->from, item->num_bytes); break;
  case SET: emu_set(item->to, item->byte, item->num_bytes); break;
  case FILL:
    for (size_t i = 0; i < item->num_bytes; i++) memcpy((char *)item->to + i * item->width, item->value, item->width);
    break;
  case CALL: item->call(item->argument); break;
  case RECORD:
    if (item->event->num_done < item->number) {
      item->event->num_done = item->number;
      item->event->at_ms = now_ms();
    }
    break;
  case WAIT:
    if (item->event->num_done < item->number) {
      num_forced++;
      run_until(item->queue, item->event, item->number);
    }
    break;
  case MESSAGE:
    while (!has_arrived(item)) usleep(100);
    break;
  }
  free(item->owned);
  free(item);
}

static void run_until(emu_queue *queue, emu_event *event, uint64_t number) {
  while (queue->first && (!event || event->num_done < number)) run_first(queue);
}

/* Whether running what is first in a queue waits for no other rank. */
static int is_ready(emu_queue *queue) {
  work *item = queue->first;
  if (!item || (item->kind == MESSAGE && !has_arrived(item))) return 0;
  if (item->kind != WAIT) return 1;
  while (item->event->num_done < item->number && is_ready(item->queue)) run_first(item->queue);
  return item->event->num_done >= item->number;
}

static void run_what_is_ready(emu_queue *queue) {
  while (is_ready(queue)) run_first(queue);
}

static void run_by_chance(void) {
  size_t num_queues = 0;
  for (emu_queue *queue = queues; queue; queue = queue->next) num_queues++;
  size_t place = rand_r(&seed) % num_queues;
  emu_queue *queue = queues;
  while (place--) queue = queue->next;
  for (int number = rand_r(&seed) % 6; number > 0; number--)
    if (queue->first && (queue->first->kind != MESSAGE || is_ready(queue))) run_first(queue);
}

static void push(void *stream, work item) {
  void *python = enter();
  emu_queue *queue = queue_of(stream);
  work *copy = malloc(sizeof *copy);
  *copy = item;
  copy->next = NULL;
  if (queue->last) queue->last->next = copy;
  else queue->first = copy;
  queue->last = copy;
  queue->length++;
  num_queued++;
  if (!emu_late) run_what_is_ready(queue);
  if ((emu_late == LATE_SIDE && !queue->stream) || (emu_late == LATE_DEFAULT && queue->stream))
    run_until(queue, NULL, 0);
  if (emu_late == LATE_BY_CHANCE) run_by_chance();
  while (queue->length > LONGEST_QUEUE) run_first(queue);
  leave(python);
}

void emu_enqueue_copy(void *stream, void *to, const void *from, size_t num_bytes) {
  if (!emu_is_queueing()) return emu_copy(to, from, num_bytes);
  if (!emu_look_up(to, NULL)) { /* to pageable memory: as CUDA does, it returns when it is done */
    emu_finish(stream);
    return emu_copy(to, from, num_bytes);
  }
  work item = {.kind = COPY, .to = to, .from = from, .num_bytes = num_bytes};
  if (!emu_look_up(from, NULL)) { /* from pageable memory: it is read now */
    item.owned = malloc(num_bytes);
    memcpy(item.owned, from, num_bytes);
    item.from = item.owned;
  }
  push(stream, item);
}

void emu_enqueue_set(void *stream, void *to, int byte, size_t num_bytes) {
  if (!emu_is_queueing()) return emu_set(to, byte, num_bytes);
  push(stream, (work){.kind = SET, .to = to, .byte = byte, .num_bytes = num_bytes});
}

void emu_enqueue_fill(void *stream, void *to, const void *value, size_t width, size_t count) {
  work item = {.kind = FILL, .to = to, .num_bytes = count, .width = width};
  memcpy(item.value, value, width);
  push(stream, item);
}

void emu_enqueue_call(void *stream, void (*call)(long), long argument) {
  push(stream, (work){.kind = CALL, .call = call, .argument = argument});
}

void emu_enqueue_message(void *stream, int (*advance)(void *), void *message) {
  push(stream, (work){.kind = MESSAGE, .advance = advance, .message = message});
}

void emu_record(emu_event *event, void *stream) {
  void *python = enter();
  event->queue = queue_of(stream);
  event->num_asked++;
  push(stream, (work){.kind = RECORD, .event = event, .number = event->num_asked});
  leave(python);
}

void emu_wait(void *stream, emu_event *event) {
  if (event->num_done >= event->num_asked) return;
  void *python = enter();
  if (event->num_done < event->num_asked && event->queue != queue_of(stream))
    push(stream, (work){.kind = WAIT, .event = event, .number = event->num_asked, .queue = event->queue});
  leave(python);
}

void emu_finish(void *stream) {
  if (!emu_is_queueing()) return;
  void *python = enter();
  run_until(queue_of(stream), NULL, 0);
  leave(python);
}

void emu_finish_all(void) {
  if (!emu_is_queueing()) return;
  void *python = enter();
  for (emu_queue *queue = queues; queue; queue = queue->next) run_until(queue, NULL, 0);
  leave(python);
}

void emu_finish_event(emu_event *event) {
  void *python = enter();
  if (event->num_done < event->num_asked) run_until(event->queue, event, event->num_asked);
  leave(python);
}

/* Whoever asks again and again sees it done at last. */
int emu_is_event_done(emu_event *event) {
  if (event->num_done >= event->num_asked) return 1;
  if (pthread_mutex_trylock(&lock)) return 0;
  if (!emu_late) run_what_is_ready(event->queue);
  else if (rand_r(&seed) % 2) run_first(event->queue);
  int is_done = event->num_done >= event->num_asked;
  pthread_mutex_unlock(&lock);
  return is_done;
}

int emu_is_stream_done(void *stream) {
  if (!emu_is_queueing()) return 1;
  if (pthread_mutex_trylock(&lock)) return 0;
  emu_queue *queue = queue_of(stream);
  if (!emu_late) run_what_is_ready(queue);
  else if (rand_r(&seed) % 2) run_first(queue);
  int is_done = !queue->first;
  pthread_mutex_unlock(&lock);
  return is_done;
}

/* For values.py, by their names. */
int emulated_late(void) { return emu_late; }
void emulated_call(void *stream, void (*call)(long), long argument) { emu_enqueue_call(stream, call, argument); }
void emulated_finish(void *stream) { emu_finish(stream); }
int emulated_is_known(const void *inside) { return emu_look_up(inside, NULL); }
unsigned long long emulated_num_forced(void) { return num_forced; }
void emulated_set_seed(unsigned value) { /* with nothing in any queue, what follows is as in a process that began with it */
  emu_finish_all();
  seed = value;
}
void emulated_end(void) { /* no Python may be called any more */
  emu_finish_all();
  emu_late = 0;
}
