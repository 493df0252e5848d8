// Norms: of rows, a block a row, and the second half of batch normalisation, element by element.

// ---- rows that a block holds in its registers: read once -------------------------------------------------------------------------------

// Packs of a row that a thread has at most.
#define OWN_PACKS 4
enum { PACK_WIDTH = 16 / sizeof(number) };

// Whether rows of so many features are read so: aligned, and no more than a block holds.
__device__ __forceinline__ bool are_held(index features, long_word together) {
    return (together | (long_word)(features * sizeof(number))) % 16 == 0 && features <= (index)OWN_PACKS * PACK_WIDTH * blockDim.x;
}

// f(first number of a pack, its place among the thread's own) for each pack of a row that this thread has.
template <typename F> __device__ __forceinline__ void each_pack(index features, F f) {
#pragma unroll
    for (int own = 0; own < OWN_PACKS; own++) {
        const index first = ((index)own * blockDim.x + threadIdx.x) * PACK_WIDTH;
        if (first < features) {
            f(first, own);
        }
    }
}

__device__ __forceinline__ Pack pack_at(const number *numbers, index first) { return *(const Pack *)(numbers + first); }

// Layer norm, or without a mean and a shift RMS norm, of the row x.
template <bool IS_CENTRED>
__device__ __forceinline__ void norm_held(const Arguments &arguments, index row, index features, float &mean, float &factor) {
    const number *x = read<number>(arguments, 0) + row * features, *scale = read<number>(arguments, 1);
    const number *shift = read<number>(arguments, IS_CENTRED ? 2 : 1);
    number *y = written<number>(arguments, 0) + row * features;
    Pack given[OWN_PACKS];
    float sum = 0.0f, squares = 0.0f;
    each_pack(features, [&](index first, int own) {
        given[own] = pack_at(x, first);
        for (int i = 0; i < PACK_WIDTH; i++) {
            sum += widen(given[own].numbers[i]);
        }
    });
    mean = IS_CENTRED ? block_sum(sum) / (float)features : 0.0f;
    each_pack(features, [&](index, int own) {
        for (int i = 0; i < PACK_WIDTH; i++) {
            const float apart = widen(given[own].numbers[i]) - mean;
            squares += apart * apart;
        }
    });
    factor = 1.0f / sqrtf(block_sum(squares) / (float)features + arguments.numbers[0]);
    each_pack(features, [&](index first, int own) {
        const Pack scales = pack_at(scale, first), shifts = pack_at(shift, first);
        Pack result;
        for (int i = 0; i < PACK_WIDTH; i++) {
            const float hat = (widen(given[own].numbers[i]) - mean) * factor * widen(scales.numbers[i]);
            narrow(result.numbers[i], IS_CENTRED ? hat + widen(shifts.numbers[i]) : hat);
        }
        *(Pack *)(y + first) = result;
    });
}

// The gradient of the row's input.
template <bool IS_CENTRED>
__device__ __forceinline__ void norm_gradient_held(const Arguments &arguments, index row, index features, float mean, float factor) {
    const number *dy = read<number>(arguments, 0) + row * features, *x = read<number>(arguments, 1) + row * features;
    const number *scale = read<number>(arguments, 2);
    number *dx = written<number>(arguments, 0) + row * features;
    float slopes[OWN_PACKS][PACK_WIDTH], hats[OWN_PACKS][PACK_WIDTH], sum = 0.0f, dot = 0.0f;
    each_pack(features, [&](index first, int own) {
        const Pack given = pack_at(dy, first), at = pack_at(x, first), scales = pack_at(scale, first);
        for (int i = 0; i < PACK_WIDTH; i++) {
            slopes[own][i] = widen(given.numbers[i]) * widen(scales.numbers[i]);
            hats[own][i] = (widen(at.numbers[i]) - mean) * factor;
            sum += slopes[own][i];
            dot += slopes[own][i] * hats[own][i];
        }
    });
    sum = IS_CENTRED ? block_sum(sum) / (float)features : 0.0f;
    dot = block_sum(dot) / (float)features;
    each_pack(features, [&](index first, int own) {
        Pack result;
        for (int i = 0; i < PACK_WIDTH; i++) {
            narrow(result.numbers[i], factor * (slopes[own][i] - sum - hats[own][i] * dot));
        }
        *(Pack *)(dx + first) = result;
    });
}

// ---- rows of any length ------------------------------------------------------------------------------------------------------------

