/* CANN's runtime for one device whose memory is the host's and whose streams run at once.
 *
 * build.py appends a function that fails, and says so, for every other symbol that torch_npu lacks.
 * Names and arguments are those that torch_npu calls; 0 is ACL_SUCCESS.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 207001, ALIGNMENT = 512 };

static int allocate(void **address, size_t bytes) {
    return posix_memalign(address, ALIGNMENT, bytes ? bytes : ALIGNMENT) ? OUT_OF_MEMORY : SUCCESS;
}

static int handle(void **result) {
    *result = malloc(sizeof(int));
    return *result ? SUCCESS : OUT_OF_MEMORY;
}

/* --- device --- */
int aclInit(const char *config) { return SUCCESS; }
int aclFinalize(void) { return SUCCESS; }
int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return SUCCESS; }
int aclrtSetDevice(int device) { return SUCCESS; }
int aclrtResetDevice(int device) { return SUCCESS; }
int aclrtGetDevice(int *device) { *device = 0; return SUCCESS; }
int aclrtSynchronizeDevice(void) { return SUCCESS; }
int aclrtSynchronizeDeviceWithTimeout(int timeout) { return SUCCESS; }
int aclrtGetPrimaryCtxState(int device, uint32_t *flags, int *active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return SUCCESS;
}
static char context;
int aclrtGetCurrentContext(void **current) { *current = &context; return SUCCESS; }
int aclrtSetCurrentContext(void *current) { return SUCCESS; }
int aclrtDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return SUCCESS; }
int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
    *free_bytes = *total = (size_t)8 << 30;
    return SUCCESS;
}
int aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) {
    *value = 1;
    return SUCCESS;
}
const char *aclrtGetSocName(void) {
    const char *name = getenv("SOFTCANN_SOC");
    return name ? name : "Ascend950PR_9599";
}

/* --- memory --- */
int aclrtMalloc(void **address, size_t bytes, int policy) { return allocate(address, bytes); }
int aclrtMallocAlign32(void **address, size_t bytes, int policy) { return allocate(address, bytes); }
int aclrtMallocHost(void **address, size_t bytes) { return allocate(address, bytes); }
int aclrtFree(void *address) { free(address); return SUCCESS; }
int aclrtFreeHost(void *address) { free(address); return SUCCESS; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
    memmove(to, from, bytes);
    return SUCCESS;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
    memmove(to, from, bytes);
    return SUCCESS;
}
int aclrtMemset(void *to, size_t room, int value, size_t bytes) {
    memset(to, value, bytes);
    return SUCCESS;
}
int aclrtMemsetAsync(void *to, size_t room, int value, size_t bytes, void *stream) {
    memset(to, value, bytes);
    return SUCCESS;
}

/* --- streams and events --- */
int aclrtCreateStream(void **stream) { return handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
    return handle(stream);
}
int aclrtDestroyStream(void *stream) { free(stream); return SUCCESS; }
int aclrtSynchronizeStream(void *stream) { return SUCCESS; }
int aclrtSynchronizeStreamWithTimeout(void *stream, int timeout) { return SUCCESS; }
int aclrtStreamQuery(void *stream, int *status) { *status = 0; return SUCCESS; }
int aclrtStreamGetId(void *stream, int *id) { *id = 1; return SUCCESS; }
int aclrtStreamWaitEvent(void *stream, void *event) { return SUCCESS; }
int aclrtSetStreamFailureMode(void *stream, uint64_t mode) { return SUCCESS; }
int aclrtSetStreamOverflowSwitch(void *stream, uint32_t flag) { return SUCCESS; }
int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) { *flag = 0; return SUCCESS; }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtDestroyEvent(void *event) { free(event); return SUCCESS; }
int aclrtRecordEvent(void *event, void *stream) { return SUCCESS; }
int aclrtResetEvent(void *event, void *stream) { return SUCCESS; }
int aclrtSynchronizeEvent(void *event) { return SUCCESS; }
int aclrtQueryEventStatus(void *event, int *status) { *status = 1; return SUCCESS; }
int aclrtQueryEventWaitStatus(void *event, int *status) { *status = 0; return SUCCESS; }
int aclrtEventElapsedTime(float *ms, void *start, void *end) { *ms = 0; return SUCCESS; }

/* --- settings and messages --- */
int aclrtSetDeviceSatMode(int mode) { return SUCCESS; }
int aclrtSetOpWaitTimeout(uint32_t timeout) { return SUCCESS; }
int aclrtSetOpExecuteTimeOut(uint32_t timeout) { return SUCCESS; }
int aclrtSetSysParamOpt(int option, int64_t value) { return SUCCESS; }
int aclrtGetSysParamOpt(int option, int64_t *value) { *value = 0; return SUCCESS; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return SUCCESS; }
int aclrtPeekAtLastError(int level) { return SUCCESS; }
int aclrtGetLastError(int level) { return SUCCESS; }
int aclSetCompileopt(int option, const char *value) { return SUCCESS; }
size_t aclGetCompileoptSize(int option) { return 64; }
int aclGetCompileopt(int option, char *value, size_t room) {
    if (room) value[0] = 0;
    return SUCCESS;
}
int aclsysGetVersionStr(char *package, char *version) {
    strcpy(version, "9.1.0");
    return SUCCESS;
}
int aclmdlInitDump(void) { return SUCCESS; }
int aclmdlSetDump(const char *config) { return SUCCESS; }
int aclmdlFinalizeDump(void) { return SUCCESS; }
void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *text) {}
const char *aclGetRecentErrMsg(void) { return "software CANN: see stderr"; }

static long not_implemented(const char *symbol) {
    fprintf(stderr, "software CANN: %s is not implemented\n", symbol);
    return 507899;
}
