// Images, their channels last: poolings, the columns that make a convolution a product, and what lies around a library's convolution.

// Where a window's pixels are. sizes: images, height, width, channels, out height, out width, size, stride, padding
struct Window {
    index images, height, width, channels, out_height, out_width, size, stride, padding;
};
__device__ __forceinline__ Window window(const Arguments &arguments) {
    const index *sizes = arguments.sizes;
    return Window{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8]};
}

// Reads x; writes y, the places of the largest.
KERNEL(max_pool) {
    const Window w = window(arguments);
    const number *x = read<number>(arguments, 0);
    number *y = written<number>(arguments, 0);
    int *places = written<int>(arguments, 1);
    for (index i = this_thread(); i < w.images * w.out_height * w.out_width * w.channels; i += all_threads()) {
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
                const index place = ((image * w.height + in_row) * w.width + in_column) * w.channels + channel;
                const float value = widen(x[place]);
                if (best < 0 || value > largest) {
                    best = place;
                    largest = value;
                }
            }
        }
        narrow(y[i], largest);
        places[i] = best < 0 ? 0 : (int)best;
    }
}

// Reads dy, places; writes dx: each pixel looks at the windows that it lies in, in their order.
KERNEL(max_pool_gradient) {
    const Window w = window(arguments);
    const number *dy = read<number>(arguments, 0);
    const int *places = read<int>(arguments, 1);
    number *dx = written<number>(arguments, 0);
    const index elements = w.images * w.height * w.width * w.channels;
    for (index i = this_thread(); i < elements; i += all_threads()) {
        const index channel = i % w.channels, column = i / w.channels % w.width;
        const index row = i / w.channels / w.width % w.height, image = i / w.channels / w.width / w.height;
        const index row_end = (row + w.padding) / w.stride, column_end = (column + w.padding) / w.stride;
        const index row_begin = row + w.padding < w.size ? 0 : (row + w.padding - w.size) / w.stride + 1;
        const index column_begin = column + w.padding < w.size ? 0 : (column + w.padding - w.size) / w.stride + 1;
        float sum = 0.0f;
        for (index r = row_begin; r <= row_end && r < w.out_height; r++) {
            for (index c = column_begin; c <= column_end && c < w.out_width; c++) {
                const index at = ((image * w.out_height + r) * w.out_width + c) * w.channels + channel;
                if (places[at] == i) {
                    sum += widen(dy[at]);
                }
            }
        }
        narrow(dx[i], sum);
    }
}

// sizes: indices, elements; only looks
KERNEL(check_positions) {
    const int *places = read<int>(arguments, 1);
    for (index i = this_thread(); i < arguments.sizes[0]; i += all_threads()) {
        is_within(arguments, places[i], arguments.sizes[1], i);
    }
}