// Reads x, scale, shift; writes y, saved. sizes: rows, features; numbers: epsilon
KERNEL(layer_norm) {
    const index features = arguments.sizes[1];
    const number *scale = read<number>(arguments, 1), *shift = read<number>(arguments, 2);
    const long_word together = (long_word)arguments.reads[0] | (long_word)scale | (long_word)shift | (long_word)arguments.writes[0];
    const bool is_held = are_held(features, together);
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        if (is_held) {
            float mean, factor;
            norm_held<true>(arguments, row, features, mean, factor);
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
            const float apart = widen(x[i]) - mean;
            squares += apart * apart;
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
    const long_word together = (long_word)arguments.reads[0] | (long_word)arguments.reads[1] | (long_word)scale | (long_word)arguments.writes[0];
    const bool is_held = are_held(features, together);
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        const number *dy = read<number>(arguments, 0) + row * features, *x = read<number>(arguments, 1) + row * features;
        number *dx = written<number>(arguments, 0) + row * features;
        const float mean = read<float>(arguments, 3)[2 * row], factor = read<float>(arguments, 3)[2 * row + 1];
        if (is_held) {
            norm_gradient_held<true>(arguments, row, features, mean, factor);
            continue;
        }
        float sum = 0.0f, dot = 0.0f;
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            const float slope = widen(dy[i]) * widen(scale[i]);
            sum += slope;
            dot += slope * ((widen(x[i]) - mean) * factor);
        }
        sum = block_sum(sum) / (float)features;
        dot = block_sum(dot) / (float)features;
        for (index i = threadIdx.x; i < features; i += blockDim.x) {
            const float hat = (widen(x[i]) - mean) * factor;
            narrow(dx[i], factor * (widen(dy[i]) * widen(scale[i]) - sum - hat * dot));
        }
    }
}

// Reads x, scale; writes y, saved [rows]. sizes: rows, features; numbers: epsilon
KERNEL(rms_norm) {
    const index features = arguments.sizes[1];
    const number *scale = read<number>(arguments, 1);
    const bool is_held = are_held(features, (long_word)arguments.reads[0] | (long_word)scale | (long_word)arguments.writes[0]);
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        if (is_held) {
            float mean, factor;
            norm_held<false>(arguments, row, features, mean, factor);
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
    const long_word together = (long_word)arguments.reads[0] | (long_word)arguments.reads[1] | (long_word)scale | (long_word)arguments.writes[0];
    const bool is_held = are_held(features, together);
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        const number *dy = read<number>(arguments, 0) + row * features, *x = read<number>(arguments, 1) + row * features;
        number *dx = written<number>(arguments, 0) + row * features;
        const float factor = read<float>(arguments, 3)[row];
        if (is_held) {
            norm_gradient_held<false>(arguments, row, features, 0.0f, factor);
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

// ---- batch normalisation -----------------------------------------------------------------------------------------------------------

// Reads x, scale, shift; its saved is the second write. sizes: elements, channels, elements of a group
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
                      [](const float *of, const float *x) { return (x[0] - of[0]) * of[1] * of[2] + of[3]; });
}

// Reads dy, x, scale, saved; its sums are the second write. sizes: elements, channels, elements of a group, positions
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
    map_columns<2, 5>(arguments, arguments.sizes[0], channels, group, load, [=](const float *of, const float *given) {
        const float hat = (given[1] - of[0]) * of[1];
        return of[2] * (given[0] - (of[3] + hat * of[4]) * share);
    });
}

// Reads sums [groups, 2, channels]; writes dscale, dshift. sizes: groups, channels
KERNEL(batch_norm_weight_gradient) {
    const float *sums = read<float>(arguments, 0);
    const index groups = arguments.sizes[0], channels = arguments.sizes[1];
    for (index channel = this_thread(); channel < channels; channel += all_threads()) {
        double scale = 0.0, shift = 0.0;
        for (index group = 0; group < groups; group++) {
            shift += sums[group * 2 * channels + channel];
            scale += sums[(group * 2 + 1) * channels + channel];
        }
        put(arguments, written<float>(arguments, 0) + channel, (float)scale);
        put(arguments, written<float>(arguments, 1) + channel, (float)shift);
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
                      [](const float *of, const float *x) { return (x[0] - of[0]) * of[1] * of[2] + of[3]; });
}

// Reads statistics; writes running. sizes: elements; numbers: contributions
KERNEL(running_statistics) {
    const float *statistics = read<float>(arguments, 0);
    float *running = written<float>(arguments, 0);
    for (index i = this_thread(); i < arguments.sizes[0]; i += all_threads()) {
        running[i] = 0.9f * running[i] + 0.1f * statistics[i] / arguments.numbers[0];
    }
}
