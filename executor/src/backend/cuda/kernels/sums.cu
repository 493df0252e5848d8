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

// The sums of `SUMS` functions of a column's elements over the rows of a chunk, to scratch `[chunk][sum][column]`. `load(column, constants)` says
// what goes with a column, `f(row, constants, reads, sums)` adds what an element has. A block has 64 columns, by as many a thread as one access
// moves where rows are aligned, else by one; the grid is columns by chunks.
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
            for (int place = 0; place < READS; place++) {
                given[place] = *(const Several *)(from[place] + row * stride + column);
            }
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                float x[READS];
                for (int place = 0; place < READS; place++) {
                    x[place] = widen(given[place].numbers[i]);
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
template <int SUMS, int READS, int CONSTANTS, typename L, typename F>
__device__ __forceinline__ void sum_columns(const Arguments &arguments, const number *const (&from)[READS], index stride, index rows,
                                            index columns, index rows_of_chunk, L load, F f) {
    const int width = 16 / sizeof(number);
    long_word together = (long_word)((stride | columns) * sizeof(number));
    for (int place = 0; place < READS; place++) {
        together |= (long_word)from[place];
    }
    if (together % 16 == 0) {
        sum_columns_by<width, SUMS, READS, CONSTANTS>(arguments, from, stride, rows, columns, rows_of_chunk, load, f);
    } else {
        sum_columns_by<1, SUMS, READS, CONSTANTS>(arguments, from, stride, rows, columns, rows_of_chunk, load, f);
    }
}

// sizes: rows, columns, rows of a chunk, elements from a row to the next
KERNEL(column_parts) {
    const number *const from[] = {read<number>(arguments, 0)};
    sum_columns<1, 1, 1>(
        arguments, from, arguments.sizes[3], arguments.sizes[0], arguments.sizes[1], arguments.sizes[2], [](index, float *) {},
        [](index, const float *, const float *x, float *sums) { sums[0] += x[0]; });
}

// Reads dy, x, saved [rows, 2]; sums of dy x̂ and of dy. sizes: rows, features, rows of a chunk
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

// Reads dy, x, saved [rows]. sizes: rows, features, rows of a chunk
KERNEL(rms_norm_weight_parts) {
    const number *const from[] = {read<number>(arguments, 0), read<number>(arguments, 1)};
    const float *saved = read<float>(arguments, 2);
    const index features = arguments.sizes[1];
    sum_columns<1, 2, 1>(
        arguments, from, features, arguments.sizes[0], features, arguments.sizes[2], [](index, float *) {},
        [=](index row, const float *, const float *x, float *sums) { sums[0] += x[0] * (x[1] * saved[row]); });
}

// The sum of parts[chunk * apart + i] over chunks, of 32 neighbouring i by the eight warps of a block together; known to all that have the i.
__device__ __forceinline__ double chunk_sum(const float *parts, index chunks, index apart, index i, bool is_there) {
    __shared__ double sums[8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double own = 0.0;
    if (is_there) {
#pragma unroll 4
        for (index chunk = warp; chunk < chunks; chunk += 8) {
            own += parts[chunk * apart + i];
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

// Sums what the kernels above left; each sum to a write. sizes: chunks, columns, sums; a block for 32 of them
KERNEL(column_sums) {
    const index chunks = arguments.sizes[0], columns = arguments.sizes[1], all = arguments.sizes[2] * columns;
    for (index first = (index)blockIdx.x * 32; first < all; first += (index)gridDim.x * 32) {
        const index i = first + threadIdx.x % 32;
        const double total = chunk_sum((const float *)arguments.scratch, chunks, all, i, i < all);
        if (threadIdx.x < 32 && i < all) {
            put(arguments, written<float>(arguments, (int)(i / columns)) + i % columns, (float)total);
        }
    }
}

// ---- batch normalisation's sums, of groups of rows ---------------------------------------------------------------------------------

// Of sums of a column of a group: the grid's third dimension is groups; scratch [group][chunk][2][channel].
// sizes: positions, channels, rows of a chunk, chunks
template <int READS, int CONSTANTS, typename L, typename F>
__device__ __forceinline__ void sum_groups(const Arguments &arguments, const number *const (&from)[READS], L load, F f) {
    const index positions = arguments.sizes[0], channels = arguments.sizes[1], chunks = arguments.sizes[3];
    Arguments of_group = arguments;
    of_group.scratch = (float *)arguments.scratch + (index)blockIdx.z * chunks * 2 * channels;
    sum_columns<2, READS, CONSTANTS>(of_group, from, channels, positions, channels, arguments.sizes[2], load, f);
}

// Sums of a column's elements, and of their squares, each less the first of the group: so that digits far from zero are kept.
KERNEL(batch_norm_parts) {
    const number *x = read<number>(arguments, 0) + (index)blockIdx.z * arguments.sizes[0] * arguments.sizes[1];
    const number *const from[] = {x};
    sum_groups<1, 1>(
        arguments, from, [=](index column, float *constants) { constants[0] = widen(x[column]); },
        [](index, const float *constants, const float *given, float *sums) {
            const float apart = given[0] - constants[0];
            sums[0] += apart;
            sums[1] += apart * apart;
        });
}

// Reads dy, x, scale, saved.
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

// Writes y (not here), saved, and statistics where there is a third write. sizes: positions, channels, groups, chunks, whether statistics;
// a block for 32 channels
KERNEL(batch_norm_statistics) {
    const number *x = read<number>(arguments, 0);
    float *saved = written<float>(arguments, 1);
    const index positions = arguments.sizes[0], channels = arguments.sizes[1], groups = arguments.sizes[2];
    const index chunks = arguments.sizes[3];
    const double count = (double)positions;
    for (index first = (index)blockIdx.x * 32; first < channels; first += (index)gridDim.x * 32) {
        const index channel = first + threadIdx.x % 32;
        const bool is_there = channel < channels, is_first = is_there && threadIdx.x < 32;
        double means = 0.0, variances = 0.0;
        for (index group = 0; group < groups; group++) {
            const float *parts = (const float *)arguments.scratch + group * chunks * 2 * channels;
            const double sum = chunk_sum(parts, chunks, 2 * channels, channel, is_there);
            const double squares = chunk_sum(parts + channels, chunks, 2 * channels, channel, is_there);
            const double apart = sum / count;
            double spread = squares - sum * apart;
            spread = spread > 0.0 ? spread : 0.0;
            if (is_first) {
                const double mean = widen(x[group * positions * channels + channel]) + apart;
                saved[group * 2 * channels + channel] = (float)mean;
                saved[(group * 2 + 1) * channels + channel] = (float)(1.0 / sqrt(spread / count + 1e-5));
                means += (float)mean;
                variances += spread / (count - 1.0);
            }
        }
        if (is_first && arguments.sizes[4] != 0) {
            put(arguments, written<float>(arguments, 2) + channel, (float)means);
            put(arguments, written<float>(arguments, 2) + channels + channel, (float)variances);
        }
    }
}

// Writes sums [groups, 2, channels]. sizes: channels, groups, chunks; the grid: 32 channels a block, groups
KERNEL(batch_norm_gradient_sums) {
    const index channels = arguments.sizes[0], chunks = arguments.sizes[2], group = blockIdx.y;
    const float *parts = (const float *)arguments.scratch + group * chunks * 2 * channels;
    const index i = (index)blockIdx.x * 32 + threadIdx.x % 32;
    const double total = chunk_sum(parts, chunks, 2 * channels, i, i < 2 * channels);
    if (threadIdx.x < 32 && i < 2 * channels) {
        written<float>(arguments, 1)[group * 2 * channels + i] = (float)total;
    }
}
