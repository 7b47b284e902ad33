/* The CPU rotation: q and k of one call, checked before anything is written, rotated once, rounded once.
 * Plain C with a plain C interface (rope_kernel.py loads it through ctypes); needs libc and threads only. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#include <pthread.h>
#define EXPORT __attribute__((visibility("default")))
#define FETCH_ADD(p, n) __atomic_fetch_add(p, n, __ATOMIC_RELAXED)
#define LOAD(p) __atomic_load_n(p, __ATOMIC_RELAXED)
#define STORE(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)
#define LIKELY_ALIGNED __attribute__((aligned(64)))
#else /* one thread, so plain accesses are atomic enough */
#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT
#endif
static int64_t FETCH_ADD(int64_t *p, int64_t n) { int64_t old = *p; *p += n; return old; }
#define LOAD(p) (*(p))
#define STORE(p, v) (*(p) = (v))
#define LIKELY_ALIGNED
#endif

/* GOMP_parallel's signature, so that torch's own pool can be handed in. */
typedef void (*rope_parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    int64_t batch, seq;           /* tokens = batch * seq */
    int64_t rotary_dim, head_dim; /* R even, R <= D */
    int64_t q_heads, k_heads;
    const void *q;
    void *q_out; /* == q with equal strides: in place */
    int64_t q_stride[3], q_out_stride[3]; /* batch, seq, head, in elements; the last dimension is contiguous */
    const void *k;
    void *k_out;
    int64_t k_stride[3], k_out_stride[3];
    int32_t dtype;       /* 0 float32, 1 bfloat16, 2 float16 */
    int32_t interleaved; /* 0 neox halves (i, i + R/2), 1 gptj pairs (2i, 2i + 1) */
    int32_t inverse;
    int32_t position_bits; /* 0: token s takes row s; 32, 64 */
    const void *positions;
    int64_t position_stride[3]; /* axis, batch, seq, in elements */
    const uint8_t *pair_axis;   /* NULL: one axis; else [R/2], the axis whose row pair i takes */
    int32_t axes;
    int32_t threads; /* upper bound */
    const float *cos, *sin;
    int64_t cos_stride, sin_stride, rows;
    const int32_t *row_checks; /* [rows] or NULL */
    double scale;              /* > 0 and no row_checks: each used pair must satisfy c^2 + s^2 = scale^2 */
    rope_parallel_fn parallel; /* NULL: short-lived threads, for big jobs only */
    int64_t bad_position, bad_token; /* out */
} rope_call;

