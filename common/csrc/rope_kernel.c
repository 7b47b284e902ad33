/* The CPU rotation: q and k of one call, checked before anything is written, rotated once, rounded once.
 * Plain C with a plain C interface (rope_kernel.py loads it through ctypes); needs libc and threads only. */
#include <stdlib.h>
#include <string.h>

#include "rope_kernel.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__GNUC__)
#include <pthread.h>
#define EXPORT __attribute__((visibility("default")))
#define FETCH_ADD(p, n) __atomic_fetch_add(p, n, __ATOMIC_RELAXED)
#define LOAD(p) __atomic_load_n(p, __ATOMIC_RELAXED)
#define STORE(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)
#define CACHE_ALIGNED __attribute__((aligned(64)))
#define PREFETCH(p) __builtin_prefetch(p)
#else /* one thread, so plain accesses are atomic enough */
#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT
#endif
static int64_t FETCH_ADD(int64_t *p, int64_t n) {
    int64_t old = *p;
    *p += n;
    return old;
}
#define LOAD(p) (*(p))
#define STORE(p, v) (*(p) = (v))
#define CACHE_ALIGNED
#define PREFETCH(p) ((void)(p))
#endif

enum { MOST_THREADS = 64 }; /* of our own */
enum { CHUNK = 128 };       /* pairs of a row rotated in one round; wider rows take several */
enum { AT_HAND = 8192 };    /* floats of rows held at hand (in the first-level cache) while their tokens are rotated */
enum { STREAMS = 2 };       /* heads that go along together where each head's tokens are a stretch of their own */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- One pair at a time: every machine, every dtype; also the vector paths' last pairs. ----
 * The float64 products are exact, so their sum is rounded once more and then to the dtype: right under any
 * cancellation. */

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

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

/* A run: `heads` vectors of one token, steps in bytes, and the cos and sin of `pairs` pairs. `half` is how far apart
 * neox's partners are. */
#define RUN_ARGUMENTS                                                                                                \
    const char *in, char *out, int64_t in_step, int64_t out_step, int64_t heads, const float *cos, const float *sin, \
        int64_t pairs, int64_t half
typedef void (*run_fn)(RUN_ARGUMENTS);

#define GENERIC_RUN(NAME, TYPE, DTYPE, X, Y)                                  \
    static void NAME(RUN_ARGUMENTS) {                                         \
        (void)half;                                                           \
        for (int64_t h = 0; h < heads; h++, in += in_step, out += out_step) { \
            const TYPE *from = (const TYPE *)in;                              \
            TYPE *to = (TYPE *)out;                                           \
            for (int64_t j = 0; j < pairs; j++) {                             \
                double x = get_##DTYPE(from[X]), y = get_##DTYPE(from[Y]);    \
                double c = cos[j], s = sin[j];                                \
                to[X] = put_##DTYPE(x * c - y * s);                           \
                to[Y] = put_##DTYPE(y * c + x * s);                           \
            }                                                                 \
        }                                                                     \
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

/* ---- Many pairs at a time. ----
 * float32 goes through float64 as above. The 16-bit dtypes stay in float32, with what rounding took from one product
 * given back through a fused multiply-add (Kahan's difference of products): within 1.5 float32 ulps of the truth, half
 * the work of float64. That breaks down where a product is not finite, and shows as NaN; such pairs are done again. */

#if defined(__GNUC__) && (defined(__x86_64__) || (defined(__aarch64__) && !defined(__AARCH64EB__)))
#define VECTOR 1
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

__attribute__((noinline, unused)) static void settle(const float *x, const float *y, const float *c, const float *s,
                                                     float *out_x, float *out_y, int n) {
    for (int i = 0; i < n; i++) {
        if (out_x[i] == out_x[i] && out_y[i] == out_y[i]) continue;
        double exact_x = (double)x[i] * c[i] - (double)y[i] * s[i], exact_y = (double)y[i] * c[i] + (double)x[i] * s[i];
        /* one kind of NaN, which rounding to bfloat16 by its bits leaves alone */
        out_x[i] = exact_x == exact_x ? (float)exact_x : float_of_bits(0x7fc00000);
        out_y[i] = exact_y == exact_y ? (float)exact_y : float_of_bits(0x7fc00000);
    }
}

/* Both styles of one dtype, from an instruction set's get, put and rotate for `WIDTH` pairs; the last pairs of a row
 * by `REST`, which is either the same with a mask or the generic run. */
#define VECTOR_RUNS(ISA, DTYPE, TYPE, WIDTH, REST, NAME)       \
    VECTOR_RUN(ISA, DTYPE, TYPE, WIDTH, REST, halves, 1, NAME) \
    VECTOR_RUN(ISA, DTYPE, TYPE, WIDTH, REST, pairs, 2, NAME)
#define WHOLE_RUN(ISA, DTYPE, STYLE) ISA##_##DTYPE##_##STYLE
#define REST_OF_RUN(ISA, DTYPE, STYLE) ISA##_##DTYPE##_##STYLE##_rest
#define VECTOR_RUN(ISA, DTYPE, TYPE, WIDTH, REST, STYLE, SPREAD, NAME)                                                     \
    ISA##_INLINE void ISA##_##DTYPE##_##STYLE##_step(const TYPE *from, TYPE *to, const float *cos, const float *sin, \
                                                     int64_t half, int n) {                                          \
        ISA##_##DTYPE x, y;                                                                                          \
        ISA##_get_##STYLE##_##DTYPE(from, half, n, &x, &y);                                                          \
        ISA##_rotate_##DTYPE(&x, &y, ISA##_row_##DTYPE(cos, n), ISA##_row_##DTYPE(sin, n));                          \
        ISA##_put_##STYLE##_##DTYPE(to, half, n, x, y);                                                              \
    }                                                                                                                \
    ISA##_TARGET static void NAME(ISA, DTYPE, STYLE)(RUN_ARGUMENTS) {                                                \
        for (int64_t h = 0; h < heads; h++, in += in_step, out += out_step) {                                        \
            const TYPE *from = (const TYPE *)in;                                                                     \
            TYPE *to = (TYPE *)out;                                                                                  \
            int64_t j = 0;                                                                                           \
            for (; j + WIDTH <= pairs; j += WIDTH)                                                                   \
                ISA##_##DTYPE##_##STYLE##_step(from + SPREAD * j, to + SPREAD * j, cos + j, sin + j, half, WIDTH);   \
            if (j < pairs)                                                                                           \
                REST(ISA, DTYPE, STYLE, from + SPREAD * j, to + SPREAD * j, cos + j, sin + j, half, pairs - j);      \
        }                                                                                                            \
    }
#define REST_MASKED(ISA, DTYPE, STYLE, FROM, TO, COS, SIN, HALF, N) \
    ISA##_##DTYPE##_##STYLE##_step(FROM, TO, COS, SIN, HALF, (int)(N))
#define REST_GENERIC(ISA, DTYPE, STYLE, FROM, TO, COS, SIN, HALF, N) \
    generic_##DTYPE##_##STYLE((const char *)(FROM), (char *)(TO), 0, 0, 1, COS, SIN, N, HALF)

/* Machines with enough registers keep the rows of a block of pairs in them while all heads go by. Each dtype and style
 * brings how to load the rows of UNIT pairs, and how to turn one head by them or decline; it is turned one by one then,
 * and so are all heads where a row does not suit. */
