/* Kernels are registered by their names, and launched into nothing: values.py computes what they would have. But for fills
   of contiguous memory, whose value the host often reads at once. */
#define _GNU_SOURCE
#include "cudart.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct { const void *function; const char *name; } kernel;
static kernel *table; /* open addressing */
static size_t capacity, num_kernels;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t slot_of(const kernel *in, size_t size, const void *function) {
  size_t slot = (((uintptr_t)function >> 4) * 11400714819323198485ull) & (size - 1);
  while (in[slot].function && in[slot].function != function) slot = (slot + 1) & (size - 1);
  return slot;
}

static void grow(void) {
  size_t size = capacity ? capacity * 2 : 1 << 16;
  kernel *larger = calloc(size, sizeof *larger);
  for (size_t i = 0; i < capacity; i++)
    if (table[i].function) larger[slot_of(larger, size, table[i].function)] = table[i];
  free(table);
  table = larger;
  capacity = size;
}

static const char *name_of(const void *function) { return capacity ? table[slot_of(table, capacity, function)].name : NULL; }

/* What nvcc's code calls when a library is loaded. */
void **__cudaRegisterFatBinary(void *binary) { return calloc(1, sizeof(void *)); }
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaUnregisterFatBinary(void **binary) {}
char __cudaInitModule(void **binary) { return 1; }
void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int external, size_t size, int constant, int global) {}
void __cudaRegisterFunction(void **binary, const char *function, char *device, const char *name, int limit, void *thread, void *block,
                            void *block_size, void *grid_size, int *warp) {
  pthread_mutex_lock(&lock);
  if (num_kernels * 2 >= capacity) grow();
  size_t slot = slot_of(table, capacity, function);
  num_kernels += !table[slot].function;
  table[slot] = (kernel){function, name};
  pthread_mutex_unlock(&lock);
}

/* f<<<grid, block, shared, stream>>>() pushes what it says of the launch, and the stub of f takes it. */
typedef struct { dim3 grid, block; size_t shared_bytes; cudaStream_t in; } launch;
enum { DEEPEST = 8 };
static __thread launch pushed[DEEPEST];
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *in) {
  if (depth == DEEPEST) return 1;
  pushed[depth++] = (launch){grid, block, shared_bytes, (cudaStream_t)in};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *in) {
  if (!depth) return failed(cudaErrorUnknown);
  launch last = pushed[--depth];
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *(cudaStream_t *)in = last.in;
  return cudaSuccess;
}

/* The bytes of a type, by its first letters in a mangled name. */
static size_t width_of(const char *type) {
  if (!strncmp(type, "N3c108BFloat16E", 15) || !strncmp(type, "N3c104HalfE", 11)) return 2;
  if (strchr("fij", *type)) return 4;
  if (strchr("dlmxy", *type)) return 8;
  if (strchr("st", *type)) return 2;
  return strchr("ahbc", *type) ? 1 : 0;
}

/* at::native::vectorized_elementwise_kernel<…, FillFunctor<type>, …>(int count, functor, pointers) */
static void fill(const char *name, void **arguments, cudaStream_t in) {
  const char *functor = strstr(name, "11FillFunctorI");
  if (!functor || !arguments || !strstr(name, "vectorized_elementwise_kernel")) return;
  size_t width = width_of(functor + strlen("11FillFunctorI"));
  int count = *(int *)arguments[0];
  void *to = *(void **)arguments[2];
  if (!width || count <= 0 || !emu_look_up(to, NULL)) return;
  static const char zeros[16];
  if (memcmp(arguments[1], zeros, width)) emu_enqueue_fill(in, to, arguments[1], width, count);
  else emu_enqueue_set(in, to, 0, count * width);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t in) {
  if (!grid.x || !grid.y || !grid.z || !block.x || block.x * block.y * block.z > 1024) return failed(cudaErrorInvalidConfiguration);
  const char *name = name_of(function);
  TRACE("launch %s grid %u,%u,%u block %u,%u,%u shared %zu stream %p\n", name ? name : "?", grid.x, grid.y, grid.z, block.x, block.y,
        block.z, shared_bytes, (void *)in);
  if (name && !stream_of(in)->capture) fill(name, arguments, in);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t in) {
  return cudaLaunchKernel((const void *)kernel, grid, block, arguments, shared_bytes, in);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t in) {
  return cudaLaunchKernel(function, grid, block, arguments, shared_bytes, in);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}
/* Of torch's binaries a card runs the newest that isn't newer than itself; CUB knows no others. */
static int binary_version(void) {
  static const int binaries[] = {120, 100, 90, 86, 80};
  for (size_t i = 0; i < sizeof binaries / sizeof *binaries; i++)
    if (binaries[i] <= emu_card_capability()) return binaries[i];
  return 75;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = binary_version();
  attributes->maxDynamicSharedSizeBytes = emu_card_attribute(8);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
  int is_too_large = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > emu_card_attribute(97);
  return is_too_large ? failed(cudaErrorInvalidValue) : cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *number, const void *function, int block, size_t shared_bytes) {
  int fitting = emu_card_attribute(39) / (block > 0 ? block : 1), most = emu_card_attribute(106);
  *number = fitting < 1 ? 1 : fitting > most ? most : fitting;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *number, const void *function, int block, size_t shared_bytes,
                                                                   unsigned flags) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(number, function, block, shared_bytes);
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jit_values, unsigned num_jit,
                                enum cudaLibraryOption *options, void **values, unsigned num_options) {
  *library = (cudaLibrary_t)malloc(16);
  return cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
  *kernel = (cudaKernel_t)library;
  return cudaSuccess;
}
static char symbols[1 << 20]; /* variables of the device, all in one place */
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { *address = symbols; return cudaSuccess; }
