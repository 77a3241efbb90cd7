// Kernels for one decoder layer on a CPU: what torch would do in many small calls, or only after gathering the KV cache.
//
// Storage is float32 or bfloat16; all arithmetic is float32. Rows are tokens. Every pointer is to memory that the caller
// owns and keeps; nothing is allocated that outlives a call. Threads come from the OpenMP pool that torch already runs.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr float kLowest = -3.0e38f;       // compiled for finite numbers: no infinities
constexpr int64_t kSerialWork = 1 << 14;  // below so many elements, starting threads costs more than it saves

struct bf16 {
    uint16_t bits;
};

inline float load(float value) { return value; }
inline float load(bf16 value) {
    uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float out;
    std::memcpy(&out, &wide, sizeof out);
    return out;
}
inline void store(float* to, float value) { *to = value; }
inline void store(bf16* to, float value) {  // round to nearest even; the processor's own NaN stays NaN
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    to->bits = static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for if (rows * width > kSerialWork)
    for (int64_t row = 0; row < rows; ++row) {
        const T* in = x + row * width;
        T* to = out + row * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; ++i) sum += load(in[i]) * load(in[i]);
        const float scale = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) store(to + i, load(in[i]) * scale * load(weight[i]));
    }
}

// out = silu(gate) * up; gate and up are the halves of each row.
template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > kSerialWork)
    for (int64_t row = 0; row < rows; ++row) {
        const T* gate = gate_up + row * 2 * width;
        const T* up = gate + width;
        T* to = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const float g = load(gate[i]);
            store(to + i, g / (1.0f + std::exp(-g)) * load(up[i]));
        }
    }
}

// Rotates the query and key heads of each row in place (halves of a head are the two coordinates), then copies the key and
// value heads to the row's slot. qkv: [rows, heads + 2 kv_heads, dim]; cos, sin: [rows, dim / 2] or null for no rotation;
// kv: [blocks, 2, block_tokens, kv_heads, dim].
template <typename T>
void rotate_and_write(T* qkv, const float* cos, const float* sin, const int64_t* slots, T* kv, int64_t rows, int64_t heads,
                      int64_t kv_heads, int64_t dim, int64_t block_tokens) {
    const int64_t half = dim / 2, width = (heads + 2 * kv_heads) * dim, kv_width = kv_heads * dim;
#pragma omp parallel for if (rows * width > kSerialWork)
    for (int64_t row = 0; row < rows; ++row) {
        T* x = qkv + row * width;
        if (cos != nullptr) {
            const float *c = cos + row * half, *s = sin + row * half;
            for (int64_t head = 0; head < heads + kv_heads; ++head) {
                T *low = x + head * dim, *high = low + half;
#pragma omp simd
                for (int64_t i = 0; i < half; ++i) {
                    const float a = load(low[i]), b = load(high[i]);
                    store(low + i, a * c[i] - b * s[i]);
                    store(high + i, b * c[i] + a * s[i]);
                }
            }
        }
        const int64_t block = slots[row] / block_tokens, offset = slots[row] % block_tokens;
        T* key = kv + (block * 2 * block_tokens + offset) * kv_width;
        std::memcpy(key, x + heads * dim, kv_width * sizeof(T));
        std::memcpy(key + block_tokens * kv_width, x + (heads + kv_heads) * dim, kv_width * sizeof(T));
    }
}

template <typename T>
struct Decode {
    const T* q;  // rows of `q_stride` elements, heads first
    const T* kv;
    const int64_t *tables, *lengths;
    T* out;
    int64_t q_stride, table_stride, heads, kv_heads, dim, block_tokens;
    float scale;
};

