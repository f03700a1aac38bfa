/* NVRTC, NVML, CUPTI, cuSOLVER, cuSPARSE: the calls of each that torch reads an answer of (-DNVRTC, …). */
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *any;
#define MADE(name, ...) int name(any *handle, ##__VA_ARGS__) { CALLED; *handle = calloc(1, 256); return 0; }
#define SAYS(name, text) const char *name(int error) { return error ? "error of the emulated device" : text; }

#ifdef NVRTC /* programs of 8 zero bytes */
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
MADE(nvrtcCreateProgram, const char *source, const char *name, int count, const char *const *headers, const char *const *names)
int nvrtcGetPTXSize(any program, size_t *num_bytes) { *num_bytes = 8; return 0; }
int nvrtcGetCUBINSize(any program, size_t *num_bytes) { *num_bytes = 8; return 0; }
int nvrtcGetProgramLogSize(any program, size_t *num_bytes) { *num_bytes = 1; return 0; }
int nvrtcGetPTX(any program, char *code) { memset(code, 0, 8); return 0; }
int nvrtcGetCUBIN(any program, char *code) { memset(code, 0, 8); return 0; }
int nvrtcGetProgramLog(any program, char *text) { *text = 0; return 0; }
int nvrtcGetLoweredName(any program, const char *name, const char **lowered) { *lowered = name; return 0; }
SAYS(nvrtcGetErrorString, "NVRTC_SUCCESS")
#endif

#ifdef NVML /* a device's handle is its number, from 1 on */
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
SAYS(nvmlErrorString, "Success")
int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "emulated"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *number) { *number = emu_all_cards(); return 0; } /* CUDA_VISIBLE_DEVICES hides none */
int nvmlDeviceGetHandleByIndex_v2(unsigned card, any *handle) { *handle = (any)(uintptr_t)(card + 1); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, any *handle) { *handle = (any)1; return 0; }
int nvmlDeviceGetHandleByUUID(const char *id, any *handle) { *handle = (any)1; return 0; }
int nvmlDeviceGetUUID(any handle, char *text, unsigned length) {
  snprintf(text, length, "GPU-656d756c-6174-6564-2064-65766963653%u", (unsigned)(uintptr_t)handle - 1);
  return 0;
}
int nvmlDeviceGetName(any handle, char *text, unsigned length) { snprintf(text, length, "%s", emu_card_name()); return 0; }
int nvmlDeviceGetMemoryInfo(any handle, unsigned long long *memory) { /* total, free, used */
  memory[0] = emu_card_bytes();
  memory[1] = emu_free_bytes((int)(uintptr_t)handle - 1);
  memory[2] = memory[0] - memory[1];
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses(any handle, unsigned *number, any processes) { *number = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(any handle, unsigned *number, any processes) { *number = 0; return 0; }
int nvmlDeviceGetUtilizationRates(any handle, unsigned *rates) { rates[0] = rates[1] = 0; return 0; }
int nvmlDeviceGetPowerUsage(any handle, unsigned *milliwatts) { *milliwatts = 70000; return 0; }
int nvmlDeviceGetTemperature(any handle, int sensor, unsigned *degrees) { *degrees = 30; return 0; }
int nvmlDeviceGetP2PStatus(any one, any other, int index, int *status) { *status = 1; return 0; }
enum { NOT_SUPPORTED = 3 };
int nvmlDeviceGetNvLinkRemoteDeviceType(any handle, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(any handle, unsigned link, any info) { return NOT_SUPPORTED; }
#endif

#ifdef CUPTI /* a profiler that sees nothing */
int cuptiGetVersion(uint32_t *version) { *version = 130000; return 0; }
int cuptiGetResultString(int result, const char **text) { *text = "emulated"; return 0; }
MADE(cuptiSubscribe, any call, any data)
enum { MAX_LIMIT_REACHED = 12 };
int cuptiActivityGetNextRecord(any buffer, size_t num_bytes, any *record) { *record = NULL; return MAX_LIMIT_REACHED; }
int cuptiActivityGetNumDroppedRecords(any context, uint32_t in, size_t *number) { *number = 0; return 0; }
int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *id) { if (id) *id = 0; return 0; }
int cuptiGetCallbackName(int domain, uint32_t id, const char **name) { *name = "?"; return 0; }
#endif

#ifdef CUSOLVER
MADE(cusolverDnCreate) MADE(cusolverDnCreateParams) MADE(cusolverDnCreateSyevjInfo) MADE(cusolverDnCreateGesvdjInfo)

/* Eigenvalues (optimizer=galore): no workspace, as the real one's size isn't known here. */
int cusolverDnXsyevd_bufferSize(void *handle, void *params, int job, int uplo, int64_t n, int type, const void *a,
                                int64_t lda, int type_of_w, const void *w, int type_inside, size_t *device, size_t *host) {
    *device = *host = 0;
    return 0;
}
int cusolverDnXsyevBatched_bufferSize(void *handle, void *params, int job, int uplo, int64_t n, int type, const void *a,
                                      int64_t lda, int type_of_w, const void *w, int type_inside, size_t *device,
                                      size_t *host, int64_t num) {
    *device = *host = 0;
    return 0;
}
#endif

#ifdef CUSPARSE
MADE(cusparseCreate)
SAYS(cusparseGetErrorString, "success")
#endif