#define BLOCKS(ISA, DTYPE, STYLE, TYPE, SPREAD, UNIT, BLOCK)                                                                 \
    ISA##_INLINE void ISA##_##DTYPE##_##STYLE##_block(RUN_ARGUMENTS) {                                                \
        ISA##_row_of_##DTYPE##_##STYLE row[BLOCK / UNIT];                                                             \
        if (UNLIKELY(!ISA##_suits_##DTYPE(cos, sin, pairs))) {                                                        \
            ISA##_##DTYPE##_##STYLE##_rest(in, out, in_step, out_step, heads, cos, sin, pairs, half);                 \
            return;                                                                                                   \
        }                                                                                                             \
        const int units = (int)pairs / UNIT; /* known when this is compiled */                                        \
        for (int i = 0; i < units; i++) row[i] = ISA##_load_##DTYPE##_##STYLE(cos + UNIT * i, sin + UNIT * i);        \
        for (int64_t h = 0; h < heads; h++, in += in_step, out += out_step) {                                         \
            const TYPE *from = (const TYPE *)in;                                                                      \
            TYPE *to = (TYPE *)out;                                                                                   \
            UNROLL for (int i = 0; i < units; i++)                                                                    \
                if (UNLIKELY(!ISA##_turn_##DTYPE##_##STYLE(from + SPREAD * UNIT * i, to + SPREAD * UNIT * i, half,    \
                                                           row[i])))                                                  \
                    ISA##_##DTYPE##_##STYLE##_rest((const char *)(from + SPREAD * UNIT * i),                          \
                                                   (char *)(to + SPREAD * UNIT * i), 0, 0, 1, cos + UNIT * i,         \
                                                   sin + UNIT * i, UNIT, half);                                       \
        }                                                                                                             \
    }                                                                                                                 \
    ISA##_TARGET static void ISA##_##DTYPE##_##STYLE(RUN_ARGUMENTS) {                                                 \
        const int64_t step = SPREAD * (int64_t)sizeof(TYPE);                                                          \
        int64_t j = 0;                                                                                                \
        for (; j + BLOCK <= pairs; j += BLOCK)                                                                        \
            ISA##_##DTYPE##_##STYLE##_block(in + step * j, out + step * j, in_step, out_step, heads, cos + j, sin + j, \
                                            BLOCK, half);                                                             \
        if (j + BLOCK / 2 <= pairs) {                                                                                 \
            ISA##_##DTYPE##_##STYLE##_block(in + step * j, out + step * j, in_step, out_step, heads, cos + j, sin + j, \
                                            BLOCK / 2, half);                                                         \
            j += BLOCK / 2;                                                                                           \
        }                                                                                                             \
        if (j < pairs)                                                                                                \
            ISA##_##DTYPE##_##STYLE##_rest(in + step * j, out + step * j, in_step, out_step, heads, cos + j, sin + j,  \
                                           pairs - j, half);                                                          \
    }
#define UNROLL _Pragma("GCC unroll 8")

/* Neox's halves of the 16-bit dtypes: get and put contiguous values, twice. */
#define SPLIT_HALVES(ISA, DTYPE)                                                                                      \
    ISA##_INLINE void ISA##_get_halves_##DTYPE(const uint16_t *from, int64_t half, int n, ISA##_##DTYPE *x,           \
                                               ISA##_##DTYPE *y) {                                                    \
        *x = ISA##_get_##DTYPE(from, n);                                                                              \
        *y = ISA##_get_##DTYPE(from + half, n);                                                                       \
    }                                                                                                                 \
    ISA##_INLINE void ISA##_put_halves_##DTYPE(uint16_t *to, int64_t half, int n, ISA##_##DTYPE x, ISA##_##DTYPE y) { \
        ISA##_put_##DTYPE(to, n, x);                                                                                  \
        ISA##_put_##DTYPE(to + half, n, y);                                                                           \
    }
#endif

#if defined(VECTOR) && defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define avx512_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define avx512_INLINE \
    __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))) static inline
typedef __m512d avx512_float32;                 /* 8 pairs */
typedef __m512 avx512_bfloat16, avx512_float16; /* 16 pairs */
#define FIRST(n) ((1u << (n)) - 1)

avx512_INLINE __m512d avx512_row_float32(const float *row, int n) {
    return _mm512_cvtps_pd(_mm256_maskz_loadu_ps((__mmask8)FIRST(n), row));
}
avx512_INLINE void avx512_rotate_float32(__m512d *x, __m512d *y, __m512d c, __m512d s) {
    __m512d out_x = _mm512_fmsub_pd(*x, c, _mm512_mul_pd(*y, s));
    *y = _mm512_fmadd_pd(*y, c, _mm512_mul_pd(*x, s));
    *x = out_x;
}
avx512_INLINE void avx512_get_halves_float32(const float *from, int64_t half, int n, __m512d *x, __m512d *y) {
    *x = avx512_row_float32(from, n);
    *y = avx512_row_float32(from + half, n);
}
avx512_INLINE void avx512_put_halves_float32(float *to, int64_t half, int n, __m512d x, __m512d y) {
    _mm256_mask_storeu_ps(to, (__mmask8)FIRST(n), _mm512_cvtpd_ps(x));
    _mm256_mask_storeu_ps(to + half, (__mmask8)FIRST(n), _mm512_cvtpd_ps(y));
}
avx512_INLINE void avx512_get_pairs_float32(const float *from, int64_t half, int n, __m512d *x, __m512d *y) {
    __m512i both = _mm512_maskz_loadu_epi64((__mmask8)FIRST(n), from);
    (void)half;
    *x = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_cvtepi64_epi32(both)));
    *y = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_cvtepi64_epi32(_mm512_srli_epi64(both, 32))));
}
avx512_INLINE void avx512_put_pairs_float32(float *to, int64_t half, int n, __m512d x, __m512d y) {
    __m512i low = _mm512_cvtepu32_epi64(_mm256_castps_si256(_mm512_cvtpd_ps(x)));
    __m512i high = _mm512_cvtepu32_epi64(_mm256_castps_si256(_mm512_cvtpd_ps(y)));
    (void)half;
    _mm512_mask_storeu_epi64(to, (__mmask8)FIRST(n), _mm512_or_si512(low, _mm512_slli_epi64(high, 32)));
}

avx512_INLINE __m512 avx512_row_bfloat16(const float *row, int n) {
    return _mm512_maskz_loadu_ps((__mmask16)FIRST(n), row);
}
#define avx512_row_float16 avx512_row_bfloat16
avx512_INLINE void avx512_settle(__m512 x, __m512 y, __m512 c, __m512 s, __m512 *out_x, __m512 *out_y) {
    float v[6][16];
    _mm512_storeu_ps(v[0], x), _mm512_storeu_ps(v[1], y), _mm512_storeu_ps(v[2], c);
    _mm512_storeu_ps(v[3], s), _mm512_storeu_ps(v[4], *out_x), _mm512_storeu_ps(v[5], *out_y);
    settle(v[0], v[1], v[2], v[3], v[4], v[5], 16);
    *out_x = _mm512_loadu_ps(v[4]), *out_y = _mm512_loadu_ps(v[5]);
}
avx512_INLINE void avx512_products(__m512 x, __m512 y, __m512 c, __m512 s, __m512 *out_x, __m512 *out_y) {
    __m512 ys = _mm512_mul_ps(y, s), xs = _mm512_mul_ps(x, s);
    *out_x = _mm512_sub_ps(_mm512_fmsub_ps(x, c, ys), _mm512_fmsub_ps(y, s, ys));
    *out_y = _mm512_add_ps(_mm512_fmadd_ps(y, c, xs), _mm512_fmsub_ps(x, s, xs));
}
avx512_INLINE void avx512_rotate_bfloat16(__m512 *x, __m512 *y, __m512 c, __m512 s) {
    __m512 out_x, out_y;
    avx512_products(*x, *y, c, s, &out_x, &out_y);
    if (UNLIKELY(_mm512_cmp_ps_mask(out_x, out_y, _CMP_UNORD_Q))) avx512_settle(*x, *y, c, s, &out_x, &out_y);
    *x = out_x, *y = out_y;
}
#define avx512_rotate_float16 avx512_rotate_bfloat16

