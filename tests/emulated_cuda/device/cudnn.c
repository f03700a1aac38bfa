/* cuDNN: its graph API, with one engine for every graph, and those older calls that torch reads an answer of. Written
   without cuDNN's headers, which come in a wheel of 370 MB: numbers are those of cudnn_graph_v9.h. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

enum { VERSION = 92000, MAX_DIMS = 8 };
enum attribute_type { T_HANDLE = 0, T_BOOLEAN = 2, T_INT64 = 3, T_DOUBLE = 5, T_VOID_PTR = 6, T_DESCRIPTOR = 15, T_CHAR = 24, T_FRACTION = 26 };
enum attribute_name {
  HEUR_GRAPH = 201, HEUR_RESULTS = 202, CONFIG_ENGINE = 300, CONFIG_WORKSPACE = 303, CONFIG_SHARED = 304, PLAN_WORKSPACE = 402,
  GRAPH_NUM_ENGINES = 802, ENGINE_GRAPH = 1300, ENGINE_INDEX = 1301
};
enum { ENGINE_DESCRIPTOR = 2 };

/* The real ones are not known here: none, unless a setting says so. */
static size_t workspace_bytes(void) { return emu_setting_bytes("EMULATED_CUDNN_WORKSPACE", 0); }

size_t cudnnGetVersion(void) { return VERSION; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnGetProperty(int which, int *value) {
  *value = which == 0 ? VERSION / 10000 : which == 1 ? VERSION / 100 % 100 : VERSION % 100;
  return 0;
}
const char *cudnnGetErrorString(int status) { return status ? "error of the emulated device" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *text, size_t length) { if (length) *text = 0; }
int cudnnCreate(void **handle) { CALLED; *handle = calloc(1, 256); return 0; }
int cudnnDestroy(void *handle) { free(handle); return 0; }
int cudnnSetStream(void **handle, void *in) { handle[0] = in; return 0; }
int cudnnGetStream(void **handle, void **in) { *in = handle[0]; return 0; }

/* Descriptors of the older API. */

#define DESCRIPTOR(name) \
  int cudnnCreate##name##Descriptor(void **made) { *made = calloc(1, 512); return 0; } \
  int cudnnDestroy##name##Descriptor(void *made) { free(made); return 0; }
DESCRIPTOR(Tensor) DESCRIPTOR(Filter) DESCRIPTOR(Convolution) DESCRIPTOR(Activation) DESCRIPTOR(Dropout) DESCRIPTOR(Pooling)
DESCRIPTOR(RNN) DESCRIPTOR(RNNData) DESCRIPTOR(CTCLoss) DESCRIPTOR(SpatialTransformer)
typedef struct { int type, num_dims, sizes[MAX_DIMS], strides[MAX_DIMS]; } shape;
int cudnnSetTensorNdDescriptor(shape *tensor, int type, int num_dims, const int sizes[], const int strides[]) {
  tensor->type = type;
  tensor->num_dims = num_dims;
  memcpy(tensor->sizes, sizes, num_dims * sizeof *sizes);
  memcpy(tensor->strides, strides, num_dims * sizeof *strides);
  return 0;
}
int cudnnGetTensorNdDescriptor(const shape *tensor, int wanted, int *type, int *num_dims, int sizes[], int strides[]) {
  int number = wanted < tensor->num_dims ? wanted : tensor->num_dims;
  *type = tensor->type;
  *num_dims = tensor->num_dims;
  memcpy(sizes, tensor->sizes, number * sizeof *sizes);
  memcpy(strides, tensor->strides, number * sizeof *strides);
  return 0;
}
int cudnnDropoutGetStatesSize(void *handle, size_t *num_bytes) { *num_bytes = 1 << 20; return 0; }

/* Batch normalisation asks for sizes by a pointer that comes last, after more pointers than registers hold. */
typedef void *any;
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(any handle, int mode, int ops, any x, any z, any y, any bn, any activation, size_t *num_bytes) { *num_bytes = 0; return 0; }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(any handle, int mode, int ops, any x, any y, any dy, any dz, any dx, any bn, any activation, size_t *num_bytes) { *num_bytes = 0; return 0; }
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(any handle, int mode, int ops, any activation, any x, size_t *num_bytes) { *num_bytes = 0; return 0; }

/* The graph API: descriptors hold attributes by name. */

typedef struct attribute { int name; size_t count, num_bytes; void *data; struct attribute *next; } attribute;
typedef struct { int type; attribute *attributes; } descriptor;

static size_t width_of(int type) {
  switch (type) {
  case T_HANDLE: case T_INT64: case T_DOUBLE: case T_VOID_PTR: case T_DESCRIPTOR: return 8;
  case T_BOOLEAN: case T_CHAR: return 1;
  case T_FRACTION: return 16;
  default: return 4;
  }
}
static attribute *find(descriptor *in, int name) {
  for (attribute *each = in->attributes; each; each = each->next)
    if (each->name == name) return each;
  return NULL;
}
static void put(descriptor *in, int name, size_t count, size_t width, const void *data) {
  attribute *place = find(in, name);
  if (!place) {
    place = calloc(1, sizeof *place);
    place->name = name;
    place->next = in->attributes;
    in->attributes = place;
  }
  place->data = realloc(place->data, count * width + 1);
  memcpy(place->data, data, count * width);
  place->count = count;
  place->num_bytes = count * width;
}
static void assign(descriptor *to, const descriptor *from) {
  for (attribute *each = from->attributes; each; each = each->next)
    if (each->count) put(to, each->name, each->count, each->num_bytes / each->count, each->data);
}

int cudnnBackendCreateDescriptor(int type, descriptor **made) {
  CALLED;
  *made = calloc(1, sizeof **made);
  (*made)->type = type;
  return 0;
}
int cudnnBackendDestroyDescriptor(descriptor *each) {
  if (!each) return 0;
  for (attribute *place = each->attributes, *next; place; place = next) {
    next = place->next;
    free(place->data);
    free(place);
  }
  free(each);
  return 0;
}
int cudnnBackendFinalize(descriptor *each) { return 0; }
int cudnnBackendExecute(void *handle, descriptor *plan, descriptor *pack) { CALLED; return 0; }
int cudnnBackendSetAttribute(descriptor *in, int name, int type, int64_t count, const void *data) {
  if (count > 0 && data) put(in, name, count, width_of(type), data);
  return 0;
}

/* The one engine that the heuristics find for a graph. */
static void find_engine(descriptor *heuristics, descriptor *config) {
  int64_t index = 0;
  descriptor *engine = calloc(1, sizeof *engine);
  attribute *graph = find(heuristics, HEUR_GRAPH);
  engine->type = ENGINE_DESCRIPTOR;
  if (graph) put(engine, ENGINE_GRAPH, 1, 8, graph->data);
  put(engine, ENGINE_INDEX, 1, 8, &index);
  put(config, CONFIG_ENGINE, 1, 8, &engine);
}
static int answer(int64_t value, size_t width, int64_t wanted, int64_t *count, void *data) {
  if (count) *count = 1;
  if (wanted > 0 && data) memcpy(data, &value, width);
  return 0;
}
int cudnnBackendGetAttribute(descriptor *in, int name, int type, int64_t wanted, int64_t *count, void *data) {
  switch (name) {
  case HEUR_RESULTS:
    if (count) *count = 1;
    if (wanted > 0 && data) find_engine(in, ((descriptor **)data)[0]);
    return 0;
  case PLAN_WORKSPACE: case CONFIG_WORKSPACE: return answer((int64_t)workspace_bytes(), 8, wanted, count, data);
  case CONFIG_SHARED: return answer(49152, 4, wanted, count, data); /* an int32 */
  case GRAPH_NUM_ENGINES: return answer(1, 8, wanted, count, data);
  case ENGINE_INDEX: return answer(0, 8, wanted, count, data);
  }
  attribute *place = find(in, name);
  if (count) *count = place ? (int64_t)place->count : 0;
  if (!place || !place->count || wanted <= 0 || !data) return 0;
  size_t number = (size_t)wanted < place->count ? (size_t)wanted : place->count;
  if (type != T_DESCRIPTOR) {
    memcpy(data, place->data, place->num_bytes / place->count * number);
    return 0;
  }
  for (size_t i = 0; i < number; i++) { /* into descriptors that the caller has made */
    descriptor *to = ((descriptor **)data)[i], *from = ((descriptor **)place->data)[i];
    if (to && from && to != from) assign(to, from);
  }
  return 0;
}
