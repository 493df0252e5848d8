// Shared by all attention kernels: sizes, dropout, the bias of relative positions, and how a
// gradient is stored.
//
// numbers: factor on scores, factor on the probabilities that dropout keeps

// The sizes of a kernel's arguments, in order.
struct Sizes {
    // `group` is the number of query heads that share a key head.
    index batch, queries, keys, key_heads, group, features;
    bool is_causal;
    // Position of this rank's first query among the keys; elements from one position to the next of
    // q, and of k and v.
    index offset, query_stride, key_stride;
    // Whether outputs are in single precision, as in a ring of ranks; whether they are merged with
    // those of the ring's earlier steps; whether there is dropout.
    bool is_single, merges, drops;
    // Dropout keeps hashes from the threshold on. The hash depends on positions over all ranks, so
    // `sample` to `member` say where this rank's part starts; `whole_group` is `group` over all
    // ranks.
    word threshold;
    index site, sample, query, key, key_head, member, whole_group;
    // Buckets of relative positions; 0 without. If not 0, the bias table and the bucket of each
    // distance follow the kernel's other reads.
    index buckets;
};

__device__ __forceinline__ Sizes sizes_of(const Arguments &arguments) {
    const index *s = arguments.sizes;
    return Sizes{s[0],       s[1],       s[2],        s[3],  s[4],  s[5],  s[6] != 0, s[7],  s[8],  s[9],  s[10] != 0,
                 s[11] != 0, s[12] != 0, (word)s[13], s[14], s[15], s[16], s[17],     s[18], s[19], s[20], s[21]};
}

// The dropout key of one query's probabilities.
__device__ __forceinline__ long_word query_key(const Arguments &arguments, const Sizes &sizes, index image, index head, index query) {
    const index whole_head = (sizes.key_head + head / sizes.group) * sizes.whole_group + sizes.member + head % sizes.group;
    long_word key = split_mix(site_key(arguments.step, sizes.site) ^ (long_word)(sizes.sample + image));
    key = split_mix(key ^ (long_word)whole_head);
    return split_mix(key ^ (long_word)(sizes.query + query));
}

// The factor that dropout puts on the probability of key j: 0, or the reciprocal of the keep rate.
__device__ __forceinline__ float dropout_factor(const Arguments &arguments, const Sizes &sizes, long_word key, index j) {
    return !sizes.drops ? 1.0f : is_kept((word)(sizes.key + j), key, sizes.threshold) ? arguments.numbers[1] : 0.0f;
}

__device__ __forceinline__ index smaller(index a, index b) { return a < b ? a : b; }

// The bias of query i and key j by relative position. `table` is the read that holds the bias
// table; the buckets are the next read.
__device__ __forceinline__ float bias_of(const Arguments &arguments, const Sizes &sizes, int table, index head, index i, index j) {
    if (sizes.buckets == 0) {
        return 0.0f;
    }
    const int bucket = read<int>(arguments, table + 1)[j + sizes.queries - 1 - i];
    return widen(read<number>(arguments, table)[bucket * sizes.key_heads * sizes.group + head]);
}

// Stores an element of a gradient, or adds to it in single precision.
__device__ __forceinline__ void store_gradient(const Arguments &arguments, const Sizes &sizes, int operand, index at, float value,
                                               bool adds) {
    if (sizes.is_single) {
        float *single = written<float>(arguments, operand) + at;
        *single = adds ? *single + value : value;
    } else {
        narrow(written<number>(arguments, operand)[at], value);
    }
}
