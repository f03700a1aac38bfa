/* What the files of libcudart share. */
#pragma once
#include "device.h"
#include <cuda_runtime_api.h>
#include <crt/host_config.h>

typedef struct { int priority; unsigned flags; unsigned long long capture; } stream; /* capture: the graph, 0: none */
stream *stream_of(cudaStream_t handle);
cudaError_t failed(cudaError_t error); /* as cudaGetLastError will say */
