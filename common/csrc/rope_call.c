/* One call of a live rotary module from Python, short: its check, its arguments, new tensors, the rotation.
 *
 * Reading tensors' attributes in Python takes longer than rotating one token. Here they are read through the table of C
 * functions that DLPack defines (torch.Tensor.__dlpack_c_exchange_api__): plain C, no torch headers, one build for every
 * torch. Nothing is decided here: whatever is not the plain, right case gives None, nothing was written, and rope_kernel.py
 * goes the long way, which heals the table, copies the argument or raises the error.
 *
 * Without Python's headers, or on a Python without its global lock, the library has no such module, and every call goes
 * the long way. */
#if defined(__has_include)
#if __has_include(<Python.h>)
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif
#endif

#if defined(Py_PYTHON_H) && !defined(Py_GIL_DISABLED)
#include <string.h>

#include "rope_kernel.h"

/* ---- DLPack 1: what is read of it. ---- */

typedef struct {
    void *data;
    int32_t device, device_index;
    int32_t dims;
    uint8_t kind, bits; /* of an element */
    uint16_t lanes;
    int64_t *shape, *strides; /* in elements */
    uint64_t byte_offset;
} tensor;

typedef struct exchange_api {
    uint32_t major, minor;
    struct exchange_api *older;
    void *allocate, *export_owning, *import;
    int (*read)(void *object, tensor *out); /* non-owning: right until other code runs */
    void *stream;
} exchange_api;

enum { CPU = 1 };
enum { INTEGER = 0, UNSIGNED = 1, FLOAT = 2, BFLOAT = 4 };

/* ---- What rope_kernel.py hands over once. ---- */

#define HANDED(X)                                                                                                  \
    X(tensor_type) X(parameter_type) X(empty_like) X(memory_format) X(grad_enabled) X(dispatch_modes) X(tracing) \
        X(functorch_level) X(forward_ad) X(increment_version) X(num_threads)
#define NAMES(X)                                                                                                 \
    X(__dict__) X(_buffers) X(_sole) X(_checks) X(_pair_axis) X(is_neox_style) X(head_size) X(cos_sin_cache)     \
        X(_live_stamp) X(_version) X(untyped_storage) X(nbytes) X(data) X(requires_grad) X(_current_level)
#define DECLARE_OBJECT(NAME) static PyObject *NAME;
#define DECLARE_NAME(NAME) static PyObject *name_##NAME;
HANDED(DECLARE_OBJECT)
NAMES(DECLARE_NAME)
static const exchange_api *exchange;
static rope_parallel_fn pool;
static PyObject *only_contiguous; /* {"memory_format": contiguous} */

enum { SHORT = 1 << 18 }; /* bytes of query and key that one thread rotates in less time than it takes to wake another */

/* ---- Reading. ---- */

static int is_plain(PyObject *object) {
    return (PyObject *)Py_TYPE(object) == tensor_type || (PyObject *)Py_TYPE(object) == parameter_type;
}

static int read_tensor(PyObject *object, tensor *out) {
    if (exchange->read(object, out)) return PyErr_Clear(), 0;
    out->data = (char *)out->data + out->byte_offset;
    return out->device == CPU && out->lanes == 1 && out->strides && out->shape;
}

static int is_of(const tensor *x, int kind, int bits) { return x->kind == kind && x->bits == bits; }

static int64_t elements(const tensor *x) {
    int64_t product = 1;
    for (int i = 0; i < x->dims; i++) product *= x->shape[i];
    return product;
}

static int64_t bytes_of(const tensor *x) { return elements(x) * x->bits / 8; }

static int is_contiguous(const tensor *x) {
    int64_t step = 1;
    for (int i = x->dims - 1; i >= 0; step *= x->shape[i--])
        if (x->shape[i] != 1 && x->strides[i] != step) return 0;
    return 1;
}

/* Whether the memory of a tensor that was read reaches as far as its shape says: one who cuts a storage short moves it,
 * and another of the same address may be shorter. */
static int is_backed(PyObject *object, const tensor *x) {
    int64_t last = 0;
    PyObject *storage = PyObject_CallMethodNoArgs(object, name_untyped_storage);
    PyObject *size = storage ? PyObject_CallMethodNoArgs(storage, name_nbytes) : NULL;
    long long held = size ? PyLong_AsLongLong(size) : -1;
    Py_XDECREF(size);
    Py_XDECREF(storage);
    if (held < 0) return PyErr_Clear(), 0;
    for (int i = 0; i < x->dims; i++) {
        if (x->shape[i] == 0) return 1;
        last += (x->shape[i] - 1) * x->strides[i];
    }
    return (last + 1) * x->bits / 8 <= held;
}

