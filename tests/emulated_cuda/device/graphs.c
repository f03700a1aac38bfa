/* CUDA graphs: captured, instantiated and launched, empty. */
#include "cudart.h"
#include <stdlib.h>

static unsigned long long num_captures;

cudaError_t cudaStreamBeginCapture(cudaStream_t in, enum cudaStreamCaptureMode mode) {
  CALLED;
  stream_of(in)->capture = __sync_add_and_fetch(&num_captures, 1);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t in, cudaGraph_t *graph) {
  CALLED;
  stream_of(in)->capture = 0;
  *graph = (cudaGraph_t)malloc(16);
  return cudaSuccess;
}
static enum cudaStreamCaptureStatus status_of(cudaStream_t in) {
  return stream_of(in)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t in, enum cudaStreamCaptureStatus *status) {
  *status = status_of(in);
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t in, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **needed, const cudaGraphEdgeData **edges, size_t *num_needed) {
  *status = status_of(in);
  if (id) *id = stream_of(in)->capture;
  if (graph) *graph = NULL;
  if (needed) *needed = NULL;
  if (edges) *edges = NULL;
  if (num_needed) *num_needed = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  static __thread enum cudaStreamCaptureMode current;
  enum cudaStreamCaptureMode before = current;
  current = *mode;
  *mode = before;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
  *made = (cudaGraphExec_t)malloc(16);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) { *number = 1; return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { free(graph); return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { free(graph); return cudaSuccess; }