/* Orders of words: those of even places before those of odd ones; back, the first half's and the second's in turn. */
static const uint16_t avx512_apart[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                          1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
static const uint16_t avx512_in_turn[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
/* the lower words of two results */
static const uint16_t avx512_lower[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                          32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};

/* `upper` and `lower` halves of float32 bits -> the nearest bfloat16 */
avx512_INLINE __m512i avx512_round_bfloat16(__m512i upper, __m512i lower) {
    const __m512i one = _mm512_set1_epi16(1);
    __m512i most = _mm512_sub_epi16(_mm512_set1_epi16((short)0x8000), _mm512_and_si512(upper, one));
    return _mm512_mask_add_epi16(upper, _mm512_cmpgt_epu16_mask(lower, most), upper, one);
}
avx512_INLINE __m512 avx512_get_bfloat16(const uint16_t *from, int n) {
    __m256i values = _mm256_maskz_loadu_epi16((__mmask16)FIRST(n), from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}
avx512_INLINE void avx512_get_halves_bfloat16(const uint16_t *from, int64_t half, int n, __m512 *x, __m512 *y) {
    *x = avx512_get_bfloat16(from, n);
    *y = avx512_get_bfloat16(from + half, n);
}
avx512_INLINE void avx512_put_halves_bfloat16(uint16_t *to, int64_t half, int n, __m512 x, __m512 y) {
    const __m512i lower = _mm512_loadu_si512(avx512_lower), upper = _mm512_add_epi16(lower, _mm512_set1_epi16(1));
    __m512i a = _mm512_castps_si512(x), b = _mm512_castps_si512(y);
    __m512i both =
        avx512_round_bfloat16(_mm512_permutex2var_epi16(a, upper, b), _mm512_permutex2var_epi16(a, lower, b));
    _mm256_mask_storeu_epi16(to, (__mmask16)FIRST(n), _mm512_castsi512_si256(both));
    _mm256_mask_storeu_epi16(to + half, (__mmask16)FIRST(n), _mm512_extracti64x4_epi64(both, 1));
}
avx512_INLINE void avx512_get_pairs_bfloat16(const uint16_t *from, int64_t half, int n, __m512 *x, __m512 *y) {
    __m512i both = _mm512_maskz_loadu_epi32((__mmask16)FIRST(n), from);
    (void)half;
    *x = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    *y = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
}
avx512_INLINE void avx512_put_pairs_bfloat16(uint16_t *to, int64_t half, int n, __m512 x, __m512 y) {
    __m512i a = _mm512_castps_si512(x), b = _mm512_castps_si512(y);
    __m512i upper = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b);
    __m512i lower = _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
    (void)half;
    _mm512_mask_storeu_epi32(to, (__mmask16)FIRST(n), avx512_round_bfloat16(upper, lower));
}
avx512_INLINE __m512 avx512_get_float16(const uint16_t *from, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)FIRST(n), from));
}
avx512_INLINE void avx512_put_float16(uint16_t *to, int n, __m512 x) {
    _mm256_mask_storeu_epi16(to, (__mmask16)FIRST(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
avx512_INLINE void avx512_get_pairs_float16(const uint16_t *from, int64_t half, int n, __m512 *x, __m512 *y) {
    __m512i both = _mm512_maskz_loadu_epi32((__mmask16)FIRST(n), from);
    (void)half;
    both = _mm512_permutexvar_epi16(_mm512_loadu_si512(avx512_apart), both);
    *x = _mm512_cvtph_ps(_mm512_castsi512_si256(both));
    *y = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1));
}
avx512_INLINE void avx512_put_pairs_float16(uint16_t *to, int64_t half, int n, __m512 x, __m512 y) {
    __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    __m512i both = _mm512_inserti64x4(low, _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT), 1);
    (void)half;
    _mm512_mask_storeu_epi32(to, (__mmask16)FIRST(n),
                             _mm512_permutexvar_epi16(_mm512_loadu_si512(avx512_in_turn), both));
}
SPLIT_HALVES(avx512, float16)
VECTOR_RUNS(avx512, float32, float, 8, REST_MASKED, REST_OF_RUN)
VECTOR_RUNS(avx512, bfloat16, uint16_t, 16, REST_MASKED, WHOLE_RUN)
VECTOR_RUNS(avx512, float16, uint16_t, 16, REST_MASKED, REST_OF_RUN)

typedef struct {
    __m512d cos, sin;
} avx512_row_of_float32_halves;
typedef struct {
    __m512d cos[2], sin[2]; /* each value twice, for an x and a y side by side */
} avx512_row_of_float32_pairs;
#define avx512_suits_float32(COS, SIN, PAIRS) 1
#define avx512_suits_float16(COS, SIN, PAIRS) 1
avx512_INLINE avx512_row_of_float32_halves avx512_load_float32_halves(const float *cos, const float *sin) {
    avx512_row_of_float32_halves row = {avx512_row_float32(cos, 8), avx512_row_float32(sin, 8)};
    return row;
}
avx512_INLINE int avx512_turn_float32_halves(const float *from, float *to, int64_t half,
                                             avx512_row_of_float32_halves row) {
    __m512d x = avx512_row_float32(from, 8), y = avx512_row_float32(from + half, 8);
    avx512_rotate_float32(&x, &y, row.cos, row.sin);
    avx512_put_halves_float32(to, half, 8, x, y);
    return 1;
}
avx512_INLINE avx512_row_of_float32_pairs avx512_load_float32_pairs(const float *cos, const float *sin) {
    const __m512i low = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), high = _mm512_setr_epi64(4, 4, 5, 5, 6, 6, 7, 7);
    __m512d c = avx512_row_float32(cos, 8), s = avx512_row_float32(sin, 8);
    avx512_row_of_float32_pairs row = {{_mm512_permutexvar_pd(low, c), _mm512_permutexvar_pd(high, c)},
                                       {_mm512_permutexvar_pd(low, s), _mm512_permutexvar_pd(high, s)}};
    return row;
}
avx512_INLINE int avx512_turn_float32_pairs(const float *from, float *to, int64_t half,
                                            avx512_row_of_float32_pairs row) {
    (void)half;
    for (int i = 0; i < 2; i++) {
        __m512d both = avx512_row_float32(from + 8 * i, 8), swapped = _mm512_permute_pd(both, 0x55);
        both = _mm512_fmaddsub_pd(both, row.cos[i], _mm512_mul_pd(swapped, row.sin[i]));
        _mm256_storeu_ps(to + 8 * i, _mm512_cvtpd_ps(both));
    }
    return 1;
}
BLOCKS(avx512, float32, halves, float, 1, 8, 64)
BLOCKS(avx512, float32, pairs, float, 2, 8, 32)
/* For many heads, sin is split into a part so short that its products with a 16-bit dtype's values are exact, and what
 * is left. Then x cos - y short is rounded once; or, where it cancels so far that sin's rest would matter, not at all. So
 * is the sum with the rest's product: 1.5 float32 ulps again, with six operations instead of eight. */