static int equals(PyObject *owned, PyObject *known) {
    int same = owned && (owned == known || PyObject_RichCompareBool(owned, known, Py_EQ) == 1);
    Py_XDECREF(owned);
    return same;
}

static int64_t integer(PyObject *borrowed) {
    long long value = borrowed ? PyLong_AsLongLong(borrowed) : -1;
    return PyErr_Occurred() ? PyErr_Clear(), -1 : value;
}

static int is_true(PyObject *owned) { /* -1: it raised */
    int truth = owned ? PyObject_IsTrue(owned) : -1;
    Py_XDECREF(owned);
    return truth;
}

/* ---- Conditions: rope_kernel._plain, and LiveBuffers.live. ---- */

static int needs_gradient(PyObject *query, PyObject *key) {
    int enabled = is_true(PyObject_CallNoArgs(grad_enabled));
    if (enabled == 0) return 0;
    return enabled != 1 || is_true(PyObject_GetAttr(query, name_requires_grad)) ||
           (key != Py_None && is_true(PyObject_GetAttr(key, name_requires_grad)));
}

static int nothing_watches(void) {
    if (is_true(PyObject_CallNoArgs(dispatch_modes)) || is_true(PyObject_CallNoArgs(tracing))) return 0;
    PyObject *level = PyObject_CallNoArgs(functorch_level);
    Py_XDECREF(level);
    if (level != Py_None) return 0;
    level = PyObject_GetAttr(forward_ad, name__current_level);
    int64_t forward_level = integer(level);
    Py_XDECREF(level);
    return forward_level < 0;
}

/* Whether `buffer` is what the module remembers as right, unchanged: (name, stamp, version, address, size). */
static int is_live(PyObject *buffer, PyObject *known, tensor *table) {
    if (!is_plain(buffer) || !read_tensor(buffer, table) || !PyTuple_Check(known) || PyTuple_GET_SIZE(known) != 5) return 0;
    return equals(PyObject_GetAttr(buffer, name__live_stamp), PyTuple_GET_ITEM(known, 1)) &&
           equals(PyObject_GetAttr(buffer, name__version), PyTuple_GET_ITEM(known, 2)) &&
           integer(PyTuple_GET_ITEM(known, 3)) == (int64_t)(intptr_t)table->data &&
           integer(PyTuple_GET_ITEM(known, 4)) == bytes_of(table) && is_backed(buffer, table);
}

/* The module's table, if it is live; else NULL. */
static PyObject *live_table(PyObject *state, tensor *table) {
    PyObject *buffers = PyDict_GetItemWithError(state, name__buffers);
    PyObject *known = PyDict_GetItemWithError(state, name__sole);
    PyObject *buffer = buffers && PyDict_Check(buffers) ? PyDict_GetItemWithError(buffers, name_cos_sin_cache) : NULL;
    if (!buffer || !known) return NULL;
    Py_INCREF(buffer);
    Py_INCREF(known);
    if (!is_live(buffer, known, table)) Py_CLEAR(buffer);
    Py_DECREF(known);
    return buffer;
}

/* ---- Arguments. ---- */

typedef struct {
    int64_t batch, seq, heads, stride[3];
    int by_batch; /* a dimension for the batch, and one for the sequence */
} heads_of;

/* [tokens, heads * size], [tokens, heads, size], [batch, seq, heads * size] or [batch, seq, heads, size] */
static int read_heads(const tensor *x, int64_t tokens, int64_t size, heads_of *out) {
    const int64_t *shape = x->shape, *strides = x->strides;
    const int dims = x->dims;
    if (dims < 2 || dims > 4 || (strides[dims - 1] != 1 && shape[dims - 1] != 1) || shape[dims - 1] % size) return 0;
    const int flat = dims == 2 || (dims == 3 && (shape[2] != size || shape[0] != tokens));
    const int first = flat ? dims - 2 : dims - 3; /* the dimension of the sequence */
    if (!flat && shape[dims - 1] != size) return 0;
    heads_of made = {
        .by_batch = first,
        .batch = first ? shape[0] : 1,
        .seq = shape[first],
        .heads = flat ? shape[dims - 1] / size : shape[dims - 2],
        .stride = {first ? strides[0] : 0, strides[first], flat ? size : strides[dims - 2]},
    };
    *out = made;
    return 1;
}

