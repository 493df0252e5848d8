// Softmax attention and its gradient on tensor cores, in sixteen bits (Dao 2023, FlashAttention-2): four warps, each with 16 or 32 rows of
// queries (or keys), go over tiles of the others, which are on their way to shared memory meanwhile. Products are summed in single
// precision; what goes from one product into the next, probabilities and their slopes, is rounded to the run's precision.
// `attention.cuh` says what the sizes are.
//
// The gradient is two kernels, one by queries and one by keys, which both make the scores again: seven products for the five that one with
// atomic additions would make, and the same bits twice. Kernels `_plain` take neither dropout nor relative positions.

#define LOG2_E 1.44269504088896340736f

// The row of a thread's sums 0 and 1 (half 0), and 2 and 3 (half 1), of the rows of its block.
template <int TILES> __device__ __forceinline__ int row_of(int m, int half) {
    return threadIdx.x / 32 * 16 * TILES + m * 16 + half * 8 + threadIdx.x % 32 / 4;
}
// The column of its first sum of the n-th eight.
__device__ __forceinline__ int column_of(int n) { return n * 8 + threadIdx.x % 4 * 2; }

// The sizes that are counted with in every tile, in registers half as wide.
struct Extent {
    int queries, keys, offset;
    __device__ __forceinline__ explicit Extent(const Sizes &sizes)
        : queries((int)sizes.queries), keys((int)sizes.keys), offset((int)sizes.offset) {}
};
__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

// Two numbers side by side.
__device__ __forceinline__ void put_pair(const Arguments &arguments, const Sizes &sizes, int place, index at, float low, float high,
                                         bool adds) {
    if (sizes.is_single) {
        float *single = written<float>(arguments, place) + at;
        single[0] = adds ? single[0] + low : low;
        single[1] = adds ? single[1] + high : high;
    } else {
        *(word *)(written<number>(arguments, place) + at) = pack(low, high);
    }
}

// Reads q, k, v (, table, buckets); writes out, log-sum-exp. The grid: tiles of 128 queries by heads of sequences.
template <int FEATURES, bool HAS_EXTRAS> __device__ __forceinline__ void attend(const Arguments &arguments) {
    typedef Tile<FEATURES> T;
    const int TILES = 2, ROWS = 64 * TILES, COLUMNS = 64;
    const Sizes sizes = sizes_of(arguments);
    const Extent extent(sizes);
    const int features = (int)sizes.features;
    const index heads = sizes.key_heads * sizes.group, image = blockIdx.y / heads, head = blockIdx.y % heads;
    // Causal attention's last queries see the most keys: they begin first.
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, count = least(ROWS, extent.queries - first);
    number *queries = (number *)dynamic_shared(), *keys = queries + ROWS * T::WIDE, *values = keys + COLUMNS * T::WIDE;
    const number *own = queries + threadIdx.x / 32 * 16 * TILES * T::WIDE;
    const number *q = read<number>(arguments, 0) + (image * sizes.queries + first) * sizes.query_stride + head * features;
    const index of_keys = image * sizes.keys * sizes.key_stride + head / sizes.group * features;
    const number *k = read<number>(arguments, 1) + of_keys, *v = read<number>(arguments, 2) + of_keys;
    const int end = sizes.is_causal ? least(extent.keys, extent.offset + first + count) : extent.keys;
    const float scale = arguments.numbers[0], scale_of_two = scale * LOG2_E, unscale = 1.0f / scale;
    float out[TILES][FEATURES / 8][4], largest[TILES][2], sum[TILES][2];
    long_word key[TILES][2];
    clear(out);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[m][half] = -INFINITY;
            sum[m][half] = 0.0f;
            key[m][half] = HAS_EXTRAS && sizes.drops ? query_key(arguments, sizes, image, head, first + row_of<TILES>(m, half)) : 0;
        }
    }
    T::template fetch<ROWS, 128>(queries, q, sizes.query_stride, count, features);
    T::template fetch<COLUMNS, 128>(keys, k, sizes.key_stride, least(COLUMNS, extent.keys), features);
    for (int start = 0; start < end; start += COLUMNS) {
        float scores[TILES][COLUMNS / 8][4];
        clear(scores);
        // The keys are there, and nobody reads the values of the tile before any more.
        wait_for_copies();
        __syncthreads();
        const int there = least(COLUMNS, extent.keys - start);
        T::template fetch<COLUMNS, 128>(values, v + (index)start * sizes.key_stride, sizes.key_stride, there, features);
        T::template multiply_rows<TILES, COLUMNS>(scores, own, keys);
        const bool is_cut = start + COLUMNS > extent.keys || (sizes.is_causal && start + COLUMNS > extent.offset + first);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int i = first + row_of<TILES>(m, half);
                float most = largest[m][half];
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &score = scores[m][n][2 * half + e];
                        const int j = start + column_of(n) + e;
                        if (HAS_EXTRAS && i < extent.queries && j < extent.keys) {
                            score += unscale * bias_of(arguments, sizes, 3, head, i, j);
                        }
                        if (is_cut && (j >= extent.keys || (sizes.is_causal && j > extent.offset + i))) {
                            score = -INFINITY;
                        }
                        most = fmaxf(most, score);
                    }
                }
                // Finite from the first tile on: every query sees the first key.
                most = four_largest(most);
                const float base = most * scale_of_two, factor = power_of_two(largest[m][half] * scale_of_two - base);
                float part = 0.0f;
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &score = scores[m][n][2 * half + e];
                        score = power_of_two(score * scale_of_two - base);
                        part += score;
                        if (HAS_EXTRAS) {
                            score *= kept_share(arguments, sizes, key[m][half], start + column_of(n) + e);
                        }
                    }
                }
                sum[m][half] = sum[m][half] * factor + part;
                largest[m][half] = most;
