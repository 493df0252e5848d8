// Softmax attention and its gradient on tensor cores, in 16-bit precisions (Dao 2023,
// FlashAttention-2).
//
// Each of four warps owns 16 or 32 rows of queries (or keys) and loops over tiles of the others;
// the next tile is copied to shared memory meanwhile. Products are summed in single precision.
// Operands of a second product, which are probabilities and their gradients, are rounded to the
// run's precision. `attention.cuh` lists the sizes.
//
// The gradient is two kernels, by queries and by keys, which both recompute the scores. That is
// seven products instead of the five of one kernel with atomic additions, and it is deterministic.
// `_plain` kernels have neither dropout nor relative positions.

#define LOG2_E 1.44269504088896340736f

// The row, within the block, of a thread's sums 0 and 1 (half 0), or 2 and 3 (half 1), of tile m.
template <int TILES> __device__ __forceinline__ int row_of(int m, int half) {
    return threadIdx.x / 32 * 16 * TILES + m * 16 + half * 8 + threadIdx.x % 32 / 4;
}
// The column of a thread's first sum in the n-th group of eight columns.
__device__ __forceinline__ int column_of(int n) { return n * 8 + threadIdx.x % 4 * 2; }

// The sizes that every tile's arithmetic uses, in 32-bit registers.
struct Extent {
    int queries, keys, offset;
    __device__ __forceinline__ explicit Extent(const Sizes &sizes)
        : queries((int)sizes.queries), keys((int)sizes.keys), offset((int)sizes.offset) {}
};

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

// The positions of a query and of a key that causal attention compares.
template <bool ZIGZAG> __device__ __forceinline__ int query_place(const Sizes &sizes, const Extent &extent, int query) {
    return ZIGZAG ? (int)query_position(sizes, query) : extent.offset + query;
}
template <bool ZIGZAG> __device__ __forceinline__ int key_place(const Sizes &sizes, int key) {
    return ZIGZAG ? (int)key_position(sizes, key) : key;
}

// The tiles of keys that a block of queries sees: in a zigzag order each lies in one chunk.
template <int COLUMNS, bool ZIGZAG> struct KeyTiles {
    // The least and the greatest position of the queries, and the end of the keys.
    int least_query, greatest_query, end;

    __device__ __forceinline__ KeyTiles(const Sizes &sizes, const Extent &extent, int first, int count) {
        least_query = extent.offset + first;
        greatest_query = least_query + count - 1;
        end = sizes.is_causal ? least(extent.keys, greatest_query + 1) : extent.keys;
        if (ZIGZAG) {
            const Span span = query_span(sizes, first, count);
            least_query = (int)span.least;
            greatest_query = (int)span.greatest;
            end = extent.keys;
        }
    }
    // Where the next tile begins, from `start` on; `end` or more if there is none.
    __device__ __forceinline__ int next(const Sizes &sizes, int start) const {
        return ZIGZAG ? (int)seen_tile(sizes, start, end, greatest_query) : start;
    }
    // The keys of the tile from `start` on, and the first key that the tile cannot have.
    __device__ __forceinline__ int count(const Sizes &sizes, const Extent &extent, int start) const {
        return least(COLUMNS, stop(sizes, extent, start) - start);
    }
    __device__ __forceinline__ int stop(const Sizes &sizes, const Extent &extent, int start) const {
        return ZIGZAG ? (int)tile_end(sizes, start, COLUMNS) : extent.keys;
    }
    // Where the tile after that from `start` on begins; `end` or more if there is none.
    __device__ __forceinline__ int after(const Sizes &sizes, const Extent &extent, int start) const {
        return ZIGZAG ? next(sizes, stop(sizes, extent, start)) : start + COLUMNS;
    }
    // What makes the index of a key in the tile its position.
    __device__ __forceinline__ int shift(const Sizes &sizes, int start) const {
        return ZIGZAG ? (int)position_shift(sizes, start) : 0;
    }
    // Whether some query does not see some key of the tile.
    __device__ __forceinline__ bool is_cut(const Sizes &sizes, int start, int stop, int shift) const {
        return start + COLUMNS > stop || (sizes.is_causal && start + shift + COLUMNS > least_query);
    }
};