// sizes: batch, positions, channels
KERNEL(global_average_pool) {
    const index batch = arguments.sizes[0], positions = arguments.sizes[1], channels = arguments.sizes[2];
    const number *x = read<number>(arguments, 0);
    for (index i = this_thread(); i < batch * channels; i += all_threads()) {
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
    for (index i = this_thread(); i < batch * positions * channels; i += all_threads()) {
        const index at = i / (positions * channels) * channels + i % channels;
        narrow(written<number>(arguments, 0)[i], widen(dy[at]) * share);
    }
}

// What images are moved by: as many channels as sixteen bytes have, or one.
struct One {
    number numbers[1];
};
template <typename Unit>
__device__ __forceinline__ void columns_by(const Window &w, const number *images, number *scratch, index pitch) {
    const int width = sizeof(Unit) / sizeof(number);
    const Unit *x = (const Unit *)images;
    Unit *columns = (Unit *)scratch, zero;
    for (int i = 0; i < width; i++) {
        narrow(zero.numbers[i], 0.0f);
    }
    // Half as wide as other counters, as divisions are: the host makes chunks smaller than that.
    const word units = (word)(w.channels / width), size = (word)w.size, out_height = (word)w.out_height, out_width = (word)w.out_width;
    const word all = (word)(w.images * w.out_height * w.out_width) * size * size * units, row = (word)(pitch / width);
    for (word i = (word)this_thread(); i < all; i += (word)all_threads()) {
        const word unit = i % units, taps = i / units, tap = taps % (size * size), pixel = taps / (size * size);
        const word line = pixel / out_width, image = line / out_height;
        const index in_row = (index)(line % out_height) * w.stride + tap / size - w.padding;
        const index in_column = (index)(pixel % out_width) * w.stride + tap % size - w.padding;
        const bool is_there = in_row >= 0 && in_row < w.height && in_column >= 0 && in_column < w.width;
        columns[pixel * row + tap * units + unit] = is_there ? x[((image * w.height + in_row) * w.width + in_column) * units + unit] : zero;
    }
}

// The pixels under each window in a row: reads x; writes to scratch [images, out_height, out_width, size, size, channels]. The images are
// those of a chunk; sizes 9: the first of them; 10: numbers from a row to the next
KERNEL(window_columns) {
    const Window w = window(arguments);
    const number *x = read<number>(arguments, 0) + arguments.sizes[9] * w.height * w.width * w.channels;
    number *columns = (number *)arguments.scratch;
    if (((long_word)x | (long_word)columns | (long_word)(w.channels * sizeof(number))) % 16 == 0) {
        columns_by<Pack>(w, x, columns, arguments.sizes[10]);
    } else {
        columns_by<One>(w, x, columns, arguments.sizes[10]);
    }
}

template <typename Unit> __device__ __forceinline__ void sums_by(const Window &w, number *images, const float *columns) {
    const int width = sizeof(Unit) / sizeof(number);
    struct alignas(sizeof(float) * width < 16 ? sizeof(float) * width : 16) Singles {
        float numbers[width];
    };
    const Singles *singles = (const Singles *)columns;
    Unit *dx = (Unit *)images;
    const word units = (word)(w.channels / width), height = (word)w.height, along_row = (word)w.width;
    const int size = (int)w.size, stride = (int)w.stride, padding = (int)w.padding;
    const word all = (word)(w.images * w.height * w.width) * units;
    for (word i = (word)this_thread(); i < all; i += (word)all_threads()) {
        const word unit = i % units, place = i / units, line = place / along_row, image = line / height;
        const int row = (int)(line % height) + padding, column = (int)(place % along_row) + padding;
        float sums[width];
        for (int n = 0; n < width; n++) {
            sums[n] = 0.0f;
        }
        for (int r = 0; r < size && r <= row; r++) {
            const int down = (row - r) / stride;
            if (down * stride != row - r || down >= w.out_height) {
                continue;
            }
            for (int c = 0; c < size && c <= column; c++) {
                const int along = (column - c) / stride;
                if (along * stride != column - c || along >= w.out_width) {
                    continue;
                }
                const index pixel = (image * w.out_height + down) * w.out_width + along;
                const Singles said = singles[(pixel * size * size + r * size + c) * units + unit];
                for (int n = 0; n < width; n++) {
                    sums[n] += said.numbers[n];
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

// The reverse, of columns in single precision: each pixel sums what windows say of it, in their order. Writes dx.
KERNEL(window_sums) {
    const Window w = window(arguments);
    number *dx = written<number>(arguments, 0) + arguments.sizes[9] * w.height * w.width * w.channels;
    const float *columns = (const float *)arguments.scratch;
    if (((long_word)dx | (long_word)columns | (long_word)(w.channels * sizeof(number))) % 16 == 0) {
        sums_by<Pack>(w, dx, columns);
    } else {
        sums_by<One>(w, dx, columns);
    }
}

// As many numbers in single precision as sixteen bytes hold of the run's.
struct alignas(16) Singles {
    float numbers[16 / sizeof(number)];
};

// Reads x; writes y, in single precision. sizes: numbers
KERNEL(widen_elements) {
    const index width = 16 / sizeof(number), elements = arguments.sizes[0];
    const number *__restrict__ x = read<number>(arguments, 0);
    float *__restrict__ y = written<float>(arguments, 0);
    const bool is_aligned = ((long_word)x | (long_word)y) % 16 == 0;
    const index packs = is_aligned ? elements / width : 0;
    for (index pack = this_thread(); pack < packs; pack += all_threads()) {
        const Pack given = ((const Pack *)x)[pack];
        Singles singles;
#pragma unroll
        for (int i = 0; i < (int)width; i++) {
            singles.numbers[i] = widen(given.numbers[i]);
        }
        ((Singles *)y)[pack] = singles;
    }
    for (index i = packs * width + this_thread(); i < elements; i += all_threads()) {
        y[i] = widen(x[i]);
    }
}

// Reads x, in single precision; writes y, which may accumulate. sizes: rows, numbers of a row, numbers from a row of x to the next
KERNEL(copy_rows) {
    const index columns = arguments.sizes[1], pitch = arguments.sizes[2], elements = arguments.sizes[0] * columns;
    const float *__restrict__ x = read<float>(arguments, 0);
    float *__restrict__ y = written<float>(arguments, 0);
    for (index i = this_thread(); i < elements; i += all_threads()) {
        const float brought = x[i / columns * pitch + i % columns];
        y[i] = arguments.accumulate ? y[i] + brought : brought;
    }
}
