/* What the stub libraries share: the card, its memory, its streams. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* settings.c: the environment */
long emu_setting(const char *name, long otherwise);
size_t emu_setting_bytes(const char *name, size_t otherwise);
extern int emu_tracing; /* EMULATED_TRACE=1: a line for each call, to EMULATED_LOG or stderr */
void emu_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define TRACE(...) do { if (__builtin_expect(emu_tracing, 0)) emu_log(__VA_ARGS__); } while (0)
#define CALLED TRACE("%s\n", __func__)

/* card.c: which card it is (EMULATED_CARD), and how many (EMULATED_DEVICES) */
const char *emu_card_name(void);
int emu_card_capability(void); /* 86 is compute capability 8.6 */
size_t emu_card_bytes(void);
int emu_all_cards(void);
int emu_num_cards(void); /* of them, those that CUDA_VISIBLE_DEVICES shows */
int emu_card_attribute(int attribute); /* cudaDeviceAttr and CUdevice_attribute have the same numbers */
int emu_current_card(void);            /* of the calling thread */
void emu_use_card(int card);

/* memory.c: what is allocated, and where */
enum emu_kind { EMU_DEVICE = 1, EMU_PINNED, EMU_REGISTERED, EMU_RESERVED };
typedef struct { uintptr_t base; size_t num_bytes; enum emu_kind kind; int card; uint64_t id; } emu_range;
size_t emu_free_bytes(int card);
int emu_charge(int card, size_t num_bytes); /* 0; 2 (both APIs' "out of memory") when the card is full */
void emu_refund(int card, size_t num_bytes);
void *emu_map(size_t num_bytes, size_t alignment); /* zeros, which take no memory until they are written */
void emu_unmap(void *start, size_t num_bytes);
void emu_remember(void *start, size_t num_bytes, enum emu_kind kind, int card);
int emu_forget(void *start, emu_range *range);        /* 1 when a range starts there */
int emu_look_up(const void *inside, emu_range *range); /* 1 when some range holds it; `range` may be NULL */
int emu_is_on_card(const void *inside);
void emu_copy(void *to, const void *from, size_t num_bytes);
void emu_set(void *to, int byte, size_t num_bytes);

/* streams.c: what is asked of a stream is done at once, or late on purpose (EMULATED_LATE) */
typedef struct emu_queue emu_queue;
typedef struct {
  uint64_t num_asked, num_done; /* records of this event */
  emu_queue *queue;             /* of its last record */
  double at_ms;
  int is_recorded;
  unsigned long long capture; /* the graph that it was recorded for */
} emu_event;
extern int emu_late; /* 0: everything is done at once, but for what waits for another rank */
int emu_is_queueing(void); /* whether streams are late, or something is in a queue */
void emu_enqueue_copy(void *stream, void *to, const void *from, size_t num_bytes);
void emu_enqueue_set(void *stream, void *to, int byte, size_t num_bytes);
void emu_enqueue_fill(void *stream, void *to, const void *value, size_t width, size_t count);
void emu_enqueue_call(void *stream, void (*call)(long), long argument);
void emu_enqueue_message(void *stream, int (*advance)(void *), void *message); /* until `advance` returns 1 */
void emu_record(emu_event *event, void *stream);
void emu_wait(void *stream, emu_event *event);
void emu_finish(void *stream);
void emu_finish_all(void);
void emu_finish_event(emu_event *event);
int emu_is_event_done(emu_event *event);
int emu_is_stream_done(void *stream);

/* driver.c */
void *emu_driver_function(const char *name);