#pragma unroll
                for (int f = 0; f < FEATURES / 8; f++) {
                    out[m][f][2 * half] *= factor;
                    out[m][f][2 * half + 1] *= factor;
                }
            }
        }
        // The values are there, and nobody reads the keys any more.
        wait_for_copies();
        __syncthreads();
        const int next = start + COLUMNS;
        if (next < end) {
            const int left = least(COLUMNS, extent.keys - next);
            T::template fetch<COLUMNS, 128>(keys, k + (index)next * sizes.key_stride, sizes.key_stride, left, features);
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
            float log_sum = largest[m][half] * scale + logf(total), share = 1.0f / total, earlier = 0.0f;
            if (sizes.merges && row < count) {
                const float before = *log_sums, most = fmaxf(before, log_sum);
                const float both = most + logf(expf(before - most) + expf(log_sum - most));
                share *= expf(log_sum - both);
                earlier = expf(before - both);
                log_sum = both;
            }
            __syncwarp(0xFFFFFFFFu);
            if (row >= count) {
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
                    single[0] = earlier * single[0] + low;
                    single[1] = earlier * single[1] + high;
                } else {
                    put_pair(arguments, sizes, 0, place, low, high, false);
                }
            }
        }
    }
}
TENSOR_KERNEL(attention_tensor_64) { attend<64, true>(arguments); }
TENSOR_KERNEL(attention_tensor_128) { attend<128, true>(arguments); }
TENSOR_KERNEL(attention_tensor_64_plain) { attend<64, false>(arguments); }
TENSOR_KERNEL(attention_tensor_128_plain) { attend<128, false>(arguments); }

// ---- the gradient ------------------------------------------------------------------------------------------------------------------
// Reads dout, q, k, v, out, log-sum-exp (, table, buckets); writes dq, dk, dv. scratch: of each query and head the product of out and dout.