typedef struct {
    __m512 cos, sin, rest;
} avx512_split;
avx512_INLINE avx512_split avx512_split_row(__m512 cos, __m512 sin, int bits) {
    const __m512i mask = _mm512_set1_epi32((int)(~0u << (24 - bits)));
    __m512 head = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(sin), mask));
    avx512_split row = {cos, head, _mm512_sub_ps(sin, head)};
    return row;
}
avx512_INLINE void avx512_turn(__m512 x, __m512 y, avx512_split row, __m512 *out_x, __m512 *out_y) {
    *out_x = _mm512_fnmadd_ps(y, row.rest, _mm512_fmsub_ps(x, row.cos, _mm512_mul_ps(y, row.sin)));
    *out_y = _mm512_fmadd_ps(x, row.rest, _mm512_fmadd_ps(y, row.cos, _mm512_mul_ps(x, row.sin)));
}
typedef avx512_split avx512_row_of_float16_halves;
avx512_INLINE avx512_split avx512_load_float16_halves(const float *cos, const float *sin) {
    return avx512_split_row(_mm512_loadu_ps(cos), _mm512_loadu_ps(sin), 13);
}
avx512_INLINE int avx512_turn_float16_halves(const uint16_t *from, uint16_t *to, int64_t half, avx512_split row) {
    __m512 out_x, out_y;
    avx512_turn(avx512_get_float16(from, 16), avx512_get_float16(from + half, 16), row, &out_x, &out_y);
    if (UNLIKELY(_mm512_cmp_ps_mask(out_x, out_y, _CMP_UNORD_Q))) return 0;
    avx512_put_halves_float16(to, half, 16, out_x, out_y);
    return 1;
}
typedef struct {
    avx512_split part[2]; /* each value twice, for an x and a y side by side; the rest is negative for x */
} avx512_row_of_float16_pairs;
avx512_INLINE avx512_row_of_float16_pairs avx512_load_float16_pairs(const float *cos, const float *sin) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i eight = _mm512_set1_epi32(8), minus_x = _mm512_set1_epi64((int64_t)0x80000000);
    __m512 c = _mm512_loadu_ps(cos), s = _mm512_loadu_ps(sin);
    avx512_row_of_float16_pairs row;
    for (int i = 0; i < 2; i++) {
        __m512i places = i ? _mm512_add_epi32(twice, eight) : twice;
        row.part[i] = avx512_split_row(_mm512_permutexvar_ps(places, c), _mm512_permutexvar_ps(places, s), 13);
        row.part[i].rest =
            _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(row.part[i].rest), minus_x));
    }
    return row;
}
avx512_INLINE __m512 avx512_turn_side_by_side(__m512 both, avx512_split row) {
    __m512 swapped = _mm512_permute_ps(both, 0xb1);
    return _mm512_fmadd_ps(swapped, row.rest, _mm512_fmaddsub_ps(both, row.cos, _mm512_mul_ps(swapped, row.sin)));
}
avx512_INLINE int avx512_turn_float16_pairs(const uint16_t *from, uint16_t *to, int64_t half,
                                            avx512_row_of_float16_pairs row) {
    __m512 first = avx512_turn_side_by_side(avx512_get_float16(from, 16), row.part[0]);
    __m512 last = avx512_turn_side_by_side(avx512_get_float16(from + 16, 16), row.part[1]);
    (void)half;
    if (UNLIKELY(_mm512_cmp_ps_mask(first, last, _CMP_UNORD_Q))) return 0;
    avx512_put_float16(to, 16, first);
    avx512_put_float16(to + 16, 16, last);
    return 1;
}
BLOCKS(avx512, float16, halves, uint16_t, 1, 16, 64)
BLOCKS(avx512, float16, pairs, uint16_t, 2, 16, 32)

avx512_TARGET static uint32_t avx512_hash(const float *words, int64_t n, uint32_t first) {
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i unit = _mm512_set1_epi32((int)(2 * 0x9E3779B1u)), step = _mm512_slli_epi32(unit, 4);
    __m512i weight =
        _mm512_add_epi32(_mm512_mullo_epi32(places, unit), _mm512_set1_epi32((int)(0x9E3779B1u * (2 * first + 1))));
    __m512i sum = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16, weight = _mm512_add_epi32(weight, step)) {
        __m512i word = _mm512_loadu_si512(words + i);
        word = _mm512_xor_si512(word, _mm512_srli_epi32(word, 15));
        sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(word, weight));
    }
    __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    uint32_t total = (uint32_t)_mm_cvtsi128_si32(two) + (uint32_t)_mm_extract_epi32(two, 1);
    return total + generic_hash(words + i, n - i, first + (uint32_t)i);
}

avx512_TARGET static int avx512_unit(const float *cos, const float *sin, int64_t n, float low, float high) {
    const __m512 least = _mm512_set1_ps(low), most = _mm512_set1_ps(high);
    unsigned good = 0xffff;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
        __m512 square = _mm512_fmadd_ps(c, c, _mm512_mul_ps(s, s));
        good &= _mm512_cmp_ps_mask(square, least, _CMP_GE_OQ) & _mm512_cmp_ps_mask(square, most, _CMP_LE_OQ);
    }
    return good == 0xffff && generic_unit(cos + i, sin + i, n - i, low, high);
}

/* Machines that round to bfloat16 by themselves. They take subnormal numbers for zero then, so these go the old way. */
#if __GNUC__ >= 10 || __clang_major__ >= 9
#define AVX512BF16 1
#define avx512bf16_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
#define avx512bf16_INLINE \
    __attribute__((        \
        always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))) static inline
typedef struct {
    __m512 values;
    unsigned rare; /* NaN or subnormal are among these 16 pairs' results */
} avx512bf16_bfloat16;
#define avx512bf16_row_bfloat16 avx512_row_bfloat16
avx512bf16_INLINE void avx512bf16_rotate_bfloat16(avx512bf16_bfloat16 *x, avx512bf16_bfloat16 *y, __m512 c, __m512 s) {
    __m512 out_x, out_y;
    avx512_products(x->values, y->values, c, s, &out_x, &out_y);
    x->rare = _mm512_fpclass_ps_mask(out_x, 0xa1) | _mm512_fpclass_ps_mask(out_y, 0xa1);
    if (UNLIKELY(x->rare)) avx512_settle(x->values, y->values, c, s, &out_x, &out_y);
    x->values = out_x, y->values = out_y;
}
avx512bf16_INLINE void avx512bf16_get_halves_bfloat16(const uint16_t *from, int64_t half, int n, avx512bf16_bfloat16 *x,
                                                      avx512bf16_bfloat16 *y) {
    avx512_get_halves_bfloat16(from, half, n, &x->values, &y->values);
}
avx512bf16_INLINE void avx512bf16_get_pairs_bfloat16(const uint16_t *from, int64_t half, int n, avx512bf16_bfloat16 *x,
                                                     avx512bf16_bfloat16 *y) {
    avx512_get_pairs_bfloat16(from, half, n, &x->values, &y->values);
}
avx512bf16_INLINE void avx512bf16_put_halves_bfloat16(uint16_t *to, int64_t half, int n, avx512bf16_bfloat16 x,
                                                      avx512bf16_bfloat16 y) {
    if (UNLIKELY(x.rare)) {
        avx512_put_halves_bfloat16(to, half, n, x.values, y.values);
        return;
    }
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(y.values, x.values);
    _mm256_mask_storeu_epi16(to, (__mmask16)FIRST(n), _mm512_castsi512_si256(both));
    _mm256_mask_storeu_epi16(to + half, (__mmask16)FIRST(n), _mm512_extracti64x4_epi64(both, 1));
}
avx512bf16_INLINE void avx512bf16_put_pairs_bfloat16(uint16_t *to, int64_t half, int n, avx512bf16_bfloat16 x,
                                                     avx512bf16_bfloat16 y) {
    if (UNLIKELY(x.rare)) {
        avx512_put_pairs_bfloat16(to, half, n, x.values, y.values);
        return;
    }
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh(y.values, x.values);
    both = _mm512_permutexvar_epi16(_mm512_loadu_si512(avx512_in_turn), both);
    _mm512_mask_storeu_epi32(to, (__mmask16)FIRST(n), both);
}
VECTOR_RUNS(avx512bf16, bfloat16, uint16_t, 16, REST_MASKED, REST_OF_RUN)

