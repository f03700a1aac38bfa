/* NCCL between processes of one machine: each rank puts its bytes into memory that all share, waits for the others, and
   takes what it is to have. Sums are made in the order of ranks by each rank for itself, so all get the same bits.
   Messages from one rank to another wait in their stream, as on a card, and nobody waits for them who needn't: a message has
   arrived when the other rank has taken it, so that what would wait for ever with large ones does so with small ones, too. */
#define _GNU_SOURCE
#include "device.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum { SUM, PROD, MAX, MIN, AVG, FIRST_OWN };
enum { FP16 = 6, FP32 = 7, FP64 = 8, BF16 = 9 };
enum { MAX_RANKS = 16, MAX_OPS = 64, SLOT_BYTES = 4 << 20 };

typedef struct { char bytes[128]; } unique_id;

typedef struct {
  _Atomic int num_here, round;
  _Atomic pid_t process[MAX_RANKS];
  struct { int color, key; } wish[MAX_RANKS]; /* of ncclCommSplit */
  _Atomic int num_put[MAX_RANKS][MAX_RANKS], num_taken[MAX_RANKS][MAX_RANKS]; /* messages, by sender and receiver */
  char slot[MAX_RANKS][SLOT_BYTES];
} meeting;

typedef struct {
  unique_id id;
  int num_ranks, rank, num_splits;
  meeting *shared;
  double factor[MAX_OPS]; /* of ncclRedOpCreatePreMulSum */
  int num_ops, is_aborted, error;
  int num_sent[MAX_RANKS], num_received[MAX_RANKS]; /* messages that were asked for, by the other rank */
} communicator;

static size_t width_of(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return widths[type];
}

/* Waiting: an error if another rank is gone. */

static int is_gone(communicator *comm, int rank) {
  return comm->shared->process[rank] && kill(comm->shared->process[rank], 0) && errno == ESRCH;
}
static int meet(communicator *comm) {
  meeting *shared = comm->shared;
  int round = shared->round;
  if (atomic_fetch_add(&shared->num_here, 1) == comm->num_ranks - 1) {
    shared->num_here = 0;
    shared->round = round + 1;
    return OK;
  }
  for (long tries = 0; shared->round == round; tries++) {
    if (comm->is_aborted) return SYSTEM_ERROR;
    if (tries % 1000 == 999)
      for (int rank = 0; rank < comm->num_ranks; rank++)
        if (is_gone(comm, rank)) return REMOTE_ERROR;
    usleep(tries < 100 ? 0 : 100);
  }
  return OK;
}

/* Arithmetic. */

