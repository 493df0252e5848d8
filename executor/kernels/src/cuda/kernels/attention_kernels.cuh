// Softmax attention and its gradient without scores in memory (Dao et al. 2022, FlashAttention).
//
// A block owns 32 queries (or keys) of a head and loops over tiles of 32 keys (or queries). Eight
// threads share a row. Arithmetic is in single precision: these kernels work on every device, and
// are far slower than tensor cores. `attention.cuh` lists the sizes.

// Loads a tile of 32 rows to shared memory, in single precision. Rows from `count` on are zeros.
template <typename T>
__device__ __forceinline__ void load_tile(float *tile, const T *from, index stride, index count, int features) {
    for (int i = threadIdx.x; i < 32 * features; i += blockDim.x) {
        const int row = i / features, feature = i % features;
        tile[row * (features + 1) + feature] = row < count ? widen(from[row * stride + feature]) : 0.0f;
    }
}

// The dot product of two rows of shared memory.
__device__ __forceinline__ float dot_rows(const float *a, const float *b, int features) {
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < features; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

// Sum and maximum over the eight threads that share a row.
__device__ __forceinline__ float eight_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 2);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 4);
}
__device__ __forceinline__ float eight_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 4));
}

// Reads q, k, v (, table, buckets); writes out, log-sum-exp. Grid: tiles of queries, heads of
// sequences.
template <int FEATURES, bool ZIGZAG> __device__ __forceinline__ void attend(const Arguments &arguments) {
    const Sizes sizes = sizes_of<ZIGZAG>(arguments);
    const int features = (int)sizes.features, pitch = features + 1, row = threadIdx.x / 8, lane = threadIdx.x % 8;
    const index heads = sizes.key_heads * sizes.group, image = blockIdx.y / heads, head = blockIdx.y % heads;
    const index first = (index)blockIdx.x * 32, count = smaller(32, sizes.queries - first), i = first + row;
    float *queries = dynamic_shared(), *tile = queries + 32 * pitch, *probabilities = tile + 32 * pitch;
    const number *q = read<number>(arguments, 0) + (image * sizes.queries + first) * sizes.query_stride + head * features;
    const index key_offset = image * sizes.keys * sizes.key_stride + head / sizes.group * features;
    const number *k = read<number>(arguments, 1) + key_offset, *v = read<number>(arguments, 2) + key_offset;
    const Span own = query_span(sizes, first, count);
    const index end = sizes.is_causal && sizes.chunk == 0 ? smaller(sizes.keys, own.greatest + 1) : sizes.keys;
    const index position = query_position(sizes, i);
    const long_word key = sizes.drops ? query_key(arguments, sizes, image, head, i) : 0;
    float out[FEATURES], row_max = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        out[f] = 0.0f;
    }
    load_tile(queries, q, sizes.query_stride, count, features);
    for (index start = seen_tile(sizes, 0, end, own.greatest), stop; start < end; start = seen_tile(sizes, stop, end, own.greatest)) {
        stop = tile_end(sizes, start, 32);
        const index shift = position_shift(sizes, start), whole = whole_shift(sizes, shift);
        __syncthreads();
        load_tile(tile, k + start * sizes.key_stride, sizes.key_stride, stop - start, features);
        __syncthreads();
        float scores[4], new_max = -INFINITY;
        for (int c = 0; c < 4; c++) {
            const index j = start + lane + 8 * c;
            const bool is_seen = row < count && j < stop && (!sizes.is_causal || j + shift <= position);
            scores[c] = -INFINITY;
            if (is_seen) {
                scores[c] = arguments.numbers[0] * dot_rows(queries + row * pitch, tile + (lane + 8 * c) * pitch, features) +
                            bias_of(arguments, sizes, 3, head, i, j);
            }
            new_max = fmaxf(new_max, scores[c]);
        }
        new_max = fmaxf(row_max, eight_max(new_max));
        const float factor = row_max == -INFINITY ? 0.0f : expf(row_max - new_max);
        float part = 0.0f;
        for (int c = 0; c < 4; c++) {
            const float p = scores[c] == -INFINITY ? 0.0f : expf(scores[c] - new_max);
            part += p;
            probabilities[row * 33 + lane + 8 * c] = p * dropout_factor(arguments, sizes, key, start + whole + lane + 8 * c);
        }
        sum = sum * factor + eight_sum(part);
        row_max = new_max;
        __syncthreads();
        load_tile(tile, v + start * sizes.key_stride, sizes.key_stride, stop - start, features);
        __syncthreads();
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            const int feature = lane + 8 * f;
            if (feature < features) {
                float value = out[f] * factor;
#pragma unroll 4
                for (int j = 0; j < 32; j++) {
                    value += probabilities[row * 33 + j] * tile[j * pitch + feature];
                }
                out[f] = value;
            }
        }
    }
    // A query of a ring's step may see none of its keys.
    if (row >= count || sum == 0.0f) {
        return;
    }
    float *log_sums = written<float>(arguments, 1) + (image * heads + head) * sizes.queries + i;
    const index at = ((image * sizes.queries + i) * heads + head) * features;
    float log_sum = row_max + logf(sum), share = 1.0f / sum, old_weight = 0.0f;
    if (sizes.merges) {
        const float old_log_sum = *log_sums, larger = fmaxf(old_log_sum, log_sum);
        const float merged_log_sum = larger + logf(expf(old_log_sum - larger) + expf(log_sum - larger));
        share *= expf(log_sum - merged_log_sum);
        old_weight = expf(old_log_sum - merged_log_sum);
        log_sum = merged_log_sum;
    }
    __syncwarp(0xFFu << (threadIdx.x % 32 / 8 * 8));
    if (lane == 0) {
        *log_sums = log_sum;
    }
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        const int feature = lane + 8 * f;
        if (feature >= features) {
            continue;
        }
        if (sizes.is_single) {
            float *single = written<float>(arguments, 0) + at + feature;
            *single = sizes.merges ? old_weight * *single + share * out[f] : share * out[f];
        } else {
            narrow(written<number>(arguments, 0)[at + feature], share * out[f]);
        }
    }
}

