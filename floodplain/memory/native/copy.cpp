// Blocks between the KV pool, where each layer holds a part of every block, and slots, where a block is one piece.
//
// One pass: every word is read once, weighed into the digest of its block (see memory/digest.py) and written where it
// belongs. One thread, so that copies never wait for the threads that compute.

#include <cstdint>

namespace {

constexpr uint32_t kFactor = 0x9E3779B1u;
constexpr uint32_t kMask = (1u << 30) - 1;

// Copies a layer's part of a block; returns its share of the digest. `first` is the part's place in the whole block.
uint64_t copy_part(const int32_t* __restrict from, int32_t* __restrict to, int64_t num_words, uint32_t first) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < num_words; ++i) {
        const uint32_t place = (first + static_cast<uint32_t>(i)) * kFactor;
        const int32_t weight = static_cast<int32_t>((place & kMask) << 1 | 1u);
        sum += static_cast<uint64_t>(static_cast<int64_t>(weight) * from[i]);
        to[i] = from[i];
    }
    return sum;
}

}  // namespace

// layers[l] is where layer l begins, [blocks, layer_words]; slots[i] is where blocks[i] lies or goes, [num_layers,
// layer_words].
extern "C" __attribute__((visibility("default"))) void move_blocks(
    int32_t* const* layers, int32_t* const* slots, const int64_t* blocks, uint64_t* digests, int64_t num_blocks,
    int64_t num_layers, int64_t layer_words, int is_outbound, uint64_t seed) {
    for (int64_t row = 0; row < num_blocks; ++row) {
        uint64_t digest = seed;
        for (int64_t layer = 0; layer < num_layers; ++layer) {
            int32_t* near = layers[layer] + blocks[row] * layer_words;
            int32_t* far = slots[row] + layer * layer_words;
            const uint32_t first = static_cast<uint32_t>(layer * layer_words);
            digest += is_outbound ? copy_part(near, far, layer_words, first) : copy_part(far, near, layer_words, first);
        }
        digests[row] = digest;
    }
}
