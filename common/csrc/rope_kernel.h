/* What the files of this library share: a call of the CPU rotation, and what comes of it. */
#ifndef ROPE_KERNEL_H
#define ROPE_KERNEL_H
#include <stdint.h>

/* GOMP_parallel's signature, so that torch's own pool can be handed in. */
typedef void (*rope_parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    int64_t batch, seq;           /* tokens = batch * seq */
    int64_t rotary_dim, head_dim; /* R even, R <= D */
    int64_t q_heads, k_heads;
    const void *q;
    void *q_out;                          /* == q with equal strides: in place */
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
    const int32_t *row_checks;       /* [rows] or NULL */
    double scale;                    /* > 0 and no row_checks: each used pair must satisfy c^2 + s^2 = scale^2 */
    rope_parallel_fn parallel;       /* NULL: short-lived threads, for big jobs only */
    int64_t bad_position, bad_token; /* out */
} rope_call;

/* What rope_rotate and rope_fill return. */
enum { OK = 0, BAD_POSITION = 1, BAD_ROW = 2, BAD_ARGUMENT = 3 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum { MAX_AXES = 8 };

int rope_rotate(rope_call *call);

#endif