// Stores two neighbouring elements, or adds to them in single precision.
__device__ __forceinline__ void store_pair(const Arguments &arguments, const Sizes &sizes, int operand, index at, float low,
                                           float high, bool adds) {
    if (sizes.is_single) {
        float *single = written<float>(arguments, operand) + at;
        single[0] = adds ? single[0] + low : low;
        single[1] = adds ? single[1] + high : high;
    } else {
        *(word *)(written<number>(arguments, operand) + at) = pack(low, high);
    }
}

// Reads q, k, v (, table, buckets); writes out, log-sum-exp. Grid: tiles of 128 queries, heads of
// sequences.
template <int FEATURES, bool HAS_EXTRAS, bool ZIGZAG> __device__ __forceinline__ void attend(const Arguments &arguments) {
    typedef Tile<FEATURES> T;
    const int TILES = 2, ROWS = 64 * TILES, COLUMNS = 64;
    const Sizes sizes = sizes_of<ZIGZAG>(arguments);
    const Extent extent(sizes);
    const int features = (int)sizes.features;
    const index heads = sizes.key_heads * sizes.group, image = blockIdx.y / heads, head = blockIdx.y % heads;
    // The last queries see the most keys in causal attention, so their blocks start first.
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, count = least(ROWS, extent.queries - first);
    number *queries = (number *)dynamic_shared(), *keys = queries + ROWS * T::PITCH, *values = keys + COLUMNS * T::PITCH;
    const number *warp_rows = queries + threadIdx.x / 32 * 16 * TILES * T::PITCH;
    const number *q = read<number>(arguments, 0) + (image * sizes.queries + first) * sizes.query_stride + head * features;
    const index key_offset = image * sizes.keys * sizes.key_stride + head / sizes.group * features;
    const number *k = read<number>(arguments, 1) + key_offset, *v = read<number>(arguments, 2) + key_offset;
    const KeyTiles<COLUMNS, ZIGZAG> tiles(sizes, extent, first, count);
    int start = tiles.next(sizes, 0);
    // The queries see none of the keys of a ring's step.
    if (ZIGZAG && start >= tiles.end) {
        return;
    }
    const float scale = arguments.numbers[0], scale_of_two = scale * LOG2_E, unscale = 1.0f / scale;
    float out[TILES][FEATURES / 8][4], row_max[TILES][2], sum[TILES][2];
    long_word key[TILES][2];
    clear(out);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            row_max[m][half] = -INFINITY;
            sum[m][half] = 0.0f;
            key[m][half] = HAS_EXTRAS && sizes.drops ? query_key(arguments, sizes, image, head, first + row_of<TILES>(m, half)) : 0;
        }
    }
    T::template fetch<ROWS, 128>(queries, q, sizes.query_stride, count, features);
    const int seen_first = tiles.count(sizes, extent, start);
    T::template fetch<COLUMNS, 128>(keys, k + (index)start * sizes.key_stride, sizes.key_stride, seen_first, features);
    while (start < tiles.end) {
        const int stop = tiles.stop(sizes, extent, start), shift = tiles.shift(sizes, start);
        float scores[TILES][COLUMNS / 8][4];
        clear(scores);
        // The keys have arrived, and every warp has read the previous tile's values.
        wait_for_copies();
        __syncthreads();
        const int there = least(COLUMNS, stop - start);
        T::template fetch<COLUMNS, 128>(values, v + (index)start * sizes.key_stride, sizes.key_stride, there, features);
        T::template multiply_rows<TILES, COLUMNS>(scores, warp_rows, keys);
        const bool is_cut = tiles.is_cut(sizes, start, stop, shift);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = first + row_of<TILES>(m, half);
                const int position = ZIGZAG && !is_cut ? 0 : query_place<ZIGZAG>(sizes, extent, i) - shift;
                float new_max = row_max[m][half];
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &score = scores[m][n][2 * half + e];
                        const int j = start + column_of(n) + e;
                        if (HAS_EXTRAS && i < extent.queries && j < stop) {
                            score += unscale * bias_of(arguments, sizes, 3, head, i, j);
                        }
                        if (is_cut && (j >= stop || (sizes.is_causal && j > position))) {
                            score = -INFINITY;
                        }
                        new_max = fmaxf(new_max, score);
                    }
                }
                // Without a ring finite from the first tile on, because every query sees the first
                // key.
                new_max = four_max(new_max);
                const float base = ZIGZAG && new_max == -INFINITY ? 0.0f : new_max * scale_of_two;
                const float factor = power_of_two(row_max[m][half] * scale_of_two - base);
                float part = 0.0f;
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &score = scores[m][n][2 * half + e];
                        score = power_of_two(score * scale_of_two - base);
                        part += score;
                        if (HAS_EXTRAS) {
                            const index whole = start + whole_shift(sizes, shift) + column_of(n) + e;
                            score *= dropout_factor(arguments, sizes, key[m][half], whole);
                        }
                    }
                }
                sum[m][half] = sum[m][half] * factor + part;
                row_max[m][half] = new_max;
