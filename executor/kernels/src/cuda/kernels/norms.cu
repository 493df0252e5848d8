// Layer norm and RMS norm, one block for each row; and batch norm after its statistics,
// elementwise.

// ---- rows that a block holds in registers, so that they are read once ----

// Most packs of a row for each thread.
#define MAX_PACKS 4
enum { PACK_WIDTH = 16 / sizeof(number) };

// Returns whether rows are aligned, and fit the registers of a block.
__device__ __forceinline__ bool fits_registers(index features, long_word addresses) {
    return (addresses | (long_word)(features * sizeof(number))) % 16 == 0 && features <= (index)MAX_PACKS * PACK_WIDTH * blockDim.x;
}

// Calls f(first feature, index) for each pack of a row that this thread holds.
template <typename F> __device__ __forceinline__ void each_pack(index features, F f) {
#pragma unroll
    for (int index_in_thread = 0; index_in_thread < MAX_PACKS; index_in_thread++) {
        const index first = ((index)index_in_thread * blockDim.x + threadIdx.x) * PACK_WIDTH;
        if (first < features) {
            f(first, index_in_thread);
        }
    }
}

__device__ __forceinline__ Pack pack_at(const number *numbers, index first) { return *(const Pack *)(numbers + first); }

// Layer norm of a row; RMS norm, without mean and shift, if not IS_CENTRED.
template <bool IS_CENTRED>
__device__ __forceinline__ void norm_in_registers(const Arguments &arguments, index row, index features, float &mean, float &factor) {
    const number *x = read<number>(arguments, 0) + row * features, *scale = read<number>(arguments, 1);
    const number *shift = read<number>(arguments, IS_CENTRED ? 2 : 1);
    number *y = written<number>(arguments, 0) + row * features;
    Pack given[MAX_PACKS];
    float sum = 0.0f, squares = 0.0f;
    each_pack(features, [&](index first, int index_in_thread) {
        given[index_in_thread] = pack_at(x, first);
        for (int i = 0; i < PACK_WIDTH; i++) {
            sum += widen(given[index_in_thread].numbers[i]);
        }
    });
    mean = IS_CENTRED ? block_sum(sum) / (float)features : 0.0f;
    each_pack(features, [&](index, int index_in_thread) {
        for (int i = 0; i < PACK_WIDTH; i++) {
            const float deviation = widen(given[index_in_thread].numbers[i]) - mean;
            squares += deviation * deviation;
        }
    });
    factor = 1.0f / sqrtf(block_sum(squares) / (float)features + arguments.numbers[0]);
    each_pack(features, [&](index first, int index_in_thread) {
        const Pack scales = pack_at(scale, first), shifts = pack_at(shift, first);
        Pack result;
        for (int i = 0; i < PACK_WIDTH; i++) {
            const float normalised = (widen(given[index_in_thread].numbers[i]) - mean) * factor * widen(scales.numbers[i]);
            narrow(result.numbers[i], IS_CENTRED ? normalised + widen(shifts.numbers[i]) : normalised);
        }
        *(Pack *)(y + first) = result;
    });
}

// The gradient of a row's input.
template <bool IS_CENTRED>
__device__ __forceinline__ void norm_gradient_in_registers(const Arguments &arguments, index row, index features, float mean, float factor) {
    const number *dy = read<number>(arguments, 0) + row * features, *x = read<number>(arguments, 1) + row * features;
    const number *scale = read<number>(arguments, 2);
    number *dx = written<number>(arguments, 0) + row * features;
    float gradients[MAX_PACKS][PACK_WIDTH], normalised[MAX_PACKS][PACK_WIDTH], sum = 0.0f, dot = 0.0f;
    each_pack(features, [&](index first, int index_in_thread) {
        const Pack given = pack_at(dy, first), at = pack_at(x, first), scales = pack_at(scale, first);
        for (int i = 0; i < PACK_WIDTH; i++) {
            gradients[index_in_thread][i] = widen(given.numbers[i]) * widen(scales.numbers[i]);
            normalised[index_in_thread][i] = (widen(at.numbers[i]) - mean) * factor;
            sum += gradients[index_in_thread][i];
            dot += gradients[index_in_thread][i] * normalised[index_in_thread][i];
        }
    });
    sum = IS_CENTRED ? block_sum(sum) / (float)features : 0.0f;
    dot = block_sum(dot) / (float)features;
    each_pack(features, [&](index first, int index_in_thread) {
        Pack result;
        for (int i = 0; i < PACK_WIDTH; i++) {
            narrow(result.numbers[i], factor * (gradients[index_in_thread][i] - sum - normalised[index_in_thread][i] * dot));
        }
        *(Pack *)(dx + first) = result;
    });
}