static float float_of(int type, const char *at) {
  if (type == FP32) return *(const float *)at;
  if (type == FP16) return (float)*(const _Float16 *)at;
  uint32_t bits = (uint32_t)*(const uint16_t *)at << 16; /* bf16 */
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static void put_float(int type, char *at, float value) {
  if (type == FP32) *(float *)at = value;
  else if (type == FP16) *(_Float16 *)at = (_Float16)value;
  else {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    int is_nan = value != value;
    *(uint16_t *)at = is_nan ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to the nearest even */
  }
}
#define REDUCED(result, next, op) \
  ((op) == PROD ? (result) * (next) : (op) == MAX ? ((result) > (next) ? (result) : (next)) \
   : (op) == MIN ? ((result) < (next) ? (result) : (next)) : (result) + (next))

static void reduce_floats(communicator *comm, char *to, size_t count, int type, int op) {
  float factor = op >= FIRST_OWN ? (float)comm->factor[op] : op == AVG ? 1.0f / comm->num_ranks : 1.0f;
  size_t width = width_of(type);
  for (size_t i = 0; i < count; i++) {
    float result = float_of(type, comm->shared->slot[0] + i * width) * factor;
    for (int rank = 1; rank < comm->num_ranks; rank++) {
      float next = float_of(type, comm->shared->slot[rank] + i * width) * factor;
      result = REDUCED(result, next, op);
    }
    put_float(type, to + i * width, result);
  }
}
#define REDUCE(name, type) \
  static void name(communicator *comm, char *to, size_t count, int op) { \
    for (size_t i = 0; i < count; i++) { \
      type result = ((type *)comm->shared->slot[0])[i]; \
      for (int rank = 1; rank < comm->num_ranks; rank++) { \
        type next = ((type *)comm->shared->slot[rank])[i]; \
        result = REDUCED(result, next, op); \
      } \
      ((type *)to)[i] = op == AVG ? result / comm->num_ranks : result; \
    } \
  }
REDUCE(reduce_int8, int8_t) REDUCE(reduce_uint8, uint8_t) REDUCE(reduce_int32, int32_t) REDUCE(reduce_uint32, uint32_t)
REDUCE(reduce_int64, int64_t) REDUCE(reduce_uint64, uint64_t) REDUCE(reduce_doubles, double)

static int reduce(communicator *comm, char *to, size_t count, int type, int op) {
  static void (*const by_type[])(communicator *, char *, size_t, int) = {reduce_int8, reduce_uint8, reduce_int32, reduce_uint32,
                                                                         reduce_int64, reduce_uint64};
  if (type == FP16 || type == FP32 || type == BF16) reduce_floats(comm, to, count, type, op);
  else if (type == FP64) reduce_doubles(comm, to, count, op);
  else if (type < FP16) by_type[type](comm, to, count, op);
  else return INVALID_USAGE;
  return OK;
}

/* Collectives, a slot at a time: put, meet, take, meet. `take` gets how many bytes are done, and how many are in slots. */

typedef int (*take)(communicator *comm, char *to, size_t done, size_t length, size_t whole, int type, int op);

static int collect(communicator *comm, const char *from, char *to, size_t num_bytes, int type, int op, take taken, void *in) {
  int error = OK;
  emu_finish(in);
  for (size_t done = 0; done < num_bytes && !error; done += SLOT_BYTES) {
    size_t length = num_bytes - done < SLOT_BYTES ? num_bytes - done : SLOT_BYTES;
    if (from) memcpy(comm->shared->slot[comm->rank], from + done, length);
    if ((error = meet(comm))) break;
    if (to) error = taken(comm, to, done, length, num_bytes, type, op);
    int left = meet(comm);
    error = error ? error : left;
  }
  return error;
}
static int take_sum(communicator *comm, char *to, size_t done, size_t length, size_t whole, int type, int op) {
  return reduce(comm, to + done, length / width_of(type), type, op);
}
static int take_all(communicator *comm, char *to, size_t done, size_t length, size_t whole, int type, int op) {
  for (int rank = 0; rank < comm->num_ranks; rank++) memcpy(to + rank * whole + done, comm->shared->slot[rank], length);
  return OK;
}
static int take_roots(communicator *comm, char *to, size_t done, size_t length, size_t whole, int type, int root) {
  memcpy(to + done, comm->shared->slot[root], length);
  return OK;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, communicator *comm, void *in) {
  return collect(comm, from, to, count * width_of(type), type, op, take_sum, in);
}
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, communicator *comm, void *in) {
  return collect(comm, from, comm->rank == root ? to : NULL, count * width_of(type), type, op, take_sum, in);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, communicator *comm, void *in) {
  size_t num_bytes = count * width_of(type);
  char *own = malloc(num_bytes); /* `to` may lie inside of `from` */
  int error = OK;
  for (int rank = 0; rank < comm->num_ranks && !error; rank++)
    error = collect(comm, (const char *)from + rank * num_bytes, rank == comm->rank ? own : NULL, num_bytes, type, op, take_sum, in);
  if (!error) memcpy(to, own, num_bytes);
  free(own);
  return error;
}
int ncclAllGather(const void *from, void *to, size_t count, int type, communicator *comm, void *in) {
  return collect(comm, from, to, count * width_of(type), type, 0, take_all, in);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, communicator *comm, void *in) {
  return collect(comm, comm->rank == root ? from : NULL, to, count * width_of(type), type, root, take_roots, in);
}
int ncclBcast(void *data, size_t count, int type, int root, communicator *comm, void *in) {
  return ncclBroadcast(data, data, count, type, root, comm, in);
}
int ncclRedOpCreatePreMulSum(int *op, void *factor, int type, int residence, communicator *comm) {
  if (FIRST_OWN + comm->num_ops >= MAX_OPS) return INVALID_USAGE;
  *op = FIRST_OWN + comm->num_ops++;
  comm->factor[*op] = type == FP64 ? *(double *)factor : float_of(type, factor);
  return OK;
}
int ncclRedOpDestroy(int op, communicator *comm) {
  comm->num_ops -= op == FIRST_OWN + comm->num_ops - 1;
  return OK;
}

