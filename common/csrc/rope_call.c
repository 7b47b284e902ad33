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
    X(_buffers) X(_sole) X(_checks) X(_pair_axis) X(is_neox_style) X(head_size) X(cos_sin_cache)     \
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
    return integer(PyDict_GetItemWithError(forward_ad, name__current_level)) < 0;
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

/* ---- One call. ---- */

typedef struct {
    PyObject *module, *positions, *query, *key; /* borrowed; key may be None */
    int has_key, inplace, is_short;
    PyObject *state, *pair_axis, *checks, *table, *q_out, *k_out; /* owned */
    tensor q, k;
    heads_of q_heads, k_heads;
    rope_call call;
} rotation;

static PyObject *of_module(rotation *todo, PyObject *name) { return PyDict_GetItemWithError(todo->state, name); }

/* Query, key, positions and what the module says of them; whether they fit together. */
static int read_arguments(rotation *todo) {
    rope_call *call = &todo->call;
    tensor *q = &todo->q, *k = &todo->k, positions;
    heads_of *q_heads = &todo->q_heads, *k_heads = &todo->k_heads;
    PyObject *neox = of_module(todo, name_is_neox_style);
    const int64_t size = integer(of_module(todo, name_head_size));
    Py_XINCREF(todo->pair_axis = of_module(todo, name__pair_axis));
    if (size < 1 || (neox != Py_True && neox != Py_False) || !todo->pair_axis) return 0;
    if (!read_tensor(todo->query, q) || (todo->has_key && !read_tensor(todo->key, k)) ||
        !read_tensor(todo->positions, &positions))
        return 0;
    if (is_of(q, FLOAT, 32)) call->dtype = FLOAT32;
    else if (is_of(q, BFLOAT, 16)) call->dtype = BFLOAT16;
    else if (is_of(q, FLOAT, 16)) call->dtype = FLOAT16;
    else return 0;
    call->interleaved = neox == Py_False, call->head_dim = size;

    const int axes = positions.dims > 1 && todo->pair_axis != Py_None;
    int64_t tokens = 1, bytes = bytes_of(q);
    for (int i = axes; i < positions.dims; i++) tokens *= positions.shape[i];
    if (!read_heads(q, tokens, size, q_heads)) return 0;
    call->batch = q_heads->batch, call->seq = q_heads->seq, call->q_heads = q_heads->heads, call->q = q->data;
    memcpy(call->q_stride, q_heads->stride, sizeof call->q_stride);
    if (todo->has_key) {
        if (!read_heads(k, tokens, size, k_heads) || k->kind != q->kind || k->bits != q->bits ||
            k_heads->batch != q_heads->batch || k_heads->seq != q_heads->seq || k_heads->by_batch != q_heads->by_batch)
            return 0;
        call->k_heads = k_heads->heads, call->k = k->data;
        memcpy(call->k_stride, k_heads->stride, sizeof call->k_stride);
        bytes += bytes_of(k);
    }
    if (!read_positions(&positions, axes, q_heads->by_batch, call)) return 0;
    call->axes = 1;
    if (axes) {
        tensor pair_axis;
        if (!is_plain(todo->pair_axis) || !read_tensor(todo->pair_axis, &pair_axis) || !is_of(&pair_axis, UNSIGNED, 8) ||
            pair_axis.dims != 1 || !is_contiguous(&pair_axis) || positions.shape[0] > MAX_AXES)
            return 0;
        call->axes = (int32_t)positions.shape[0], call->pair_axis = pair_axis.data;
        call->rotary_dim = 2 * pair_axis.shape[0]; /* the table's width must be the same */
    }
    todo->is_short = bytes < SHORT;
    return 1;
}

/* Where query or key goes: to itself, or into a new tensor like it. */
static int place(PyObject *object, const tensor *x, const heads_of *heads, const rotation *todo, PyObject **made, void **out,
                 int64_t *out_stride) {
    const int64_t size = todo->call.head_dim;
    tensor fresh;
    if (todo->inplace) {
        *out = x->data;
        memcpy(out_stride, heads->stride, sizeof heads->stride);
        return is_writable(heads, size);
    }
    *made = new_like(object, x);
    if (!*made || !is_plain(*made) || !read_tensor(*made, &fresh) || !same_shape(x, &fresh) || !is_contiguous(&fresh)) return 0;
    *out = fresh.data;
    out_stride[0] = heads->seq * heads->heads * size, out_stride[1] = heads->heads * size, out_stride[2] = size;
    return 1;
}

/* Where both go. */
static int place_both(rotation *todo) {
    rope_call *call = &todo->call;
    if (todo->inplace && todo->has_key && todo->q.data == todo->k.data) return 0;
    return place(todo->query, &todo->q, &todo->q_heads, todo, &todo->q_out, &call->q_out, call->q_out_stride) &&
           (!todo->has_key ||
            place(todo->key, &todo->k, &todo->k_heads, todo, &todo->k_out, &call->k_out, call->k_out_stride));
}

