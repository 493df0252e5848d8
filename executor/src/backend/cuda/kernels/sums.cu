// Sums: of all elements, and of columns. Parts are summed by blocks into scratch memory, and the parts in their order by a second kernel.

// sizes: elements, whether squared; scratch: a double for each block
KERNEL(sum_parts) {
    const float *x = read<float>(arguments, 0);
    const bool squared = arguments.sizes[1] != 0;
    double sum = 0.0;
    for (index i = this_thread(); i < arguments.sizes[0]; i += all_threads()) {
        const double value = x[i];
        sum += squared ? value * value : value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        ((double *)arguments.scratch)[blockIdx.x] = sum;
    }
}

// sizes: parts; one block
KERNEL(sum_of_parts) {
    double sum = 0.0;
    for (index i = threadIdx.x; i < arguments.sizes[0]; i += blockDim.x) {
        sum += ((const double *)arguments.scratch)[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        put(arguments, written<float>(arguments, 0), (float)sum);
    }
}

// The sums of `SUMS` functions of a column's elements over the rows of a chunk, to scratch `[chunk][sum][column]`. A block is 32 columns by
// 8 rows at a time; the grid is columns by chunks.
template <int SUMS, typename F>
__device__ __forceinline__ void sum_columns(const Arguments &arguments, index rows, index columns, index rows_of_chunk, F f) {
    __shared__ float sums[SUMS][8][33];
    const int lane = threadIdx.x % 32, row_lane = threadIdx.x / 32;
    const index column = (index)blockIdx.x * 32 + lane;
    const index first = (index)blockIdx.y * rows_of_chunk;
    const index end = first + rows_of_chunk < rows ? first + rows_of_chunk : rows;
    float own[SUMS];
    for (int sum = 0; sum < SUMS; sum++) {
        own[sum] = 0.0f;
    }
    if (column < columns) {
        for (index row = first + row_lane; row < end; row += 8) {
            f(row, column, own);
        }
    }
    for (int sum = 0; sum < SUMS; sum++) {
        sums[sum][row_lane][lane] = own[sum];
    }
    __syncthreads();
    if (row_lane == 0 && column < columns) {
        for (int sum = 0; sum < SUMS; sum++) {
            float total = 0.0f;
            for (int other = 0; other < 8; other++) {
                total += sums[sum][other][lane];
            }
            ((float *)arguments.scratch)[((index)blockIdx.y * SUMS + sum) * columns + column] = total;
        }
    }
}

// sizes: rows, columns, rows of a chunk, elements from a row to the next
KERNEL(column_parts) {
    const number *dy = read<number>(arguments, 0);
    const index stride = arguments.sizes[3];
    sum_columns<1>(arguments, arguments.sizes[0], arguments.sizes[1], arguments.sizes[2],
                   [=](index row, index column, float *sums) { sums[0] += widen(dy[row * stride + column]); });
}

// Reads dy, x, saved [rows, 2]; sums of dy x̂ and of dy. sizes: rows, features, rows of a chunk
KERNEL(layer_norm_weight_parts) {
    const number *dy = read<number>(arguments, 0), *x = read<number>(arguments, 1);
    const float *saved = read<float>(arguments, 2);
    const index features = arguments.sizes[1];
    sum_columns<2>(arguments, arguments.sizes[0], features, arguments.sizes[2], [=](index row, index column, float *sums) {
        const float slope = widen(dy[row * features + column]);
        sums[0] += slope * ((widen(x[row * features + column]) - saved[2 * row]) * saved[2 * row + 1]);
        sums[1] += slope;
    });
}

// Reads dy, x, saved [rows]. sizes: rows, features, rows of a chunk
KERNEL(rms_norm_weight_parts) {
    const number *dy = read<number>(arguments, 0), *x = read<number>(arguments, 1);
    const float *saved = read<float>(arguments, 2);
    const index features = arguments.sizes[1];
    sum_columns<1>(arguments, arguments.sizes[0], features, arguments.sizes[2], [=](index row, index column, float *sums) {
        sums[0] += widen(dy[row * features + column]) * (widen(x[row * features + column]) * saved[row]);
    });
}

// Sums what the kernels above left; each sum to a write. sizes: chunks, columns, sums
KERNEL(column_sums) {
    const float *parts = (const float *)arguments.scratch;
    const index chunks = arguments.sizes[0], columns = arguments.sizes[1], sums = arguments.sizes[2];
    for (index i = this_thread(); i < sums * columns; i += all_threads()) {
        double total = 0.0;
        for (index chunk = 0; chunk < chunks; chunk++) {
            total += parts[chunk * sums * columns + i];
        }
        put(arguments, written<float>(arguments, (int)(i / columns)) + i % columns, (float)total);
    }
}

// ---- batch normalisation's sums, of groups of rows ---------------------------------------------------------------------------------

// Sums of a column's elements, and of their squares, each less the first of the group: so that digits far from zero are kept.
// sizes: positions, channels, rows of a chunk, chunks; the grid's third dimension is groups; scratch [group][chunk][2][channel]
template <typename F> __device__ __forceinline__ void sum_groups(const Arguments &arguments, F f) {
    const index positions = arguments.sizes[0], channels = arguments.sizes[1], chunks = arguments.sizes[3];
    Arguments of_group = arguments;
    of_group.scratch = (float *)arguments.scratch + (index)blockIdx.z * chunks * 2 * channels;
    sum_columns<2>(of_group, positions, channels, arguments.sizes[2], f);
}

KERNEL(batch_norm_parts) {
    const number *x = read<number>(arguments, 0) + (index)blockIdx.z * arguments.sizes[0] * arguments.sizes[1];
    const index channels = arguments.sizes[1];
    sum_groups(arguments, [=](index row, index column, float *sums) {
        const float apart = widen(x[row * channels + column]) - widen(x[column]);
        sums[0] += apart;
        sums[1] += apart * apart;
    });
}

// Reads dy, x, scale, saved.
KERNEL(batch_norm_gradient_parts) {
    const index positions = arguments.sizes[0], channels = arguments.sizes[1], group = blockIdx.z;
    const number *dy = read<number>(arguments, 0) + group * positions * channels;
    const number *x = read<number>(arguments, 1) + group * positions * channels;
    const float *saved = read<float>(arguments, 3) + group * 2 * channels;
    sum_groups(arguments, [=](index row, index column, float *sums) {
        const float slope = widen(dy[row * channels + column]);
        sums[0] += slope;
        sums[1] += slope * ((widen(x[row * channels + column]) - saved[column]) * saved[channels + column]);
    });
}

// Writes y (not here), saved, and statistics where there is a third write. sizes: positions, channels, groups, chunks, whether statistics
KERNEL(batch_norm_statistics) {
    const number *x = read<number>(arguments, 0);
    float *saved = written<float>(arguments, 1);
    const index positions = arguments.sizes[0], channels = arguments.sizes[1], groups = arguments.sizes[2];
    const index chunks = arguments.sizes[3];
    const double count = (double)positions;
    for (index channel = this_thread(); channel < channels; channel += all_threads()) {
        double means = 0.0, variances = 0.0;
        for (index group = 0; group < groups; group++) {
            const float *parts = (const float *)arguments.scratch + group * chunks * 2 * channels + channel;
            double sum = 0.0, squares = 0.0;
            for (index chunk = 0; chunk < chunks; chunk++) {
                sum += parts[chunk * 2 * channels];
                squares += parts[(chunk * 2 + 1) * channels];
            }
            const double apart = sum / count;
            double spread = squares - sum * apart;
            spread = spread > 0.0 ? spread : 0.0;
            const double mean = widen(x[group * positions * channels + channel]) + apart;
            saved[group * 2 * channels + channel] = (float)mean;
            saved[(group * 2 + 1) * channels + channel] = (float)(1.0 / sqrt(spread / count + 1e-5));
            means += (float)mean;
            variances += spread / (count - 1.0);
        }
        if (arguments.sizes[4] != 0) {
            put(arguments, written<float>(arguments, 2) + channel, (float)means);
            put(arguments, written<float>(arguments, 2) + channels + channel, (float)variances);
        }
    }
}

// Writes sums [groups, 2, channels]. sizes: channels, groups, chunks
KERNEL(batch_norm_gradient_sums) {
    const index channels = arguments.sizes[0], groups = arguments.sizes[1], chunks = arguments.sizes[2];
    float *sums = written<float>(arguments, 1);
    for (index i = this_thread(); i < groups * 2 * channels; i += all_threads()) {
        const index group = i / (2 * channels), within = i % (2 * channels);
        double total = 0.0;
        for (index chunk = 0; chunk < chunks; chunk++) {
            total += ((const float *)arguments.scratch)[(group * chunks + chunk) * 2 * channels + within];
        }
        sums[i] = (float)total;
    }
}