// ---- gradient ----
// Reads dout, q, k, v, out, log-sum-exp (, table, buckets); writes dq, dk, dv.
// scratch: the dot product of out and dout for each head and query, then the partial gradients of
// the table If `is_single`, out, dq, dk and dv are in single precision.

// The gradient of queries, and the table's partial gradients. Grid: tiles of queries, heads of
// sequences.
template <int FEATURES, bool ZIGZAG> __device__ __forceinline__ void query_gradient(const Arguments &arguments) {
    const Sizes sizes = sizes_of<ZIGZAG>(arguments);
    const int features = (int)sizes.features, pitch = features + 1, row = threadIdx.x / 8, lane = threadIdx.x % 8;
    const index heads = sizes.key_heads * sizes.group, image = blockIdx.y / heads, head = blockIdx.y % heads;
    const index first = (index)blockIdx.x * 32, count = smaller(32, sizes.queries - first), i = first + row;
    float *queries = dynamic_shared(), *douts = queries + 32 * pitch, *tile = douts + 32 * pitch, *scores = tile + 32 * pitch;
    const index output_offset = ((image * sizes.queries + first) * heads + head) * features;
    const index query_offset = (image * sizes.queries + first) * sizes.query_stride + head * features;
    const index key_offset = image * sizes.keys * sizes.key_stride + head / sizes.group * features;
    const number *k = read<number>(arguments, 2) + key_offset, *v = read<number>(arguments, 3) + key_offset;
    const Span own = query_span(sizes, first, count);
    const index end = sizes.is_causal && sizes.chunk == 0 ? smaller(sizes.keys, own.greatest + 1) : sizes.keys;
    const index position = query_position(sizes, i);
    const index row_index = (image * heads + head) * sizes.queries + (row < count ? i : first);
    const float log_sum = read<float>(arguments, 5)[row_index], product = ((const float *)arguments.scratch)[row_index];
    const long_word key = sizes.drops ? query_key(arguments, sizes, image, head, i) : 0;
    float dq[FEATURES], bucket_gradient = 0.0f;
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        dq[f] = 0.0f;
    }
    load_tile(queries, read<number>(arguments, 1) + query_offset, sizes.query_stride, count, features);
    load_tile(douts, read<number>(arguments, 0) + output_offset, heads * features, count, features);
    for (index start = seen_tile(sizes, 0, end, own.greatest), stop; start < end; start = seen_tile(sizes, stop, end, own.greatest)) {
        stop = tile_end(sizes, start, 32);
        const index rows = stop - start, shift = position_shift(sizes, start), whole = whole_shift(sizes, shift);
        float p[4];
        __syncthreads();
        load_tile(tile, k + start * sizes.key_stride, sizes.key_stride, rows, features);
        __syncthreads();
        for (int c = 0; c < 4; c++) {
            const index j = start + lane + 8 * c;
            p[c] = 0.0f;
            if (row < count && j < stop && (!sizes.is_causal || j + shift <= position)) {
                p[c] = expf(arguments.numbers[0] * dot_rows(queries + row * pitch, tile + (lane + 8 * c) * pitch, features) +
                            bias_of(arguments, sizes, 6, head, i, j) - log_sum);
            }
        }
        __syncthreads();
        load_tile(tile, v + start * sizes.key_stride, sizes.key_stride, rows, features);
        __syncthreads();
        for (int c = 0; c < 4; c++) {
            const float share = dropout_factor(arguments, sizes, key, start + whole + lane + 8 * c);
            const float dp = dot_rows(douts + row * pitch, tile + (lane + 8 * c) * pitch, features);
            scores[row * 33 + lane + 8 * c] = p[c] * (share * dp - product);
        }
        __syncthreads();
        load_tile(tile, k + start * sizes.key_stride, sizes.key_stride, rows, features);
        __syncthreads();
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            const int feature = lane + 8 * f;
            if (feature < features) {
                float value = 0.0f;
#pragma unroll 4
                for (int j = 0; j < 32; j++) {
                    value += scores[row * 33 + j] * tile[j * pitch + feature];
                }
                dq[f] += arguments.numbers[0] * value;
            }
        }
        if ((index)threadIdx.x < sizes.buckets) {
            const int *buckets = read<int>(arguments, 7);
            for (index a = 0; a < count; a++) {
                for (index b = 0; b < rows; b++) {
                    if (buckets[start + b + sizes.queries - 1 - first - a] == (int)threadIdx.x) {
                        bucket_gradient += scores[a * 33 + b];
                    }
                }
            }
        }
    }
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        const int feature = lane + 8 * f;
        if (row < count && feature < features) {
            store_gradient(arguments, sizes, 0, query_offset + row * sizes.query_stride + feature, dq[f], sizes.merges);
        }
    }
    if ((index)threadIdx.x < sizes.buckets) {
        float *parts = (float *)arguments.scratch + sizes.batch * heads * sizes.queries;
        const index part = image * gridDim.x + blockIdx.x;
        parts[(part * sizes.buckets + threadIdx.x) * heads + head] = bucket_gradient;
    }
}