#pragma unroll
                for (int f = 0; f < FEATURES / 8; f++) {
                    out[m][f][2 * half] *= factor;
                    out[m][f][2 * half + 1] *= factor;
                }
            }
        }
        // The values have arrived, and every warp has read the keys.
        wait_for_copies();
        __syncthreads();
        start = tiles.after(sizes, extent, start);
        if (start < tiles.end) {
            const int left = tiles.count(sizes, extent, start);
            T::template fetch<COLUMNS, 128>(keys, k + (index)start * sizes.key_stride, sizes.key_stride, left, features);
        }
        T::template multiply_weights<TILES, COLUMNS>(out, scores, values);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of<TILES>(m, half);
            const int i = first + row;
            const float total = four_sum(sum[m][half]);
            float *log_sums = written<float>(arguments, 1) + (image * heads + head) * sizes.queries + i;
            float log_sum = row_max[m][half] * scale + logf(total), share = 1.0f / total, old_weight = 0.0f;
            if (sizes.merges && row < count) {
                const float before = *log_sums, new_max = fmaxf(before, log_sum);
                const float merged_log_sum = new_max + logf(expf(before - new_max) + expf(log_sum - new_max));
                share *= expf(log_sum - merged_log_sum);
                old_weight = expf(before - merged_log_sum);
                log_sum = merged_log_sum;
            }
            __syncwarp(0xFFFFFFFFu);
            // A query of a ring's step may see none of its keys.
            if (row >= count || (ZIGZAG && total == 0.0f)) {
                continue;
            }
            if (threadIdx.x % 4 == 0) {
                *log_sums = log_sum;
            }
            const index at = ((image * sizes.queries + i) * heads + head) * features;
#pragma unroll
            for (int f = 0; f < FEATURES / 8; f++) {
                const float low = share * out[m][f][2 * half], high = share * out[m][f][2 * half + 1];
                if (f * 8 >= features) {
                    continue;
                }
                const index place = at + column_of(f);
                if (sizes.merges) {
                    float *single = written<float>(arguments, 0) + place;
                    single[0] = old_weight * single[0] + low;
                    single[1] = old_weight * single[1] + high;
                } else {
                    store_pair(arguments, sizes, 0, place, low, high, false);
                }
            }
        }
    }
}

// ---- gradient ----
// Reads dout, q, k, v, out, log-sum-exp (, table, buckets); writes dq, dk, dv.
// scratch: the dot product of out and dout for each head and query