static void path_of(const unique_id *id, char *path, size_t length) {
  int end = snprintf(path, length, "/emulated-nccl-");
  for (int i = 0; i < 16; i++) end += snprintf(path + end, length - end, "%02x", (unsigned char)id->bytes[i]);
}

/* Messages. Those of a group of calls go at once, and are one entry of their stream. */

enum { PATH_LENGTH = 120 };
typedef struct message {
  communicator *comm;
  int is_sent; /* or received, by this rank */
  int sender, receiver, number;
  char *at; /* NULL for the sender, when it is on its way */
  size_t num_bytes;
  struct message *next;
} message;

static _Thread_local message *grouped;
static _Thread_local void *grouped_in; /* the stream */
static _Thread_local int group_depth;

static void path_of_message(const message *of, char *path) {
  path_of(&of->comm->id, path, PATH_LENGTH);
  size_t end = strlen(path);
  snprintf(path + end, PATH_LENGTH - end, "-%d-%d-%d", of->sender, of->receiver, of->number);
}

static int put(message *sent) {
  char path[PATH_LENGTH];
  path_of_message(sent, path);
  int file = shm_open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
  int error = file < 0 || write(file, sent->at, sent->num_bytes) != (ssize_t)sent->num_bytes;
  close(file);
  sent->comm->shared->num_put[sent->sender][sent->receiver]++;
  return error;
}
static int take_message(message *received) {
  char path[PATH_LENGTH];
  path_of_message(received, path);
  int file = shm_open(path, O_RDONLY, 0600);
  int error = file < 0 || lseek(file, 0, SEEK_END) != (off_t)received->num_bytes;
  if (!error) error = pread(file, received->at, received->num_bytes, 0) != (ssize_t)received->num_bytes;
  close(file);
  shm_unlink(path);
  received->comm->shared->num_taken[received->sender][received->receiver]++;
  return error;
}

static int is_through(message *each) { /* or can't be any more */
  communicator *comm = each->comm;
  _Atomic int *num_put = &comm->shared->num_put[each->sender][each->receiver];
  _Atomic int *num_taken = &comm->shared->num_taken[each->sender][each->receiver];
  if (comm->is_aborted || comm->error) return 1;
  if (each->is_sent && each->at && *num_put == each->number) {
    if (put(each)) comm->error = SYSTEM_ERROR;
    each->at = NULL;
  }
  if (!each->is_sent && *num_put > each->number && *num_taken == each->number) {
    if (take_message(each)) comm->error = INVALID_USAGE;
    return 1;
  }
  if (*num_taken > each->number) return 1;
  if (is_gone(comm, each->is_sent ? each->receiver : each->sender)) comm->error = REMOTE_ERROR;
  return comm->error != OK;
}
static int advance(void *group) { /* a list that begins with an empty message */
  for (message **place = &((message *)group)->next; *place;) {
    message *each = *place;
    if (is_through(each)) {
      *place = each->next;
      free(each);
    } else place = &each->next;
  }
  if (((message *)group)->next) return 0;
  free(group);
  return 1;
}

