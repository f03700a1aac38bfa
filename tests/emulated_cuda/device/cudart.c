/* libcudart: devices, memory, streams, events. Kernels are in kernels.c, graphs in graphs.c. What torch links and is not
   written here does nothing and says success (build.py). */
#define _GNU_SOURCE
#include "cudart.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#undef cudaGetDeviceProperties

static __thread cudaError_t last_error;
static stream default_stream;

cudaError_t failed(cudaError_t error) { return last_error = error; }
stream *stream_of(cudaStream_t handle) { return (uintptr_t)handle < 16 ? &default_stream : (stream *)handle; }

/* Devices. */

cudaError_t cudaGetDeviceCount(int *number) {
  CALLED;
  *number = emu_num_cards();
  return *number ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *card) { *card = emu_current_card(); return cudaSuccess; }
cudaError_t cudaSetDevice(int card) {
  if (card < 0 || card >= emu_num_cards()) return failed(cudaErrorInvalidDevice);
  emu_use_card(card);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { CALLED; emu_finish_all(); return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int card) {
  *value = emu_card_attribute((int)attribute);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *card, int number) {
  CALLED;
  memset(card, 0, sizeof *card);
  snprintf(card->name, sizeof card->name, "%s", emu_card_name());
  memcpy(card->uuid.bytes, "emulated device0", 16);
  card->uuid.bytes[15] = (char)('0' + number);
  card->totalGlobalMem = emu_card_bytes();
  card->major = emu_card_capability() / 10;
  card->minor = emu_card_capability() % 10;
  card->multiProcessorCount = emu_card_attribute(16);
  card->warpSize = 32;
  card->maxThreadsPerBlock = card->maxThreadsDim[0] = card->maxThreadsDim[1] = 1024;
  card->maxThreadsDim[2] = 64;
  card->maxGridSize[0] = card->memPitch = 2147483647;
  card->maxGridSize[1] = card->maxGridSize[2] = 65535;
  card->maxThreadsPerMultiProcessor = emu_card_attribute(39);
  card->maxBlocksPerMultiProcessor = emu_card_attribute(106);
  card->sharedMemPerBlock = emu_card_attribute(8);
  card->sharedMemPerBlockOptin = emu_card_attribute(97);
  card->sharedMemPerMultiprocessor = emu_card_attribute(81);
  card->reservedSharedMemPerBlock = emu_card_attribute(111);
  card->regsPerBlock = card->regsPerMultiprocessor = card->totalConstMem = 65536;
  card->textureAlignment = 512;
  card->texturePitchAlignment = 32;
  card->memoryBusWidth = emu_card_attribute(37);
  card->l2CacheSize = emu_card_attribute(38);
  card->asyncEngineCount = emu_card_attribute(40);
  card->clusterLaunch = emu_card_attribute(120);
  card->pciBusID = 1 + number;
  card->deviceNumaId = -1;
  card->canMapHostMemory = card->concurrentKernels = card->unifiedAddressing = card->streamPrioritiesSupported = 1;
  card->globalL1CacheSupported = card->localL1CacheSupported = card->managedMemory = card->concurrentManagedAccess = 1;
  card->computePreemptionSupported = card->canUseHostPointerForRegisteredMem = card->cooperativeLaunch = 1;
  card->hostRegisterSupported = card->memoryPoolsSupported = card->ipcEventSupported = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int card) {
  snprintf(text, length, "0000:%02X:00.0", 1 + card);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = one != other; return cudaSuccess; }

/* Errors. */

cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
static const struct { cudaError_t error; const char *name, *text; } errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};
static size_t place_of(cudaError_t error) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].error == error) return i;
  return 1;
}
const char *cudaGetErrorName(cudaError_t error) { return errors[place_of(error)].name; }
const char *cudaGetErrorString(cudaError_t error) { return errors[place_of(error)].text; }

/* Memory. The driver hands out pages of 2 MiB. */

enum { PAGE_BYTES = 2 << 20 };

