// Messages in few bits. A message has chunks: 16-bit numbers, or a factor in single precision and
// 256 signed bytes. Numbers behind the last one are zeros.

// The number to send: x, and with feedback the error that was left last time.
__device__ __forceinline__ float with_error(const float *x, const float *errors, index i, index elements) {
    const float own = i < elements ? x[i] : 0.0f;
    return errors != 0 && i < elements ? own + errors[i] : own;
}

template <typename Half> __device__ __forceinline__ void compress_to_halves(const Arguments &arguments) {
    const index elements = arguments.sizes[0], numbers = arguments.sizes[1];
    const float *x = read<float>(arguments, 0);
    Half *message = written<Half>(arguments, 0);
    float *errors = arguments.sizes[2] != 0 ? written<float>(arguments, 1) : 0;
    for (index i = thread_index(); i < numbers; i += thread_count()) {
        const float number = with_error(x, errors, i, elements);
        Half sent;
        narrow(sent, number);
        message[i] = sent;
        if (errors != 0 && i < elements) {
            errors[i] = number - widen(sent);
        }
    }
}

// Reads numbers; writes a message (, updates errors). sizes: elements, numbers of the message,
// whether there is feedback
KERNEL(compress_bf16) { compress_to_halves<bf16>(arguments); }

// As compress_bf16.
KERNEL(compress_fp16) { compress_to_halves<fp16>(arguments); }

// Reads numbers; writes a message (, updates errors). One block for each chunk, one thread for each
// number. sizes: elements, numbers of the message, whether there is feedback
KERNEL(compress_int8) {
    const int CHUNK = 256;
    __shared__ float largests[CHUNK];
    const index elements = arguments.sizes[0], chunks = arguments.sizes[1] / CHUNK;
    const float *x = read<float>(arguments, 0);
    float *errors = arguments.sizes[2] != 0 ? written<float>(arguments, 1) : 0;
    for (index chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const index i = chunk * CHUNK + threadIdx.x;
        const float number = with_error(x, errors, i, elements);
        // Bits of magnitudes are ordered as the magnitudes are, and NaN is above infinity.
        largests[threadIdx.x] = __uint_as_float(__float_as_uint(number) & 0x7FFFFFFF);
        __syncthreads();
        for (int apart = CHUNK / 2; apart > 0; apart /= 2) {
            if (threadIdx.x < apart) {
                const word one = __float_as_uint(largests[threadIdx.x]);
                const word other = __float_as_uint(largests[threadIdx.x + apart]);
                largests[threadIdx.x] = __uint_as_float(one < other ? other : one);
            }
            __syncthreads();
        }
        const float largest = largests[0];
        __syncthreads();
        const bool is_finite = (__float_as_uint(largest) >> 23) < 255;
        const float factor = is_finite ? largest / 127.0f : __uint_as_float(0x7FC00000);
        const float inverse = is_finite && factor > 0.0f ? 1.0f / factor : 0.0f;
        float code = is_finite ? rintf(number * inverse) : 0.0f;
        code = code < -127.0f ? -127.0f : code > 127.0f ? 127.0f : code;
        char *message = written<char>(arguments, 0) + chunk * (CHUNK + 4);
        ((signed char *)message)[4 + threadIdx.x] = (signed char)(int)code;
        if (threadIdx.x == 0) {
            *(float *)message = factor;
        }
        if (errors != 0 && i < elements) {
            errors[i] = number - code * factor;
        }
    }
}

template <typename Half> __device__ __forceinline__ void add_halves(const Arguments &arguments) {
    const index elements = arguments.sizes[0], sources = arguments.sizes[1], numbers = arguments.sizes[2];
    const Half *messages = read<Half>(arguments, 0);
    float *y = written<float>(arguments, 0);
    for (index i = thread_index(); i < elements; i += thread_count()) {
        float sum = 0.0f;
        for (index source = 0; source < sources; source++) {
            sum += widen(messages[source * numbers + i]);
        }
        y[i] = sum;
    }
}

// Reads messages; writes the sum of their numbers. sizes: elements, messages, numbers of a message
KERNEL(decompress_bf16) { add_halves<bf16>(arguments); }

// As decompress_bf16.
KERNEL(decompress_fp16) { add_halves<fp16>(arguments); }

// As decompress_bf16.
KERNEL(decompress_int8) {
    const index CHUNK = 256;
    const index elements = arguments.sizes[0], sources = arguments.sizes[1];
    const index chunks = arguments.sizes[2] / CHUNK;
    const char *messages = read<char>(arguments, 0);
    float *y = written<float>(arguments, 0);
    for (index i = thread_index(); i < elements; i += thread_count()) {
        float sum = 0.0f;
        for (index source = 0; source < sources; source++) {
            const char *chunk = messages + (source * chunks + i / CHUNK) * (CHUNK + 4);
            sum += (float)((const signed char *)chunk)[4 + i % CHUNK] * *(const float *)chunk;
        }
        y[i] = sum;
    }
}
