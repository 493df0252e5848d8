// Images, channels last: pooling, the column matrix that turns a convolution into a matrix product
// (im2col), and kernels around a library's convolution.

// sizes: images, height, width, channels, out height, out width, size, stride, padding
struct Window {
    index images, height, width, channels, out_height, out_width, size, stride, padding;
};
__device__ __forceinline__ Window window(const Arguments &arguments) {
    const index *sizes = arguments.sizes;
    return Window{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8]};
}

// Reads x; writes y, and the position in x of each window's maximum.
KERNEL(max_pool) {
    const Window w = window(arguments);
    const number *x = read<number>(arguments, 0);
    number *y = written<number>(arguments, 0);
    int *positions = written<int>(arguments, 1);
    for (index i = thread_index(); i < w.images * w.out_height * w.out_width * w.channels; i += thread_count()) {
        const index channel = i % w.channels, column = i / w.channels % w.out_width;
        const index row = i / w.channels / w.out_width % w.out_height, image = i / w.channels / w.out_width / w.out_height;
        index best = -1;
        float largest = -INFINITY;
        for (index r = 0; r < w.size; r++) {
            const index in_row = row * w.stride + r - w.padding;
            for (index c = 0; c < w.size; c++) {
                const index in_column = column * w.stride + c - w.padding;
                if (in_row < 0 || in_row >= w.height || in_column < 0 || in_column >= w.width) {
                    continue;
                }
                const index position = ((image * w.height + in_row) * w.width + in_column) * w.channels + channel;
                const float value = widen(x[position]);
                if (best < 0 || value > largest) {
                    best = position;
                    largest = value;
                }
            }
        }
        narrow(y[i], largest);
        positions[i] = best < 0 ? 0 : (int)best;
    }
}

// Reads dy, positions; writes dx: each pixel sums the windows that contain it, in order.
KERNEL(max_pool_gradient) {
    const Window w = window(arguments);
    const number *dy = read<number>(arguments, 0);
    const int *positions = read<int>(arguments, 1);
    number *dx = written<number>(arguments, 0);
    const index elements = w.images * w.height * w.width * w.channels;
    for (index i = thread_index(); i < elements; i += thread_count()) {
        const index channel = i % w.channels, column = i / w.channels % w.width;
        const index row = i / w.channels / w.width % w.height, image = i / w.channels / w.width / w.height;
        const index row_end = (row + w.padding) / w.stride, column_end = (column + w.padding) / w.stride;
        const index row_begin = row + w.padding < w.size ? 0 : (row + w.padding - w.size) / w.stride + 1;
        const index column_begin = column + w.padding < w.size ? 0 : (column + w.padding - w.size) / w.stride + 1;
        float sum = 0.0f;
        for (index r = row_begin; r <= row_end && r < w.out_height; r++) {
            for (index c = column_begin; c <= column_end && c < w.out_width; c++) {
                const index at = ((image * w.out_height + r) * w.out_width + c) * w.channels + channel;
                if (positions[at] == i) {
                    sum += widen(dy[at]);
                }
            }
        }
        narrow(dx[i], sum);
    }
}

// Reports positions that are out of range; writes nothing. sizes: positions, elements
KERNEL(check_positions) {
    const int *positions = read<int>(arguments, 1);
    for (index i = thread_index(); i < arguments.sizes[0]; i += thread_count()) {
        is_within(arguments, positions[i], arguments.sizes[1], i);
    }
}

// sizes: batch, positions, channels
KERNEL(global_average_pool) {
    const index batch = arguments.sizes[0], positions = arguments.sizes[1], channels = arguments.sizes[2];
    const number *x = read<number>(arguments, 0);
    for (index i = thread_index(); i < batch * channels; i += thread_count()) {
        const number *image = x + i / channels * positions * channels + i % channels;
        double sum = 0.0;
        for (index position = 0; position < positions; position++) {
            sum += widen(image[position * channels]);
        }
        narrow(written<number>(arguments, 0)[i], (float)(sum / (double)positions));
    }
}

// sizes: batch, positions, channels
KERNEL(global_average_pool_gradient) {
    const index batch = arguments.sizes[0], positions = arguments.sizes[1], channels = arguments.sizes[2];
    const number *dy = read<number>(arguments, 0);
    const float share = 1.0f / (float)positions;
    for (index i = thread_index(); i < batch * positions * channels; i += thread_count()) {
        const index at = i / (positions * channels) * channels + i % channels;
        narrow(written<number>(arguments, 0)[i], widen(dy[at]) * share);
    }
}

// A unit of one number, where 16-byte units (`Pack`) are not aligned.
struct One {
    number numbers[1];
};

template <typename Unit>
__device__ __forceinline__ void copy_columns(const Window &w, const number *images, number *scratch, index pitch) {
    const int width = sizeof(Unit) / sizeof(number);
    const Unit *x = (const Unit *)images;
    Unit *columns = (Unit *)scratch, zero;
    for (int i = 0; i < width; i++) {
        narrow(zero.numbers[i], 0.0f);
    }
    // 32-bit counters divide faster. The host splits batches so that they suffice.
    const word units = (word)(w.channels / width), size = (word)w.size, out_height = (word)w.out_height, out_width = (word)w.out_width;
    const word all = (word)(w.images * w.out_height * w.out_width) * size * size * units, row = (word)(pitch / width);
    for (word i = (word)thread_index(); i < all; i += (word)thread_count()) {
        const word unit = i % units, tap_index = i / units, tap = tap_index % (size * size), pixel = tap_index / (size * size);
        const word line = pixel / out_width, image = line / out_height;
        const index in_row = (index)(line % out_height) * w.stride + tap / size - w.padding;
        const index in_column = (index)(pixel % out_width) * w.stride + tap % size - w.padding;
        const bool is_inside = in_row >= 0 && in_row < w.height && in_column >= 0 && in_column < w.width;
        columns[pixel * row + tap * units + unit] = is_inside ? x[((image * w.height + in_row) * w.width + in_column) * units + unit] : zero;
    }
}