/* Whether no two elements lie at one place, seen at a glance. */
static int is_writable(const heads_of *x, int64_t size) {
    return (x->heads < 2 || x->stride[2] >= size) && (x->seq < 2 || x->stride[1] >= x->heads * x->stride[2]) &&
           (x->batch < 2 || x->stride[0] >= x->seq * x->stride[1]);
}

static int read_positions(const tensor *x, int axes, int by_batch, rope_call *call) {
    const int64_t *shape = x->shape + axes, *strides = x->strides + axes;
    int64_t *to = call->position_stride;
    if (x->dims < axes + 1 || x->dims > axes + 2 || !(is_of(x, INTEGER, 64) || is_of(x, INTEGER, 32))) return 0;
    call->position_bits = x->bits;
    call->positions = x->data;
    to[0] = axes ? x->strides[0] : 0;
    if (x->dims == axes + 1) {
        const int shared = shape[0] == call->seq;
        to[1] = shared ? 0 : call->seq * strides[0], to[2] = strides[0];
        return shared || (by_batch && shape[0] == call->batch * call->seq);
    }
    if (!by_batch) { /* [batch, seq] of tokens that stand in one row */
        to[1] = 0, to[2] = strides[1];
        return shape[0] * shape[1] == call->seq && (shape[0] == 1 || strides[0] == shape[1] * strides[1]);
    }
    to[1] = strides[0], to[2] = strides[1];
    return shape[0] == call->batch && shape[1] == call->seq;
}

/* An empty contiguous tensor like `object`; a mode may give something else. */
static PyObject *new_like(PyObject *object, const tensor *x) {
    if (is_contiguous(x)) return PyObject_CallOneArg(empty_like, object);
    PyObject *arguments = PyTuple_Pack(1, object);
    PyObject *made = arguments ? PyObject_Call(empty_like, arguments, only_contiguous) : NULL;
    Py_XDECREF(arguments);
    return made;
}

static int same_shape(const tensor *x, const tensor *y) {
    if (x->kind != y->kind || x->bits != y->bits || x->dims != y->dims) return 0;
    return !memcmp(x->shape, y->shape, (size_t)x->dims * sizeof *x->shape);
}

/* Where query or key goes: to itself, or into a new tensor like it. */
static int read_output(PyObject *object, const tensor *x, const heads_of *heads, int64_t size, int inplace, void **out,
                       int64_t *out_stride) {
    tensor made;
    if (inplace) {
        *out = x->data;
        memcpy(out_stride, heads->stride, sizeof heads->stride);
        return is_writable(heads, size);
    }
    if (!is_plain(object) || !read_tensor(object, &made) || !same_shape(x, &made) || !is_contiguous(&made)) return 0;
    *out = made.data;
    out_stride[0] = heads->seq * heads->heads * size, out_stride[1] = heads->heads * size, out_stride[2] = size;
    return 1;
}

typedef struct {
    PyObject *positions, *query, *key, *table, *checks, *pair_axis; /* key and pair_axis may be None */
    PyObject *q_out, *k_out;
    int64_t head_size;
    int inplace;
} arguments;