int ncclGroupStart(void) {
  group_depth++;
  return OK;
}
int ncclGroupEnd(void) {
  if (--group_depth || !grouped) return OK;
  message *group = calloc(1, sizeof *group);
  group->next = grouped;
  grouped = NULL;
  emu_enqueue_message(grouped_in, advance, group);
  return OK;
}
static int post(message asked, void *in) {
  if (grouped && grouped_in != in) return INVALID_USAGE; /* not needed so far */
  ncclGroupStart();
  message **place = &grouped;
  while (*place) place = &(*place)->next; /* in their order */
  *place = malloc(sizeof **place);
  **place = asked;
  grouped_in = in;
  return ncclGroupEnd();
}
int ncclSend(const void *from, size_t count, int type, int peer, communicator *comm, void *in) {
  if (peer < 0 || peer >= comm->num_ranks) return INVALID_USAGE;
  size_t num_bytes = count * width_of(type);
  return post((message){comm, 1, comm->rank, peer, comm->num_sent[peer]++, (char *)from, num_bytes}, in);
}
int ncclRecv(void *to, size_t count, int type, int peer, communicator *comm, void *in) {
  if (peer < 0 || peer >= comm->num_ranks) return INVALID_USAGE;
  return post((message){comm, 0, peer, comm->rank, comm->num_received[peer]++, to, count * width_of(type)}, in);
}
int ncclAlltoAll(const void *from, void *to, size_t count, int type, communicator *comm, void *in) {
  int error = ncclGroupStart();
  for (int rank = 0; rank < comm->num_ranks && !error; rank++) {
    size_t start = rank * count * width_of(type);
    error = ncclSend((const char *)from + start, count, type, rank, comm, in);
    if (!error) error = ncclRecv((char *)to + start, count, type, rank, comm, in);
  }
  int left = ncclGroupEnd();
  return error ? error : left;
}

/* Communicators. */

static int join(communicator **made, int num_ranks, const unique_id *id, int rank) {
  char path[80];
  if (num_ranks > MAX_RANKS) return INVALID_USAGE;
  communicator *comm = *made = calloc(1, sizeof **made);
  *comm = (communicator){.id = *id, .num_ranks = num_ranks, .rank = rank};
  path_of(id, path, sizeof path);
  int file = shm_open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(meeting))) return SYSTEM_ERROR;
  comm->shared = mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (comm->shared == MAP_FAILED) return SYSTEM_ERROR;
  comm->shared->process[rank] = getpid();
  int error = meet(comm);
  if (!rank) shm_unlink(path); /* all have it open */
  return error;
}

int ncclGetVersion(int *version) { *version = 22907; return OK; }
int ncclGetUniqueId(unique_id *id) {
  memset(id, 0, sizeof *id);
  return getrandom(id->bytes, 16, 0) == 16 ? OK : SYSTEM_ERROR;
}
int ncclCommInitRank(communicator **made, int num_ranks, unique_id id, int rank) { return join(made, num_ranks, &id, rank); }
int ncclCommInitRankConfig(communicator **made, int num_ranks, unique_id id, int rank, void *config) {
  return join(made, num_ranks, &id, rank);
}
int ncclCommInitRankScalable(communicator **made, int num_ranks, int rank, int num_ids, unique_id *ids, void *config) {
  return join(made, num_ranks, ids, rank);
}
int ncclCommSplit(communicator *comm, int color, int key, communicator **made, void *config) {
  meeting *shared = comm->shared;
  shared->wish[comm->rank].color = color;
  shared->wish[comm->rank].key = key;
  int error = meet(comm), num_ranks = 0, rank = 0;
  if (error) return error;
  for (int other = 0; other < comm->num_ranks; other++) {
    if (shared->wish[other].color != color) continue;
    int other_key = shared->wish[other].key;
    num_ranks++;
    rank += other_key < key || (other_key == key && other < comm->rank);
  }
  unique_id id = comm->id;
  int number[2] = {++comm->num_splits, color};
  for (size_t i = 0; i < sizeof number; i++) id.bytes[i] ^= ((char *)number)[i];
  if ((error = meet(comm))) return error;
  *made = NULL;
  return color < 0 ? OK : join(made, num_ranks, &id, rank);
}
int ncclCommCount(communicator *comm, int *number) { *number = comm->num_ranks; return OK; }
int ncclCommUserRank(communicator *comm, int *rank) { *rank = comm->rank; return OK; }
int ncclCommGetAsyncError(communicator *comm, int *error) { *error = comm->error; return OK; }
int ncclCommAbort(communicator *comm) { comm->is_aborted = 1; return OK; }
const char *ncclGetErrorString(int error) {
  return error == OK ? "no error" : error == REMOTE_ERROR ? "another rank is gone" : "error of the emulated device";
}
const char *ncclGetLastError(communicator *comm) { return ""; }