// ---- rows of any length ----

// Reads x, scale, shift; writes y, saved [rows, 2] (mean, reciprocal deviation). sizes: rows,
// features; numbers: epsilon
KERNEL(layer_norm) {
    const index features = arguments.sizes[1];
    const number *scale = read<number>(arguments, 1), *shift = read<number>(arguments, 2);
    const long_word addresses = (long_word)arguments.reads[0] | (long_word)scale | (long_word)shift | (long_word)arguments.writes[0];
    const bool in_registers = fits_registers(features, addresses);
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        if (in_registers) {
            float mean, factor;
            norm_in_registers<true>(arguments, row, features, mean, factor);
            if (threadIdx.x == 0) {
                written<float>(arguments, 1)[2 * row] = mean;
                written<float>(arguments, 1)[2 * row + 1] = factor;
            }
            continue;
        }
        const number *x = read<number>(arguments, 0) + row * features;
        number *y = written<number>(arguments, 0) + row * features;
        float sum = 0.0f;
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            sum += widen(x[i]);
        }
        const float mean = block_sum(sum) / (float)features;
        float squares = 0.0f;
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            const float deviation = widen(x[i]) - mean;
            squares += deviation * deviation;
        }
        const float factor = 1.0f / sqrtf(block_sum(squares) / (float)features + arguments.numbers[0]);
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            narrow(y[i], (widen(x[i]) - mean) * factor * widen(scale[i]) + widen(shift[i]));
        }
        if (threadIdx.x == 0) {
            written<float>(arguments, 1)[2 * row] = mean;
            written<float>(arguments, 1)[2 * row + 1] = factor;
        }
    }
}

// Reads dy, x, scale, saved; writes dx. sizes: rows, features
KERNEL(layer_norm_input_gradient) {
    const index features = arguments.sizes[1];
    const number *scale = read<number>(arguments, 2);
    const long_word addresses = (long_word)arguments.reads[0] | (long_word)arguments.reads[1] | (long_word)scale | (long_word)arguments.writes[0];
    const bool in_registers = fits_registers(features, addresses);
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        const number *dy = read<number>(arguments, 0) + row * features, *x = read<number>(arguments, 1) + row * features;
        number *dx = written<number>(arguments, 0) + row * features;
        const float mean = read<float>(arguments, 3)[2 * row], factor = read<float>(arguments, 3)[2 * row + 1];
        if (in_registers) {
            norm_gradient_in_registers<true>(arguments, row, features, mean, factor);
            continue;
        }
        float sum = 0.0f, dot = 0.0f;
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            const float gradient = widen(dy[i]) * widen(scale[i]);
            sum += gradient;
            dot += gradient * ((widen(x[i]) - mean) * factor);
        }
        sum = block_sum(sum) / (float)features;
        dot = block_sum(dot) / (float)features;
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            const float normalised = (widen(x[i]) - mean) * factor;
            narrow(dx[i], factor * (widen(dy[i]) * widen(scale[i]) - sum - normalised * dot));
        }
    }
}

// Reads x, scale; writes y, saved [rows] (reciprocal root mean square). sizes: rows, features;
// numbers: epsilon
KERNEL(rms_norm) {
    const index features = arguments.sizes[1];
    const number *scale = read<number>(arguments, 1);
    const bool in_registers = fits_registers(features, (long_word)arguments.reads[0] | (long_word)scale | (long_word)arguments.writes[0]);
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        if (in_registers) {
            float mean, factor;
            norm_in_registers<false>(arguments, row, features, mean, factor);
            if (threadIdx.x == 0) {
                written<float>(arguments, 1)[row] = factor;
            }
            continue;
        }
        const number *x = read<number>(arguments, 0) + row * features;
        number *y = written<number>(arguments, 0) + row * features;
        float squares = 0.0f;
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            squares += widen(x[i]) * widen(x[i]);
        }
        const float factor = 1.0f / sqrtf(block_sum(squares) / (float)features + arguments.numbers[0]);
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            narrow(y[i], widen(x[i]) * factor * widen(scale[i]));
        }
        if (threadIdx.x == 0) {
            written<float>(arguments, 1)[row] = factor;
        }
    }
}

