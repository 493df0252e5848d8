// What all kernels of attention share: their sizes, what dropout keeps, what is added to a score, where a gradient goes.
//
// sizes: batch, queries, keys, key heads, query heads of a key head, head's features, whether causal, position of the first query,
// elements from a position to the next of q, and of k and v, whether the output is in single precision, whether it merges, whether it
// drops, threshold, site, first sample, query, key, key head, head among those of its key head, and of how many, over all ranks
// numbers: factor on scores, factor on what dropout keeps
// The relative positions' table and the bucket of each distance follow q, k and v where sizes 21 says how many buckets there are.

struct Sizes {
    index batch, queries, keys, key_heads, group, features;
    bool is_causal;
    index offset, query_stride, key_stride;
    bool is_single, merges, drops;
    word threshold;
    index site, sample, query, key, key_head, member, whole_group, buckets;
};

__device__ __forceinline__ Sizes sizes_of(const Arguments &arguments) {
    const index *s = arguments.sizes;
    return Sizes{s[0],       s[1],       s[2],        s[3],  s[4],  s[5],  s[6] != 0, s[7],  s[8],  s[9],  s[10] != 0,
                 s[11] != 0, s[12] != 0, (word)s[13], s[14], s[15], s[16], s[17],     s[18], s[19], s[20], s[21]};
}

// The key of the hash that drops of one query's probabilities.
__device__ __forceinline__ long_word query_key(const Arguments &arguments, const Sizes &sizes, index image, index head, index query) {
    const index whole_head = (sizes.key_head + head / sizes.group) * sizes.whole_group + sizes.member + head % sizes.group;
    long_word key = split_mix(site_key(arguments.step, sizes.site) ^ (long_word)(sizes.sample + image));
    key = split_mix(key ^ (long_word)whole_head);
    return split_mix(key ^ (long_word)(sizes.query + query));
}
__device__ __forceinline__ float kept_share(const Arguments &arguments, const Sizes &sizes, long_word key, index j) {
    return !sizes.drops ? 1.0f : is_kept((word)(sizes.key + j), key, sizes.threshold) ? arguments.numbers[1] : 0.0f;
}

__device__ __forceinline__ index smaller(index a, index b) { return a < b ? a : b; }

// What is added to a score: reads `table` and the one after it are the table and the buckets.
__device__ __forceinline__ float bias_of(const Arguments &arguments, const Sizes &sizes, int table, index head, index i, index j) {
    if (sizes.buckets == 0) {
        return 0.0f;
    }
    const int bucket = read<int>(arguments, table + 1)[j + sizes.queries - 1 - i];
    return widen(read<number>(arguments, table)[bucket * sizes.key_heads * sizes.group + head]);
}

// Where the gradient of an element goes.
__device__ __forceinline__ void put_gradient(const Arguments &arguments, const Sizes &sizes, int place, index at, float value, bool adds) {
    if (sizes.is_single) {
        float *single = written<float>(arguments, place) + at;
        *single = adds ? *single + value : value;
    } else {
        narrow(written<number>(arguments, place)[at], value);
    }
}
