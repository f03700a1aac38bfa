/* libcuda: contexts, virtual memory (expandable segments are made of it), modules. */
#define _GNU_SOURCE
#include "device.h"
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { GRANULE = 2 << 20 };

/* Devices and contexts. A context is its card's number, above zero. */

static CUcontext context_of(int card) { return (CUcontext)(uintptr_t)(0x1000 + card); }

CUresult cuInit(unsigned flags) { CALLED; return emu_num_cards() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *card, int number) { *card = number; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *number) { *number = emu_num_cards(); return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *text, int length, CUdevice card) { snprintf(text, length, "%s", emu_card_name()); return CUDA_SUCCESS; }
CUresult cuDeviceGetUuid_v2(CUuuid *id, CUdevice card) {
  memcpy(id->bytes, "emulated device0", 16);
  id->bytes[15] = (char)('0' + card);
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *num_bytes, CUdevice card) { *num_bytes = emu_card_bytes(); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice card) {
  *value = emu_card_attribute((int)attribute);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice card) { CALLED; *context = context_of(card); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice card, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = context_of(emu_current_card()); return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) emu_use_card((int)((uintptr_t)context - 0x1000));
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }
CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  if (context) *context = context_of(emu_current_card());
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *card) { *card = emu_current_card(); return CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) { emu_finish_all(); return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of the emulated device";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}

/* Memory. */

CUresult cuMemGetInfo_v2(size_t *num_free, size_t *total) {
  *num_free = emu_free_bytes(emu_current_card());
  *total = emu_card_bytes();
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  emu_range range;
  if (!emu_look_up((void *)pointer, &range)) return CUDA_ERROR_INVALID_VALUE;
  int is_on_card = range.kind == EMU_DEVICE || range.kind == EMU_RESERVED;
  switch ((int)attribute) {
  case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = context_of(range.card); break;
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = is_on_card ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = pointer; break;
  case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)value = is_on_card ? NULL : (void *)pointer; break;
  case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)value = range.id; break;
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = range.card; break;
  case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = range.base; break;
  case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = range.num_bytes; break;
  default: *(unsigned *)value = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *num_bytes, CUdeviceptr pointer) {
  emu_range range;
  if (!emu_look_up((void *)pointer, &range)) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = range.base;
  if (num_bytes) *num_bytes = range.num_bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream in) {
  if (value) emu_enqueue_fill(in, (void *)to, &value, sizeof value, count);
  else emu_enqueue_set(in, (void *)to, 0, count * sizeof value);
  return CUDA_SUCCESS;
}
CUresult cuStreamWriteValue32_v2(CUstream in, CUdeviceptr to, cuuint32_t value, unsigned flags) {
  emu_enqueue_fill(in, (void *)to, &value, sizeof value, 1);
  return CUDA_SUCCESS;
}

/* Virtual memory: a reservation is mapped at once; physical memory is only counted. */

typedef struct { size_t num_bytes; int card, num_uses; } physical;
typedef struct mapping { CUdeviceptr at; size_t num_bytes; physical *memory; struct mapping *next; } mapping;
static mapping *mappings;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static CUmemGenericAllocationHandle handle_of(physical *memory) { return (CUmemGenericAllocationHandle)(uintptr_t)memory; }
static physical *physical_of(CUmemGenericAllocationHandle handle) { return (physical *)(uintptr_t)handle; }

static void release(physical *memory) { /* under the lock */
  if (--memory->num_uses) return;
  emu_refund(memory->card, memory->num_bytes);
  free(memory);
}

