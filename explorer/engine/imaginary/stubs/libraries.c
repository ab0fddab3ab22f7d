/* cuBLAS, cuDNN, NCCL and CUPTI of the imaginary card: versions, handles, sizes and counts. Functions that only compute
   are generated. Layouts and numbers: cuBLASLt (cublasLtMatmulHeuristicResult_t), cuDNN 9 (backend attributes, RNN
   functions) and NCCL 2 (ncclUniqueId, ncclDataType_t), each in its API reference. */
#include "imaginary.h"
#include <stdlib.h>
#include <string.h>

Status cudaMalloc(void **out, size_t bytes);
Status cudaFree(void *address);

/* ---- cuBLAS ---- */
Status cublasGetPointerMode_v2(void *handle, int *out) { return *out = 0, SUCCESS; }
Status cublasGetMathMode(void *handle, int *out) { return *out = 0, SUCCESS; }
Status cublasGetStream_v2(void *handle, void **out) { return *out = NULL, SUCCESS; }
const char *cublasGetStatusString(Status code) { return code ? "an error of the imaginary card" : "success"; }
size_t cublasLtGetVersion(void) { return 130000; }
typedef struct { uint64_t algorithm[8]; size_t workspace; Status state; float waves; int rest[4]; } Heuristic;
Status cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int n, Heuristic *out, int *count) {
    *out = (Heuristic){.workspace = card.cublaslt_workspace};
    return *count = 1, SUCCESS;
}

/* ---- cuDNN ---- */
size_t cudnnGetVersion(void) { return setting("IMAGINARY_CUDNN_VERSION", 90000); }
size_t cudnnGetCudartVersion(void) { return 13000; }
Status cudnnGetProperty(int part, int *out) {
    int version = (int)cudnnGetVersion();
    return *out = part == 0 ? version / 10000 : part == 1 ? version / 100 % 100 : version % 100, SUCCESS;
}
const char *cudnnGetErrorString(Status code) { return code ? "an error of the imaginary card" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *out, size_t size) { if (size) *out = 0; }
Status cudnnBackendCreateDescriptor(int kind, void **out) { return *out = new_handle(), SUCCESS; }
Status cudnnBackendDestroyDescriptor(void *descriptor) { return free(descriptor), SUCCESS; }
/* An engine without knobs and notes, one plan, which takes the workspace of the settings. */
Status cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t asked, int64_t *count, void *out) {
    enum { RESULTS = 202, KNOB_CHOICES = 302, PLAN_WORKSPACE = 402, KNOB_INFO = 1302, NUMERICAL_NOTE = 1303, BEHAVIOR_NOTE = 1305 };
    enum { BOOLEAN = 2, INT64 = 3, DOUBLE = 5, POINTER = 6, DESCRIPTOR = 15, CHAR = 24 };
    int has_none = name == KNOB_CHOICES || name == KNOB_INFO || name == NUMERICAL_NOTE || name == BEHAVIOR_NOTE;
    if (count) *count = has_none ? 0 : name == RESULTS ? 1 : asked > 0;
    if (has_none || !out || asked < 1 || type == DESCRIPTOR) return SUCCESS; /* descriptors: the caller made them */
    memset(out, 0, type == BOOLEAN || type == CHAR ? 1 : type == INT64 || type == DOUBLE || type == POINTER ? 8 : 4);
    if (name == PLAN_WORKSPACE) *(int64_t *)out = (int64_t)card.cudnn_workspace;
    return SUCCESS;
}

/* Recurrent layers: where each matrix and bias lies in the one buffer of weights. First all matrices, layer by layer,
   then all biases; a matrix or bias of each gate from the input, then from the hidden state, then the projection. */