// The gradient of queries. Grid: tiles of queries, heads of sequences.
template <int FEATURES, bool HAS_EXTRAS, bool ZIGZAG> __device__ __forceinline__ void query_gradient(const Arguments &arguments) {
    typedef Tile<FEATURES> T;
    const int TILES = 128 / FEATURES, ROWS = 64 * TILES, COLUMNS = 64;
    const Sizes sizes = sizes_of<ZIGZAG>(arguments);
    const Extent extent(sizes);
    const int features = (int)sizes.features;
    const index heads = sizes.key_heads * sizes.group, image = blockIdx.y / heads, head = blockIdx.y % heads;
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, count = least(ROWS, extent.queries - first);
    number *queries = (number *)dynamic_shared(), *douts = queries + ROWS * T::PITCH, *stages = douts + ROWS * T::PITCH;
    const int warp_rows = threadIdx.x / 32 * 16 * TILES * T::PITCH;
    const index query_offset = (image * sizes.queries + first) * sizes.query_stride + head * features;
    const index output_offset = ((image * sizes.queries + first) * heads + head) * features;
    const index key_offset = image * sizes.keys * sizes.key_stride + head / sizes.group * features;
    const number *k = read<number>(arguments, 2) + key_offset, *v = read<number>(arguments, 3) + key_offset;
    const KeyTiles<COLUMNS, ZIGZAG> tiles(sizes, extent, first, count);
    int start = tiles.next(sizes, 0);
    // The queries see none of the keys of a ring's step, which adds nothing to their gradient.
    if (ZIGZAG && start >= tiles.end) {
        return;
    }
    const float scale = arguments.numbers[0], scale_of_two = scale * LOG2_E;
    float dq[TILES][FEATURES / 8][4], log_sum[TILES][2], dot[TILES][2];
    long_word key[TILES][2];
    clear(dq);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of<TILES>(m, half);
            const index at = (image * heads + head) * sizes.queries + first + row;
            log_sum[m][half] = row < count ? LOG2_E * read<float>(arguments, 5)[at] : 0.0f;
            dot[m][half] = row < count ? ((const float *)arguments.scratch)[at] : 0.0f;
            key[m][half] = HAS_EXTRAS && sizes.drops ? query_key(arguments, sizes, image, head, first + row) : 0;
        }
    }
    T::template fetch<ROWS, 128>(queries, read<number>(arguments, 1) + query_offset, sizes.query_stride, count, features);
    T::template fetch<ROWS, 128>(douts, read<number>(arguments, 0) + output_offset, heads * features, count, features);
    const int seen_first = tiles.count(sizes, extent, start);
    const index before = (index)start * sizes.key_stride;
    T::template fetch<COLUMNS, 128>(stages, k + before, sizes.key_stride, seen_first, features);
    T::template fetch<COLUMNS, 128>(stages + COLUMNS * T::PITCH, v + before, sizes.key_stride, seen_first, features);
    int stage = 0;
    while (start < tiles.end) {
        const int stop = tiles.stop(sizes, extent, start), shift = tiles.shift(sizes, start);
        const number *keys = stages + stage * 2 * COLUMNS * T::PITCH, *values = keys + COLUMNS * T::PITCH;
        float p[TILES][COLUMNS / 8][4], dp[TILES][COLUMNS / 8][4];
        clear(p);
        clear(dp);
        // This tile has arrived, and every warp has read the previous one.
        wait_for_copies();
        __syncthreads();
        stage ^= 1;
        const int next = tiles.after(sizes, extent, start);
        if (next < tiles.end) {
            number *to = stages + stage * 2 * COLUMNS * T::PITCH;
            const int rows = tiles.count(sizes, extent, next);
            T::template fetch<COLUMNS, 128>(to, k + (index)next * sizes.key_stride, sizes.key_stride, rows, features);
            T::template fetch<COLUMNS, 128>(to + COLUMNS * T::PITCH, v + (index)next * sizes.key_stride, sizes.key_stride, rows, features);
        }
        T::template multiply_rows<TILES, COLUMNS>(p, queries + warp_rows, keys);
        T::template multiply_rows<TILES, COLUMNS>(dp, douts + warp_rows, values);
        const bool is_cut = tiles.is_cut(sizes, start, stop, shift);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            int positions[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                positions[half] = ZIGZAG && !is_cut ? 0 : query_place<ZIGZAG>(sizes, extent, first + row_of<TILES>(m, half)) - shift;
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int half = e / 2;
                    const int i = first + row_of<TILES>(m, half), j = start + column_of(n) + e % 2;
                    float exponent = p[m][n][e] * scale_of_two - log_sum[m][half], share = 1.0f;
                    if (HAS_EXTRAS) {
                        if (i < extent.queries && j < stop) {
                            exponent += LOG2_E * bias_of(arguments, sizes, 6, head, i, j);
                        }
                        share = dropout_factor(arguments, sizes, key[m][half], j + whole_shift(sizes, shift));
                    }
                    const float value = power_of_two(exponent) * (share * dp[m][n][e] - dot[m][half]);
                    const bool is_seen = !is_cut || (j < stop && (!sizes.is_causal || j <= positions[half]));
                    dp[m][n][e] = is_seen ? value : 0.0f;
                }
            }
        }
        T::template multiply_weights<TILES, COLUMNS>(dq, dp, keys);
        start = next;
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of<TILES>(m, half);
#pragma unroll
            for (int f = 0; f < FEATURES / 8; f++) {
                if (row < count && f * 8 < features) {
                    const index at = query_offset + row * sizes.query_stride + column_of(f);
                    store_pair(arguments, sizes, 0, at, scale * dq[m][f][2 * half], scale * dq[m][f][2 * half + 1], sizes.merges);
                }
            }
        }
    }
}

