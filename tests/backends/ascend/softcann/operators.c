/* The objects that CANN's operators take, and the hand-over of a call to Python.
 *
 * build.py appends the two functions of each operator: aclnnXGetWorkspaceSize collects the arguments
 * in a Call, and aclnnX gives it to the callback, which returns 0, or another status for an error.
 * device.py declares the same structures.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DIMS = 12, MAX_ARGUMENTS = 48, NO_CALLBACK = 561103 };

typedef struct {
    int64_t num_dims, dims[MAX_DIMS], strides[MAX_DIMS], offset, dtype, format;
    char *data;
} Tensor;
typedef struct { uint64_t size; Tensor **items; } TensorList;
typedef struct { uint64_t size; int64_t *items; } IntArray;
typedef struct { uint64_t size; uint8_t *items; } BoolArray;
typedef struct { int64_t dtype; char bytes[16]; } Scalar;
typedef struct {
    int64_t kind; /* the letter of operators.py */
    int64_t integer;
    double real;
    void *object;
} Argument;
typedef struct { const char *name; int64_t count; Argument arguments[MAX_ARGUMENTS]; } Call;

static int (*callback)(Call *) = 0;
void softcann_set_callback(int (*function)(Call *)) { callback = function; }

Tensor *aclCreateTensor(const int64_t *dims, uint64_t num_dims, int dtype, const int64_t *strides,
                        int64_t offset, int format, const int64_t *storage, uint64_t storage_dims,
                        void *data) {
    Tensor *tensor = calloc(1, sizeof(Tensor));
    if (num_dims > MAX_DIMS) {
        fprintf(stderr, "software CANN: a tensor of %lu dimensions\n", (unsigned long)num_dims);
        abort();
    }
    tensor->num_dims = (int64_t)num_dims;
    for (uint64_t i = 0; i < num_dims; i++) {
        tensor->dims[i] = dims[i];
        tensor->strides[i] = strides ? strides[i] : 0;
    }
    tensor->offset = offset;
    tensor->dtype = dtype;
    tensor->format = format;
    tensor->data = data;
    return tensor;
}

Scalar *aclCreateScalar(void *value, int dtype) {
    /* float 0, int32 3, uint32 8: 4 bytes; float16 1, int16 6, uint16 7, bfloat16 27: 2 bytes;
     * int8 2, uint8 4, bool 12: 1 byte; complex128 17: 16 bytes; others 8 */
    static const int four[] = {0, 3, 8}, two[] = {1, 6, 7, 27}, one[] = {2, 4, 12};
    size_t bytes = dtype == 17 ? 16 : 8;
    for (size_t i = 0; i < sizeof four / sizeof *four; i++) if (dtype == four[i]) bytes = 4;
    for (size_t i = 0; i < sizeof two / sizeof *two; i++) if (dtype == two[i]) bytes = 2;
    for (size_t i = 0; i < sizeof one / sizeof *one; i++) if (dtype == one[i]) bytes = 1;
    Scalar *scalar = calloc(1, sizeof(Scalar));
    scalar->dtype = dtype;
    memcpy(scalar->bytes, value, bytes);
    return scalar;
}

#define DEFINE_ARRAY(Array, Item, create, destroy)                \
    Array *create(const Item *items, uint64_t size) {             \
        Array *array = malloc(sizeof(Array));                     \
        array->size = size;                                       \
        array->items = malloc((size ? size : 1) * sizeof(Item));  \
        if (size) memcpy(array->items, items, size * sizeof(Item)); \
        return array;                                             \
    }                                                             \
    int destroy(Array *array) {                                   \
        free(array->items);                                       \
        free(array);                                              \
        return 0;                                                 \
    }
typedef Tensor *TensorPointer;
DEFINE_ARRAY(IntArray, int64_t, aclCreateIntArray, aclDestroyIntArray)
DEFINE_ARRAY(BoolArray, uint8_t, aclCreateBoolArray, aclDestroyBoolArray)
DEFINE_ARRAY(TensorList, TensorPointer, aclCreateTensorList, aclDestroyTensorList)

int aclDestroyTensor(Tensor *tensor) { free(tensor); return 0; }
int aclDestroyScalar(Scalar *scalar) { free(scalar); return 0; }
void *aclCreateFloatArray(const float *items, uint64_t size) { abort(); }
int aclDestroyFloatArray(void *array) { abort(); }
void *aclCreateScalarList(void *const *items, uint64_t size) { abort(); }
int aclDestroyScalarList(void *list) { abort(); }

static Call *begin(const char *name, int64_t count) {
    Call *call = calloc(1, sizeof(Call));
    call->name = name;
    call->count = count;
    return call;
}

/* Has Python load device.py and the formulas, in the process of Python that runs torch_npu. */
static void install(void) {
    int (*ensure)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void (*release)(int) = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    int (*run)(const char *) = dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
    if (!ensure || !release || !run) return;
    int state = ensure();
    run("import tests.backends.ascend.softcann.formulas\n"
        "from tests.backends.ascend.softcann import device\n"
        "device.install()\n");
    release(state);
}

static int finish(Call *call) {
    if (!callback) install();
    int status = callback ? callback(call) : NO_CALLBACK;
    for (int64_t i = 0; i < call->count; i++)
        if (call->arguments[i].kind == 's') free(call->arguments[i].object);
    free(call);
    return status;
}