// The gradients of keys and values. Grid: tiles of keys, key heads of sequences.
template <int FEATURES, bool ZIGZAG> __device__ __forceinline__ void key_gradient(const Arguments &arguments) {
    const Sizes sizes = sizes_of<ZIGZAG>(arguments);
    const int features = (int)sizes.features, pitch = features + 1, row = threadIdx.x / 8, lane = threadIdx.x % 8;
    const index heads = sizes.key_heads * sizes.group, image = blockIdx.y / sizes.key_heads, key_head = blockIdx.y % sizes.key_heads;
    const index first = (index)blockIdx.x * 32, count = smaller(32, sizes.keys - first), j = first + row;
    float *keys = dynamic_shared(), *values = keys + 32 * pitch, *tile = values + 32 * pitch;
    float *probabilities = tile + 32 * pitch, *scores = probabilities + 32 * 33;
    const index key_offset = (image * sizes.keys + first) * sizes.key_stride + key_head * features;
    float dk[FEATURES], dv[FEATURES];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        dk[f] = dv[f] = 0.0f;
    }
    load_tile(keys, read<number>(arguments, 2) + key_offset, sizes.key_stride, count, features);
    load_tile(values, read<number>(arguments, 3) + key_offset, sizes.key_stride, count, features);
    // Queries before the tile's first key do not see the tile.
    const index begin = first_query(sizes, first, count, 32);
    const index position = key_position(sizes, j), whole = sizes.chunk == 0 ? sizes.key + j : position;
    for (index head = key_head * sizes.group; head < (key_head + 1) * sizes.group; head++) {
        for (index start = begin; start < sizes.queries; start += 32) {
            const index rows = smaller(32, sizes.queries - start);
            const number *q = read<number>(arguments, 1) + (image * sizes.queries + start) * sizes.query_stride + head * features;
            const number *dout = read<number>(arguments, 0) + ((image * sizes.queries + start) * heads + head) * features;
            const index row_offset = (image * heads + head) * sizes.queries + start;
            float p[4];
            __syncthreads();
            load_tile(tile, q, sizes.query_stride, rows, features);
            __syncthreads();
            for (int c = 0; c < 4; c++) {
                const int column = lane + 8 * c;
                const index i = start + column;
                p[c] = 0.0f;
                if (row < count && column < rows && (!sizes.is_causal || position <= query_position(sizes, i))) {
                    p[c] = expf(arguments.numbers[0] * dot_rows(keys + row * pitch, tile + column * pitch, features) +
                                bias_of(arguments, sizes, 6, head, i, j) - read<float>(arguments, 5)[row_offset + column]);
                }
            }
            __syncthreads();
            load_tile(tile, dout, heads * features, rows, features);
            __syncthreads();
            for (int c = 0; c < 4; c++) {
                const int column = lane + 8 * c;
                float share = 1.0f, product = 0.0f;
                if (column < rows) {
                    product = ((const float *)arguments.scratch)[row_offset + column];
                    const long_word key = sizes.drops ? query_key(arguments, sizes, image, head, start + column) : 0;
                    share = dropout_factor(arguments, sizes, key, whole);
                }
                const float dp = dot_rows(values + row * pitch, tile + column * pitch, features);
                probabilities[row * 33 + column] = p[c] * share;
                scores[row * 33 + column] = p[c] * (share * dp - product);
            }
            __syncthreads();
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
                const int feature = lane + 8 * f;
                if (feature < features) {
                    float value = 0.0f;
#pragma unroll 4
                    for (int i = 0; i < 32; i++) {
                        value += probabilities[row * 33 + i] * tile[i * pitch + feature];
                    }
                    dv[f] += value;
                }
            }
            __syncthreads();
            load_tile(tile, q, sizes.query_stride, rows, features);
            __syncthreads();
#pragma unroll
            for (int f = 0; f < FEATURES; f++) {
                const int feature = lane + 8 * f;
                if (feature < features) {
                    float value = 0.0f;
#pragma unroll 4
                    for (int i = 0; i < 32; i++) {
                        value += scores[row * 33 + i] * tile[i * pitch + feature];
                    }
                    dk[f] += arguments.numbers[0] * value;
                }
            }
        }
    }
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        const int feature = lane + 8 * f;
        if (row < count && feature < features) {
            const index at = key_offset + row * sizes.key_stride + feature;
            store_gradient(arguments, sizes, 1, at, dk[f], false);
            store_gradient(arguments, sizes, 2, at, dv[f], false);
        }
    }
}