/* Words of a vector: the even ones and the odd ones as 16 float32 each, and back from results for either. */
avx512bf16_INLINE __m512 avx512bf16_even(__m512i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
avx512bf16_INLINE __m512 avx512bf16_odd(__m512i words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
}
avx512bf16_INLINE __m512i avx512bf16_in_turn(__m512 even, __m512 odd) {
    return _mm512_permutexvar_epi16(_mm512_loadu_si512(avx512_in_turn), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}
/* Bit 14 of each word: whether it lies within 2^-63 .. 2^65. With cos and sin that are zero or not below 2^-32, products of
 * such values differ by nothing or by more than a subnormal number, and nothing overflows. */
avx512bf16_INLINE __m512i avx512bf16_ordinary(__m512i words) {
    return _mm512_xor_si512(words, _mm512_add_epi16(words, words));
}
avx512bf16_INLINE int avx512bf16_all(__m512i ordinary) {
    return _mm512_movepi16_mask(_mm512_add_epi16(ordinary, ordinary)) == 0xffffffff;
}
avx512bf16_INLINE int avx512bf16_suits(const float *row, int64_t n) {
    const __m512i least = _mm512_set1_epi32(95 << 23), span = _mm512_set1_epi32((157 - 95) << 23); /* 2^-32, 2^30 */
    unsigned good = 0xffff;
    for (int64_t i = 0; i < n; i += 16) {
        __m512i size = _mm512_and_si512(_mm512_loadu_si512(row + i), _mm512_set1_epi32(0x7fffffff));
        good &= _mm512_cmple_epu32_mask(_mm512_sub_epi32(size, least), span) | _mm512_testn_epi32_mask(size, size);
    }
    return good == 0xffff;
}
#define avx512bf16_suits_bfloat16(COS, SIN, PAIRS) (avx512bf16_suits(COS, PAIRS) && avx512bf16_suits(SIN, PAIRS))

typedef struct {
    avx512_split first, second; /* halves: of the even and the odd of 32 pairs; pairs: of the first and the last 16 */
} avx512bf16_rows;
typedef avx512bf16_rows avx512bf16_row_of_bfloat16_halves, avx512bf16_row_of_bfloat16_pairs;

/* places of 32 float32: the even ones, the odd ones */
static const uint32_t avx512bf16_evens[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
avx512bf16_INLINE avx512bf16_rows avx512bf16_load_bfloat16_halves(const float *cos, const float *sin) {
    const __m512i even = _mm512_loadu_si512(avx512bf16_evens), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    __m512 c = _mm512_loadu_ps(cos), next_c = _mm512_loadu_ps(cos + 16);
    __m512 s = _mm512_loadu_ps(sin), next_s = _mm512_loadu_ps(sin + 16);
    avx512bf16_rows row = {
        avx512_split_row(_mm512_permutex2var_ps(c, even, next_c), _mm512_permutex2var_ps(s, even, next_s), 16),
        avx512_split_row(_mm512_permutex2var_ps(c, odd, next_c), _mm512_permutex2var_ps(s, odd, next_s), 16)};
    return row;
}
avx512bf16_INLINE avx512bf16_rows avx512bf16_load_bfloat16_pairs(const float *cos, const float *sin) {
    avx512bf16_rows row = {avx512_split_row(_mm512_loadu_ps(cos), _mm512_loadu_ps(sin), 16),
                           avx512_split_row(_mm512_loadu_ps(cos + 16), _mm512_loadu_ps(sin + 16), 16)};
    return row;
}
avx512bf16_INLINE int avx512bf16_turn_bfloat16_halves(const uint16_t *from, uint16_t *to, int64_t half,
                                                      avx512bf16_rows row) {
    __m512i x = _mm512_loadu_si512(from), y = _mm512_loadu_si512(from + half);
    __m512 even_x, even_y, odd_x, odd_y;
    if (UNLIKELY(!avx512bf16_all(_mm512_and_si512(avx512bf16_ordinary(x), avx512bf16_ordinary(y))))) return 0;
    avx512_turn(avx512bf16_even(x), avx512bf16_even(y), row.first, &even_x, &even_y);
    avx512_turn(avx512bf16_odd(x), avx512bf16_odd(y), row.second, &odd_x, &odd_y);
    _mm512_storeu_si512(to, avx512bf16_in_turn(even_x, odd_x));
    _mm512_storeu_si512(to + half, avx512bf16_in_turn(even_y, odd_y));
    return 1;
}
avx512bf16_INLINE int avx512bf16_turn_bfloat16_pairs(const uint16_t *from, uint16_t *to, int64_t half,
                                                     avx512bf16_rows row) {
    __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 32);
    __m512 x, y, next_x, next_y;
    (void)half;
    if (UNLIKELY(!avx512bf16_all(_mm512_and_si512(avx512bf16_ordinary(a), avx512bf16_ordinary(b))))) return 0;
    avx512_turn(avx512bf16_even(a), avx512bf16_odd(a), row.first, &x, &y);
    avx512_turn(avx512bf16_even(b), avx512bf16_odd(b), row.second, &next_x, &next_y);
    _mm512_storeu_si512(to, avx512bf16_in_turn(x, y));
    _mm512_storeu_si512(to + 32, avx512bf16_in_turn(next_x, next_y));
    return 1;
}
BLOCKS(avx512bf16, bfloat16, halves, uint16_t, 1, 32, 64)
BLOCKS(avx512bf16, bfloat16, pairs, uint16_t, 2, 32, 64)
#define avx512bf16_float32_halves avx512_float32_halves
#define avx512bf16_float32_pairs avx512_float32_pairs
#define avx512bf16_float16_halves avx512_float16_halves
#define avx512bf16_float16_pairs avx512_float16_pairs
#define avx512bf16_hash avx512_hash
#define avx512bf16_unit avx512_unit
#endif

#define avx2_TARGET __attribute__((target("avx2,fma,f16c")))
#define avx2_INLINE __attribute__((always_inline, target("avx2,fma,f16c"))) static inline
typedef __m256d avx2_float32;               /* 4 pairs */
typedef __m256 avx2_bfloat16, avx2_float16; /* 8 pairs */

avx2_INLINE __m256d avx2_row_float32(const float *row, int n) {
    (void)n;
    return _mm256_cvtps_pd(_mm_loadu_ps(row));
}
avx2_INLINE void avx2_rotate_float32(__m256d *x, __m256d *y, __m256d c, __m256d s) {
    __m256d out_x = _mm256_fmsub_pd(*x, c, _mm256_mul_pd(*y, s));
    *y = _mm256_fmadd_pd(*y, c, _mm256_mul_pd(*x, s));
    *x = out_x;
}
avx2_INLINE void avx2_get_halves_float32(const float *from, int64_t half, int n, __m256d *x, __m256d *y) {
    *x = avx2_row_float32(from, n);
    *y = avx2_row_float32(from + half, n);
}
avx2_INLINE void avx2_put_halves_float32(float *to, int64_t half, int n, __m256d x, __m256d y) {
    (void)n;
    _mm_storeu_ps(to, _mm256_cvtpd_ps(x));
    _mm_storeu_ps(to + half, _mm256_cvtpd_ps(y));
}
avx2_INLINE void avx2_get_pairs_float32(const float *from, int64_t half, int n, __m256d *x, __m256d *y) {
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + 4);
    (void)half, (void)n;
    *x = _mm256_cvtps_pd(_mm_shuffle_ps(a, b, 0x88));
    *y = _mm256_cvtps_pd(_mm_shuffle_ps(a, b, 0xdd));
}
avx2_INLINE void avx2_put_pairs_float32(float *to, int64_t half, int n, __m256d x, __m256d y) {
    __m128 a = _mm256_cvtpd_ps(x), b = _mm256_cvtpd_ps(y);
    (void)half, (void)n;
    _mm_storeu_ps(to, _mm_unpacklo_ps(a, b));
    _mm_storeu_ps(to + 4, _mm_unpackhi_ps(a, b));
}

avx2_INLINE __m256 avx2_row_bfloat16(const float *row, int n) {
    (void)n;
    return _mm256_loadu_ps(row);
}
#define avx2_row_float16 avx2_row_bfloat16
avx2_INLINE void avx2_rotate_bfloat16(__m256 *x, __m256 *y, __m256 c, __m256 s) {
    __m256 ys = _mm256_mul_ps(*y, s), xs = _mm256_mul_ps(*x, s);
    __m256 out_x = _mm256_sub_ps(_mm256_fmsub_ps(*x, c, ys), _mm256_fmsub_ps(*y, s, ys));
    __m256 out_y = _mm256_add_ps(_mm256_fmadd_ps(*y, c, xs), _mm256_fmsub_ps(*x, s, xs));
    if (UNLIKELY(_mm256_movemask_ps(_mm256_cmp_ps(out_x, out_y, _CMP_UNORD_Q)))) {
        float v[6][8];
        _mm256_storeu_ps(v[0], *x), _mm256_storeu_ps(v[1], *y), _mm256_storeu_ps(v[2], c);
        _mm256_storeu_ps(v[3], s), _mm256_storeu_ps(v[4], out_x), _mm256_storeu_ps(v[5], out_y);
        settle(v[0], v[1], v[2], v[3], v[4], v[5], 8);
        out_x = _mm256_loadu_ps(v[4]), out_y = _mm256_loadu_ps(v[5]);
    }
    *x = out_x, *y = out_y;
}
#define avx2_rotate_float16 avx2_rotate_bfloat16

/* the lower halves of eight words, in order; the upper halves must be zero */
avx2_INLINE __m128i avx2_narrow(__m256i words) {
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08));
}
avx2_INLINE __m256i avx2_round_bfloat16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}
avx2_INLINE __m256 avx2_get_bfloat16(const uint16_t *from, int n) {
    (void)n;
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
}
avx2_INLINE void avx2_put_bfloat16(uint16_t *to, int n, __m256 x) {
    (void)n;
    _mm_storeu_si128((__m128i *)to, avx2_narrow(_mm256_srli_epi32(avx2_round_bfloat16(x), 16)));
}
avx2_INLINE void avx2_get_pairs_bfloat16(const uint16_t *from, int64_t half, int n, __m256 *x, __m256 *y) {
    __m256i both = _mm256_loadu_si256((const __m256i *)from);
    (void)half, (void)n;
    *x = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    *y = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)));
}
avx2_INLINE void avx2_put_pairs_bfloat16(uint16_t *to, int64_t half, int n, __m256 x, __m256 y) {
    __m256i low = _mm256_srli_epi32(avx2_round_bfloat16(x), 16), high = avx2_round_bfloat16(y);
    (void)half, (void)n;
    _mm256_storeu_si256((__m256i *)to, _mm256_blend_epi16(low, high, 0xaa));
}
avx2_INLINE __m256 avx2_get_float16(const uint16_t *from, int n) {
    (void)n;
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
avx2_INLINE void avx2_put_float16(uint16_t *to, int n, __m256 x) {
    (void)n;
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
avx2_INLINE void avx2_get_pairs_float16(const uint16_t *from, int64_t half, int n, __m256 *x, __m256 *y) {
    __m256i both = _mm256_loadu_si256((const __m256i *)from);
    (void)half, (void)n;
    *x = _mm256_cvtph_ps(avx2_narrow(_mm256_and_si256(both, _mm256_set1_epi32(0xffff))));
    *y = _mm256_cvtph_ps(avx2_narrow(_mm256_srli_epi32(both, 16)));
}
avx2_INLINE void avx2_put_pairs_float16(uint16_t *to, int64_t half, int n, __m256 x, __m256 y) {
    __m128i a = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), b = _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT);
    (void)half, (void)n;
    _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128((__m128i *)(to + 8), _mm_unpackhi_epi16(a, b));
}
SPLIT_HALVES(avx2, bfloat16)
SPLIT_HALVES(avx2, float16)
VECTOR_RUNS(avx2, float32, float, 4, REST_GENERIC, WHOLE_RUN)
VECTOR_RUNS(avx2, bfloat16, uint16_t, 8, REST_GENERIC, WHOLE_RUN)
VECTOR_RUNS(avx2, float16, uint16_t, 8, REST_GENERIC, WHOLE_RUN)