enum { OK = 0, BAD_POSITION = 1, BAD_ROW = 2, BAD_ARGUMENT = 3 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum { MAX_AXES = 8 };
enum { TILE = 16 };   /* tokens whose rows are held at hand while all their heads are rotated */
enum { CHUNK = 128 }; /* pairs of a row held at hand; wider rows go in several rounds */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- One pair at a time: every machine, every dtype; also the vector paths' last pairs. ----
 * The float64 products are exact, so their sum is rounded once more and then to the dtype: right under any
 * cancellation. */

static float float_of_bits(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static uint32_t bits_of_float(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }

static double get_float32(float x) { return x; }
static float put_float32(double x) { return (float)x; }

static double get_bfloat16(uint16_t x) { return float_of_bits((uint32_t)x << 16); }
static uint16_t put_bfloat16(double x) {
    uint32_t bits = bits_of_float((float)x);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static double get_float16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 0x3ff;
    if (exponent == 0) return (sign ? -1.0 : 1.0) * fraction / 16777216.0;
    return float_of_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}
static uint16_t put_float16(double x) {
    uint32_t bits = bits_of_float((float)x), size = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (size > 0x7f800000) return sign | 0x7e00;
    if (size >= 0x47800000) return sign | 0x7c00;
    if (size < 0x38800000) /* subnormal: float32's spacing at 0.5 is float16's smallest step */
        return sign | (uint16_t)(bits_of_float(float_of_bits(size) + 0.5f) - 0x3f000000);
    size -= 112u << 23;
    return sign | (uint16_t)((size + 0xfff + (size >> 13 & 1)) >> 13);
}

/* A run: `n` vectors, `x_step` bytes apart, with rows (cos, and CHUNK floats on, sin) `row_step` floats apart:
 * the heads of one token (row_step 0) or the tokens of one head. `half` is how far apart neox's partners are. */
#define RUN_ARGUMENTS                                                                                         \
    const char *in, char *out, int64_t in_step, int64_t out_step, int64_t n, const float *row, int64_t row_step, \
        int64_t pairs, int64_t half
typedef void (*run_fn)(RUN_ARGUMENTS);

#define GENERIC_RUN(NAME, TYPE, DTYPE, X, Y)                                             \
    static void NAME(RUN_ARGUMENTS) {                                                    \
        (void)half;                                                                      \
        for (int64_t i = 0; i < n; i++, in += in_step, out += out_step, row += row_step) { \
            const TYPE *from = (const TYPE *)in;                                         \
            TYPE *to = (TYPE *)out;                                                      \
            for (int64_t j = 0; j < pairs; j++) {                                        \
                double x = get_##DTYPE(from[X]), y = get_##DTYPE(from[Y]);               \
                double c = row[j], s = row[CHUNK + j];                                   \
                to[X] = put_##DTYPE(x * c - y * s);                                      \
                to[Y] = put_##DTYPE(y * c + x * s);                                      \
            }                                                                            \
        }                                                                                \
    }
GENERIC_RUN(generic_float32_halves, float, float32, j, half + j)
GENERIC_RUN(generic_float32_pairs, float, float32, 2 * j, 2 * j + 1)
GENERIC_RUN(generic_bfloat16_halves, uint16_t, bfloat16, j, half + j)
GENERIC_RUN(generic_bfloat16_pairs, uint16_t, bfloat16, 2 * j, 2 * j + 1)
GENERIC_RUN(generic_float16_halves, uint16_t, float16, j, half + j)
GENERIC_RUN(generic_float16_pairs, uint16_t, float16, 2 * j, 2 * j + 1)

/* Sum of a row's words, mixed and weighted by their place; `first` is the place of words[0] in the row. */
static uint32_t generic_hash(const float *words, int64_t n, uint32_t first) {
    uint32_t sum = 0, weight = 0x9E3779B1u * (2 * first + 1);
    for (int64_t i = 0; i < n; i++, weight += 2 * 0x9E3779B1u) {
        uint32_t word = bits_of_float(words[i]);
        sum += (word ^ word >> 15) * weight;
    }
    return sum;
}

/* Whether each pair's c^2 + s^2 lies in [low, high]; NaN does not. */
static int generic_unit(const float *cos, const float *sin, int64_t n, float low, float high) {
    int good = 1;
    for (int64_t i = 0; i < n; i++) {
        float square = cos[i] * cos[i] + sin[i] * sin[i];
        good &= square >= low && square <= high;
    }
    return good;
}

/* ---- Choice of instruction set. ---- */

typedef struct {
    const char *name;
    run_fn run[3][2]; /* dtype, interleaved */
    uint32_t (*hash)(const float *, int64_t, uint32_t);
    int (*unit)(const float *, const float *, int64_t, float, float);
} instruction_set;

#define INSTRUCTION_SET(NAME)                                \
    static const instruction_set NAME = {                    \
        #NAME,                                               \
        {{NAME##_float32_halves, NAME##_float32_pairs},      \
         {NAME##_bfloat16_halves, NAME##_bfloat16_pairs},    \
         {NAME##_float16_halves, NAME##_float16_pairs}},     \
        NAME##_hash,                                         \
        NAME##_unit,                                         \
    };
INSTRUCTION_SET(generic)

static const instruction_set *isa(void) { return &generic; }

/* ---- Work shared by threads: each takes the next piece until none is left, so any number of them will do. ---- */

typedef struct job {
    void (*piece)(struct job *, int64_t begin, int64_t end);
    int64_t next, total, step;
    rope_call *call;
    const instruction_set *isa;
    /* check_piece */
    int64_t bad_token;
    unsigned axes_used;
    /* checks_piece */
    const float *cos, *sin;
    int64_t cos_stride, sin_stride, half;
    int32_t *checks;
} job;

static void work(void *data) {
    job *todo = data;
    for (;;) {
        int64_t begin = FETCH_ADD(&todo->next, todo->step);
        if (begin >= todo->total) return;
        todo->piece(todo, begin, smaller(begin + todo->step, todo->total));
    }
}

#if defined(__GNUC__)
static void *thread_main(void *data) { work(data); return NULL; }
#endif

/* Runs the job on at most `threads` threads, fewer where `bytes` of work would not pay for them. */
static void share(job *todo, int threads, int64_t bytes, rope_parallel_fn parallel) {
    int64_t worth = bytes / (parallel ? 1 << 16 : 1 << 21);
    threads = (int)smaller(threads, smaller(worth, 64));
    todo->next = 0;
    todo->step = todo->total / (8 * (int64_t)threads + 1) + 1;
    if (threads < 2) {
        todo->step = todo->total;
        work(todo);
    } else if (parallel) {
        parallel(work, todo, (unsigned)threads, 0);
    } else {
#if defined(__GNUC__)
        pthread_t others[63];
        int started = 0;
        while (started < threads - 1 && pthread_create(&others[started], NULL, thread_main, todo) == 0) started++;
        work(todo);
        while (started > 0) pthread_join(others[--started], NULL);
#else
        work(todo);
#endif
    }
}

/* ---- Before anything is written: positions and rows. ---- */

static int64_t position_of(const rope_call *call, int axis, int64_t b, int64_t s) {
    int64_t at = axis * call->position_stride[0] + b * call->position_stride[1] + s * call->position_stride[2];
    if (call->position_bits == 32) return ((const int32_t *)call->positions)[at];
    if (call->position_bits == 64) return ((const int64_t *)call->positions)[at];
    return s;
}

static uint32_t row_check(const instruction_set *isa, const float *cos, const float *sin, int64_t half) {
    uint32_t sum = sin == cos + half ? isa->hash(cos, 2 * half, 0)
                                     : isa->hash(cos, half, 0) + isa->hash(sin, half, (uint32_t)half);
    return 0x9E3779B9u + sum;
}

static int row_is_good(const job *todo, int64_t row) {
    const rope_call *call = todo->call;
    const float *cos = call->cos + row * call->cos_stride, *sin = call->sin + row * call->sin_stride;
    int64_t half = call->rotary_dim / 2;
    if (call->row_checks) return row_check(todo->isa, cos, sin, half) == (uint32_t)call->row_checks[row];
    double square = call->scale * call->scale;
    return !(call->scale > 0) || todo->isa->unit(cos, sin, half, (float)(0.999 * square), (float)(1.001 * square));
}

/* The first bad token of [begin, end), or end; what is wrong with it goes to *fault and *position. */
static int64_t first_bad(const job *todo, int64_t begin, int64_t end, int *fault, int64_t *position) {
    const rope_call *call = todo->call;
    int64_t row[MAX_AXES], checked[MAX_AXES];
    for (int axis = 0; axis < MAX_AXES; axis++) checked[axis] = -1;
    for (int64_t t = begin; t < end; t++) {
        int64_t b = t / call->seq, s = t % call->seq, before = -1;
        for (int axis = 0; axis < call->axes; axis++) {
            row[axis] = *position = position_of(call, axis, b, s);
            *fault = BAD_POSITION;
            if (row[axis] < 0 || row[axis] >= call->rows) return t;
        }
        for (int axis = 0; axis < call->axes; axis++) {
            if (!(todo->axes_used >> axis & 1) || row[axis] == before || row[axis] == checked[axis]) continue;
            before = checked[axis] = *position = row[axis];
            *fault = BAD_ROW;
            if (!row_is_good(todo, row[axis])) return t;
        }
    }
    *fault = OK;
    return end;
}

static void check_piece(job *todo, int64_t begin, int64_t end) {
    int fault;
    int64_t position;
    if (LOAD(&todo->bad_token) < begin) return;
    int64_t token = first_bad(todo, begin, end, &fault, &position);
    if (!fault) return;
#if defined(__GNUC__)
    int64_t best = LOAD(&todo->bad_token);
    while (token < best && !__atomic_compare_exchange_n(&todo->bad_token, &best, token, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
#else
    todo->bad_token = smaller(todo->bad_token, token);
#endif
}

static int check_call(job *todo) {
    rope_call *call = todo->call;
    int shared = call->position_bits == 0 || call->position_stride[1] == 0;
    int fault;
    todo->piece = check_piece;
    todo->total = shared ? call->seq : call->batch * call->seq;
    todo->bad_token = todo->total;
    share(todo, call->threads, todo->total * call->axes * call->rotary_dim * 4, call->parallel);
    if (todo->bad_token == todo->total) return OK;
    call->bad_token = todo->bad_token;
    first_bad(todo, todo->bad_token, todo->bad_token + 1, &fault, &call->bad_position);
    return fault ? fault : BAD_ROW; /* OK here: someone else is writing the table right now */
}

/* ---- The rotation. ---- */

static void copy_floats(float *to, const float *from, int64_t n, uint32_t sign) {
    if (!sign) {
        memcpy(to, from, (size_t)n * sizeof *to);
        return;
    }
    for (int64_t i = 0; i < n; i++) to[i] = -from[i];
}

/* Pairs [first, first + pairs) of a token's row; from several rows where the pairs have axes of their own. */
static void gather_row(const rope_call *call, int64_t b, int64_t s, int64_t first, int64_t pairs, float *row) {
    for (int64_t i = 0, n; i < pairs; i += n) {
        int axis = 0;
        n = pairs;
        if (call->pair_axis) {
            const uint8_t *axes = call->pair_axis + first;
            axis = axes[i];
            for (n = 1; i + n < pairs && axes[i + n] == axis;) n++;
        }
        int64_t at = position_of(call, axis, b, s);
        copy_floats(row + i, call->cos + at * call->cos_stride + first + i, n, 0);
        copy_floats(row + CHUNK + i, call->sin + at * call->sin_stride + first + i, n, call->inverse != 0);
    }
}

static int64_t element_size(const rope_call *call) { return call->dtype == FLOAT32 ? 4 : 2; }

/* Query or key, seen from token (b, s) on. */
typedef struct {
    const char *in;
    char *out;
    int64_t heads, in_seq, in_head, out_seq, out_head; /* steps in bytes */
} side;

static side side_at(const rope_call *call, int key, int64_t b, int64_t s) {
    const int64_t *in = key ? call->k_stride : call->q_stride, *out = key ? call->k_out_stride : call->q_out_stride;
    int64_t size = element_size(call);
    side at = {
        (const char *)(key ? call->k : call->q) + (b * in[0] + s * in[1]) * size,
        (char *)(key ? call->k_out : call->q_out) + (b * out[0] + s * out[1]) * size,
        key ? call->k_heads : call->q_heads,
        in[1] * size, in[2] * size, out[1] * size, out[2] * size,
    };
    return at;
}

/* Where the tokens of one head lie closer together than the heads of one token ([B, H, S, D] in memory), each head
 * goes through the whole tile before the next. */
static void rotate_side(side at, int64_t tokens, run_fn run, const float *rows, int64_t offset, int64_t pairs, int64_t half) {
    at.in += offset;
    at.out += offset;
    if (at.in_head > at.in_seq) {
        for (int64_t h = 0; h < at.heads; h++)
            run(at.in + h * at.in_head, at.out + h * at.out_head, at.in_seq, at.out_seq, tokens, rows, 2 * CHUNK, pairs, half);
    } else {
        for (int64_t i = 0; i < tokens; i++)
            run(at.in + i * at.in_seq, at.out + i * at.out_seq, at.in_head, at.out_head, at.heads, rows + i * 2 * CHUNK, 0, pairs, half);
    }
}

/* Elements R..D of each head, where the output is not the input. */
static void copy_rest(side at, int64_t tokens, int64_t offset, int64_t bytes) {
    if (at.in == at.out || bytes == 0) return;
    for (int64_t i = 0; i < tokens; i++)
        for (int64_t h = 0; h < at.heads; h++)
            memcpy(at.out + i * at.out_seq + h * at.out_head + offset, at.in + i * at.in_seq + h * at.in_head + offset, (size_t)bytes);
}

static void rotate_piece(job *todo, int64_t begin, int64_t end) {
    const rope_call *call = todo->call;
    const run_fn run = todo->isa->run[call->dtype][call->interleaved != 0];
    const int64_t size = element_size(call), half = call->rotary_dim / 2;
    LIKELY_ALIGNED float rows[TILE][2 * CHUNK];
    for (int64_t t = begin, n; t < end; t += n) {
        int64_t b = t / call->seq, s = t % call->seq;
        n = smaller(smaller(TILE, end - t), call->seq - s);
        for (int64_t first = 0; first < half; first += CHUNK) {
            int64_t pairs = smaller(CHUNK, half - first), offset = (call->interleaved ? 2 * first : first) * size;
            for (int64_t i = 0; i < n; i++) gather_row(call, b, s + i, first, pairs, rows[i]);
            for (int key = 0; key < 2; key++) rotate_side(side_at(call, key, b, s), n, run, rows[0], offset, pairs, half);
        }
        for (int key = 0; key < 2; key++)
            copy_rest(side_at(call, key, b, s), n, call->rotary_dim * size, (call->head_dim - call->rotary_dim) * size);
    }
}

/* ---- The interface. ---- */

static int side_is_good(const rope_call *call, const void *in, const void *out, int64_t heads, const int64_t *in_stride,
                        const int64_t *out_stride) {
    const int64_t sizes[3] = {call->batch, call->seq, heads};
    if (heads == 0) return 1;
    if (heads < 0 || !in || !out) return 0;
    for (int i = 0; i < 3; i++) {
        if (sizes[i] < 2) continue;
        if (out_stride[i] == 0 || (in == out && in_stride[i] != out_stride[i])) return 0;
    }
    return 1;
}

static int call_is_good(const rope_call *call) {
    int64_t half = call->rotary_dim / 2;
    if (call->batch < 0 || call->seq < 0 || call->rotary_dim < 0 || call->rotary_dim % 2 || call->rotary_dim > call->head_dim) return 0;
    if (call->dtype < FLOAT32 || call->dtype > FLOAT16 || call->threads < 1 || call->rows < 0 || !call->cos || !call->sin) return 0;
    if (call->position_bits != 0 && ((call->position_bits != 32 && call->position_bits != 64) || !call->positions)) return 0;
    if (call->axes < 1 || call->axes > MAX_AXES || (!call->pair_axis && call->axes > 1)) return 0;
    for (int64_t i = 0; call->pair_axis && i < half; i++)
        if (call->pair_axis[i] >= call->axes) return 0;
    return side_is_good(call, call->q, call->q_out, call->q_heads, call->q_stride, call->q_out_stride) &&
           side_is_good(call, call->k, call->k_out, call->k_heads, call->k_stride, call->k_out_stride);
}

/* 0 done; 1 a position outside [0, rows); 2 a row that fails its check; 3 an argument out of its range. Of the first
 * bad token bad_position and bad_token tell. On other than 0 nothing was written. */
EXPORT int rope_rotate(rope_call *call) {
    job todo = {.call = call, .isa = isa(), .axes_used = 1};
    call->bad_position = call->bad_token = -1;
    if (call->batch == 0 || call->seq == 0) return OK;
    if (!call_is_good(call)) return BAD_ARGUMENT;
    for (int64_t i = 0; call->pair_axis && i < call->rotary_dim / 2; i++) {
        if (i == 0) todo.axes_used = 0;
        todo.axes_used |= 1u << call->pair_axis[i];
    }
    int fault = check_call(&todo);
    if (fault) return fault;
    todo.piece = rotate_piece;
    todo.total = call->batch * call->seq;
    share(&todo, call->threads, todo.total * (call->q_heads + call->k_heads) * call->head_dim * element_size(call), call->parallel);
    return OK;
}

static void checks_piece(job *todo, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        todo->checks[i] = (int32_t)row_check(todo->isa, todo->cos + i * todo->cos_stride, todo->sin + i * todo->sin_stride, todo->half);
}

/* The checksum of each row, [rows]; rope_rotate compares with it. */
EXPORT void rope_row_checks(const float *cos, const float *sin, int64_t cos_stride, int64_t sin_stride, int64_t rows, int64_t half,
                            int32_t *out, int32_t threads, rope_parallel_fn parallel) {
    job todo = {.piece = checks_piece, .isa = isa(), .total = rows, .cos = cos, .sin = sin, .cos_stride = cos_stride,
                .sin_stride = sin_stride, .half = half, .checks = out};
    share(&todo, threads, rows * half * 8, parallel);
}

EXPORT const char *rope_isa(void) { return isa()->name; }

EXPORT int rope_abi(void) { return 1; }