// The query heads that share one key/value head, for one sequence. DIM and GROUP are compile-time so that loops unroll.
template <typename T, int DIM, int GROUP>
void decode_one(const Decode<T>& d, int64_t row, int64_t kv_head, std::vector<float>& scratch) {
    const int64_t length = d.lengths[row], kv_width = d.kv_heads * DIM;
    const int64_t* table = d.tables + row * d.table_stride;
    const T* q = d.q + row * d.q_stride + kv_head * GROUP * DIM;
    scratch.resize(GROUP * length);
    float query[GROUP][DIM], best[GROUP], total[GROUP], sums[GROUP][DIM];
    for (int g = 0; g < GROUP; ++g) {
        best[g] = kLowest, total[g] = 0.0f;
        for (int i = 0; i < DIM; ++i) query[g][i] = load(q[g * DIM + i]) * d.scale, sums[g][i] = 0.0f;
    }
    for (int64_t start = 0; start < length; start += d.block_tokens) {
        const int64_t end = std::min(length, start + d.block_tokens);
        const T* key = d.kv + table[start / d.block_tokens] * 2 * d.block_tokens * kv_width + kv_head * DIM;
        for (int64_t t = start; t < end; ++t, key += kv_width) {
            for (int g = 0; g < GROUP; ++g) {
                float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int i = 0; i < DIM; ++i) dot += query[g][i] * load(key[i]);
                scratch[g * length + t] = dot;
                best[g] = std::max(best[g], dot);
            }
        }
    }
    for (int g = 0; g < GROUP; ++g) {
        float *score = scratch.data() + g * length, sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < length; ++t) sum += score[t] = std::exp(score[t] - best[g]);
        total[g] = sum;
    }
    for (int64_t start = 0; start < length; start += d.block_tokens) {
        const int64_t end = std::min(length, start + d.block_tokens);
        const T* value = d.kv + (table[start / d.block_tokens] * 2 + 1) * d.block_tokens * kv_width + kv_head * DIM;
        for (int64_t t = start; t < end; ++t, value += kv_width) {
            for (int g = 0; g < GROUP; ++g) {
                const float weight = scratch[g * length + t];
#pragma omp simd
                for (int i = 0; i < DIM; ++i) sums[g][i] += weight * load(value[i]);
            }
        }
    }
    T* out = d.out + (row * d.heads + kv_head * GROUP) * DIM;
    for (int g = 0; g < GROUP; ++g)
        for (int i = 0; i < DIM; ++i) store(out + g * DIM + i, sums[g][i] / total[g]);
}

template <typename T, int DIM, int GROUP>
void decode(const Decode<T>& d, int64_t rows) {
#pragma omp parallel
    {
        std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < rows * d.kv_heads; ++task)
            decode_one<T, DIM, GROUP>(d, task / d.kv_heads, task % d.kv_heads, scratch);
    }
}

template <typename T, int DIM>
int decode_group(const Decode<T>& d, int64_t rows) {
    switch (d.heads / d.kv_heads) {
        case 1: return decode<T, DIM, 1>(d, rows), 0;
        case 2: return decode<T, DIM, 2>(d, rows), 0;
        case 3: return decode<T, DIM, 3>(d, rows), 0;
        case 4: return decode<T, DIM, 4>(d, rows), 0;
        case 5: return decode<T, DIM, 5>(d, rows), 0;
        case 7: return decode<T, DIM, 7>(d, rows), 0;
        case 8: return decode<T, DIM, 8>(d, rows), 0;
    }
    return 1;
}

template <typename T>
int decode_dim(const Decode<T>& d, int64_t rows) {
    switch (d.dim) {
        case 8: return decode_group<T, 8>(d, rows);
        case 16: return decode_group<T, 16>(d, rows);
        case 64: return decode_group<T, 64>(d, rows);
        case 128: return decode_group<T, 128>(d, rows);
    }
    return 1;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

#define KERNELS(NAME, T)                                                                                              \
    EXPORT void rms_norm_##NAME(const T* x, const T* weight, T* out, int64_t rows, int64_t width, float eps) {       \
        rms_norm(x, weight, out, rows, width, eps);                                                                  \
    }                                                                                                                \
    EXPORT void silu_mul_##NAME(const T* gate_up, T* out, int64_t rows, int64_t width) {                             \
        silu_mul(gate_up, out, rows, width);                                                                         \
    }                                                                                                                \
    EXPORT void rotate_and_write_##NAME(T* qkv, const float* cos, const float* sin, const int64_t* slots, T* kv,     \
                                        int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,                  \
                                        int64_t block_tokens) {                                                      \
        rotate_and_write(qkv, cos, sin, slots, kv, rows, heads, kv_heads, dim, block_tokens);                        \
    }                                                                                                                \
    /* 1 if there is no kernel for this head size and grouping; then nothing was written. */                         \
    EXPORT int decode_##NAME(const T* q, const T* kv, const int64_t* tables, const int64_t* lengths, T* out,         \
                             int64_t rows, int64_t q_stride, int64_t table_stride, int64_t heads, int64_t kv_heads,  \
                             int64_t dim, int64_t block_tokens, float scale) {                                       \
        return decode_dim<T>({q, kv, tables, lengths, out, q_stride, table_stride, heads, kv_heads, dim,             \
                              block_tokens, scale},                                                                  \
                             rows);                                                                                  \
    }

KERNELS(float32, float)
KERNELS(bfloat16, bf16)