avx2_TARGET static uint32_t avx2_hash(const float *words, int64_t n, uint32_t first) {
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i unit = _mm256_set1_epi32((int)(2 * 0x9E3779B1u)), step = _mm256_slli_epi32(unit, 3);
    __m256i weight =
        _mm256_add_epi32(_mm256_mullo_epi32(places, unit), _mm256_set1_epi32((int)(0x9E3779B1u * (2 * first + 1))));
    __m256i sum = _mm256_setzero_si256();
    uint32_t sums[8], total = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8, weight = _mm256_add_epi32(weight, step)) {
        __m256i word = _mm256_loadu_si256((const __m256i *)(words + i));
        word = _mm256_xor_si256(word, _mm256_srli_epi32(word, 15));
        sum = _mm256_add_epi32(sum, _mm256_mullo_epi32(word, weight));
    }
    _mm256_storeu_si256((__m256i *)sums, sum);
    for (int lane = 0; lane < 8; lane++) total += sums[lane];
    return total + generic_hash(words + i, n - i, first + (uint32_t)i);
}

avx2_TARGET static int avx2_unit(const float *cos, const float *sin, int64_t n, float low, float high) {
    const __m256 least = _mm256_set1_ps(low), most = _mm256_set1_ps(high);
    int good = 0xff;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
        __m256 square = _mm256_fmadd_ps(c, c, _mm256_mul_ps(s, s));
        good &= _mm256_movemask_ps(
            _mm256_and_ps(_mm256_cmp_ps(square, least, _CMP_GE_OQ), _mm256_cmp_ps(square, most, _CMP_LE_OQ)));
    }
    return good == 0xff && generic_unit(cos + i, sin + i, n - i, low, high);
}
#endif

#if defined(VECTOR) && defined(__aarch64__)
#include <arm_neon.h>

#define neon_TARGET
#define neon_INLINE __attribute__((always_inline)) static inline
typedef float64x2_t neon_float32;                /* 2 pairs */
typedef float32x4_t neon_bfloat16, neon_float16; /* 4 pairs */

neon_INLINE float64x2_t neon_row_float32(const float *row, int n) {
    (void)n;
    return vcvt_f64_f32(vld1_f32(row));
}
neon_INLINE void neon_rotate_float32(float64x2_t *x, float64x2_t *y, float64x2_t c, float64x2_t s) {
    float64x2_t out_x = vfmsq_f64(vmulq_f64(*x, c), *y, s);
    *y = vfmaq_f64(vmulq_f64(*y, c), *x, s);
    *x = out_x;
}
neon_INLINE void neon_get_halves_float32(const float *from, int64_t half, int n, float64x2_t *x, float64x2_t *y) {
    *x = neon_row_float32(from, n);
    *y = neon_row_float32(from + half, n);
}
neon_INLINE void neon_put_halves_float32(float *to, int64_t half, int n, float64x2_t x, float64x2_t y) {
    (void)n;
    vst1_f32(to, vcvt_f32_f64(x));
    vst1_f32(to + half, vcvt_f32_f64(y));
}
neon_INLINE void neon_get_pairs_float32(const float *from, int64_t half, int n, float64x2_t *x, float64x2_t *y) {
    float32x2x2_t both = vld2_f32(from);
    (void)half, (void)n;
    *x = vcvt_f64_f32(both.val[0]);
    *y = vcvt_f64_f32(both.val[1]);
}
neon_INLINE void neon_put_pairs_float32(float *to, int64_t half, int n, float64x2_t x, float64x2_t y) {
    float32x2x2_t both = {{vcvt_f32_f64(x), vcvt_f32_f64(y)}};
    (void)half, (void)n;
    vst2_f32(to, both);
}

