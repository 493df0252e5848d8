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
    // Ranks and chunk of a zigzag order, or 0. If not 0, `query` and `key` are indices in it, and
    // causal attention compares the positions that are stored there.
    index ranks, chunk;
};

// Without a zigzag order all that depends on it is left out when a kernel is compiled.
template <bool ZIGZAG> __device__ __forceinline__ Sizes sizes_of(const Arguments &arguments) {
    const index *s = arguments.sizes;
    return Sizes{s[0],       s[1],       s[2],        s[3],  s[4],  s[5],  s[6] != 0, s[7],  s[8],  s[9],  s[10] != 0,
                 s[11] != 0, s[12] != 0, (word)s[13], s[14], s[15], s[16], s[17],     s[18], s[19], s[20], s[21],
                 s[22],      ZIGZAG ? s[23] : 0};
}

__device__ __forceinline__ index smaller(index a, index b) { return a < b ? a : b; }

// The positions of a query and of a key that causal attention compares.
__device__ __forceinline__ index query_position(const Sizes &sizes, index query) {
    return sizes.chunk == 0 ? sizes.offset + query : position_at(sizes.query + query, sizes.ranks, sizes.chunk);
}
__device__ __forceinline__ index key_position(const Sizes &sizes, index key) {
    return sizes.chunk == 0 ? key : position_at(sizes.key + key, sizes.ranks, sizes.chunk);
}

// The least and the greatest of the positions of a range.
struct Span {
    index least, greatest;
};

// The positions that are stored at `count` indices of a zigzag order.
__device__ __forceinline__ Span span_at(index first, index count, index ranks, index chunk) {
    Span span = Span{position_at(first, ranks, chunk), 0};
    for (index at = first; at < first + count;) {
        const index position = position_at(at, ranks, chunk), length = smaller(chunk - at % chunk, first + count - at);
        span.least = smaller(span.least, position);
        span.greatest = span.greatest < position + length - 1 ? position + length - 1 : span.greatest;
        at += length;
    }
    return span;
}

// The positions of `count` queries.
__device__ __forceinline__ Span query_span(const Sizes &sizes, index first, index count) {
    if (sizes.chunk == 0) {
        return Span{sizes.offset + first, sizes.offset + first + count - 1};
    }
    return span_at(sizes.query + first, count, sizes.ranks, sizes.chunk);
}
// The positions of `count` keys.
__device__ __forceinline__ Span key_span(const Sizes &sizes, index first, index count) {
    return sizes.chunk == 0 ? Span{first, first + count - 1} : span_at(sizes.key + first, count, sizes.ranks, sizes.chunk);
}

// The keys from `start` on up to the end of the chunk.
__device__ __forceinline__ index left_of_chunk(const Sizes &sizes, index start) { return sizes.chunk - (sizes.key + start) % sizes.chunk; }

// The end of the tile of keys from `start` on. It lies in one chunk, so that positions in a tile
// follow each other.
__device__ __forceinline__ index tile_end(const Sizes &sizes, index start, index width) {
    const index end = smaller(start + width, sizes.keys);
    return sizes.chunk == 0 ? end : smaller(end, start + left_of_chunk(sizes, start));
}

// Where the next tile of keys begins, from `start` on, of which queries up to position `greatest`
// see some; `end` or more if there is none.
__device__ __forceinline__ index seen_tile(const Sizes &sizes, index start, index end, index greatest) {
    while (sizes.chunk != 0 && start < end && key_position(sizes, start) > greatest) {
        start += left_of_chunk(sizes, start);
    }
    return start;
}

// The first of the queries, by tiles of `width`, that see some of `count` keys. Those after it see
// some too, since a part is stored in the order of its positions.
__device__ __forceinline__ index first_query(const Sizes &sizes, index first, index count, index width) {
    if (!sizes.is_causal || sizes.chunk == 0) {
        return sizes.is_causal && first > sizes.offset ? (first - sizes.offset) / width * width : 0;
    }
    const index least = key_span(sizes, first, count).least;
    index query = 0;
    while (query < sizes.queries && query_span(sizes, query, smaller(width, sizes.queries - query)).greatest < least) {
        query += width;
    }
    return query;
}

// What makes the index of a key in the tile from `start` on its position, and for dropout that in
// the whole.
__device__ __forceinline__ index position_shift(const Sizes &sizes, index start) { return key_position(sizes, start) - start; }
__device__ __forceinline__ index whole_shift(const Sizes &sizes, index shift) { return sizes.chunk == 0 ? sizes.key : shift; }

// The dropout key of one query's probabilities.
__device__ __forceinline__ long_word query_key(const Arguments &arguments, const Sizes &sizes, index image, index head, index query) {
    const index whole_head = (sizes.key_head + head / sizes.group) * sizes.whole_group + sizes.member + head % sizes.group;
    long_word key = split_mix(site_key(arguments.step, sizes.site) ^ (long_word)(sizes.sample + image));
    key = split_mix(key ^ (long_word)whole_head);
    const index whole_query = sizes.chunk == 0 ? sizes.query + query : query_position(sizes, query);
    return split_mix(key ^ (long_word)whole_query);
}

// The factor that dropout puts on the probability of the key at this position of the whole: 0, or
// the reciprocal of the keep rate.
__device__ __forceinline__ float dropout_factor(const Arguments &arguments, const Sizes &sizes, long_word key, index position) {
    return !sizes.drops ? 1.0f : is_kept((word)position, key, sizes.threshold) ? arguments.numbers[1] : 0.0f;
}

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