cudaError_t cudaMalloc(void **start, size_t num_bytes) {
  int card = emu_current_card();
  size_t whole = (num_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
  *start = NULL;
  if (!num_bytes) return cudaSuccess;
  if (emu_charge(card, whole)) return failed(cudaErrorMemoryAllocation);
  void *mapped = emu_map(whole, PAGE_BYTES);
  if (!mapped) {
    emu_refund(card, whole);
    emu_log("the host gives no %zu bytes of address space (RLIMIT_AS, vm.overcommit_memory)\n", whole);
    return failed(cudaErrorMemoryAllocation);
  }
  emu_remember(mapped, whole, EMU_DEVICE, card);
  TRACE("cudaMalloc(%zu) = %p\n", num_bytes, mapped);
  *start = mapped;
  return cudaSuccess;
}
cudaError_t cudaFree(void *start) {
  emu_range range;
  if (!start) return cudaSuccess;
  emu_finish_all();
  if (!emu_forget(start, &range) || range.kind != EMU_DEVICE) return failed(cudaErrorInvalidValue);
  emu_unmap(start, range.num_bytes);
  emu_refund(range.card, range.num_bytes);
  TRACE("cudaFree(%p), %zu bytes\n", start, range.num_bytes);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **start, size_t num_bytes, cudaStream_t in) { return cudaMalloc(start, num_bytes); }
cudaError_t cudaFreeAsync(void *start, cudaStream_t in) { return cudaFree(start); }
cudaError_t cudaMallocManaged(void **start, size_t num_bytes, unsigned flags) { return cudaMalloc(start, num_bytes); }
cudaError_t cudaMemGetInfo(size_t *num_free, size_t *total) {
  CALLED;
  if (num_free) *num_free = emu_free_bytes(emu_current_card());
  if (total) *total = emu_card_bytes();
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **start, size_t num_bytes, unsigned flags) {
  CALLED;
  *start = num_bytes ? emu_map(num_bytes, 0) : NULL;
  if (!num_bytes) return cudaSuccess;
  if (!*start) return failed(cudaErrorMemoryAllocation);
  emu_remember(*start, num_bytes, EMU_PINNED, emu_current_card());
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void **start, size_t num_bytes) { return cudaHostAlloc(start, num_bytes, 0); }
cudaError_t cudaFreeHost(void *start) {
  emu_range range;
  CALLED;
  if (!start) return cudaSuccess;
  emu_finish_all();
  if (!emu_forget(start, &range) || range.kind != EMU_PINNED) return failed(cudaErrorInvalidValue);
  emu_unmap(start, range.num_bytes);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void *start, size_t num_bytes, unsigned flags) {
  CALLED;
  if (emu_look_up(start, NULL)) return failed(cudaErrorHostMemoryAlreadyRegistered);
  emu_remember(start, num_bytes, EMU_REGISTERED, emu_current_card());
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *start) {
  emu_finish_all();
  return emu_forget(start, NULL) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  emu_range range;
  memset(attributes, 0, sizeof *attributes);
  if (!emu_look_up(pointer, &range)) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    attributes->hostPointer = (void *)pointer;
    return cudaSuccess;
  }
  int is_host = range.kind == EMU_PINNED || range.kind == EMU_REGISTERED;
  attributes->type = is_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = range.card;
  attributes->devicePointer = (void *)pointer;
  attributes->hostPointer = is_host ? (void *)pointer : NULL;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t num_bytes, enum cudaMemcpyKind kind) {
  emu_finish(NULL);
  emu_copy(to, from, num_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t num_bytes, enum cudaMemcpyKind kind, cudaStream_t in) {
  TRACE("cudaMemcpyAsync %p <- %p, %zu bytes\n", to, from, num_bytes);
  if (!stream_of(in)->capture) emu_enqueue_copy(in, to, from, num_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_card, const void *from, int from_card, size_t num_bytes, cudaStream_t in) {
  return cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, in);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t in) {
  for (size_t row = 0; row < height; row++)
    emu_enqueue_copy(in, (char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int byte, size_t num_bytes) { CALLED; emu_set(to, byte, num_bytes); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *to, int byte, size_t num_bytes, cudaStream_t in) {
  TRACE("cudaMemsetAsync %p = %d, %zu bytes\n", to, byte, num_bytes);
  if (!stream_of(in)->capture) emu_enqueue_set(in, to, byte, num_bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int card) {
  *pool = (cudaMemPool_t)(uintptr_t)(card + 1);
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  *(uint64_t *)value = 0;
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *start) { return failed(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenMemHandle(void **start, cudaIpcMemHandle_t handle, unsigned flags) {
  *start = NULL;
  return failed(cudaErrorNotSupported);
}

/* Streams. */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
  CALLED;
  stream *new = calloc(1, sizeof *new);
  new->flags = flags;
  new->priority = priority;
  *made = (cudaStream_t)new;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) { return cudaStreamCreateWithPriority(made, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *made) { return cudaStreamCreateWithPriority(made, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t in) { return cudaSuccess; } /* its queue may hold work: its address stays its own */
cudaError_t cudaStreamQuery(cudaStream_t in) { return emu_is_stream_done(in) ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaStreamSynchronize(cudaStream_t in) {
  CALLED;
  if (stream_of(in)->capture) return failed(cudaErrorStreamCaptureUnsupported);
  emu_finish(in);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t in, int *priority) { *priority = stream_of(in)->priority; return cudaSuccess; }
cudaError_t cudaStreamGetFlags(cudaStream_t in, unsigned *flags) { *flags = stream_of(in)->flags; return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t in, cudaEvent_t handle, unsigned flags) {
  CALLED;
  emu_event *event = (emu_event *)handle;
  if (event && event->capture) stream_of(in)->capture = event->capture;
  else if (event) emu_wait(in, event);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t in, cudaStreamCallback_t call, void *argument, unsigned flags) {
  emu_finish(in);
  call(in, cudaSuccess, argument);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t in, cudaHostFn_t call, void *argument) {
  emu_finish(in);
  call(argument);
  return cudaSuccess;
}

/* Events. */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
  CALLED;
  *made = (cudaEvent_t)calloc(1, sizeof(emu_event));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (!emu_is_queueing()) free(event); /* else a queue may still name it */
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t in, unsigned flags) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  emu_event *event = (emu_event *)handle;
  event->at_ms = now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
  event->is_recorded = 1;
  event->capture = stream_of(in)->capture;
  if (emu_is_queueing() && !event->capture) emu_record(event, in);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t in) { return cudaEventRecordWithFlags(event, in, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return emu_is_event_done((emu_event *)event) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { CALLED; emu_finish_event((emu_event *)event); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  emu_event *first = (emu_event *)from, *last = (emu_event *)to;
  if (!first->is_recorded || !last->is_recorded) return failed(cudaErrorInvalidResourceHandle);
  if (first->num_done < first->num_asked || last->num_done < last->num_asked) return failed(cudaErrorNotReady);
  *ms = (float)(last->at_ms - first->at_ms);
  return cudaSuccess;
}

/* The driver's functions, by name. */

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  *function = emu_driver_function(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}