// The grid: tiles of queries by heads of sequences.
template <int FEATURES, bool HAS_EXTRAS> __device__ __forceinline__ void query_gradient(const Arguments &arguments) {
    typedef Tile<FEATURES> T;
    const int TILES = 128 / FEATURES, ROWS = 64 * TILES, COLUMNS = 64;
    const Sizes sizes = sizes_of(arguments);
    const Extent extent(sizes);
    const int features = (int)sizes.features;
    const index heads = sizes.key_heads * sizes.group, image = blockIdx.y / heads, head = blockIdx.y % heads;
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, count = least(ROWS, extent.queries - first);
    number *queries = (number *)dynamic_shared(), *slopes = queries + ROWS * T::WIDE, *stages = slopes + ROWS * T::WIDE;
    const int own = threadIdx.x / 32 * 16 * TILES * T::WIDE;
    const index of_queries = (image * sizes.queries + first) * sizes.query_stride + head * features;
    const index output = ((image * sizes.queries + first) * heads + head) * features;
    const index of_keys = image * sizes.keys * sizes.key_stride + head / sizes.group * features;
    const number *k = read<number>(arguments, 2) + of_keys, *v = read<number>(arguments, 3) + of_keys;
    const int end = sizes.is_causal ? least(extent.keys, extent.offset + first + count) : extent.keys;
    const float scale = arguments.numbers[0], scale_of_two = scale * LOG2_E;
    float dq[TILES][FEATURES / 8][4], log_sum[TILES][2], product[TILES][2];
    long_word key[TILES][2];
    clear(dq);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of<TILES>(m, half);
            const index at = (image * heads + head) * sizes.queries + first + row;
            log_sum[m][half] = row < count ? LOG2_E * read<float>(arguments, 5)[at] : 0.0f;
            product[m][half] = row < count ? ((const float *)arguments.scratch)[at] : 0.0f;
            key[m][half] = HAS_EXTRAS && sizes.drops ? query_key(arguments, sizes, image, head, first + row) : 0;
        }
    }
    T::template fetch<ROWS, 128>(queries, read<number>(arguments, 1) + of_queries, sizes.query_stride, count, features);
    T::template fetch<ROWS, 128>(slopes, read<number>(arguments, 0) + output, heads * features, count, features);
    T::template fetch<COLUMNS, 128>(stages, k, sizes.key_stride, least(COLUMNS, extent.keys), features);
    T::template fetch<COLUMNS, 128>(stages + COLUMNS * T::WIDE, v, sizes.key_stride, least(COLUMNS, extent.keys), features);
    int stage = 0;
    for (int start = 0; start < end; start += COLUMNS) {
        const number *keys = stages + stage * 2 * COLUMNS * T::WIDE, *values = keys + COLUMNS * T::WIDE;
        float p[TILES][COLUMNS / 8][4], slope[TILES][COLUMNS / 8][4];
        clear(p);
        clear(slope);
        // This tile is there, and nobody reads the one before any more.
        wait_for_copies();
        __syncthreads();
        stage ^= 1;
        const int next = start + COLUMNS;
        if (next < end) {
            number *to = stages + stage * 2 * COLUMNS * T::WIDE;
            const int rows = least(COLUMNS, extent.keys - next);
            T::template fetch<COLUMNS, 128>(to, k + (index)next * sizes.key_stride, sizes.key_stride, rows, features);
            T::template fetch<COLUMNS, 128>(to + COLUMNS * T::WIDE, v + (index)next * sizes.key_stride, sizes.key_stride, rows, features);
        }
        T::template multiply_rows<TILES, COLUMNS>(p, queries + own, keys);
        T::template multiply_rows<TILES, COLUMNS>(slope, slopes + own, values);
        const bool is_cut = start + COLUMNS > extent.keys || (sizes.is_causal && start + COLUMNS > extent.offset + first);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int half = e / 2;
                    const int i = first + row_of<TILES>(m, half), j = start + column_of(n) + e % 2;
                    float exponent = p[m][n][e] * scale_of_two - log_sum[m][half], share = 1.0f;
                    if (HAS_EXTRAS) {
                        if (i < extent.queries && j < extent.keys) {
                            exponent += LOG2_E * bias_of(arguments, sizes, 6, head, i, j);
                        }
                        share = kept_share(arguments, sizes, key[m][half], j);
                    }
                    const float value = power_of_two(exponent) * (share * slope[m][n][e] - product[m][half]);
                    const bool is_seen = !is_cut || (j < extent.keys && (!sizes.is_causal || j <= extent.offset + i));
                    slope[m][n][e] = is_seen ? value : 0.0f;
                }
            }
        }
        T::template multiply_weights<TILES, COLUMNS>(dq, slope, keys);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of<TILES>(m, half);
#pragma unroll
            for (int f = 0; f < FEATURES / 8; f++) {
                if (row < count && f * 8 < features) {
                    const index at = of_queries + row * sizes.query_stride + column_of(f);
                    put_pair(arguments, sizes, 0, at, scale * dq[m][f][2 * half], scale * dq[m][f][2 * half + 1], sizes.merges);
                }
            }
        }
    }
}
TENSOR_KERNEL(attention_tensor_query_gradient_64) { query_gradient<64, true>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_128) { query_gradient<128, true>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_64_plain) { query_gradient<64, false>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_128_plain) { query_gradient<128, false>(arguments); }

// A tile of queries on its way, with what is known of each of them.
template <int FEATURES, int COLUMNS> struct Stage {
    number queries[COLUMNS * Tile<FEATURES>::WIDE], slopes[COLUMNS * Tile<FEATURES>::WIDE];
    float log_sums[COLUMNS], products[COLUMNS];
    long_word keys[COLUMNS];

    __device__ __forceinline__ void fetch(const Arguments &arguments, const Sizes &sizes, index image, index head, int start, bool drops) {
        const index heads = sizes.key_heads * sizes.group, query = image * sizes.queries + start;
        const int features = (int)sizes.features, count = least(COLUMNS, (int)sizes.queries - start);
        const number *q = read<number>(arguments, 1) + query * sizes.query_stride + head * features;
        const number *dout = read<number>(arguments, 0) + (query * heads + head) * features;
        Tile<FEATURES>::template fetch<COLUMNS, 128>(queries, q, sizes.query_stride, count, features);
        Tile<FEATURES>::template fetch<COLUMNS, 128>(slopes, dout, heads * features, count, features);
        const int column = threadIdx.x;
        if (column < COLUMNS) {
            const bool is_there = column < count;
            const index at = (image * heads + head) * sizes.queries + start + column;
            // What is not there has a probability of zero.
            log_sums[column] = is_there ? LOG2_E * read<float>(arguments, 5)[at] : INFINITY;
            products[column] = is_there ? ((const float *)arguments.scratch)[at] : 0.0f;
            keys[column] = drops ? query_key(arguments, sizes, image, head, start + column) : 0;
        }
    }
};