// The column matrix of some images: one row for each window. Reads x; writes scratch memory
// [images, out_height, out_width, size, size, channels]. sizes: as for a window, then the first
// image, and the elements from one row to the next
KERNEL(window_columns) {
    const Window w = window(arguments);
    const number *x = read<number>(arguments, 0) + arguments.sizes[9] * w.height * w.width * w.channels;
    number *columns = (number *)arguments.scratch;
    if (((long_word)x | (long_word)columns | (long_word)(w.channels * sizeof(number))) % 16 == 0) {
        copy_columns<Pack>(w, x, columns, arguments.sizes[10]);
    } else {
        copy_columns<One>(w, x, columns, arguments.sizes[10]);
    }
}

template <typename Unit> __device__ __forceinline__ void sum_windows(const Window &w, number *images, const float *columns) {
    const int width = sizeof(Unit) / sizeof(number);
    struct alignas(sizeof(float) * width < 16 ? sizeof(float) * width : 16) Singles {
        float numbers[width];
    };
    const Singles *singles = (const Singles *)columns;
    Unit *dx = (Unit *)images;
    const word units = (word)(w.channels / width), height = (word)w.height, width_in_pixels = (word)w.width;
    const int size = (int)w.size, stride = (int)w.stride, padding = (int)w.padding;
    const word all = (word)(w.images * w.height * w.width) * units;
    for (word i = (word)thread_index(); i < all; i += (word)thread_count()) {
        const word unit = i % units, position = i / units, line = position / width_in_pixels, image = line / height;
        const int row = (int)(line % height) + padding, column = (int)(position % width_in_pixels) + padding;
        float sums[width];
        for (int n = 0; n < width; n++) {
            sums[n] = 0.0f;
        }
        for (int r = 0; r < size && r <= row; r++) {
            const int out_row = (row - r) / stride;
            if (out_row * stride != row - r || out_row >= w.out_height) {
                continue;
            }
            for (int c = 0; c < size && c <= column; c++) {
                const int out_column = (column - c) / stride;
                if (out_column * stride != column - c || out_column >= w.out_width) {
                    continue;
                }
                const index pixel = (image * w.out_height + out_row) * w.out_width + out_column;
                const Singles contribution = singles[(pixel * size * size + r * size + c) * units + unit];
                for (int n = 0; n < width; n++) {
                    sums[n] += contribution.numbers[n];
                }
            }
        }
        Unit result;
        for (int n = 0; n < width; n++) {
            narrow(result.numbers[n], sums[n]);
        }
        dx[i] = result;
    }
}

// The gradient of some images from that of their column matrix, which is in single precision: each
// pixel sums the windows that contain it, in order. Writes dx. sizes: as for a window, then the
// first image
KERNEL(window_sums) {
    const Window w = window(arguments);
    number *dx = written<number>(arguments, 0) + arguments.sizes[9] * w.height * w.width * w.channels;
    const float *columns = (const float *)arguments.scratch;
    if (((long_word)dx | (long_word)columns | (long_word)(w.channels * sizeof(number))) % 16 == 0) {
        sum_windows<Pack>(w, dx, columns);
    } else {
        sum_windows<One>(w, dx, columns);
    }
}

// The numbers of a `Pack`, in single precision.
struct alignas(16) Singles {
    float numbers[16 / sizeof(number)];
};

// Reads x; writes y in single precision. sizes: elements
KERNEL(widen_elements) {
    const index width = 16 / sizeof(number), elements = arguments.sizes[0];
    const number *__restrict__ x = read<number>(arguments, 0);
    float *__restrict__ y = written<float>(arguments, 0);
    const bool is_aligned = ((long_word)x | (long_word)y) % 16 == 0;
    const index packs = is_aligned ? elements / width : 0;
    for (index pack = thread_index(); pack < packs; pack += thread_count()) {
        const Pack given = ((const Pack *)x)[pack];
        Singles singles;
#pragma unroll
        for (int i = 0; i < (int)width; i++) {
            singles.numbers[i] = widen(given.numbers[i]);
        }
        ((Singles *)y)[pack] = singles;
    }
    for (index i = packs * width + thread_index(); i < elements; i += thread_count()) {
        y[i] = widen(x[i]);
    }
}

// Copies single-precision rows to contiguous rows, or adds to them. Reads x; writes y.
// sizes: rows, elements of a row, pitch of x
KERNEL(copy_rows) {
    const index columns = arguments.sizes[1], pitch = arguments.sizes[2], elements = arguments.sizes[0] * columns;
    const float *__restrict__ x = read<float>(arguments, 0);
    float *__restrict__ y = written<float>(arguments, 0);
    for (index i = thread_index(); i < elements; i += thread_count()) {
        const float value = x[i / columns * pitch + i % columns];
        y[i] = arguments.accumulate ? y[i] + value : value;
    }
}
