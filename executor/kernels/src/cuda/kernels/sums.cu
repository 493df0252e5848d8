// Sums of all elements, and of columns. Blocks leave partial sums in scratch memory; a second
// kernel adds them in order.

// Partial sums of all elements, or of their squares. sizes: elements, whether to square; scratch:
// one double for each block
KERNEL(sum_parts) {
    const float *x = read<float>(arguments, 0);
    const bool squared = arguments.sizes[1] != 0;
    double sum = 0.0;
    for (index i = thread_index(); i < arguments.sizes[0]; i += thread_count()) {
        const double value = x[i];
        sum += squared ? value * value : value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        ((double *)arguments.scratch)[blockIdx.x] = sum;
    }
}

// Adds the partial sums. sizes: partial sums; one block
KERNEL(sum_of_parts) {
    double sum = 0.0;
    for (index i = threadIdx.x; i < arguments.sizes[0]; i += blockDim.x) {
        sum += ((const double *)arguments.scratch)[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        store(arguments, written<float>(arguments, 0), (float)sum);
    }
}

// `SUMS` sums of functions of a column's elements, over the rows of a chunk, to scratch memory
// [chunk][sum][column]. `load(column, constants)` fetches a column's constants, and `f(row,
// constants, x, sums)` adds an element to the sums. A block has 64 columns, `WIDTH` for each
// thread. Grid: columns, chunks.
template <int WIDTH, int SUMS, int READS, int CONSTANTS, typename L, typename F>
__device__ __forceinline__ void sum_columns_by(const Arguments &arguments, const number *const (&from)[READS], index stride, index rows,
                                               index columns, index rows_of_chunk, L load, F f) {
    const int LANES = 64 / WIDTH, ROWS = 256 / LANES;
    struct alignas(sizeof(number) * WIDTH) Several {
        number numbers[WIDTH];
    };
    __shared__ float sums[SUMS][ROWS][65];
    const int lane = threadIdx.x % LANES, row_lane = threadIdx.x / LANES;
    const index column = (index)blockIdx.x * 64 + lane * WIDTH, first = (index)blockIdx.y * rows_of_chunk;
    const index end = first + rows_of_chunk < rows ? first + rows_of_chunk : rows;
    float own[WIDTH][SUMS], constants[WIDTH][CONSTANTS];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        for (int sum = 0; sum < SUMS; sum++) {
            own[i][sum] = 0.0f;
        }
        if (column + i < columns) {
            load(column + i, constants[i]);
        }
    }
    if (column < columns) {
#pragma unroll 4
        for (index row = first + row_lane; row < end; row += ROWS) {
            Several given[READS];
            for (int operand = 0; operand < READS; operand++) {
                given[operand] = *(const Several *)(from[operand] + row * stride + column);
            }
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                float x[READS];
                for (int operand = 0; operand < READS; operand++) {
                    x[operand] = widen(given[operand].numbers[i]);
                }
                f(row, constants[i], x, own[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        for (int sum = 0; sum < SUMS; sum++) {
            sums[sum][row_lane][lane * WIDTH + i] = own[i][sum];
        }
    }
    __syncthreads();
    const int own_column = threadIdx.x % 64, own_sum = threadIdx.x / 64;
    if (own_sum < SUMS && (index)blockIdx.x * 64 + own_column < columns) {
        float total = 0.0f;
        for (int other = 0; other < ROWS; other++) {
            total += sums[own_sum][other][own_column];
        }
        ((float *)arguments.scratch)[((index)blockIdx.y * SUMS + own_sum) * columns + (index)blockIdx.x * 64 + own_column] = total;
    }
}

// The same with as many columns for each thread as one memory access moves, if rows are aligned;
// else one.
template <int SUMS, int READS, int CONSTANTS, typename L, typename F>
__device__ __forceinline__ void sum_columns(const Arguments &arguments, const number *const (&from)[READS], index stride, index rows,
                                            index columns, index rows_of_chunk, L load, F f) {
    const int width = 16 / sizeof(number);
    long_word addresses = (long_word)((stride | columns) * sizeof(number));
    for (int operand = 0; operand < READS; operand++) {
        addresses |= (long_word)from[operand];
    }
    if (addresses % 16 == 0) {
        sum_columns_by<width, SUMS, READS, CONSTANTS>(arguments, from, stride, rows, columns, rows_of_chunk, load, f);
    } else {
        sum_columns_by<1, SUMS, READS, CONSTANTS>(arguments, from, stride, rows, columns, rows_of_chunk, load, f);
    }
}

// Sums of chunks of each column. sizes: rows, columns, rows of a chunk, elements from one row to
// the next
KERNEL(column_parts) {
    const number *const from[] = {read<number>(arguments, 0)};
    sum_columns<1, 1, 1>(
        arguments, from, arguments.sizes[3], arguments.sizes[0], arguments.sizes[1], arguments.sizes[2], [](index, float *) {},
        [](index, const float *, const float *x, float *sums) { sums[0] += x[0]; });
}

// Sums of dy · x̂ and of dy. Reads dy, x, saved [rows, 2]. sizes: rows, features, rows of a chunk
KERNEL(layer_norm_weight_parts) {
    const number *const from[] = {read<number>(arguments, 0), read<number>(arguments, 1)};
    const float *saved = read<float>(arguments, 2);
    const index features = arguments.sizes[1];
    sum_columns<2, 2, 1>(
        arguments, from, features, arguments.sizes[0], features, arguments.sizes[2], [](index, float *) {},
        [=](index row, const float *, const float *x, float *sums) {
            sums[0] += x[0] * ((x[1] - saved[2 * row]) * saved[2 * row + 1]);
            sums[1] += x[0];
        });
}

// Sums of dy · x̂. Reads dy, x, saved [rows]. sizes: rows, features, rows of a chunk
KERNEL(rms_norm_weight_parts) {
    const number *const from[] = {read<number>(arguments, 0), read<number>(arguments, 1)};
    const float *saved = read<float>(arguments, 2);
    const index features = arguments.sizes[1];
    sum_columns<1, 2, 1>(
        arguments, from, features, arguments.sizes[0], features, arguments.sizes[2], [](index, float *) {},
        [=](index row, const float *, const float *x, float *sums) { sums[0] += x[0] * (x[1] * saved[row]); });
}

// The sum of parts[chunk * stride + i] over chunks. The eight warps of a block share 32
// neighbouring i; every thread gets its i's sum.
__device__ __forceinline__ double chunk_sum(const float *parts, index chunks, index stride, index i, bool is_valid) {
    __shared__ double sums[8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double own = 0.0;
    if (is_valid) {
#pragma unroll 4
        for (index chunk = warp; chunk < chunks; chunk += 8) {
            own += parts[chunk * stride + i];
        }
    }
    __syncthreads();
    sums[warp][lane] = own;
    __syncthreads();
    double total = 0.0;
    for (int other = 0; other < 8; other++) {
        total += sums[other][lane];
    }
    return total;
}

// Adds the chunks' sums, each sum to its own write. One block for 32 columns.
// sizes: chunks, columns, sums
KERNEL(column_sums) {
    const index chunks = arguments.sizes[0], columns = arguments.sizes[1], all = arguments.sizes[2] * columns;
    for (index first = (index)blockIdx.x * 32; first < all; first += (index)gridDim.x * 32) {
        const index i = first + threadIdx.x % 32;
        const double total = chunk_sum((const float *)arguments.scratch, chunks, all, i, i < all);
        if (threadIdx.x < 32 && i < all) {
            store(arguments, written<float>(arguments, (int)(i / columns)) + i % columns, (float)total);
        }
    }
}

// ---- sums for batch norm, over groups of rows ----

// Two sums for each column of each group. The grid's third dimension is groups; scratch memory is
// [group][chunk][2][channel]. sizes: positions, channels, rows of a chunk, chunks
template <int READS, int CONSTANTS, typename L, typename F>
__device__ __forceinline__ void sum_groups(const Arguments &arguments, const number *const (&from)[READS], L load, F f) {
    const index positions = arguments.sizes[0], channels = arguments.sizes[1], chunks = arguments.sizes[3];
    Arguments of_group = arguments;
    of_group.scratch = (float *)arguments.scratch + (index)blockIdx.z * chunks * 2 * channels;
    sum_columns<2, READS, CONSTANTS>(of_group, from, channels, positions, channels, arguments.sizes[2], load, f);
}

// Sums of a column's elements and of their squares, relative to the group's first element: this
// avoids cancellation if the mean is far from zero.
KERNEL(batch_norm_parts) {
    const number *x = read<number>(arguments, 0) + (index)blockIdx.z * arguments.sizes[0] * arguments.sizes[1];
    const number *const from[] = {x};
    sum_groups<1, 1>(
        arguments, from, [=](index column, float *constants) { constants[0] = widen(x[column]); },
        [](index, const float *constants, const float *given, float *sums) {
            const float deviation = given[0] - constants[0];
            sums[0] += deviation;
            sums[1] += deviation * deviation;
        });
}

// Sums of dy and of dy · x̂. Reads dy, x, scale, saved.
KERNEL(batch_norm_gradient_parts) {
    const index positions = arguments.sizes[0], channels = arguments.sizes[1], group = blockIdx.z;
    const number *const from[] = {read<number>(arguments, 0) + group * positions * channels,
                                  read<number>(arguments, 1) + group * positions * channels};
    const float *saved = read<float>(arguments, 3) + group * 2 * channels;
    const auto load = [=](index column, float *constants) {
        constants[0] = saved[column];
        constants[1] = saved[channels + column];
    };
    sum_groups<2, 2>(arguments, from, load, [](index, const float *constants, const float *given, float *sums) {
        sums[0] += given[0];
        sums[1] += given[0] * ((given[1] - constants[0]) * constants[1]);
    });
}

// Mean and reciprocal deviation of each group, from the chunks' sums. Reads x; writes saved (second
// write) and, if there is a third write, the statistics summed over groups. One block for 32
// channels.
// sizes: positions, channels, groups, chunks, whether there are statistics
KERNEL(batch_norm_statistics) {
    const number *x = read<number>(arguments, 0);
    float *saved = written<float>(arguments, 1);
    const index positions = arguments.sizes[0], channels = arguments.sizes[1], groups = arguments.sizes[2];
    const index chunks = arguments.sizes[3];
    const double count = (double)positions;
    for (index first = (index)blockIdx.x * 32; first < channels; first += (index)gridDim.x * 32) {
        const index channel = first + threadIdx.x % 32;
        const bool is_valid = channel < channels, is_first = is_valid && threadIdx.x < 32;
        double means = 0.0, variances = 0.0;
        for (index group = 0; group < groups; group++) {
            const float *parts = (const float *)arguments.scratch + group * chunks * 2 * channels;
            const double sum = chunk_sum(parts, chunks, 2 * channels, channel, is_valid);
            const double squares = chunk_sum(parts + channels, chunks, 2 * channels, channel, is_valid);
            const double deviation = sum / count;
            double squared_deviations = squares - sum * deviation;
            squared_deviations = squared_deviations > 0.0 ? squared_deviations : 0.0;
            if (is_first) {
                const double mean = widen(x[group * positions * channels + channel]) + deviation;
                saved[group * 2 * channels + channel] = (float)mean;
                saved[(group * 2 + 1) * channels + channel] = (float)(1.0 / sqrt(squared_deviations / count + 1e-5));
                means += (float)mean;
                variances += squared_deviations / (count - 1.0);
            }
        }
        if (is_first && arguments.sizes[4] != 0) {
            store(arguments, written<float>(arguments, 2) + channel, (float)means);
            store(arguments, written<float>(arguments, 2) + channels + channel, (float)variances);
        }
    }
}

// Adds the chunks' sums: writes sums [groups, 2, channels] (second write). Grid: 32 sums each,
// groups.
// sizes: channels, groups, chunks
KERNEL(batch_norm_gradient_sums) {
    const index channels = arguments.sizes[0], chunks = arguments.sizes[2], group = blockIdx.y;
    const float *parts = (const float *)arguments.scratch + group * chunks * 2 * channels;
    const index i = (index)blockIdx.x * 32 + threadIdx.x % 32;
    const double total = chunk_sum(parts, chunks, 2 * channels, i, i < 2 * channels);
    if (threadIdx.x < 32 && i < 2 * channels) {
        written<float>(arguments, 1)[group * 2 * channels + i] = (float)total;
    }
}