// The grid: tiles of keys by key heads of sequences. Scores have a row for each key here, and a column for each query.
template <int FEATURES, bool HAS_EXTRAS> __device__ __forceinline__ void key_gradient(const Arguments &arguments) {
    typedef Tile<FEATURES> T;
    const int TILES = 128 / FEATURES, ROWS = 64 * TILES, COLUMNS = 64 / TILES;
    const Sizes sizes = sizes_of(arguments);
    const Extent extent(sizes);
    const int features = (int)sizes.features;
    const index image = blockIdx.y / sizes.key_heads, key_head = blockIdx.y % sizes.key_heads;
    const int first = (int)blockIdx.x * ROWS, count = least(ROWS, extent.keys - first);
    number *keys = (number *)dynamic_shared(), *values = keys + ROWS * T::WIDE;
    Stage<FEATURES, COLUMNS> *stages = (Stage<FEATURES, COLUMNS> *)(values + ROWS * T::WIDE);
    const int own = threadIdx.x / 32 * 16 * TILES * T::WIDE;
    const index of_keys = (image * sizes.keys + first) * sizes.key_stride + key_head * features;
    const float scale = arguments.numbers[0], scale_of_two = scale * LOG2_E;
    const bool drops = HAS_EXTRAS && sizes.drops;
    float dk[TILES][FEATURES / 8][4], dv[TILES][FEATURES / 8][4];
    clear(dk);
    clear(dv);
    // Queries before the first key of the tile see none of it.
    const int begin = sizes.is_causal && first > extent.offset ? (first - extent.offset) / COLUMNS * COLUMNS : 0;
    const int tiles = begin < extent.queries ? (extent.queries - begin + COLUMNS - 1) / COLUMNS : 0, steps = tiles * (int)sizes.group;
    T::template fetch<ROWS, 128>(keys, read<number>(arguments, 2) + of_keys, sizes.key_stride, count, features);
    T::template fetch<ROWS, 128>(values, read<number>(arguments, 3) + of_keys, sizes.key_stride, count, features);
    if (steps > 0) {
        stages[0].fetch(arguments, sizes, image, key_head * sizes.group, begin, drops);
    }
    for (int step = 0; step < steps; step++) {
        const index head = key_head * sizes.group + step / tiles;
        const int start = begin + step % tiles * COLUMNS;
        const Stage<FEATURES, COLUMNS> &stage = stages[step % 2];
        float p[TILES][COLUMNS / 8][4], slope[TILES][COLUMNS / 8][4];
        clear(p);
        clear(slope);
        wait_for_copies();
        __syncthreads();
        if (step + 1 < steps) {
            const int next = step + 1;
            stages[next % 2].fetch(arguments, sizes, image, key_head * sizes.group + next / tiles, begin + next % tiles * COLUMNS, drops);
        }
        T::template multiply_rows<TILES, COLUMNS>(p, keys + own, stage.queries);
        T::template multiply_rows<TILES, COLUMNS>(slope, values + own, stage.slopes);
        const bool is_cut = sizes.is_causal && extent.offset + start < first + count;
#pragma unroll
        for (int m = 0; m < TILES; m++) {
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
                        share = kept_share(arguments, sizes, stage.keys[column], j);
                    }
                    const bool is_seen = !is_cut || j <= extent.offset + i;
                    const float value = is_seen ? power_of_two(exponent) : 0.0f;
                    p[m][n][e] = share * value;
                    slope[m][n][e] = value * (share * slope[m][n][e] - stage.products[column]);
                }
            }
        }
        T::template multiply_weights<TILES, COLUMNS>(dv, p, stage.slopes);
        T::template multiply_weights<TILES, COLUMNS>(dk, slope, stage.queries);
    }
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of<TILES>(m, half);
#pragma unroll
            for (int f = 0; f < FEATURES / 8; f++) {
                if (row < count && f * 8 < features) {
                    const index at = of_keys + row * sizes.key_stride + column_of(f);
                    put_pair(arguments, sizes, 1, at, scale * dk[m][f][2 * half], scale * dk[m][f][2 * half + 1], false);
                    put_pair(arguments, sizes, 2, at, dv[m][f][2 * half], dv[m][f][2 * half + 1], false);
                }
            }
        }
    }
}
TENSOR_KERNEL(attention_tensor_key_gradient_64) { key_gradient<64, true>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_128) { key_gradient<128, true>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_64_plain) { key_gradient<64, false>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_128_plain) { key_gradient<128, false>(arguments); }
