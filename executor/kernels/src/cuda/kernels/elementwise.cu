// Elementwise kernels. sizes: elements, then what the kernel documents

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

KERNEL(relu) {
    map_elements<1>(arguments, arguments.sizes[0], [](index, const float *x) { return x[0] > 0.0f ? x[0] : 0.0f; });
}

KERNEL(relu_gradient) {
    map_elements<2>(arguments, arguments.sizes[0], [](index, const float *x) { return x[1] > 0.0f ? x[0] : 0.0f; });
}

KERNEL(add) {
    map_elements<2>(arguments, arguments.sizes[0], [](index, const float *x) { return x[0] + x[1]; });
}

KERNEL(multiply) {
    map_elements<2>(arguments, arguments.sizes[0], [](index, const float *x) { return x[0] * x[1]; });
}

// numbers: factor
KERNEL(scale) {
    const float factor = arguments.numbers[0];
    map_elements<1>(arguments, arguments.sizes[0], [=](index, const float *x) { return x[0] * factor; });
}

KERNEL(gelu) {
    map_elements<1>(arguments, arguments.sizes[0], [](index, const float *x) { return tanh_gelu(x[0]); });
}

KERNEL(gelu_gradient) {
    map_elements<2>(arguments, arguments.sizes[0], [](index, const float *x) { return x[0] * tanh_gelu_derivative(x[1]); });
}

__device__ __forceinline__ float normal(float x) { return 0.5f * erfcf(-0.7071067811865476f * x); }

KERNEL(gelu_exact) {
    map_elements<1>(arguments, arguments.sizes[0], [](index, const float *x) { return x[0] * normal(x[0]); });
}

KERNEL(gelu_exact_gradient) {
    map_elements<2>(arguments, arguments.sizes[0], [](index, const float *given) {
        const float x = given[1];
        return given[0] * (normal(x) + x * 0.3989422804014327f * expf(-0.5f * x * x));
    });
}

KERNEL(silu_multiply) {
    map_elements<2>(arguments, arguments.sizes[0], [](index, const float *x) { return x[0] * sigmoid(x[0]) * x[1]; });
}

// Reads dy, gate, x; writes dgate, which may be dy, and dx.
KERNEL(silu_multiply_gradient) {
    const number *dy = read<number>(arguments, 0), *gate = read<number>(arguments, 1), *x = read<number>(arguments, 2);
    number *dgate = written<number>(arguments, 0), *dx = written<number>(arguments, 1);
    for (index i = thread_index(); i < arguments.sizes[0]; i += thread_count()) {
        const float gradient = widen(dy[i]), at = widen(gate[i]), open = sigmoid(at);
        const float other = widen(x[i]);
        narrow(dgate[i], gradient * other * open * (1.0f + at * (1.0f - open)));
        narrow(dx[i], gradient * at * open);
    }
}

// sizes: elements, columns
KERNEL(bias_add) {
    const number *bias = read<number>(arguments, 1);
    const index columns = arguments.sizes[1];
    map_columns<1, 1>(
        arguments, arguments.sizes[0], columns, arguments.sizes[0],
        [=](index, index column, float *constants) { constants[0] = widen(bias[column]); },
        [](const float *constants, const float *x) { return x[0] + constants[0]; });
}

// sizes: elements, elements of a sample on this rank, position of the first of these in its sample,
// index of this rank's first sample, site, threshold, features, zigzag order
// numbers: factor on what is kept
KERNEL(dropout) {
    const index row = arguments.sizes[1], first = arguments.sizes[2], sample = arguments.sizes[3];
    const word threshold = (word)arguments.sizes[5];
    const float scale = arguments.numbers[0];
    const index features = arguments.sizes[6], ranks = arguments.sizes[7], chunk = arguments.sizes[8];
    const long_word key = site_key(arguments.step, arguments.sizes[4]);
    map_elements<1>(arguments, arguments.sizes[0], [=](index i, const float *x) {
        index at = first + i % row;
        if (chunk != 0) {
            at = position_at(at / features, ranks, chunk) * features + at % features;
        }
        const long_word position = (long_word)at;
        const long_word own = split_mix(split_mix(key ^ (long_word)(sample + i / row)) ^ (position >> 32));
        return is_kept((word)position, own, threshold) ? x[0] * scale : 0.0f;
    });
}

// ---- single precision in every run ----

KERNEL(accumulate) {
    const float *x = read<float>(arguments, 0);
    float *y = written<float>(arguments, 0);
    for (index i = thread_index(); i < arguments.sizes[0]; i += thread_count()) {
        y[i] += x[i];
    }
}

// sizes: elements, parts
KERNEL(average) {
    float *y = written<float>(arguments, 0);
    const float parts = (float)arguments.sizes[1];
    for (index i = thread_index(); i < arguments.sizes[0]; i += thread_count()) {
        y[i] /= parts;
    }
}

KERNEL(difference) {
    const float *a = read<float>(arguments, 0), *b = read<float>(arguments, 1);
    float *y = written<float>(arguments, 0);
    for (index i = thread_index(); i < arguments.sizes[0]; i += thread_count()) {
        y[i] = a[i] - b[i];
    }
}

KERNEL(narrow_elements) {
    const float *x = read<float>(arguments, 0);
    number *y = written<number>(arguments, 0);
    for (index i = thread_index(); i < arguments.sizes[0]; i += thread_count()) {
        narrow(y[i], x[i]);
    }
}