/* Whether the arguments fit together, and the call that they make. Runs no Python: what is read stays as it is. */
static int read_call(const arguments *given, rope_call *call) {
    tensor query, key, positions, table, checks, pair_axis;
    heads_of q = {0}, k = {0};
    const int64_t size = given->head_size;
    const int has_key = given->key != Py_None;
    if (!read_tensor(given->query, &query) || (has_key && !read_tensor(given->key, &key)) ||
        !read_tensor(given->positions, &positions) || !read_tensor(given->table, &table) ||
        !read_tensor(given->checks, &checks))
        return 0;
    if (is_of(&query, FLOAT, 32)) call->dtype = FLOAT32;
    else if (is_of(&query, BFLOAT, 16)) call->dtype = BFLOAT16;
    else if (is_of(&query, FLOAT, 16)) call->dtype = FLOAT16;
    else return 0;

    if (table.dims != 2 || !is_of(&table, FLOAT, 32) || !is_contiguous(&table) || table.shape[1] % 2 ||
        table.shape[1] < 2 || table.shape[1] > size)
        return 0;
    call->rows = table.shape[0], call->rotary_dim = table.shape[1], call->head_dim = size;
    call->cos = table.data, call->sin = call->cos + call->rotary_dim / 2;
    call->cos_stride = call->sin_stride = call->rotary_dim;
    if (checks.dims != 1 || !is_of(&checks, INTEGER, 32) || checks.shape[0] != call->rows || !is_contiguous(&checks))
        return 0;
    call->row_checks = checks.data;

    const int axes = positions.dims > 1 && given->pair_axis != Py_None;
    int64_t tokens = 1;
    for (int i = axes; i < positions.dims; i++) tokens *= positions.shape[i];
    if (!read_heads(&query, tokens, size, &q)) return 0;
    call->batch = q.batch, call->seq = q.seq, call->q_heads = q.heads, call->q = query.data;
    memcpy(call->q_stride, q.stride, sizeof q.stride);
    if (has_key) {
        if (!read_heads(&key, tokens, size, &k) || key.kind != query.kind || key.bits != query.bits || k.batch != q.batch ||
            k.seq != q.seq || k.by_batch != q.by_batch)
            return 0;
        if (given->inplace && key.data == query.data) return 0;
        call->k_heads = k.heads, call->k = key.data;
        memcpy(call->k_stride, k.stride, sizeof k.stride);
        if (!read_output(given->k_out, &key, &k, size, given->inplace, &call->k_out, call->k_out_stride)) return 0;
    }
    if (!read_output(given->q_out, &query, &q, size, given->inplace, &call->q_out, call->q_out_stride)) return 0;
    if (!read_positions(&positions, axes, q.by_batch, call)) return 0;
    call->axes = 1;
    if (axes) {
        if (!read_tensor(given->pair_axis, &pair_axis) || pair_axis.dims != 1 || !is_of(&pair_axis, UNSIGNED, 8) ||
            pair_axis.shape[0] != call->rotary_dim / 2 || !is_contiguous(&pair_axis) || positions.shape[0] > MAX_AXES)
            return 0;
        call->axes = (int32_t)positions.shape[0], call->pair_axis = pair_axis.data;
    }
    return 1;
}

/* What `given` still lacks, taken from the module's __dict__ and made; 0 where something is not as it should be. Whatever
 * runs Python comes before read_call. `owned` has what must be let go of. */
static int complete(PyObject *state, arguments *given, PyObject **owned, rope_call *call, int *is_short) {
    tensor query, key, table;
    const int has_key = given->key != Py_None;
    PyObject *known = PyDict_GetItemWithError(state, name__checks);
    PyObject *neox = PyDict_GetItemWithError(state, name_is_neox_style);
    given->head_size = integer(PyDict_GetItemWithError(state, name_head_size));
    if (!known || !PyDict_Check(known) || (neox != Py_True && neox != Py_False) || given->head_size < 1) return 0;
    call->interleaved = neox == Py_False;
    given->pair_axis = PyDict_GetItemWithError(state, name__pair_axis);
    given->checks = PyDict_GetItemWithError(known, name_cos_sin_cache);
    if (!given->pair_axis || !given->checks || !is_plain(given->checks)) return 0;
    Py_INCREF(owned[0] = given->pair_axis);
    Py_INCREF(owned[1] = given->checks);

    if (!read_tensor(given->query, &query) || (has_key && !read_tensor(given->key, &key))) return 0;
    *is_short = bytes_of(&query) + (has_key ? bytes_of(&key) : 0) < SHORT;
    call->threads = 1;
    if (!*is_short) {
        PyObject *threads = PyObject_CallNoArgs(num_threads);
        call->threads = (int32_t)integer(threads);
        call->parallel = pool;
        Py_XDECREF(threads);
    }
    given->table = owned[2] = live_table(state, &table);
    if (!given->table) return 0;
    if (!*is_short) { /* another tensor of the same memory, which nobody takes away from it while rows are read */
        PyObject *other = PyObject_GetAttr(given->table, name_data);
        Py_DECREF(given->table);
        given->table = owned[2] = other;
        if (!other || !is_plain(other)) return 0;
    }
    if (given->inplace) return 1;
    given->q_out = owned[3] = new_like(given->query, &query);
    if (!given->q_out) return 0;
    given->k_out = owned[4] = has_key ? new_like(given->key, &key) : Py_NewRef(Py_None);
    return given->k_out != NULL;
}