// Reads dy, x, scale, saved [rows]; writes dx. sizes: rows, features
KERNEL(rms_norm_input_gradient) {
    const index features = arguments.sizes[1];
    const number *scale = read<number>(arguments, 2);
    const long_word addresses = (long_word)arguments.reads[0] | (long_word)arguments.reads[1] | (long_word)scale | (long_word)arguments.writes[0];
    const bool in_registers = fits_registers(features, addresses);
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        const number *dy = read<number>(arguments, 0) + row * features, *x = read<number>(arguments, 1) + row * features;
        number *dx = written<number>(arguments, 0) + row * features;
        const float factor = read<float>(arguments, 3)[row];
        if (in_registers) {
            norm_gradient_in_registers<false>(arguments, row, features, 0.0f, factor);
            continue;
        }
        float dot = 0.0f;
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            dot += widen(dy[i]) * widen(scale[i]) * (widen(x[i]) * factor);
        }
        dot = block_sum(dot) / (float)features;
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            narrow(dx[i], factor * (widen(dy[i]) * widen(scale[i]) - widen(x[i]) * factor * dot));
        }
    }
}

// ---- batch norm ----

// Reads x, scale, shift, and the saved statistics, which are the second write; writes y.
// sizes: elements, channels, elements of a group
KERNEL(batch_norm) {
    const index channels = arguments.sizes[1], group = arguments.sizes[2];
    const number *scale = read<number>(arguments, 1), *shift = read<number>(arguments, 2);
    const float *saved = written<float>(arguments, 1);
    const auto load = [=](index of, index channel, float *constants) {
        constants[0] = saved[of * 2 * channels + channel];
        constants[1] = saved[(of * 2 + 1) * channels + channel];
        constants[2] = widen(scale[channel]);
        constants[3] = widen(shift[channel]);
    };
    map_columns<1, 4>(arguments, arguments.sizes[0], channels, group, load,
                      [](const float *constants, const float *x) { return (x[0] - constants[0]) * constants[1] * constants[2] + constants[3]; });
}

// Reads dy, x, scale, saved, and the sums, which are the second write; writes dx.
// sizes: elements, channels, elements of a group, positions
KERNEL(batch_norm_input_gradient) {
    const index channels = arguments.sizes[1], group = arguments.sizes[2];
    const number *scale = read<number>(arguments, 2);
    const float *saved = read<float>(arguments, 3), *sums = written<float>(arguments, 1);
    const float share = 1.0f / (float)arguments.sizes[3];
    const auto load = [=](index of, index channel, float *constants) {
        const index at = of * 2 * channels + channel;
        constants[0] = saved[at];
        constants[1] = saved[at + channels];
        constants[2] = widen(scale[channel]) * saved[at + channels];
        constants[3] = sums[at];
        constants[4] = sums[at + channels];
    };
    map_columns<2, 5>(arguments, arguments.sizes[0], channels, group, load, [=](const float *constants, const float *given) {
        const float normalised = (given[1] - constants[0]) * constants[1];
        return constants[2] * (given[0] - (constants[3] + normalised * constants[4]) * share);
    });
}

// Reads sums [groups, 2, channels]; writes dscale, dshift. sizes: groups, channels
KERNEL(batch_norm_weight_gradient) {
    const float *sums = read<float>(arguments, 0);
    const index groups = arguments.sizes[0], channels = arguments.sizes[1];
    for (index channel = thread_index(); channel < channels; channel += thread_count()) {
        double scale = 0.0, shift = 0.0;
        for (index group = 0; group < groups; group++) {
            shift += sums[group * 2 * channels + channel];
            scale += sums[(group * 2 + 1) * channels + channel];
        }
        store(arguments, written<float>(arguments, 0) + channel, (float)scale);
        store(arguments, written<float>(arguments, 1) + channel, (float)shift);
    }
}

// Reads x, scale, shift, running [2, channels]; writes y. sizes: elements, channels
KERNEL(batch_norm_inference) {
    const index channels = arguments.sizes[1];
    const number *scale = read<number>(arguments, 1), *shift = read<number>(arguments, 2);
    const float *running = read<float>(arguments, 3);
    const auto load = [=](index, index channel, float *constants) {
        constants[0] = running[channel];
        constants[1] = 1.0f / sqrtf(running[channels + channel] + 1e-5f);
        constants[2] = widen(scale[channel]);
        constants[3] = widen(shift[channel]);
    };
    map_columns<1, 4>(arguments, arguments.sizes[0], channels, arguments.sizes[0], load,
                      [](const float *constants, const float *x) { return (x[0] - constants[0]) * constants[1] * constants[2] + constants[3]; });
}

// Updates running statistics with momentum 0.1. Reads statistics; writes running. sizes: elements;
// numbers: contributions that the statistics sum over
KERNEL(running_statistics) {
    const float *statistics = read<float>(arguments, 0);
    float *running = written<float>(arguments, 0);
    for (index i = thread_index(); i < arguments.sizes[0]; i += thread_count()) {
        running[i] = 0.9f * running[i] + 0.1f * statistics[i] / arguments.numbers[0];
    }
}
