/* Random calls of the C kernel against long-hand float64: shapes, layouts, positions and damaged tables. Every buffer
 * is allocated to the byte, so that a sanitizer sees any step outside. Usage: rope_kernel_fuzz SEED ROUNDS */
#include "rope_kernel.c"

#include <math.h>
#include <stdio.h>

static uint64_t state;

static int64_t below(int64_t n) { /* 0 .. n - 1 */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (int64_t)((state * 0x2545F4914F6CDD1Dull >> 33) % (uint64_t)n);
}
static int chance(int one_in) { return below(one_in) == 0; }

#define REQUIRE(what)                                      \
    if (!(what)) {                                         \
        fprintf(stderr, "line %d: %s\n", __LINE__, #what); \
        exit(1);                                           \
    }

static void *fresh(int64_t bytes) {
    unsigned char *memory = malloc(bytes ? (size_t)bytes : 1);
    REQUIRE(memory);
    for (int64_t i = 0; i < bytes; i++) memory[i] = (unsigned char)below(256);
    return memory;
}

static void *copy_of(const void *memory, int64_t bytes) { return memcpy(fresh(bytes), memory, (size_t)bytes); }

/* A value of the dtype and back, by arithmetic instead of by bits. */
static const int digits[3] = {24, 8, 11}, smallest_exponent[3] = {-126, -126, -14},
                 largest_exponent[3] = {127, 127, 15};

static double decode(int dtype, const void *at) {
    if (dtype == 0) return *(const float *)at;
    int bits = *(const uint16_t *)at, width = digits[dtype] - 1, fraction = bits & ((1 << width) - 1);
    int field = bits >> width & ((1 << (15 - width)) - 1), top = (1 << (15 - width)) - 1;
    double sign = bits >> 15 ? -1 : 1;
    if (field == top) return fraction ? NAN : sign * INFINITY;
    return sign *
           ldexp(fraction + (field ? 1 << width : 0), (field ? field : 1) - 1 + smallest_exponent[dtype] - width);
}

static void check_value(int dtype, const void *at, double exact) {
    double got = decode(dtype, at), step;
    int exponent;
    if (isnan(exact) || isinf(exact)) {
        REQUIRE(isnan(exact) ? isnan(got) : got == exact);
        return;
    }
    frexp(exact, &exponent);
    step = ldexp(1, (exponent - 1 > smallest_exponent[dtype] ? exponent - 1 : smallest_exponent[dtype]) -
                        digits[dtype] + 1);
    if (isinf(got)) {
        REQUIRE(fabs(exact) >= ldexp(2 - ldexp(1.001, -digits[dtype]), largest_exponent[dtype]) &&
                (got > 0) == (exact > 0));
    } else {
        REQUIRE(fabs(got - exact) <= 0.501 * step);
    }
}

typedef struct {
    int64_t heads, stride[3], bytes;
    void *memory;
} layout;

static layout any_layout(const rope_call *call, int64_t heads) {
    static const int orders[3][3] = {{2, 1, 0}, {1, 2, 0}, {1, 0, 2}}; /* innermost first */
    const int64_t size = call->dtype == 0 ? 4 : 2, counts[3] = {call->batch, call->seq, heads};
    const int *order = orders[below(3)];
    layout made = {.heads = heads};
    int64_t step = call->head_dim + below(3) * below(9), last = 0;
    for (int i = 0; i < 3; i++) {
        made.stride[order[i]] = step;
        last += (counts[order[i]] - 1) * step;
        step = step * counts[order[i]] + below(2) * below(9);
    }
    made.bytes = heads ? (last + call->head_dim) * size : 0;
    made.memory = fresh(made.bytes);
    /* mostly ordinary values, since random bits are mostly huge or tiny */
    for (int64_t i = 0; i < made.bytes / size; i++) {
        int64_t kind = below(64);
        float value = ldexpf((float)(below(2000001) - 1000000), (int)below(12) - 24);
        if (kind == 0) continue;
        if (kind == 1) value = 0;
        if (size == 4)
            ((float *)made.memory)[i] = value;
        else if (call->dtype == 1)
            ((uint16_t *)made.memory)[i] = (uint16_t)(bits_of_float(value) >> 16);
        else
            ((uint16_t *)made.memory)[i] = (uint16_t)(below(2) << 15 | below(0x5000));
    }
    return made;
}

static void check_side(const rope_call *call, layout before, layout after, const void *after_before,
                       const float *row_cos, const float *row_sin) {
    const int64_t size = call->dtype == 0 ? 4 : 2, half = call->rotary_dim / 2;
    char *due = malloc((size_t)after.bytes + 1); /* bytes that some head owns */
    memset(due, 0, (size_t)after.bytes + 1);
    for (int64_t t = 0; t < call->batch * call->seq; t++) {
        for (int64_t h = 0; h < after.heads; h++) {
            int64_t b = t / call->seq, s = t % call->seq;
            const char *x = (const char *)before.memory +
                            (b * before.stride[0] + s * before.stride[1] + h * before.stride[2]) * size;
            int64_t start = (b * after.stride[0] + s * after.stride[1] + h * after.stride[2]) * size;
            const char *y = (const char *)after.memory + start;
            memset(due + start, 1, (size_t)(call->head_dim * size));
            for (int64_t i = 0; i < half; i++) {
                int64_t p = (call->interleaved ? 2 * i : i) * size,
                        q = (call->interleaved ? 2 * i + 1 : half + i) * size;
                double c = row_cos[t * half + i], sine = call->inverse ? -row_sin[t * half + i] : row_sin[t * half + i];
                double first = decode(call->dtype, x + p), second = decode(call->dtype, x + q);
                check_value(call->dtype, y + p, first * c - second * sine);
                check_value(call->dtype, y + q, second * c + first * sine);
            }
            REQUIRE(!memcmp(x + 2 * half * size, y + 2 * half * size, (size_t)((call->head_dim - 2 * half) * size)));
        }
    }
    for (int64_t i = 0; i < after.bytes; i++)
        REQUIRE(due[i] || ((char *)after.memory)[i] == ((const char *)after_before)[i]);
    free(due);
}

typedef struct {
    void (*body)(void *);
    void *data;
} errand;
static void *run_errand(void *data) {
    ((errand *)data)->body(((errand *)data)->data);
    return NULL;
}
static void parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
    pthread_t others[8];
    errand todo = {body, data};
    REQUIRE(flags == 0 && threads <= 8);
    for (unsigned i = 1; i < threads; i++) REQUIRE(!pthread_create(&others[i], NULL, run_errand, &todo));
    body(data);
    for (unsigned i = 1; i < threads; i++) pthread_join(others[i], NULL);
}