/* The module's table and checksums, right now; nothing else runs between this and a short rotation. */
static int read_table(rotation *todo) {
    rope_call *call = &todo->call;
    tensor table, checks;
    PyObject *known = of_module(todo, name__checks);
    todo->checks = known && PyDict_Check(known) ? PyDict_GetItemWithError(known, name_cos_sin_cache) : NULL;
    Py_XINCREF(todo->checks);
    if (!todo->checks || !is_plain(todo->checks) || !(todo->table = live_table(todo->state, &table))) return 0;
    if (!todo->is_short) { /* another tensor of the same memory, which nobody takes away from it while rows are read */
        PyObject *other = PyObject_GetAttr(todo->table, name_data);
        const void *before = table.data;
        Py_DECREF(todo->table);
        todo->table = other;
        if (!other || !is_plain(other) || !read_tensor(other, &table) || table.data != before) return 0;
    }
    if (table.dims != 2 || !is_of(&table, FLOAT, 32) || !is_contiguous(&table) || table.shape[1] % 2 ||
        table.shape[1] < 2 || table.shape[1] > call->head_dim)
        return 0;
    if (call->pair_axis && call->rotary_dim != table.shape[1]) return 0;
    call->rows = table.shape[0], call->rotary_dim = table.shape[1];
    call->cos = table.data, call->sin = call->cos + call->rotary_dim / 2;
    call->cos_stride = call->sin_stride = call->rotary_dim;
    if (!read_tensor(todo->checks, &checks) || checks.dims != 1 || !is_of(&checks, INTEGER, 32) ||
        checks.shape[0] != call->rows || !is_contiguous(&checks))
        return 0;
    call->row_checks = checks.data;
    return 1;
}

static int rotate(rotation *todo) {
    int status;
    if (todo->is_short) return rope_rotate(&todo->call) == OK;
    Py_BEGIN_ALLOW_THREADS
    status = rope_rotate(&todo->call);
    Py_END_ALLOW_THREADS
    return status == OK;
}

static int choose_threads(rotation *todo) {
    todo->call.threads = 1;
    if (todo->is_short) return 1;
    PyObject *threads = PyObject_CallNoArgs(num_threads);
    todo->call.threads = (int32_t)integer(threads);
    todo->call.parallel = pool;
    Py_XDECREF(threads);
    return todo->call.threads > 0;
}

/* The result; in place autograd, which may have saved the tensors, is told. */
static PyObject *result_of(const rotation *todo) {
    if (!todo->inplace) return PyTuple_Pack(2, todo->q_out, todo->has_key ? todo->k_out : Py_None);
    PyObject *result = PyTuple_Pack(2, todo->query, todo->key), *told = NULL;
    PyObject *written = todo->has_key ? Py_XNewRef(result) : PyTuple_Pack(1, todo->query);
    if (written) told = PyObject_CallOneArg(increment_version, written);
    Py_XDECREF(written);
    if (!told) Py_CLEAR(result);
    Py_XDECREF(told);
    return result;
}

PyDoc_STRVAR(rotate_live_doc,
             "rotate_live(module, positions, query, key, inplace)\n--\n\n"
             "The rotated (query, key) of a RopeTable's forward, or None where the long way must be gone.");

static PyObject *rotate_live(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (!exchange || count != 5) return PyErr_SetString(PyExc_TypeError, "expected 5 arguments, after connect()"), NULL;
    rotation todo = {.module = args[0], .positions = args[1], .query = args[2], .key = args[3], .inplace = args[4] == Py_True};
    todo.has_key = todo.key != Py_None;
    if (!is_plain(todo.query) || !is_plain(todo.positions) || (todo.has_key && !is_plain(todo.key))) Py_RETURN_NONE;
    PyObject *result = NULL;
    int done = !needs_gradient(todo.query, todo.key) && nothing_watches() &&
               (todo.state = PyObject_GenericGetDict(todo.module, NULL)) &&
               read_arguments(&todo) && choose_threads(&todo) && place_both(&todo) && read_table(&todo) && rotate(&todo);
    if (done) result = result_of(&todo);
    else PyErr_Clear();
    Py_XDECREF(todo.state);
    Py_XDECREF(todo.pair_axis);
    Py_XDECREF(todo.checks);
    Py_XDECREF(todo.table);
    Py_XDECREF(todo.q_out);
    Py_XDECREF(todo.k_out);
    return done ? result : Py_NewRef(Py_None);
}

/* ---- The module. ---- */

PyDoc_STRVAR(connect_doc,
             "connect(capsule, *objects)\n--\n\n"
             "Take torch's table of functions and what else the calls need; whether the table is of DLPack 1 and complete.");

static PyObject *connect(PyObject *self, PyObject *args) {
    (void)self;
    static PyObject **const slots[] = {
#define SLOT(NAME) &NAME,
        HANDED(SLOT)
    };
    enum { SLOTS = sizeof slots / sizeof *slots };
    if (PyTuple_GET_SIZE(args) != 1 + SLOTS) return PyErr_SetString(PyExc_TypeError, "wrong number of objects"), NULL;
    const exchange_api *api = PyCapsule_GetPointer(PyTuple_GET_ITEM(args, 0), "dlpack_exchange_api");
    if (!api) return NULL;
    while (api && api->major > 1) api = api->older;
    if (!api || api->major != 1 || !api->read) Py_RETURN_FALSE;
    for (int i = 0; i < SLOTS; i++) {
        Py_XDECREF(*slots[i]);
        *slots[i] = Py_NewRef(PyTuple_GET_ITEM(args, 1 + i));
    }
    Py_XDECREF(only_contiguous);
    only_contiguous = Py_BuildValue("{sO}", "memory_format", memory_format);
    if (!only_contiguous) return NULL;
    exchange = api;
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(set_pool_doc, "set_pool(address)\n--\n\nThe address of GOMP_parallel, or 0.");

static PyObject *set_pool(PyObject *self, PyObject *address) {
    void *threads = PyLong_AsVoidPtr(address);
    (void)self;
    if (PyErr_Occurred()) return NULL;
    memcpy(&pool, &threads, sizeof pool);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"rotate_live", (PyCFunction)(void (*)(void))rotate_live, METH_FASTCALL, rotate_live_doc},
    {"connect", connect, METH_VARARGS, connect_doc},
    {"set_pool", set_pool, METH_O, set_pool_doc},
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