typedef struct { int mode, bias, directions, input, hidden, projected, layers, element; } Rnn;
typedef struct { int n_dims, dims[8]; } Shape;
static int element_bytes(int type) { return type == 1 ? 8 : type == 2 || type == 9 ? 2 : 4; } /* double; half, bfloat16 */
static int gates(const Rnn *rnn) { return rnn->mode == 2 ? 4 : rnn->mode == 3 ? 3 : 1; } /* LSTM, GRU, plain */
Status cudnnSetRNNDescriptor_v8(Rnn *rnn, int algorithm, int mode, int bias, int direction, int input_mode, int type, int precision, int math, int input, int hidden, int projected, int layers) {
    *rnn = (Rnn){mode, bias == 0 ? 0 : bias == 3 ? 2 : 1, direction + 1, input, hidden, projected, layers, element_bytes(type)};
    return SUCCESS;
}
static size_t matrix_elements(const Rnn *rnn, int pseudo_layer, int id) {
    int n_gates = gates(rnn), layer = pseudo_layer / rnn->directions;
    if (id == 2 * n_gates) return rnn->projected != rnn->hidden ? (size_t)rnn->projected * rnn->hidden : 0;
    size_t columns = id >= n_gates ? rnn->projected : layer ? (size_t)rnn->projected * rnn->directions : rnn->input;
    return columns * rnn->hidden;
}
static size_t place(const Rnn *rnn, int pseudo_layer, int id) {
    size_t elements = 0;
    for (int layer = 0; layer <= pseudo_layer; layer++)
        for (int i = 0; i <= 2 * gates(rnn) && (layer < pseudo_layer || i < id); i++) elements += matrix_elements(rnn, layer, i);
    return elements;
}
static size_t bias_place(const Rnn *rnn, int pseudo_layer, int id) {
    size_t before = (size_t)pseudo_layer * gates(rnn) * 2 + id;
    return place(rnn, rnn->layers * rnn->directions, 0) + before * rnn->hidden;
}
Status cudnnGetRNNWeightSpaceSize(void *handle, Rnn *rnn, size_t *out) {
    return *out = rnn->element * (rnn->bias ? bias_place(rnn, rnn->layers * rnn->directions, 0) : place(rnn, rnn->layers * rnn->directions, 0)), SUCCESS;
}
Status cudnnGetRNNWeightParams(void *handle, Rnn *rnn, int layer, size_t size, char *weights, int id, Shape *matrix, void **matrix_at, Shape *bias, void **bias_at) {
    size_t elements = matrix_elements(rnn, layer, id);
    int is_projection = id == 2 * gates(rnn), rows = is_projection ? rnn->projected : rnn->hidden;
    if (matrix) { /* the caller asks for the matrix, the bias or both */
        *matrix_at = elements ? weights + rnn->element * place(rnn, layer, id) : NULL;
        *matrix = (Shape){3, {1, rows, (int)(elements / rows)}};
    }
    if (bias) {
        *bias_at = rnn->bias && !is_projection ? weights + rnn->element * bias_place(rnn, layer, id) : NULL;
        *bias = (Shape){3, {1, rows, 1}};
    }
    return SUCCESS;
}
Status cudnnGetTensorNdDescriptor(const Shape *descriptor, int asked, int *type, int *n_dims, int *dims, int *strides) {
    *type = 0, *n_dims = descriptor->n_dims;
    for (int i = 0; i < descriptor->n_dims && i < asked; i++) dims[i] = descriptor->dims[i], strides[i] = 1;
    return SUCCESS;
}
Status cudnnGetRNNTempSpaceSizes(void *handle, void *rnn, int mode, void *x, size_t *workspace, size_t *kept) {
    if (workspace) *workspace = card.cudnn_workspace;
    if (kept) *kept = 0;
    return SUCCESS;
}

/* ---- NCCL: every rank is a process of its own that hears from no other; small values are its own ---- */
typedef struct { int n_ranks, rank; } Communicator;
typedef struct { char bytes[128]; } UniqueId;
static Status join(void **out, int n_ranks, int rank) { return *out = new_handle(), *(Communicator *)*out = (Communicator){n_ranks, rank}, SUCCESS; }
static size_t bytes_of(size_t count, int type) {
    static const char SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)sizeof SIZES ? count * (size_t)SIZES[type] : 0;
}
Status ncclGetVersion(int *out) { return *out = (int)setting("IMAGINARY_NCCL_VERSION", 22900), SUCCESS; }
const char *ncclGetErrorString(Status code) { return code ? "an error of the imaginary card" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }
Status ncclGetUniqueId(UniqueId *out) { return memset(out, 7, sizeof *out), SUCCESS; }
Status ncclCommInitRank(void **out, int n, UniqueId id, int rank) { return join(out, n, rank); }
Status ncclCommInitRankConfig(void **out, int n, UniqueId id, int rank, void *config) { return join(out, n, rank); }
Status ncclCommInitRankScalable(void **out, int n, int rank, int n_ids, void *ids, void *config) { return join(out, n, rank); }
Status ncclCommInitAll(void **out, int n, const int *devices) {
    for (int i = 0; i < n; i++) join(out + i, n, i);
    return SUCCESS;
}
Status ncclCommSplit(Communicator *parent, int color, int key, void **out, void *config) { return join(out, parent->n_ranks, parent->rank); }
Status ncclCommDestroy(void *communicator) { return SUCCESS; }
Status ncclCommCount(Communicator *communicator, int *out) { return *out = communicator->n_ranks, SUCCESS; }
Status ncclCommUserRank(Communicator *communicator, int *out) { return *out = communicator->rank, SUCCESS; }
Status ncclCommGetAsyncError(void *communicator, Status *out) { return *out = SUCCESS, SUCCESS; }
Status ncclMemAlloc(void **out, size_t bytes) { return cudaMalloc(out, bytes); }
Status ncclMemFree(void *address) { return cudaFree(address); }
Status ncclAllReduce(const void *from, void *to, size_t n, int type) { return copy(to, from, bytes_of(n, type)); }
Status ncclReduce(const void *from, void *to, size_t n, int type) { return copy(to, from, bytes_of(n, type)); }
Status ncclBroadcast(const void *from, void *to, size_t n, int type) { return copy(to, from, bytes_of(n, type)); }
Status ncclAllGather(const void *from, char *to, size_t n, int type, Communicator *communicator, void *stream) {
    for (int rank = 0; rank < communicator->n_ranks; rank++) copy(to + (size_t)rank * bytes_of(n, type), from, bytes_of(n, type));
    return SUCCESS;
}
Status ncclReduceScatter(const char *from, void *to, size_t n, int type, int operation, Communicator *communicator, void *stream) {
    return copy(to, from + (size_t)communicator->rank * bytes_of(n, type), bytes_of(n, type));
}

/* ---- CUPTI: no activity is ever recorded ---- */
enum { NO_MORE_RECORDS = 12 };
Status cuptiGetVersion(uint32_t *out) { return *out = 130000, SUCCESS; }
Status cuptiSubscribe(void **out, void *callback, void *data) { return *out = (void *)16, SUCCESS; }
Status cuptiActivityGetNextRecord(void *buffer, size_t size, void **record) { return NO_MORE_RECORDS; }
Status cuptiGetResultString(Status code, const char **out) { return *out = code ? "an error of the imaginary card" : "success", SUCCESS; }