static void one_round(void) {
    static const int64_t halves[] = {0, 1, 2, 3, 5, 8, 16, 17, 24, 31, 32, 33, 40, 64, 64, 80, 128, 129, 150, 260};
    rope_call call = {
        .batch = 1 + below(3), .seq = chance(20) ? 1 + below(500) : 1 + below(40), .dtype = (int32_t)below(3)};
    int64_t half = halves[below(sizeof halves / sizeof *halves)], rows = 1 + below(60), tokens = call.batch * call.seq;
    call.rotary_dim = 2 * half, call.head_dim = 2 * half + below(2) * below(9) + !half, call.rows = rows;
    call.interleaved = (int32_t)below(2), call.inverse = (int32_t)below(2), call.threads = 1 + (int32_t)below(4);
    call.q_heads = chance(9) ? 0 : 1 + below(5), call.k_heads = chance(4) ? 0 : 1 + below(3);
    call.axes = chance(3) ? 1 + (int32_t)below(4) : 1, call.parallel = chance(2) ? parallel : NULL;
    int inplace = chance(2);
    double scale = chance(2) ? 1 : 1.3;

    /* the table: one [rows, R + gap] or two [rows, R/2 + gap], without what would follow the last row */
    int together = chance(2);
    int64_t stride = (together ? 2 * half : half) + below(2) * below(7),
            floats = (rows - 1) * stride + (together ? 2 * half : half);
    float *table = fresh(floats * 4), *other = fresh(floats * 4);
    for (int64_t i = 0; i < floats; i++) table[i] = other[i] = 1;
    float *cos_table = table, *sin_table = together ? table + half : other;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)below(1 << 30) / (1 << 20);
            cos_table[r * stride + i] = (float)(cos(angle) * scale),
                                   sin_table[r * stride + i] = (float)(sin(angle) * scale);
        }
    call.cos = cos_table, call.sin = sin_table, call.cos_stride = call.sin_stride = stride;

    int32_t *checks = fresh(rows * 4);
    rope_row_checks(cos_table, sin_table, stride, stride, rows, half, checks, call.threads, call.parallel);
    for (int64_t r = 0; r < rows; r++) {
        uint32_t sum = 0x9E3779B9u;
        for (int64_t j = 0; j < 2 * half; j++) {
            uint32_t word = bits_of_float(j < half ? cos_table[r * stride + j] : sin_table[r * stride + j - half]);
            sum += (word ^ (word >> 15)) * (0x9E3779B1u * (uint32_t)(2 * j + 1));
        }
        REQUIRE(checks[r] == (int32_t)sum);
    }
    int checked = (int)below(3); /* not, by checksum, by length */
    if (checked == 1) call.row_checks = checks;
    if (checked == 2) call.scale = scale;

    /* positions and axes */
    call.position_bits = call.axes == 1 && rows >= call.seq && chance(2) ? 0 : chance(2) ? 32 : 64;
    int64_t width = call.position_bits / 8, batches = chance(2) ? 1 : call.batch,
            count = call.axes * batches * call.seq;
    char *positions = fresh(count * width);
    call.positions = positions;
    call.position_stride[0] = batches * call.seq, call.position_stride[1] = batches == 1 ? 0 : call.seq,
    call.position_stride[2] = 1;
    for (int64_t i = 0; width && i < count; i++) {
        if (width == 4)
            ((int32_t *)positions)[i] = (int32_t)below(rows);
        else
            ((int64_t *)positions)[i] = below(rows);
    }
    uint8_t *axes = fresh(half);
    for (int64_t i = 0; i < half; i++) axes[i] = (uint8_t)below(call.axes);
    if (call.axes > 1 || chance(5)) call.pair_axis = axes;

    /* faults */
    int64_t damaged = -1;
    for (int64_t faults = chance(3) ? 1 + below(3) : 0; width && faults; faults--) {
        static const int64_t wrong[] = {-1, INT32_MIN, INT32_MAX, INT64_MIN, INT64_MAX, (int64_t)1 << 32};
        int64_t at = below(count), value = chance(2) ? rows : wrong[below(width == 4 ? 3 : 6)];
        if (width == 4)
            ((int32_t *)positions)[at] = (int32_t)value;
        else
            ((int64_t *)positions)[at] = value;
    }
    if (half && checked && chance(3)) {
        damaged = below(rows);
        float *victim = (chance(2) ? cos_table : sin_table) + damaged * stride + below(half);
        *victim =
            checked == 2 ? (chance(2) ? NAN : *victim + 2.8f) : float_of_bits(bits_of_float(*victim) ^ 1u << below(32));
    }

    /* what must come out: the first fault, or each token's row */
    int fault = OK;
    int64_t bad_token = -1, bad_position = -1;
    float *row_cos = fresh(tokens * half * 4), *row_sin = fresh(tokens * half * 4);
    for (int64_t t = 0; t < tokens && !fault; t++) {
        int64_t of_axis[8];
        for (int axis = 0; axis < call.axes && !fault; axis++) {
            int64_t at = axis * call.position_stride[0] + t / call.seq * call.position_stride[1] + t % call.seq;
            of_axis[axis] = width == 0   ? t % call.seq
                            : width == 4 ? ((int32_t *)positions)[at]
                                         : ((int64_t *)positions)[at];
            if (of_axis[axis] < 0 || of_axis[axis] >= rows)
                fault = BAD_POSITION, bad_token = t, bad_position = of_axis[axis];
        }
        for (int64_t i = 0; i < half && !fault; i++) {
            int64_t row = of_axis[call.pair_axis ? axes[i] : 0];
            if (row == damaged) fault = BAD_ROW, bad_token = t, bad_position = row;
            row_cos[t * half + i] = cos_table[row * stride + i], row_sin[t * half + i] = sin_table[row * stride + i];
        }
    }

    layout q = any_layout(&call, call.q_heads), k = any_layout(&call, call.k_heads);
    layout q_out = inplace ? q : any_layout(&call, call.q_heads), k_out = inplace ? k : any_layout(&call, call.k_heads);
    layout q_before = q, k_before = k;
    q_before.memory = copy_of(q.memory, q.bytes), k_before.memory = copy_of(k.memory, k.bytes);
    void *q_out_before = copy_of(q_out.memory, q_out.bytes), *k_out_before = copy_of(k_out.memory, k_out.bytes);
    if (q.heads) call.q = q.memory, call.q_out = q_out.memory;
    if (k.heads) call.k = k.memory, call.k_out = k_out.memory;
    memcpy(call.q_stride, q.stride, sizeof q.stride), memcpy(call.q_out_stride, q_out.stride, sizeof q.stride);
    memcpy(call.k_stride, k.stride, sizeof q.stride), memcpy(call.k_out_stride, k_out.stride, sizeof q.stride);

    REQUIRE(rope_rotate(&call) == fault);
    REQUIRE(call.bad_token == bad_token && call.bad_position == bad_position);
    if (fault) {
        REQUIRE(!memcmp(q_out.memory, q_out_before, (size_t)q_out.bytes));
        REQUIRE(!memcmp(k_out.memory, k_out_before, (size_t)k_out.bytes));
    } else {
        check_side(&call, q_before, q_out, q_out_before, row_cos, row_sin);
        check_side(&call, k_before, k_out, k_out_before, row_cos, row_sin);
    }
    if (!inplace) {
        REQUIRE(!memcmp(q.memory, q_before.memory, (size_t)q.bytes) &&
                !memcmp(k.memory, k_before.memory, (size_t)k.bytes));
        free(q_out.memory), free(k_out.memory);
    }
    free(q.memory), free(k.memory), free(q_before.memory), free(k_before.memory), free(q_out_before),
        free(k_out_before);
    free(row_cos), free(row_sin), free(axes), free(positions), free(checks), free(table), free(other);
}

int main(int count, char **arguments) {
    REQUIRE(count == 3);
    int64_t seed = atoll(arguments[1]), rounds = atoll(arguments[2]);
    for (int64_t i = 0; i < rounds; i++) {
        state = (uint64_t)(seed + i) * 0x9E3779B97F4A7C15ull + 1;
        below(2), below(2);
        one_round();
    }
    printf("%s %lld rounds\n", rope_isa(), (long long)rounds);
    return 0;
}