// A tile of queries that is being copied to shared memory, with the values that each query needs.
template <int FEATURES, int COLUMNS, bool ZIGZAG> struct Stage {
    number queries[COLUMNS * Tile<FEATURES>::PITCH], douts[COLUMNS * Tile<FEATURES>::PITCH];
    float log_sums[COLUMNS], dots[COLUMNS];
    long_word keys[COLUMNS];
    // Used in a zigzag order only.
    index positions[COLUMNS];

    __device__ __forceinline__ void fetch(const Arguments &arguments, const Sizes &sizes, index image, index head, int start, bool drops) {
        const index heads = sizes.key_heads * sizes.group, query = image * sizes.queries + start;
        const int features = (int)sizes.features, count = least(COLUMNS, (int)sizes.queries - start);
        const number *q = read<number>(arguments, 1) + query * sizes.query_stride + head * features;
        const number *dout = read<number>(arguments, 0) + (query * heads + head) * features;
        Tile<FEATURES>::template fetch<COLUMNS, 128>(queries, q, sizes.query_stride, count, features);
        Tile<FEATURES>::template fetch<COLUMNS, 128>(douts, dout, heads * features, count, features);
        const int column = threadIdx.x;
        if (column < COLUMNS) {
            const bool is_there = column < count;
            const index at = (image * heads + head) * sizes.queries + start + column;
            // Queries beyond the last get probability zero.
            log_sums[column] = is_there ? LOG2_E * read<float>(arguments, 5)[at] : INFINITY;
            dots[column] = is_there ? ((const float *)arguments.scratch)[at] : 0.0f;
            if (ZIGZAG) {
                positions[column] = query_position(sizes, start + column);
            }
            keys[column] = drops ? query_key(arguments, sizes, image, head, start + column) : 0;
        }
    }
};