neon_INLINE float32x4_t neon_row_bfloat16(const float *row, int n) {
    (void)n;
    return vld1q_f32(row);
}
#define neon_row_float16 neon_row_bfloat16
neon_INLINE void neon_rotate_bfloat16(float32x4_t *x, float32x4_t *y, float32x4_t c, float32x4_t s) {
    float32x4_t ys = vmulq_f32(*y, s), xs = vmulq_f32(*x, s);
    float32x4_t out_x = vaddq_f32(vfmaq_f32(vnegq_f32(ys), *x, c), vfmsq_f32(ys, *y, s));
    float32x4_t out_y = vsubq_f32(vfmaq_f32(xs, *y, c), vfmsq_f32(xs, *x, s));
    uint32x4_t ordered = vandq_u32(vceqq_f32(out_x, out_x), vceqq_f32(out_y, out_y));
    if (UNLIKELY(vminvq_u32(ordered) == 0)) {
        float v[6][4];
        vst1q_f32(v[0], *x), vst1q_f32(v[1], *y), vst1q_f32(v[2], c);
        vst1q_f32(v[3], s), vst1q_f32(v[4], out_x), vst1q_f32(v[5], out_y);
        settle(v[0], v[1], v[2], v[3], v[4], v[5], 4);
        out_x = vld1q_f32(v[4]), out_y = vld1q_f32(v[5]);
    }
    *x = out_x, *y = out_y;
}
#define neon_rotate_float16 neon_rotate_bfloat16

neon_INLINE float32x4_t neon_widen_bfloat16(uint16x4_t values) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(values), 16));
}
neon_INLINE uint16x4_t neon_narrow_bfloat16(float32x4_t x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
}
neon_INLINE float32x4_t neon_widen_float16(uint16x4_t values) { return vcvt_f32_f16(vreinterpret_f16_u16(values)); }
neon_INLINE uint16x4_t neon_narrow_float16(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
#define NEON_ACCESS(DTYPE)                                                                                     \
    neon_INLINE float32x4_t neon_get_##DTYPE(const uint16_t *from, int n) {                                    \
        (void)n;                                                                                               \
        return neon_widen_##DTYPE(vld1_u16(from));                                                             \
    }                                                                                                          \
    neon_INLINE void neon_put_##DTYPE(uint16_t *to, int n, float32x4_t x) {                                    \
        (void)n;                                                                                               \
        vst1_u16(to, neon_narrow_##DTYPE(x));                                                                  \
    }                                                                                                          \
    neon_INLINE void neon_get_pairs_##DTYPE(const uint16_t *from, int64_t half, int n, float32x4_t *x,         \
                                            float32x4_t *y) {                                                  \
        uint16x4x2_t both = vld2_u16(from);                                                                    \
        (void)half, (void)n;                                                                                   \
        *x = neon_widen_##DTYPE(both.val[0]);                                                                  \
        *y = neon_widen_##DTYPE(both.val[1]);                                                                  \
    }                                                                                                          \
    neon_INLINE void neon_put_pairs_##DTYPE(uint16_t *to, int64_t half, int n, float32x4_t x, float32x4_t y) { \
        uint16x4x2_t both = {{neon_narrow_##DTYPE(x), neon_narrow_##DTYPE(y)}};                                \
        (void)half, (void)n;                                                                                   \
        vst2_u16(to, both);                                                                                    \
    }
NEON_ACCESS(bfloat16)
NEON_ACCESS(float16)
SPLIT_HALVES(neon, bfloat16)
SPLIT_HALVES(neon, float16)
VECTOR_RUNS(neon, float32, float, 2, REST_GENERIC, WHOLE_RUN)
VECTOR_RUNS(neon, bfloat16, uint16_t, 4, REST_GENERIC, WHOLE_RUN)
VECTOR_RUNS(neon, float16, uint16_t, 4, REST_GENERIC, WHOLE_RUN)

static uint32_t neon_hash(const float *words, int64_t n, uint32_t first) {
    const uint32x4_t places = {0, 1, 2, 3};
    uint32x4_t weight = vaddq_u32(vmulq_n_u32(places, 2 * 0x9E3779B1u), vdupq_n_u32(0x9E3779B1u * (2 * first + 1)));
    uint32x4_t sum = vdupq_n_u32(0);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4, weight = vaddq_u32(weight, vdupq_n_u32(8 * 0x9E3779B1u))) {
        uint32x4_t word = vreinterpretq_u32_f32(vld1q_f32(words + i));
        sum = vmlaq_u32(sum, veorq_u32(word, vshrq_n_u32(word, 15)), weight);
    }
    return vaddvq_u32(sum) + generic_hash(words + i, n - i, first + (uint32_t)i);
}

static int neon_unit(const float *cos, const float *sin, int64_t n, float low, float high) {
    uint32x4_t good = vdupq_n_u32(~0u);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t c = vld1q_f32(cos + i), s = vld1q_f32(sin + i), square = vfmaq_f32(vmulq_f32(s, s), c, c);
        good = vandq_u32(good, vandq_u32(vcgeq_f32(square, vdupq_n_f32(low)), vcleq_f32(square, vdupq_n_f32(high))));
    }
    return vminvq_u32(good) != 0 && generic_unit(cos + i, sin + i, n - i, low, high);
}
#endif

/* ---- Choice of instruction set. ---- */

typedef struct {
    const char *name;
    run_fn run[3][2]; /* dtype, interleaved */
    uint32_t (*hash)(const float *, int64_t, uint32_t);
    int (*unit)(const float *, const float *, int64_t, float, float);
} instruction_set;

