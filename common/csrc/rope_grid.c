/* Filling tables: each row of a table is put together from rows of small per-axis tables, in one pass over the result.
 * Plain C with a plain C interface (rope_grid.py loads it through ctypes), built into the same library as
 * rope_kernel.c. */
#include <stdlib.h>
#include <string.h>

#include "rope_kernel.h"

#if defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#define FETCH_ADD(p, n) __atomic_fetch_add(p, n, __ATOMIC_RELAXED)
#else
#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT
#endif
static int64_t FETCH_ADD(int64_t *p, int64_t n) { int64_t old = *p; *p += n; return old; }
#endif

enum { MAX_PARTS = 16, MAX_TABLES = 4 };

typedef struct {
    int64_t tokens;            /* rows of each table */
    int64_t tables, parts, axes;
    char *out[MAX_TABLES];     /* [tokens, sum of widths], contiguous */
    int64_t size[MAX_AXES];    /* positions on each axis; token s has the s-th of their row-major product ... */
    const int64_t *index[MAX_AXES]; /* ... or, where not NULL for all axes, position index[axis][s] */
    int64_t axis[MAX_PARTS];   /* the axis that part p of a row depends on */
    int64_t width[MAX_PARTS];  /* bytes of part p */
    const char *values[MAX_PARTS * MAX_TABLES]; /* [part][table]: [size[axis], width] bytes, contiguous */
    int64_t threads;
    rope_parallel_fn parallel; /* NULL: one thread */
} rope_fill_call;

typedef struct {
    const rope_fill_call *call;
    int64_t row_bytes, pieces, next;
} job;

/* Short runs, for which a call of memcpy would cost more than the copy. The last 16 bytes overlap those before. */
static void copy(char *to, const char *from, int64_t bytes) {
    if (bytes < 16) {
        for (; bytes >= 4; to += 4, from += 4, bytes -= 4) memcpy(to, from, 4);
        return;
    }
    int64_t at = 0;
    for (; at + 32 <= bytes; at += 32) memcpy(to + at, from + at, 32);
    if (at + 16 <= bytes) memcpy(to + at, from + at, 16);
    memcpy(to + bytes - 16, from + bytes - 16, 16);
}

static void fill(const rope_fill_call *call, int64_t row_bytes, int64_t table, int64_t begin, int64_t end) {
    int64_t at[MAX_AXES] = {0}, rest = begin;
    if (!call->index[0])
        for (int64_t a = call->axes - 1; a >= 0; a--) {
            at[a] = rest % call->size[a];
            rest /= call->size[a];
        }
    char *to = call->out[table] + begin * row_bytes;
    for (int64_t s = begin; s < end; s++) {
        if (call->index[0])
            for (int64_t a = 0; a < call->axes; a++) at[a] = call->index[a][s];
        for (int64_t p = 0; p < call->parts; p++) {
            int64_t width = call->width[p];
            copy(to, call->values[p * call->tables + table] + at[call->axis[p]] * width, width);
            to += width;
        }
        if (!call->index[0])
            for (int64_t a = call->axes - 1; a >= 0 && ++at[a] == call->size[a]; a--) at[a] = 0;
    }
}

static void body(void *data) {
    job *todo = data;
    const rope_fill_call *call = todo->call;
    for (;;) {
        int64_t piece = FETCH_ADD(&todo->next, 1);
        if (piece >= todo->pieces * call->tables) return;
        int64_t table = piece / todo->pieces, part = piece % todo->pieces;
        fill(call, todo->row_bytes, table, call->tokens * part / todo->pieces,
             call->tokens * (part + 1) / todo->pieces);
    }
}

/* 0 done; 3 an argument out of its range, nothing written. Indices are the caller's to check. */
EXPORT int rope_fill(const rope_fill_call *call) {
    job todo = {.call = call};
    if (call->tables < 1 || call->tables > MAX_TABLES || call->parts < 1 || call->parts > MAX_PARTS ||
        call->axes < 1 || call->axes > MAX_AXES || call->tokens < 0 || call->threads < 1)
        return BAD_ARGUMENT;
    int64_t product = 1;
    for (int64_t a = 0; a < call->axes; a++) {
        product *= call->size[a];
        if (!call->index[a] != !call->index[0]) return BAD_ARGUMENT;
    }
    if (!call->index[0] && product != call->tokens) return BAD_ARGUMENT;
    for (int64_t p = 0; p < call->parts; p++) {
        if (call->axis[p] < 0 || call->axis[p] >= call->axes || call->width[p] < 0 || call->width[p] % 4)
            return BAD_ARGUMENT;
        todo.row_bytes += call->width[p];
    }
    if (call->tokens == 0) return OK; /* an axis may then have no position to divide by */
    int64_t megabytes = call->tokens * todo.row_bytes >> 20;
    todo.pieces = megabytes < 4 * call->threads ? megabytes + 1 : 4 * call->threads;
    if (call->parallel && call->threads > 1 && todo.pieces * call->tables > 1 &&
        call->tables * call->tokens * todo.row_bytes > 1 << 18)
        call->parallel(body, &todo, (unsigned)call->threads, 0);
    else
        body(&todo);
    return OK;
}