// The gradients of keys and values. Scores have one row for each key here, and one column for each
// query. Grid: tiles of keys, key heads of sequences.
template <int FEATURES, bool HAS_EXTRAS, bool ZIGZAG> __device__ __forceinline__ void key_gradient(const Arguments &arguments) {
    typedef Tile<FEATURES> T;
    const int TILES = 128 / FEATURES, ROWS = 64 * TILES, COLUMNS = 64 / TILES;
    const Sizes sizes = sizes_of<ZIGZAG>(arguments);
    const Extent extent(sizes);
    const int features = (int)sizes.features;
    const index image = blockIdx.y / sizes.key_heads, key_head = blockIdx.y % sizes.key_heads;
    const int first = (int)blockIdx.x * ROWS, count = least(ROWS, extent.keys - first);
    number *keys = (number *)dynamic_shared(), *values = keys + ROWS * T::PITCH;
    Stage<FEATURES, COLUMNS, ZIGZAG> *stages = (Stage<FEATURES, COLUMNS, ZIGZAG> *)(values + ROWS * T::PITCH);
    const int warp_rows = threadIdx.x / 32 * 16 * TILES * T::PITCH;
    const index key_offset = (image * sizes.keys + first) * sizes.key_stride + key_head * features;
    const float scale = arguments.numbers[0], scale_of_two = scale * LOG2_E;
    const bool drops = HAS_EXTRAS && sizes.drops;
    float dk[TILES][FEATURES / 8][4], dv[TILES][FEATURES / 8][4];
    clear(dk);
    clear(dv);
    // Queries before the tile's first key do not see the tile.
    int begin = sizes.is_causal && first > extent.offset ? (first - extent.offset) / COLUMNS * COLUMNS : 0;
    int greatest = first + count - 1;
    if (ZIGZAG) {
        begin = (int)first_query(sizes, first, count, COLUMNS);
        greatest = (int)key_span(sizes, first, count).greatest;
    }
    const int tiles = begin < extent.queries ? (extent.queries - begin + COLUMNS - 1) / COLUMNS : 0, steps = tiles * (int)sizes.group;
    T::template fetch<ROWS, 128>(keys, read<number>(arguments, 2) + key_offset, sizes.key_stride, count, features);
    T::template fetch<ROWS, 128>(values, read<number>(arguments, 3) + key_offset, sizes.key_stride, count, features);
    if (steps > 0) {
        stages[0].fetch(arguments, sizes, image, key_head * sizes.group, begin, drops);
    }
    for (int step = 0; step < steps; step++) {
        const index head = key_head * sizes.group + step / tiles;
        const int start = begin + step % tiles * COLUMNS;
        const Stage<FEATURES, COLUMNS, ZIGZAG> &stage = stages[step % 2];
        float p[TILES][COLUMNS / 8][4], dp[TILES][COLUMNS / 8][4];
        clear(p);
        clear(dp);
        wait_for_copies();
        __syncthreads();
        if (step + 1 < steps) {
            const int next = step + 1;
            stages[next % 2].fetch(arguments, sizes, image, key_head * sizes.group + next / tiles, begin + next % tiles * COLUMNS, drops);
        }
        T::template multiply_rows<TILES, COLUMNS>(p, keys + warp_rows, stage.queries);
        T::template multiply_rows<TILES, COLUMNS>(dp, values + warp_rows, stage.douts);
        int least_query = extent.offset + start;
        if (ZIGZAG) {
            least_query = (int)query_span(sizes, start, least(COLUMNS, extent.queries - start)).least;
        }
        const bool is_cut = sizes.is_causal && least_query < greatest;
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            int positions[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bool is_wanted = !ZIGZAG || is_cut || HAS_EXTRAS;
                positions[half] = is_wanted ? key_place<ZIGZAG>(sizes, first + row_of<TILES>(m, half)) : 0;
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int column = column_of(n) + e % 2;
                    const int i = start + column, j = first + row_of<TILES>(m, e / 2);
                    float exponent = p[m][n][e] * scale_of_two - stage.log_sums[column], share = 1.0f;
                    if (HAS_EXTRAS) {
                        if (i < extent.queries && j < extent.keys) {
                            exponent += LOG2_E * bias_of(arguments, sizes, 6, head, i, j);
                        }
                        share = dropout_factor(arguments, sizes, stage.keys[column], ZIGZAG ? positions[e / 2] : sizes.key + j);
                    }
                    const int place = ZIGZAG ? (int)stage.positions[column] : extent.offset + i;
                    const bool is_seen = !is_cut || positions[e / 2] <= place;
                    const float value = is_seen ? power_of_two(exponent) : 0.0f;
                    p[m][n][e] = share * value;
                    dp[m][n][e] = value * (share * dp[m][n][e] - stage.dots[column]);
                }
            }
        }
        T::template multiply_weights<TILES, COLUMNS>(dv, p, stage.douts);
        T::template multiply_weights<TILES, COLUMNS>(dk, dp, stage.queries);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of<TILES>(m, half);
#pragma unroll
            for (int f = 0; f < FEATURES / 8; f++) {
                if (row < count && f * 8 < features) {
                    const index at = key_offset + row * sizes.key_stride + column_of(f);
                    store_pair(arguments, sizes, 1, at, scale * dk[m][f][2 * half], scale * dk[m][f][2 * half + 1], false);
                    store_pair(arguments, sizes, 2, at, dv[m][f][2 * half], dv[m][f][2 * half + 1], false);
                }
            }
        }
    }
}