CUresult cuMemGetAllocationGranularity(size_t *num_bytes, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags flags) {
  *num_bytes = GRANULE;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *start, size_t num_bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
  CALLED;
  void *mapped = emu_map(num_bytes, alignment ? alignment : GRANULE);
  if (!mapped) return CUDA_ERROR_OUT_OF_MEMORY;
  emu_remember(mapped, num_bytes, EMU_RESERVED, emu_current_card());
  *start = (CUdeviceptr)mapped;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t num_bytes) {
  CALLED;
  emu_finish_all();
  if (!emu_forget((void *)start, NULL)) return CUDA_ERROR_INVALID_VALUE;
  emu_unmap((void *)start, num_bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t num_bytes, const CUmemAllocationProp *of, unsigned long long flags) {
  CALLED;
  if (num_bytes % GRANULE) return CUDA_ERROR_INVALID_VALUE;
  int card = of && of->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? of->location.id : emu_current_card();
  if (emu_charge(card, num_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  physical *memory = malloc(sizeof *memory);
  *memory = (physical){num_bytes, card, 1};
  *handle = handle_of(memory);
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  CALLED;
  pthread_mutex_lock(&lock);
  release(physical_of(handle));
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t num_bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  CALLED;
  mapping *made = malloc(sizeof *made);
  pthread_mutex_lock(&lock);
  *made = (mapping){at, num_bytes, physical_of(handle), mappings};
  mappings = made;
  made->memory->num_uses++;
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t num_bytes) {
  CALLED;
  emu_finish_all();
  size_t num_unmapped = 0;
  pthread_mutex_lock(&lock);
  for (mapping **place = &mappings; *place;) {
    mapping *each = *place;
    if (each->at >= at && each->at + each->num_bytes <= at + num_bytes) {
      *place = each->next;
      num_unmapped += each->num_bytes;
      release(each->memory);
      free(each);
    } else {
      place = &each->next;
    }
  }
  pthread_mutex_unlock(&lock);
  madvise((void *)at, num_bytes, MADV_DONTNEED);
  return num_unmapped == num_bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t num_bytes, const CUmemAccessDesc *access, size_t count) { return CUDA_SUCCESS; }
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *inside) {
  CUdeviceptr address = (CUdeviceptr)inside;
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  for (mapping *each = mappings; each; each = each->next)
    if (address >= each->at && address < each->at + each->num_bytes) {
      each->memory->num_uses++;
      *handle = handle_of(each->memory);
      result = CUDA_SUCCESS;
    }
  pthread_mutex_unlock(&lock);
  return result;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *of, CUmemGenericAllocationHandle handle) {
  memset(of, 0, sizeof *of);
  of->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  of->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  of->location.id = physical_of(handle)->card;
  return CUDA_SUCCESS;
}

/* Not there: memory shared between processes, multicast, green contexts. */
#define NOT_SUPPORTED(name, ...) CUresult name(__VA_ARGS__) { CALLED; return CUDA_ERROR_NOT_SUPPORTED; }
NOT_SUPPORTED(cuMemExportToShareableHandle, void *a, CUmemGenericAllocationHandle b, CUmemAllocationHandleType c, unsigned long long d)
NOT_SUPPORTED(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle *a, void *b, CUmemAllocationHandleType c)
NOT_SUPPORTED(cuMulticastCreate, CUmemGenericAllocationHandle *a, const CUmulticastObjectProp *b)
NOT_SUPPORTED(cuMulticastAddDevice, CUmemGenericAllocationHandle a, CUdevice b)
NOT_SUPPORTED(cuDeviceGetDevResource, CUdevice a, CUdevResource *b, CUdevResourceType c)
NOT_SUPPORTED(cuGreenCtxCreate, CUgreenCtx *a, CUdevResourceDesc b, CUdevice c, unsigned d)

/* Modules (NVRTC's and Triton's): loaded, and launched into nothing. */

CUresult cuModuleLoadData(CUmodule *module, const void *image) { CALLED; *module = malloc(16); return CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
  return cuModuleLoadData(module, image);
}
CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, NULL); }
CUresult cuModuleUnload(CUmodule module) { free(module); return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  TRACE("cuModuleGetFunction %s\n", name);
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *number, CUfunction function, int block, size_t shared_bytes) {
  int fitting = emu_card_attribute(39) / (block > 0 ? block : 1);
  *number = fitting < 1 ? 1 : fitting;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *number, CUfunction function, const CUlaunchConfig *config) { *number = 16; return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared_bytes, CUstream in, void **arguments, void **extra) {
  TRACE("cuLaunchKernel grid %u,%u,%u\n", grid_x, grid_y, grid_z);
  return CUDA_SUCCESS;
}

/* Functions by their names. */

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *result) {
  *function = emu_driver_function(name);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuGetExportTable(const void **functions, const CUuuid *id) { *functions = NULL; return CUDA_ERROR_NOT_FOUND; }
