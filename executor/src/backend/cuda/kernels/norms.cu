// Norms: of rows, a block a row, and the second half of batch normalisation, element by element.

// Reads x, scale, shift; writes y, saved. sizes: rows, features; numbers: epsilon
KERNEL(layer_norm) {
    const index features = arguments.sizes[1];
    const number *scale = read<number>(arguments, 1), *shift = read<number>(arguments, 2);
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
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
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        const number *dy = read<number>(arguments, 0) + row * features, *x = read<number>(arguments, 1) + row * features;
        number *dx = written<number>(arguments, 0) + row * features;
        const float mean = read<float>(arguments, 3)[2 * row], factor = read<float>(arguments, 3)[2 * row + 1];
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
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
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
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        const number *dy = read<number>(arguments, 0) + row * features, *x = read<number>(arguments, 1) + row * features;
        number *dx = written<number>(arguments, 0) + row * features;
        const float factor = read<float>(arguments, 3)[row];
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