PyDoc_STRVAR(rotate_live_doc,
             "rotate_live(module, positions, query, key, inplace)\n--\n\n"
             "The rotated (query, key) of a RopeTable's forward, or None where the long way must be gone.");

static PyObject *rotate_live(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (!exchange || count != 5) return PyErr_SetString(PyExc_TypeError, "expected 5 arguments, after connect()"), NULL;
    arguments given = {.positions = args[1], .query = args[2], .key = args[3], .inplace = args[4] == Py_True};
    const int has_key = given.key != Py_None;
    if (!is_plain(given.query) || !is_plain(given.positions) || (has_key && !is_plain(given.key))) Py_RETURN_NONE;
    PyObject *state = NULL, *owned[5] = {NULL}, *result = NULL;
    rope_call call = {.threads = 1};
    int is_short, done = 0;
    if (!needs_gradient(given.query, given.key) && nothing_watches() &&
        (state = PyObject_GetAttr(args[0], name___dict__)) && PyDict_Check(state) &&
        complete(state, &given, owned, &call, &is_short) && read_call(&given, &call)) {
        if (is_short) {
            done = rope_rotate(&call) == OK;
        } else {
            Py_BEGIN_ALLOW_THREADS
            done = rope_rotate(&call) == OK;
            Py_END_ALLOW_THREADS
        }
    }
    PyErr_Clear();
    if (done && given.inplace) { /* tell autograd, which may have saved them */
        PyObject *written = has_key ? PyTuple_Pack(2, given.query, given.key) : PyTuple_Pack(1, given.query);
        PyObject *told = written ? PyObject_CallOneArg(increment_version, written) : NULL;
        Py_XDECREF(written);
        if (told) result = PyTuple_Pack(2, given.query, given.key);
        Py_XDECREF(told);
    } else if (done) {
        result = PyTuple_Pack(2, given.q_out, given.k_out);
    }
    for (int i = 0; i < 5; i++) Py_XDECREF(owned[i]);
    Py_XDECREF(state);
    return done ? result : Py_NewRef(Py_None);
}

/* ---- The module. ---- */

PyDoc_STRVAR(connect_doc,
             "connect(capsule, pool, *objects)\n--\n\n"
             "Take torch's table of functions and what else the calls need; whether the table is of DLPack 1 and complete.");

static PyObject *connect(PyObject *self, PyObject *args) {
    (void)self;
    static PyObject **const slots[] = {
#define SLOT(NAME) &NAME,
        HANDED(SLOT)
    };
    enum { SLOTS = sizeof slots / sizeof *slots };
    if (PyTuple_GET_SIZE(args) != 2 + SLOTS) return PyErr_SetString(PyExc_TypeError, "wrong number of objects"), NULL;
    const exchange_api *api = PyCapsule_GetPointer(PyTuple_GET_ITEM(args, 0), "dlpack_exchange_api");
    void *threads = api ? PyLong_AsVoidPtr(PyTuple_GET_ITEM(args, 1)) : NULL;
    if (PyErr_Occurred()) return NULL;
    while (api && api->major > 1) api = api->older;
    if (!api || api->major != 1 || !api->read) Py_RETURN_FALSE;
    for (int i = 0; i < SLOTS; i++) {
        Py_XDECREF(*slots[i]);
        *slots[i] = Py_NewRef(PyTuple_GET_ITEM(args, 2 + i));
    }
    Py_XDECREF(only_contiguous);
    only_contiguous = Py_BuildValue("{sO}", "memory_format", memory_format);
    if (!only_contiguous) return NULL;
    memcpy(&pool, &threads, sizeof pool);
    exchange = api;
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"rotate_live", (PyCFunction)(void (*)(void))rotate_live, METH_FASTCALL, rotate_live_doc},
    {"connect", connect, METH_VARARGS, connect_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_rope_kernel", .m_doc = "Calls of live rotary modules.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__rope_kernel(void) {
#define INTERN(NAME) \
    if (!name_##NAME && !(name_##NAME = PyUnicode_InternFromString(#NAME))) return NULL;
    NAMES(INTERN)
    return PyModule_Create(&definition);
}

#else
typedef int rope_call_needs_python; /* a file without a declaration is not C */
#endif
