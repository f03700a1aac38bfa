/* cuBLAS and, with -DLT, cuBLASLt: they succeed and compute nothing. What torch asks back is kept in the handle. */
#include "device.h"
#include <stdlib.h>
#include <string.h>

enum { VERSION = 130002 };

#ifdef LT
size_t cublasLtGetVersion(void) { return VERSION; }
#define MADE(name) int name(void **handle) { CALLED; *handle = calloc(1, 256); return 0; }
MADE(cublasLtCreate) MADE(cublasLtMatmulDescCreate) MADE(cublasLtMatrixLayoutCreate) MADE(cublasLtMatmulPreferenceCreate)
#define FREED(name) int name(void *handle) { free(handle); return 0; }
FREED(cublasLtDestroy) FREED(cublasLtMatmulDescDestroy) FREED(cublasLtMatrixLayoutDestroy) FREED(cublasLtMatmulPreferenceDestroy)

typedef struct { uint64_t algorithm[8]; size_t workspace_bytes; int state; float waves; int reserved[4]; } heuristic;
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                   heuristic *results, int *number) {
  CALLED;
  *number = wanted > 0;
  if (*number) {
    memset(results, 0, sizeof *results);
    results->waves = 1;
  }
  return 0;
}
#else
typedef struct { int math_mode, pointer_mode; void *stream; } cublas;
int cublasCreate_v2(cublas **handle) { CALLED; *handle = calloc(1, sizeof **handle); return 0; }
int cublasDestroy_v2(cublas *handle) { free(handle); return 0; }
int cublasGetVersion_v2(cublas *handle, int *version) { *version = VERSION; return 0; }
int cublasGetMathMode(cublas *handle, int *mode) { *mode = handle->math_mode; return 0; }
int cublasSetMathMode(cublas *handle, int mode) { handle->math_mode = mode; return 0; }
int cublasGetPointerMode_v2(cublas *handle, int *mode) { *mode = handle->pointer_mode; return 0; }
int cublasSetPointerMode_v2(cublas *handle, int mode) { handle->pointer_mode = mode; return 0; }
int cublasGetStream_v2(cublas *handle, void **in) { *in = handle->stream; return 0; }
int cublasSetStream_v2(cublas *handle, void *in) { handle->stream = in; return 0; }
#endif