#define INSTRUCTION_SET(NAME)                                                                                        \
    {                                                                                                                \
#NAME, {{NAME##_float32_halves, NAME##_float32_pairs },                                                      \
                 {NAME##_bfloat16_halves, NAME##_bfloat16_pairs }, {NAME##_float16_halves, NAME##_float16_pairs } }, \
                  NAME##_hash, NAME##_unit,                                                                          \
    }

static const instruction_set instruction_sets[] = {
/* best first */
#if defined(VECTOR) && defined(__x86_64__)
#if defined(AVX512BF16)
    INSTRUCTION_SET(avx512bf16),
#endif
    INSTRUCTION_SET(avx512),
    INSTRUCTION_SET(avx2),
#elif defined(VECTOR)
    INSTRUCTION_SET(neon),
#endif
    INSTRUCTION_SET(generic),
};
enum { INSTRUCTION_SETS = sizeof instruction_sets / sizeof *instruction_sets };

static int machine_has(const char *name) {
#if defined(VECTOR) && defined(__x86_64__)
    unsigned a, b, c = 0, d;
    int avx2 = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C && __builtin_cpu_supports("avx2") &&
               __builtin_cpu_supports("fma");
    if (!strcmp(name, "avx2")) return avx2;
    if (!strcmp(name, "avx512bf16") && !(__get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1 << 5)) return 0;
    if (!strcmp(name, "avx512") || !strcmp(name, "avx512bf16"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    (void)name;
    return 1;
}

/* The best that the machine has, or the one that LIVE_ROPE_ISA names where the machine has it; decided once. */
static const instruction_set *isa(void) {
    static int64_t chosen = -1;
    int64_t choice = LOAD(&chosen);
    if (choice >= 0) return &instruction_sets[choice];
    const char *wanted = getenv("LIVE_ROPE_ISA");
    for (int i = INSTRUCTION_SETS - 1; i >= 0; i--) {
        if (!machine_has(instruction_sets[i].name)) continue;
        choice = i;
        if (wanted && !strcmp(wanted, instruction_sets[i].name)) break;
    }
    STORE(&chosen, choice);
    return &instruction_sets[choice];
}

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
static void *thread_main(void *data) {
    work(data);
    return NULL;
}
#endif

/* Runs the job on at most `threads` threads, where its `bytes` pay for them. A pool handed in is asked for all of them
 * or not at all: GOMP's ends and restarts its threads whenever the number changes, which torch would pay for. */
static void share(job *todo, int threads, int64_t bytes, rope_parallel_fn parallel) {
    if (!parallel) threads = (int)smaller(threads, smaller(bytes >> 21, MOST_THREADS));
    int64_t pieces = threads < 2 || bytes < 1 << 18 ? 1 : smaller(8 * (int64_t)threads, bytes >> 15);
    if (pieces == 1) {
        todo->piece(todo, 0, todo->total);
        return;
    }
    todo->next = 0;
    todo->step = (todo->total + pieces - 1) / pieces;
    if (parallel) {
        parallel(work, todo, (unsigned)threads, 0);
    } else {
#if defined(__GNUC__)
        pthread_t others[MOST_THREADS];
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
    while (token < best &&
           !__atomic_compare_exchange_n(&todo->bad_token, &best, token, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
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
    /* a byte of a row takes about four times as long to check as a byte of q or k to rotate */
    share(todo, call->threads, 4 * todo->total * call->axes * call->rotary_dim * 4, call->parallel);
    if (todo->bad_token == todo->total) return OK;
    call->bad_token = todo->bad_token;
    first_bad(todo, todo->bad_token, todo->bad_token + 1, &fault, &call->bad_position);
    return fault ? fault : BAD_ROW; /* OK here: someone else is writing the table right now */
}

/* ---- The rotation. ---- */

/* cos and sin of pairs [first, first + pairs) of a token, the pairs' own axes minded. */
static void gather_row(const rope_call *call, int64_t b, int64_t s, int64_t first, int64_t pairs, float *cos,
                       float *sin) {
    const float *from_cos[MAX_AXES], *from_sin[MAX_AXES];
    for (int axis = 0; axis < call->axes; axis++) {
        int64_t row = position_of(call, axis, b, s);
        from_cos[axis] = call->cos + row * call->cos_stride + first;
        from_sin[axis] = call->sin + row * call->sin_stride + first;
    }
    if (!call->pair_axis) {
        memcpy(cos, from_cos[0], (size_t)pairs * sizeof *cos);
        memcpy(sin, from_sin[0], (size_t)pairs * sizeof *sin);
    } else {
        const uint8_t *axis = call->pair_axis + first;
        for (int64_t i = 0; i < pairs; i++) {
            cos[i] = from_cos[axis[i]][i];
            sin[i] = from_sin[axis[i]][i];
        }
    }
    for (int64_t i = 0; call->inverse && i < pairs; i++) sin[i] = -sin[i];
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
        in[1] * size,
        in[2] * size,
        out[1] * size,
        out[2] * size,
    };
    return at;
}

/* `rows` holds cos and sin of each token. Where the tokens of a head lie closer together than the heads of a token
 * ([B, H, S, D] in memory), a few heads go through all the tokens before the next few, so that memory is read in
 * stretches; the next heads' stretch is fetched meanwhile, which the machine would not foresee. */
static void rotate_side(side at, int64_t tokens, run_fn run, const float *rows, int64_t offset, int64_t pairs,
                        int64_t half, int64_t vector_bytes) {
    const int by_head = at.in_head > at.in_seq;
    const int64_t together = by_head ? STREAMS : at.heads;
    for (int64_t h = 0; h < at.heads; h += together) {
        const int64_t heads = smaller(together, at.heads - h),
                      ahead = by_head ? smaller(together, at.heads - h - heads) : 0;
        for (int64_t i = 0; i < tokens; i++) {
            const char *in = at.in + h * at.in_head + i * at.in_seq;
            char *out = at.out + h * at.out_head + i * at.out_seq;
            const float *cos = rows + i * 2 * pairs;
            for (int64_t next = heads; next < heads + ahead; next++)
                for (int64_t byte = 0; byte < vector_bytes; byte += 64) PREFETCH(in + next * at.in_head + byte);
            run(in + offset, out + offset, at.in_head, at.out_head, heads, cos, cos + pairs, pairs, half);
        }
    }
}

/* Elements R..D of each head, where the output is not the input. */
static void copy_rest(side at, int64_t tokens, int64_t offset, int64_t bytes) {
    if (at.in == at.out || bytes == 0) return;
    for (int64_t i = 0; i < tokens; i++)
        for (int64_t h = 0; h < at.heads; h++)
            memcpy(at.out + i * at.out_seq + h * at.out_head + offset, at.in + i * at.in_seq + h * at.in_head + offset,
                   (size_t)bytes);
}

static void rotate_piece(job *todo, int64_t begin, int64_t end) {
    const rope_call *call = todo->call;
    const run_fn run = todo->isa->run[call->dtype][call->interleaved != 0];
    const int64_t size = element_size(call), half = call->rotary_dim / 2;
    const int64_t tile = AT_HAND / (2 * smaller(half ? half : 1, CHUNK));
    CACHE_ALIGNED float rows[AT_HAND];
    for (int64_t t = begin, n; t < end; t += n) {
        int64_t b = t / call->seq, s = t % call->seq;
        n = smaller(smaller(tile, end - t), call->seq - s);
        for (int64_t first = 0; first < half; first += CHUNK) {
            int64_t pairs = smaller(CHUNK, half - first), offset = (call->interleaved ? 2 * first : first) * size;
            for (int64_t i = 0; i < n; i++)
                gather_row(call, b, s + i, first, pairs, rows + 2 * i * pairs, rows + (2 * i + 1) * pairs);
            for (int key = !call->q_heads; key < 1 + !!call->k_heads; key++)
                rotate_side(side_at(call, key, b, s), n, run, rows, offset, pairs, half, 2 * half * size);
        }
        for (int key = !call->q_heads; key < 1 + !!call->k_heads; key++)
            copy_rest(side_at(call, key, b, s), n, call->rotary_dim * size, (call->head_dim - call->rotary_dim) * size);
    }
}

/* A large new tensor has no pages yet, and getting them one by one takes longer than filling them: ask for huge ones.
 * The kernel (of the system) may decline; nothing depends on it. */
static void prepare_output(const rope_call *call, int key) {
#if defined(MADV_HUGEPAGE)
    const int64_t *stride = key ? call->k_out_stride : call->q_out_stride, page = 1 << 21;
    int64_t heads = key ? call->k_heads : call->q_heads;
    int64_t reach = (call->batch - 1) * stride[0] + (call->seq - 1) * stride[1] + (heads - 1) * stride[2] + call->head_dim;
    uintptr_t begin = (uintptr_t)(key ? call->k_out : call->q_out), end = begin + (uintptr_t)(reach * element_size(call));
    if (heads == 0 || (key ? call->k == call->k_out : call->q == call->q_out) || reach * element_size(call) < 2 * page)
        return;
    begin = (begin + (uintptr_t)page - 1) / (uintptr_t)page * (uintptr_t)page;
    end = end / (uintptr_t)page * (uintptr_t)page;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)call, (void)key;
#endif
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
    if (call->batch < 0 || call->seq < 0 || call->rotary_dim < 0 || call->rotary_dim % 2 ||
        call->rotary_dim > call->head_dim)
        return 0;
    if (call->dtype < FLOAT32 || call->dtype > FLOAT16 || call->threads < 1 || call->rows < 0 || !call->cos ||
        !call->sin)
        return 0;
    if (call->position_bits != 0 && ((call->position_bits != 32 && call->position_bits != 64) || !call->positions))
        return 0;
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
    for (int key = 0; key < 2; key++) prepare_output(call, key);
    todo.piece = rotate_piece;
    todo.total = call->batch * call->seq;
    share(&todo, call->threads, todo.total * (call->q_heads + call->k_heads) * call->head_dim * element_size(call),
          call->parallel);
    return OK;
}

static void checks_piece(job *todo, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        todo->checks[i] = (int32_t)row_check(todo->isa, todo->cos + i * todo->cos_stride,
                                             todo->sin + i * todo->sin_stride, todo->half);
}

/* The checksum of each row, [rows]; rope_rotate compares with it. */
EXPORT void rope_row_checks(const float *cos, const float *sin, int64_t cos_stride, int64_t sin_stride, int64_t rows,
                            int64_t half, int32_t *out, int32_t threads, rope_parallel_fn parallel) {
    job todo = {.piece = checks_piece,
                .isa = isa(),
                .total = rows,
                .cos = cos,
                .sin = sin,
                .cos_stride = cos_stride,
                .sin_stride = sin_stride,
                .half = half,
                .checks = out};
    share(&todo, threads, rows * half * 8, parallel);
}

EXPORT const char *rope_isa(void) { return isa()->name; }

EXPORT int rope_abi(void) { return 1; }
